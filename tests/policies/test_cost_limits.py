"""Cost limits: a call that `frontier` admits is not stopped for cost later; admission and dispatch use the same prices."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.core.actions import Action, FailCall, Reject, Reply, StartBatch
from lamina.core.events import Event
from lamina.core.scheduling.queues import Queue
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow, Task
from lamina.drivers.driver import EventObserver
from lamina.lab.experiments._call_player import PlayedCalls, play_calls
from lamina.planner.arrival_rates import FIRST_WINDOW_US, ArrivalRates
from lamina.predict.profile import Point, Profile
from lamina.sim.scenario import Scenario
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo, call_for
from tests.properties import examples

MS = 1_000
MOST = 8
START_US = 500 * MS
SETTLED_US, END_US = 700 * MS, 900 * MS  #: the pace of arrivals is known by then; nobody comes after that
GPU = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=16_000, price_per_s=0.8, limits=SliceLimits(batches_per_instance=0))


def batch_ms(fixed_ms: float, batch: int, units: int) -> float:
    return (fixed_ms + 0.5 * batch) / units**0.7


def lone_price(fixed_ms: float) -> float:
    """On one unit, which is where it costs least."""
    return batch_ms(fixed_ms, 1, 1) * MS * GPU.unit_price()


def steady(steps: list[float], gap_ms: float, goal_ms: float, limit: float, watch: EventObserver | None = None) -> PlayedCalls:
    """One call every so often, each with the same goal and the same limit; as many steps one after another."""
    names = [f"s{place}" for place in range(len(steps))]
    profiles = [
        Profile(
            function=name,
            device="gpu",
            points=[
                Point(batch=batch, units=units, p50_us=MS * batch_ms(fixed_ms, batch, units))
                for batch in range(1, MOST + 1)
                for units in range(1, GPU.units + 1)
            ],
            load_us=10 * MS,
        )
        for name, fixed_ms in zip(names, steps, strict=True)
    ]
    nodes = {name: Task(name, name, tuple(names[place + 1 : place + 2])) for place, name in enumerate(names)}
    slo = Slo(latency_us=int(goal_ms * MS), on_miss="shed")
    functions = [
        FunctionSpec(name=name, max_batch=MOST, share=1 / 8, gpu="must", memory_mib=100, scale=ScaleSpec(min=1), slo=slo)
        for name in names
    ]
    scenario = Scenario(
        name="steady",
        devices=(GPU,),
        functions=tuple(functions),
        flows=(Flow("all", nodes, (names[0],), slo),) if len(names) > 1 else (),
        profiles=tuple(profiles),
        loads=(),
        policy="frontier",
        noise=0.0,
    )
    target = "all" if len(names) > 1 else names[0]
    times_us = range(START_US, END_US, int(gap_ms * MS))
    calls = [call_for(f"c{at_us}", target, at_us, slo, cost_limit=limit) for at_us in times_us]
    return play_calls(scenario, calls, watch=watch)


@dataclass
class Companies:
    """Who went through each step with whom."""

    at: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)  #: by step and call

    def see(self, _now_us: int, _event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartBatch):
                group = frozenset(job.call_id for job in action.jobs)
                self.at |= {(action.function, name): group for name in group}

    def went_without(self, call: str, step: str) -> bool:
        """Had it company at the step before that did not wait for it?"""
        before = self.at.get((f"s{int(step[1:]) - 1}", call), frozenset())
        return any((step, other) in self.at for other in before)


@examples(40)
@given(
    steps=st.lists(st.sampled_from((2.0, 8.0)), min_size=1, max_size=2),
    gap_ms=st.sampled_from((2.5, 6.0, 15.0, 40.0)),
    slack=st.sampled_from((1.5, 3.0, 6.0)),
    part=st.sampled_from((0.3, 0.5, 0.7, 0.9, 1.0, 1.2)),
)
@example(steps=[8.0], gap_ms=40.0, slack=1.5, part=0.5)
@example(steps=[2.0, 8.0], gap_ms=15.0, slack=6.0, part=0.5)
def test_an_admitted_call_is_not_stopped_for_its_cost_unless_a_prediction_was_wrong(steps, gap_ms, slack, part):
    """Times are exact and calls come as steadily as before. What can go wrong: they stop coming, or company leaves one behind."""
    goal_ms = slack * sum(batch_ms(fixed_ms, 1, 1) for fixed_ms in steps)
    companies = Companies()
    played = steady(steps, gap_ms, goal_ms, part * sum(lone_price(fixed_ms) for fixed_ms in steps), companies.see)
    stopped = [end for end in played.endings.values() if isinstance(end, FailCall) and end.error == "cost"]
    for end in stopped:
        call = played.calls[end.call_id]
        foreseen = call.arrived_us > SETTLED_US and call.deadline_us < END_US - gap_ms * MS
        assert not foreseen or companies.went_without(call.id, end.step)


@pytest.mark.parametrize(("gap_ms", "word"), [(40.0, Reject), (2.0, Reply)])
def test_what_only_company_can_pay_for_is_let_in_where_it_comes(gap_ms, word):
    played = steady([8.0], gap_ms, 30.0, 0.6 * lone_price(8.0))
    known = [name for name, call in played.calls.items() if SETTLED_US < call.arrived_us < END_US - 50 * MS]
    assert known and {type(played.endings[name]) for name in known} == {word}


def test_a_limit_that_only_a_late_answer_would_keep_to_is_refused_at_the_door():
    """On one unit it costs little and takes 8.5 ms; to be done in 4 ms it must be dearer."""
    played = steady([8.0], 40.0, 4.0, 1.01 * lone_price(8.0))
    assert {end.reason for end in played.endings.values() if isinstance(end, Reject)} == {"cost"}
    assert all(isinstance(end, Reject) for end in played.endings.values())


def test_those_refused_for_want_of_company_count_as_company():
    """Else the first of a crowd would shut the door for all of it: nobody is let in, so nobody seems to come."""
    rates = ArrivalRates()
    function = FunctionState(spec=FunctionSpec(name="f"), queue=Queue("f"))
    rates.interarrival_us(0, function)
    for _ in range(10):
        rates.on_rejected("f")
    assert rates.interarrival_us(FIRST_WINDOW_US, function) == FIRST_WINDOW_US / 10
