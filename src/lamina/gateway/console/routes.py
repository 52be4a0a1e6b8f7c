"""Routes of the console on the management listener: its page, its feed, and figures that no other route has.

Everything else the page asks for is an ordinary route: of this listener, or of that for calls, which is reached under `/calls`
because a page may speak to its own origin alone. Such a request passes the authorization of both listeners.

The page is files of this package. It runs under a policy that allows no inline script or style, no other origin and no text made
into markup; it keeps its token in memory.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import resources
from typing import Any

import msgspec
from msgspec import structs

from lamina.access.authorization import Grant
from lamina.asl.draw import flow_graph
from lamina.core.lifecycle import InstancePhase
from lamina.core.refusal_explanation import explain_refusal, repeated_call, time_terms
from lamina.core.scheduling.state import FunctionState
from lamina.errors import BadValue, NotFound
from lamina.gateway.bootstrap import Gateway
from lamina.gateway.console.feed import EventFeed
from lamina.gateway.console.pulse import Pulse
from lamina.gateway.console.recent_calls import OUTCOMES, batch_mates, observed_batches, recent_calls, remedies
from lamina.gateway.console.what_if import ServerChange, WhatIf, scenario_text
from lamina.gateway.observability.metrics import TargetCounts
from lamina.gateway.routes.explain import CallHistory
from lamina.gateway.routes.http_codec import parse_query, query_int
from lamina.gateway.routes.profiles import ServerSnapshot, take_snapshot
from lamina.gateway.routes.status import function_status
from lamina.gateway.routes.targets import CallTarget
from lamina.predict.online import OnlinePredictor
from lamina.server.exchange import Exchange, HttpRequest

ROOT, CALLS = "/console", b"/calls"
PAGE_POLICY = (
    b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    b" img-src 'self' data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    b" require-trusted-types-for 'script'; trusted-types 'none'\r\n"
    b"referrer-policy: no-referrer\r\nx-frame-options: DENY\r\ncross-origin-opener-policy: same-origin\r\n"
)
_KINDS = {"js": b"text/javascript; charset=utf-8", "css": b"text/css; charset=utf-8", "svg": b"image/svg+xml"}
MAX_LISTED = 200
AT_ONCE = 500
"""Functions that are looked at before others get a turn."""

MAX_QUEUED = 2_000
MAX_POINTS = 200
SORTS = ("calls", "queue", "late", "refused", "name")


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, also compressed."""

    content: bytes
    packed: bytes
    kind: bytes
    etag: bytes


@cache
def static_files() -> dict[str, StaticFile]:
    """Files of the page by path below `/console/`."""
    found: dict[str, StaticFile] = {}
    top = resources.files("lamina.gateway.console") / "static"
    for prefix, folder in (("", top), ("vendor/", top / "vendor")):
        for entry in folder.iterdir():
            kind = _KINDS.get(entry.name.rpartition(".")[2])
            if entry.is_file() and kind is not None:
                content = entry.read_bytes()
                etag = b'"%s"' % blake2b(content, digest_size=8).hexdigest().encode()
                found[prefix + entry.name] = StaticFile(content, gzip.compress(content, 9, mtime=0), kind, etag)
    return found


@cache
def page() -> bytes:
    return (resources.files("lamina.gateway.console") / "static" / "index.html").read_bytes()


class ConsoleRoutes:
    """Handlers of the console. Feed and what-ifs are its own; the rest is the gateway's."""

    def __init__(self, gateway: Gateway) -> None:
        driver = gateway.driver
        self._gateway = gateway
        self._driver = driver
        self._metrics = gateway.metrics
        self._targets = gateway.targets
        self._pulse = Pulse(
            *(driver, gateway.metrics, gateway.targets, gateway.process),
            *(gateway.budget.snapshot, self._runs, self._viewers),
        )
        self.feed = EventFeed(driver, self._pulse)
        self._what_if = WhatIf()
        self._history = CallHistory(driver)
        self.routes: dict[str, Callable[..., Coroutine[Any, Any, Any] | None]] = {
            f"GET {ROOT}": self._page,
            f"GET {ROOT}/": self._page,
            f"GET {ROOT}/{{file*}}": self._file,
            "GET /v1/console/feed": self.feed.serve,
            "GET /v1/console/functions": self._functions,
            "GET /v1/console/functions/{target}": self._function,
            "GET /v1/console/calls": self._calls,
            "GET /v1/console/calls/{call}": self._call,
            "GET /v1/console/graph/{workflow}": self._graph,
            "GET /v1/console/plan": self._plan_start,
            "POST /v1/console/plan": self._plan,
            "POST /v1/console/scenario": self._scenario,
            "GET /calls/{route*}": self._forward,
            "POST /calls/{route*}": self._forward,
        }

    def stop(self) -> None:
        self.feed.stop()
        self._what_if.stop()

    def _viewers(self) -> int:
        return self.feed.viewers

    def _runs(self) -> dict[str, int]:
        durable = self._gateway.durable
        return {} if durable is None else {"queued": durable.loader.queued, "running": durable.resident_count}

    # ---------------------------------------------------------------------------- page

    def _page(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        exchange.respond(200, page(), b"text/html; charset=utf-8", PAGE_POLICY + b"cache-control: no-cache\r\n")

    def _file(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> None:
        """A file; any other path is a view, and the page knows which."""
        found = static_files().get(name)
        if found is None:
            if "." in name.rpartition("/")[2]:
                raise NotFound(f"no file {name[:80]!r}", hint=f"{ROOT} is the page")
            self._page(request, exchange, grant)
            return
        headers = b"cache-control: no-cache\r\netag: %s\r\nvary: accept-encoding\r\n" % found.etag
        if request.header(b"if-none-match") == found.etag:
            exchange.respond(304, b"", found.kind, headers)
        elif b"gzip" in request.header(b"accept-encoding"):
            exchange.respond(200, found.packed, found.kind, headers + b"content-encoding: gzip\r\n")
        else:
            exchange.respond(200, found.content, found.kind, headers)

    def _forward(self, request: HttpRequest, exchange: Exchange, grant: Grant, route: str) -> None:
        """A request of the listener for calls. Its own rule is checked there; that a caller needs a token here was checked. Web
        apps are not reached this way: their pages would be of this origin."""
        self._gateway.router.handle(structs.replace(request, path=request.path[len(CALLS) :]), exchange, web_apps=False)

    # ----------------------------------------------------------------------- functions

    async def _functions(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Any:
        """Functions and workflows, a page at a time."""
        asked = parse_query(request, ("search", "sort", "offset", "limit"))
        sort, search = asked.get("sort", "calls"), asked.get("search", "").lower()
        if sort not in SORTS:
            raise BadValue(f"sort: {sort[:40]!r} is no order", hint=f"one of {', '.join(SORTS)}")
        offset, limit = query_int(asked, "offset", 0, 1_000_000), query_int(asked, "limit", 50, MAX_LISTED)
        counts = {one.target: one for one in self._metrics.target_counts()}
        state = self._driver.controller.state
        targets = [target for target in self._targets.all if search in target.name.lower()]

        def key(target: CallTarget) -> tuple[float, str]:
            found = counts.get(target.name)
            if sort == "queue":
                function = state.functions.get(target.name)
                return (-len(function.queue) if function is not None else 0), target.name
            if found is None or sort == "name":
                return 0.0, target.name
            offered = found.met + found.late + found.failed + found.refused
            return -{"calls": offered, "late": found.late, "refused": found.refused}[sort], target.name

        keyed = []
        for place, target in enumerate(targets):
            keyed.append((key(target), place))
            if place % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        keyed.sort()
        chosen = [targets[place] for _, place in keyed[offset : offset + limit]]
        span_s, shares = self._metrics.rolling.usage_shares(self._driver.now_us())
        rows = []
        for target in chosen:
            function = state.functions.get(target.name) if target.kind == "function" else None
            row = self._target_row(target, counts.get(target.name))
            if function is not None:
                row |= function_status(state, function, shares, span_s)
                row["instances"] = _phases(function)
            rows.append(row)
        return {"total": len(targets), "offset": offset, "functions": rows}

    def _target_row(self, target: CallTarget, counts: TargetCounts | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": target.name,
            "kind": target.kind,
            "tenant": target.tenant,
            "slo_ms": target.slo.latency_us / 1000 or None,
            "goal": target.slo.target,
            "doc": target.doc[:500],
        }
        ended = (counts.met, counts.late, counts.failed, counts.refused) if counts is not None else (0, 0, 0, 0)
        row |= dict(zip(("met", "late", "failed", "refused"), ended, strict=True))
        row["cost"] = counts.cost if counts is not None else 0.0
        row["reasons"] = counts.reasons if counts is not None else {}
        return row

    async def _function(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> Any:
        """All of one function or workflow."""
        target = next((one for one in self._targets.all if one.name == name), None)
        if target is None:
            raise NotFound(f"no function or workflow {name[:80]!r}", hint="the list has those there are")
        counts = next((one for one in self._metrics.target_counts() if one.target == name), None)
        row = self._target_row(target, counts)
        now_us = self._driver.now_us()
        row["recent"] = self._metrics.rolling.call_stats(now_us, name)
        row["inputs"] = [{"name": param.name, "required": param.required, "type": param.type} for param in target.params]
        state = self._driver.controller.state
        function = state.functions.get(name)
        flow = self._driver.controller.flows.get(name)
        row["steps"] = list(flow.functions) if flow is not None and target.kind == "workflow" else []
        if function is None or target.kind == "workflow":
            return row
        span_s, shares = self._metrics.rolling.usage_shares(now_us)
        row |= function_status(state, function, shares, span_s)
        spec = function.spec
        row |= {
            "max_batch": spec.max_batch,
            "share": spec.share,
            "cores": spec.cores,
            "gpu": spec.gpu,
            "home": spec.home,
            "lend": spec.lend,
            "scale": msgspec.to_builtins(spec.scale),
            "objective": spec.objective or ("deadline" if spec.slo.latency_us else "latency"),
            "version": spec.version,
            "queue_by_tenant": Counter(job.run.call.tenant for job in function.queue.first(MAX_QUEUED)),
            "delay": state.deferred[name].why if name in state.deferred else "",
            "batch_sizes": self._metrics.batch_sizes(name),
            "profile": self._profile(name),
            "observed": await observed_batches(self._driver, name),
        }
        return row

    def _profile(self, name: str) -> list[dict[str, Any]]:
        """Profiled times, point by point, with the time that is planned with by now."""
        predictor = self._driver.controller.predictor
        if not isinstance(predictor, OnlinePredictor):
            return []
        stale = {(one.kind, one.units) for one in predictor.stale_profiles() if one.function == name}
        return [
            {
                "device": one.device,
                "batch": point.batch,
                "units": point.units,
                "profiled_ms": point.p50_us / 1000,
                "planned_ms": predictor.latency_us(name, one.device, point.batch, point.units, point.cores) / 1000,
                "stale": (one.device, point.units) in stale,
            }
            for one in predictor.base.profiles
            if one.function == name
            for point in one.points[:MAX_POINTS]
        ]

    def _graph(self, request: HttpRequest, exchange: Exchange, grant: Grant, name: str) -> Coroutine[Any, Any, Any]:
        """Steps of a workflow as a graph."""
        missing = NotFound(f"no workflow {name[:80]!r}", hint="GET /v1/workflows lists them")
        target = next((one for one in self._targets.all if one.name == name), None)
        flow = self._driver.controller.flows.get(name)
        if target is None or flow is None:
            raise missing
        grant.check_owner(target.tenant, missing)
        return _now(flow_graph(flow))

    # --------------------------------------------------------------------------- calls

    async def _calls(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Any:
        asked = parse_query(request, ("outcome", "target", "tenant", "limit"))
        outcome = asked.get("outcome", "")
        if outcome and outcome not in OUTCOMES:
            raise BadValue(f"outcome: {outcome[:40]!r} is none", hint=f"one of {', '.join(OUTCOMES)}")
        limit = query_int(asked, "limit", 100, 500)
        found = await recent_calls(self._driver, outcome, asked.get("target", ""), asked.get("tenant", ""), limit)
        goals = {target.name: target.slo.latency_us / 1000 or None for target in self._targets.all}
        for row in found:  # one that was refused before the controller saw it had the goal of its target
            row.setdefault("goal_ms", goals.get(row.get("target", "")))
        return {"calls": found}

    async def _call(self, request: HttpRequest, exchange: Exchange, grant: Grant, call_id: str) -> Any:
        """History of one call, the calls it shared batches with, and for a refused one what would have let it in."""
        told, records = await self._history.find(call_id, grant)
        for place, mates in batch_mates(call_id, records).items():
            if place < len(told["steps"]):
                told["steps"][place]["mates"] = mates
        if told.get("goal_ms") is None:
            slo = next((target.slo for target in self._targets.all if target.name == told["target"]), None)
            told["goal_ms"] = slo.latency_us / 1000 or None if slo is not None else None
        return told | {
            "explanation": explain_refusal(told),
            "terms": [term._asdict() for term in time_terms(told)],
            "like": repeated_call(told),
            "remedies": remedies(self._driver.controller, told),
        }

    # ---------------------------------------------------------------------------- plan

    def _snapshot(self) -> ServerSnapshot:
        """As the simulator sees it: with all calls that come, also those that are refused."""
        found = take_snapshot(self._driver, self._metrics.rolling, self._targets.all)
        return structs.replace(found, rates={**found.rates, **self._pulse.offered_rates()})

    async def _plan_start(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Any:
        """What can be changed, and what it is now."""
        found = self._snapshot()
        known = {one.function for one in found.profiles if one.points}
        flows = {flow.name: flow.functions for flow in found.flows}
        slos = {target.name: target.slo for target in self._targets.all}
        return {
            "targets": [
                {
                    "name": name,
                    "rate": round(rate, 2),
                    "slo_ms": (slos[name].latency_us / 1000 or None) if name in slos else None,
                    "known": known.issuperset(flows.get(name, (name,))),
                }
                for name, rate in sorted(found.rates.items(), key=lambda item: -item[1])[:MAX_LISTED]
            ],
            "devices": dict(Counter(device.kind for device in found.devices)),
        }

    def _plan(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Coroutine[Any, Any, Any]:
        change = _change(request)
        self._what_if.check_room()
        return self._what_if.ask(self._snapshot(), change)

    async def _scenario(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> Any:
        return {"scenario": await asyncio.to_thread(scenario_text, self._snapshot(), _change(request))}


def _change(request: HttpRequest) -> ServerChange:
    try:
        return msgspec.json.decode(request.body or b"{}", type=ServerChange)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"body: {error}", hint="scale, rates, goals_ms, devices, policy and seconds") from None


def _phases(function: FunctionState) -> dict[str, int]:
    found = Counter(one.phase for one in function.instances.values())
    return {phase.value: found[phase] for phase in InstancePhase if found[phase]}


async def _now(value: Any) -> Any:
    return value
