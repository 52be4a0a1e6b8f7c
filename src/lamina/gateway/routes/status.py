"""`GET /v1/status`: devices with their slices and owners, functions with usage, targets with their SLOs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lamina.core.bandwidth import bandwidth_rule
from lamina.core.scheduling.leases import Device, slice_label
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.drivers.engine import Engine
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.composite import CompositeEngine
from lamina.engines.emulated import EmulatedEngine
from lamina.gateway.observability.metrics import RollingStats, UsageShare
from lamina.gateway.routes.targets import CallTarget
from lamina.gpu.protocol import ExecutorReport


def status(loop: RealtimeDriver, recent: RollingStats, targets: Iterable[CallTarget], memory: dict[str, Any]) -> dict[str, Any]:
    """The status document. `memory` is the account of the memory budget."""
    state, now_us = loop.controller.state, loop.now_us()
    span_s, shares = recent.usage_shares(now_us)
    return {
        "calls": len(state.runs),
        "devices": [device_status(state, loop, device, now_us) for device in state.devices.values()],
        "functions": [function_status(state, function, shares, span_s) for function in state.functions.values()],
        "targets": [
            {
                "name": target.name,
                "kind": target.kind,
                "slo_ms": target.slo.latency_us / 1000 or None,
                **recent.call_stats(now_us, target.name),
            }
            for target in targets
        ],
        "memory": memory,
        "walls": _walls(loop),
        "window_s": round(span_s, 1),
    }


def _walls(loop: RealtimeDriver) -> dict[str, str] | None:
    """Walls between tenants on this machine: "" if one holds, else why it does not; None without processes."""
    engine = loop.engine
    return msgspec.structs.asdict(engine.cpu.isolation.walls) if isinstance(engine, CompositeEngine) else None


def device_status(state: ControllerState, loop: RealtimeDriver, device: Device, now_us: int) -> dict[str, Any]:
    batches = {batch.id: batch for batch in state.batches.values() if batch.device is device}
    slices: list[dict[str, Any]] = [
        {
            "slice": slice_label(device.spec.id, mask),
            "mask": mask,
            "function": batches[batch_id].instance.function,
            "jobs": len(batches[batch_id].jobs),
            "for_ms": (now_us - batches[batch_id].started_us) / 1000,
            "gives_way": batches[batch_id].gives_way,
            "is_paused": batches[batch_id].pauses.resumes_us >= 0,
            "remaining_segments": batches[batch_id].pauses.remaining_segments,
        }
        for batch_id, mask in (*device.running.items(), *device.yielding.items())
        if batch_id in batches
    ]
    homes = [
        {
            "mask": mask,
            "first": (mask & -mask).bit_length() - 1,
            "units": mask.bit_count(),
            "function": state.instances[owner].function,
            "lent": owner in device.lent,
            "time": device.time_shares[owner],
        }
        for owner, mask in device.homes.items()
    ]
    return {
        "id": device.spec.id,
        "kind": device.spec.kind,
        "family": device.spec.family,
        "units": device.spec.units,
        "soft": device.spec.limits.soft,
        "emulated": isinstance(loop.engine, EmulatedEngine),
        "leased": device.leased_units.bit_count(),
        "slices": slices,
        "homes": homes,
        "memory_mib": device.spec.memory_mib,
        "memory_used_mib": device.memory_used_mib,
        "way_ms": device.way_us / 1000,
        **_bandwidth(
            loop,
            device,
            [
                (one["function"], one["mask"].bit_count())
                for one in slices
                if not (one["gives_way"] and one["mask"] & device.busy)
            ],
        ),
        "executor": _executor(loop, device.spec.id),
    }


def _bandwidth(loop: RealtimeDriver, device: Device, running: list[tuple[str, int]]) -> dict[str, Any]:
    """Part of the peak memory bandwidth, and its source: measured in the last second where a device counts, else what the running
    batches ask for by their profiles."""
    gpu = executor_report(loop.engine, device.spec.id)
    if gpu is not None and gpu.usage is not None and gpu.usage.bandwidth >= 0:
        return {"bandwidth": round(gpu.usage.bandwidth, 3), "bandwidth_from": "measured"}
    rule = bandwidth_rule(loop.controller.predictor)
    kind, units = device.spec.kind, device.spec.units
    if rule is None or not any(place == kind for _, place in rule.demand):
        return {"bandwidth": None, "bandwidth_from": None}
    asked = sum(rule.demand.get((function, kind), 0.0) * count / units for function, count in running)
    return {"bandwidth": round(asked, 3), "bandwidth_from": "profiles"}


def executor_report(engine: Engine, device: str) -> ExecutorReport | None:
    """Report on the process that owns a GPU, of this machine or of a node."""
    return engine.executor_report(device) if isinstance(engine, CompositeEngine) else None


def _executor(loop: RealtimeDriver, device: str) -> dict[str, Any] | None:
    """The last report of the process that owns a GPU, and what its standby has ready."""
    gpu = executor_report(loop.engine, device)
    if gpu is None:
        return None
    said = msgspec.structs.asdict(gpu.usage) if gpu.usage is not None else {}
    clocks = said.pop("clocks", None)
    said.pop("bandwidth", None)
    return {
        "pid": gpu.pid,
        "restarts": gpu.restarts,
        "replaced_ms": round(gpu.replaced_s * 1000),
        "standing_by": gpu.standing_by,
        "loads_ms": gpu.loads_ms,
        "clocks": msgspec.structs.asdict(clocks) if clocks is not None else None,
        **said,
    }


def function_status(
    state: ControllerState, function: FunctionState, shares: dict[tuple[str, str], UsageShare], span_s: float
) -> dict[str, Any]:
    name = function.spec.name
    held = used = 0.0
    batches = jobs = 0
    for (device, owner), share in shares.items():
        if owner == name and device in state.devices:
            whole = state.devices[device].spec.units * span_s * 1e6
            held += share.held / whole
            used += share.used / whole
            batches += share.batches
            jobs += share.jobs
    return {
        "name": name,
        "queue": len(function.queue),
        "held": round(held, 4),
        "used": round(used, 4),
        "batches_per_s": round(batches / span_s, 1),
        "jobs_per_s": round(jobs / span_s, 1),
        "memory_mib": function.spec.memory_mib,
        "instances": [
            {"id": i.id, "device": i.device, "phase": i.phase.value, "batches": len(i.batches), "quota": i.quota}
            for i in function.instances.values()
        ],
    }
