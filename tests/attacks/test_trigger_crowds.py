"""Triggers in crowds: thousands of changes in one step, thousands of triggers, and what none of them may leave behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina import encoding
from lamina.drivers.engine import TargetSource
from lamina.errors import BadValue, LaminaError, StoreDown
from lamina.sdk.app_state import StateChange, StateChanges
from lamina.sdk.triggers import Trigger, make_trigger
from lamina.state import kv_state, triggers
from lamina.state.kv_state import CHANGES, StateTable, StateWrite
from lamina.state.trigger_records import AddedTrigger, put_added, read_kept
from lamina.state.trigger_starts import Ended, Started
from lamina.state.triggers import Triggers
from lamina.store import outbox
from lamina.store.open import open_store
from lamina.types import NEVER_US

STEP = [("c", 0, "n")]


class Clock:
    """A clock of which every look takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def time_ns(self) -> int:
        return 0


class Starter:
    """Starts everything at once, and ends it when told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ends: list[Callable[[], None]] = []

    def start(self, target: str, inputs: dict[str, bytes], key: str, started: Started, ended: Ended) -> None:
        self.started.append(key)
        self.ends.append(ended)
        started(key)

    def follow(self, id: str, ended: Ended) -> None: ...

    def cancel(self, id: str) -> None: ...


def watching(count: int, pattern: str = "k*") -> tuple[StateTable, Triggers, Starter]:
    table, starter = StateTable("app"), Starter()
    found = Triggers(table, starter, None)
    found.set_app("app", [make_trigger(on_change=pattern, id=f"t{number}") for number in range(count)])
    found.open()
    return table, found, starter


def puts(count: int) -> list[StateChanges]:
    return [StateChanges(0, [], [StateChange("app", f"k{n}", "value", "put", encoding.encode(n)) for n in range(count)])]


def test_what_a_step_starts_is_started_a_little_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may change 10,000 keys: their runs were all begun in one turn of the loop, which took seconds."""
    monkeypatch.setattr(triggers, "time", Clock())

    async def work() -> list[int]:
        table, _, starter = watching(2)
        assert table.commit("f", STEP, puts(50)) == {0: True}
        counts = [len(starter.started)]
        while counts[-1] < 100:
            await asyncio.sleep(0)
            counts.append(len(starter.started))
        return counts

    counts = asyncio.run(asyncio.wait_for(work(), 30))
    assert max(after - before for before, after in itertools.pairwise(counts)) <= 3
    assert counts[-1] == 100, "each once"


def test_a_step_with_more_changes_than_triggers_can_be_looked_at_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_state, "MAX_WATCHED", 100)

    async def work() -> None:
        table, _, starter = watching(10)
        found = table.commit("f", STEP, puts(11))[0]
        assert isinstance(found, BadValue) and not table.cells
        assert table.commit("f", STEP, puts(10)) == {0: True}
        while len(starter.started) < 100:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_changes_that_start_more_than_is_started_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "time", Clock())
    monkeypatch.setattr(kv_state, "MAX_UNWRITTEN", 20)

    async def work() -> None:
        table, _, _ = watching(1)
        assert table.commit("f", STEP, puts(30)) == {0: True}
        assert isinstance(table.commit("f", STEP, puts(31))[0], StoreDown), "what it starts is not kept without bound"
        for _ in range(30):
            await asyncio.sleep(0)
        assert table.commit("f", STEP, puts(31)) == {0: True}

    asyncio.run(work())


@pytest.mark.parametrize("pattern", ["*a" * 17, "k" * 1_025])
def test_a_pattern_that_takes_long_to_look_at_is_refused(pattern: str) -> None:
    with pytest.raises(BadValue, match="on_change"):
        make_trigger(on_change=pattern)


def test_a_change_that_cannot_be_read_starts_nothing_and_holds_up_no_other(tmp_path: Path) -> None:
    """A process of a tenant need not encode what it puts. The change stayed due, and at each start kept all behind it."""

    async def work() -> tuple[int, list[Any]]:
        store = open_store(str(tmp_path / "s.db"))
        bodies = [b"\xc1", encoding.encode(1)]
        writes = [StateWrite("app/app", f"k{n}", "value", body, 1, ("change//:k*#t0",), n) for n, body in enumerate(bodies)]

        def keep(db: Any) -> None:
            for write in writes:
                outbox.send(db, outbox.OutboxMessage(CHANGES, write.outbox_key, write.at_us, msgspec.msgpack.encode(write)))

        await written(store, keep)
        table, starter = StateTable("app"), Starter()
        found = Triggers(table, starter, store)
        found.set_app("app", [make_trigger(on_change="k*", id="t0")])
        found.open()
        await found.opened.wait()
        left = await written(store, lambda db: outbox.due(db, CHANGES, NEVER_US))
        found.close()
        await store.close()
        return len(starter.started), left

    assert asyncio.run(asyncio.wait_for(work(), 60)) == (1, [])


def test_triggers_that_were_removed_leave_nothing_behind(tmp_path: Path) -> None:
    async def work() -> list[Any]:
        store = open_store(str(tmp_path / "s.db"))
        table, starter = StateTable("app", source_of=lambda target: TargetSource(tenant="acme", app="app")), Starter()
        found = Triggers(table, starter, store)
        found.open()
        await found.opened.wait()
        for number in range(5):
            for terms in ({"every": "1h"}, {"on_change": "k*"}):
                id = f"t{number}"
                await answered(partial(found.add, added(make_trigger(id=id, **terms))))
                table.commit("f", STEP, [StateChanges(0, [], [StateChange("app", f"k{number}", "counter", "add", b"\x01")])])
                await answered(table.confirm)
                await answered(partial(found.remove, id))
        for end in starter.ends:
            end()
        held = [found._clocks, found._apps, found._tenants, found._starts._usage, found._starts._lines, table._watched]
        count = len(starter.started)
        found.close()
        await store.close()
        assert count == 5
        return held

    assert not any(asyncio.run(asyncio.wait_for(work(), 60)))


def test_a_name_is_taken_while_its_trigger_is_being_written(tmp_path: Path) -> None:
    """Two tenants that asked for one name at once both had it: the second took the trigger of the first. And a tenant that
    asked for a thousand at once had more than it may."""

    async def work() -> None:
        store = open_store(str(tmp_path / "s.db"))
        found = Triggers(StateTable("app"), Starter(), store)
        found.open()
        await found.opened.wait()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        found.add(added(make_trigger(every="1h", id="mine")), done.set_result)
        assert found.added["mine"].tenant == "acme"
        assert await done is None and found.added["mine"].tenant == "acme"
        found.close()
        await store.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_ten_thousand_triggers_and_more_are_there_after_a_restart(tmp_path: Path) -> None:
    async def work() -> int:
        store = open_store(str(tmp_path / "s.db"))

        def keep(db: Any) -> int:
            for number in range(10_100):
                put_added(db, added(make_trigger(every="1h", id=f"t{number}")))
            return len(read_kept(db).added)

        count: int = await written(store, keep)
        await store.close()
        return count

    assert asyncio.run(asyncio.wait_for(work(), 100)) == 10_100


@pytest.mark.parametrize(
    "change",
    [
        StateChange("app", "a\0b", "value", "put", b"\x01"),
        StateChange("app", "", "value", "put", b"\x01"),
        StateChange("app", "k" * 100_000, "value", "put", b"\x01"),
        StateChange("app", "k", "set", "add", b"\xdd\x00\x10\x00\x00" + b"\x90" * 2**20),
        StateChange("app", "k", "value", "put", bytes(2**20 + 1)),
    ],
    ids=["NUL", "empty", "long", "many", "large"],
)
def test_changes_of_a_process_that_does_not_keep_to_the_rules_fail_its_own_step(change: StateChange) -> None:
    """What no store can keep had all state of all tenants read again."""
    table = StateTable("app")
    assert isinstance(table.commit("f", STEP, [StateChanges(0, [], [change])])[0], LaminaError)
    assert not table.cells and table.down is None


def added(trigger: Trigger) -> AddedTrigger:
    return AddedTrigger(trigger=trigger, app="app", tenant="acme", by="me", at_us=0)


async def answered(ask: Callable[[Callable[[Any], None]], None]) -> None:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ask(done.set_result)
    assert await done is None


async def written(store: Any, work: Callable[[Any], Any]) -> Any:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    store.write(work, done.set_result)
    return await done


def test_a_tenant_that_lists_its_triggers_has_no_others_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten thousand of others it took 80 ms of the loop, as often as it liked."""
    looked: list[str] = []
    _, found, _ = watching(0)
    monkeypatch.setattr(found, "_describe", lambda trigger, tenant: looked.append(tenant) or {"id": trigger.id})
    for tenant in ("acme", "evil", "other"):
        found._set_group(tenant, "app", [make_trigger(on_change="k", id=f"of-{tenant}")], tenant)
    assert found.status(lambda tenant: tenant == "evil") == [{"id": "of-evil"}] and looked == ["evil"]
    assert found.status(id="of-acme") == [{"id": "of-acme"}] and looked == ["evil", "acme"]
