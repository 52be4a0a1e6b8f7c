"""Composition of a server: an app, a policy, an engine, the loop, HTTP and gRPC; started and stopped in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.access.access_control import AccessControl
from lamina.bootstrap import ServingRuntime
from lamina.core.controller import Controller
from lamina.core.lifecycle import InstancePhase
from lamina.drivers.driver import Ending, EventObserver
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import RETENTION_US, DurableRuns
from lamina.gateway.auth import Authenticator, sync_tenant_limits
from lamina.gateway.auth import check_host as check_host
from lamina.gateway.ingress.supervisor import IngressSupervisor
from lamina.gateway.observability.billing import Billing
from lamina.gateway.observability.call_context import attach_call_context
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.run_metrics import RunGauges
from lamina.gateway.observability.tracer import Tracer
from lamina.gateway.oip.openapi import paths as v2_paths
from lamina.gateway.oip.setup import OpenInference, mount_open_inference
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.emulated_outputs import set_emulated_outputs
from lamina.gateway.routes.openapi import document
from lamina.gateway.routes.router import CallTarget, Router
from lamina.gateway.routes.runs import RunRoutes
from lamina.gateway.routes.state import StateRoutes
from lamina.planner.capacity_check import check_capacity
from lamina.sdk.app import App
from lamina.server.http1 import HttpLimits, HttpServer
from lamina.server.loop_lag import track_loop_lag
from lamina.server.tls import server_context
from lamina.state.triggers import Triggers, open_triggers
from lamina.store.base import Store


@dataclass(slots=True)
class Gateway:
    """A running server."""

    app: App
    loop: RealtimeDriver
    router: Router
    server: HttpServer
    metrics: Metrics
    billing: Billing
    host: str
    port: int
    oip: OpenInference
    durable: DurableRuns | None = None
    triggers: Triggers | None = None
    ingress: IngressSupervisor | None = None  #: of the processes that speak HTTP and gRPC, if this one does not
    is_secure: bool = False  #: over TLS

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}"

    async def stop(self, grace_s: float = 30.0) -> int:
        """Accept nothing new, finish what was accepted, then end the workers; returns how many calls were cancelled."""
        if self.router.is_closing:
            return 0
        self.router.is_closing = True
        if self.triggers is not None:
            self.triggers.close()
        await self.server.stop_accepting()
        if self.ingress is not None:
            await self.ingress.stop_accepting()
        if self.durable is not None:
            until_s = asyncio.get_running_loop().time() + grace_s
            await self.durable.stop(grace_s)
            grace_s = max(0.1, until_s - asyncio.get_running_loop().time())
        left = await self.loop.drain(grace_s)
        self.billing.flush()
        if self.durable is not None:
            await self.durable.store.close()  # with what those calls have changed of the state
        if self.ingress is not None:
            await self.ingress.stop()
        await self.oip.stop(0.5)
        await self.server.stop()
        await self.loop.stop(min(5.0, grace_s))
        return left


def call_targets(app: App) -> list[CallTarget]:
    functions = [CallTarget(f.name, "function", f.params, f.spec.slo, f.doc, "", f.signature) for f in app.functions.values()]
    workflows = [CallTarget(w.name, "workflow", w.params, w.flow.slo, w.doc, "", w.signature) for w in app.workflows.values()]
    return functions + workflows


async def open_gateway(
    live: ServingRuntime,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: HttpLimits | None = None,
    full_errors: bool = True,
    watch: EventObserver | None = None,
    traces: Tracer | None = None,
    grpc_port: int | None = None,
    store: Store | None = None,
    keep_us: int = RETENTION_US,
    access: AccessControl | None = None,
    prepare: Callable[[App, RealtimeDriver, Router], Awaitable[None]] | None = None,
    on_ended: Sequence[Callable[[str, Ending, str], None]] = (),
    ingress: int = 0,
    tls: tuple[str, str] | None = None,
    **options: Any,
) -> Gateway:
    """Start a server.

    `store` is for durable runs; without one, there are none. They are kept for `keep_us` after their end. With `ingress`, so many
    processes of their own speak HTTP and gRPC. `tls` names the files of certificate and key.
    """
    door = Authenticator(access, guarded=check_host(host, access))
    app, loop = live.app, live.loop
    check_capacity(loop.engine.devices, (), [spec for spec in app.deployed().functions if spec.scale.min])
    limits = limits or HttpLimits()
    metrics = Metrics(loop.controller)
    metrics.last_decision_us = lambda: loop.decision_us
    metrics.call_listeners.extend(on_ended)
    api, oip = _make_routes(app, loop, metrics, door, limits, full_errors)
    set_emulated_outputs(loop, api.targets)
    api.tracer = traces
    for observer in (metrics.on_event, oip.inference.statistics.on_event, traces.on_event if traces is not None else None, watch):
        if observer is not None:
            loop.add_observer(observer)
    attach_call_context(loop, traces, has_tenants=access is not None)
    if access is not None:
        access.give_secrets(loop.engine.shared)
    server, bill = HttpServer(api.handle, http_codec.parse_error_body, limits), Billing(api, store, time.time)
    metrics.call_listeners.append(bill.on_call_ended)
    metrics.batch_listeners.append(bill.on_batch_finished)
    gateway = Gateway(app, loop, api, server, metrics, bill, host, port, oip, is_secure=tls is not None)
    await live.start()
    try:
        if access is not None:
            sync_tenant_limits(access, loop)
        if prepare is not None:  # before any call comes, new or left over
            await prepare(app, loop, api)
        if store is not None:
            await live.state.open(store)
            gateway.durable = _open_durable_runs(api, live, metrics, store, keep_us)
        gateway.triggers = open_triggers(app, live.state, loop, gateway.durable)
        StateRoutes(api, live.state)
        track_loop_lag(api)
        if ingress:
            gateway.ingress = IngressSupervisor(api, oip, loop.engine.references, limits, tls, guarded=door.requires_token)
            up = await gateway.ingress.start(ingress, host, port, grpc_port)
            gateway.port, oip.grpc_port = up.port, up.grpc_port
        else:
            secured = {"ssl": server_context(*tls)} if tls is not None else {}
            gateway.port = await server.start(host, port, **secured, **options)
            if grpc_port is not None:
                await oip.open_grpc(host, grpc_port, tls)
    except BaseException:  # no caller knows what has been started by now
        await gateway.stop(0.0)
        raise
    return gateway


def _make_routes(
    app: App, loop: RealtimeDriver, metrics: Metrics, door: Authenticator, limits: HttpLimits, full_errors: bool
) -> tuple[Router, OpenInference]:
    """The routes, with their authorization."""
    api = Router(
        *(loop, call_targets(app), metrics),
        lambda: document(api.targets, v2_paths(oip.inference.catalogue)),
        full_errors=full_errors,
    )
    api.is_ready = lambda: has_required_instances(loop.controller, api.not_required_for_ready())
    api.authorize = door.authorize
    oip = mount_open_inference(api, loop, metrics, body_limit=limits.body_bytes)
    return api, oip


def _open_durable_runs(api: Router, live: ServingRuntime, metrics: Metrics, store: Store, keep_us: int) -> DurableRuns:
    """Open durable runs; those that an earlier server left are recovered."""
    durable = DurableRuns(
        *(live.loop, store, lambda ending: api.ending_problem(ending).body()),
        retention_us=keep_us,
        on_end=metrics.on_call_ended,
        same_transaction=live.state.same_transaction,
    )
    api.runs = RunRoutes(api, durable)
    metrics.registry.register(RunGauges(durable))
    if store.exists:
        durable.start()
    return durable


def has_required_instances(controller: Controller, needless: set[str]) -> bool:
    """Every function has its minimum of warm instances."""
    return all(
        name in needless or sum(one.phase is InstancePhase.WARM for one in function.instances.values()) >= function.spec.scale.min
        for name, function in controller.state.functions.items()
    )
