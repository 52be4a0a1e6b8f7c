"""State of functions on a GPU: callables on slices, and `pre` and `post` of models. On a twin of the device."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.gpu import discovery
from tests.serving import Browser, run, write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.live, pytest.mark.slow]

APP = """
import lamina, torch

app = lamina.App("stateful")

@app.function(gpu="1/4", slo="20s")
def single(user):
    app.state[user] = app.state.get(user, 0) + 1
    return app.state[user]

@app.function(gpu="1/4", batch=8, slo="20s")
def batched(user):
    counts = []
    for request, name in zip(lamina.context().requests, user):
        with request:
            app.state["b/" + name] = app.state.get("b/" + name, 0) + 1
            counts.append(ValueError("bad") if name == "bad" else app.state["b/" + name])
    return counts

@app.function(gpu="1/4", batch=8, slo="20s")
class Model(lamina.TorchModel):
    def load(self):
        return torch.nn.Identity(), torch.zeros(1, 1)
    def pre(self, user):
        app.state.counter("begun").add(1)
        return [float(app.state.get("m/" + user, 0))]
    def post(self, row):
        app.state.counter("ended").add(1)
        if row[0] > 1000:
            raise ValueError("too many")
        app.state["latest"] = float(row[0])
        return float(row[0])

@app.function(gpu="1/4", batch=8, slo="20s")
class Counting(lamina.TorchModel):
    "Changes without a read need no answer, and no thread."
    def load(self):
        return torch.nn.Identity(), torch.zeros(1, 1)
    def post(self, row):
        app.state.counter("rows").add(1)
        return float(row[0])
"""


async def at_once(gateway: Gateway, function: str, bodies: list[Any]) -> list[Any]:
    """So many calls together, each on its own connection: batches form."""

    async def one(body: Any) -> Any:
        async with Browser(gateway.port) as browser:
            found = await browser.post(f"/v1/functions/{function}", body, **{"Lamina-Deadline-Ms": "60000"})
            return found.json if found.status == 200 else found.status

    return await asyncio.gather(*[one(body) for body in bodies])


async def tell(gateway: Gateway) -> dict[str, Any]:
    said: dict[str, Any] = {}
    said["single"] = await at_once(gateway, "single", [{"user": "ann"}] * 6)
    said["batched"] = await at_once(gateway, "batched", [{"user": name} for name in ("ann", "bob", "bad", "ann") * 4])
    state = gateway._runtime.state
    said["model"] = await at_once(gateway, "model", [{"user": f"u{number}"} for number in range(12)])
    said["counting"] = await at_once(gateway, "counting", [{"x": [float(number)]} for number in range(12)])
    cells = {key: cell for (scope, key), cell in state.cells.items()}
    said["keys"] = {key for key, cell in cells.items() if cell.value is not None}
    async with Browser(gateway.port) as browser:
        for name in ("begun", "ended", "rows"):
            said[name] = (await browser.ask("GET", f"/v1/state/{name}")).json
    gateway.driver.controller.state.check()
    return said


@pytest.fixture(scope="module", params=["null", pytest.param("green", marks=pytest.mark.gpu)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if request.param == "green" and not discovery.find_gpus_in_subprocess():
        pytest.skip("no GPU here")
    app: Path = write_app(tmp_path_factory.mktemp("gpu"), APP)

    async def all_of_it() -> dict[str, Any]:
        gateway = await open_gateway(
            open_local(str(app), gpu="null" if request.param == "null" else "auto", hang_floor_us=60_000_000)
        )
        try:
            return await tell(gateway)
        finally:
            await gateway.stop(5)

    found: dict[str, Any] = run(all_of_it, 110)
    return found


def test_calls_on_a_slice_read_and_change_state_and_lose_nothing(story: dict[str, Any]):
    assert sorted(story["single"]) == [1, 2, 3, 4, 5, 6]


def test_requests_of_a_batch_on_a_slice_have_their_own_state(story: dict[str, Any]):
    ann = [found for found, name in zip(story["batched"], ("ann", "bob", "bad", "ann") * 4, strict=True) if name == "ann"]
    assert sorted(ann) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert story["batched"].count(500) == 4 and "b/bad" not in story["keys"]


def test_pre_and_post_of_a_model_read_and_change_the_state_of_their_request_once(story: dict[str, Any]):
    assert story["model"] == [0.0] * 12
    assert (story["begun"]["value"], story["ended"]["value"]) == (12, 12)
    assert "latest" in story["keys"]


def test_changes_without_a_read_are_made_as_well(story: dict[str, Any]):
    assert story["counting"] == [float(number) for number in range(12)] and story["rows"]["value"] == 12
