"""Simultaneous arrivals: calls read in one go are admitted one by one and served together."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.core.actions import Reject, StartBatch
from lamina.core.events import ArrivalsDrained, CallArrived
from lamina.policies import edf
from lamina.types import NEVER_US, Call
from tests.script import Script, a_function


def arrival(name: str, *, more: bool, expires_us: int = NEVER_US) -> CallArrived:
    return CallArrived(Call(name, "f", 0, expires_us, expires_us), more)


def sizes(said: Sequence[object]) -> list[int]:
    return [len(action.jobs) for action in said if isinstance(action, StartBatch)]


def test_calls_that_come_in_one_go_are_one_batch(script: Script):
    script.given(a_function(max_batch=8))
    said = [action for name in "abc" for action in script.tell(arrival(name, more=True))]
    assert (sizes(said), sizes(script.tell(ArrivalsDrained()))) == ([], [3])


def test_a_call_that_comes_alone_is_served_at_once_with_those_that_were_held(script: Script):
    script.given(a_function(max_batch=8))
    script.tell(arrival("a", more=True))
    assert sizes(script.tell(arrival("b", more=False))) == [2]


def test_whatever_happens_first_is_the_moment_to_decide(script: Script):
    script.given(a_function())
    script.tell(arrival("a", more=False))
    script.tell(arrival("b", more=True))
    assert sizes(script.finishes()) == [1]


def test_a_hopeless_one_is_refused_at_once_and_not_with_the_others(script: Script):
    script.given(a_function(max_batch=8), policy=edf.Policy(), takes={"f": 5_000})
    [refusal] = script.tell(arrival("late", more=True, expires_us=1_000))
    assert isinstance(refusal, Reject)
