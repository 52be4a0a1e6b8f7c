"""Results of a batch on their way to the controller: what it is told of those that are missing."""

from __future__ import annotations

from lamina.core.actions import JobRef
from lamina.core.events import JobOutcome
from lamina.engines.inflight import deliver_results
from lamina.values.references import DeviceRef, ErrorInfo
from lamina.values.run_values import RunValues

JOBS = [JobRef(number, f"c{number}", 0, "step") for number in range(3)]
ERROR = ErrorInfo("ValueLost", "gone")


def test_lost_inputs_are_told_with_their_steps_and_other_reasons_by_their_code() -> None:
    told = deliver_results(
        RunValues(None, None),
        JOBS,
        [True] * 3,
        [ERROR, b"x", ERROR],
        lambda ref: None,
        {0: ("a", "b")},
        reasons={2: "fetch-failed"},
    )
    assert told == (
        JobOutcome(False, "value-lost", "ValueLost", lost=("a", "b")),
        JobOutcome(),
        JobOutcome(False, "fetch-failed", "ValueLost"),
    )


def test_a_result_that_stays_on_its_device_and_came_with_a_change_of_state_is_final() -> None:
    """Were it lost, its step must not run again; one that is here cannot be lost."""
    there = DeviceRef("d1", 1, 100_000)
    told = deliver_results(
        RunValues(None, None), JOBS, [True] * 3, [there, b"x", DeviceRef("d1", 2, 100_000)], lambda ref: None, changed=[0, 1]
    )
    assert told == (JobOutcome(is_final=True), JobOutcome(), JobOutcome())
    assert deliver_results(RunValues(None, None), JOBS, [True] * 3, [b"x"] * 3, lambda ref: None, changed=[1]) == ()
