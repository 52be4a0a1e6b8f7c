"""Sound admission: a call is rejected only if it would be late or too dear, and what must be shed is shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.actions import Action, Load, Reject, StartBatch, WakeAt
from lamina.core.controller import Controller
from lamina.core.events import CallArrived, Event
from lamina.policies import frontier
from lamina.sim import scenario
from lamina.sim.run import run
from lamina.types import Call, DeviceSpec, SliceLimits, Slo
from tests.properties import examples
from tests.script import BIG_GPU, Script, Takes, a_function

MS = 1_000


def a_world(dice: Random) -> str:
    """Functions of all lengths and goals, on one or two devices of any or of fixed slices, with too little load or too much."""
    parts = [f'[scenario]\nseed = {dice.randint(1, 99)}\nduration = "2s"\n']
    fixed, owned = dice.choice(("", "sizes = [3, 5, 7, 15]\naligned = true\n")), dice.choice(("true", "false"))
    parts.append(f'[[device]]\nkind = "h200"\ncount = {dice.randint(1, 2)}\nowned = {owned}\n{fixed}')
    count, load = dice.randint(1, 4), dice.uniform(0.3, 3)
    functions, loads = [], []
    for index in range(count):
        alone_ms, most = 10 ** dice.uniform(0, 2), dice.choice((1, 4, 16))
        goal = f'slo = "{alone_ms * 10 ** dice.uniform(0.1, 3):.2f}ms"\n' if dice.random() < 0.9 else ""
        share = dice.choice(("1/8", "1/3", "1"))
        scale = dice.choice(("{ min = 1 }", "{ min = 0 }"))
        row = [round(alone_ms * (0.6 + 0.4 * size), 3) for size in (1, 16)]
        functions.append(
            f'[[function]]\nname = "f{index}"\nmax_batch = {most}\nshare = "{share}"\nmemory = "1GiB"\n'
            f'{goal}scale = {scale}\nload = "100ms"\n[function.profile.h200]\nbatch = [1, 16]\n'
            f"p50_ms.1 = {[3 * ms for ms in row]}\np50_ms.4 = {row}\np50_ms.15 = {[0.5 * ms for ms in row]}\n"
        )
        rate = min(400.0, max(2.0, load * 15 / 4 / (alone_ms * (0.6 + 0.4 * most) / most / 1000) / count))
        loads.append(f'[[load]]\ntarget = "f{index}"\nrate = {rate:.2f}\n')
    return "".join(parts + functions + loads)


@contextmanager
def every_rejection() -> Iterator[list[tuple[int, Call, Reject]]]:
    """All rejections, with when and whose they are."""
    found: list[tuple[int, Call, Reject]] = []
    handle = Controller.handle

    def watched(self: Controller, now_us: int, event: Event) -> list[Action]:
        said = handle(self, now_us, event)
        if isinstance(event, CallArrived):
            found.extend((now_us, event.call, action) for action in said if isinstance(action, Reject))
        return said

    with patch.object(Controller, "handle", watched):
        yield found


@pytest.mark.slow
@examples(12)
@given(st.integers(0, 10**6))
def test_no_call_is_rejected_with_an_offer_inside_its_deadline(seed: int):
    with every_rejection() as rejections:
        run(scenario.parse(a_world(Random(seed))), "frontier", calls=600, check=True)
    for now_us, call, rejection in rejections:
        assert rejection.reason == "deadline"
        assert rejection.offer_us > call.expires_us - now_us, f"{call.target} at {now_us}"
        assert rejection.price > 0


# ------------------------------------------------------------------------------------------------------- what is shed


def two_equal(goals: tuple[str, str], load: float, parts: tuple[float, float]) -> str:
    """Two functions of 10 ms on one unit: a hundred calls a second are all there is."""
    text = '[scenario]\nseed = 1\nduration = "11s"\n[[device]]\nkind = "h200"\nunits = 1\n'
    for name, goal in zip("ab", goals, strict=True):
        text += (
            f'[[function]]\nname = "{name}"\nshare = "100%"\nmemory = "1GiB"\nload = "10ms"\nslo = "{goal}"\n'
            "scale = { min = 1, max = 1 }\nprofile.h200 = { batch = [1], p50_ms = { 1 = [10] } }\n"
        )
    for name, part in zip("ab", parts, strict=True):
        text += f'[[load]]\ntarget = "{name}"\nrate = {100 * load * part}\nstart = "1s"\n'
    return text


def in_time(text: str, policy: str = "frontier") -> dict[str, float]:
    return {row.target: row.attainment for row in run(scenario.parse(text), policy).targets}


@pytest.mark.parametrize(
    ("goal", "load"),
    [
        pytest.param("60s", 2, marks=pytest.mark.slow),
        pytest.param("10s", 2, marks=pytest.mark.slow),
        ("1s", 1.2),
        ("100ms", 2),
        ("30ms", 2),
    ],
)
def test_two_equal_functions_are_served_alike_and_no_less_than_by_earliest_deadline_first(goal: str, load: float):
    text = two_equal((goal, goal), load, (0.5, 0.5))
    ours, edf = in_time(text), in_time(text, "edf")
    assert abs(ours["a"] - ours["b"]) < 0.08
    assert sum(ours.values()) >= sum(edf.values()) - 0.04


@pytest.mark.parametrize("goals", [("1s", "1s"), ("1s", "100ms"), ("10s", "50ms"), ("100ms", "1s")])
def test_what_asks_for_a_fifth_of_a_device_is_served_beside_what_asks_for_twice_of_it(goals: tuple[str, str]):
    """Its fair share is half, so it is served in full, or nearly: whatever the goals, and whichever is the more urgent."""
    found = in_time(two_equal(goals, 2.2, (10 / 11, 1 / 11)))
    assert found["b"] >= 0.9
    assert found["a"] >= 0.9 * 0.8 / 2


def test_what_is_admitted_in_overload_is_in_time():
    summary = run(scenario.parse(two_equal(("1s", "1s"), 2, (0.5, 0.5))), "frontier")
    late = sum(Counter(row.failed).total() for row in summary.targets)
    assert late <= 0.01 * sum(row.answered for row in summary.targets)


# ------------------------------------------------------------------------------------------------------- what is said


def rejected(cost_limit: float) -> list[Reject]:
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    script = Script()
    script.given(
        a_function(max_batch=1, share=0.125, slo=Slo(latency_us=100 * MS)),
        devices=[device],
        policy=frontier.Policy(),
        takes={"f": 10 * MS},
    )
    said = script.tell(CallArrived(Call("c", "f", 0, 90 * MS, 90 * MS, cost_limit=cost_limit)))
    return [action for action in said if isinstance(action, Reject)]


def test_a_call_that_is_too_dear_is_told_the_price_that_would_have_been_accepted():
    (rejection,) = rejected(cost_limit=1e-12)
    assert rejection.reason == "cost" and rejection.price > 1e-12
    assert rejected(cost_limit=rejection.price * 0.99)
    assert not rejected(cost_limit=rejection.price)


@pytest.mark.parametrize("within_us", [1, 500, 4 * MS])
def test_however_little_time_a_call_has_it_is_offered_the_time_that_it_takes(script: Script, within_us: int):
    script.given(a_function(slo=Slo(latency_us=100 * MS)), policy=frontier.Policy(), takes={"f": 5 * MS})
    (rejection,) = [action for action in script.arrives("c", within_us=within_us) if isinstance(action, Reject)]
    assert 5 * MS <= rejection.offer_us <= 6 * MS


@pytest.mark.parametrize(("within_us", "is_shed"), [(None, False), (900 * MS, True)])
def test_in_overload_a_call_without_a_goal_waits_and_one_with_a_goal_is_shed(
    script: Script, within_us: int | None, is_shed: bool
):
    """Its fair share comes later than it has time for, whatever that is, and no unit would stand idle."""
    script.given(a_function(), policy=frontier.Policy(), takes={"f": 10 * MS})
    with its_share_is_far_off():
        script.arrives("before")
        script.at(5 * MS)  # its estimate is forgotten
        said = script.arrives("c", within_us=within_us) if within_us else script.arrives("c")
    assert any(isinstance(one, Reject) for one in said) == is_shed


# ------------------------------------------------------------------------------------------------ units that would stand idle


@contextmanager
def its_share_is_far_off() -> Iterator[None]:
    """Overload, in which each stream has had more than its share already."""
    shedder = "lamina.policies.frontier.load_shedding.LoadShedder"
    with patch(f"{shedder}.on_call_arrived", lambda *_: 2**63), patch(f"{shedder}.is_tight", lambda *_: True):
        yield


def test_units_that_would_stand_idle_are_refused_to_none(script: Script):
    script.given(a_function(), policy=frontier.Policy(), takes={"f": 10 * MS})
    with its_share_is_far_off():
        assert StartBatch in [type(one) for one in script.arrives("c", within_us=900 * MS)]


@pytest.mark.parametrize(("due_ms", "is_admitted"), [(45, False), (60, True)])
def test_what_waits_is_not_made_late_by_a_call_on_units_that_stand_idle(script: Script, due_ms: int, is_admitted: bool):
    """One of 20 ms waits for the whole device, on a part of which a batch runs for 20 ms. The call would hold another for 30."""
    takes: dict[str, Takes] = {"long": 20 * MS, "wide": lambda batch, units: 20 * MS if units == 8 else 0, "f": 30 * MS}
    script.given(*[a_function(name) for name in takes], devices=[BIG_GPU], policy=frontier.Policy(), takes=takes)
    script.arrives("first", target="long", within_us=900 * MS)
    script.arrives("waits", target="wide", within_us=due_ms * MS)
    with its_share_is_far_off():
        said = script.arrives("c", within_us=900 * MS)
    assert (StartBatch in [type(one) for one in said]) == is_admitted
    assert (Reject in [type(one) for one in said]) != is_admitted


def test_a_function_whose_calls_are_rejected_for_want_of_an_instance_is_loaded_at_once(script: Script):
    """A load takes longer than its calls have: they are rejected until it is there, and none of them waits to be noticed."""
    script.given(
        a_function(slo=Slo(latency_us=20 * MS)), policy=frontier.Policy(), takes={"f": 2 * MS}, loads={"f": 100 * MS}, warm=False
    )
    script.at(300 * MS)
    said = script.arrives("c", within_us=20 * MS)
    assert [type(action) for action in said if not isinstance(action, WakeAt)] == [Reject, Load]
