"""Statistics by model, as the protocol's statistics extension has them. Times are nanoseconds there, and here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lamina.core.actions import Reply
from lamina.gateway.observability.rolling_stats import BatchUsage
from lamina.gateway.oip.model_catalog import ServedModel

_EMPTY = {"count": 0, "ns": 0}


@dataclass(slots=True)
class _Times:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, took_us: int) -> None:
        self.count += 1
        self.ns += 1000 * max(0, took_us)

    def as_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class _ModelCounts:
    """Counts of one model."""

    last_ms: int = 0
    rows: int = 0
    success: _Times = field(default_factory=_Times)
    fail: _Times = field(default_factory=_Times)
    queue: _Times = field(default_factory=_Times)
    compute: _Times = field(default_factory=_Times)


@dataclass(slots=True)
class ModelStatistics:
    """Counts and times of all models."""

    _models: dict[tuple[str, str], _ModelCounts] = field(default_factory=dict)
    _batches: dict[str, dict[int, _Times]] = field(default_factory=dict)  #: by function, then by size

    def _counts_of(self, model: ServedModel) -> _ModelCounts:
        key = (model.name, model.version)
        if key not in self._models:
            self._models[key] = _ModelCounts()
        return self._models[key]

    def on_response(self, model: ServedModel, reply: Reply, rows: int) -> None:
        of = self._counts_of(model)
        of.last_ms = time.time_ns() // 1_000_000
        of.rows += rows
        of.success.add(reply.latency_us)
        of.queue.add(reply.queue_us)
        of.compute.add(reply.latency_us - reply.queue_us)

    def on_failure(self, model: ServedModel) -> None:
        self._counts_of(model).fail.add(0)

    def on_batch_finished(self, usage: BatchUsage, cost: float) -> None:
        """Count batches, from any protocol."""
        sizes = self._batches.setdefault(usage.function, {})
        times = sizes.get(usage.jobs)
        if times is None:
            times = sizes[usage.jobs] = _Times()
        times.count += 1
        times.ns += 1000 * usage.device_us

    def as_dict(self, model: ServedModel) -> dict[str, Any]:
        of = self._counts_of(model)
        batches = self._batches.get(model.target_name, {})
        return {
            "name": model.name,
            "version": model.version,
            "last_inference": of.last_ms,
            "inference_count": of.rows,
            "execution_count": sum(times.count for times in batches.values()) or of.success.count,
            "inference_stats": {
                "success": of.success.as_dict(),
                "fail": of.fail.as_dict(),
                "queue": of.queue.as_dict(),
                "compute_input": _EMPTY,
                "compute_infer": of.compute.as_dict(),
                "compute_output": _EMPTY,
                "cache_hit": _EMPTY,
                "cache_miss": _EMPTY,
            },
            "batch_stats": [
                {"batch_size": size, "compute_input": _EMPTY, "compute_infer": times.as_dict(), "compute_output": _EMPTY}
                for size, times in sorted(batches.items())
            ],
        }
