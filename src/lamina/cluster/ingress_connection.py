"""Connection of a front door to the server that leads: found among all servers there are, kept, and found again.

While its leader is silent the others are asked. What a front door has to say is opaque here (`IngressTraffic`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from lamina.cluster.credentials import JoinToken, TlsFiles, proof
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.leader_search import LeaderMembership, LeaderSearch, Refusal
from lamina.cluster.messages import Beat, IngressHello, IngressTraffic, JoinRefused, LeaseRenewed, MachineLost, Welcome
from lamina.cluster.node_registry import SUSPECT_US
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError

log = logging.getLogger("lamina")

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


class LeaderConnection(LeaderMembership):
    """A front door's connection to one leader."""

    role = "front door"

    def __init__(
        self,
        address: str,
        terms: IngressTerms,
        tls: ssl.SSLContext | None,
        seen: Mapping[str, int],
        on_end: Callable[[LeaderConnection, str], None],
        on_machine_lost: Callable[[str], None],
    ) -> None:
        super().__init__(address, terms.token.own, tls)
        self._on_data: Callable[[bytes], None] | None = None
        self._unread: list[bytes] = []  #: what came before it was known where to
        self._terms, self._seen, self._on_end, self._on_machine_lost = terms, seen, on_end, on_machine_lost
        self._heard_us, self._beat_us, self._beats = clock_us(), 0, 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_silent(self) -> bool:
        return clock_us() - self._heard_us > SUSPECT_US

    def send(self, data: bytes | bytearray) -> None:
        if self.link is not None:
            for start in range(0, len(data), PIECE_BYTES):
                self.link.send(IngressTraffic(bytes(data[start : start + PIECE_BYTES])))

    def deliver_to(self, on_data: Callable[[bytes], None]) -> None:
        """Give what the leader says to this function, from its first word on."""
        self._on_data = on_data
        unread, self._unread = self._unread, []
        for data in unread:
            on_data(data)

    def close(self, why: str = "") -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().close(why)

    def check_epoch(self, cell: str, epoch: int) -> None:
        if epoch <= self._seen.get(cell, 0):
            raise Refusal(f"the server leads in epoch {epoch}; {self._seen[cell]} is known", code="old-epoch")

    def hello(self, challenge: bytes) -> IngressHello:
        terms = self._terms
        said = (terms.name, terms.data_address, terms.owner)
        shown = proof(self._token, "ingress", challenge, self._nonce, *said)
        return IngressHello(terms.name, self._nonce, shown, *said[1:], terms.speaks_grpc)

    def on_welcome(self, link: FrameLink, frame: Welcome) -> None:
        self._heard_us, self._beat_us = clock_us(), frame.beat_us
        self._beat()

    def on_frame(self, frame: Any) -> None:
        self._heard_us = clock_us()
        match frame:
            case IngressTraffic():
                if self._on_data is not None:
                    self._on_data(frame.data)
                else:
                    self._unread.append(frame.data)
            case MachineLost():
                self._on_machine_lost(frame.address)
            case LeaseRenewed():
                pass
            case JoinRefused():
                self.close(frame.message)
            case _:
                raise FrameError(f"{type(frame).__name__} out of turn")

    def on_end(self, why: str) -> None:
        self._on_end(self, why)

    def _beat(self) -> None:
        if self.link is not None and self.link.is_open:
            self._beats += 1
            self.link.send(Beat(self._beats, 0, 0))
            self._timer = asyncio.get_running_loop().call_later(self._beat_us / 1e6, self._beat)


class IngressConnection:
    """Membership of a front door. Built complete; `run` is its life."""

    def __init__(self, terms: IngressTerms, owner: OnLeader) -> None:
        self.leader: LeaderConnection | None = None
        self._owner = owner
        tls = terms.tls.for_client()
        self._epochs: dict[str, int] = {}  #: highest seen, by cell: of a leader that was left, none but a later one is taken
        self._wake = asyncio.Event()
        told = self._on_end, owner.on_machine_lost
        self._search = LeaderSearch(
            terms.joins, lambda address: LeaderConnection(address, terms, tls, self._epochs, *told), lambda: self._has_leader
        )

    async def run(self) -> None:
        """Join, and join again. While the leader is silent the others are asked: one may lead by now."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                found = await self._search.find()
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
