from __future__ import annotations

import re
from pathlib import Path

import pytest

from lamina.sdk.app import App


@pytest.mark.live
def test_the_demo_serves_reads_loads_and_plots(ocr: App, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    import demo

    plot = tmp_path / "demo.png"
    demo.main(["--steps", "1", "--seconds", "1", "--deadline", "30s", "--out", str(plot)])
    said = capsys.readouterr().out
    right = re.search(r"([0-9.]+)% of the characters are right", said)
    assert right is not None, said
    assert float(right[1]) >= 97
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_counts_are_read_from_the_metrics_a_server_writes(ocr: App) -> None:
    from prometheus_client import CollectorRegistry, Histogram, generate_latest

    import steps

    registry = CollectorRegistry()
    for name, seen in (("lamina_batch_size", [8, 4]), ("lamina_step_seconds", [0.25, 0.125])):
        histogram = Histogram(name, "text", ["function"], registry=registry)
        for value in seen:
            histogram.labels("recognise").observe(value)
    counts = steps.counts_in(generate_latest(registry).decode())
    assert counts == {
        "detect": steps.StageCount(),
        "orient": steps.StageCount(),
        "recognise": steps.StageCount(batches=2, jobs=12, busy_s=0.375),
    }


def test_latency_counts_answers_and_no_refusals(ocr: App) -> None:
    import steps

    step = steps.Step(rate_hz=1, seconds=1)
    for latency_ms, ending in ((100, "in time"), (300, "late"), (1, "refused"), (200, "in time")):
        step.outcomes.append(steps.Outcome(0.0, latency_ms, ending))
    assert [step.latency_ms(0.0), step.latency_ms(0.5), step.latency_ms(0.99)] == [100, 200, 300]
