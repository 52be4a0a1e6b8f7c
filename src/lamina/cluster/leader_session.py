"""Session of an agent with its leader: one connection, from its challenge to its end, and what was asked for over it.

Each session belongs to one incarnation of the node under one epoch. What a leader asks for is kept here, so it ends with the
session; what is loaded is the agent's (`agent.py`), and stays for the next leader.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from lamina.cluster.beats import BeatThread
from lamina.cluster.credentials import JoinDenied, JoinToken, TicketKey, TlsFiles, proves
from lamina.cluster.data_port import located, split_address
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.messages import PROTOCOL, Challenge, Hello, JoinRefused, Welcome, to_agent_reader
from lamina.cluster.node_registry import SUSPECT_US
from lamina.errors import LaminaError
from lamina.ipc.framing import FrameError
from lamina.values.references import NodeRef

if TYPE_CHECKING:
    from lamina.cluster.node_batches import NodeBatch


class AgentConfig(Struct, frozen=True, kw_only=True):
    """What an agent is: its name, the servers it may join, and how others reach its values."""

    name: str
    joins: tuple[str, ...]
    token: JoinToken = JoinToken()
    tls: TlsFiles = TlsFiles()
    host: str = "127.0.0.1"  #: of the data port
    port: int = 0
    advertise: str = ""  #: HOST:PORT that other machines reach the data port by; "": where it listens
    folder: Path  #: for packages, and the highest epoch seen
    trusts_deployers: bool = False  #: code of tenants is taken, and runs as this process' user


class Member(Protocol):
    """The agent, as its sessions need it."""

    config: AgentConfig
    client_tls: ssl.SSLContext | None

    def check_epoch(self, cell: str, epoch: int) -> None: ...

    def hello(self, token: bytes, challenge: bytes, nonce: bytes) -> Hello: ...

    def adopt_session(self, session: LeaderSession) -> None: ...

    def on_session_closed(self, session: LeaderSession, why: str) -> None: ...

    def on_frame(self, session: LeaderSession, frame: Any) -> None: ...

    def lag_us(self) -> int: ...


class LeaderSession:
    """One connection to a leader, from its challenge to its end."""

    def __init__(self, agent: Member, address: str) -> None:
        self.address = address
        self.link: FrameLink | None = None
        self.epoch, self.cell, self.incarnation = 0, "", 0
        self.beats: BeatThread | None = None
        self.key: TicketKey | None = None
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held: dict[tuple[str, int], int] = {}  #: results that the leader may still need, with their serials
        self.instances: dict[str, str] = {}  #: this agent's name of an instance, by the leader's
        self.jobs: dict[int, int] = {}  #: this agent's number of a job, by the leader's
        self.batches: dict[int, NodeBatch] = {}  #: by the leader's number
        self._agent, self._token = agent, agent.config.token.own
        self._nonce, self._challenge = os.urandom(32), b""

    @property
    def is_live(self) -> bool:
        return self.link is not None and self.link.is_open

    @property
    def is_silent(self) -> bool:
        return self.beats is not None and self.beats.silent_us > SUSPECT_US

    def locate(self, ref: NodeRef) -> NodeRef:
        """A value that the leader has told of; of one that it has itself it may not say where."""
        return replace(ref, address=located(ref.address, self._host))

    @property
    def _host(self) -> str:
        """Of the leader: as it has been found, or by the name that its certificate has."""
        link = self.link if self._agent.client_tls is None else None
        return link.peer if link is not None else split_address(self.address)[0]

    def send(self, *frames: Struct) -> None:
        if self.link is not None:
            self.link.send(*frames)

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """Connect, and be welcomed. Raises `LaminaError` or `OSError`."""
        host, port = split_address(self.address)
        made = await FrameLink.connect(host, port, tls, to_agent_reader(), self._on_frame, self._on_closed)
        self.link = made
        await self.welcomed

    def close(self) -> None:
        if self.beats is not None:
            self.beats.stop()
            self.beats = None
        if self.link is not None:
            self.link.close()

    def _on_frame(self, link: FrameLink, frame: Any) -> None:
        if self.welcomed.done():
            self._agent.on_frame(self, frame)
        elif isinstance(frame, Challenge) and not self._challenge:
            self._on_challenge(link, frame)
        elif isinstance(frame, Welcome) and self._challenge:
            self._on_welcome(link, frame)
        elif isinstance(frame, JoinRefused):
            self._fail(Refusal(frame.message, hint=frame.hint, code=frame.code, leader=frame.leader))
        else:
            raise FrameError(f"{type(frame).__name__} before a welcome")

    def _on_challenge(self, link: FrameLink, frame: Challenge) -> None:
        if frame.protocol != PROTOCOL:
            self._fail(
                Refusal(f"the server speaks version {frame.protocol} of the protocol, this agent {PROTOCOL}", code="version")
            )
            return
        try:
            self._agent.check_epoch(frame.cell, frame.epoch)
        except LaminaError as error:
            self._fail(error)
            return
        self._challenge = frame.nonce
        link.send(self._agent.hello(self._token, frame.nonce, self._nonce))

    def _on_welcome(self, link: FrameLink, frame: Welcome) -> None:
        agent = self._agent
        if not proves(frame.proof, self._token, "leader", self._nonce, self._challenge, frame.cell, frame.epoch):
            self._fail(JoinDenied(f"the server at {self.address} does not know the join token", hint="is it the right one?"))
            return
        try:
            agent.check_epoch(frame.cell, frame.epoch)
        except LaminaError as error:
            self._fail(error)
            return
        link.trust()
        self.epoch, self.cell, self.incarnation = frame.epoch, frame.cell, frame.incarnation
        self.key = TicketKey(self._token, frame.cell, frame.epoch)
        loop = asyncio.get_running_loop()

        def ended(why: str) -> None:
            loop.call_soon_threadsafe(self._on_beats_ended, why)

        self.beats = BeatThread(
            *(link.where, split_address(self.address)[0], agent.client_tls, self._token, agent.config.name, frame.incarnation),
            *(frame.beat_us, frame.fence_us, agent.lag_us, ended),
        )
        agent.adopt_session(self)  # before another frame is read: what follows is for this one
        self.welcomed.set_result(None)

    def _on_beats_ended(self, why: str) -> None:
        if self.link is not None:
            self.link.close(f"beats ended: {why}")

    def _fail(self, error: LaminaError) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(error)
        if self.link is not None:
            self.link.close(error.message)

    def _on_closed(self, link: FrameLink, why: str) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(Refusal(f"{self.address}: {why}", code="closed"))
            self.welcomed.exception()  # a try that was given up is not waited for
        else:
            self._agent.on_session_closed(self, why)


class Refusal(LaminaError):
    """A server that did not take this agent."""

    status = 403

    def __init__(self, message: str, *, hint: str = "", code: str = "refused", leader: str = "") -> None:
        super().__init__(message, hint=hint)
        self.why, self.leader = code, leader
