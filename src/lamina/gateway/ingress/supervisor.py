"""Supervisor of ingress processes: starts them, announces routes, restarts them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

from lamina.gateway.ingress.messages import IngressReady, IngressSetup, ModelInfo, RouteTable, StopAccepting
from lamina.gateway.ingress.session import IngressSession
from lamina.gateway.ingress.throttle import HostThrottle
from lamina.gateway.observability import logs
from lamina.gateway.oip.grpc_service import GrpcMethods
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.setup import OpenInference
from lamina.gateway.routes.router import Router
from lamina.gateway.routes.targets import CallTarget
from lamina.server.http1 import HttpLimits
from lamina.server.http_server import HeadCheck, accept_any_head
from lamina.server.memory_budget import NO_LIMIT
from lamina.server.origins import OriginSettings
from lamina.values.slot_refs import SlotReferences

log = logging.getLogger("lamina")

POOL_BYTES = 512 * 2**20
RESPAWN_S = 0.05  #: between the end of one and the start of the next; longer and longer while they do not come up
MAX_RESPAWN_S = 5.0
STARTUP_S = 120.0  #: from its start until it listens


class IngressSupervisor:
    """All ingress processes of a server."""

    def __init__(
        self,
        router: Router,
        oip: OpenInference,
        slot_refs: SlotReferences | None,
        limits: HttpLimits,
        tls: tuple[str, str] | None = None,
        origins: OriginSettings | None = None,
        *,
        throttle: HostThrottle,
        count: int,
        requires_token: bool = False,
        memory_bytes: int = NO_LIMIT,
        check_head: HeadCheck = accept_any_head,
    ) -> None:
        """`memory_bytes` is the memory budget of all of them together."""
        self._router = router
        self._inference = oip.inference
        self._grpc_methods: GrpcMethods | None = None
        self._loop = asyncio.get_running_loop()
        self._oip = oip
        self._slot_refs = slot_refs
        self._limits = limits
        self._tls = tls
        self._origins = origins or OriginSettings()
        self._throttle = throttle
        self._count = count
        self._requires_token = requires_token
        self._memory_bytes = memory_bytes // count
        self._check_head = check_head
        self._address = ("", 0, -1)
        self._has_started = self._is_stopping = False
        self._respawn_s = RESPAWN_S
        self.sessions: list[IngressSession] = []
        router.targets.subscribe(self._broadcast_routes)

    async def start(self, host: str, port: int, grpc_port: int | None = None) -> IngressReady:
        """Start all; returns the ports, which the first one chooses where 0 is asked for."""
        if grpc_port is not None:
            self._grpc_methods = self._oip.grpc_methods()
        for wanted in {port, grpc_port or 0} - {0}:
            _check_free(host, wanted)
        self._address = (host, port, grpc_port if grpc_port is not None else -1)
        bound = await self._wait_ready(self._spawn())
        self._address = (host, bound.port, bound.grpc_port if grpc_port is not None else -1)
        for session in [self._spawn() for _ in range(self._count - 1)]:
            await self._wait_ready(session)
        self._has_started = True
        return bound

    async def _wait_ready(self, session: IngressSession) -> IngressReady:
        assert session.process is not None
        ends: list[asyncio.Future[Any]] = [session.ready, session.process.exited]
        await asyncio.wait(ends, timeout=STARTUP_S, return_when=asyncio.FIRST_COMPLETED)
        if not session.ready.done():
            raise OSError(errno.EADDRNOTAVAIL, "an ingress process did not start")
        return session.ready.result()

    def _spawn(self) -> IngressSession:
        session = IngressSession(
            *(self._router, self._inference, self._grpc_methods, self._slot_refs, self.route_table, self._check_head),
            self._throttle,
            slots=self._slot_refs.add_worker() if self._slot_refs is not None else None,
        )
        host, port, grpc_port = self._address
        setup = IngressSetup(
            host=host,
            port=port,
            grpc_port=grpc_port,
            folder=self._slot_refs.directory.path if self._slot_refs is not None else "",
            owner=session.slots.owner if session.slots is not None else "none",
            pool_bytes=min(POOL_BYTES, self._memory_bytes // 2),
            memory_bytes=self._memory_bytes,
            limits=self._limits,
            tls=self._tls,
            origins=self._origins,
            log_format=logs.current_format(),
        )
        session.spawn(setup, lambda: self._on_lost(session))
        self.sessions.append(session)
        return session

    def _on_lost(self, session: IngressSession) -> None:
        self.sessions.remove(session)
        session.on_lost()
        if self._is_stopping or not self._has_started:
            return
        log.warning("an ingress process is gone; its clients are disconnected, another one is started")
        self._respawn_s = RESPAWN_S if session.ready.done() else min(2 * self._respawn_s, MAX_RESPAWN_S)
        self._loop.call_later(self._respawn_s, self._respawn)

    def _respawn(self) -> None:
        if not self._is_stopping:
            try:
                self._spawn()
            except OSError:
                self._loop.call_later(MAX_RESPAWN_S, self._respawn)

    def route_table(self) -> RouteTable:
        return make_route_table(self._router, self._inference, self._requires_token)

    def _broadcast_routes(self) -> None:
        routes = self.route_table()
        for session in self.sessions:
            session.send(routes)

    async def stop_accepting(self) -> None:
        for session in self.sessions:
            session.send(StopAccepting())

    async def stop(self) -> None:
        self._is_stopping = True
        processes = [session.process for session in self.sessions if session.process is not None]
        for process in processes:
            process.stop(2.0)
        if processes:
            await asyncio.wait([process.finished for process in processes])


def make_route_table(router: Router, inference: InferenceService, requires_token: bool) -> RouteTable:
    """What ingress processes are told of the targets there are now."""
    controller = router.call_handler.driver.controller
    functions, flows = controller.state.functions, controller.flows

    def may_repeat(target: CallTarget) -> bool:
        """Whether all that a call of it runs may run twice."""
        versions = [target, *(target.split.targets if target.split is not None else [])]
        names = {name for one in versions for name in (flows[one.name].functions if one.name in flows else [""])}
        return all(name in functions and functions[name].spec.idempotent for name in names)

    targets = router.targets.by_path.items()
    params = {
        path: list(target.params)
        for path, target in targets
        if target.split is None or target.split.is_by_weight_alone  # else the version decides how a body is read
    }
    models = [
        ModelInfo(
            *(model.name, model.version, model.target_name, model.is_batched, model.signature),
            may_repeat=may_repeat(model.call_target),
            goal_us=model.call_target.slo.latency_us,
        )
        for versions in inference.catalogue.models.values()
        for model in versions.values()
    ]
    goals_us = {path: target.slo.latency_us for path, target in targets if target.slo.latency_us}
    return RouteTable(params, models, requires_token, [path for path, target in targets if may_repeat(target)], goals_us)


def _check_free(host: str, port: int) -> None:
    """Fail if the port is in use: ingress processes share it with any process that is willing to share it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
