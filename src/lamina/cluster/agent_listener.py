"""Agent listener: the leader's port for agents. Handshakes, beats, and what the registry makes of them.

A server that stands by answers too, and says who leads: agents ask all servers they know, and find the one that leads by this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from lamina.cluster.credentials import JoinDenied, JoinToken, TicketKey, TlsFiles, proof, proves
from lamina.cluster.data_port import DataPort, IsCurrent, announced, located
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.messages import (
    PROTOCOL,
    Beat,
    BeatHello,
    Challenge,
    Goodbye,
    Hello,
    IngressHello,
    IngressTraffic,
    JoinRefused,
    LeaseRenewed,
    WantsToLeave,
    Welcome,
    from_agent_reader,
)
from lamina.cluster.node_registry import BEAT_US, FENCE_US, LOOK_US, NodeChange, NodeRegistry
from lamina.errors import BadValue, LaminaError, NotLeader
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError
from lamina.server.listener import Listener, listen
from lamina.server.memory_budget import address_key
from lamina.types import DeviceSpec

log = logging.getLogger("lamina")

MAX_STRANGERS = 256
"""Connections that have not introduced themselves yet: a hundred agents may come at once, with two each."""

MAX_NODES = 4_096
MAX_FRONTS = 256

FRONT_LOST_US = 10_000_000
"""Silence after which a front door is gone, and the calls of its clients with it. Longer than for a node: nothing is to be run
elsewhere, and clients wait."""

TOLD_US = 60_000_000
"""Between two log lines on why the same agent is not taken."""

_GIVE_TOKEN = "give leader and agents a token: `openssl rand -hex 32` makes one"


_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Id of a device on its node. Without a dot: that is between the node and it, and no two nodes have a device of one name."""

MAX_UNITS = 4_096
MAX_MEMORY_MIB = 2**30


def _makes_sense(device: DeviceSpec) -> bool:
    """Whether a device can be what its agent says. Policies reckon with these figures."""
    limits = device.limits
    counts = 0 < device.units <= MAX_UNITS and 0 <= device.cores <= MAX_UNITS and 0 <= device.memory_mib <= MAX_MEMORY_MIB
    sizes = len(limits.sizes) <= MAX_UNITS and all(0 < size <= device.units for size in limits.sizes)
    rates = (device.price_per_s, device.core_price_per_s, device.link_mib_per_s, float(device.link_latency_us))
    return (
        bool(_DEVICE.fullmatch(device.id))
        and 0 < len(device.kind) <= 64
        and device.kind.isprintable()
        and counts
        and sizes
        and 0 <= limits.batches_per_instance <= MAX_UNITS
        and all(0 <= rate < 1e9 for rate in rates)  # NaN is neither
    )


class ListenForAgents(Struct, frozen=True, kw_only=True):
    """Where and how a leader listens for agents. The data port is the next one after it, unless the system chooses both."""

    host: str
    port: int
    token: JoinToken = JoinToken()
    tls: TlsFiles = TlsFiles()
    advertise: str = ""  #: host that agents reach it by, if that is not where it listens


class Node(Protocol):
    """The leader's end of one incarnation."""

    node: str
    incarnation: int

    def on_frame(self, frame: Any) -> None: ...


OpenNode = Callable[[FrameLink, Hello, int, TicketKey, str], Node]
"""Makes the leader's end of a new incarnation: its link, what it said, its number, the key of tickets, where values are here."""


class IngressPeer(Protocol):
    """The gateway's end of a front door on another machine."""

    def on_data(self, data: bytes) -> None: ...

    def on_lost(self) -> None: ...


OpenIngress = Callable[[FrameLink, IngressHello, TicketKey, str], IngressPeer]
"""Makes the gateway's end of a front door: its link, what it said, the key of tickets, where values are here."""


@dataclass(slots=True)
class _Front:
    peer: IngressPeer
    heard_us: int


class AgentListener:
    """Listener of one server. `open_node` is called for each agent that is taken, `on_change` for every change of a node."""

    def __init__(self, config: ListenForAgents, open_node: OpenNode, on_change: Callable[[NodeChange], None]) -> None:
        self.registry = NodeRegistry()
        self.port = 0
        self.epoch = 0  #: in which this server leads; 0: it does not
        self.cell = ""
        self._config = config
        self._open_node, self._on_change = open_node, on_change
        self._refusal: Callable[[], LaminaError] = lambda: NotLeader("this server does not lead yet", leader="")
        self._keys: dict[bytes, TicketKey] = {}  #: of this epoch, by the token that machines have joined with
        self._listener: Listener | None = None
        self._data_port: DataPort | None = None
        self._strangers: dict[FrameLink, bytes] = {}  #: with the number that each must prove the token for
        self._links: dict[FrameLink, tuple[str, int]] = {}  #: node and incarnation
        self._beats: dict[FrameLink, tuple[str, int]] = {}
        self._nodes: dict[tuple[str, int], Node] = {}
        self._fronts: dict[FrameLink, _Front] = {}
        self._open_ingress: OpenIngress | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._told_us: dict[tuple[str, str], int] = {}  #: when it was last logged why an agent at that place is not taken
        self._is_closed = False

    @property
    def data_address(self) -> str:
        port = self._data_port.port if self._data_port is not None else 0
        return announced(self._config.advertise or self._config.host, port)

    async def start(self, folder: str, is_current: IsCurrent = lambda owner, slot, serial: True) -> None:
        """Listen. `folder` is where the slots of this server are, `is_current` says which values are there."""
        config = self._config
        port = config.port + 1 if config.port else 0
        self._data_port = DataPort(folder, config.host, port, config.tls.for_server(), is_current, only_own=not config.token)
        try:
            self._listener = await listen(self._new_link, config.host, config.port, ssl=config.tls.for_server())
        except OSError:
            self._data_port.close()
            raise
        self.port = self._listener.port
        self._look()

    def lead(self, cell: str, epoch: int) -> None:
        """Take agents from now on, under this epoch."""
        self.cell, self.epoch = cell, epoch
        self._keys.clear()
        for token in self._config.token.accepted or (b"",):
            self._key(token)

    def _key(self, token: bytes) -> TicketKey:
        """Key of tickets for machines that have joined with this token. Those of tokens that have been taken back stay: machines
        that have joined stay too."""
        if token not in self._keys:
            self._keys[token] = TicketKey(token, self.cell, self.epoch)
            if self._data_port is not None:
                self._data_port.set_keys(*self._keys.values())
        return self._keys[token]

    def accept_ingress(self, open_ingress: OpenIngress) -> None:
        """Take front doors of other machines too."""
        self._open_ingress = open_ingress

    def stand_by(self, refusal: Callable[[], LaminaError]) -> None:
        """Another server leads: agents are told so, and those that are here are let go."""
        self.epoch = 0
        self._refusal = refusal
        if self._data_port is not None:
            self._data_port.set_keys()
        for link, (node, incarnation) in list(self._links.items()):
            self._report(self.registry.lose(clock_us(), node, incarnation, "this server stands by"))
            link.close("this server stands by")
        for link in list(self._fronts):
            link.close("this server stands by")

    def tell_fronts(self, frame: Struct) -> None:
        for link in list(self._fronts):
            link.send(frame)

    def drain(self, node: str) -> bool:
        """Begin to drain a node; False if there is none that could be."""
        changes = self.registry.drain(clock_us(), node)
        self._report(changes)
        return bool(changes)

    def lose(self, node: str, incarnation: int, reason: str) -> None:
        self._report(self.registry.lose(clock_us(), node, incarnation, reason))

    def close(self) -> None:
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._data_port is not None:
            self._data_port.close()
        for link in [*self._strangers, *self._links, *self._beats, *self._fronts]:
            link.close("the server ends")

    # -------------------------------------------------------------- connections

    def _new_link(self) -> FrameLink:
        return FrameLink(from_agent_reader(), self._on_open, self._on_frame, self._on_closed)

    def _on_open(self, link: FrameLink) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop_stranger()
        if not self._config.token and link.user not in (0, os.geteuid()):
            self._strangers[link] = b""
            self._refuse(link, JoinDenied("there is no join token, and this is a process of another user", hint=_GIVE_TOKEN))
            return
        nonce = self._strangers[link] = os.urandom(32)
        if not self.epoch:
            self._refuse(link, self._refusal())
            return
        link.send(Challenge(PROTOCOL, nonce, self.epoch, self.cell))

    def _drop_stranger(self) -> None:
        """Make room for a newcomer: the oldest stranger of the address that has the most of them goes."""
        addresses = {link: address_key((link.peer,)) for link in self._strangers}
        crowd, _ = Counter(addresses.values()).most_common(1)[0]
        oldest = next(link for link, address in addresses.items() if address == crowd)
        oldest.close("too many connections that have not introduced themselves")

    def _on_frame(self, link: FrameLink, frame: Any) -> None:
        if link in self._beats:
            self._on_beat(link, frame)
        elif link in self._links:
            self._on_node_frame(link, frame)
        elif link in self._fronts:
            self._on_front_frame(link, frame)
        elif link in self._strangers:
            self._introduce(link, frame)

    def _introduce(self, link: FrameLink, frame: Any) -> None:
        nonce = self._strangers[link]
        try:
            if isinstance(frame, Hello):
                self._take_agent(link, frame, nonce)
            elif isinstance(frame, BeatHello):
                self._take_beats(link, frame, nonce)
            elif isinstance(frame, IngressHello):
                self._take_ingress(link, frame, nonce)
            else:
                raise FrameError(f"{type(frame).__name__} before a hello")
        except FrameError:
            raise
        except LaminaError as error:
            self._note_refusal(link.peer, error.message)
            self._refuse(link, error)

    def _note_refusal(self, peer: str, message: str) -> None:
        """Log why an agent is not taken; not at each of the ten tries that it makes a second."""
        now_us = clock_us()
        if now_us - self._told_us.get((peer, message), -TOLD_US) < TOLD_US:
            return
        if len(self._told_us) >= MAX_STRANGERS:
            self._told_us.clear()
        self._told_us[peer, message] = now_us
        log.warning("an agent at %s is not taken: %s", peer, message)

    def _refuse(self, link: FrameLink, error: LaminaError) -> None:
        leader = error.leader if isinstance(error, NotLeader) else ""
        link.close_after(JoinRefused(error.code, error.message[:4_000], error.hint[:4_000], leader))

    def _take_agent(self, link: FrameLink, hello: Hello, nonce: bytes) -> None:
        if not self.epoch:
            raise self._refusal()
        token = self._proven(hello.proof, "agent", nonce, hello.nonce, hello.node, hello.boot_us)
        if token is None:
            raise JoinDenied(f"node {hello.node!r} does not know the join token", hint="give agent and leader the same token")
        if len(self.registry.nodes) >= MAX_NODES and hello.node not in self.registry.nodes:
            raise BadValue(f"there are {MAX_NODES} nodes", hint="a leader takes no more")
        self._check_devices(hello)
        incarnation, changes = self.registry.hello(clock_us(), hello.node, hello.boot_us, link.peer)
        del self._strangers[link]
        self._links[link] = (hello.node, incarnation)
        link.trust()
        self._report(changes)  # the incarnation before, if there is one, is closed first
        hello = replace(hello, data_address=located(hello.data_address, link.peer))
        self._nodes[hello.node, incarnation] = self._open_node(link, hello, incarnation, self._key(token), self.data_address)
        said = proof(token, "leader", hello.nonce, nonce, self.cell, self.epoch)
        link.send(Welcome(said, self.epoch, self.cell, incarnation, BEAT_US, FENCE_US, self.data_address))

    def _proven(self, given: bytes, role: str, *parts: bytes | str | int) -> bytes | None:
        """The token that this proof is of; None: of none that counts."""
        tokens = self._config.token.accepted or (b"",)
        return next((token for token in tokens if proves(given, token, role, *parts)), None)

    def _check_devices(self, hello: Hello) -> None:
        ids = [device.id for device in hello.devices]
        strays = {one.device for one in hello.loaded} - set(ids)  # such as b.cpu0 of a node "a": a device of node "a.b"
        if strays or len(set(ids)) < len(ids) or not all(map(_makes_sense, hello.devices)):
            raise BadValue(f"node {hello.node!r} announces devices that make no sense", hint="agent and leader of one version?")

    def _take_beats(self, link: FrameLink, hello: BeatHello, nonce: bytes) -> None:
        if self._proven(hello.proof, "beat", nonce, hello.nonce, hello.node, hello.incarnation) is None:
            raise JoinDenied(f"node {hello.node!r} does not know the join token", hint="give agent and leader the same token")
        if not self.registry.is_current(hello.node, hello.incarnation):
            raise BadValue(f"incarnation {hello.incarnation} of node {hello.node!r} is closed", hint="say hello again")
        del self._strangers[link]
        self._beats[link] = (hello.node, hello.incarnation)
        link.trust()
        self._report(self.registry.opened(clock_us(), hello.node, hello.incarnation))

    def _take_ingress(self, link: FrameLink, hello: IngressHello, nonce: bytes) -> None:
        if not self.epoch:
            raise self._refusal()
        token = self._proven(hello.proof, "ingress", nonce, hello.nonce, hello.name, hello.data_address, hello.owner)
        if token is None:
            raise JoinDenied(f"front door {hello.name!r} does not know the join token", hint="give it the token of this server")
        if self._open_ingress is None or len(self._fronts) >= MAX_FRONTS:
            raise BadValue(f"there are {len(self._fronts)} front doors", hint="a leader takes no more")
        del self._strangers[link]
        link.trust()
        said = proof(token, "leader", hello.nonce, nonce, self.cell, self.epoch)
        link.send(Welcome(said, self.epoch, self.cell, 0, BEAT_US, FENCE_US, self.data_address))
        hello = replace(hello, data_address=located(hello.data_address, link.peer))
        self._fronts[link] = _Front(self._open_ingress(link, hello, self._key(token), self.data_address), clock_us())
        log.info("front door %s at %s has joined", hello.name, link.peer)

    def _on_front_frame(self, link: FrameLink, frame: Any) -> None:
        front = self._fronts[link]
        front.heard_us = clock_us()
        if isinstance(frame, IngressTraffic):
            front.peer.on_data(frame.data)
        elif isinstance(frame, Beat):
            link.send(LeaseRenewed(frame.seq))
        else:
            raise FrameError(f"{type(frame).__name__} of a front door")

    def _on_node_frame(self, link: FrameLink, frame: Any) -> None:
        node, incarnation = self._links[link]
        if not self.registry.is_current(node, incarnation):
            link.close("its incarnation is closed")
        elif isinstance(frame, WantsToLeave):
            self.drain(node)
        elif isinstance(frame, Goodbye):
            self._report(self.registry.leave(clock_us(), node, incarnation))
        else:
            self._nodes[node, incarnation].on_frame(frame)

    def _on_beat(self, link: FrameLink, frame: Any) -> None:
        if not isinstance(frame, Beat):
            raise FrameError(f"{type(frame).__name__} where beats are sent")
        node, incarnation = self._beats[link]
        if not self.registry.is_current(node, incarnation):
            link.close("its incarnation is closed")
        elif frame.is_fenced:
            self.lose(node, incarnation, "fenced: it does not hear this server")
        else:
            beat = self.registry.beat(clock_us(), node, incarnation, frame.rtt_us, frame.lag_us, frame.unheard_us)
            self._report(beat)
            link.send(LeaseRenewed(frame.seq))

    def _on_closed(self, link: FrameLink, why: str) -> None:
        self._strangers.pop(link, None)
        self._beats.pop(link, None)  # silence counts, not the end of a connection that nothing else uses
        front = self._fronts.pop(link, None)
        if front is not None:
            log.info("a front door at %s has gone: %s", link.peer, why)
            front.peer.on_lost()
        known = self._links.pop(link, None)
        if known is not None:
            self._report(self.registry.lose(clock_us(), *known, why))

    # ------------------------------------------------------------------- changes

    def _look(self) -> None:
        now_us = clock_us()
        self._report(self.registry.look(now_us))
        for link in [one for one, front in self._fronts.items() if now_us - front.heard_us > FRONT_LOST_US]:
            link.close("silent")
        self._looking = asyncio.get_running_loop().call_later(LOOK_US / 1e6, self._look)

    def _report(self, changes: list[NodeChange]) -> None:
        for change in changes if not self._is_closed else ():
            self._on_change(change)
            if not self.registry.is_current(change.node, change.incarnation):
                self._nodes.pop((change.node, change.incarnation), None)
                for link in [
                    one for one, of in {**self._links, **self._beats}.items() if of == (change.node, change.incarnation)
                ]:
                    self._links.pop(link, None)
                    asyncio.get_running_loop().call_soon(partial(link.close, f"node {change.node} is {change.after.value}"))
