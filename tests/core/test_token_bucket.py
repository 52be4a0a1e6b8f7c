"""Token buckets of quotas: a share of time, exact in the long run, though no batch is ever cut short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.events import Deployed
from lamina.core.token_bucket import TokenBucket
from lamina.policies import edf, fifo, frontier
from lamina.types import NEVER_US, QuotaSpec, Slo
from tests.script import Script, a_function

MS = 1_000
S = 1_000_000


@pytest.mark.parametrize("policy", [fifo.Policy(), edf.Policy()], ids=["fifo", "edf"])
@pytest.mark.parametrize("limit", [0.1, 0.3, 0.7])
def test_a_function_that_always_has_work_gets_its_share_within_one_batch(script: Script, policy, limit: float):
    quota = QuotaSpec(limit=limit, window_us=40 * MS)
    script.given(a_function(quota=quota), policy=policy, takes={"f": 7 * MS}, engine=True)
    script.at(0).arrives(*[f"c{i}" for i in range(300)])
    script.at(2 * S)
    used_us = 7 * MS * len(script.endings)
    earned_us = limit * (2 * S + 40 * MS)  # what comes in, and what was in the bucket
    assert abs(used_us - earned_us) <= 2 * 7 * MS  # one that runs, one that is booked


def test_a_quota_that_is_waited_for_asks_for_no_more_ticks_than_it_needs(script: Script):
    script.given(a_function(quota=QuotaSpec(limit=0.3)), takes={"f": 7 * MS}, engine=True)
    script.at(0).arrives(*[f"c{i}" for i in range(50)])
    script.at(1 * S)
    assert len(script.said) < 50 * 10


def test_a_function_with_savings_and_no_free_slice_does_not_ask_for_ticks_in_vain(script: Script):
    script.given(a_function(quota=QuotaSpec(limit=0.3)), takes={"f": 900 * MS})
    script.at(0).arrives("c1", "c2", "c3")
    before = len(script.said)
    script.at(500 * MS)
    assert len(script.said) - before < 3


def test_a_new_quota_does_not_forgive_a_debt(script: Script):
    script.given(a_function(quota=QuotaSpec(limit=0.5, window_us=10 * MS)))
    script.at(0).arrives("c1")
    script.finishes(took_us=105 * MS)
    script.tell(Deployed((a_function(quota=QuotaSpec(limit=0.25, window_us=10 * MS)),)))
    bucket = script.controller.state.functions["f"].bucket
    assert bucket.level(script.now_us) == -100 * MS


def test_a_quota_of_nothing_never_starts_anything(script: Script):
    script.given(a_function(quota=QuotaSpec(limit=0.0)))
    script.at(0).arrives("c1")
    script.finishes(took_us=5)  # what is in the bucket when it is made can be used once
    script.arrives("c2", within_us=1 * S)
    script.at(2 * S)
    assert script.ending("c2") == "deadline"
    assert script.sizes == [1]


def test_a_quota_without_a_window_can_still_be_used(script: Script):
    script.given(a_function(quota=QuotaSpec(limit=0.5, window_us=0)), takes={"f": 5 * MS}, engine=True)
    script.at(0).arrives("c1", "c2", "c3")
    script.at(1 * S)
    assert {script.ending(name) for name in ("c1", "c2", "c3")} == {"reply"}


# --------------------------------------------------------------------------------------------------- the bucket itself

charges = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30)


@given(st.floats(0.01, 0.99), charges)
def test_what_is_saved_never_exceeds_the_bucket(rate: float, steps: list[tuple[int, int]]):
    bucket, now_us = TokenBucket(rate, 1_000.0, 1_000.0), 0
    for wait_us, used_us in steps:
        now_us += wait_us
        bucket.charge(now_us, used_us)
        assert bucket.level(now_us + wait_us) <= 1_000.0


@given(st.floats(0.01, 0.99), charges)
def test_over_any_time_no_more_is_spent_than_was_saved_and_earned_plus_one_batch(rate: float, steps: list[tuple[int, int]]):
    """Batches start only when the bucket says so."""
    bucket, now_us, spent_us, last_us = TokenBucket(rate, 1_000.0, 1_000.0), 0, 0, 0
    for wait_us, used_us in steps:
        now_us = bucket.ready_at_us(now_us + wait_us)
        bucket.charge(now_us, used_us)
        spent_us, last_us = spent_us + used_us, used_us
        assert spent_us - last_us <= 1_000.0 + rate * now_us + 1


@given(st.floats(0.01, 0.99), st.floats(-1e6, 0.0), st.integers(0, 10**9))
def test_the_bucket_says_exactly_when_it_is_ready(rate: float, level_us: float, now_us: int):
    bucket = TokenBucket(rate, 1_000.0, level_us, now_us)
    ready_us = bucket.ready_at_us(now_us)
    assert bucket.level(ready_us) > 0
    assert bucket.level(ready_us - 2) <= 0 + 1e-6 * abs(level_us) + rate


def test_nothing_is_earned_at_no_rate():
    assert TokenBucket(0.0, 1.0, -1.0).ready_at_us(5) == NEVER_US


def test_the_default_policy_keeps_to_a_quota_too(script: Script):
    """A quota in debt offers no slot, whoever asks for one."""
    quota = QuotaSpec(limit=0.3, window_us=40 * MS)
    script.given(a_function(quota=quota, slo=Slo(latency_us=10 * S)), policy=frontier.Policy(), takes={"f": 7 * MS}, engine=True)
    script.at(0).arrives(*[f"c{i}" for i in range(200)])
    script.at(1 * S)
    assert 7 * MS * len(script.endings) <= 0.3 * (1 * S + 40 * MS) + 2 * 7 * MS
