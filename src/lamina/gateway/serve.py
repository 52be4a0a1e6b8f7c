"""Composition of a server: an app, a policy, an engine, the loop, HTTP and gRPC; started and stopped in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.access.access import Access
from lamina.core.controller import Controller
from lamina.core.lifecycle import Phase
from lamina.gateway import wire
from lamina.gateway.api import Api, Target
from lamina.gateway.bill import Bill
from lamina.gateway.door import Door, keep_limits
from lamina.gateway.door import check_host as check_host
from lamina.gateway.http import Limits, Server
from lamina.gateway.ingress.hub import Hub, ledger_of
from lamina.gateway.lag import watch_lag
from lamina.gateway.metrics import Metrics
from lamina.gateway.oip.mount import Oip, mount
from lamina.gateway.oip.paths import paths as v2_paths
from lamina.gateway.openapi import document
from lamina.gateway.origins import tell_workers
from lamina.gateway.pretend import pretend
from lamina.gateway.run_metrics import RunsNow
from lamina.gateway.runs import Runs
from lamina.gateway.state import StateSite
from lamina.gateway.tls import context
from lamina.gateway.traces import Traces
from lamina.live.durable import KEEP_US, Durable
from lamina.live.engines import local_of
from lamina.live.loop import Ending, LiveLoop, Watch
from lamina.live.start import Live
from lamina.live.triggers import Triggers, open_state
from lamina.planner.room import check_room
from lamina.sdk.app import App
from lamina.store.base import Store


@dataclass(slots=True)
class Gateway:
    """A running server."""

    app: App
    loop: LiveLoop
    api: Api
    server: Server
    metrics: Metrics
    bill: Bill
    host: str
    port: int
    oip: Oip
    durable: Durable | None = None
    triggers: Triggers | None = None
    hub: Hub | None = None  #: of the processes that speak HTTP and gRPC, if this one does not
    secure: bool = False  #: over TLS

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"

    async def stop(self, grace_s: float = 30.0) -> int:
        """Accept nothing new, finish what was accepted, then end the workers; returns how many calls were cancelled."""
        if self.api.closing:
            return 0
        self.api.closing = True
        if self.triggers is not None:
            self.triggers.close()
        await self.server.stop_accepting()
        if self.hub is not None:
            await self.hub.stop_accepting()
        if self.durable is not None:
            until_s = asyncio.get_running_loop().time() + grace_s
            await self.durable.stop(grace_s)
            grace_s = max(0.1, until_s - asyncio.get_running_loop().time())
        left = await self.loop.drain(grace_s)
        self.bill.flush()
        if self.durable is not None:
            await self.durable.store.close()  # with what those calls have changed of the state
        if self.hub is not None:
            await self.hub.stop()
        await self.oip.stop(0.5)
        await self.server.stop()
        await self.loop.stop(min(5.0, grace_s))
        return left


def targets_of(app: App) -> list[Target]:
    functions = [Target(f.name, "function", f.params, f.spec.slo, f.doc, "", f.signature) for f in app.functions.values()]
    workflows = [Target(w.name, "workflow", w.params, w.flow.slo, w.doc, "", w.signature) for w in app.workflows.values()]
    return functions + workflows


async def open_gateway(
    live: Live,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits | None = None,
    full_errors: bool = True,
    watch: Watch | None = None,
    traces: Traces | None = None,
    grpc_port: int | None = None,
    store: Store | None = None,
    keep_us: int = KEEP_US,
    access: Access | None = None,
    prepare: Callable[[App, LiveLoop, Api], Awaitable[None]] | None = None,
    on_ended: Sequence[Callable[[str, Ending, str], None]] = (),
    ingress: int = 0,
    tls: tuple[str, str] | None = None,
    **options: Any,
) -> Gateway:
    """Start a server.

    `store` is for durable runs; without one, there are none. They are kept for `keep_us` after their end. With `ingress`, so many
    processes of their own speak HTTP and gRPC. `tls` names the files of certificate and key.
    """
    door = Door(access, guarded=check_host(host, access))
    app, loop = live.app, live.loop
    check_room(loop.engine.devices, (), [spec for spec in app.deployed().functions if spec.scale.min])
    limits = limits or Limits()
    metrics = Metrics(loop.controller)
    metrics.decided_us = lambda: loop.decided_us
    metrics.on_ended.extend(on_ended)
    api, oip = _routes(app, loop, metrics, door, limits, full_errors)
    pretend(loop, api.targets)
    api.traces = traces
    loop.watch = _all(metrics.watch, oip.serving.statistics.watch, traces.watch if traces is not None else None, watch)
    tell_workers(loop, traces, has_tenants=access is not None)
    if access is not None:
        access.give_secrets(local_of(loop.engine))
    server, bill = Server(api.handle, wire.parse_problem, limits), Bill(api, store, time.time)
    metrics.on_ended.append(bill.ended)
    metrics.on_ran.append(bill.ran)
    gateway = Gateway(app, loop, api, server, metrics, bill, host, port, oip, secure=tls is not None)
    await live.start()
    try:
        if access is not None:
            keep_limits(access, loop)
        if prepare is not None:  # before any call comes, new or left over
            await prepare(app, loop, api)
        gateway.durable = _keep_runs(api, loop, metrics, store, keep_us) if store is not None else None
        gateway.triggers = await open_state(app, live.book, loop, gateway.durable)
        StateSite(api, live.book)
        watch_lag(api)
        if ingress:
            gateway.hub = Hub(api, oip, ledger_of(loop.engine), limits, tls, guarded=door.guarded)
            up = await gateway.hub.start(ingress, host, port, grpc_port)
            gateway.port, oip.grpc_port = up.port, up.grpc_port
        else:
            secured = {"ssl": context(*tls)} if tls is not None else {}
            gateway.port = await server.start(host, port, **secured, **options)
            if grpc_port is not None:
                await oip.open_grpc(host, grpc_port, tls)
    except BaseException:  # no caller knows what has been started by now
        await gateway.stop(0.0)
        raise
    return gateway


def _routes(app: App, loop: LiveLoop, metrics: Metrics, door: Door, limits: Limits, full_errors: bool) -> tuple[Api, Oip]:
    """The routes, with their authorization."""
    api = Api(
        *(loop, targets_of(app), metrics),
        lambda: document(api.targets, v2_paths(oip.serving.catalogue)),
        full_errors=full_errors,
    )
    api.ready = lambda: standing(loop.controller, api.needless())
    api.allow = door.allow
    oip = mount(api, loop, metrics, body_limit=limits.body_bytes)
    return api, oip


def _keep_runs(api: Api, loop: LiveLoop, metrics: Metrics, store: Store, keep_us: int) -> Durable:
    """Open durable runs; those that an earlier server left are recovered."""
    durable = Durable(loop, store, lambda ending: api.ending_problem(ending).body(), keep_us=keep_us)
    durable.on_end = metrics.ended
    api.runs = Runs(api, durable)
    metrics.registry.register(RunsNow(durable))
    if store.exists:
        durable.start()
    return durable


def _all(*watches: Watch | None) -> Watch:
    wanted = [watch for watch in watches if watch is not None]

    def follow(now_us: int, event: Any, actions: Any) -> None:
        for watch in wanted:
            watch(now_us, event, actions)

    return follow


def standing(controller: Controller, needless: set[str]) -> bool:
    """Every function has its minimum of warm instances."""
    return all(
        name in needless or sum(one.phase is Phase.WARM for one in function.instances.values()) >= function.spec.scale.min
        for name, function in controller.state.functions.items()
    )
