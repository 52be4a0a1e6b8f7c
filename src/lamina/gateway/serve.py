"""Everything put together: an app, a policy, an engine, the loop and the HTTP server; started and stopped in order."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from typing import Any

from lamina.core.controller import Controller
from lamina.core.lifecycle import Phase
from lamina.errors import BadValue
from lamina.gateway import wire
from lamina.gateway.api import Api, Target
from lamina.gateway.http import Limits, Server
from lamina.gateway.metrics import Metrics
from lamina.gateway.openapi import document
from lamina.live.loop import LiveLoop, Watch
from lamina.live.start import Live
from lamina.sdk.app import App

LAG_EVERY_S = 0.005


@dataclass(slots=True)
class Gateway:
    """A running server."""

    app: App
    loop: LiveLoop
    api: Api
    server: Server
    metrics: Metrics
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def stop(self, grace_s: float = 30.0) -> int:
        """Take nothing new, finish what was accepted, then end the workers; returns how many calls were given up."""
        if self.api.closing:
            return 0
        self.api.closing = True
        await self.server.stop_accepting()
        left = await self.loop.drain(grace_s)
        await self.server.stop()
        await self.loop.stop()
        return left


def check_host(host: str) -> None:
    """Anybody who can reach the port can use it, so only this machine may."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise BadValue(
            f"host: {host!r} is not a loopback address",
            hint="serving others needs access tokens, which this version does not have; put a proxy with authentication in front",
        )


def targets_of(app: App) -> list[Target]:
    functions = [Target(f.name, "function", f.params, f.spec.slo, f.doc) for f in app.functions.values()]
    workflows = [Target(w.name, "workflow", w.params, w.flow.slo, w.doc) for w in app.workflows.values()]
    return functions + workflows


async def open_gateway(
    live: Live,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits | None = None,
    full_errors: bool = True,
    watch: Watch | None = None,
    **options: Any,
) -> Gateway:
    check_host(host)
    app, loop = live.app, live.loop
    metrics = Metrics(loop.controller)
    if watch is None:
        loop.watch = metrics.watch
    else:
        follow = watch

        def both(now_us: int, event: Any, actions: Any) -> None:
            metrics.watch(now_us, event, actions)
            follow(now_us, event, actions)

        loop.watch = both
    targets = targets_of(app)
    api = Api(loop, targets, metrics, lambda: document(targets), full_errors=full_errors)
    api.ready = lambda: standing(loop.controller)
    server = Server(api.handle, lambda status, what: (wire.plain_problem(status, what).body(), wire.PROBLEM), limits)
    await live.start()
    _watch_lag(api)
    bound = await server.start(host, port, **options)
    return Gateway(app, loop, api, server, metrics, host, bound)


def _watch_lag(api: Api) -> None:
    """Under more calls than this process can read, they wait in the system's buffers, where no clock sees them. How late
    a timer comes shows it: up at once, down slowly."""
    loop = asyncio.get_running_loop()

    def tick(due_s: float) -> None:
        late_us = int((loop.time() - due_s) * 1e6) - 1_000
        api.lag_us = max(late_us, int(0.8 * api.lag_us), 0)
        if not api.closing:
            again_s = loop.time() + LAG_EVERY_S
            loop.call_at(again_s, tick, again_s)

    tick(loop.time())


def standing(controller: Controller) -> bool:
    """Every function has the instances it must always have."""
    return all(
        sum(instance.phase is Phase.WARM for instance in function.instances.values()) >= function.spec.scale.min
        for function in controller.state.functions.values()
    )
