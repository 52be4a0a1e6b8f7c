"""Static features of a model: what can be said without running it, as numbers a learner can use.

Two views of the same model, since neither is the better one: `totals` (work, bytes, kernels, how much of each per kernel,
shares of kinds of layers) and `kinds` (work, bytes and counts by kind of operator). Logarithms nearly everywhere: twice the
work matters the same for a small model and a large one. A static record is a row of `data/h200/models.jsonl` with the
`operators` of `data/operators.jsonl`; `benchmarks/operators.py` makes the latter for any torch module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lamina.errors import BadValue

Record = Mapping[str, Any]

OPERATOR_KINDS = (
    "conv",
    "pointwise",
    "depthwise",
    "grouped",
    "matmul",
    "attention",
    "norm",
    "elementwise",
    "softmax",
    "pool",
    "copy",
    "gather",
)
"""Of operators; the first six do arithmetic worth counting."""

REQUIRED_FIELDS = (
    "params", "param_bytes", "nesting", "layers_conv", "layers_linear", "layers_norm", "layers_activation", "layers_attention",
    "flops_b1", "flops_b8", "read_bytes_b1", "written_bytes_b1", "read_bytes_b8", "written_bytes_b8", "ops_b1", "leaf_calls_b1",
    "op_counts_b1", "operators",
)  # fmt: skip


KERNELS_PER_OPERATOR = {"conv": 2.0, "pointwise": 2.0, "depthwise": 2.0, "grouped": 2.0, "copy": 0.5}
"""Launched per operator traced, where it is not one: a library lays a convolution's input out anew, and every other copy is
part of a kernel that is there anyway. Over the models of data/h200."""


def estimate_kernels(record: Record) -> Record:
    """Estimate the kernels of a model without a captured graph: as many as its operators usually need. Half of the models of
    data/h200 are counted to within 6 %; transformers are not: attention may be one kernel, and a product may be cut in two."""
    each = (
        KERNELS_PER_OPERATOR | {"elementwise": 0.0} if record.get("layers_recurrent") else KERNELS_PER_OPERATOR
    )  # a step of an LSTM is one kernel
    batch_norms = sum(count for name, count in record["op_counts_b1"].items() if "batch_norm" in name)  # two kernels each
    kernels = sum(each.get(kind, 1.0) * count for kind, count, *_ in record["operators"]) + batch_norms
    return {**record, "kernels_b1": max(1, round(kernels))}


def check_record(record: Record) -> None:
    missing = [name for name in REQUIRED_FIELDS if name not in record]
    if missing:
        raise BadValue(
            f"static features of {record.get('model', 'a function')!r} lack {', '.join(missing)}",
            hint="trace the model with benchmarks/operators.py and benchmarks/gpu/features.py, or profile the function instead",
        )
    unknown = sorted({row[0] for row in record["operators"]} - set(OPERATOR_KINDS))
    if unknown:
        raise BadValue(f"no kind of operator {', '.join(map(repr, unknown))}", hint=f"there are {', '.join(OPERATOR_KINDS)}")
    if not record["operators"]:
        raise BadValue(f"{record.get('model', 'a function')!r} has no operators", hint="trace it with a real input")


def total_features(record: Record) -> list[float]:
    kernels = max(1, record["kernels_b1"])
    flops = max(record["flops_b1"], 2 * record["params"], 1)  # a counter that knows no LSTM says 0
    once = record["read_bytes_b1"] + record["written_bytes_b1"]
    per_item = max(1e3, (record["read_bytes_b8"] + record["written_bytes_b8"] - once) / 7)
    parameters = max(1, record["param_bytes"])
    counts = record["op_counts_b1"]
    attention = counts.get("bmm", 0) + sum(n for name, n in counts.items() if "scaled_dot" in name)
    operators = count_as_kernels(record)
    return [
        *map(math.log, (flops, once, per_item, parameters, kernels, record["ops_b1"], record["leaf_calls_b1"])),
        *map(math.log, (flops / per_item, flops / kernels, per_item / kernels, parameters / flops)),
        math.log(record["written_bytes_b8"] / record["read_bytes_b8"]),
        *(record[f"layers_{kind}"] / kernels for kind in ("conv", "linear", "norm", "activation", "attention")),
        float(record["nesting"]),
        float(record["flops_b8"] == 0),
        *(counts.get(name, 0) / kernels for name in ("native_layer_norm", "native_batch_norm")),
        attention / kernels,
        counts.get("cat", 0) / kernels,
        math.log(record["ops_b1"] / kernels),
        math.log(1 + _sum(operators, 2)),
        math.log(1e3 + _sum(operators, 3)),
        math.log(1 + _sum(operators, 4) + _sum(operators, 5)),
        math.log(sum(row[1] for row in operators)),
        *size_features(operators),
    ]


def operator_features(record: Record) -> list[float]:
    operators = count_as_kernels(record)
    by_kind = {kind: [row for row in operators if row[0] == kind] for kind in OPERATOR_KINDS}
    moved = {kind: _sum(rows, 4) + _sum(rows, 5) for kind, rows in by_kind.items()}
    return [
        math.log(1 + _sum(operators, 2)),
        math.log(1e3 + _sum(operators, 3)),
        math.log(1 + sum(moved.values())),
        math.log(max(1, record["kernels_b1"])),
        *(math.log1p(_sum(by_kind[kind], 2) / 1e6) for kind in OPERATOR_KINDS[:6]),
        *(math.log1p(moved[kind] / 1e4) for kind in OPERATOR_KINDS if kind not in ("grouped", "matmul", "attention", "gather")),
        *(math.log1p(sum(row[1] for row in by_kind[kind])) for kind in OPERATOR_KINDS),
        *size_features(operators),
    ]


def count_as_kernels(record: Record) -> list[list[Any]]:
    """The operators, counted as kernels: a trace may break into hundreds what a library runs as one (an LSTM), or the other
    way round, and a launch costs what it costs."""
    operators = record["operators"]
    times = max(1, record["kernels_b1"]) / sum(row[1] for row in operators)
    return [[row[0], row[1] * times, *row[2:]] for row in operators]


def size_features(operators: Sequence[Sequence[Any]]) -> list[float]:
    """How the work is cut: many small operators are bound by launches, one large one by the arithmetic."""
    return [
        math.log(sum(row[1] * math.sqrt(max(row[2], 1)) for row in operators)),
        math.log(1 + max(row[2] for row in operators)),
        math.log(max(1, *(row[5] for row in operators))),
    ]


def _sum(rows: Sequence[Sequence[Any]], column: int) -> float:
    return float(sum(row[1] * row[column] for row in rows))


FEATURE_VIEWS = {"totals": total_features, "kinds": operator_features}
