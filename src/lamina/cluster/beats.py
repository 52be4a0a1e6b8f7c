"""Beats of an agent: a thread that says every 100 ms that this machine lives, and hears that its leader does.

It has a connection and a thread of its own: an event loop that is busy for a second, or a large frame on its way, must not look
like a dead machine. What it knows besides is how late the loop is, which it tells the leader, and when the leader was last
heard: after `fence_us` of silence the agent starts nothing more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

from lamina.cluster.credentials import proof
from lamina.cluster.messages import Beat, BeatHello, Challenge, JoinRefused, LeaseRenewed, to_agent_reader
from lamina.errors import LaminaError
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError, pack

CONNECT_S = 2.0


class BeatThread:
    """Beats of one incarnation. `on_end` is called, from the thread, when there can be no more of them."""

    def __init__(
        self,
        where: tuple[str, int],
        name: str,
        tls: ssl.SSLContext | None,
        token: bytes,
        node: str,
        incarnation: int,
        beat_us: int,
        fence_us: int,
        lag_us: Callable[[], int],
        on_end: Callable[[str], None],
    ) -> None:
        """`where` is the address that the frames go to: its `name`, which its certificate has too, may be another's by now."""
        self.heard_us = clock_us()  #: when the leader was last heard
        self.rtt_us = 0
        self._where, self._name, self._tls, self._token = where, name, tls, token
        self._node, self._incarnation = node, incarnation
        self._beat_us, self._fence_us = beat_us, fence_us
        self._lag_us, self._on_end = lag_us, on_end
        self._stop_fd, self._wake_fd = os.pipe()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    @property
    def silent_us(self) -> int:
        """How long the leader was not heard."""
        return clock_us() - self.heard_us

    @property
    def is_fenced(self) -> bool:
        return self.silent_us > self._fence_us

    def stop(self) -> None:
        """End them. The thread ends by itself: it may be waiting for a connection while other leaders are asked."""
        self._is_stopped = True
        os.close(self._wake_fd)

    def _run(self) -> None:
        try:
            with self._connect() as peer:
                self._beat(peer)
            why = ""
        except (OSError, LaminaError) as error:
            why = str(error) or type(error).__name__
        finally:
            os.close(self._stop_fd)
        if not self._is_stopped:
            self._on_end(why)

    def _connect(self) -> socket.socket:
        peer = socket.create_connection(self._where, timeout=CONNECT_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._tls.wrap_socket(peer, server_hostname=self._name) if self._tls is not None else peer

    def _beat(self, peer: socket.socket) -> None:
        reader, nonce = to_agent_reader(), os.urandom(32)
        sent_us: dict[int, int] = {}
        seq, next_us, is_known = 0, 0, False
        peer.setblocking(False)
        out = bytearray()
        while not self._is_stopped:
            now_us = clock_us()
            if is_known and now_us >= next_us:
                seq, next_us = seq + 1, max(next_us + self._beat_us, now_us)
                sent_us[seq] = now_us
                if len(out) < 4_096:  # else the leader reads nothing, and one more would not tell it more
                    out += pack(Beat(seq, self.rtt_us, max(0, self._lag_us()), self.is_fenced, self.silent_us))
            _write(peer, out)
            wait_s = max(0.0, (next_us - clock_us()) / 1e6) if is_known else CONNECT_S
            pending = isinstance(peer, ssl.SSLSocket) and peer.pending()
            watched: list[Any] = [peer, self._stop_fd]
            readable, _, _ = select.select(watched, [peer] if out else [], [], 0 if pending else wait_s)
            if peer not in readable and not pending:
                if not is_known and not readable:
                    raise OSError("the leader does not answer")
                continue
            for frame in reader.feed(_read(peer)):
                if isinstance(frame, Challenge):
                    said = proof(self._token, "beat", frame.nonce, nonce, self._node, self._incarnation)
                    out += pack(BeatHello(self._node, self._incarnation, nonce, said))
                    is_known, next_us, self.heard_us = True, clock_us(), clock_us()
                elif isinstance(frame, LeaseRenewed):
                    self._on_renewed(frame.seq, sent_us)
                elif isinstance(frame, JoinRefused):
                    raise OSError(frame.message)
                else:
                    raise FrameError(f"{type(frame).__name__} where beats are sent")

    def _on_renewed(self, seq: int, sent_us: dict[int, int]) -> None:
        self.heard_us = now_us = clock_us()
        began_us = sent_us.pop(seq, 0)
        if began_us:
            self.rtt_us = now_us - began_us
        for old in [one for one in sent_us if one < seq]:
            del sent_us[old]


def _write(peer: socket.socket, out: bytearray) -> None:
    with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
        while out:
            del out[: peer.send(out)]


def _read(peer: socket.socket) -> bytes:
    try:
        data = peer.recv(65_536)
    except (BlockingIOError, ssl.SSLWantReadError):
        return b""
    if not data:
        raise ConnectionResetError("the leader has closed the connection")
    return data
