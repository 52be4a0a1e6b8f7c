"""Composite engine: what it remembers of instances, and for how long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lamina.core.actions import Kill, Load
from lamina.core.events import Event, InstanceLost, InstanceReady
from lamina.engines.composite import CompositeEngine
from lamina.engines.cpu import CpuEngine
from lamina.values.run_values import RunValues
from tests.serving import write_app

pytestmark = pytest.mark.live

APP = """import lamina
app = lamina.App("short")

@app.function()
def plain(x): return x

@app.function()
class Broken:
    def load(self): raise OSError("no weights")
    def __call__(self, x): return x
"""


@pytest.mark.parametrize(("function", "is_killed"), [("broken", False), ("plain", True)])
def test_an_instance_that_is_lost_is_forgotten(tmp_path: Path, function: str, is_killed: bool) -> None:
    async def main() -> dict[str, object]:
        local = CpuEngine(str(write_app(tmp_path, APP)))
        engines, lost = CompositeEngine(local, []), asyncio.Event()

        def post(event: Event) -> None:
            if isinstance(event, InstanceReady) and is_killed:
                engines.perform(Kill(event.instance, "hung"))
            if isinstance(event, InstanceLost):
                lost.set()

        await engines.start(post, RunValues(local.pool, local.reader, local.release))
        engines.perform(Load("one", function, local.devices[0].id))
        try:
            await lost.wait()
            return dict(engines._of_instance)
        finally:
            await engines.stop(0.0)

    assert asyncio.run(main()) == {}
