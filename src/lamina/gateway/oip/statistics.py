"""Statistics by model, as the protocol's statistics extension has them. Times are nanoseconds there, and here.

Requests are counted here, batches of whatever protocol in the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lamina.core.actions import Reply
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
    """Counts and times of all models. `batches_by_size` says of a function: batches, and microseconds, by number of jobs."""

    batches_by_size: Callable[[str], dict[int, tuple[int, int]]]
    _models: dict[tuple[str, str], _ModelCounts] = field(default_factory=dict)

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

    def as_dict(self, model: ServedModel) -> dict[str, Any]:
        of = self._counts_of(model)
        batches = {size: _Times(count, 1000 * us) for size, (count, us) in self.batches_by_size(model.target_name).items()}
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
