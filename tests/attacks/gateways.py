"""Gateways for attacks: emulated devices, so that no process is started."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import lamina
from lamina import policies
from lamina.bootstrap import open_emulated
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.predict.profile import Point, Profile
from lamina.sdk.states_workflow import from_asl
from lamina.store.base import Store
from lamina.store.open import open_store

POINTS = [Point(batch=batch, units=units, p50_us=300 + 10 * batch) for batch in (1, 2, 4, 8) for units in (1, 2, 4)]


def small_app() -> lamina.App:
    """A function, a workflow of it, and workflows without functions."""
    app = lamina.App("attacked")

    @app.function(scale=lamina.Scale(min=1, max=1), batch=8)
    def echo(x: Any) -> Any:
        return x

    @app.workflow()
    def twice(x: Any) -> Any:
        return echo(echo(x))

    ready = {"Type": "Pass", "End": True}
    from_asl({"StartAt": "Ready", "States": {"Ready": ready}}, app=app, name="idle")
    for name, seconds in (("nap", 1), ("slumber", 3_600)):
        wait = {"Type": "Wait", "Seconds": seconds, "Next": "Ready"}
        from_asl({"StartAt": "Wait", "States": {"Wait": wait, "Ready": ready}}, app=app, name=name)
    return app


@contextlib.asynccontextmanager
async def emulated(
    store: str | Store = "", policy: str = "frontier", listen: ListenConfig | None = None, **options: Any
) -> AsyncIterator[Gateway]:
    profile = Profile(function="echo", device="cpu", points=POINTS, load_us=1_000)
    runtime = open_emulated(small_app(), "cpu", [profile], policy=policies.build(policy))
    opened = open_store(store) if store and isinstance(store, str) else store or None
    gateway = await open_gateway(runtime, listen, store=opened, **options)
    try:
        yield gateway
    finally:
        await gateway.stop(2.0)
