"""Pulse of a server, once a second for the console: devices, busy functions, counts of the last minute, and a verdict.

The verdict (`verdict.py`) is made from the same figures that are shown, so it can be followed. Counts are differences of the
metrics' own counters, taken while there is a viewer; nothing is counted twice, and without a viewer nothing is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, structs

from lamina.cluster.cluster_engine import ClusterEngine
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.drivers.realtime import RealtimeDriver
from lamina.gateway.console.recent_calls import alone_us
from lamina.gateway.console.verdict import CLIENTS_OWN, LIMITS, DeviceLoad, ServerFigures, ShortTarget, judge
from lamina.gateway.observability.metrics import Metrics, TargetCounts, UsageShare
from lamina.gateway.routes.status import device_status, function_status
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.predict.online import OnlinePredictor
from lamina.server.process_status import ProcessStatus

WINDOW_S = 60
MAX_FUNCTIONS, MAX_TARGETS, MAX_LATENCIES, MAX_OWNERS = 200, 200, 12, 24
"""Rows of a pulse, the busiest first; latencies of fewer of them: they take a sort each."""

MAX_NODES = 200
LAGS_US = 10_000_000
"""How far back the longest lag is looked for."""


class WindowCounts(Struct):
    """Calls of a target in the last minute, by how they ended."""

    met: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    cost: float = 0.0
    reasons: dict[str, int] = {}

    @property
    def offered(self) -> int:
        return self.met + self.late + self.failed + self.refused

    def add(self, more: TargetCounts, sign: int = 1) -> None:
        self.met += sign * more.met
        self.late += sign * more.late
        self.failed += sign * more.failed
        self.refused += sign * more.refused
        self.cost = max(0.0, self.cost + sign * more.cost)
        for reason, count in more.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + sign * count


class Pulse:
    """What is sent once a second. `begin` and `end` bracket the time in which there are viewers."""

    def __init__(
        self,
        driver: RealtimeDriver,
        metrics: Metrics,
        targets: TargetRegistry,
        process: ProcessStatus,
        memory: Callable[[], dict[str, Any]],
        runs: Callable[[], dict[str, int]],
        viewers: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._targets = targets
        self._process = process
        self._memory = memory
        self._runs = runs
        self._viewers = viewers
        self._last: dict[str, TargetCounts] = {}
        self._window: deque[tuple[int, list[TargetCounts]]] = deque()
        self._sums: dict[str, WindowCounts] = {}
        self._latencies: dict[str, dict[str, Any]] = {}
        self._tenants_before: dict[str, int] = {}
        self._lags: deque[tuple[int, int]] = deque()
        self._beats = 0
        self._began_us = 0

    def begin(self) -> None:
        self.end()
        self._last = {counts.target: counts for counts in self._metrics.target_counts()}
        self._tenants_before = self._metrics.limited_by_tenant()
        self._process.take_peak_lag_us()
        self._began_us = self._driver.now_us()

    def end(self) -> None:
        """Keep nothing while no viewer is there."""
        self._last.clear()
        self._window.clear()
        self._sums.clear()
        self._tenants_before.clear()
        self._lags.clear()
        self._latencies.clear()

    def offered_rates(self) -> dict[str, float]:
        """Calls a second by target that came while there were viewers, in the last minute at most; those refused among them."""
        span_s = self._span_s(self._driver.now_us())
        return {name: counts.offered / span_s for name, counts in self._sums.items() if span_s >= 1 and counts.offered}

    def take(self) -> dict[str, Any]:
        driver, now_us = self._driver, self._driver.now_us()
        state = driver.controller.state
        self._count(now_us)
        self._lags.append((now_us, self._process.take_peak_lag_us()))
        while self._lags[0][0] < now_us - LAGS_US:
            self._lags.popleft()
        span_s, shares = self._metrics.rolling.usage_shares(now_us)
        busiest = sorted(self._sums.items(), key=lambda item: -item[1].offered)[:MAX_TARGETS]
        if self._beats % 2 == 0:
            rolling = self._metrics.rolling
            self._latencies = {name: rolling.call_stats(now_us, name) for name, _ in busiest[:MAX_LATENCIES]}
        self._beats += 1
        names = {function for _, function in shares} | {*state.waiting, *state.deferred}
        functions = [function_status(state, state.functions[name], shares, span_s) for name in names if name in state.functions]
        functions.sort(key=lambda one: (-one["held"], -one["queue"]))
        held = self._held(shares, span_s)
        devices = [
            device_status(state, driver, device, now_us)
            | {
                "held": round(held.get(device.spec.id, 0.0), 4),
                "running": [*device.running, *device.yielding],
                "memory_by_function": self._memory_of(device),
                "price_per_s": device.spec.price_per_s,
                "node": device.spec.node,
            }
            for device in state.devices.values()
        ]
        return {
            "now": now_us,
            "wall": time.time(),
            "window_s": round(self._span_s(now_us), 1),
            "devices": devices,
            "functions": functions[:MAX_FUNCTIONS],
            "function_count": len(state.functions),
            "targets": [self._target(name, counts, self._known(name)) for name, counts in busiest],
            "target_count": len(self._targets.all),
            "calls": len(state.runs),
            "queued": sum(len(state.functions[name].queue) for name in (*state.waiting, *state.deferred)),
            "cluster": self._cluster(),
            "runs": self._runs(),
            "memory": self._memory(),
            "lag_ms": max(lag_us for _, lag_us in self._lags) / 1000,
            "decision_us": driver.decision_us,
            "viewers": self._viewers(),
            "verdict": structs.asdict(judge(self._figures(held, now_us))),
        }

    def _cluster(self) -> dict[str, Any] | None:
        """Nodes and the epoch in which this server leads them; None where it stands alone."""
        engine = self._driver.engine
        if not isinstance(engine, ClusterEngine):
            return None
        nodes = [
            {"name": one.name, "state": one.phase.value, "rtt_us": one.rtt_us} for one in engine.listener.registry.nodes.values()
        ]
        return {"epoch": engine.listener.epoch, "nodes": nodes[:MAX_NODES]}

    # ------------------------------------------------------------------------ counts

    def _span_s(self, now_us: int) -> float:
        return min(float(WINDOW_S), (now_us - self._began_us) / 1e6)

    def _count(self, now_us: int) -> None:
        """Add what has happened since the last time, and drop what is older than the window."""
        changed: list[TargetCounts] = []
        for counts in self._metrics.target_counts():
            last = self._last.get(counts.target)
            if last is not None and last[1:5] == counts[1:5]:
                continue
            self._last[counts.target] = counts
            changed.append(_difference(counts, last))
        if changed:
            self._window.append((now_us, changed))
        for counts in changed:
            sums = self._sums.get(counts.target)
            if sums is None:
                sums = self._sums[counts.target] = WindowCounts(reasons={})
            sums.add(counts)
        while self._window and self._window[0][0] < now_us - WINDOW_S * 1_000_000:
            for counts in self._window.popleft()[1]:
                self._sums[counts.target].add(counts, -1)

    def _target(self, name: str, counts: WindowCounts, target: CallTarget | None) -> dict[str, Any]:
        total = self._last[name]
        found = self._latencies.get(name, {})
        return {
            "name": name,
            "kind": target.kind if target is not None else "function",
            "slo_ms": (target.slo.latency_us / 1000 or None) if target is not None else None,
            "goal": target.slo.target if target is not None else None,
            "met": counts.met,
            "late": counts.late,
            "failed": counts.failed,
            "refused": counts.refused,
            "reasons": {reason: count for reason, count in counts.reasons.items() if count},
            "cost": counts.cost,
            "total": [total.met, total.late, total.failed, total.refused],
            "p50_ms": found.get("p50_ms"),
            "p99_ms": found.get("p99_ms"),
        }

    def _held(self, shares: dict[tuple[str, str], UsageShare], span_s: float) -> dict[str, float]:
        """Part of the unit-time of each device that batches held in the last seconds."""
        held: dict[str, float] = {}
        for (device, _), share in shares.items():
            held[device] = held.get(device, 0.0) + share.held
        devices = self._driver.controller.state.devices
        return {name: held[name] / (devices[name].spec.units * span_s * 1e6) for name in held if name in devices}

    def _memory_of(self, device: Device) -> dict[str, int]:
        instances, found = self._driver.controller.state.instances, dict[str, int]()
        for name in device.instances:
            one = instances[name]
            found[one.function] = found.get(one.function, 0) + one.memory_mib
        return dict(sorted(found.items(), key=lambda item: -item[1])[:MAX_OWNERS])

    # ----------------------------------------------------------------------- verdict

    def _known(self, name: str) -> CallTarget | None:
        paths = self._targets.by_path
        return paths.get(f"/v1/functions/{name}".encode()) or paths.get(f"/v1/workflows/{name}".encode())

    def _figures(self, held: dict[str, float], now_us: int) -> ServerFigures:
        """What the verdict is made from."""
        met = offered = limited = 0
        short: dict[str, float] = {}
        for name, counts in self._sums.items():
            own = sum(count for reason, count in counts.reasons.items() if reason in CLIENTS_OWN)
            by_limits = sum(count for reason, count in counts.reasons.items() if reason in LIMITS)
            asked = counts.offered - own - by_limits
            met, offered, limited = met + counts.met, offered + asked, limited + by_limits
            if asked > 0 and counts.met < asked:
                target = self._known(name)
                if counts.met < (target.slo.target if target is not None else 0.99) * asked:
                    short[name] = counts.met / asked
        worst = min(short, key=lambda name: (short[name], name), default="")
        refused = {name: count - self._tenants_before.get(name, 0) for name, count in self._metrics.limited_by_tenant().items()}
        return ServerFigures(
            span_s=self._span_s(now_us),
            met=met,
            offered=offered,
            limited=limited,
            limited_tenant=max(refused, key=lambda name: refused[name], default="") if limited else "",
            short=len(short),
            worst=self._short_target(worst, short[worst], held) if worst else None,
            busiest=self._busiest(held, held),
            lag_us=max((lag_us for _, lag_us in self._lags), default=0),
        )

    def _busiest(self, held: dict[str, float], among: Iterable[str]) -> DeviceLoad | None:
        devices = self._driver.controller.state.devices
        found = max((one for one in among if one in held and one in devices), key=lambda one: (held[one], one), default=None)
        return None if found is None else DeviceLoad(found, devices[found].spec.kind, held[found])

    def _short_target(self, name: str, attainment: float, held: dict[str, float]) -> ShortTarget:
        target = self._known(name)
        controller, counts = self._driver.controller, self._sums[name]
        state, flow = controller.state, controller.flows.get(name)
        functions = [state.functions[one] for one in (flow.functions if flow is not None else ()) if one in state.functions]
        on = {instance.device for function in functions for instance in function.instances.values()}
        stale = controller.predictor.stale_profiles() if isinstance(controller.predictor, OnlinePredictor) else []
        names = {function.spec.name for function in functions}
        kinds = [state.devices[one].spec.kind for one in on if one in state.devices]
        return ShortTarget(
            name=name,
            attainment=attainment,
            late=counts.late,
            failed=counts.failed,
            refused=sum(count for reason, count in counts.reasons.items() if reason not in CLIENTS_OWN | LIMITS),
            slo_us=target.slo.latency_us if target is not None else 0,
            alone_us=min((alone_us(controller, flow, kind) for kind in kinds), default=0) if flow is not None else 0,
            loading=next((function.spec.name for function in functions if not _has_ready(function)), ""),
            busiest=self._busiest(held, on),
            way_us=max((state.devices[one].way_us for one in on if one in state.devices), default=0),
            stale=next(((one.function, one.ratio) for one in stale if one.function in names), None),
        )


def _has_ready(function: FunctionState) -> bool:
    return any(one.phase is InstancePhase.WARM for one in function.instances.values())


def _difference(now: TargetCounts, before: TargetCounts | None) -> TargetCounts:
    if before is None:
        return now
    reasons = {reason: count - before.reasons.get(reason, 0) for reason, count in now.reasons.items()}
    ended = (now.met - before.met, now.late - before.late, now.failed - before.failed, now.refused - before.refused)
    return TargetCounts(now.target, *ended, now.cost - before.cost, reasons)
