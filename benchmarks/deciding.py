"""What a decision of `frontier` costs: a hundred functions on one device, workflows, and ten thousand functions in overload."""

from __future__ import annotations

from benchmarks.controller import RUNS, crowds, dispatches, measure
from benchmarks.report import Report
from lamina.policies import frontier


def run(report: Report) -> None:
    events, seconds, _ = min((measure(frontier.Policy(), 100) for _ in range(RUNS)), key=lambda one: one[1])
    report.add("controller, frontier, 100 functions on one 16-unit device", events / seconds, "events/s", least=20_000)
    dispatches(report)
    crowds(report)
