"""Loader of queued runs: by priority, tenants in turn; a tenant over its limits holds up no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lamina.durable.loader import RunLoader
from lamina.store import runs
from lamina.store.base import Session, Store
from lamina.store.runs import Lane, LoadedRun, RunRow
from tests.store.kit import within, written


def row(number: int, tenant: str, priority: int = 0) -> RunRow:
    return RunRow(f"{number:024x}", "function", "f", tenant, "queued", priority, 0.0, 1, 1, 0, 0, 0, "")


def accept(db: Session, rows: list[RunRow]) -> None:
    for one in rows:
        runs.accept(db, one, b"", "", "digest")


class Taken:
    """Takes runs over, `room` at most; those of `over` are refused and their tenant paused for long."""

    def __init__(self, store: Store, room: int, over: str = "", pause_s: float = 60.0) -> None:
        self.begun: list[RunRow] = []
        self.tried = 0
        self._room, self.over, self._pause_s = room, over, pause_s
        self.feeder = RunLoader(store, self._begin, lambda look: len(self.begun) < self._room)

    def _begin(self, fed: LoadedRun) -> None:
        self.tried += 1
        if fed.row.tenant == self.over:
            self.feeder.pause_tenant(fed.row.id, fed.row.tenant, self._pause_s)
        else:
            self.begun.append(fed.row)

    async def until(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)


def counts(rows: list[RunRow]) -> dict[Lane, int]:
    found: dict[Lane, int] = {}
    for one in rows:
        found[one.priority, one.tenant] = found.get((one.priority, one.tenant), 0) + 1
    return found


def fed(tmp_path: Path, rows: list[RunRow], taken_over: str = "", expect: int = 0, pause_s: float = 60.0) -> Taken:
    async def work(store: Store) -> Taken:
        await written(store, lambda db: accept(db, rows))
        taken = Taken(store, room=512, over=taken_over, pause_s=pause_s)
        taken.feeder.on_recovered(counts(rows))
        await taken.until(expect)
        return taken

    return within(str(tmp_path / "runs.db"), work)


def test_a_thousand_runs_of_a_tenant_over_its_quota_hold_up_no_other(tmp_path: Path) -> None:
    rows = [row(number, "noisy") for number in range(1, 1001)] + [row(2000 + number, "quiet") for number in range(5)]
    taken = fed(tmp_path, rows, taken_over="noisy", expect=5)
    assert {one.tenant for one in taken.begun} == {"quiet"}
    assert taken.tried == 6, "one refusal is enough to know"
    assert taken.feeder.queued == 1000


def test_a_paused_tenant_starts_later_and_in_its_order(tmp_path: Path) -> None:
    rows = [row(number, "noisy") for number in range(1, 301)]

    async def work(store: Store) -> list[int]:
        await written(store, lambda db: accept(db, rows))
        taken = Taken(store, room=512, over="noisy", pause_s=0.05)
        taken.feeder.on_recovered(counts(rows))
        while not taken.tried:
            await asyncio.sleep(0.001)
        taken.over = ""
        await taken.until(300)
        return [int(one.id, 16) for one in taken.begun]

    assert within(str(tmp_path / "runs.db"), work) == list(range(1, 301))


def test_tenants_take_turns_whatever_they_have_piled_up(tmp_path: Path) -> None:
    rows = [row(number, "early") for number in range(1, 601)] + [row(3000, "late")]
    assert "late" in {one.tenant for one in fed(tmp_path, rows, expect=512).begun}


def test_the_most_urgent_come_first(tmp_path: Path) -> None:
    rows = [row(1, "a"), row(2, "b", priority=5), row(3, "a", priority=-5)]
    assert [one.priority for one in fed(tmp_path, rows, expect=3).begun] == [5, 0, -5]


def test_m7_a_run_that_was_accepted_by_a_clock_set_back_before_the_runs_of_before_were_read_is_not_passed_over(
    tmp_path: Path,
) -> None:
    async def work(store: Store) -> list[int]:
        before, back = [row(number, "a") for number in range(100, 110)], row(5, "a")
        await written(store, lambda db: accept(db, before))
        taken = Taken(store, room=512)
        taken.feeder.on_recovered(counts(before))
        await taken.until(10)
        await written(store, lambda db: accept(db, [back]))
        taken.feeder.on_accepted(back, b"")
        await taken.until(11)
        return [int(one.id, 16) for one in taken.begun]

    assert within(str(tmp_path / "runs.db"), work) == [*range(100, 110), 5]
