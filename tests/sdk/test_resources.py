from __future__ import annotations

from typing import Any

import pytest

import lamina
from lamina import types
from lamina.errors import BadValue


def test_an_slo_is_a_time_a_target_and_what_a_late_answer_is_worth():
    slo = lamina.SLO("50ms", target=0.95, on_miss="serve", timeout="2s")
    assert slo.spec() == types.Slo(latency_us=50_000, target=0.95, on_miss="serve", timeout_us=2_000_000)


def test_an_slo_without_a_latency_has_no_goal():
    assert lamina.SLO().spec().latency_us == 0


def test_a_scale_counts_its_idle_time_in_microseconds():
    assert lamina.Scale(min=1, max=2, idle="5s").spec() == types.ScaleSpec(min=1, max=2, idle_us=5_000_000)


def test_a_quota_is_two_shares_and_a_window():
    assert lamina.Quota(request="1/4", limit="50%", window="10ms").spec() == types.QuotaSpec(
        request=0.25, limit=0.5, window_us=10_000
    )


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: lamina.SLO(50), "slo.latency"),
        (lambda: lamina.SLO("50"), "slo.latency"),
        (lambda: lamina.SLO("0ms"), "slo.latency"),
        (lambda: lamina.SLO("50ms", target=1.5), "slo.target"),
        (lambda: lamina.SLO("50ms", on_miss="panic"), "slo.on_miss"),
        (lambda: lamina.SLO("50ms", timeout="10ms"), "slo.timeout"),
        (lambda: lamina.SLO("50ms", timeout=60), "slo.timeout"),
        (lambda: lamina.CPU(0), "cpu.cores"),
        (lambda: lamina.CPU(1.5), "cpu.cores"),
        (lambda: lamina.CPU(True), "cpu.cores"),
        (lambda: lamina.CPU(memory=4), "cpu.memory"),
        (lambda: lamina.GPU(share=0), "gpu.share"),
        (lambda: lamina.GPU(share="third"), "gpu.share"),
        (lambda: lamina.GPU(share=None), "gpu.share"),
        (lambda: lamina.GPU(limit=2), "gpu.limit"),
        (lambda: lamina.GPU(memory="2 bananas"), "gpu.memory"),
        (lambda: lamina.GPU(memory=2048), "gpu.memory"),
        (lambda: lamina.Scale(min=-1), "scale.min"),
        (lambda: lamina.Scale(min=3, max=2), "scale.min"),
        (lambda: lamina.Scale(max=0), "scale.max"),
        (lambda: lamina.Scale(idle=60), "scale.idle"),
        (lambda: lamina.Quota(request=0.5, limit=0.25), "quota.request"),
        (lambda: lamina.Quota(limit=0), "quota.limit"),
        (lambda: lamina.Quota(window="1us"), "quota.window"),
    ],
)
def test_a_bad_value_is_refused_where_it_is_written_and_names_its_field(make: Any, field: str):
    with pytest.raises(BadValue, match=f"^{field}: ") as caught:
        make()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scale": 3}, "scale: 3 is not a Scale"),
        ({"quota": 0.5}, "quota: 0.5 is not"),
        ({"home": "yes"}, "home: 'yes' is neither True nor False"),
        ({"lend": 1}, "lend: 1 is neither True nor False"),
        ({"idempotent": None}, "idempotent: None is neither True nor False"),
    ],
)
def test_a_number_in_the_place_of_a_value_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadValue, match=says):
        lamina.App("wrong").function(**options)


def test_a_goal_beyond_a_minute_needs_no_timeout_of_its_own() -> None:
    assert lamina.SLO("5min").spec().timeout_us == 600_000_000
    assert lamina.SLO("50ms").spec().timeout_us == 60_000_000
