"""Link of a front door to whichever server leads: requests are kept until they are answered, and asked again of the next leader.

A leader that dies, freezes or steps down leaves requests without an answer. Those that may be repeated are asked of the next one,
with the time that has passed counted; the others are answered with 503, since it cannot be known what became of them. What may be
repeated is what the leader has said (idempotent targets), what has not been sent, and what only reads; not what has begun to
stream, nor a call that was about to change state (`CommitIntent`). While no server leads, requests are held for a while.

Bodies stay in slots of this machine until their request is answered: a leader's word that one is free counts only then.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct, structs

from lamina.cluster.data_port import DataPort, FetchFailed
from lamina.cluster.ingress_connection import LeaderConnection
from lamina.cluster.value_fetcher import Fetched, ValueFetcher
from lamina.errors import LaminaError, LeadershipLost, NotLeader
from lamina.gateway.ingress.controller_link import ControllerLink
from lamina.gateway.ingress.handlers import KnownRoutes
from lamina.gateway.ingress.messages import (
    CallRequest,
    ClientGone,
    CommitAllowed,
    CommitIntent,
    ControllerMessages,
    ForwardedRequest,
    HeadCheckReply,
    HeadCheckRequest,
    HttpResponse,
    InferChunk,
    InferError,
    InferRequest,
    IngressPayload,
    ReplyConsumed,
    ReplyMessage,
    RequestHead,
    ResponseAborted,
    ResponseChunk,
    ResponseEnd,
    ResponseStart,
    ResultValue,
    RpcReply,
    RpcRequest,
    SlotPayload,
    controller_reader,
    pack_messages,
)
from lamina.gateway.routes.problems import PROBLEM, error_problem
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError
from lamina.server.exchange import HttpRequest
from lamina.values.references import NodeRef, ReleaseSlots
from lamina.values.shm import ShmPool

LOOK_S = 0.05
"""How often requests are looked at that are held while no server leads."""

AGAIN_S = 0.05
SETTLE_US = 5_000_000
"""Between a refusal of a server that cannot serve yet and the next try; and how long after a takeover that is believed of one
that leads: its agents are on their way."""

MADE_AGAIN = 2
"""How often a result is made once more that could not be fetched: its machine has died, or cannot be reached from here at all."""

MAX_HELD = 10_000
_SAFE = ("GET", "HEAD", "OPTIONS")
_UNAVAILABLE = 14
_STARTED = (ResponseStart, ResponseChunk, InferChunk)

Request = CallRequest | InferRequest | ForwardedRequest | RpcRequest | HeadCheckRequest


@dataclass(slots=True, eq=False)
class _Asked:
    """A request without an answer."""

    message: Request
    head: RequestHead | None
    arrived_us: int
    expires_us: int  #: when it is not worth asking any more
    slots: list[int]
    may_repeat: bool
    is_sent: bool = False
    has_started: bool = False  #: a part of its answer has gone to the client
    released: set[int] = field(default_factory=set)  #: slots that the leader does not need any more
    unfetched: int = 0  #: results that could not be fetched


class LeaderLink(ControllerLink):
    """Requests of one front door. `hold_us`: for how long one waits for a server that leads."""

    def __init__(self, pool: ShmPool, data_port: DataPort, fetcher: ValueFetcher, routes: KnownRoutes, hold_us: int) -> None:
        super().__init__(pool, None, routes.update, lambda: None)
        self._shared, self._data_port, self._fetcher = pool, data_port, fetcher
        self._routes, self._hold_us = routes, hold_us
        self._leader: LeaderConnection | None = None
        self._joined_us = 0
        self._asked: dict[int, _Asked] = {}
        self._sent_heads: dict[int, RequestHead] = {}
        self._lent: set[int] = set()  #: slots of requests that are over, and that the leader may still need
        self._reader_of_leader = controller_reader()
        self._looking: asyncio.TimerHandle | None = None

    @property
    def has_leader(self) -> bool:
        return self._leader is not None

    # ---------------------------------------------------------------- the leader

    def on_joined(self, leader: LeaderConnection) -> None:
        """Ask this server from now on: first all that has no answer."""
        self._leader, self._joined_us = leader, clock_us()
        assert leader.key is not None
        self._data_port.set_keys(leader.key)
        self._reader_of_leader = controller_reader()
        self._heads.clear()
        self._sent_heads.clear()
        for asked in list(self._asked.values()):
            self._transmit(asked)

    def on_machine_lost(self, address: str) -> None:
        self._fetcher.drop_machine(address)

    def on_lost(self, why: str) -> None:
        """The leader is gone. What it was lent is free, and what it was asked is asked again or given up."""
        self._leader = None
        self._data_port.set_keys()
        self._out.clear()
        for slot in self._lent:
            self._shared.free(slot)
        self._lent.clear()
        for asked in list(self._asked.values()):
            if asked.is_sent and not asked.may_repeat:
                self._give_up(asked, LeadershipLost("the server that led has gone while this was under way", hint=_LOOK_UP))
            else:
                asked.is_sent = False
                asked.released.clear()
        self._look()

    def on_data(self, data: bytes) -> None:
        try:
            for frame in self._reader_of_leader.feed(data):
                if isinstance(frame, ControllerMessages):
                    for message in frame.messages:
                        self._on_message(message)
        except FrameError:
            if self._leader is not None:
                self._leader.close("it speaks nonsense")

    def _look(self) -> None:
        """While no server leads: answer what has waited for too long."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        now_us = clock_us()
        for asked in [one for one in self._asked.values() if not one.is_sent and one.expires_us <= now_us]:
            self._give_up(asked, NotLeader("no server leads", hint="try again in a moment"))
        if any(not asked.is_sent for asked in self._asked.values()):
            self._looking = self._loop.call_later(LOOK_S, self._look)

    # ------------------------------------------------------------------ requests

    def store_payload(self, blob: bytes) -> IngressPayload:
        found = super().store_payload(blob)
        if isinstance(found, SlotPayload):
            found = structs.replace(found, serial=self._shared.serial(found.number))
        return found

    def send(self, message: Struct) -> None:
        match message:
            case RequestHead():
                self._sent_heads[message.number] = message
                self._say(message)
            case CallRequest() | InferRequest() | ForwardedRequest() | RpcRequest() | HeadCheckRequest():
                self._ask(message)
            case ClientGone():
                asked = self._asked.get(message.number)
                if asked is not None:
                    was_sent = asked.is_sent
                    self._finish(message.number)
                    if was_sent:
                        self._say(message)
            case _:
                self._say(message)

    def _ask(self, message: Request) -> None:
        head = None if isinstance(message, HeadCheckRequest) else self._sent_heads[message.head]
        now_us = clock_us()
        expires_us = now_us + self._hold_us
        limit_us = _time_limit_us(message, head)
        asked = _Asked(
            message=message,
            head=head,
            arrived_us=message.at_us if isinstance(message, CallRequest | InferRequest) else now_us,
            expires_us=min(expires_us, now_us + limit_us) if limit_us else expires_us,
            slots=_slots_of(message),
            may_repeat=self._may_repeat(message, head),
        )
        is_full = len(self._asked) >= MAX_HELD and self._leader is None
        self._asked[message.number] = asked
        if is_full:
            self._loop.call_soon(self._give_up, asked, NotLeader("no server leads", hint="try again in a moment"))
        elif self._leader is not None:
            asked.is_sent = True
            self._say(self._timed(asked, asked.message))
        elif self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _may_repeat(self, message: Request, head: RequestHead | None) -> bool:
        match message:
            case CallRequest():
                return head is not None and head.path in self._routes.repeatable
            case InferRequest():
                return not message.is_streamed and (message.model, message.version) in self._routes.repeatable_models
            case ForwardedRequest():
                return head is not None and (head.method in _SAFE or b"idempotency-key" in head.headers)
            case HeadCheckRequest():
                return True
            case _:
                return message.method not in ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad", "RepositoryModelUnload")

    def _transmit(self, asked: _Asked) -> None:
        """Send a request to a leader that has not heard of it."""
        message, head = asked.message, asked.head
        if head is not None and not isinstance(message, HeadCheckRequest):
            key = (head.method, head.path, head.query, head.keep_alive, *head.headers.items())
            number = self._heads.get(key)
            if number is None:
                request = HttpRequest(head.method, head.path, head.query, head.headers, b"", head.keep_alive)
                number = self._send_head(key, request, head.headers)
            message = structs.replace(message, head=number)
        asked.is_sent = True
        self._say(self._timed(asked, message))

    def _timed(self, asked: _Asked, message: Request) -> Request:
        """A request with the time that has passed since it came, in place of when that was: clocks differ."""
        if isinstance(message, CallRequest | InferRequest):
            return structs.replace(message, at_us=max(0, clock_us() - asked.arrived_us))
        return message

    def _say(self, message: Struct) -> None:
        if self._leader is not None:
            super().send(message)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._leader is not None and out:
            self._leader.send(pack_messages(out, to_ingress=False))

    # ------------------------------------------------------------------- replies

    def _on_reply(self, message: ReplyMessage) -> None:
        asked = self._asked.get(message.number)
        if asked is None or not asked.is_sent:
            if asked is None:
                super()._on_reply(message)  # its client has left
            return
        if isinstance(message, _STARTED):
            asked.may_repeat, asked.has_started = False, True
        elif isinstance(message, HttpResponse | InferError) and self._is_early(message) and clock_us() < asked.expires_us:
            asked.is_sent = False  # nothing was done: it is asked again, of this server or the next
            asked.released.clear()
            self._loop.call_later(AGAIN_S, self._ask_again, asked)
            self._look()
            return
        if isinstance(message, ResultValue) and isinstance(message.value, NodeRef):
            self._fetch(asked, message, message.value)
            return
        self._deliver(message)

    def _is_early(self, message: HttpResponse | InferError) -> bool:
        """A refusal, without anything done, by a server that does not lead, or has just begun to and waits for its agents."""
        is_new = clock_us() - self._joined_us < SETTLE_US
        if isinstance(message, InferError):
            return message.problem.code == NotLeader.code or (is_new and message.problem.reason == "no-capacity")
        if message.status != 503:
            return False
        return b'"code":"not-leader"' in message.body or (is_new and b'"reason":"no-capacity"' in message.body)

    def _ask_again(self, asked: _Asked) -> None:
        if self._asked.get(asked.message.number) is asked and not asked.is_sent and self._leader is not None:
            self._transmit(asked)

    def _deliver(self, message: ReplyMessage) -> None:
        super()._on_reply(message)
        if message.number not in self._pending:
            self._finish(message.number)

    def _fetch(self, asked: _Asked, message: ResultValue, ref: NodeRef) -> None:
        """Fetch a result from where it is."""
        leader = self._leader
        self._note_reference(message.number)

        def done(found: Fetched) -> None:
            if message.number not in self._pending or self._asked.get(message.number) is not asked or not asked.is_sent:
                return  # its client has left, or another leader has been asked meanwhile
            if self._leader is not leader:
                return
            if isinstance(found, bytes):
                self._deliver(structs.replace(message, value=found))
                return
            self._say(ReplyConsumed(message.number))
            asked.unfetched += 1
            if asked.may_repeat and asked.unfetched <= MADE_AGAIN:
                asked.released.clear()
                self._transmit(asked)
            elif asked.may_repeat and isinstance(found, FetchFailed):
                self._give_up(asked, found)
            else:
                self._give_up(asked, LeadershipLost(f"the result cannot be fetched: {found}", hint=_LOOK_UP))

        self._fetcher.bring(leader.locate(ref) if leader is not None else ref, done)

    def _give_up(self, asked: _Asked, error: LaminaError) -> None:
        """Answer a request with an error of this process' own."""
        if self._asked.get(asked.message.number) is not asked:
            return
        for message in _refusals(asked, error):
            if message.number in self._pending:
                ControllerLink._on_reply(self, message)
        self._pending.pop(asked.message.number, None)
        self._finish(asked.message.number)

    def _finish(self, number: int) -> None:
        """A request is over, for its client. Its slots are free as soon as the leader says so."""
        asked = self._asked.pop(number, None)
        for slot in asked.slots if asked is not None else ():
            if asked is None or self._leader is None or not asked.is_sent or slot in asked.released:
                self._shared.free(slot)
            else:
                self._lent.add(slot)

    def _on_commit_intent(self, message: CommitIntent) -> None:
        asked = self._asked.get(message.number)
        if asked is not None and asked.is_sent:
            asked.may_repeat = False
            self._say(CommitAllowed(message.number))

    def _on_release(self, frame: ReleaseSlots) -> None:
        for slot in (*frame.slots, *frame.retired):
            if slot in self._lent:
                self._lent.discard(slot)
                self._shared.free(slot)
                continue
            for asked in self._asked.values():
                if slot in asked.slots:
                    asked.released.add(slot)
                    break

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self.closed.set()


_LOOK_UP = "whether it was done must be looked up; a target with idempotent=True is asked again instead"


def _slots_of(message: Request) -> list[int]:
    match message:
        case CallRequest():
            given: list[Any] = list(message.inputs.values())
        case InferRequest():
            given = [one for row in message.rows for one in row.values()]
        case ForwardedRequest():
            given = [message.body]
        case RpcRequest():
            given = [message.message]
        case _:
            given = []
    return [one.number for one in given if isinstance(one, SlotPayload)]


def _time_limit_us(message: Request, head: RequestHead | None) -> int:
    """How long the client waits at most, as far as it says so; 0: it does not."""
    if isinstance(message, InferRequest | RpcRequest):
        return message.timeout_us
    told = head.headers.get(b"lamina-deadline-ms", b"") if head is not None else b""
    return int(told) * 1000 if told.isdigit() and len(told) < 12 else 0


def _refusals(asked: _Asked, error: LaminaError) -> list[ReplyMessage]:
    number, problem = asked.message.number, error_problem(error)
    match asked.message:
        case InferRequest():
            return [InferError(number, problem)]
        case RpcRequest():
            return [RpcReply(number, b"", _UNAVAILABLE, error.message), ResponseEnd(number)]
        case HeadCheckRequest():
            return [HeadCheckReply(number, "", error.message, error.hint, status=503)]
        case _ if asked.has_started:
            return [ResponseAborted(number)]
        case _:
            return [HttpResponse(number, problem.status, problem.body(), PROBLEM, problem.headers())]
