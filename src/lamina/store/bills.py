"""Billing totals: calls and cost by day, tenant and target, and jobs and cost by day and function. Works for `Store.write` and
`Store.read`."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from lamina.store import kv
from lamina.store.base import Session

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


def add(db: Session, scope: str, spent: dict[BillKey, BillTotals], now_us: int) -> None:
    for key, more in spent.items():
        found = kv.get(db, scope, key.text())
        total = msgspec.json.decode(found.value, type=BillTotals) if found else BillTotals()
        total.add(more)
        kv.put(db, scope, key.text(), "spent", msgspec.json.encode(total), now_us)


def read(db: Session, scope: str, first: str, last: str, tenant: str | None = None) -> list[tuple[BillKey, BillTotals]]:
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
