"""Live runs kept in the repository are simulated to the figures that are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.fidelity import company, recorded, replay
from benchmarks.fidelity.host import Host
from benchmarks.fidelity.live import Batch, Runs

from lamina.engines.shadow_batches import BatchTiming
from lamina.predict.profile import Handover
from lamina.types import Call, DeviceSpec, FunctionSpec

PLACES = {"a": 0, "b": 0, "c": 0}


def runs(*device_us: int) -> Runs:
    return {(1, 3): [BatchTiming(us, us + 50) for us in device_us]}


def recording(batches: list[Batch], calls: list[Call] | None = None) -> recorded.Recording:
    device = DeviceSpec(id="gpu0", kind="h200", units=15, memory_mib=1000)
    phase = recorded.Phase(
        tuple(PLACES), 0.5, calls or [], [900] * len(calls or []), {"away_ms": 1.0}, batches, Host(20, [(5, 900), (1_000, 1_500)])
    )
    functions = (FunctionSpec(name="a"),)
    return recorded.Recording(
        {"date": "today"},
        device,
        functions,
        {"a": {8: [1.1, 1.2]}},
        [{"a": Handover(400.0, 3.0)}],
        [{"a": runs(100, 90)}],
        [phase],
    )


@pytest.mark.parametrize("name", ["run.json", "run.json.xz"])
def test_a_recording_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    calls = [Call("0", "a", 40, 140, 140), Call("1", "c", 45, 145, 145)]
    kept = recording([Batch("a", 2, 50, 180, 110, False), Batch("c", 1, 60, 150, 70, True)], calls)
    recorded.write(tmp_path / name, kept)
    assert recorded.read(tmp_path / name) == kept


def test_slowdowns_are_read_off_the_batches_of_a_run() -> None:
    """`a` takes 1,000 alone, 1,250 beside one that is always on, 2,000 beside two."""
    batches = []
    for turn in range(40):
        begin, both = turn * 10_000, turn % 2
        took = 2_000 if both else 1_250
        batches.append(Batch("a", 1, begin, begin + took, took, False))
        batches += [Batch(name, 1, begin, begin + 4_000, 4_000, False) for name in ("b", "c")[: 1 + both]]
    found = company.felt(recording(batches), {name: {1: 1_000.0} for name in PLACES})
    assert found["a"][1] == pytest.approx([1.25, 2.0])


def test_a_round_that_was_not_alone_on_its_device_is_left_out() -> None:
    quiet, busy = runs(100, 101, 99, 100), runs(100, 150, 100, 140)
    assert replay.steady([busy, quiet]) == [quiet]


def test_a_small_row_replays_to_the_published_figures() -> None:
    published = {
        (row["run"], row["what"], row["load"]): row
        for row in json.loads(Path("results/prediction-fidelity.json").read_text())["gpu"]
    }
    [row] = replay.rows([replay.FOLDER / "hard-1.json.xz"], "alone, 0.5")
    known = published[row["run"], row["what"], row["load"]]
    assert row["live"] == known["live"]
    for name in ("p50_ms", "p99_ms"):  # another decision of the policy moves a median by a percent
        assert row["simulated"][name] == pytest.approx(known["simulated"][name], rel=0.03)
