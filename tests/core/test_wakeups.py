"""Wakeups: ticks, deferrals, rechecks and clocks that cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.core.actions import Reply, WakeAt
from lamina.core.events import CallArrived, Tick
from lamina.core.policy import Decision, Defer, RecheckAt, Start, View
from lamina.core.scheduling.queues import Order
from lamina.types import Call
from tests.script import BIG_GPU, Script, a_function

MS = 1_000
S = 1_000_000


@dataclass
class Waiting:
    """Defers every function once, then serves it; notes when it was asked, and about which."""

    until_us: dict[str, int]
    count: int = 10**9
    order: Order = "arrival"
    asked: list[tuple[int, str]] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)

    def dispatch(self, view: View) -> Iterable[Decision]:
        self.asked += [(view.now_us, name) for name in view.waiting] or [(view.now_us, "nobody")]
        while self.wakes:
            yield RecheckAt(self.wakes.pop())
        for name in list(view.waiting):
            if name in self.until_us:
                yield Defer(name, self.until_us.pop(name), self.count)
            else:
                for opening in view.slots(view.functions[name]):
                    if len(view.functions[name].queue):
                        yield Start(view.functions[name].queue.first(1), opening)


def test_a_hold_ends_when_its_time_has_come(script: Script):
    policy = Waiting({"f": 7 * MS})
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1")
    script.at(7 * MS - 1)
    assert script.sizes == []
    script.at(7 * MS)
    assert script.sizes == [1]


def test_the_holds_of_two_functions_end_each_at_its_own_time(script: Script):
    """The tick of the first must not be the last."""
    policy = Waiting({"f": 3 * MS, "g": 7 * MS})
    script.given(a_function("f", share=0.5), a_function("g", share=0.5), policy=policy)
    script.at(0).arrives("cf", target="f")
    script.arrives("cg", target="g")
    script.at(100 * MS)
    assert [at_us for at_us, name in policy.asked if name == "g"] == [0, 7 * MS]


def test_a_hold_ends_early_when_there_are_enough_jobs(script: Script):
    policy = Waiting({"f": 1 * S}, count=3)
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1", "c2")
    assert script.sizes == []
    script.arrives("c3")
    assert script.sizes[0] == 1


def test_a_hold_ends_early_when_a_more_urgent_job_comes(script: Script):
    policy = Waiting({"f": 1 * S}, order="due")
    script.given(a_function(), policy=policy)
    script.at(0).arrives("calm", within_us=900 * MS)
    script.arrives("calmer", within_us=950 * MS)
    assert script.sizes == []
    script.arrives("hasty", within_us=100 * MS)
    assert script.served[0] == ("hasty",)


def test_a_hold_ends_early_when_something_ends_on_the_device(script: Script):
    policy = Waiting({})
    script.given(a_function("f", share=0.5), a_function("g", share=0.5), policy=policy)
    script.at(0).arrives("cf", target="f")
    policy.until_us["g"] = 1 * S
    script.arrives("cg", target="g")
    assert script.sizes == [1]
    script.finishes()
    assert script.sizes == [1, 1]


def test_a_wake_up_comes_even_if_all_functions_are_deferred(script: Script):
    policy = Waiting({"f": 1 * S}, wakes=[5 * MS, 3 * MS])
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1")
    script.at(50 * MS)
    assert policy.asked == [(0, "f"), (3 * MS, "nobody"), (5 * MS, "nobody")]


def test_no_tick_is_asked_for_twice(script: Script):
    policy = Waiting({"f": 700 * MS})
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1", "c2", "c3")
    script.at(600 * MS)
    at = [wake.at_us for _, wake in script.all(WakeAt)]
    assert len(at) == len(set(at))


def test_ticks_do_not_multiply(script: Script):
    """Thousands of holds of all lengths, and in a quiet hour no more than a tick a second or two."""
    script.given(a_function(max_batch=4), takes={"f": 5 * MS}, engine=True)
    for i in range(300):
        script.at(i * 700).arrives(f"c{i}")
    script.at(10 * S)
    before = len(script.all(WakeAt))
    script.at(110 * S)
    assert len(script.all(WakeAt)) - before <= 200


def test_ticks_that_were_not_asked_for_do_not_bring_more_of_them(script: Script):
    script.given(a_function())
    for _ in range(20):
        script.tell(Tick())
    before = len(script.all(WakeAt))
    script.at(10 * S)
    assert len(script.all(WakeAt)) - before <= 20


def test_a_clock_that_goes_back_is_read_as_no_time_has_passed(script: Script):
    script.given(a_function())
    script.at(50 * MS).arrives("c1")
    script.controller.handle(20 * MS, Tick())
    assert script.controller.now_us == 50 * MS


def test_an_answer_is_never_quicker_than_nothing(script: Script):
    """The call is stamped by a clock that is ahead of ours."""
    script.given(a_function())
    script.at(10 * MS)
    script.tell(CallArrived(Call("c1", "f", 99 * MS)))
    [reply] = script.finishes()
    assert isinstance(reply, Reply)
    assert reply.latency_us >= 0


def test_a_late_tick_does_everything_that_was_due(script: Script):
    policy = Waiting({"f": 3 * MS})
    script.given(a_function(), policy=policy)
    script.at(0).arrives("c1")
    script.oversleep(9 * S).tell(Tick())
    assert script.sizes == [1]


def test_one_tick_for_two_that_were_late_is_not_the_last(script: Script):
    policy = Waiting({"f": 7 * MS, "g": 3 * MS})
    script.given(a_function("f", share=0.5), a_function("g", share=0.5), policy=policy)
    script.at(0).arrives("cf", target="f")
    script.arrives("cg", target="g")
    script.oversleep(9 * MS).tell(Tick())
    policy.until_us["f"] = 20 * MS
    script.arrives("again", target="f")
    script.at(20 * MS)
    assert [at_us for at_us, name in policy.asked if name == "f"][-1] == 20 * MS


def test_times_of_calls_that_have_ended_are_not_kept_for_ever(script: Script):
    """The first of them to end is still running, so the others are not at the top of the heap."""
    script.given(a_function(share=0.125, max_batch=8), devices=[BIG_GPU], takes={"f": 10}, engine=True)
    script.fate = lambda batch: None if batch.batch_id == 1 else script._finish(batch)
    script.at(0).arrives("patient", within_us=900 * S)
    for i in range(2_000):
        script.at(100 + i * 20).arrives(f"c{i}", within_us=1_000 * S)
    script.at(3 * S)
    assert len(script.endings) == 2_000
    assert len(script.controller._wakeups._deadlines) <= 1_024


def test_a_call_that_runs_past_its_deadline_ends_soon_after_it(script: Script):
    script.given(a_function())
    script.at(0).arrives("c", within_us=10_000)
    script.at(9_999)
    assert script.ending("c") == "open"
    script.at(100_000)
    assert script.ending("c") == "deadline", "not a second later"
