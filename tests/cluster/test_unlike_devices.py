"""Unlike devices in one fleet: GPUs of two kinds and cores, on three machines; and host cores that are leased with slices."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import policies
from lamina.bootstrap import open_emulated
from lamina.core.actions import StartBatch
from lamina.core.invariants import check_device
from lamina.engines.gpu import HostCores
from lamina.errors import BadValue
from lamina.gateway.bootstrap import open_gateway
from lamina.gateway.deploy import app_package
from lamina.predict.device_presets import parse_devices
from lamina.predict.profile import Point, Profile
from lamina.worker.cpu_affinity import cores_for_gpus
from tests.cluster.clusters import cluster
from tests.engines.wheels import make_wheel
from tests.serving import Browser, run

APP = """
import os
import time

import lamina

app = lamina.App("mixed")
SECONDS = {"h200-0": 0.01, "v100-0": 0.04, "cpu0": 0.12}


def what_it_ran_on():
    "An emulated device is as fast as it is said to be."
    found = lamina.context()
    time.sleep(SECONDS[found.device])
    return {"device": found.device, "units": found.units, "cores": found.cores, "on": sorted(os.sched_getaffinity(0))}


@app.function(scale=lamina.Scale(min=2, max=2), gpu=lamina.GPU("1/5", required=True))
def score(x):
    return what_it_ran_on()


@app.function(scale=lamina.Scale(min=1, max=1))
def plain(x):
    return what_it_ran_on()


@app.workflow()
def both(x):
    return [score(x), plain(x)]
"""

SLICER = """
from lamina.gpu.slicers.null import NullSlicer
from lamina.types import DeviceSpec, SliceLimits


class Emulated(NullSlicer):
    @classmethod
    def open(cls, ordinal, *, soft):
        limits = SliceLimits(batches_per_instance=0, soft=soft)
        return cls(DeviceSpec(id="{kind}-0", kind="{kind}", units={units}, memory_mib={mib}, limits=limits))


BACK_END = Emulated
"""


def slicer(folder: Path, kind: str, units: int, mib: int) -> str:
    path = folder / f"{kind}.py"
    path.write_text(SLICER.format(kind=kind, units=units, mib=mib))
    return str(path)


@pytest.mark.live
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="sets a core apart for a GPU, and needs another")
def test_an_emulated_h200_a_v100_and_cores_serve_one_app_together(tmp_path: Path) -> None:
    (tmp_path / "mixed.py").write_text(APP)
    kinds = {"h200": slicer(tmp_path, "h200", 15, 143_000), "v100": slicer(tmp_path, "v100", 100, 16_384), "cpu": "no"}

    async def work() -> None:
        async with cluster(tmp_path / "mixed.py", tmp_path, policy="frontier") as made:
            for name, gpu in kinds.items():
                made.start(name, "--gpu", gpu, *(("--gpu-cores", "1") if gpu != "no" else ()))
            await made.live(*kinds)
            devices = {device["id"]: device for node in made.nodes().values() for device in node["devices"]}
            assert {"h200.h200-0", "v100.v100-0", "cpu.cpu0"} <= set(devices)
            cores = len(os.sched_getaffinity(0))
            assert devices["h200.cpu0"]["units"] == cores - 1 and devices["cpu.cpu0"]["units"] == cores
            functions = made.gateway.driver.controller.state.functions

            def stands() -> set[str]:
                found = [one for name in ("score", "plain") for one in functions[name].instances.values()]
                return {one.device.partition(".")[2] for one in found if one.phase.value == "warm"}

            await made.until(lambda: stands() == {"h200-0", "v100-0", "cpu0"}, 60)
            seen: list[dict[str, Any]] = []

            async def client() -> None:
                async with Browser(made.gateway.port) as browser:
                    for _ in range(10):
                        answer = await browser.post("/v1/workflows/both", 1)
                        assert answer.status == 200, answer.body
                        seen.extend(answer.json)

            await asyncio.gather(*(client() for _ in range(4)))
            on_gpus = [one for one in seen if one["device"] != "cpu0"]
            assert len(on_gpus) == len(seen) // 2  # each function on its own family of devices
            assert {(one["device"], one["units"]) for one in on_gpus} <= {("h200-0", 3), ("v100-0", 20)}
            assert all(one["cores"] == 1 and len(one["on"]) == 1 for one in on_gpus)  # the core that was leased with the slice

    run(work, 120)


def test_batches_on_an_emulated_gpu_lease_cores_of_its_host_in_the_live_server() -> None:
    app = lamina.App("leased")

    @app.function(gpu=lamina.GPU("1/15"), cpu=lamina.CPU(2), scale=lamina.Scale(min=1, max=1))
    def act(x: Any) -> Any:
        return x

    points = [Point(batch=1, units=units, cores=cores, p50_us=20_000 // cores) for units in (1, 2) for cores in (1, 2)]
    profile = Profile(function="act", device="h200", points=points, load_us=1_000)

    async def work() -> None:
        runtime = open_emulated(app, "h200+4", [profile], policy=policies.build("edf"))
        most = 0

        def watch(now_us: int, event: object, actions: object) -> None:
            nonlocal most
            (device,) = runtime.driver.controller.state.devices.values()
            check_device(device)
            most = max(most, device.cores_busy)

        runtime.driver.add_observer(watch)
        gateway = await open_gateway(runtime)
        try:

            async def client() -> None:
                async with Browser(gateway.port) as browser:
                    for _ in range(5):
                        assert (await browser.post("/v1/functions/act", 1)).status == 200

            await asyncio.gather(*(client() for _ in range(8)))
        finally:
            await gateway.stop(2)
        assert most == 4  # of four cores, two for each batch: never more, though fifteen slices are free

    run(work, 60)


def start(batch_id: int, cores: int, behind: int = 0) -> StartBatch:
    return StartBatch(batch_id, "f", "f-1", "gpu0", 1, (), 0, behind=behind, cores=cores)


def test_open_batches_have_cores_of_their_own_and_one_behind_another_inherits_them() -> None:
    host = HostCores([4, 5, 6, 7])
    assert host.take(start(1, 2), {}) == [4, 5]
    assert host.take(start(2, 2), {1}) == [6, 7]
    assert host.take(start(3, 1, behind=2), {1, 2}) == [6]
    assert host.take(start(4, 2), {2, 3}) == [4, 5]  # the first has ended
    assert HostCores(()).take(start(1, 2), {}) == []


def test_cores_are_set_apart_from_the_end_and_some_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.worker.cpu_affinity.allowed_cores", lambda: (0, 1, 2, 3, 8, 9))
    assert cores_for_gpus(2, 2) == [(8, 9), (2, 3)]
    assert cores_for_gpus(2, 0) == [(), ()]
    with pytest.raises(BadValue, match="--gpu-cores: 3 for each of 2 GPUs"):
        cores_for_gpus(2, 3)


def test_emulated_devices_have_cores_where_it_is_said() -> None:
    assert [(one.id, one.cores) for one in parse_devices("h200x2+8,v100")] == [("h200-0", 8), ("h200-1", 8), ("v100-0", 0)]
    with pytest.raises(BadValue, match="the units of a CPU are its cores"):
        parse_devices("cpu+4")


PACKAGED = """
import lamina
app = lamina.App("packaged")
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE, gpu=lamina.GPU("1/4", required=True, isolated=True))
def alone():
    import tiny
    return tiny.version


@app.function(scale=ONE, gpu=lamina.GPU("1/4", required=True))
def shared():
    import tiny
    return tiny.version
"""


@pytest.mark.live
def test_packages_of_an_app_reach_isolated_functions_on_the_gpu_of_a_node_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader runs in the environment of its app's folder, as `lamina serve FOLDER` does; nodes make one of their own."""
    monkeypatch.setattr(app_package, "own_environment", lambda: tmp_path)
    app = tmp_path / "packaged" / "app.py"
    app.parent.mkdir()
    app.write_text(PACKAGED)
    (app.parent / "requirements.txt").write_text("tiny==1.0\n")
    make_wheel(tmp_path / "wheels", "tiny", "1.0")

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one", "--gpu", "null", "--wheelhouse", str(tmp_path / "wheels"))
            await made.live("one")
            errors = made.gateway.driver.engine.load_errors
            async with Browser(made.gateway.port) as browser:
                assert (await browser.post("/v1/functions/alone", {})).json == "1.0"
            await made.until(lambda: "shared" in errors)
            assert "isolated=True" in errors["shared"].hint and "alone" not in errors

    run(work, 120)
