"""Batch delay: when a batch is ready to start."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Queue
from lamina.core.scheduling.state import ArrivalStats, Batch, FunctionState, Instance
from lamina.core.workflow.flow import function_flow
from lamina.planner.batching import QUIET_GAPS, batchable_prefix, commit_at_us, largest_batch_within, wait_until_us
from lamina.types import NEVER_US, Call, DeviceSpec, FunctionSpec, Slo

RUN = ActiveCall(Call("c", "f", 0), function_flow("f", Slo()), None)
rising = st.lists(st.integers(0, 1_000), min_size=1, max_size=40).map(lambda steps: list(accumulate(steps)))


def a_function(gap_us: float = NEVER_US, last_us: int = 0) -> FunctionState:
    return FunctionState(
        FunctionSpec(name="f"), Queue("f"), arrivals=ArrivalStats(count=9, last_us=last_us, interarrival_us=gap_us)
    )


@given(rising, st.integers(-10, 40_000))
def test_the_largest_batch_in_time_is_what_trying_them_all_finds(times_us: list[int], budget_us: int):
    fitting = [n for n, us in enumerate(times_us, 1) if us <= budget_us]
    assert largest_batch_within(len(times_us), budget_us, lambda n: times_us[n - 1]) == max(fitting, default=0)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20))
def test_jobs_that_go_together_are_the_longest_beginning_within_the_limits_of_all(limits: list[int]):
    jobs = [Job(i, RUN, 0, "f", "f", 0, 0, 0, batch_limit=limit) for i, limit in enumerate(limits)]
    fitting = [n for n in range(1, len(jobs) + 1) if all(not limit or limit >= n for limit in limits[:n])]
    assert batchable_prefix(jobs) == jobs[: max(fitting)]


@given(
    now_us=st.integers(0, 10**6),
    silence_us=st.integers(0, 10**3),
    gap_us=st.floats(1, 10**3),
    count=st.integers(1, 20),
    fixed_us=st.integers(0, 10**4),
    each_us=st.integers(1, 10**3),
    spare_us=st.integers(-10, 5_000),
)
def test_waiting_never_costs_a_deadline_and_ends_with_the_burst(
    now_us: int, silence_us: int, gap_us: float, count: int, fixed_us: int, each_us: int, spare_us: int
):
    start_by_us = now_us + spare_us
    function = a_function(gap_us, now_us - silence_us)
    until_us = wait_until_us(now_us, function, count, 16, lambda n: fixed_us + each_us * n, start_by_us)
    if until_us > now_us:
        assert count < 16
        assert until_us <= start_by_us
        assert until_us <= now_us - silence_us + max(50, QUIET_GAPS * gap_us) + 1


@given(gap_us=st.floats(1, 10**5), count=st.integers(1, 15), fixed_us=st.integers(0, 10**4), each_us=st.integers(1, 10**3))
def test_it_waits_exactly_when_one_more_job_would_raise_the_rate(gap_us: float, count: int, fixed_us: int, each_us: int):
    alone_us, joined_us = fixed_us + each_us * count, fixed_us + each_us * (count + 1)
    pays = (count + 1) / (gap_us + joined_us) > count / alone_us
    until_us = wait_until_us(1_000, a_function(gap_us, 1_000), count, 16, lambda n: fixed_us + each_us * n, NEVER_US)
    assert (until_us > 1_000) == pays


def test_no_batch_waits_before_the_second_arrival():
    assert wait_until_us(5, a_function(), 1, 16, lambda n: 1_000, NEVER_US) == 5


def test_no_batch_waits_while_nothing_is_known():
    assert wait_until_us(5, a_function(1.0, 5), 1, 16, lambda n: 0, NEVER_US) == 5


@pytest.mark.parametrize(
    ("way_us", "usual", "at_us"),
    [(0, 1.0, 9_500), (0, 0.8, 9_500), (2_000, 1.0, 7_500), (2_000, 0.9, 6_500), (2_000, 0.5, 5_500)],
    ids=["at hand", "at hand, and early", "away", "away, and early", "never two ways ahead"],
)
def test_a_batch_that_could_still_grow_is_sent_just_in_time_to_be_there(way_us: int, usual: float, at_us: int):
    """Behind one that ends in 10 ms, half a millisecond ahead; and as much sooner as batches usually end before their time."""
    device = Device(DeviceSpec(id="d", kind="gpu", units=1, memory_mib=1), way_us=way_us)
    instance = Instance("f-1", "f", "d", InstancePhase.WARM, 0)
    before = Batch(1, instance, device, 1, [], 10_000, started_us=0, early_us=int(10_000 * (1 - usual) + 0.5))
    assert commit_at_us(before, 500) == at_us
