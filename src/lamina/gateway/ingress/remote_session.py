"""Session with a front door on another machine: as with one on this machine, but for values, clocks and what may be asked again.

Large bodies stay in the front door's memory, and the machine that runs the call fetches them there; results are fetched by the
front door from where they are. A front door asks the next leader again what this one has not answered. So before a call changes
state, its front door has to say that it will not: otherwise a change that is on disk already would be made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, structs

from lamina.cluster.cluster_engine import ClusterEngine
from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import FetchFailed, ref_for
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.ingress_connection import PIECE_BYTES
from lamina.cluster.messages import IngressHello, IngressTraffic
from lamina.cluster.remote_values import LeaderParts, RemoteValues
from lamina.core.actions import Reply
from lamina.errors import LaminaError
from lamina.gateway.ingress.messages import (
    MAX_HEADS,
    CallRequest,
    CommitAllowed,
    CommitIntent,
    ForwardedRequest,
    HttpResponse,
    InferError,
    InferRequest,
    IngressPayload,
    ResultValue,
    RpcReply,
    RpcRequest,
    SlotPayload,
    ingress_reader,
    pack_messages,
)
from lamina.gateway.ingress.session import IngressSession
from lamina.gateway.ingress.supervisor import make_route_table
from lamina.gateway.ingress.throttle import HostThrottle
from lamina.gateway.oip.grpc_service import GrpcMethods
from lamina.gateway.oip.setup import OpenInference
from lamina.gateway.routes.problems import PROBLEM, error_problem
from lamina.gateway.routes.router import Router
from lamina.gateway.routes.targets import CallTarget
from lamina.server.http_server import HeadCheck
from lamina.state.kv_state import StateTable
from lamina.values.references import ErrorInfo, NodeRef, ReleaseSlots, ShmRef, Stored

UNAVAILABLE = 14
"""Status of gRPC for what may work at the next try."""


class RemoteIngressSession(IngressSession):
    """Session with one front door, from its hello to the end of its link."""

    def __init__(
        self, doors: FrontDoors, parts: LeaderParts, link: FrameLink, hello: IngressHello, key: TicketKey, own_address: str
    ) -> None:
        methods = doors.grpc_methods() if hello.speaks_grpc else None
        super().__init__(
            *(doors.router, doors.oip.inference, methods, parts.references, doors.route_table, doors.check_head, doors.throttle),
        )
        self._doors, self._parts, self._link, self._key, self._own_address = doors, parts, link, key, own_address
        self._owner, self._state = hello.owner, doors.state
        self._values = RemoteValues(parts, hello.data_address, key, self._on_released)
        self._released: list[int] = []
        self._reader = ingress_reader()
        self._calls: dict[int, list[str]] = {}  #: by request: those that it was made of
        self._asking: dict[int, list[Callable[[bool], None]]] = {}  #: commits that wait for the front door's word
        self._granted: set[int] = set()
        self._straight = False  #: the request at hand has values that pass this server by
        self._is_lost = False
        self._handlers[CommitAllowed] = self._on_commit_allowed
        self.send(doors.route_table())

    def on_data(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self.on_messages(frame)

    # ------------------------------------------------------------------ requests

    def _arrived_us(self, at_us: int) -> int:
        return self._driver.now_us() - at_us  # clocks differ: a duration

    def _on_call(self, message: CallRequest) -> None:
        target = self._router.targets.by_path.get(self._known_head(message.head).path)
        if target is not None and _looks_at_nothing(target):
            self._straight = True  # its inputs stay where they are
            try:
                super()._on_call(message)
            finally:
                self._straight = False
            return

        def refuse(error: LaminaError) -> None:
            self.send(HttpResponse(message.number, error.status, error_problem(error).body(), PROBLEM, b"retry-after: 1\r\n"))

        self._bring(message, [message.inputs], super()._on_call, refuse)

    def _on_infer(self, message: InferRequest) -> None:
        found = self._inference.catalogue.models.get(message.model, {}).get(message.version)
        target = found.call_target if found is not None else None
        if target is not None and _looks_at_nothing(target):
            self._straight = True
            try:
                super()._on_infer(message)
            finally:
                self._straight = False
            return

        def refuse(error: LaminaError) -> None:
            self.send(InferError(message.number, error_problem(error)))

        self._bring(message, message.rows, super()._on_infer, refuse)

    def _on_forwarded(self, message: ForwardedRequest) -> None:
        given, proceed = {"body": message.body}, super()._on_forwarded

        def refuse(error: LaminaError) -> None:
            self.send(HttpResponse(message.number, error.status, error_problem(error).body(), PROBLEM, b"retry-after: 1\r\n"))

        def brought(kept: Any) -> None:
            proceed(structs.replace(kept, body=self._as_bytes(given["body"])))

        self._bring(message, [given], brought, refuse)

    def _on_rpc(self, message: RpcRequest) -> None:
        given, proceed = {"body": message.message}, super()._on_rpc

        def refuse(error: LaminaError) -> None:
            self.send(RpcReply(message.number, b"", UNAVAILABLE, error.message))

        def brought(kept: Any) -> None:
            proceed(structs.replace(kept, message=self._as_bytes(given["body"])))

        self._bring(message, [given], brought, refuse)

    def _as_bytes(self, given: Any) -> bytes:
        if not isinstance(given, ShmRef):
            return bytes(given)
        with self._parts.references.reader.view(given) as view:
            body = bytes(view)
        self._parts.references.release(given)
        return body

    def _bring(
        self,
        message: Any,
        givens: Sequence[dict[str, Any]],
        proceed: Callable[[Any], None],
        refuse: Callable[[LaminaError], None],
    ) -> None:
        """Fetch what lies in slots of the front door: `givens` have it in place of them when it is proceeded with. The head is
        kept meanwhile, since its number may be used again."""
        wanted = [(given, name, one) for given in givens for name, one in given.items() if isinstance(one, SlotPayload)]
        if not wanted:
            proceed(message)
            return
        left, failed, kept = len(wanted), "", MAX_HEADS + message.number
        self._heads[kept] = self._known_head(message.head)

        def fetched(given: dict[str, Any], name: str, slot: int, found: bytes | ShmRef | ErrorInfo) -> None:
            nonlocal left, failed
            self._free_slot(slot)
            left -= 1
            if isinstance(found, ErrorInfo):
                failed = found.message
            else:
                given[name] = found
            if left:
                return
            if not failed and not self._is_lost:
                proceed(structs.replace(message, head=kept))
            else:
                for given, name, _ in wanted:
                    if isinstance(given[name], ShmRef):
                        self._parts.references.release(given[name])
                if not self._is_lost:
                    refuse(FetchFailed(f"the body of the request cannot be fetched: {failed}", hint="send it again"))
            self._heads.pop(kept, None)

        for given, name, one in wanted:
            self._values.bring(self._there(one), partial(fetched, given, name, one.number))

    # -------------------------------------------------------------------- values

    def _there(self, slot: SlotPayload) -> NodeRef:
        return NodeRef(self._values.address, self._owner, slot.number, slot.size, serial=slot.serial)

    def _resolve_inputs(self, given: dict[str, IngressPayload]) -> dict[str, Any]:
        """Inputs by reference where they are on the front door's machine; the receiver releases them."""
        return {name: self._values.keep(self._there(one)) if isinstance(one, SlotPayload) else one for name, one in given.items()}

    def _on_released(self, there: NodeRef) -> None:
        self._free_slot(there.slot)

    def _free_slot(self, slot: int) -> None:
        if not self._released:
            self._loop.call_soon(self._send_released)
        self._released.append(slot)

    def _send_released(self) -> None:
        released, self._released = self._released, []
        if not self._is_lost:
            self.send(ReleaseSlots(released))

    def send_value(self, number: int, row: int, stored: Stored, reply: Reply) -> None:
        value: bytes | NodeRef
        if isinstance(stored, bytes):
            value = stored
        else:
            host = self._parts.host_of(stored)
            reads = self._pinned.setdefault(number, [])
            found = self._parts.references.pin(stored, reads, host.slots.owner if host is not None else "")
            if isinstance(found, bytes):
                value = found
            elif host is not None:
                value = host.reference(found)
            else:
                value = ref_for(self._key, self._own_address, found, self._parts.references.serial(found))
        self.send(ResultValue(number, row, value, reply))

    # --------------------------------------------------------------------- state

    def _noter(self, number: int) -> Callable[[str], None]:
        def note(call_id: str) -> None:
            self._forget_ended()
            self._calls.setdefault(number, []).append(call_id)
            self._state.set_guard(call_id, partial(self._ask_to_commit, number))
            if self._straight:
                self._driver.data.leave_result(call_id)

        return note

    def _forget_ended(self) -> None:
        """Drop the guards of requests that have been answered, now and then."""
        if len(self._calls) > 2 * len(self.pending) + 64:
            for number in [one for one in self._calls if one not in self.pending]:
                self._drop_guards(number)

    def _drop_guards(self, number: int) -> None:
        for call_id in self._calls.pop(number, ()):
            self._state.set_guard(call_id, None)
        self._granted.discard(number)

    def _ask_to_commit(self, number: int, then: Callable[[bool], None]) -> None:
        if self._is_lost or number not in self.pending:
            then(False)  # its client has gone, or its front door asks another server
        elif number in self._granted:
            then(True)
        else:
            waiting = self._asking.setdefault(number, [])
            waiting.append(then)
            if len(waiting) == 1:
                self.send(CommitIntent(number))

    def _on_commit_allowed(self, message: CommitAllowed) -> None:
        self._granted.add(message.number)
        for then in self._asking.pop(message.number, ()):
            then(message.number in self.pending)

    # ------------------------------------------------------------------ messages

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._is_lost:
            return
        wire = pack_messages(out, to_ingress=True)
        frames: list[Struct] = [
            IngressTraffic(bytes(wire[start : start + PIECE_BYTES])) for start in range(0, len(wire), PIECE_BYTES)
        ]
        self._link.send(*frames)

    def on_lost(self) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._doors.sessions.discard(self)
        super().on_lost()
        asking, self._asking = self._asking, {}
        for number in list(self._calls):
            self._drop_guards(number)
        for waiting in asking.values():
            for then in waiting:
                then(False)
        self._values.close()


def _looks_at_nothing(target: CallTarget) -> bool:
    """Whether nothing but the function itself looks into the inputs and the result of a call: no workflow, copy or cache."""
    versions = [target, *(target.split.targets if target.split is not None else [])]
    return all(one.kind == "function" and one.shadow is None and not one.cache_us for one in versions)


class FrontDoors:
    """All front doors of other machines. Sessions come and go with their links."""

    def __init__(
        self,
        cluster: ClusterEngine,
        router: Router,
        oip: OpenInference,
        state: StateTable,
        throttle: HostThrottle,
        *,
        requires_token: bool,
        check_head: HeadCheck,
    ) -> None:
        self.router, self.oip, self.state, self.check_head, self.throttle = router, oip, state, check_head, throttle
        self.sessions: set[RemoteIngressSession] = set()
        self._requires_token = requires_token
        self._grpc_methods: GrpcMethods | None = None
        router.targets.subscribe(self._broadcast_routes)
        cluster.accept_ingress(self._open)

    def route_table(self) -> Any:
        return make_route_table(self.router, self.oip.inference, self._requires_token)

    def grpc_methods(self) -> GrpcMethods:
        self._grpc_methods = self._grpc_methods or self.oip.grpc_methods()
        return self._grpc_methods

    def _open(
        self, parts: LeaderParts, link: FrameLink, hello: IngressHello, key: TicketKey, own_address: str
    ) -> RemoteIngressSession:
        session = RemoteIngressSession(self, parts, link, hello, key, own_address)
        self.sessions.add(session)
        return session

    def _broadcast_routes(self) -> None:
        routes = self.route_table()
        for session in self.sessions:
            session.send(routes)
