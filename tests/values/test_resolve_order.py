"""Data resolution: questions are answered one after the other, because each answer decides the numbers of the items after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lamina import App, each, encoding
from lamina.core.actions import Action, Load, Reply, StartBatch
from lamina.core.events import BatchFinished, Event, InstanceReady
from lamina.drivers.realtime import RealtimeDriver
from lamina.expr import evaluate
from lamina.policies import fifo, new_controller
from lamina.predict.profile_table import ProfileTable
from lamina.testing import Runtime
from lamina.types import DeviceSpec, Slo, call_for
from lamina.values.references import ErrorInfo
from lamina.values.run_values import RunValues

app = App("questions")


@app.function()
def tens(x: int) -> int:
    return x * 10


@app.function()
def hundreds(x: int) -> int:
    return x * 100


@app.workflow()
def side_by_side(xs: list[int], ys: list[int]) -> dict[str, object]:
    return {"tens": each(tens, xs), "hundreds": each(hundreds, ys)}


class AtOnce:
    """An engine that has run a batch the moment it is asked to."""

    devices = [DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=4, memory_mib=1_000)]
    load_errors: dict[str, ErrorInfo] = {}

    async def start(self, post: Callable[[Event], None], data: RunValues, deadline_us: Callable[[str], int]) -> None:
        self.post, self.data = post, data

    def perform(self, action: Action) -> None:
        if isinstance(action, Load):
            self.post(InstanceReady(action.instance))
        elif isinstance(action, StartBatch):
            for job in action.jobs:
                given = self.data.inputs(job)
                opened = {leaf: encoding.decode(stored) for leaf, stored in given.leaves}
                x = evaluate(given.args["x"], opened.__getitem__)
                self.data.put(job, encoding.encode(x * {"tens": 10, "hundreds": 100}[action.function]))
            self.post(BatchFinished(action.batch_id, 10))

    async def stop(self, grace_s: float) -> None:
        pass


EXPECTED = {"tens": [10, 20, 30], "hundreds": [400, 500]}


def test_two_maps_side_by_side_keep_their_items_apart_in_the_live_loop():
    async def run() -> object:
        loop = RealtimeDriver(new_controller(fifo.Policy(), ProfileTable([])), AtOnce(), RunValues(None, None))
        await loop.start(app.deployed())
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        inputs = {"xs": encoding.encode([1, 2, 3]), "ys": encoding.encode([4, 5])}

        def on_end(ending: object) -> None:
            assert isinstance(ending, Reply)
            answer.set_result(encoding.decode(loop.data.result("c1")))

        loop.submit(call_for("c1", "side_by_side", loop.now_us(), Slo()), inputs, on_end)
        result = await answer
        await loop.stop()
        return result

    assert asyncio.run(run()) == EXPECTED


def test_two_maps_side_by_side_keep_their_items_apart_in_a_test_of_an_app():
    assert Runtime(app).call("side_by_side", xs=[1, 2, 3], ys=[4, 5]) == EXPECTED
