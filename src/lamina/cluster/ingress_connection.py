"""Connection of a front door to the server that leads: found among all servers there are, kept, and found again.

Like an agent, a front door obeys the highest epoch it has seen, asks all servers at once, and asks the others while its leader is
silent. What it has to say is opaque here (`IngressTraffic`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from lamina.cluster.credentials import JoinDenied, JoinToken, TicketKey, TlsFiles, proof, proves
from lamina.cluster.data_port import located, split_address
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.messages import (
    PROTOCOL,
    Beat,
    Challenge,
    IngressHello,
    IngressTraffic,
    JoinRefused,
    LeaseRenewed,
    MachineLost,
    Welcome,
    to_agent_reader,
)
from lamina.cluster.node_registry import SUSPECT_US
from lamina.errors import LaminaError, NotLeader
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError
from lamina.values.references import NodeRef

log = logging.getLogger("lamina")

JOIN_S = 2.0
"""For one try to join, from the connection to the welcome."""

RETRY_S = 0.1
APART_S = 0.05
"""Between two rounds, and between two addresses that are tried one after another."""

PIECE_BYTES = 16 * 2**20
"""Of one frame of traffic."""


class IngressTerms(Struct, frozen=True, kw_only=True):
    """What a front door is: its name, the servers it may join, and where its values lie."""

    name: str
    joins: tuple[str, ...]
    token: JoinToken = JoinToken()
    tls: TlsFiles = TlsFiles()
    data_address: str
    owner: str
    speaks_grpc: bool = False


class OnLeader(Protocol):
    """What a connection tells its owner."""

    def on_joined(self, leader: LeaderConnection) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_machine_lost(self, address: str) -> None: ...

    def on_lost(self, why: str) -> None: ...


class LeaderConnection:
    """One connection to a leader, from its challenge to its end."""

    def __init__(
        self,
        address: str,
        terms: IngressTerms,
        seen: dict[str, int],
        on_end: Callable[[LeaderConnection, str], None],
        on_machine_lost: Callable[[str], None],
    ) -> None:
        self.address, self.epoch, self.cell = address, 0, ""
        self.key: TicketKey | None = None
        self._on_data: Callable[[bytes], None] | None = None
        self._unread: list[bytes] = []  #: what came before it was known where to
        self._terms, self._seen, self._on_end, self._on_machine_lost = terms, seen, on_end, on_machine_lost
        self._host = split_address(address)[0]
        self._token = terms.token.own
        self._nonce, self._challenge = os.urandom(32), b""
        self._link: FrameLink | None = None
        self._heard_us, self._beat_us, self._beats = clock_us(), 0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_silent(self) -> bool:
        return clock_us() - self._heard_us > SUSPECT_US

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """Connect, and be welcomed. Raises `LaminaError` or `OSError`."""
        host, port = split_address(self.address)
        made = await FrameLink.connect(host, port, tls, to_agent_reader(), self._on_frame, self._on_closed)
        self._link = made
        if tls is None:
            self._host = made.peer
        await self._welcomed

    def locate(self, ref: NodeRef) -> NodeRef:
        """A value that the leader has told of; of one that it has itself it may not say where."""
        return replace(ref, address=located(ref.address, self._host))

    def send(self, data: bytes | bytearray) -> None:
        if self._link is not None:
            for start in range(0, len(data), PIECE_BYTES):
                self._link.send(IngressTraffic(bytes(data[start : start + PIECE_BYTES])))

    def deliver_to(self, on_data: Callable[[bytes], None]) -> None:
        """Give what the leader says to this function, from its first word on."""
        self._on_data = on_data
        unread, self._unread = self._unread, []
        for data in unread:
            on_data(data)

    def close(self, why: str = "") -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close(why)

    def _on_frame(self, link: FrameLink, frame: Any) -> None:
        self._heard_us = clock_us()
        match frame:
            case IngressTraffic() if self._welcomed.done():
                if self._on_data is not None:
                    self._on_data(frame.data)
                else:
                    self._unread.append(frame.data)
            case MachineLost() if self._welcomed.done():
                self._on_machine_lost(frame.address)
            case LeaseRenewed() if self._welcomed.done():
                pass
            case Challenge() if not self._challenge:
                self._on_challenge(link, frame)
            case Welcome() if self._challenge and not self._welcomed.done():
                self._on_welcome(link, frame)
            case JoinRefused():
                self._fail(NotLeader(frame.message, leader=frame.leader, hint=frame.hint))
            case _:
                raise FrameError(f"{type(frame).__name__} out of turn")

    def _on_challenge(self, link: FrameLink, frame: Challenge) -> None:
        terms = self._terms
        if frame.protocol != PROTOCOL:
            self._fail(LaminaError(f"the server speaks version {frame.protocol} of the protocol, this front door {PROTOCOL}"))
        elif frame.epoch <= self._seen.get(frame.cell, 0):
            self._fail(NotLeader(f"the server leads in epoch {frame.epoch}; {self._seen[frame.cell]} is known"))
        else:
            self._challenge = frame.nonce
            said = (terms.name, terms.data_address, terms.owner)
            shown = proof(self._token, "ingress", frame.nonce, self._nonce, *said)
            link.send(IngressHello(terms.name, self._nonce, shown, *said[1:], terms.speaks_grpc))

    def _on_welcome(self, link: FrameLink, frame: Welcome) -> None:
        if not proves(frame.proof, self._token, "leader", self._nonce, self._challenge, frame.cell, frame.epoch):
            self._fail(JoinDenied(f"the server at {self.address} does not know the join token", hint="is it the right one?"))
            return
        link.trust()
        self.epoch, self.cell, self._beat_us = frame.epoch, frame.cell, frame.beat_us
        self.key = TicketKey(self._token, frame.cell, frame.epoch)
        self._beat()
        self._welcomed.set_result(None)

    def _beat(self) -> None:
        if self._link is not None and self._link.is_open:
            self._beats += 1
            self._link.send(Beat(self._beats, 0, 0))
            self._timer = asyncio.get_running_loop().call_later(self._beat_us / 1e6, self._beat)

    def _fail(self, error: LaminaError) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(error)
        if self._link is not None:
            self._link.close(error.message)

    def _on_closed(self, link: FrameLink, why: str) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(NotLeader(f"{self.address}: {why}"))
            self._welcomed.exception()  # a try that was given up is not waited for
        else:
            self._on_end(self, why)


class IngressConnection:
    """Membership of a front door. Built complete; `run` is its life."""

    def __init__(self, terms: IngressTerms, owner: OnLeader) -> None:
        self.leader: LeaderConnection | None = None
        self._terms, self._owner = terms, owner
        self._tls = terms.tls.for_client()
        self._epochs: dict[str, int] = {}  #: highest seen, by cell: of a leader that was left, none but a later one is taken
        self._wake = asyncio.Event()
        self._said = ""

    async def run(self) -> None:
        """Join, and join again. While the leader is silent the others are asked: one may lead by now."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                found = await self._find_leader()
                if found is not None:
                    self._adopt(found)
                self._wake.clear()
                if self._has_leader:
                    await self._wake.wait()
        finally:
            watch.cancel()
            if self.leader is not None:
                self.leader.close("the front door ends")

    @property
    def _has_leader(self) -> bool:
        return self.leader is not None and not self.leader.is_silent

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SUSPECT_US / 1e6 / 3)
            if self.leader is not None and self.leader.is_silent:
                self._wake.set()

    def _adopt(self, found: LeaderConnection) -> None:
        before, self.leader = self.leader, found
        if before is not None:
            self._owner.on_lost("another server leads")
            before.close("another server leads")
        self._epochs = {found.cell: found.epoch}
        log.info("joined the server at %s: epoch %d", found.address, found.epoch)
        self._owner.on_joined(found)
        found.deliver_to(self._owner.on_data)

    def _on_end(self, ended: LeaderConnection, why: str) -> None:
        if ended is not self.leader:
            return
        log.warning("the link to the leader at %s has ended: %s", ended.address, why)
        self.leader = None
        ended.close()
        self._epochs = {cell: epoch - 1 for cell, epoch in self._epochs.items()}  # it may be the same one, that was cut off
        self._owner.on_lost(why)
        self._wake.set()

    async def _find_leader(self) -> LeaderConnection | None:
        """The first server that takes this front door; None: its leader has been heard again."""
        said = dict[str, str]()
        tries = [asyncio.create_task(self._knock(one, APART_S * place, said)) for place, one in enumerate(self._terms.joins)]
        try:
            await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tries:
                task.cancel()
        results = await asyncio.gather(*tries, return_exceptions=True)
        found = sorted((one for one in results if isinstance(one, LeaderConnection)), key=lambda one: one.epoch)
        for other in found[:-1]:
            other.close("another leads")
        return found[-1] if found else None

    async def _knock(self, address: str, after_s: float, said: dict[str, str]) -> LeaderConnection | None:
        await asyncio.sleep(after_s)
        while not self._has_leader:
            made = LeaderConnection(address, self._terms, self._epochs, self._on_end, self._owner.on_machine_lost)
            try:
                async with asyncio.timeout(JOIN_S):
                    await made.open(self._tls)
                return made
            except (LaminaError, OSError, TimeoutError) as error:
                made.close()
                self._note_refusal(said, address, error)
            except asyncio.CancelledError:
                made.close()
                raise
            await asyncio.sleep(RETRY_S)
        return None

    def _note_refusal(self, said: dict[str, str], address: str, error: BaseException) -> None:
        """Log why no server takes this front door, once all have been asked, and when that changes."""
        text = error.message if isinstance(error, LaminaError) else str(error) or "no answer"
        said[address] = f"{address}: {text}"
        whole = "; ".join(said.values())
        if len(said) == len(self._terms.joins) and whole != self._said:
            self._said = whole
            log.warning("not joined: %s", whole)
