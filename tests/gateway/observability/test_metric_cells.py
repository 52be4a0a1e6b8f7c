"""Our counters and histograms: they report what the client library's would."""

from __future__ import annotations

import random
from typing import Any

import prometheus_client as theirs
from prometheus_client import CollectorRegistry, generate_latest

from lamina.gateway.observability import metrics as ours

BUCKETS = (0.001, 0.5, 1, 10.0)


def text(counter: Any, histogram: Any) -> list[str]:
    """What a scrape sees after the same events, without the times of creation."""
    registry = CollectorRegistry()
    calls = counter("lamina_calls", "Calls", ["target", "outcome"], registry=registry)
    times = histogram("lamina_seconds", "Times", ["target"], registry=registry, buckets=BUCKETS)
    rng = random.Random(1)
    for _ in range(200):
        target = rng.choice("ab")
        calls.labels(target, rng.choice(("met", "late"))).inc(rng.choice((1, 0.25)))
        times.labels(target).observe(rng.choice((*BUCKETS, 0.0, rng.random() * 20)))
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_the_text_is_the_same_line_by_line() -> None:
    assert text(ours.CounterFamily, ours.HistogramFamily) == text(theirs.Counter, theirs.Histogram)


def test_a_histogram_without_labels_is_there_before_anything_happens() -> None:
    registry = CollectorRegistry()
    ours.HistogramFamily("lamina_decision_seconds", "Decisions", [], registry=registry, buckets=BUCKETS)
    assert b"lamina_decision_seconds_count 0.0" in generate_latest(registry)
