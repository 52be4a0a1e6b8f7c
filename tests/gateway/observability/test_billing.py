"""Billing: cost of calls by day, tenant and target; a tenant sees its own rows only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina.access.authorization import Grant, rule_of
from lamina.access.records import Identity
from lamina.core.actions import FailCall, Reject, Reply
from lamina.errors import BadValue, Forbidden
from lamina.gateway.auth import LOCAL
from lamina.gateway.observability.billing import Billing
from lamina.gateway.observability.metrics import BatchUsage
from lamina.server.exchange import Exchange, HttpRequest
from lamina.store.base import Store
from lamina.store.open import open_store
from tests.store.kit import written

NOON_S = 1_790_000_000.0 // 86_400 * 86_400 + 43_200


class Answered(Exchange):
    def __init__(self) -> None:
        self.said: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"", extra: bytes = b"") -> None:
        self.said.set_result(msgspec.json.decode(body))


class Counter:
    """A bill and the clock on its wall."""

    def __init__(self, store: Store | None) -> None:
        self.identity = LOCAL
        self.now_s = NOON_S
        self.bill = Billing(store, lambda: self.now_s)

    async def ask(self, query: str = "") -> Any:
        exchange = Answered()
        show, grant = self.bill.routes["GET /v1/bill"], Grant(self.identity, rule_of("calls", "GET /v1/bill"))
        show(HttpRequest("GET", b"/v1/bill", query.encode(), {}, b"", True), exchange, grant)
        return (await exchange.said)["rows"]


def three_calls(bill: Billing, tenant: str = "") -> None:
    bill.on_call_ended("resize", Reply("a", 10, late=False, cost=0.5), tenant)
    bill.on_call_ended("resize", Reply("b", 10, late=True, cost=0.25), tenant)
    bill.on_call_ended("resize", Reject("c", "deadline"), tenant)
    bill.on_call_ended("blur", FailCall("d", "function-failed"), tenant)


def test_functions_are_billed_by_themselves_whatever_they_were_part_of(tmp_path: Path) -> None:
    async def work() -> Any:
        store = open_store(str(tmp_path / "store.db"))
        await written(store, lambda db: None)  # somebody uses it
        counter = Counter(store)
        counter.bill.on_batch_finished(BatchUsage("resize", "gpu0", 3, 0, 0, 1, 0, 0), 0.5)
        counter.bill.flush()
        await written(store, lambda db: None)
        counter.bill.on_batch_finished(BatchUsage("resize", "gpu0", 1, 0, 0, 1, 0, 0), 0.25)
        three_calls(counter.bill)
        rows = await counter.ask("by=function")
        counter.identity = Identity("acme", "ada")
        with pytest.raises(Forbidden):
            await counter.ask("by=function")
        counter.bill.flush()
        await store.close()
        return rows

    (row,) = asyncio.run(work())
    assert (row["function"], row["calls"], row["cost"]) == ("resize", 4, 0.75)


def test_calls_are_added_up_by_what_is_asked_for() -> None:
    async def work() -> tuple[Any, Any]:
        counter = Counter(None)
        three_calls(counter.bill)
        return await counter.ask(), await counter.ask("by=day")

    by_target, by_day = asyncio.run(work())
    assert by_target[1] == {"tenant": "", "target": "resize", "calls": 2, "met": 1, "refused": 1, "failed": 0, "cost": 0.75}
    assert [(row["calls"], row["failed"]) for row in by_day] == [(2, 1)]


def test_a_day_ends_at_midnight() -> None:
    async def work() -> Any:
        counter = Counter(None)
        three_calls(counter.bill)
        counter.now_s += 86_400
        three_calls(counter.bill)
        return await counter.ask("by=day&from=2026-01-01"), await counter.ask("by=day&from=2027-01-01&to=2027-12-31")

    both, none = asyncio.run(work())
    assert [row["calls"] for row in both] == [2, 2]
    assert none == []


def test_what_was_written_down_is_there_after_a_restart_and_counted_once(tmp_path: Path) -> None:
    async def first(place: str) -> None:
        store = open_store(place)
        store.start()
        counter = Counter(store)
        three_calls(counter.bill, "acme")
        counter.bill.flush()
        three_calls(counter.bill, "acme")
        counter.bill.flush()
        await store.close()

    async def second(place: str) -> Any:
        store = open_store(place)
        store.start()
        counter = Counter(store)
        three_calls(counter.bill, "acme")
        found = await counter.ask("by=tenant")
        await store.close()
        return found

    place = str(tmp_path / "runs.db")
    asyncio.run(first(place))
    assert [(row["tenant"], row["calls"], row["cost"]) for row in asyncio.run(second(place))] == [("acme", 6, 2.25)]


def test_a_store_that_is_not_used_is_not_made_for_it(tmp_path: Path) -> None:
    async def work(place: str) -> None:
        store = open_store(place)
        counter = Counter(store)
        three_calls(counter.bill)
        counter.bill.flush()
        await store.close()

    asyncio.run(work(str(tmp_path / "runs.db")))
    assert not list(tmp_path.iterdir())


def test_a_tenant_sees_its_own_and_no_other() -> None:
    async def work() -> Any:
        counter = Counter(None)
        three_calls(counter.bill, "acme")
        three_calls(counter.bill, "other")
        counter.identity = Identity("acme", "token", frozenset({"read"}))
        return await counter.ask("by=tenant")

    assert [row["tenant"] for row in asyncio.run(work())] == ["acme"]


@pytest.mark.parametrize("query", ["from=yesterday", "to=2026-1-1", "by=colour"])
def test_what_cannot_be_answered_names_the_field(query: str) -> None:
    async def work() -> None:
        await Counter(None).ask(query)

    with pytest.raises(BadValue, match=query.split("=")[0]):
        asyncio.run(work())
