"""ESG: one search per batch over the steps that are left, and invokers asked in a fixed order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina.core.actions import Load, StartBatch, Unload
from lamina.core.events import InstanceLost
from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.planner.configs import ConfigArrays, ResourcePrices, config_grid
from lamina.predict.profile import Point, Profile
from lamina.published.esg.invokers import devices_by_home
from lamina.published.esg.path_search import least_by_first
from lamina.published.esg.policies import esg
from lamina.sim.run import run
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload as Arrivals
from lamina.sim.workload import steps
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo
from tests.properties import examples
from tests.script import Script, a_function

MS = 1_000
FREE = SliceLimits(batches_per_instance=0)
CHAIN = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))


def nodes(count: int, units: int = 4) -> list[DeviceSpec]:
    return [DeviceSpec(id=f"n{i}", kind="gpu", units=units, memory_mib=1_000, limits=FREE) for i in range(count)]


def ids(count: int) -> tuple[str, ...]:
    return tuple(node.id for node in nodes(count))


def parallel(us: int):  # type: ignore[no-untyped-def]
    """A little worse than in proportion to units, so that small slices are cheap and large ones fast; batches for half."""
    return lambda batch, units: round(us * (1 + batch) / 2 / units**0.8)


TAKES = {"f": parallel(40 * MS), "g": parallel(40 * MS)}


def chain(script: Script, count: int = 1, units: int = 4, **options: object) -> Script:
    policy = esg.Policy(grain=0.0, **options)  # type: ignore[arg-type]
    functions = (a_function("f", max_batch=4), a_function("g", max_batch=4))
    return script.given(*functions, flows=[CHAIN], devices=nodes(count, units), policy=policy, takes=TAKES)


def last(script: Script) -> StartBatch:
    return script.batches[-1]


# ------------------------------------------------------------------------------------------------------ planning


def test_with_much_time_the_cheapest_size_is_taken(script: Script):
    chain(script).at(0).arrives("c", target="w", within_us=200 * MS)
    assert last(script).mask.bit_count() == 1


def test_with_little_time_a_faster_one(script: Script):
    """80 ms on one unit each are too slow, 46 ms on two are not."""
    chain(script).at(0).arrives("c", target="w", within_us=50 * MS)
    assert last(script).mask.bit_count() == 2


def test_time_that_an_early_step_wasted_is_made_up_for_by_the_next(script: Script):
    chain(script).at(0).arrives("c", target="w", within_us=100 * MS)
    script.at(70 * MS).finishes(took_us=70 * MS)
    assert (last(script).function, last(script).mask.bit_count()) == ("g", 2)


def test_time_that_an_early_step_saved_is_passed_on_to_the_next(script: Script):
    chain(script).at(0).arrives("c", target="w", within_us=50 * MS)
    script.at(5 * MS).finishes()
    assert (last(script).function, last(script).mask.bit_count()) == ("g", 1)


def test_a_group_of_one_plans_with_its_share_of_the_deadline_only(script: Script):
    """g takes three times as long, so f has a quarter of the time: 10 of 40 ms."""
    flow = Flow("w", {"a": Task("a", "f", ("b",)), "b": Task("b", "g")}, ("a",))
    takes = {"f": parallel(10 * MS), "g": parallel(30 * MS)}
    policy = esg.Policy(group=1, grain=0.0)
    script.given(a_function("f"), a_function("g"), flows=[flow], devices=nodes(1), policy=policy, takes=takes)
    script.at(0).arrives("exact", target="w", within_us=40 * MS + 4)
    script.arrives("tight", target="w", within_us=39 * MS)
    assert [batch.mask.bit_count() for batch in script.batches] == [1, 2]


def test_a_batch_is_never_larger_than_the_queue_and_as_large_as_pays(script: Script):
    script.given(a_function("f", max_batch=4), devices=nodes(1, 1), policy=esg.Policy(), takes=TAKES)
    script.at(0).arrives("first", within_us=900 * MS)
    script.arrives("x", "y", "z", within_us=900 * MS)
    script.finishes()
    assert script.served == [("first",), ("x", "y", "z")]


def test_jobs_of_two_workflows_never_share_a_batch(script: Script):
    other = Flow("v", {"a": Task("a", "f")}, ("a",))
    script.given(
        a_function("f", max_batch=4), a_function("g"), flows=[CHAIN, other], devices=nodes(1, 1), policy=esg.Policy(), takes=TAKES
    )
    script.at(0).arrives("busy", target="v", within_us=900 * MS)
    for name, target in {"w1": "w", "v1": "v", "w2": "w", "v2": "v"}.items():
        script.arrives(name, target=target, within_us=900 * MS)
    script.finishes()
    script.finishes()
    assert script.served[1:] == [("w1", "w2"), ("v1", "v2")]


def test_once_a_deadline_is_lost_speed_is_not_paid_for(script: Script):
    script.given(a_function("f", max_batch=4), devices=nodes(1), policy=esg.Policy(), takes=TAKES)
    script.at(0).arrives("c", within_us=8 * MS, expires_us=900 * MS)
    assert last(script).mask.bit_count() == 1


def test_a_deadline_that_is_just_out_of_reach_is_tried_for(script: Script):
    """13.2 ms on all four units."""
    script.given(a_function("f", max_batch=4), devices=nodes(1), policy=esg.Policy(), takes=TAKES)
    script.at(0).arrives("c", within_us=12_900, expires_us=900 * MS)
    assert last(script).mask.bit_count() == 4


def test_a_call_that_cannot_be_in_time_even_on_a_whole_node_is_let_go(script: Script):
    chain(script).at(0).arrives("c", target="w", within_us=20 * MS)
    assert script.ending("c") == "deadline"


def test_nothing_is_known_yet_and_work_is_done_all_the_same(script: Script):
    script.given(a_function("f", max_batch=4, share=0.5), devices=nodes(1), policy=esg.Policy(), takes={})
    script.at(0).arrives("c", within_us=5 * MS)
    assert last(script).mask.bit_count() == 2


SIZES = [(2, 1), (1, 1), (2, 2), (1, 2), (2, 4), (1, 4)]
"""Batch and units, slowest first."""


@examples(60)
@given(st.integers(0, 10**9))
def test_the_first_choice_is_that_of_brute_force(seed: int):
    """Over batches and units of up to three steps in a row, with one job or several waiting."""
    rng = random.Random(seed)
    names = ["f", "g", "h"][: rng.randint(1, 3)]
    drawn = {name: sorted((rng.randint(1, 60) * MS for _ in range(6)), reverse=True) for name in names}
    times = {name: dict(zip(SIZES, drawn[name], strict=True)) for name in names}
    takes = {name: (lambda table: lambda batch, units: table[batch, units])(times[name]) for name in names}
    tasks = [Task(name, name, tuple(names[place + 1 : place + 2])) for place, name in enumerate(names)]
    flow = Flow("w", {task.name: task for task in tasks}, (names[0],))
    policy = esg.Policy(grain=0.0, batches=(1, 2), prefilter=rng.random() < 0.5)
    script = Script()
    script.given(*(a_function(n, max_batch=2) for n in names), flows=[flow], devices=nodes(1), policy=policy, takes=takes)
    within_us = rng.randint(20, 200) * MS
    script.at(0).arrives("c", target="w", within_us=within_us)
    tables = [
        config_grid(lambda b, c, u, name=name: times[name][b, u], (1, 2), (0,), (1, 2, 4), ResourcePrices(0.0, 0.25))
        for name in names
    ]
    first = _single_jobs(tables[0])
    least = least_by_first([first, *tables[1:]], within_us)
    if least.min() == float("inf"):
        return
    chosen = next(p for p in range(len(first)) if first[p].units == last(script).mask.bit_count())
    assert least[chosen] == pytest.approx(least.min())


def _single_jobs(table: ConfigArrays) -> ConfigArrays:
    return table.subset((table.batch == 1).nonzero()[0])


# ---------------------------------------------------------------------------------------------------- the invokers


def test_the_first_step_goes_to_the_home_of_its_function(script: Script):
    home = devices_by_home("f", ("n0", "n1", "n2"))[0]
    functions = [a_function(name, max_batch=4, scale=ScaleSpec(min=3)) for name in "fg"]
    script.given(*functions, flows=[CHAIN], devices=nodes(3), policy=esg.Policy(), takes=TAKES)
    for place in range(3):
        script.at(place * 100 * MS).arrives(f"c{place}", target="w", within_us=90 * MS)
        script.finishes()
        script.finishes()
    assert {batch.device for batch in script.batches if batch.function == "f"} == {home}


def test_a_later_step_goes_where_its_input_is(script: Script):
    """Enough nodes for the two functions to live on different ones."""
    count = next(n for n in range(2, 20) if devices_by_home("f", ids(n))[0] != devices_by_home("g", ids(n))[0])
    functions = [a_function(name, max_batch=4, scale=ScaleSpec(min=count, max=count)) for name in "fg"]
    script.given(*functions, flows=[CHAIN], devices=nodes(count), policy=esg.Policy(), takes=TAKES)
    script.at(0).arrives("c", target="w", within_us=200 * MS)
    script.at(40 * MS).finishes()
    assert [batch.device for batch in script.batches] == 2 * [devices_by_home("f", ids(count))[0]]


def test_when_the_home_is_full_a_warm_node_with_the_least_room_left_serves(script: Script):
    """Three nodes of two units. The home is full after two, and the third goes where one unit is taken already."""
    functions = [a_function(name, scale=ScaleSpec(min=3)) for name in "fx"]
    script.given(*functions, devices=nodes(3, 2), policy=esg.Policy(), takes=TAKES | {"x": 900 * MS})
    line = devices_by_home("f", ("n0", "n1", "n2"))
    home_of_x = devices_by_home("x", ("n0", "n1", "n2"))[0]
    assert home_of_x != line[0]
    script.at(0).arrives("x", target="x", within_us=2_000 * MS)
    script.arrives("c1", "c2", "c3", target="f", within_us=900 * MS)
    assert [batch.device for batch in script.batches] == [home_of_x, line[0], line[0], home_of_x]


def two_best(script: Script, prefilter: bool) -> list[int]:
    """Two units are faster *and* cheaper than one, and after the first call one is left."""
    takes = {"f": lambda batch, units: {1: 50, 2: 20}[units] * MS}
    policy = esg.Policy(units=(1, 2), prefilter=prefilter)
    script.given(a_function("f"), devices=nodes(1, 3), policy=policy, takes=takes)
    script.at(0).arrives("c1", "c2", within_us=60 * MS)
    return [batch.mask.bit_count() for batch in script.batches]


def test_if_the_best_size_is_taken_the_next_on_the_list_is_used(script: Script):
    assert two_best(script, prefilter=False) == [2, 1]


def test_a_list_of_undominated_configurations_has_nothing_to_fall_back_on(script: Script):
    assert two_best(script, prefilter=True) == [2]


def test_nothing_starves_while_there_is_any_room(script: Script):
    """In time it would only be on all four units, and one of them is taken for long: after three rounds it runs late."""
    policy = esg.Policy(patience=3, units=(1, 4), k=1)
    takes = {"f": lambda batch, units: {1: 600, 4: 20}[units] * MS, "x": 900 * MS}
    script.given(a_function("f"), a_function("x"), devices=nodes(1), policy=policy, takes=takes)
    script.at(0).arrives("long", target="x", within_us=2_000 * MS)
    script.arrives("c", target="f", within_us=200 * MS, expires_us=2_000 * MS)
    assert len(script.batches) == 1
    script.at(25 * MS)
    assert len(script.batches) == 1
    script.at(40 * MS)
    assert (last(script).function, last(script).mask.bit_count()) == ("f", 1)


def test_cores_are_leased_with_the_batch(script: Script):
    device = DeviceSpec(id="n0", kind="gpu", units=4, memory_mib=1_000, cores=3, limits=FREE)
    policy = esg.Policy(cores=(2,))
    script.given(a_function("f"), devices=[device], policy=policy, takes=TAKES)
    script.at(0).arrives("c1", "c2", within_us=900 * MS)
    assert [(batch.cores, batch.jobs[0].call_id) for batch in script.batches] == [(2, "c1")]


# ---------------------------------------------------------------------------------------------------- cold starts


def test_a_function_that_is_not_loaded_is_loaded_at_home_when_work_comes(script: Script):
    script.given(a_function("f"), devices=nodes(3), policy=esg.Policy(), takes=TAKES, loads={"f": 50 * MS}, warm=False)
    script.at(0).arrives("c", within_us=900 * MS)
    [(at_us, load)] = script.all(Load)
    assert isinstance(load, Load)
    assert (at_us, load.device) == (0, devices_by_home("f", ("n0", "n1", "n2"))[0])


def test_a_second_node_is_brought_up_when_the_first_is_full(script: Script):
    script.given(
        a_function("f"), devices=nodes(2, 1), policy=esg.Policy(), takes=TAKES, loads={"f": 5 * MS}, warm=False, engine=True
    )
    script.at(0).arrives("c1", "c2", "c3", within_us=900 * MS)
    script.at(300 * MS)
    assert {batch.device for batch in script.batches} == {"n0", "n1"}


def test_what_is_idle_for_long_enough_goes(script: Script):
    function = a_function("f", scale=ScaleSpec(idle_us=1_000 * MS))
    script.given(function, devices=nodes(1), policy=esg.Policy(), takes=TAKES, loads={"f": 5 * MS}, warm=False, engine=True)
    script.at(0).arrives("c", within_us=900 * MS)
    script.at(800 * MS)
    assert not script.all(Unload)
    script.arrives("d", within_us=900 * MS)
    script.at(3_000 * MS)
    assert len(script.all(Unload)) == 1


def test_with_prewarming_it_is_back_before_the_next_call_of_a_regular_caller(script: Script):
    def cold_answers(prewarm: bool) -> int:
        script = Script()
        function = a_function("f", scale=ScaleSpec(idle_us=1_000 * MS))
        policy = esg.Policy(prewarm=prewarm, period_us=100 * MS)
        script.given(function, devices=nodes(1), policy=policy, takes=TAKES, loads={"f": 500 * MS}, warm=False, engine=True)
        for turn in range(6):
            script.at(turn * 4_000 * MS).arrives(f"c{turn}", within_us=2_000 * MS)
        script.at(30_000 * MS)
        return sum(end.cold_us > 0 for end in script.endings.values())  # type: ignore[union-attr]

    assert (cold_answers(prewarm=False), cold_answers(prewarm=True)) == (6, 2)


def test_room_is_made_for_a_function_that_has_work_by_one_that_has_none(script: Script):
    big = {name: a_function(name, memory_mib=600) for name in "fg"}
    script.given(*big.values(), devices=nodes(1), policy=esg.Policy(), takes=TAKES, warm=False, engine=True)
    script.at(0).arrives("c", target="f", within_us=900 * MS)
    script.at(100 * MS).arrives("d", target="g", within_us=900 * MS)
    script.at(400 * MS)
    assert script.ending("d") == "reply"


# ---------------------------------------------------------------------------------------------------- the whole family

FAMILY = ("esg", "infless", "orion", "aquatope")


def small_world(seed: int) -> Scenario:
    """A fork with a map and a choice behind it, and a chain, of the same functions; slices, cores and links are scarce."""
    body = Flow("e", {"x": Task("x", "f")}, ("x",))
    fork = Flow(
        "fork",
        {
            "a": Task("a", "f", ("b", "e")),
            "b": Task("b", "g", ("j",)),
            "e": Each("e", body, ("j",), expected_items=2.0),
            "j": Pass("j", ("c",), 2),
            "c": Choice("c", (("d",), ()), odds=(0.5, 0.5)),
            "d": Task("d", "g"),
        },
        ("a",),
        Slo(latency_us=400 * MS),
    )
    line = Flow("line", {"a": Task("a", "g", ("b",)), "b": Task("b", "f")}, ("a",), Slo(latency_us=150 * MS))
    points = [
        Point(batch=b, units=u, cores=c, p50_us=20 * MS * (1 + b) / 2 / u**0.8 / c**0.2)
        for b in (1, 2, 4)
        for u in (1, 2, 4)
        for c in (1, 2)
    ]
    device = DeviceSpec(
        id="", kind="gpu", units=4, memory_mib=1_000, cores=4, limits=FREE, link_mib_per_s=100.0, core_price_per_s=0.05
    )
    return Scenario(
        name="small",
        devices=tuple(replace(device, id=f"n{place}") for place in range(2)),
        functions=tuple(
            FunctionSpec(name=name, max_batch=4, gpu="must", memory_mib=300, input_kib=500, cores=2) for name in "fg"
        ),
        profiles=tuple(Profile(function=name, device="gpu", points=points, load_us=30 * MS) for name in "fg"),
        flows=(fork, line),
        loads=(
            Arrivals(target="fork", segments=steps([(2_000 * MS, 40.0)])),
            Arrivals(target="line", segments=steps([(2_000 * MS, 40.0)])),
        ),
        seed=seed,
    )


@pytest.mark.parametrize("policy", FAMILY)
def test_every_invariant_holds_and_every_call_ends(policy: str):
    summary = run(small_world(3), policy, check=True)
    assert summary.total.in_time > 0.5 * summary.total.offered


@pytest.mark.parametrize("policy", FAMILY)
def test_every_call_ends_when_workers_die_under_it(policy: str):
    deaths = [(at * MS, InstanceLost(f"{name}-{place}", "worker-lost")) for at, name, place in ((300, "f", 1), (700, "g", 1))]
    summary = run(small_world(4), policy, check=True, faults=deaths)
    assert summary.total.in_time > 0


@pytest.mark.parametrize("policy", FAMILY[:3])
def test_plans_follow_predictions_that_learn(policy: str):
    summary = run(replace(small_world(6), predictor="online"), policy, check=True)
    assert summary.total.in_time > 0.5 * summary.total.offered


@pytest.mark.parametrize("policy", FAMILY)
def test_the_same_seed_gives_the_same_run(policy: str):
    assert run(small_world(5), policy) == run(small_world(5), policy)
