"""The KaaS policies: one request at a time on a whole GPU, models stay where they ran, memory is managed."""

from __future__ import annotations

from typing import Any

import pytest

from lamina import policies
from lamina.core.actions import Load, Unload
from lamina.core.events import DeviceLost
from lamina.sim.run import run
from lamina.sim.scenario import parse
from lamina.types import DeviceSpec, Slo
from tests.script import BIG_GPU, Script, a_function
from tests.sim.conftest import PAGES, SMALL

MS = 1_000
NAMES = ["kaas_rr", "kaas_balance", "kaas_srtf", "kaas_mlfq", "kaas_exclusive", "kaas_affinity"]
LONG = Slo(timeout_us=10**12)


def gpus(count: int, memory_mib: int = 1_000) -> list[DeviceSpec]:
    return [DeviceSpec(id=f"gpu{number}", kind="gpu", units=1, memory_mib=memory_mib) for number in range(count)]


def models(*names: str, memory_mib: int = 100) -> list[Any]:
    return [a_function(name, memory_mib=memory_mib, slo=LONG) for name in names]


def given(script: Script, name: str, options: dict[str, Any] | None = None, **more: Any) -> Script:
    """Models r (5 ms) and b (20 ms), 10 ms to load either, on two GPUs."""
    setup: dict[str, Any] = {
        "devices": gpus(2),
        "takes": {"r": 5 * MS, "b": 20 * MS, "c": 5 * MS, "d": 5 * MS},
        "loads": dict.fromkeys("rbcd", 10 * MS),
        "warm": False,
        "engine": True,
    } | more
    functions = setup.pop("functions", models("r", "b"))
    return script.given(*functions, policy=policies.build(name, options or {}), **setup)


def order(script: Script) -> list[str]:
    return [call for calls in script.served for call in calls]


def places(script: Script) -> dict[str, str]:
    return {batch.jobs[0].call_id: batch.device for batch in script.batches}


@pytest.mark.parametrize("name", NAMES)
def test_a_request_has_the_whole_gpu_to_itself(script: Script, name: str):
    given(script, name, devices=[BIG_GPU])
    script.arrives("r1", "r2", target="r")
    script.at(100 * MS)
    assert [batch.mask for batch in script.batches] == [BIG_GPU_MASK, BIG_GPU_MASK]
    assert [script.endings[call].latency_us for call in ("r1", "r2")] == [15 * MS, 20 * MS]


BIG_GPU_MASK = (1 << BIG_GPU.units) - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_loaded_once_per_gpu(script: Script, name: str):
    given(script, name, devices=gpus(1))
    for number in range(4):
        script.at(number * 100 * MS).arrives(f"r{number}", target="r")
    script.at(900 * MS)
    assert len(script.all(Load)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_in_time_any_more_is_dropped(script: Script, name: str):
    given(script, name, devices=gpus(1))
    script.arrives("first", target="r")
    script.at(50 * MS).arrives("running", target="r")
    script.arrives("late", target="r", within_us=9 * MS)
    script.at(200 * MS)
    assert script.ending("late") == "deadline"


@pytest.mark.parametrize("name", NAMES)
def test_a_request_whose_worker_dies_while_it_loads_is_served_by_the_next(script: Script, name: str):
    given(script, name, devices=gpus(1))
    script.arrives("r1", target="r")
    script.loses(next(iter(script.controller.state.instances)))
    script.at(500 * MS)
    assert script.ending("r1") == "reply"


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_that_goes_takes_no_request_with_it(script: Script, name: str):
    given(script, name)
    script.arrives("r1", "r2", "r3", target="r")
    script.at(2 * MS).tell(DeviceLost("gpu0"))
    script.at(500 * MS)
    assert [script.ending(call) for call in ("r1", "r2", "r3")] == ["reply"] * 3


@pytest.mark.parametrize("name", NAMES)
def test_every_invariant_holds_under_load(name: str):
    summary = run(parse(SMALL + PAGES), policy=name, options={}, calls=300, check=True)
    assert summary.total.answered > 0


# ------------------------------------------------------------------------------------------------ who goes where


def test_round_robin_passes_over_a_busy_gpu(script: Script):
    given(script, "kaas_rr")
    script.arrives("b1", target="b")
    script.arrives("r1", "r2", target="r")
    script.at(500 * MS)
    assert places(script) == {"b1": "gpu0", "r1": "gpu1", "r2": "gpu1"}


def test_round_robin_as_published_waits_for_the_gpu_whose_turn_it_is(script: Script):
    given(script, "kaas_rr", {"compat": True})
    script.arrives("b1", target="b")
    script.arrives("r1", "r2", target="r")
    script.at(500 * MS)
    assert places(script) == {"b1": "gpu0", "r1": "gpu1", "r2": "gpu0"}


def test_balance_is_first_come_first_served(script: Script):
    given(script, "kaas_balance", devices=gpus(1))
    for call in ("r1", "b1", "r2"):
        script.arrives(call, target=call[0])
    script.at(500 * MS)
    assert order(script) == ["r1", "b1", "r2"]


def test_balance_takes_the_gpu_that_has_been_free_longest(script: Script):
    given(script, "kaas_balance", devices=gpus(3))
    script.arrives("b1", target="b")
    script.arrives("r1", target="r")
    script.at(100 * MS)
    for call in ("x", "y", "z"):
        script.arrives(call, target="r")
    script.at(500 * MS)
    assert [places(script)[call] for call in ("x", "y", "z")] == ["gpu2", "gpu1", "gpu0"]


def test_the_shortest_goes_first(script: Script):
    given(script, "kaas_srtf", devices=gpus(1))
    script.arrives("running", target="r")
    for call in ("b1", "r1", "r2"):
        script.arrives(call, target=call[0])
    script.at(500 * MS)
    assert order(script) == ["running", "r1", "r2", "b1"]


def test_a_long_request_does_not_wait_for_short_ones_that_are_yet_to_come(script: Script):
    """What the published queue does, and an on-line one must not."""
    given(script, "kaas_srtf", devices=gpus(1))
    script.arrives("b1", target="b")
    script.at(1 * MS).arrives("r1", target="r")
    script.at(500 * MS)
    assert order(script) == ["b1", "r1"]


def draw(seed: int) -> list[str]:
    script = given(Script(), "kaas_mlfq", {"seed": seed}, devices=gpus(1))
    for number in range(8):
        script.arrives(f"r{number}", target="r")
        script.arrives(f"b{number}", target="b")
    script.at(2_000 * MS)
    return order(script)


def test_draws_repeat_with_their_seed():
    assert draw(3) == draw(3)
    assert len({tuple(draw(seed)) for seed in range(5)}) > 1


def test_a_model_with_few_requests_is_drawn_soon(script: Script):
    """Among forty requests of the other it waits for a draw or two, not for its turn."""
    given(script, "kaas_mlfq", devices=gpus(1))
    script.arrives(*(f"r{number}" for number in range(40)), target="r")
    script.arrives("b1", target="b")
    script.at(2_000 * MS)
    assert order(script).index("b1") < 10


def test_a_gpu_that_belongs_to_another_model_stays_idle(script: Script):
    given(script, "kaas_exclusive")
    script.arrives("r1", "r2", target="r")
    script.at(500 * MS)
    assert places(script) == {"r1": "gpu0", "r2": "gpu0"}


def test_with_more_models_than_gpus_workers_are_restarted(script: Script):
    """Both would fit; a worker is for one model all the same."""
    given(script, "kaas_exclusive", devices=gpus(1))
    for number in range(3):
        script.at(number * 200 * MS).arrives(f"r{number}", target="r")
        script.at(number * 200 * MS + 100 * MS).arrives(f"b{number}", target="b")
    script.at(900 * MS)
    assert len(script.all(Load)) == 6
    assert len(script.all(Unload)) == 5


def pressed(options: dict[str, Any]) -> set[str]:
    """GPUs that r runs on when it alone is called, far more often than two GPUs can serve."""
    script = given(Script(), "kaas_exclusive", options | {"period_us": 50 * MS}, devices=gpus(4))
    script.arrives("b1", target="b")
    for number in range(200):
        script.at((1 + number) * MS).arrives(f"r{number}", target="r")
    script.at(2_000 * MS)
    return {batch.device for batch in script.batches if batch.function == "r"}


def test_a_model_under_pressure_is_given_a_gpu_if_stealing_is_allowed():
    assert len(pressed({})) == 2
    assert len(pressed({"steal": True})) == 3  # the other keeps one


def test_affinity_keeps_models_where_they_are(script: Script):
    given(script, "kaas_affinity")
    for number in range(6):
        script.at(number * 100 * MS).arrives(f"b{number}", target="b")
        script.arrives(f"r{number}", target="r")
    script.at(900 * MS)
    assert len(script.all(Load)) == 2


def test_affinity_uses_a_foreign_gpu_rather_than_leave_it_idle(script: Script):
    given(script, "kaas_affinity")
    script.arrives("r1", "r2", target="r")
    script.at(500 * MS)
    assert set(places(script).values()) == {"gpu0", "gpu1"}


def test_affinity_gives_both_models_the_same_time(script: Script):
    """One long request for every four short ones."""
    given(script, "kaas_affinity", devices=gpus(1))
    script.arrives(*(f"r{number}" for number in range(40)), target="r")
    script.arrives(*(f"b{number}" for number in range(10)), target="b")
    script.at(3_000 * MS)
    first = order(script)[:25]
    assert sum(call[0] == "b" for call in first) in (4, 5, 6)


# ------------------------------------------------------------------------------------------------------- memory


def served_in_turn(script: Script, calls: str, evict: str, **more: Any) -> list[str]:
    """Calls one after another on a GPU that holds two of four models; what is unloaded, in order."""
    options = {"evict": evict}
    given(script, "kaas_balance", options, devices=gpus(1, 200), functions=models(*"rbcd"), **more)
    for number, model in enumerate(calls):
        script.at(number * 100 * MS).arrives(f"{model}{number}", target=model)
    script.at(len(calls) * 100 * MS)
    return [action.instance.partition("-")[0] for _, action in script.all(Unload)]


def test_the_least_recently_used_makes_room(script: Script):
    assert served_in_turn(script, "rbrc", "lru") == ["b"]
    assert served_in_turn(Script(), "rbc", "lru") == ["r"]


def test_models_used_often_stay(script: Script):
    """r has been used three times, so b goes although it is the younger one."""
    assert served_in_turn(script, "rrrbc", "two-list") == ["b"]
    assert served_in_turn(Script(), "rrrbc", "lru") == ["r"]


def test_what_is_dear_to_load_stays(script: Script):
    loads = {"r": 90 * MS, "b": 1 * MS, "c": 10 * MS, "d": 10 * MS}
    assert served_in_turn(script, "rbc", "cost", loads=loads) == ["b"]


def test_a_model_that_fits_on_no_gpu_is_refused(script: Script):
    given(script, "kaas_balance", functions=models("r", memory_mib=5_000))
    script.arrives("r1", target="r")
    assert script.ending("r1") == "no-capacity"
