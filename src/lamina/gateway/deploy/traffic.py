"""Traffic between versions of an app: weights, A/B by header, shadow traffic, and automatic rollback of a canary.

Versions beside the stable one are served under names of their own (`price@4`), so that each has its instances, its queue, its
learned times and its metrics. Calls are divided where they come in (`TrafficSplit`). A version gets calls once it is loaded, and
loses them when it breaks the rule for it, or cannot be loaded: its share goes back to the stable one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.gateway.deploy.active_apps import ActiveApps
from lamina.gateway.deploy.app_versions import AppVersion
from lamina.gateway.deploy.rollout import Rollout
from lamina.gateway.observability.metrics import CallOutcomes
from lamina.gateway.routes.targets import CallTarget, TargetRegistry, TrafficSplit
from lamina.store import kv
from lamina.store.base import Session

MAX_VERSIONS, MAX_HEADER_RULES = 4, 16
_SCOPE = "deploy-traffic"
_FIELDS = ("weights", "shadow", "headers", "rollback_if")
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")
_EXAMPLE = '{"weights": {"3": 90, "4": 10}}'


class HeaderRule(Struct, frozen=True):
    """A/B rule: calls with this header go to this version."""

    name: str
    value: str
    version: int


class RollbackRule(Struct, frozen=True, kw_only=True):
    """When a version loses its traffic, judged on at least `after_calls` of its calls."""

    attainment_below: float = 0.0  #: share of calls answered in time
    errors_above: float = 1.0  #: share of calls that failed
    after_calls: int = 100

    def breach(self, seen: CallOutcomes) -> str:
        """What these calls break of it, in words; "": nothing, or too few."""
        if seen.offered < self.after_calls:
            return ""
        attainment, errors = seen.in_time / seen.offered, seen.failed / seen.offered
        if errors > self.errors_above:
            return f"{errors:.1%} of {seen.offered} calls failed, more than {self.errors_above:.1%}"
        if attainment < self.attainment_below:
            return f"{attainment:.1%} of {seen.offered} calls were in time, less than {self.attainment_below:.1%}"
        return ""


class TrafficRules(Struct, frozen=True, kw_only=True):
    """What an operator has asked for; stored as JSON."""

    weights: dict[int, float]  #: percent by version
    shadow: int | None = None
    headers: tuple[HeaderRule, ...] = ()
    rollback_if: RollbackRule | None = None
    undone: dict[int, str] = {}  #: versions that have lost their traffic, and why

    @property
    def versions(self) -> list[int]:
        """Versions that must be loaded."""
        named = [number for number, weight in self.weights.items() if weight > 0]
        named += [rule.version for rule in self.headers] + ([self.shadow] if self.shadow is not None else [])
        return list(dict.fromkeys(number for number in named if number not in self.undone))

    def stable(self, active: int) -> int:
        """The version that has what no other gets: the active one while it gets calls, else the one with most."""
        return active if self.weights.get(active, 0) > 0 else max(self.weights, key=lambda number: self.weights[number])

    def without(self, number: int, why: str) -> TrafficRules:
        return msgspec.structs.replace(self, undone={**self.undone, number: why})


def parse_rules(given: dict[str, Any], known: list[int]) -> TrafficRules:
    """Rules of a request body; `known` are the versions there are."""
    for name in given:
        if name not in _FIELDS:
            raise BadValue(f"body: {name[:40]!r} means nothing here", hint=f"there are {', '.join(_FIELDS)}")
    weights = given.get("weights")
    if not isinstance(weights, dict) or not weights:
        raise BadValue(f"weights: {str(weights)[:40]!r} are none", hint=f"percent by version, such as {_EXAMPLE}")
    found = {_version(key, f"weights.{str(key)[:20]}", known): _percent(value, key) for key, value in weights.items()}
    total = sum(found.values())
    if abs(total - 100) > 0.01:
        raise BadValue(f"weights: they add up to {total:g}", hint="percent of the calls: they add up to 100")
    shadow = None if given.get("shadow") is None else _version(given["shadow"], "shadow", known)
    if shadow is not None and found.get(shadow, 0) > 0:
        raise BadValue(f"shadow: version {shadow} has a weight too", hint="a shadow gets copies alone: leave it out of weights")
    headers = given.get("headers") or []
    if not isinstance(headers, list) or len(headers) > MAX_HEADER_RULES:
        raise BadValue("headers: not a list", hint=f"up to {MAX_HEADER_RULES} objects with name, value and version")
    rules = TrafficRules(
        weights=found,
        shadow=shadow,
        headers=tuple(_header_rule(one, index, known) for index, one in enumerate(headers)),
        rollback_if=_rollback_rule(given.get("rollback_if")),
    )
    if len(rules.versions) > MAX_VERSIONS:
        raise BadValue(f"weights: {len(rules.versions)} versions at once", hint=f"at most {MAX_VERSIONS}")
    return rules


def _version(value: Any, field: str, known: list[int]) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)):
        raise BadValue(f"{field}: {str(value)[:40]!r} is no version", hint="a number: lamina history APP lists them")
    if int(value) not in known:
        raise BadValue(f"{field}: no version {value}", hint=f"there are {', '.join(map(str, known))}: lamina history APP")
    return int(value)


def _percent(value: Any, key: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise BadValue(f"weights.{str(key)[:20]}: {str(value)[:40]} is no percentage", hint="from 0 to 100")
    return float(value)


def _header_rule(given: Any, index: int, known: list[int]) -> HeaderRule:
    if not isinstance(given, dict) or set(given) != {"name", "value", "version"}:
        raise BadValue(f"headers[{index}]: not an object with name, value and version", hint="leave nothing out")
    name, value = str(given["name"]).lower(), given["value"]
    if not _HEADER_NAME.fullmatch(name) or name in ("authorization", "cookie"):
        raise BadValue(f"headers[{index}].name: {name[:40]!r} cannot be used", hint="the name of a header of your own: x-cohort")
    if name.startswith("lamina-"):
        raise BadValue(f"headers[{index}].name: {name[:40]!r} is one of ours", hint="choose another name: x-cohort")
    if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value) <= 200 or not value.isascii():
        raise BadValue(f"headers[{index}].value: {str(value)[:40]!r} cannot be used", hint="1 to 200 printable ASCII characters")
    return HeaderRule(name, value, _version(given["version"], f"headers[{index}].version", known))


def _rollback_rule(given: Any) -> RollbackRule | None:
    if given is None:
        return None
    known = ("attainment_below", "errors_above", "after_calls")
    if not isinstance(given, dict) or not set(given) <= set(known):
        raise BadValue("rollback_if: not an object of its fields", hint=f"there are {', '.join(known)}")
    for name in known[:2]:
        value = given.get(name, 0.5)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise BadValue(f"rollback_if.{name}: {str(value)[:40]} is no share", hint="from 0 to 1: 0.95 is 95%")
    calls = given.get("after_calls", 100)
    if isinstance(calls, bool) or not isinstance(calls, int) or not 1 <= calls <= 1_000_000:
        raise BadValue(f"rollback_if.after_calls: {str(calls)[:40]} is no number of calls", hint="1 to 1000000")
    return RollbackRule(
        attainment_below=float(given.get("attainment_below", 0.0)),
        errors_above=float(given.get("errors_above", 1.0)),
        after_calls=calls,
    )


# ----------------------------------------------------------------------- at work


@dataclass(slots=True)
class VersionTraffic:
    """Traffic of one version: its calls since the rules were set, and since its window of judgement began."""

    version: AppVersion
    rollout: Rollout | None  #: until it is loaded
    began: CallOutcomes
    window: CallOutcomes


@dataclass(slots=True)
class AppTraffic:
    """Traffic of one app under its rules."""

    rules: TrafficRules
    stable: int
    versions: dict[int, VersionTraffic] = field(default_factory=dict)
    undone: dict[int, CallOutcomes] = field(default_factory=dict)  #: what versions had served that lost their traffic
    is_divided: bool = False  #: calls are divided: all versions are loaded


class TrafficControl:
    """Division of calls between versions, and its supervision. `Deployments` holds the lock around all changes."""

    def __init__(self, active: ActiveApps, targets: TargetRegistry, load_error: Callable[[str], str]) -> None:
        self._active = active
        self._targets = targets
        self._load_error = load_error
        self._apps: dict[str, AppTraffic] = {}
        self._served: dict[str, tuple[int, CallOutcomes]] = {}  #: by app: its active version, and the counts when it became that

    def divided(self, app: str) -> AppTraffic | None:
        return self._apps.get(app)

    def begin(self, app: str, rules: TrafficRules, stable: int, others: list[AppVersion]) -> None:
        """Load the other versions; calls are divided when `poll` finds them loaded. All of them, or nothing changes."""
        self.end(app)
        traffic = AppTraffic(rules, stable)
        try:
            for version in others:
                rollout = self._active.start_beside(version)
                seen = self._outcomes(version)
                traffic.versions[version.number] = VersionTraffic(version, rollout, seen, seen)
        except BaseException:
            for started in traffic.versions.values():
                self._active.retire_beside(started.version)
            raise
        self._apps[app] = traffic
        self.on_activated(app)

    def end(self, app: str) -> None:
        """All calls to the active version again."""
        traffic = self._apps.pop(app, None)
        if traffic is not None:
            self._active.divide(app, None)
            for one in traffic.versions.values():
                self._active.retire_beside(one.version)

    def on_activated(self, app: str) -> None:
        """Count anew: another version is the active one, or other rules hold."""
        served = self._active.apps[app]
        self._served[app] = (served.number, self._outcomes(served))

    def poll(self, app: str) -> tuple[int, str] | None:
        """Look after the versions of an app; returns a version that is to lose its traffic, and why."""
        traffic = self._apps.get(app)
        if traffic is None:
            return None
        rule, is_loading = traffic.rules.rollback_if, False
        for number, one in traffic.versions.items():
            if one.rollout is not None:
                one.rollout.poll()
                if one.rollout.state == "halted":
                    said = [self._load_error(name) for name in one.version.names]
                    return number, "; ".join(filter(None, said)) or "it could not be loaded"
                if one.rollout.state == "rolling":
                    is_loading = True
                    continue
                specs = one.version.function_specs(self._active.overrides)
                if impossible := one.rollout.impossible_slo(specs, one.version.manifest.flows):
                    return number, impossible
                one.rollout.finish(specs)
                one.rollout = None
            if rule is not None and number != traffic.rules.shadow:
                now = self._outcomes(one.version)
                why = rule.breach(now.since(one.window))
                if why:
                    return number, why
                if now.since(one.window).offered >= 2 * rule.after_calls:
                    one.window = now  # what a version did well long ago does not excuse what it does now
        if not is_loading and not traffic.is_divided:
            traffic.is_divided = True
            self._divide(app, traffic)
        return None

    def undo(self, app: str, number: int, why: str) -> TrafficRules:
        """Take the traffic of a version away; the rules that hold then."""
        traffic = self._apps[app]
        gone = traffic.versions.pop(number)
        traffic.undone[number] = self._outcomes(gone.version).since(gone.began)
        traffic.rules = traffic.rules.without(number, why)
        if traffic.is_divided:
            self._divide(app, traffic)
        self._active.retire_beside(gone.version)
        return traffic.rules

    def _divide(self, app: str, traffic: AppTraffic) -> None:
        by_version = {number: _targets_by_own_name(one.version) for number, one in traffic.versions.items()}
        rules, stable = traffic.rules, traffic.stable

        def split(target: CallTarget) -> CallTarget:
            shadow = by_version.get(rules.shadow, {}).get(target.name) if rules.shadow is not None else None
            base = replace(target, shadow=shadow)
            arms = {number: by_version[number].get(target.name) for number in by_version if number != rules.shadow}
            chosen = {number: base if arm is None else replace(arm, shadow=shadow) for number, arm in arms.items()}
            weights = [(arm, rules.weights.get(number, 0.0)) for number, arm in chosen.items()]
            weights.insert(0, (base, max(100 - sum(weight for _, weight in weights), 0.0)))
            chosen[stable] = base
            headers = [
                (one.name.encode(), one.value.encode(), chosen[one.version]) for one in rules.headers if one.version in chosen
            ]
            return replace(base, split=TrafficSplit(base, weights, headers))

        self._active.divide(app, split)

    def _outcomes(self, version: AppVersion) -> CallOutcomes:
        seen = CallOutcomes()
        for name in version.names:
            seen = seen.plus(self._targets.outcomes(name))
        return seen

    # ------------------------------------------------------------------------ shown

    def summary(self, app: str) -> dict[str, Any]:
        """Rules of an app as they were given, where they stand, and the calls of each version."""
        served = self._active.apps[app]
        traffic = self._apps.get(app)
        rules = traffic.rules if traffic is not None else TrafficRules(weights={served.number: 100})
        number, began = self._served.get(app, (served.number, CallOutcomes()))
        counts = {number: self._outcomes(served).since(began)}
        if traffic is not None:
            counts |= {one.version.number: self._outcomes(one.version).since(one.began) for one in traffic.versions.values()}
            counts |= traffic.undone
        return {
            "app": app,
            "stable": str(served.number),
            "state": "whole" if traffic is None else "divided" if traffic.is_divided else "loading",
            "weights": {str(version): weight for version, weight in rules.weights.items()},
            "shadow": None if rules.shadow is None else str(rules.shadow),
            "headers": [{"name": one.name, "value": one.value, "version": str(one.version)} for one in rules.headers],
            "rollback_if": None if rules.rollback_if is None else msgspec.to_builtins(rules.rollback_if),
            "rolled_back": {str(version): why for version, why in rules.undone.items()},
            "counts": {str(version): {"offered": seen.offered, **seen._asdict()} for version, seen in counts.items()},
        }


def _targets_by_own_name(version: AppVersion) -> dict[str, CallTarget]:
    return {version.own_names[target.name]: target for target in version.call_targets()}


# ------------------------------------------------------------------ written down


def save(db: Session, app: str, rules: TrafficRules | None, now_us: int) -> None:
    """Write the rules of an app down; None: all calls go to its active version."""
    if rules is None:
        kv.delete(db, _SCOPE, app)
    else:
        kv.put(db, _SCOPE, app, "rules", msgspec.json.encode(rules), now_us)


def load_all(db: Session) -> dict[str, TrafficRules]:
    return {one.key: msgspec.json.decode(one.value, type=TrafficRules) for one in kv.entries(db, _SCOPE, limit=kv.ALL)}
