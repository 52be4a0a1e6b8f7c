"""Pulse of a server, once a second for the console: devices, busy functions, counts of the last minute, and a verdict.

The verdict answers what an operator asks first: is everything in time, what is the bottleneck, what would help. It is a rule for
each of them over the same figures that are shown, so it can be followed. Counts are differences of the metrics' own counters,
taken while there is a viewer; nothing is counted twice, and without a viewer nothing is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.leases import Device
from lamina.drivers.realtime import RealtimeDriver
from lamina.gateway.observability.metrics import Metrics, TargetCounts
from lamina.gateway.observability.rolling_stats import UsageShare
from lamina.gateway.routes.status import device_status, function_status
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.predict.online import OnlinePredictor

WINDOW_S = 60
MAX_FUNCTIONS, MAX_TARGETS, MAX_LATENCIES, MAX_OWNERS = 200, 200, 12, 24
"""Rows of a pulse, the busiest first; latencies of fewer of them: they take a sort each."""

SATURATED = 0.85
"""Of the unit-time of a device that is held: from here on there is little room for one more batch."""


FAR = 0.25
"""Of the time a call has: a longer way to a device and back is what it is short of."""


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


class Verdict(Struct, frozen=True):
    """Answers to the first three questions. `state`: idle, good, late, refusing or failing."""

    state: str
    in_time: str
    bottleneck: str
    help: str
    target: str = ""  #: the worst one
    device: str = ""  #: the bottleneck, where it is one
    more_of: str = ""  #: the kind of device that would help


class Pulse:
    """What is sent once a second. `begin` and `end` bracket the time in which there are viewers."""

    def __init__(
        self,
        driver: RealtimeDriver,
        metrics: Metrics,
        targets: TargetRegistry,
        memory: Callable[[], dict[str, Any]],
        runs: Callable[[], dict[str, int]],
        viewers: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._targets = targets
        self._memory = memory
        self._runs = runs
        self._viewers = viewers
        self._last: dict[str, TargetCounts] = {}
        self._window: deque[tuple[int, list[TargetCounts]]] = deque()
        self._sums: dict[str, WindowCounts] = {}
        self._latencies: dict[str, dict[str, Any]] = {}
        self._beats = 0
        self._began_us = 0

    def begin(self) -> None:
        self.end()
        self._last = {counts.target: counts for counts in self._metrics.target_counts()}
        self._began_us = self._driver.now_us()

    def end(self) -> None:
        """Keep nothing while no viewer is there."""
        self._last.clear()
        self._window.clear()
        self._sums.clear()
        self._latencies.clear()

    def offered_rates(self) -> dict[str, float]:
        """Calls a second by target that came while there were viewers, in the last minute at most; those refused among them."""
        span_s = self._span_s(self._driver.now_us())
        return {name: counts.offered / span_s for name, counts in self._sums.items() if span_s >= 1 and counts.offered}

    def take(self) -> dict[str, Any]:
        driver, now_us = self._driver, self._driver.now_us()
        state = driver.controller.state
        self._count(now_us)
        span_s, shares = self._metrics.rolling.usage_shares(now_us)
        busiest = sorted(self._sums.items(), key=lambda item: -item[1].offered)[:MAX_TARGETS]
        if self._beats % 2 == 0:
            rolling = self._metrics.rolling
            self._latencies = {name: rolling.call_stats(now_us, name) for name, _ in busiest[:MAX_LATENCIES]}
        self._beats += 1
        known = {target.name: target for target in self._targets.all} if len(self._targets.all) <= 2_000 else {}
        names = {function for _, function in shares} | {*state.waiting, *state.deferred}
        functions = [function_status(state, state.functions[name], shares, span_s) for name in names if name in state.functions]
        functions.sort(key=lambda one: (-one["held"], -one["queue"]))
        held = self._held(shares, span_s)
        devices = [
            device_status(state, driver, device, now_us)
            | {
                "held": round(held.get(device.spec.id, 0.0), 4),
                "running": list(device.running),
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
            "targets": [self._target(name, counts, known.get(name)) for name, counts in busiest],
            "target_count": len(self._targets.all),
            "calls": len(state.runs),
            "queued": sum(len(state.functions[name].queue) for name in (*state.waiting, *state.deferred)),
            "runs": self._runs(),
            "memory": self._memory(),
            "decision_us": driver.decision_us,
            "viewers": self._viewers(),
            "verdict": structs.asdict(self._verdict(known, held)),
        }

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

    def _slo_us(self, target: str) -> int:
        return next((one.slo.latency_us for one in self._targets.all if one.name == target), 0) if target else 0

    def _verdict(self, known: dict[str, CallTarget], held: dict[str, float]) -> Verdict:
        total, short = WindowCounts(reasons={}), dict[str, float]()
        for name, counts in self._sums.items():
            if not counts.offered:
                continue
            for outcome in ("met", "late", "failed", "refused"):
                setattr(total, outcome, getattr(total, outcome) + getattr(counts, outcome))
            for reason, count in counts.reasons.items():
                total.reasons[reason] = total.reasons.get(reason, 0) + count
            wanted = known[name].slo.target if name in known else 0.99
            if counts.met < wanted * counts.offered:
                short[name] = counts.met / counts.offered
        worst = min(short, key=lambda name: (short[name], name), default="")
        place, help, more_of, device = self._bottleneck(total, worst, held)
        if not total.offered:
            return Verdict(
                "idle", "No calls came in the last minute.", place, "Call a function: the Playground has a form for each."
            )
        share = f"{100 * total.met / total.offered:.1f} % of {total.offered:,} calls"
        if not short:
            return Verdict("good", f"Yes: {share} in the last minute were in time.", place, help, "", device, more_of)
        counts = self._sums[worst]
        state = "failing" if counts.failed > counts.refused + counts.late else "refusing" if counts.refused else "late"
        what = {"failing": "fail", "refusing": "are refused", "late": "are late"}[state]
        others = f", and of {len(short) - 1} more" if len(short) > 1 else ""
        text = f"No: {100 * (1 - short[worst]):.1f} % of the calls of {worst} {what}{others}. In all, {share} were in time."
        return Verdict(state, text, place, help, worst, device, more_of)

    def _bottleneck(self, total: WindowCounts, worst: str, held: dict[str, float]) -> tuple[str, str, str, str]:
        """What is short, what would help, which kind of device that is, and the device."""
        state = self._driver.controller.state
        busiest = max(held, key=lambda name: (held[name], name), default="")
        lost = {reason: count for reason, count in total.reasons.items() if count}
        reason = max(lost, key=lambda one: lost[one]) if lost else ""
        if worst and reason in ("quota", "share"):
            return (
                "A limit of a tenant: its calls are refused by quota.",
                "Raise that tenant's limits under Access, or do nothing.",
                "",
                "",
            )
        loading = [one.function for one in state.instances.values() if one.phase is InstancePhase.LOADING]
        if worst and worst in loading:
            return f"Loading: {worst} has no warm instance yet.", f"Keep one loaded: Scale(min=1) for {worst}.", "", ""
        if busiest and held[busiest] >= SATURATED:
            kind = state.devices[busiest].spec.kind
            text = f"{busiest}: batches held {100 * held[busiest]:.0f} % of its units' time in the last ten seconds."
            if not worst:
                return text, f"Nothing now. For more load, one more {kind}: the Plan says what it would bring.", kind, busiest
            return text, f"One more {kind}, or a longer SLO for {worst}. The Plan simulates both.", kind, busiest
        slo_us = self._slo_us(worst)
        far = max(state.devices.values(), key=lambda one: one.way_us, default=None)
        if worst and far is not None and slo_us and far.way_us > FAR * slo_us:
            text = f"The way: {far.way_us / 1000:.3g} ms to {far.spec.id} and back, of {slo_us / 1000:.3g} ms that {worst} has."
            return text, "A machine with less other work, more cores, or --ingress processes for the gateway.", "", far.spec.id
        predictor = self._driver.controller.predictor
        stale = predictor.stale_profiles() if worst and isinstance(predictor, OnlinePredictor) else []
        if stale:
            one = stale[0]
            text = f"Predictions: {one.function} takes {one.ratio:.2g} times what its profile says."
            return text, f"Measure it again: lamina profile {one.function}.", "", ""
        if worst and total.failed > total.late + total.refused:
            return "The code: calls fail in it.", f"Read the logs of {worst} under Apps.", "", ""
        if worst and busiest:
            text = f"None of the devices: {busiest}, the busiest, was held {100 * held[busiest]:.0f} % of the time."
            return text, f"Look at the refusals of {worst}: its SLO may be shorter than one batch takes.", "", busiest
        if busiest:
            return (
                f"None: {busiest}, the busiest, was held {100 * held[busiest]:.0f} % of the time.",
                "Nothing is needed.",
                "",
                busiest,
            )
        return "None: no batch ran in the last ten seconds.", "Nothing is needed.", "", ""


def _difference(now: TargetCounts, before: TargetCounts | None) -> TargetCounts:
    if before is None:
        return now
    reasons = {reason: count - before.reasons.get(reason, 0) for reason, count in now.reasons.items()}
    ended = (now.met - before.met, now.late - before.late, now.failed - before.failed, now.refused - before.refused)
    return TargetCounts(now.target, *ended, now.cost - before.cost, reasons)
