"""Session of an agent with its leader: one connection, from its challenge to its end, and what was asked for over it.

Each session belongs to one incarnation of the node under one epoch. What a leader asks for is kept here, so it ends with the
session; what is loaded is the agent's (`agent.py`), and stays for the next leader.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from lamina.cluster.beats import BeatThread
from lamina.cluster.credentials import JoinToken, TlsFiles
from lamina.cluster.data_port import split_address
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.leader_search import LeaderMembership
from lamina.cluster.messages import Hello, Welcome
from lamina.cluster.node_registry import SUSPECT_US

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


class LeaderSession(LeaderMembership):
    """An agent's connection to one leader."""

    role = "agent"

    def __init__(self, agent: Member, address: str) -> None:
        super().__init__(address, agent.config.token.own, agent.client_tls)
        self.incarnation = 0
        self.beats: BeatThread | None = None
        self.held: dict[tuple[str, int], int] = {}  #: results that the leader may still need, with their serials
        self.instances: dict[str, str] = {}  #: this agent's name of an instance, by the leader's
        self.jobs: dict[int, int] = {}  #: this agent's number of a job, by the leader's
        self.batches: dict[int, NodeBatch] = {}  #: by the leader's number
        self._agent = agent

    @property
    def is_silent(self) -> bool:
        return self.beats is not None and self.beats.silent_us > SUSPECT_US

    def send(self, *frames: Struct) -> None:
        if self.link is not None:
            self.link.send(*frames)

    def close(self, why: str = "") -> None:
        if self.beats is not None:
            self.beats.stop()
            self.beats = None
        super().close(why)

    def check_epoch(self, cell: str, epoch: int) -> None:
        self._agent.check_epoch(cell, epoch)

    def hello(self, challenge: bytes) -> Hello:
        return self._agent.hello(self._token, challenge, self._nonce)

    def on_welcome(self, link: FrameLink, frame: Welcome) -> None:
        agent, loop = self._agent, asyncio.get_running_loop()
        self.incarnation = frame.incarnation

        def ended(why: str) -> None:
            loop.call_soon_threadsafe(self._on_beats_ended, why)

        self.beats = BeatThread(
            *(link.where, split_address(self.address)[0], agent.client_tls, self._token, agent.config.name, frame.incarnation),
            *(frame.beat_us, frame.fence_us, agent.lag_us, ended),
        )
        self.is_adopted = True
        agent.adopt_session(self)  # before another frame is read: what follows is for this one

    def on_frame(self, frame: Any) -> None:
        self._agent.on_frame(self, frame)

    def on_end(self, why: str) -> None:
        self._agent.on_session_closed(self, why)

    def _on_beats_ended(self, why: str) -> None:
        if self.link is not None:
            self.link.close(f"beats ended: {why}")
