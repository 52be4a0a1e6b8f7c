from __future__ import annotations

import pytest

from lamina.core.actions import FailCall, Reject, Reply
from lamina.drivers.driver import Ending
from lamina.predict.device_presets import preset
from lamina.sim.cost_accounting import CostAccounting
from lamina.sim.report import Report
from lamina.sim.summary import Summary
from lamina.types import Call, Slo


def summary_of(*ends: Ending, offered_us: int = 2_000_000) -> Summary:
    report = Report({"a": Slo(latency_us=10_000)})
    for number, call in enumerate(report.observe_calls(Call(f"c{n}", "a", n * 1_000) for n in range(len(ends)))):
        report.on_end(call.arrived_us + 500, ends[number])
    assert report.unanswered == 0
    ledger = CostAccounting()
    ledger.device_joined(0, preset("h200"))
    ledger.devices["h200"].lease(0, 1_000_000, 0xFF)
    ledger.batch_started("a", 4)
    ledger.batch_started("a", 2)
    return report.summary("s", "fifo", 1, ledger, offered_us, 4_000_000)


MIXED: list[Ending] = [
    Reply("c0", 2_000, False, queue_us=500, batch=4, cost=0.25),
    Reply("c1", 20_000, True, queue_us=1_500, batch=2, cost=0.25, cold_us=9),
    Reject("c2", "deadline"),
    Reject("c3", "queue-full"),
    FailCall("c4", "deadline"),
]


def test_late_refused_and_failed_calls_all_count_against_attainment():
    row = summary_of(*MIXED).targets[0]
    assert (row.offered, row.answered, row.in_time, row.attainment) == (5, 2, 1, 0.2)


def test_refusals_and_failures_are_told_apart_by_reason():
    row = summary_of(*MIXED).targets[0]
    assert (row.refused, row.failed) == ({"deadline": 1, "queue-full": 1}, {"deadline": 1})


def test_goodput_is_answers_in_time_per_second_of_offered_load():
    assert summary_of(*MIXED).total.goodput_per_s == 0.5


def test_percentiles_are_over_answers_late_ones_included():
    row = summary_of(*MIXED).targets[0]
    assert row.p50_ms == pytest.approx(2.0, rel=0.01)
    assert row.p999_ms == pytest.approx(20.0, rel=0.01)
    assert (row.max_ms, row.mean_ms) == (20.0, 11.0)


def test_queueing_batches_and_cold_starts_are_averaged_over_answers():
    row = summary_of(*MIXED).targets[0]
    assert (row.queue_mean_ms, row.batch_mean, row.cold_answers, row.cost) == (1.0, 3.0, 1, 0.5)


def test_utilisation_and_cost_follow_the_leases():
    summary = summary_of(*MIXED)
    assert (summary.devices[0].utilisation, summary.devices[0].cost) == (0.133333, 0.533333)  # 8 of 15 units for 1 of 4 s
    assert (summary.total.cost_per_1000, summary.total.rent) == (533.333, 4.0)


def test_batch_sizes_are_counted_by_function():
    row = summary_of(*MIXED).functions[0]
    assert (row.batches, row.jobs, row.batch_mean, row.batch_max) == (2, 6, 3.0, 4)


def test_an_answer_to_no_call_is_not_counted_silently():
    report = Report({"a": Slo()})
    with pytest.raises(KeyError):
        report.on_end(0, Reply("never-offered", 1, False))


def test_a_run_in_which_nothing_is_answered_has_figures_all_the_same():
    row = summary_of(Reject("c0", "deadline")).targets[0]
    assert (row.attainment, row.p99_ms, row.batch_mean) == (0.0, 0.0, 0.0)
