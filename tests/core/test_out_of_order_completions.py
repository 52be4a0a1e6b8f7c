"""Out-of-order completions: the end of a booked batch reported before that of the one it is behind counts at once, and once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.events import BatchFailed, BatchFinished, InstanceLost, JobOutcome
from tests.properties import examples
from tests.script import Script, a_function

MS = 1_000


def booked() -> Script:
    """One unit: `g` (batch 2) is booked behind `f` (batch 1)."""
    script = Script().given(a_function("f"), a_function("g", idempotent=False), takes={"f": 5 * MS, "g": 5 * MS})
    script.at(0).arrives("cf", target="f")
    script.arrives("cg", target="g")
    assert [batch.behind for batch in script.batches] == [0, 1]
    return script


def test_an_end_that_overtakes_the_one_before_it_is_answered_at_once():
    script = booked()
    script.at(6 * MS).finishes(2)
    assert (script.ending("cf"), script.ending("cg")) == ("open", "reply")


def test_the_slice_stays_with_the_one_before_it_and_is_free_when_that_has_ended():
    script = booked()
    device = script.controller.state.devices["gpu0"]
    script.at(6 * MS).finishes(2)
    before = dict(device.running)
    script.finishes(1)
    assert (before, device.busy) == ({1: 1}, 0)


def test_its_caller_is_told_the_time_it_waited_not_the_time_it_ran():
    script = booked()
    script.at(6 * MS).finishes(2, took_us=1 * MS)
    assert script.endings["cg"].queue_us == 5 * MS


def test_a_time_longer_than_it_was_there_is_not_believed():
    script = booked()
    script.at(6 * MS).finishes(2, took_us=99 * MS)
    assert script.endings["cg"].queue_us == 0


def test_the_next_one_may_be_booked_behind_the_one_that_still_runs():
    script = booked()
    script.at(6 * MS).finishes(2)
    script.arrives("again", target="g")
    assert [batch.behind for batch in script.batches] == [0, 1, 1]


def test_what_has_ended_does_not_run_again_because_its_instance_is_lost():
    script = booked()
    script.at(6 * MS).finishes(2)
    script.loses("g-1")
    script.finishes(1)
    assert script.ending("cg") == "reply" and len(script.batches) == 2


def test_it_is_learnt_from_as_from_any_other():
    script = booked()
    script.at(6 * MS).finishes(2, took_us=4 * MS)
    assert ("g", 1, 4 * MS) in script.predictor.seen


ends = st.tuples(st.integers(0, 3), st.sampled_from(("ends", "ends", "ends", "fails", "errs", "lost")), st.integers(0, 9 * MS))


@examples(60)
@given(st.lists(ends, max_size=25), st.integers(2, 3))
def test_in_whatever_order_ends_come_every_call_is_answered_once(told: list[tuple[int, str, int]], functions: int):
    """`Script` checks the invariants and an independent ledger after each event."""
    names = [f"f{n}" for n in range(functions)]
    script = Script().given(*[a_function(name, max_batch=2) for name in names], takes=dict.fromkeys(names, 5 * MS))
    for number, (which, how, took_us) in enumerate(told):
        script.at(number * MS).arrives(f"c{number}", target=names[number % functions])
        open_batches = list(script.ledger.batches.values())
        batch = open_batches[which % len(open_batches)].action if open_batches else None
        match how:
            case _ if batch is None:
                pass
            case "ends":
                script.tell(BatchFinished(batch.batch_id, took_us))
            case "errs":
                script.tell(BatchFinished(batch.batch_id, took_us, (JobOutcome(False, "boom"),) * len(batch.jobs)))
            case "fails":
                script.tell(BatchFailed(batch.batch_id, "out-of-memory"))
            case "lost":
                script.tell(InstanceLost(batch.instance))
    script.engine = True
    script.tell(BatchFinished(10**9, 0))  # the engine takes over what is under way
    for action in [lease.action for lease in script.ledger.batches.values() if lease.running]:
        if action.batch_id not in script._begun:
            script._begin(action)
    for loaded in list(script.ledger.instances.values()):
        if not loaded.ready:
            script.ready(loaded.id)
    script.at(100_000 * MS)
    assert len(script.ledger.endings) == len(told) and not script.ledger.open
    script.controller.state.check_quiet()
