"""The engine of a GPU, with everything but the GPU: a real executor process on slices of nothing.

The process takes seconds to import torch, so one server tells one story, and each test makes one claim about it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.core.actions import JobRef
from lamina.engines.composite import CompositeEngine
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.gpu import discovery
from lamina.values.references import DeviceRef, ShmRef, Stored
from tests.serving import Answer, Browser, run, write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.live, pytest.mark.slow]

APP = """
import numpy, os, time
import lamina, torch

app = lamina.App("tested")

@app.function(gpu="1/4", batch=8)
class Widen(lamina.TorchModel):
    "More than fits into a frame."
    def load(self):
        torch.manual_seed(0)
        return torch.nn.Linear(4, 40_000), torch.zeros(1, 4)

@app.function(gpu="1/8", batch=8)
class Narrow(lamina.TorchModel):
    def load(self):
        module = torch.nn.Linear(40_000, 2)
        with torch.no_grad():
            module.weight.fill_(1.0), module.bias.zero_()
        return module, torch.zeros(1, 40_000)
    def post(self, row):
        return round(float(row[0]), 1)

@app.function(gpu="1/4", batch=4)
def double(x):
    return [torch.as_tensor(value) * 2 for value in x]

@app.function()
def total(x):
    return round(float(numpy.sum(x)), 1)

@app.function(gpu="1/4")
class Broken:
    def load(self):
        raise ValueError("the weights are missing")
    def __call__(self, x):
        return x

@app.function(gpu="1/4")
def slow(seconds):
    time.sleep(seconds)
    return os.getpid()

@app.function(gpu="1/8", idempotent=False)
def stuck(x):
    while x == "spin":
        pass
    return x

@app.function(gpu=lamina.GPU("1/8", isolated=True))
def alone():
    return os.getpid()

@app.workflow()
def stays(x):
    return Narrow(Widen(x))

@app.workflow()
def leaves(x):
    return total(Widen(x))
"""


async def tell(gateway: Gateway) -> dict[str, Any]:
    engine = gateway.driver.engine
    assert isinstance(engine, CompositeEngine)
    (gpu,) = engine.gpus
    said: dict[str, Any] = {}
    async with Browser(gateway.port) as browser, Browser(gateway.port) as other:
        said["wide"] = await browser.post("/v1/functions/widen", [1, 2, 3, 4])
        both = await asyncio.gather(browser.post("/v1/functions/widen", [1, 2]), other.post("/v1/functions/widen", [1, 2, 3, 4]))
        said["wrong"], said["beside"] = both
        said["double"] = await browser.post("/v1/functions/double", [1.5, 2])
        said["broken"] = await browser.post("/v1/functions/broken", 1)
        await browser.post("/v1/workflows/stays", [1, 2, 3, 4])  # from now on all its functions are loaded
        stayed: list[DeviceRef] = []
        fetched: list[Any] = []
        put = gateway.driver.data.put

        def watched(job: JobRef, value: Stored) -> None:
            put(job, value)
            if isinstance(value, DeviceRef):
                stayed.append(value)
                gpu.fetch([value], lambda: fetched.append(gpu.executor.values.copies[value.slot]))

        gateway.driver.data.put = watched  # type: ignore[method-assign]
        said["stays"] = await browser.post("/v1/workflows/stays", [1, 2, 3, 4])
        gateway.driver.data.put = put  # type: ignore[method-assign]
        said["stayed"], said["fetched"] = stayed, fetched
        said["leaves"] = await browser.post("/v1/workflows/leaves", [1, 2, 3, 4])
        said["pid"] = await browser.post("/v1/functions/slow", 0)
        said["alone"] = await browser.post("/v1/functions/alone", None)
        late = asyncio.create_task(browser.post("/v1/functions/slow", 0.3))
        while not gpu._batches.open:
            await asyncio.sleep(0.01)
        os.kill(gpu.pid, signal.SIGKILL)
        said["after"] = await late
        said["again"] = await other.post("/v1/workflows/stays", [1, 2, 3, 4])
        said["still"] = await other.post("/v1/functions/alone", None)
        said["status"] = (await other.ask("GET", "/v1/status")).json
        await other.post("/v1/functions/stuck", "not")
        said["stuck"] = await other.post("/v1/functions/stuck", "spin", **{"Lamina-Deadline-Ms": "1500"})
        said["unstuck"] = await other.post("/v1/functions/stuck", "not")
    said["left"] = (set(gpu.executor.values.held), set(gpu.executor.slots.held)) if gpu.executor else None
    gateway.driver.controller.state.check()
    return said


@pytest.fixture(scope="module", params=["null", pytest.param("green", marks=pytest.mark.gpu)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if request.param == "green" and not discovery.find_gpus_in_subprocess():
        pytest.skip("no GPU here")
    app: Path = write_app(tmp_path_factory.mktemp("gpu"), APP)

    async def all_of_it() -> dict[str, Any]:
        live = open_local(str(app), gpu="null" if request.param == "null" else "auto", probe=True, hang_floor_us=60_000_000)
        gateway = await open_gateway(live)
        try:
            return await tell(gateway)
        finally:
            await gateway.stop(5)

    found: dict[str, Any] = run(all_of_it, 110)
    return found


def body(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json


def test_a_torch_module_is_served_on_a_slice_of_the_gpu(story: dict[str, Any]):
    assert len(body(story["wide"])) == 40_000 and story["wide"].headers["lamina-slice"].startswith(("null0/", "gpu0/"))


def test_a_wrong_shape_fails_alone(story: dict[str, Any]):
    assert (story["wrong"].status, story["beside"].status) == (422, 200)


def test_a_plain_callable_may_return_tensors(story: dict[str, Any]):
    assert body(story["double"]) == [3.0, 4.0]


def test_a_function_that_cannot_be_loaded_says_why_and_harms_no_other(story: dict[str, Any]):
    assert story["broken"].status == 503 and b"the weights are missing" in story["broken"].body


def test_a_value_between_two_steps_on_the_device_does_not_leave_it(story: dict[str, Any]):
    assert [ref.size for ref in story["stayed"]] == [160_000] and isinstance(body(story["stays"]), float)


def test_a_value_on_the_device_can_be_fetched_for_others_while_its_run_goes_on(story: dict[str, Any]):
    (copy,) = story["fetched"]
    assert type(copy) is ShmRef and copy.size > 160_000


def test_a_value_that_a_cpu_step_needs_is_the_same_there(story: dict[str, Any]):
    assert body(story["leaves"]) == pytest.approx(body(story["stays"]), abs=1.0)


def test_a_lost_executor_is_replaced_and_its_batch_retried(story: dict[str, Any]):
    assert body(story["after"]) != body(story["pid"])


def test_all_functions_come_back_after_the_executor_was_lost(story: dict[str, Any]):
    assert body(story["again"]) == body(story["stays"])


def test_a_function_that_hangs_is_ended_with_its_executor_and_all_goes_on(story: dict[str, Any]):
    assert (story["stuck"].status, body(story["unstuck"])) == (504, "not")


def test_an_isolated_function_has_a_process_of_its_own_and_does_not_feel_the_loss(story: dict[str, Any]):
    assert body(story["alone"]) == body(story["still"]) != body(story["pid"])


def test_no_value_stays_behind_when_its_run_has_ended(story: dict[str, Any]):
    assert story["left"] == (set(), set())


def test_the_status_counts_restarts_and_shows_what_functions_hold(story: dict[str, Any]):
    device = next(one for one in story["status"]["devices"] if one["executor"])
    shares = {one["name"]: one["held"] for one in story["status"]["functions"]}
    assert device["executor"]["restarts"] == 1 and shares["slow"] > 0
