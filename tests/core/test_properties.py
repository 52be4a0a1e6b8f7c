"""Properties of the controller: whatever happens, in whatever order, its guarantees hold.

Each example is a world drawn from a seed (`chaos.py`), watched by a ledger that knows only events and actions. A failure
prints the seed; `play(seed, ...)` repeats it exactly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core import actions as do
from lamina.core import events as ev
from tests.core.chaos import (
    POLICIES,
    Chaos,
    adopting_world_of,
    ends_in_quiet_with_one_ending_for_each_call,
    play,
    preempting_world_of,
)

worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**9),
        "policy": st.sampled_from(POLICIES),
        "steps": st.sampled_from((80, 40, 20, 10, 5)),
        "faults": st.sampled_from((0.0, 0.15, 0.3, 0.6)),
        "late_ticks": st.booleans(),
        "crowd": st.booleans(),
        "clients": st.booleans(),
    }
)


def played(world: dict[str, object], *, watched: bool = True) -> Chaos:
    return play(**world, watched=watched)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_every_order_of_events_keeps_every_invariant_and_ends_in_quiet_with_one_ending_for_each_call(first):
    """The seeds that follow are for `make soak`; `python -m tests.soak core SEED` repeats one."""
    for seed in range(first, first + 100):
        ends_in_quiet_with_one_ending_for_each_call(seed)


def test_the_first_orders_of_events_keep_every_invariant_too():
    """The same, for a quick run."""
    for seed in range(30):
        ends_in_quiet_with_one_ending_for_each_call(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
@pytest.mark.parametrize("world_of", [preempting_world_of, adopting_world_of])
def test_every_order_of_events_keeps_every_invariant_where_batches_give_way_and_instances_are_adopted_at_work(first, world_of):
    """`python -m tests.soak preempting SEED` repeats one, and `adopting SEED` one of the others."""
    for seed in range(first, first + 100):
        ends_in_quiet_with_one_ending_for_each_call(seed, world_of)


def test_the_first_orders_of_events_keep_every_invariant_where_batches_give_way_too():
    said = [ends_in_quiet_with_one_ending_for_each_call(seed, preempting_world_of).said for seed in range(40)]
    started = [action for world in said for actions in world for action in actions if isinstance(action, do.StartBatch)]
    assert any(batch.gives_way for batch in started), "no batch has given way in any of these worlds"
    assert any(batch.overlaps and not batch.gives_way for batch in started), "and none has made another do so"


def test_the_first_orders_of_events_keep_every_invariant_where_instances_are_adopted_at_work_too():
    said = [ends_in_quiet_with_one_ending_for_each_call(seed, adopting_world_of).said for seed in range(40)]
    told = [action for world in said for actions in world for action in actions]
    assert any(isinstance(one, do.StartBatch) and not one.jobs for one in told), "no abandoned batch in any of these worlds"


@pytest.mark.parametrize("seed", [2, 8, 19, 22, 44, 56, 115, 124, 128, 3085])
def test_preempting_worlds_that_were_wrong_once_are_right(seed):
    """An SLO deployed meanwhile, a batch booked before one that gives way, policies with slots of their own, fixed slices, and an
    upstream job that waits for the home of the function which waits for it, and a policy that woke every microsecond."""
    ends_in_quiet_with_one_ending_for_each_call(seed, preempting_world_of)


@pytest.mark.parametrize("seed", [4831])
def test_adopting_worlds_that_were_wrong_once_are_right(seed):
    """Of two tenants, `edf` gave up the late ones of one and began a batch with another's, in which none had time."""
    ends_in_quiet_with_one_ending_for_each_call(seed, adopting_world_of)


@pytest.mark.parametrize("seed", [859, 1794, 9505, 11166, 18773, 32674, 32836, 62619])
def test_worlds_that_were_wrong_once_are_right(seed):
    """Found by `make soak`."""
    ends_in_quiet_with_one_ending_for_each_call(seed)


@given(worlds, st.sampled_from(("frontier", "edf")))
def test_no_call_is_rejected_with_an_offer_inside_its_deadline_or_a_price_within_its_limit(world, policy):
    chaos = played(world | {"policy": policy})
    for (now_us, event), actions in zip(chaos.log, chaos.said, strict=True):
        for action in actions:
            if isinstance(event, ev.CallArrived) and isinstance(action, do.Reject):
                assert action.reason != "deadline" or not 0 < action.offer_us <= event.call.expires_us - now_us
                assert action.reason != "cost" or action.price > event.call.cost_limit


@given(worlds, st.sampled_from(("fifo", "edf")))
def test_work_that_was_accepted_with_time_to_spare_is_not_starved(world, policy):
    """Its time ends long after the trouble does, so running out of it is no honest end."""
    chaos = played(world | {"policy": policy})
    chaos.drain()
    calls = [event.call for _, event in chaos.log if isinstance(event, ev.CallArrived)]
    hurried = {call.id for call in calls if call.deadline_us <= chaos.now_us}  # a name may come twice
    patient = {call.id for call in calls} - hurried
    late = {e.call_id for e in chaos.ledger.endings if isinstance(e, do.FailCall) and e.error == "deadline"}
    assert not patient & late


@given(worlds)
def test_replaying_the_events_repeats_every_action_even_if_they_went_through_json(world):
    chaos = played(world, watched=False)
    chaos.drain()
    decoder = msgspec.json.Decoder(ev.Event)
    again = chaos.fresh()
    for (now_us, event), said in zip(chaos.log, chaos.said, strict=True):
        copy = decoder.decode(msgspec.json.encode(event))
        assert copy == event
        assert again.handle(now_us, copy) == said


@given(worlds)
def test_actions_survive_the_trip_through_json(world):
    chaos = played(world, watched=False)
    decoder = msgspec.json.Decoder(do.Action)
    for actions in chaos.said:
        assert [decoder.decode(msgspec.json.encode(action)) for action in actions] == actions


@pytest.mark.live
def test_two_processes_that_hash_differently_decide_the_same():
    """Nothing may hang on the order of a set: a log must replay on another machine."""
    script = (
        "from tests.core.chaos import POLICIES, play\n"
        "for seed in range(12):\n"
        "    chaos = play(seed, POLICIES[seed % 4], 60, crowd=seed % 2 == 0)\n"
        "    print(chaos.said)\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert said[0] == said[1]
