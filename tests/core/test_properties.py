"""Whatever happens, in whatever order: the promises hold.

Each example is a world drawn from a seed (`chaos.py`), watched by a ledger that knows only events and actions. A failure
prints the seed; `play(seed, ...)` repeats it exactly.
"""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina.core import actions as do
from lamina.core import events as ev
from tests.core.chaos import POLICIES, Chaos, play

worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**9),
        "policy": st.sampled_from(POLICIES),
        "steps": st.integers(1, 90),
        "faults": st.sampled_from((0.0, 0.15, 0.3, 0.6)),
        "late_ticks": st.booleans(),
        "crowd": st.booleans(),
    }
)
many = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
some = settings(many, max_examples=60)


def played(world: dict[str, object]) -> Chaos:
    return play(**world)  # type: ignore[arg-type]


@many
@given(worlds)
def test_every_order_of_events_keeps_every_invariant_and_ends_in_quiet(world):
    chaos = played(world)
    chaos.drain()
    assert not chaos.ledger.open, "accepted and never answered"


@some
@given(worlds)
def test_every_call_gets_exactly_one_ending(world):
    chaos = played(world)
    chaos.drain()
    arrived = [event.call.id for _, event in chaos.log if isinstance(event, ev.CallArrived)]
    assert sorted(ending.call_id for ending in chaos.ledger.endings) == sorted(arrived)


@some
@given(worlds)
def test_work_that_was_accepted_with_time_to_spare_is_not_starved(world):
    """Its time ends long after the trouble does, so the only honest ends are its own."""
    chaos = played(world)
    chaos.drain()
    patient = {
        event.call.id
        for _, event in chaos.log
        if isinstance(event, ev.CallArrived) and event.call.deadline_us > chaos.now_us
    }
    starved = [e for e in chaos.ledger.endings if isinstance(e, do.Fail) and e.error == "deadline" and e.call_id in patient]
    assert not [fail for fail in starved if not world["policy"].startswith("chaos")]


@some
@given(worlds)
def test_replaying_the_events_repeats_every_action(world):
    chaos = played(world)
    chaos.drain()
    again = chaos.fresh()
    assert [again.handle(now_us, event) for now_us, event in chaos.log] == chaos.said


@some
@given(worlds)
def test_a_log_that_went_through_json_still_replays(world):
    chaos = played(world)
    decoder = msgspec.json.Decoder(ev.Event)
    again = chaos.fresh()
    for (now_us, event), said in zip(chaos.log, chaos.said, strict=True):
        copy = decoder.decode(msgspec.json.encode(event))
        assert copy == event
        assert again.handle(now_us, copy) == said


@some
@given(worlds)
def test_actions_survive_the_trip_through_json(world):
    chaos = played(world)
    decoder = msgspec.json.Decoder(do.Action)
    for actions in chaos.said:
        assert [decoder.decode(msgspec.json.encode(action)) for action in actions] == actions
