"""Child process and its socket, on the loop's thread.

No child watcher and no thread: the kernel's process descriptor becomes readable when the child ends, on any event loop.
However it ends, `on_end` is called once, after everything the child managed to send; and a child whose socket has ended
is not left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any, cast

import msgspec
from msgspec import Struct

from lamina.ipc.confined_exec import confined_command
from lamina.ipc.confinement import Confinement, clean_environment, process_namespace
from lamina.ipc.event_loop import ImmediateWriter
from lamina.ipc.framing import MAX_FRAME_BYTES, FrameError, FrameReader, StopProcess, pack

log = logging.getLogger("lamina")

_OTHER_HALF_S = 0.2
"""The end of the socket and the end of the process come together, unless a child holds the one open or the kernel the other:
this long is waited for the second."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start, and how to read its frames."""

    module: str  #: started with `python -m`
    reader: Callable[[], FrameReader[Any]]
    environment: Mapping[str, str] = field(default_factory=dict)  #: besides what it inherits, which is little
    confinement: Confinement | None = None  #: walls that the child puts up around itself
    output: int | None = None  #: where it prints to; None: where we do
    cores: tuple[int, ...] = ()  #: it may use; (): those of the thread that starts it
    python: str = ""  #: interpreter of an app's environment, which it becomes behind its walls; "": ours


WARM = "--warm"
"""First argument of a process that is told later what it is: then the descriptor of its socket, and what it imports meanwhile."""


class WarmProcess:
    """A process that was started before it was known what for. It becomes a `ChildProcess`, or is closed."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, fd: int) -> None:
        self.process, self.sock = process, sock
        self._fd = fd  #: the child's end, as the child counts
        self._is_open = True  #: neither taken nor closed

    def take(self) -> bool:
        """Take it, for good; False if it has been taken or closed before."""
        was_open, self._is_open = self._is_open, False
        return was_open

    @classmethod
    def start(cls, module: str, names: list[str]) -> WarmProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command = [sys.executable, "-P", "-m", module, WARM, str(theirs.fileno()), *names]
                return cls(_run(command, theirs, clean_environment(os.environ), None), ours, theirs.fileno())
            except OSError:
                ours.close()
                raise

    def tell(self, setup: Struct, output: int | None) -> None:
        """Tell it what it is, and where it prints to. One that has ended is told nothing: its end is seen like any other."""
        said = msgspec.json.encode(msgspec.structs.replace(setup, fd=self._fd))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.sock, [len(said).to_bytes(4, "little")], [output] if output is not None else [])
            self.sock.sendall(said)

    def close(self) -> None:
        """End it if it has not been taken: it is not needed."""
        if self.take():
            self.sock.close()
            self.process.kill()
            self.process.wait()


def await_setup(sock: socket.socket) -> bytes:
    """In a warm process: what it is told to be. Raises BrokenPipeError if it is not needed."""
    start, fds, *_ = socket.recv_fds(sock, 4, 1)
    for fd in fds:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    left = int.from_bytes(start, "little") if len(start) == 4 else 0
    said = bytearray()
    while len(said) < left and (part := sock.recv(left - len(said))):
        said += part
    if not said or len(said) < left:
        raise BrokenPipeError
    return bytes(said)


SLICE_S = 0.001
"""Of a turn of the loop, for frames of one process: one read may hold tens of thousands of them, and a tenant's code sends what
it likes."""

MAX_UNTAKEN_BYTES = 2 * MAX_FRAME_BYTES
"""Of what it was sent, with more to say: a batch of the largest size, and answers to what it asks."""

LAST_FRAMES = 1_000
"""Of those that were not handled when it ended."""


class ChildProcess(asyncio.Protocol):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        setup: Struct,
        on_frame: Callable[[Any], None],
        on_end: Callable[[], None],
        spec: ProcessSpec,
        warm: WarmProcess | None = None,
    ) -> None:
        """Start it, or tell a warm one what it is. Raises OSError when the machine has no room for another process."""
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = spec.reader()
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._frames: Iterator[Any] | None = None  #: that have been read, and not been handled yet
        self._unread = bytearray()  #: what came behind them
        self._is_waiting = False  #: for the next slice; nothing more is read meanwhile
        self._has_ended = False
        self._is_cut_off = False  #: it spoke nonsense; nothing more is believed
        self._is_connected = True
        self._is_write_blocked = False  #: it has yet to take what it was sent
        self._paced: Iterator[bytes | bytearray] | None = None  #: what is being sent piece by piece
        self._behind = bytearray()  #: what is to be sent after it
        self._timers: list[asyncio.TimerHandle] = []
        self.exited: asyncio.Future[int] = loop.create_future()  #: its exit status, as subprocess counts it
        self.finished: asyncio.Future[None] = loop.create_future()  #: reaped, and its socket closed
        self._process, ours = _start(setup, spec) if warm is None else (warm.process, warm.sock)
        try:
            if warm is not None:
                warm.tell(setup, spec.output)
            self.pid = self._process.pid
            self.own_pid = 1 if _has_namespace(spec) else self.pid  #: as it sees itself
            self._pidfd = _process_descriptor(self._process)
        except OSError:
            ours.close()
            raise
        loop.add_reader(self._pidfd, self._process_ended)
        ours.setblocking(False)
        self._connecting = loop.create_task(loop.create_unix_connection(lambda: self, sock=ours))

    def send(self, wire: bytes | bytearray) -> None:
        if self._paced is not None:
            self._behind += wire
        elif self._transport is None:
            self._early += wire  # said before there is a connection, and no less meant
        elif self._is_connected:
            self._outlet.write(wire)

    def send_paced(self, wires: Iterator[bytes | bytearray]) -> None:
        """Send one piece in a turn of the loop, and no faster than they are taken: others are served in between, and what is
        large is never in a buffer as a whole. What is sent meanwhile comes after the last piece. One at a time."""
        assert self._paced is None, "the pieces before have not been sent yet"
        self._paced = wires
        self._send_piece()

    def _send_piece(self) -> None:
        if self._paced is None or self._transport is None or self._is_write_blocked or not self._is_connected:
            return
        wire = next(self._paced, None)
        if wire is not None:
            self._outlet.write(wire)
            self._loop.call_soon(self._send_piece)
            return
        self._paced = None
        behind, self._behind = self._behind, bytearray()
        if behind:
            self.send(behind)

    def stop(self, grace_s: float) -> None:
        """Ask it to exit after its queue, then SIGTERM, then SIGKILL."""
        if self._transport is None:
            self.kill()
            return
        self.send(pack(StopProcess()))
        self._timers.append(self._loop.call_later(grace_s / 2, self._signal, signal.SIGTERM))
        self._timers.append(self._loop.call_later(grace_s, self.kill))

    def kill(self) -> None:
        """Kill it with all it has started."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self.exited.done():  # until it is reaped its number is its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    # ------------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._outlet = ImmediateWriter(self._transport)
        if self._has_ended:
            self._transport.abort()
        elif self._early:
            self._outlet.write(self._early)
            self._early = bytearray()
        self._send_piece()

    def pause_writing(self) -> None:
        self._is_write_blocked = True

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._send_piece()

    def data_received(self, data: bytes) -> None:
        if self._is_cut_off:
            return
        if self._frames is not None:  # reading is paused, and this had been read before
            self._unread += data
            return
        self._frames = iter(self._reader.feed(data))
        self._handle_frames(perf_counter() + SLICE_S)

    def _handle_frames(self, until_s: float) -> None:
        """Handle frames that were read, as many as a slice has time for; the others have one in the next turn of the loop."""
        assert self._frames is not None
        try:
            for frame in self._frames:
                if not self._has_ended:
                    self._deliver(frame)
                if self._is_write_blocked:
                    self._check_untaken()
                if perf_counter() >= until_s:
                    self._wait_for_slice()
                    return
        except FrameError as error:
            self._cut_off(str(error))
        self._frames = None
        if self._is_waiting:
            self._read_on()

    def _check_untaken(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNTAKEN_BYTES:
            raise FrameError("it asks, and does not take its answers")

    def _wait_for_slice(self) -> None:
        if not self._is_waiting and self._transport is not None:
            self._is_waiting = True
            self._transport.pause_reading()
        self._loop.call_soon(self._next_slice)

    def _next_slice(self) -> None:
        if self._frames is not None:
            self._handle_frames(perf_counter() + SLICE_S)

    def _read_on(self) -> None:
        self._is_waiting = False
        unread, self._unread = bytes(self._unread), bytearray()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if unread:
                self.data_received(unread)

    def _cut_off(self, why: str) -> None:
        """Believe nothing more of it: it does not keep to the protocol."""
        log.error("worker %d is cut off: %s", self.pid, why)
        self._is_cut_off = True
        assert self._transport is not None
        self._transport.abort()

    def _deliver(self, frame: Any) -> None:
        """Hand over a frame. A defect of its receiver is not the child's, whose other frames count."""
        try:
            self._on_frame(frame)
        except FrameError:
            raise
        except Exception:
            log.exception("a frame of process %d could not be handled", self.pid)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_connected = False
        self._paced = None
        self.kill()
        self._on_half_closed()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.kill()  # what it left behind; the number is still its own, for it has not been reaped
        self.exited.set_result(self._process.wait())
        for timer in self._timers:
            timer.cancel()
        self._on_half_closed()

    def _on_half_closed(self) -> None:
        if self.exited.done() and not self._is_connected:
            try:
                self._end()
            finally:  # whatever came of telling it: the stop waits for this
                self.finished.set_result(None)
        else:
            self._timers.append(self._loop.call_later(_OTHER_HALF_S, self._end))

    def _end(self) -> None:
        if self._has_ended:
            return
        if self._frames is not None and not self._is_cut_off:  # what it has said before it ended
            with contextlib.suppress(FrameError):
                for frame in islice(self._frames, LAST_FRAMES):
                    self._deliver(frame)
        self._has_ended = True
        for timer in self._timers:
            timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._on_end()


class ChildProcesses:
    """The children of one owner, until each is reaped."""

    def __init__(self) -> None:
        self._running: set[ChildProcess] = set()

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        setup: Struct,
        on_frame: Callable[[Any], None],
        on_end: Callable[[], None],
        spec: ProcessSpec,
        warm: WarmProcess | None = None,
    ) -> ChildProcess:
        process = ChildProcess(loop, setup, on_frame, on_end, spec, warm)
        self._running.add(process)
        process.finished.add_done_callback(lambda _: self._running.discard(process))
        return process

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    async def wait(self) -> None:
        """Wait until all are reaped, and their sockets closed."""
        if self._running:
            await asyncio.wait([process.finished for process in self._running])


def exit_reason(process: ChildProcess | None) -> str:
    if process is None:
        return "could not be started"
    if not process.exited.done():
        return "closed its connection"
    status = process.exited.result()
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _start(setup: Struct, spec: ProcessSpec) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return _spawn(setup, theirs, spec), ours
        except OSError:
            ours.close()
            raise


def _spawn(setup: Struct, theirs: socket.socket, spec: ProcessSpec) -> subprocess.Popen[bytes]:
    """Start the child on all its cores: it inherits those of this thread, which may be avoiding some."""
    setup = msgspec.structs.replace(setup, fd=theirs.fileno())
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, spec.cores or own)
    try:
        with process_namespace() if _has_namespace(spec) else contextlib.nullcontext():
            return _popen(setup, theirs, spec)
    finally:
        os.sched_setaffinity(0, own)


def _has_namespace(spec: ProcessSpec) -> bool:
    return spec.confinement is not None and spec.confinement.hides_processes


def _popen(setup: Struct, theirs: socket.socket, spec: ProcessSpec) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", spec.module, msgspec.json.encode(setup).decode()]
    if spec.python:
        command = confined_command(spec.confinement or Confinement(), spec.python, command[1:])
    environment = {**clean_environment(os.environ, spec.confinement), **spec.environment}
    return _run(command, theirs, environment, spec.output)


def _run(
    command: list[str], theirs: socket.socket, environment: Mapping[str, str], output: int | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # a Ctrl-C is not for it, and what it starts itself can be ended with it
    )


def _process_descriptor(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


# ------------------------------------------------------------------------------- orphans

_PR_SET_CHILD_SUBREAPER = 36
_KEPT = ("nvidia-cuda-mps",)  #: daemons of the machine that others use too
_ORPHANS_S = 2.0


def adopt_orphans() -> frozenset[int]:
    """Become the parent of whatever processes of ours leave behind: a daemon that a function has made is not lost from sight.

    Returns the children there are by now, which are none of them."""
    _set_subreaper(True)
    return frozenset(pid for pid, _ in _children())


def _set_subreaper(wanted: bool) -> None:
    import ctypes

    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:  # Linux has it
        prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def kill_orphans(others: frozenset[int]) -> int:
    """Kill all processes below this one but `others`, when its own have been stopped; returns how many there were."""
    killed: set[int] = set()
    until_s = time.monotonic() + _ORPHANS_S
    while time.monotonic() < until_s:
        found = [pid for pid, name in _children() if pid not in others and not name.startswith(_KEPT)]
        if not found:
            break
        for pid in found:  # what they have started comes to us when they have ended, and is next
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            killed.add(pid)
        time.sleep(0.01)
    _set_subreaper(False)
    return len(killed)


def _children() -> list[tuple[int, str]]:
    """Children of this process, and what they are called."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
                if int(rest.split()[1]) == os.getpid():
                    found.append((int(entry), name))
    return found
