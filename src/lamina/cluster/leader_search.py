"""Search for the server that leads, and the handshake with it: of agents, and of front doors on other machines.

Whichever it is obeys the highest epoch it has seen. It asks all servers at once, each again and again and apart from the others:
one that does not answer keeps no other waiting. Either side proves that it knows the join token before anything else is said.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lamina.cluster.credentials import JoinDenied, TicketKey, proves
from lamina.cluster.data_port import located, split_address
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.messages import PROTOCOL, Challenge, JoinRefused, Welcome, to_agent_reader
from lamina.errors import LaminaError
from lamina.ipc.framing import FrameError
from lamina.values.references import NodeRef

log = logging.getLogger("lamina")

JOIN_S = 2.0
"""For one try to join, from the connection to the welcome."""

RETRY_S = 0.1
APART_S = 0.05
"""Between two rounds, and between two addresses that are tried one after another."""


class Refusal(LaminaError):
    """A server that did not take this agent or front door."""

    status = 403

    def __init__(self, message: str, *, hint: str = "", code: str = "refused", leader: str = "") -> None:
        super().__init__(message, hint=hint)
        self.why, self.leader = code, leader


class LeaderMembership(ABC):
    """One connection to a leader, from its challenge to its end."""

    role: ClassVar[str]  #: what this side is, to readers of its log

    def __init__(self, address: str, token: bytes, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.link: FrameLink | None = None
        self.epoch, self.cell = 0, ""
        self.key: TicketKey | None = None
        self.is_adopted = False  #: it is followed already, before the search has ended
        self._token, self._tls = token, tls
        self._nonce, self._challenge = os.urandom(32), b""
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def check_epoch(self, cell: str, epoch: int) -> None:
        """Raise `LaminaError` if this leader is not to be followed."""

    @abstractmethod
    def hello(self, challenge: bytes) -> Struct: ...

    @abstractmethod
    def on_welcome(self, link: FrameLink, frame: Welcome) -> None:
        """Both sides know each other. What is read next is for this connection."""

    @abstractmethod
    def on_frame(self, frame: Any) -> None: ...

    @abstractmethod
    def on_end(self, why: str) -> None:
        """It had been welcomed."""

    @property
    def is_live(self) -> bool:
        return self.link is not None and self.link.is_open

    @property
    @abstractmethod
    def is_silent(self) -> bool: ...

    def locate(self, ref: NodeRef) -> NodeRef:
        """A value that the leader has told of; of one that it has itself it may not say where: as it has been found, or by the
        name that its certificate has."""
        host = self.link.peer if self.link is not None and self._tls is None else split_address(self.address)[0]
        return replace(ref, address=located(ref.address, host))

    async def open(self) -> None:
        """Connect, and be welcomed. Raises `LaminaError` or `OSError`."""
        host, port = split_address(self.address)
        self.link = await FrameLink.connect(host, port, self._tls, to_agent_reader(), self._on_frame, self._on_closed)
        await self._welcomed

    def close(self, why: str = "") -> None:
        if self.link is not None:
            self.link.close(why)

    def fail(self, error: LaminaError) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(error)
        if self.link is not None:
            self.link.close(error.message)

    def _on_frame(self, link: FrameLink, frame: Any) -> None:
        if self._welcomed.done():
            self.on_frame(frame)
        elif isinstance(frame, Challenge) and not self._challenge:
            self._on_challenge(link, frame)
        elif isinstance(frame, Welcome) and self._challenge:
            self._on_welcome(link, frame)
        elif isinstance(frame, JoinRefused):
            self.fail(Refusal(frame.message, hint=frame.hint, code=frame.code, leader=frame.leader))
        else:
            raise FrameError(f"{type(frame).__name__} before a welcome")

    def _on_challenge(self, link: FrameLink, frame: Challenge) -> None:
        if frame.protocol != PROTOCOL:
            said = f"the server speaks version {frame.protocol} of the protocol, this {self.role} {PROTOCOL}"
            self.fail(Refusal(said, code="version"))
            return
        if not self._may_follow(frame):
            return
        self._challenge = frame.nonce
        link.send(self.hello(frame.nonce))

    def _may_follow(self, frame: Challenge | Welcome) -> bool:
        """Whether this leader is to be followed; if not, the connection fails with the reason."""
        try:
            self.check_epoch(frame.cell, frame.epoch)
        except LaminaError as error:
            self.fail(error)
            return False
        return True

    def _on_welcome(self, link: FrameLink, frame: Welcome) -> None:
        if not proves(frame.proof, self._token, "leader", self._nonce, self._challenge, frame.cell, frame.epoch):
            self.fail(JoinDenied(f"the server at {self.address} does not know the join token", hint="is it the right one?"))
            return
        if not self._may_follow(frame):
            return
        link.trust()
        self.epoch, self.cell = frame.epoch, frame.cell
        self.key = TicketKey(self._token, frame.cell, frame.epoch)
        self.on_welcome(link, frame)
        self._welcomed.set_result(None)

    def _on_closed(self, link: FrameLink, why: str) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(Refusal(f"{self.address}: {why}", code="closed"))
            self._welcomed.exception()  # a try that was given up is not waited for
        else:
            self.on_end(why)


Found = TypeVar("Found", bound=LeaderMembership)


class LeaderSearch(Generic[Found]):
    """Search over the addresses of all servers there are. `make` makes a connection to one; `has_leader`: one is heard."""

    def __init__(self, joins: Sequence[str], make: Callable[[str], Found], has_leader: Callable[[], bool]) -> None:
        self._joins, self._make, self._has_leader = joins, make, has_leader
        self._said = ""  #: why no server takes this one, as it was last logged

    async def find(self) -> Found | None:
        """The first server that takes this one; None: its leader has been heard again."""
        said = dict[str, str]()
        tries = [asyncio.create_task(self._knock(one, APART_S * place, said)) for place, one in enumerate(self._joins)]
        try:
            await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tries:
                task.cancel()
            results = await asyncio.gather(*tries, return_exceptions=True)
        found = sorted((one for one in results if isinstance(one, LeaderMembership)), key=lambda one: one.epoch)
        for other in found[:-1]:
            other.close("another leads")
        for defect in results if not found else ():
            if isinstance(defect, Exception):
                raise defect
        return found[-1] if found else None

    async def _knock(self, address: str, after_s: float, said: dict[str, str]) -> Found | None:
        """Ask one server until it takes this one."""
        await asyncio.sleep(after_s)
        while not self._has_leader():
            made, is_open = self._make(address), False
            try:
                async with asyncio.timeout(JOIN_S):
                    await made.open()
                is_open = True
                return made
            except (LaminaError, OSError, TimeoutError) as error:
                self._note_refusal(said, address, error)
            finally:
                if not is_open and not made.is_adopted:
                    made.close()
            await asyncio.sleep(RETRY_S)
        return None

    def _note_refusal(self, said: dict[str, str], address: str, error: BaseException) -> None:
        """Log why no server takes this one, once all have been asked, and when that changes. That its own leader was silent for a
        moment is none of that."""
        if isinstance(error, Refusal) and error.why == "has-leader":
            return
        said[address] = _said(address, error)
        whole = "; ".join(said.values())
        if len(said) == len(self._joins) and whole != self._said:
            self._said = whole
            log.warning("not joined: %s", whole)


def _said(address: str, error: BaseException) -> str:
    if isinstance(error, LaminaError):
        return f"{address}: {error.message}" + (f" ({error.hint})" if error.hint else "")
    return f"{address}: {'no answer (do both sides use TLS, or neither?)' if isinstance(error, TimeoutError) else error}"
