"""Billing, `GET /v1/bill`: cost of calls by day, tenant and target; and of functions, whatever they were part of.

Counted in memory and written every few seconds, so that a bill costs a call next to nothing. A crash loses at most what was
spent since the last write; what must not be lost are the calls, not their count.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from lamina.access.authorization import Grant
from lamina.core.actions import FailCall, Reply
from lamina.drivers.driver import Ending
from lamina.errors import BadValue, Forbidden, LaminaError
from lamina.gateway.observability.metrics import BatchUsage
from lamina.gateway.routes.http_codec import parse_query
from lamina.gateway.routes.problems import answered, error_problem, respond_problem
from lamina.server.exchange import Exchange, HttpRequest
from lamina.store import kv
from lamina.store.base import Session, Store

EVERY_S = 5.0
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
_BY = ("day", "tenant", "target")
_BY_FUNCTION = ("day", "function")
_FIELD = {"function": "target"}

CALLS, STEPS = "bill", "bill-steps"
"""Two scopes: calls by tenant and target, and steps by function, whatever they were part of."""


class BillKey(Struct, frozen=True, order=True):
    day: str  #: 2026-05-17, in UTC
    tenant: str
    target: str

    def text(self) -> str:
        return "/".join((self.day, self.tenant, self.target))


class BillTotals(Struct):
    calls: int = 0  #: answered ones; of a function, jobs
    met: int = 0
    refused: int = 0
    failed: int = 0
    cost: float = 0.0

    def add(self, other: BillTotals) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Billing:
    """Cost accounting of one server. Without a store it covers the time since the server started."""

    def __init__(self, store: Store | None, wall_s: Callable[[], float]) -> None:
        self.routes: dict[str, Callable[..., None]] = {"GET /v1/bill": self._show}
        self._store = store
        self._wall_s = wall_s
        self._unsaved: dict[str, dict[BillKey, BillTotals]] = {CALLS: {}, STEPS: {}}
        self._day = ""
        self._day_ends_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def on_call_ended(self, target: str, ending: Ending, tenant: str) -> None:
        if self._wall_s() >= self._day_ends_s:
            self._start_day()
        key = BillKey(self._day, tenant, target)
        spent = self._unsaved[CALLS].get(key) or self._open_account(CALLS, key)
        if type(ending) is Reply:
            spent.calls += 1
            spent.met += not ending.late
            spent.cost += ending.cost
        elif not isinstance(ending, FailCall) or ending.error == "bad-value":  # a client's 422 is no failure of the service
            spent.refused += 1
        else:
            spent.failed += 1

    def on_batch_finished(self, usage: BatchUsage, cost: float) -> None:
        if self._wall_s() >= self._day_ends_s:
            self._start_day()
        key = BillKey(self._day, "", usage.function)
        spent = self._unsaved[STEPS].get(key) or self._open_account(STEPS, key)
        spent.calls += usage.jobs
        spent.cost += cost

    def _start_day(self) -> None:
        now_s = self._wall_s()
        self._day = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d")
        self._day_ends_s = (now_s // 86_400 + 1) * 86_400

    def _open_account(self, book: str, key: BillKey) -> BillTotals:
        """An entry to add to; it is written before long."""
        spent = self._unsaved[book][key] = BillTotals()
        self._start_timer()
        return spent

    def _start_timer(self) -> None:
        if self._timer is None and self._store is not None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._on_timer)

    def _on_timer(self) -> None:
        self.flush()
        if any(self._unsaved.values()):
            self._start_timer()

    def flush(self) -> None:
        """Write what is unsaved. A store that does not exist yet is created only if a tenant is to be billed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        store = self._store
        if store is None or not (store.exists or any(key.tenant for key in self._unsaved[CALLS])):
            return
        for book, unsaved in self._unsaved.items():
            if unsaved:
                self._unsaved[book] = {}
                self._write(store, book, unsaved)

    def _write(self, store: Store, book: str, fresh: dict[BillKey, BillTotals]) -> None:
        now_us = int(self._wall_s() * 1e6)

        def done(result: LaminaError | None) -> None:
            if isinstance(result, LaminaError):  # it is counted with what comes next
                for key, spent in fresh.items():
                    self._unsaved[book].setdefault(key, BillTotals()).add(spent)
                self._start_timer()

        store.write(lambda db: _add(db, book, fresh, now_us), done)

    # ---------------------------------------------------------------------- asking

    def _show(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        query = parse_query(request, ("from", "to", "by"))
        today = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%d")
        first, last = _day(query, "from", today[:8] + "01"), _day(query, "to", today)
        by = [part for part in query.get("by", "tenant,target").split(",") if part]
        book, known = (STEPS, _BY_FUNCTION) if "function" in by else (CALLS, _BY)
        for part in by:
            if part not in known:
                hint = f"by {', '.join(_BY)}; or by {' and '.join(_BY_FUNCTION)}"
                raise BadValue(f"by: {part[:40]!r} is none of {', '.join(known)}", hint=hint)
        if book == STEPS and not grant.sees(""):  # functions are billed without tenants
            raise Forbidden("functions are billed over all tenants, for the operator of the server", hint="by=tenant,target")
        tenant = grant.tenant or None  # a tenant sees its own rows only

        def answer(found: list[tuple[BillKey, BillTotals]] | LaminaError) -> None:
            if isinstance(found, LaminaError):
                respond_problem(exchange, error_problem(found))
                return
            fresh = [(key, spent) for key, spent in self._unsaved[book].items() if first <= key.day <= last]
            rows = _grouped(found + [pair for pair in fresh if tenant is None or pair[0].tenant == tenant], by)
            exchange.respond(200, msgspec.json.encode({"from": first, "to": last, "by": by, "rows": rows}))

        def work(db: Session) -> list[tuple[BillKey, BillTotals]]:
            return _read(db, book, first, last, tenant)

        if self._store is not None and self._store.exists:
            self._store.read(work, answered(exchange, answer))
        else:
            answer([])


def _day(query: dict[str, str], name: str, default: str) -> str:
    day = query.get(name, default)
    if not _DAY.match(day):
        raise BadValue(f"{name}: {day[:40]!r} is not a day", hint=f"write {name}={default}")
    return day


def _grouped(pairs: list[tuple[BillKey, BillTotals]], by: list[str]) -> list[dict[str, Any]]:
    totals: dict[tuple[str, ...], BillTotals] = {}
    for key, spent in pairs:
        totals.setdefault(tuple(getattr(key, _FIELD.get(part, part)) for part in by), BillTotals()).add(spent)
    return [
        {**dict(zip(by, names, strict=True)), **msgspec.structs.asdict(spent)}
        for names, spent in sorted(totals.items(), key=lambda e: e[0])
    ]


def _add(db: Session, scope: str, spent: dict[BillKey, BillTotals], now_us: int) -> None:
    for key, more in spent.items():
        found = kv.get(db, scope, key.text())
        total = msgspec.json.decode(found.value, type=BillTotals) if found else BillTotals()
        total.add(more)
        kv.put(db, scope, key.text(), "spent", msgspec.json.encode(total), now_us)


def _read(db: Session, scope: str, first: str, last: str, tenant: str | None = None) -> list[tuple[BillKey, BillTotals]]:
    """Totals of the days from `first` to `last`, both included; of one tenant, or of all."""
    found: list[tuple[BillKey, BillTotals]] = []
    after = first
    while True:
        page = kv.entries(db, scope, after=after, limit=1_000)
        for entry in page:
            key = BillKey(*entry.key.split("/", 2))
            if key.day > last:
                return found
            if tenant is None or key.tenant == tenant:
                found.append((key, msgspec.json.decode(entry.value, type=BillTotals)))
        if len(page) < 1_000:
            return found
        after = page[-1].key
