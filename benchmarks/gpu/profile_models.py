"""`python -m benchmarks.gpu.profile_models --out data/h200`: models by batch by slice, alone and beside each other.

Resumable: what is in the files already is not measured again, and every model is written as soon as it is done.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu import features, zoo
from benchmarks.gpu.lanes import capture, median, percentile, replay_us, together_us

BATCHES = (1, 2, 4, 8, 16, 32, 64)
UNITS = (15, 12, 8, 6, 4, 3, 2, 1)
"""Of 8 SMs each; 15 is the whole device with its 132."""

TOO_LONG_US = 250_000
LATENCY = ("model", "batch", "units", "sms", "p50_us", "p99_us", "min_us", "runs")
SHARED = ("case", "lanes", "model", "batch", "units", "sms", "solo_us", "shared_us", "slowdown", "demand_gb_s", "others_gb_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--models", default="")
    parser.add_argument("--cases", type=int, default=0, help="co-locations to try after the models")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + options.seconds
    from lamina.gpu.slicers.green import GreenSlicer

    slicer = GreenSlicer()
    known = _read(options.out / "models.jsonl")
    for name in options.models.split(",") if options.models else zoo.ALL:
        if name in known:
            continue
        if time.monotonic() > ends_s:
            print(f"no time left for {name} and what follows", flush=True)
            break
        begin_s = time.monotonic()
        try:
            row, points = measure(name, slicer)
        except Exception as error:
            print(f"- {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            print(traceback.format_exc()[-600:], flush=True)
            continue
        _append(options.out / "latency.csv", LATENCY, points)
        with (options.out / "models.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"+ {name}: {len(points)} points in {time.monotonic() - begin_s:.1f} s", flush=True)
    if options.cases:
        cases(options.out, slicer, options.cases, ends_s)


def measure(name: str, slicer: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import torch

    torch.cuda.empty_cache()
    model = zoo.build(name)
    torch.cuda.synchronize()
    row = {"model": name, "family": model.family, "input": model.shape, "dtype": "float16", **features.static(model)}
    for batch in (1, 8):
        counts = features.counted(model, batch)
        row |= {f"{key}_b{batch}": value for key, value in counts.items() if key != "op_counts" or batch == 1}
    points: list[dict[str, Any]] = []
    peaks: dict[str, int] = {}
    too_long: set[int] = set()
    for batch in BATCHES:
        inputs = model.make_input(batch)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode(), slicer.slice(0x7FFF):
            model.module(inputs)
            model.module(inputs)
        slicer.slice(0x7FFF).torch_stream.synchronize()
        peaks[str(batch)] = (torch.cuda.max_memory_allocated() - base + row["param_bytes"]) >> 20
        for units in UNITS:
            if units in too_long:
                continue
            slice_ = slicer.slice((1 << units) - 1)
            keep = units == 15 and batch == 1
            graph, output = capture(lambda: model.module(inputs), slice_.torch_stream, warm=0, keep=keep)  # noqa: B023
            if keep:
                row["kernels_b1"] = _nodes(graph)
            times = replay_us(graph, slice_.torch_stream)
            points.append(
                {
                    "model": name,
                    "batch": batch,
                    "units": units,
                    "sms": slice_.sms,
                    "p50_us": round(median(times), 1),
                    "p99_us": round(percentile(times, 0.99), 1),
                    "min_us": round(min(times), 1),
                    "runs": len(times),
                }
            )
            if median(times) > TOO_LONG_US:
                too_long |= {fewer for fewer in UNITS if fewer <= units}
            del graph, output
    row["peak_mib"] = peaks
    return row, points


def cases(out: Path, slicer: Any, count: int, ends_s: float) -> None:
    """Random neighbours on random disjoint slices; each is timed alone first, on the same slice with the same graph."""
    import torch

    rng = random.Random(5)
    known = _read(out / "models.jsonl")
    names = [name for name in zoo.ALL if name in known][:24]
    done = {line["case"] for line in _rows(out / "colocation.csv")}
    cache: dict[str, Any] = {}
    for case in range(count):
        lanes = []
        sizes = _cut(rng, rng.choice((2, 2, 2, 3, 3, 4)))
        start = 0
        for units in sizes:
            name = rng.choice(names)
            lanes.append((name, rng.choice((1, 4, 8, 16, 32)), units, start))
            start += units
        if str(case) in done:
            continue
        if time.monotonic() > ends_s:
            print(f"no time left after {case} cases", flush=True)
            return
        made = []
        for name, batch, units, at in lanes:
            if name not in cache:
                cache[name] = zoo.build(name)
            model, slice_ = cache[name], slicer.slice(((1 << units) - 1) << at)
            inputs = model.make_input(batch)
            graph, output = capture(lambda: model.module(inputs), slice_.torch_stream)  # noqa: B023
            solo = median(replay_us(graph, slice_.torch_stream, spend_ms=15, most=10))
            made.append((graph, slice_, solo, (inputs, output)))
        shared = together_us([(graph, slice_.torch_stream) for graph, slice_, *_ in made], [solo for *_, solo, _ in made])
        demands = [demand_gb_s(known[name], batch, solo) for (name, batch, *_), (_, _, solo, _) in zip(lanes, made, strict=True)]
        rows = [
            {
                "case": case,
                "lanes": len(lanes),
                "model": name,
                "batch": batch,
                "units": units,
                "sms": slice_.sms,
                "solo_us": round(solo, 1),
                "shared_us": round(us, 1),
                "slowdown": round(us / solo, 4),
                "demand_gb_s": round(demand),
                "others_gb_s": round(sum(demands) - demand),
            }
            for (name, batch, units, _), (_, slice_, solo, _), us, demand in zip(lanes, made, shared, demands, strict=True)
        ]
        _append(out / "colocation.csv", SHARED, rows)
        del made
        if torch.cuda.memory_reserved() > 60 << 30:
            torch.cuda.empty_cache()
    print(f"+ {count} cases", flush=True)


def demand_gb_s(row: dict[str, Any], batch: int, us: float) -> float:
    """Bytes its operators read and write, by time: what it would ask of memory if no cache helped."""
    per_item = (row["read_bytes_b8"] + row["written_bytes_b8"] - row["read_bytes_b1"] - row["written_bytes_b1"]) / 7
    fixed = row["read_bytes_b1"] + row["written_bytes_b1"] - per_item
    return (max(0.0, fixed) + per_item * batch) / us / 1e3


def _cut(rng: random.Random, parts: int) -> list[int]:
    places = sorted(rng.sample(range(1, 15), parts - 1))
    return [high - low for low, high in zip([0, *places], [*places, 15], strict=True)]


def _nodes(graph: Any) -> int:
    """Kernels and copies in a captured graph."""
    try:
        from cuda.bindings import runtime

        return int(runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()), 0)[-1])
    except Exception as error:
        print(f"  kernels cannot be counted: {error}", flush=True)
        return 0


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return {row["model"]: row for row in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def _append(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
