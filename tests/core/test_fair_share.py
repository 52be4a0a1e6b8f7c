"""Fair sharing between tenants on the same devices: order of service, and quotas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.policy import Decision, View
from lamina.core.scheduling.queues import Order
from lamina.core.tenancy.fair_queue import FairQueue
from lamina.core.tenancy.usage import DailyUsage
from lamina.policies import edf, fifo
from lamina.types import NEVER_US, Call, DeviceSpec, ScaleSpec, Tenant
from tests.properties import examples
from tests.script import Script, a_function


@pytest.fixture
def script() -> Script:
    return Script()


def calls(script: Script, tenant: str, *names: str, target: str = "f", within_us: int = 0, priority: int = 0) -> list[do.Action]:
    said: list[do.Action] = []
    for name in names:
        due_us = script.now_us + within_us if within_us else NEVER_US
        call = Call(name, target, script.now_us, due_us, due_us, tenant, priority)
        said += script.tell(ev.CallArrived(call))
    return said


def many(name: str, count: int) -> list[str]:
    return [f"{name}{number}" for number in range(count)]


def order(script: Script) -> list[str]:
    return [call for batch in script.served for call in batch]


def is_fair(script: Script) -> bool:
    return isinstance(script.controller.state.functions["f"].queue, FairQueue)


def test_one_tenant_alone_has_plain_queues(script: Script) -> None:
    script.given(a_function())
    calls(script, "acme", *many("a", 5))
    assert not is_fair(script)


def test_the_tenant_with_the_least_usage_is_next_however_many_wait(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True)
    calls(script, "loud", *many("l", 10))
    calls(script, "quiet", "q0", "q1")
    script.at(20_000)
    assert order(script)[:4] == ["l0", "l1", "q0", "q1"]  # the first two had been given away before anybody else was there


@dataclass
class NeverStarts:
    order: Order = "due"

    def dispatch(self, view: View) -> Iterator[Decision]:
        return iter(())


def test_late_jobs_of_one_tenant_do_not_pass_over_those_of_another() -> None:
    """Of 10 jobs of which the flood's 6 are late: the quiet tenant's are next, and not skipped in place of them."""
    script = Script().given(a_function(), policy=NeverStarts())
    calls(script, "loud", *many("l", 6), within_us=2_000_000)
    calls(script, "loud", *many("m", 4), within_us=9_000_000)
    calls(script, "quiet", *many("q", 3), within_us=4_000_000)
    queue = script.controller.state.functions["f"].queue
    assert isinstance(queue, FairQueue) and queue.count_due_before(3_000_000) == 6
    taken = [job.run.call.id for job in queue.due_from(3_000_000, 0, 4)]
    assert taken == ["q0", "q1", "q2", "m0"]
    assert [job.run.call.id for job in queue.due_from(3_000_000, 4, 9)] == ["m1", "m2", "m3"]


def test_a_double_weight_gets_double_the_time(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True)
    script.tell(ev.TenantUpdated(Tenant(name="big", weight=2.0)))
    calls(script, "big", *many("b", 30))
    calls(script, "small", *many("s", 30))
    script.at(30_000)
    counts = Counter(name[0] for name in order(script))
    assert counts["b"] == pytest.approx(20, abs=2) and counts["s"] == pytest.approx(10, abs=2)


def test_long_jobs_count_as_long(script: Script) -> None:
    script.given(a_function("f"), a_function("g"), takes={"f": 1_000, "g": 4_000}, engine=True, policy=fifo.Policy())
    calls(script, "short", *many("s", 80))
    calls(script, "long", *many("l", 20), target="g")
    script.at(40_000)
    counts = Counter(name[0] for name in order(script))
    assert counts["s"] == pytest.approx(4 * counts["l"], abs=5)


def test_functions_of_different_tenants_take_turns_whatever_is_due_first(script: Script) -> None:
    script.given(a_function("f"), a_function("g"), takes={"f": 1_000, "g": 1_000}, engine=True, policy=edf.Policy(wait=False))
    calls(script, "loud", *many("l", 10), within_us=100_000)
    script.at(1)
    calls(script, "quiet", "q0", target="g", within_us=200_000)
    script.at(20_000)
    assert "q0" in order(script)[:3]


def test_priorities_count_within_a_tenant_and_not_between(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True)
    calls(script, "a", "a0", "a1", "a2")
    calls(script, "a", "urgent", priority=5)
    calls(script, "b", "b0")
    script.at(20_000)
    assert order(script) == ["a0", "a1", "b0", "urgent", "a2"]  # two had been given away already


def test_a_call_is_admitted_by_what_is_ahead_of_it_and_not_by_what_others_pile_up(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True, policy=edf.Policy(wait=False))
    calls(script, "loud", *many("l", 200), within_us=20_000)
    refused = calls(script, "loud", "one-more", within_us=20_000)
    assert [type(action) for action in refused] == [do.Reject]
    calls(script, "quiet", "q0", within_us=20_000)
    script.at(40_000)
    assert script.ending("q0") == "reply"


def rejected(said: list[do.Action]) -> list[str]:
    return [action.reason for action in said if isinstance(action, do.Reject)]


@pytest.mark.parametrize("is_loaded", [True, False], ids=["contended", "cold"])
def test_a_tenant_with_more_gives_way_where_one_with_less_found_no_room_for_what_it_has(script: Script, is_loaded: bool) -> None:
    """On a device that is full of its calls; not because a function of the other is not loaded, which it cannot help."""
    devices = [DeviceSpec(id="gpu0", kind="gpu", units=1, memory_mib=1_000)]
    script.given(a_function("f"), takes={"f": 10_000, "g": 10_000}, loads={"g": 500_000}, policy=edf.Policy(), devices=devices)
    script.tell(ev.Deployed((a_function("g", scale=ScaleSpec(min=0)),)))
    calls(script, "quiet", "q0", within_us=10_000_000)
    calls(script, "loud", *many("l", 5), within_us=10_000_000)
    assert rejected(calls(script, "quiet", "q1", target="f" if is_loaded else "g", within_us=11_000)) == ["deadline"]
    policy_says = rejected(calls(script, "loud", "l5", within_us=40_000))
    assert ("share" in policy_says) == is_loaded
    assert not rejected(calls(script, "loud", "l6", within_us=10_000_000))  # it can wait, and the other's calls go first


def test_a_tenant_with_more_does_not_give_way_on_devices_that_are_not_asked_for(script: Script) -> None:
    """An SLO that nothing could meet is no reason to reject others on an idle device, nor on another one."""
    devices = [DeviceSpec(id=f"gpu{number}", kind="gpu", units=1, memory_mib=1_000) for number in range(2)]
    script.given(
        a_function("f", memory_mib=700),
        a_function("g", memory_mib=700),
        takes={"f": 10_000, "g": 10_000},
        devices=devices,
        policy=edf.Policy(),
    )
    calls(script, "quiet", "q0", within_us=10_000_000)
    calls(script, "loud", *many("l", 5), within_us=10_000_000)
    assert rejected(calls(script, "quiet", "q1", target="g", within_us=5_000)) == ["deadline"]
    assert "share" not in rejected(calls(script, "loud", "l5", within_us=40_000))


def test_the_rate_of_a_tenant_is_kept_and_the_refusal_says_when_to_come_back(script: Script) -> None:
    script.given(a_function(), takes={"f": 10}, engine=True)
    script.tell(ev.TenantUpdated(Tenant(name="t", rate_per_s=10, burst=2)))
    calls(script, "t", "c0", "c1")
    assert calls(script, "t", "c2") == [do.Reject("c2", "quota", 100_000, why="10 calls a second")]
    script.at(100_000)
    calls(script, "t", "c3")
    script.at(200_000)
    assert script.ending("c3") == "reply"


def test_calls_at_once_are_bounded_and_an_ended_one_makes_room(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True)
    script.tell(ev.TenantUpdated(Tenant(name="t", concurrent=2)))
    calls(script, "t", "c0", "c1", "c2")
    script.at(1_500)
    calls(script, "t", "c3")
    script.at(10_000)
    assert [script.ending(name) for name in ("c0", "c1", "c2", "c3")] == ["reply", "reply", "quota", "reply"]


def test_units_times_seconds_of_a_day_are_bounded_and_forgiven_after_it(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000_000}, engine=True)
    script.tell(ev.TenantUpdated(Tenant(name="t", unit_s_per_day=1.0)))
    calls(script, "t", "c0")
    script.at(2_000_000)
    (refusal,) = calls(script, "t", "c1")
    assert isinstance(refusal, do.Reject) and refusal.retry_after_us == 24 * 3_600_000_000 - 2_000_000
    assert DailyUsage(script.controller._fair_share.usage.account("t").day.hours).exceeded_until_us(25 * 3_600_000_000, 1e6) == 0


def test_other_tenants_are_none_of_a_quota_s_business(script: Script) -> None:
    script.given(a_function(), takes={"f": 10}, engine=True)
    script.tell(ev.TenantUpdated(Tenant(name="t", rate_per_s=1)))
    calls(script, "t", *many("t", 10))
    calls(script, "free", "c0")
    script.at(10_000)
    assert script.ending("c0") == "reply" and script.ending("t9") == "quota"


def test_accounts_are_closed_when_one_tenant_has_been_alone_for_a_while(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True)
    calls(script, "a", "a0", "a1")
    calls(script, "b", "b0")
    assert is_fair(script)
    for second in range(1, 13):
        script.at(second * 1_000_000)
        calls(script, "a", f"a-{second}")
    script.at(14_000_000)
    assert not is_fair(script)


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 3_000), st.sampled_from("abc"), st.sampled_from("fg"), st.integers(-1, 1)), max_size=40),
    st.sampled_from([fifo.Policy(), edf.Policy()]),
)
def test_every_call_of_every_tenant_ends_once_and_nothing_is_left(
    arrivals: list[tuple[int, str, str, int]], policy: fifo.Policy | edf.Policy
) -> None:
    script = Script().given(
        a_function("f", max_batch=4), a_function("g"), takes={"f": (500, 100), "g": 700}, engine=True, policy=policy
    )
    script.tell(ev.TenantUpdated(Tenant(name="c", rate_per_s=500, burst=2, concurrent=3)))
    for number, (gap_us, tenant, target, priority) in enumerate(arrivals):
        script.at(script.now_us + gap_us)
        calls(script, tenant, f"c{number}", target=target, within_us=15_000, priority=priority)
    script.at(script.now_us + 1_000_000)
    assert len(script.endings) == len(arrivals)
    script.controller.state.check_quiet()


@examples(15)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_while_both_wait_neither_is_ahead_by_more_than_two_batches(weight_a: int, weight_b: int, max_batch: int) -> None:
    script = Script().given(a_function("f", max_batch=max_batch), takes={"f": (0, 100)}, engine=True)
    weights = {"a": weight_a, "b": weight_b}
    for name, weight in weights.items():
        script.tell(ev.TenantUpdated(Tenant(name=name, weight=float(weight))))
        calls(script, name, *many(name, 80))
    script.at(40 * 100)
    counts = Counter(name[0] for name in order(script))
    assert abs(counts["a"] / weight_a - counts["b"] / weight_b) <= 2 * max_batch / min(weights.values()) + 1


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(("", "acme", "evil")), st.integers(-1, 1), st.integers(1, 9)), min_size=2, max_size=9),
    st.integers(1, 8),
)
def test_what_comes_after_the_first_jobs_of_a_queue_is_none_of_them(waiting: list[tuple[str, int, int]], first: int) -> None:
    """A policy that plans a second batch behind a first must not find a job in both."""
    script = Script()
    script.given(a_function(max_batch=16), policy=edf.Policy())
    for number, (tenant, priority, due_ms) in enumerate(waiting):
        calls(script, tenant, f"c{number}", within_us=due_ms * 1_000_000, priority=priority)
    queue = script.controller.state.functions["f"].queue
    head, rest = queue.first(first), queue.slice(first, len(waiting))
    assert sorted(job.id for job in (*head, *rest)) == sorted(job.id for job in queue.jobs())


def test_a_tenant_that_was_silent_does_not_catch_up_on_what_it_has_not_used(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True)
    calls(script, "quiet", "q-first")
    calls(script, "loud", *many("l", 40))
    script.at(30_500)
    calls(script, "quiet", *many("q", 20))
    script.at(42_500)
    served = Counter(name[0] for name in order(script)[32:42])
    assert served["q"] == pytest.approx(5, abs=1), "from now on they take turns"


def test_a_call_that_is_rejected_is_not_charged_to_the_rate(script: Script) -> None:
    script.given(a_function(), takes={"f": 1_000}, engine=True, policy=edf.Policy(wait=False))
    script.tell(ev.TenantUpdated(Tenant(name="t", rate_per_s=10, burst=2)))
    reasons = [action.reason for action in calls(script, "t", *many("h", 5), within_us=10)]  # type: ignore[attr-defined]
    assert reasons == ["deadline"] * 5
    calls(script, "t", "c0", "c1", within_us=100_000)
    script.at(10_000)
    assert (script.ending("c0"), script.ending("c1")) == ("reply", "reply")


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(1, 1e6)), min_size=1, max_size=20), st.floats(1, 1e6))
def test_usage_is_forgiven_when_the_refusal_said_so(spent: list[tuple[int, float]], limit_us: float) -> None:
    """After as many refusals as there are hours with usage, nothing is left of a day ago."""
    hour_us, day = 3_600_000_000, DailyUsage()
    for hour, unit_us in sorted(spent):
        day.add(hour * hour_us, unit_us)
    now_us = max(hour for hour, _ in spent) * hour_us
    while until_us := day.exceeded_until_us(now_us, limit_us):
        assert now_us < until_us <= now_us + 24 * hour_us
        counted = sum(unit_us for hour, unit_us in spent if hour > now_us // hour_us - 24)
        assert day.total_us == pytest.approx(counted) and counted >= limit_us * (1 - 1e-9)
        now_us = until_us
    assert sum(unit_us for hour, unit_us in spent if hour > now_us // hour_us - 24) <= limit_us * (1 + 1e-9)
