"""Reader of `[interference]`: how colocated batches slow each other down.

[interference]
model = "bandwidth"            # from `bandwidth` of the profiles
limit = 0.7

[interference]
model = "fitted"               # to measured co-locations; from `traits` of the profiles

[interference]
model = "linear"               # gpu-let's
weights.2080ti = { own_l2 = 0.11, other_l2 = 0.72, own_dram = 0.35, other_dram = 0.09, base = 0.90 }
use.resnet50.2080ti = { batch = [1, 32], l2 = [0.1, 0.4], dram = [0.1, 0.5] }
"""

from __future__ import annotations

from collections.abc import Iterable

from lamina.planner.interference import InterferenceModel
from lamina.planner.partitioning.catalogue import InterferenceWeights
from lamina.predict.fitted_interference import fitted_interference
from lamina.predict.interference import BANDWIDTH_LIMIT, LinearInterference, MemoryUse, bandwidth_interference
from lamina.predict.profile import Profile
from lamina.sim.toml_fields import Field, required

_WEIGHTS = ("own_l2", "other_l2", "own_dram", "other_dram", "base")


def read_interference(field: Field, profiles: Iterable[Profile], functions: Iterable[str]) -> InterferenceModel:
    fields = field.table("model", "limit", "weights", "use")
    model = fields["model"].one_of("bandwidth", "fitted", "linear") if "model" in fields else "bandwidth"
    if model == "bandwidth":
        for key in ("weights", "use"):
            if key in fields:
                raise fields[key].error("means nothing for bandwidth", 'model = "linear" takes weights and use')
        limit = fields["limit"].share() if "limit" in fields else BANDWIDTH_LIMIT
        return bandwidth_interference(profiles, limit)
    if model == "fitted":
        for key in ("limit", "weights", "use"):
            if key in fields:
                raise fields[key].error("means nothing for fitted", "it takes the traits of the profiles")
        return fitted_interference(profiles)
    if "limit" in fields:
        raise fields["limit"].error("means nothing for linear", 'model = "bandwidth" takes a limit')
    weights = {
        kind: _weights(row)
        for kind, row in required(field, fields, "weights", "weights.h200 = { own_l2 = ..., base = 1.0 }").table().items()
    }
    known = set(functions)
    use: dict[tuple[str, str], MemoryUse] = {}
    for name, kinds in required(field, fields, "use", "use.NAME.h200 = { batch, l2, dram }").table().items():
        if name not in known:
            raise kinds.unknown_name(f"there is no function {name!r}", known)
        for kind, row in kinds.table().items():
            use[name, kind] = _use(row)
    return LinearInterference(weights, use)


def _weights(row: Field) -> InterferenceWeights:
    fields = row.table(*_WEIGHTS)
    values = []
    for name in _WEIGHTS:
        value = fields[name].value if name in fields else (1.0 if name == "base" else 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields[name].error(f"{value!r} is not a number", "a weight may be negative")
        values.append(float(value))
    return InterferenceWeights(*values)


def _use(row: Field) -> MemoryUse:
    fields = row.table("batch", "l2", "dram")
    batches = [one.integer(1) for one in required(row, fields, "batch").items()]
    columns = []
    for name in ("l2", "dram"):
        column = [one.number() for one in required(row, fields, name).items()]
        if len(column) != len(batches) or not batches:
            raise fields[name].error(f"{len(column)} numbers for {len(batches)} batch sizes", "one for each number in batch")
        columns.append(tuple(column))
    if sorted(set(batches)) != batches:
        raise fields["batch"].error("batch sizes do not grow", "list them from small to large, each once")
    return MemoryUse(tuple(batches), *columns)
