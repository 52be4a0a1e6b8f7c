"""Clockwork: the batch that has to start soonest, a whole GPU for it, and nothing that is late."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from lamina import policies
from lamina.core.actions import Load, Reject, Reply, StartBatch
from lamina.core.workflow.flow import Flow, Task
from lamina.sim.run import run
from lamina.sim.scenario import parse
from lamina.types import DeviceSpec, FunctionSpec, QuotaSpec, ScaleSpec, SliceLimits
from tests.script import BIG_GPU, GPU, Script, a_function
from tests.sim.conftest import PAGES, SMALL

MS = 1_000


def clockwork(script: Script, *functions: FunctionSpec, **more: Any) -> Script:
    options = more.pop("options", {})
    return script.given(*functions, policy=policies.build("clockwork", options), engine=True, **more)


@pytest.fixture
def busy(script: Script) -> Script:
    """A GPU that is taken for the next 10 ms; ten more for each batch, however large."""
    clockwork(script, a_function(max_batch=32), takes={"f": 10 * MS})
    script.at(0).arrives("first", within_us=900 * MS)
    return script


def test_a_batch_has_the_whole_gpu(script: Script):
    clockwork(script, a_function(share=0.25), devices=[BIG_GPU], takes={"f": 10 * MS})
    script.at(0).arrives("a", "b", within_us=900 * MS)
    script.at(100 * MS)
    assert [batch.mask.bit_count() for batch in script.batches] == [8, 8]
    assert script.endings["b"].latency_us == 20 * MS


def test_batches_come_in_powers_of_two(busy: Script):
    busy.arrives(*(f"c{number}" for number in range(7)), within_us=500 * MS)
    busy.at(100 * MS)
    assert busy.sizes == [1, 4, 2, 1]


def test_a_batch_is_no_larger_than_its_most_urgent_member_can_bear(script: Script):
    clockwork(script, a_function(max_batch=16), options={"window_us": 0}, takes={"f": (2 * MS, 1 * MS)})
    script.at(0).arrives("first", within_us=900 * MS)
    script.arrives("urgent", within_us=10 * MS)  # 3 ms until it is free leave seven: four jobs take six
    script.arrives(*(f"c{number}" for number in range(8)), within_us=500 * MS)
    script.at(100 * MS)
    assert script.sizes[1] == 4
    assert "urgent" in script.served[1]


def test_a_batch_is_not_sent_behind_one_that_leaves_it_too_few_cores(script: Script):
    few, many = a_function("few", cores=1), a_function("many", cores=3)
    clockwork(script, few, many, devices=[replace(GPU, cores=4)], takes={"few": 10 * MS, "many": 10 * MS})
    script.at(0).arrives("c1", target="few", within_us=900 * MS)
    script.at(8 * MS).arrives("c2", target="many", within_us=900 * MS)
    assert len(script.batches) == 1
    assert script.at(100 * MS).batches[1].cores == 3


def test_the_next_batch_is_sent_only_when_its_window_opens(busy: Script):
    busy.arrives("c1", within_us=500 * MS)
    assert len(busy.at(4 * MS).batches) == 1
    assert len(busy.at(5 * MS).batches) == 2
    assert busy.batches[1].behind == busy.batches[0].batch_id


def test_what_can_no_longer_be_in_time_is_dropped(busy: Script):
    busy.arrives("c1", within_us=15 * MS)
    busy.at(100 * MS)
    assert busy.ending("c1") == "deadline"
    assert busy.sizes == [1]


def test_what_was_never_possible_is_refused_on_arrival(busy: Script):
    assert busy.arrives("c1", within_us=9 * MS) == [Reject("c1", "deadline", 1 * MS, 10 * MS)]


def test_of_two_models_the_one_that_has_to_start_sooner_goes(script: Script):
    clockwork(script, a_function("f"), a_function("g"), takes={"f": 10 * MS, "g": 30 * MS})
    script.at(0).arrives("running", within_us=900 * MS)
    script.arrives("short", target="f", within_us=60 * MS)  # may start as late as 50 ms from now
    script.arrives("long", target="g", within_us=70 * MS)  # 40 ms
    script.at(200 * MS)
    assert script.served == [("running",), ("long",), ("short",)]


def test_steps_on_a_host_share_its_cores(script: Script):
    host = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=4, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    clockwork(script, FunctionSpec(name="f", cores=2), devices=[host], takes={"f": 10 * MS})
    script.at(0).arrives("a", "b", within_us=12 * MS)
    script.at(50 * MS)
    assert [script.endings[call].latency_us for call in ("a", "b")] == [10 * MS, 10 * MS]


def test_a_model_that_is_nowhere_is_loaded(script: Script):
    clockwork(script, a_function(), warm=False, takes={"f": 10 * MS}, loads={"f": 20 * MS})
    script.at(0).arrives("c", within_us=100 * MS)
    script.at(100 * MS)
    assert script.endings["c"].latency_us == 30 * MS


CHAIN = Flow("chain", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))


@pytest.fixture
def naive(script: Script) -> Script:
    two = [GPU, DeviceSpec(id="gpu1", kind="gpu", units=1, memory_mib=1_000)]
    functions = (a_function("f"), a_function("g"))
    options = {"compat": True}
    return clockwork(script, *functions, options=options, flows=[CHAIN], devices=two, takes={"f": 4 * MS, "g": 8 * MS})


def test_as_the_thesis_has_it_a_run_stays_on_one_device_and_has_it_to_itself(naive: Script):
    naive.at(0).arrives("x", "y", "z", target="chain", within_us=900 * MS)
    naive.at(100 * MS)
    on = {call: {batch.device for batch in naive.batches if batch.jobs[0].call_id == call} for call in "xyz"}
    assert on == {"x": {"gpu0"}, "y": {"gpu1"}, "z": {"gpu0"}}
    assert [naive.endings[call].latency_us for call in "xyz"] == [12 * MS, 12 * MS, 24 * MS]


def test_as_the_thesis_has_it_nothing_is_dropped_however_late(naive: Script):
    calls = [f"c{number}" for number in range(20)]
    naive.at(0).arrives(*calls, target="chain", within_us=20 * MS, expires_us=900 * MS)
    naive.at(500 * MS)
    assert all(isinstance(naive.endings[call], Reply) for call in calls)
    assert sum(not naive.endings[call].late for call in calls) == 2


@pytest.mark.parametrize("compat", [False, True])
def test_every_invariant_holds_under_load(compat: bool):
    scenario = parse(SMALL + PAGES)
    summary = run(scenario, policy="clockwork", options={"compat": compat}, calls=300, check=True)
    assert summary.total.answered > 0


def loads_of(script: Script) -> list[str]:
    return [action.function for _, action in script.all(Load)]  # type: ignore[attr-defined]


def test_a_model_whose_jobs_wait_for_their_quota_is_not_idle(script: Script):
    limited = a_function(quota=QuotaSpec(limit=0.05, window_us=4_000 * MS), scale=ScaleSpec(max=1, idle_us=10 * MS))
    clockwork(script, limited, warm=False, takes={"f": 300 * MS}, loads={"f": MS})
    script.at(0).arrives("c1", "c2", "c3", within_us=60_000 * MS)
    script.at(50_000 * MS)
    starts_us = [at_us for at_us, _ in script.all(StartBatch)]
    assert starts_us[2] > 5_000 * MS  # the second was sent before the first had used the quota up
    assert script.ending("c3") == "reply"
    assert loads_of(script) == ["f"]


def test_models_over_their_quota_do_not_take_turns_to_load(script: Script):
    quota = QuotaSpec(limit=0.05, window_us=400 * MS)
    functions = [a_function(name, quota=quota, memory_mib=600) for name in "fg"]
    clockwork(script, *functions, warm=False, takes={"f": 30 * MS, "g": 30 * MS}, loads={"f": MS, "g": MS})
    for target in "fg":
        script.at(script.now_us).arrives(*(f"{target}{number}" for number in range(3)), target=target, within_us=60_000 * MS)
    script.at(50_000 * MS)
    assert {script.ending(f"{target}{number}") for target in "fg" for number in range(3)} == {"reply"}
    assert len(loads_of(script)) <= len(script.batches)


@pytest.mark.parametrize(("g_within_ms", "h_within_ms", "order"), [(50_000, 60_000, "fgh"), (60_000, 50_000, "fghg")])
def test_what_was_loaded_for_a_job_makes_room_only_for_a_more_urgent_one(
    script: Script, g_within_ms: int, h_within_ms: int, order: str
):
    """The GPU is busy for five seconds with `f`; there is memory for one more."""
    functions = [a_function(name, memory_mib=500) for name in "fgh"]
    takes = {"f": 5_000 * MS, "g": 30 * MS, "h": 30 * MS}
    clockwork(script, *functions, warm=False, takes=takes, loads=dict.fromkeys("fgh", MS))
    script.at(0).arrives("c1", target="f", within_us=60_000 * MS)
    script.at(100 * MS).arrives("c2", target="g", within_us=g_within_ms * MS)
    script.at(200 * MS).arrives("c3", target="h", within_us=h_within_ms * MS)
    script.at(20_000 * MS)
    assert [script.ending(f"c{number}") for number in (1, 2, 3)] == ["reply"] * 3
    assert "".join(loads_of(script)) == order
