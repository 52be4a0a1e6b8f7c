"""Predicted profile of a torch model that has not run on the device: from its operators, by the shipped latency model."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.predict import fitted_interference, learned
from lamina.predict.profile import Profile
from lamina.profiler.model_trace import trace_model
from lamina.sdk.function import Function


def predict_profile(function: Function[..., Any], kind: str) -> Profile:
    model = learned.shipped_model(kind)
    runner = function.open()
    try:
        if runner.model is None or not hasattr(runner.model.module, "parameters"):
            raise BadValue(
                f"function {function.name!r} is no torch model, so nothing can be said of it without running it",
                hint="make it a lamina.TorchModel, or profile it on the device",
            )
        record = trace_model(function.name, runner.model.module, runner.model.example)
    finally:
        runner.close()
    grid = model.predict(record)
    found = grid.profile(function.name, kind)
    largest = max(1, function.spec.max_batch)
    kept = [point for point in found.points if point.batch <= largest]
    places = [f"batch {batch} on {units} unit{'s'[: units > 1]}" for batch, units in model.probes(3) if batch <= largest]
    meta = found.meta | {"learnt_from": f"{len(model.library.functions)} functions", "worth_measuring": ", ".join(places)}
    return replace(found, points=kept, traits=fitted_interference.traits_from_record(record), meta=meta)
