"""State is memory too: it has a limit, a share for each tenant, and changes that cost the loop a bounded time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import encoding
from lamina.drivers.engine import TargetSource
from lamina.errors import BadValue, LaminaError
from lamina.sdk import app_state
from lamina.sdk.app_state import StateCell, StateChange, StateChanges, Verdict, apply_change, apply_changes
from lamina.state import kv_state
from lamina.state.kv_state import CELL_BYTES, StateFull, StateTable, Step
from tests.attacks.gateways import emulated
from tests.serving import Browser, run

SOURCES = {"acme_f": TargetSource(app="acme-app", tenant="acme"), "evil_f": TargetSource(app="evil-app", tenant="evil")}
STEP = ("call", 0, "f")


def commit(table: StateTable, function: str, step: Step, reads: list[tuple[str, str, int]], ops: list[StateChange]) -> Verdict:
    """Commit one step by itself."""
    return table.commit(function, [step], [StateChanges(0, reads, ops)])[0]


def a_table(limit_bytes: int = 100_000) -> StateTable:
    return StateTable("own", source_of=lambda target: SOURCES.get(target, TargetSource()), limit_bytes=limit_bytes)


def put(table: StateTable, function: str, key: str, size: int) -> LaminaError | bool:
    return commit(table, function, STEP, [], [StateChange("app", key, "value", "put", encoding.encode(bytes(size)))])


def test_a_tenant_fills_its_own_half_and_the_others_go_on():
    table = a_table()
    made = [put(table, "evil_f", f"k{number}", 5_000) for number in range(20)]
    assert made[:8] == [True] * 8 and isinstance(made[-1], StateFull) and "'evil'" in made[-1].message
    assert table.held_bytes <= 50_000
    assert put(table, "acme_f", "k", 5_000) is True and put(table, "own_f", "k", 5_000) is True


def test_keys_without_a_value_worth_the_name_count_too():
    table = a_table()
    made = [put(table, "evil_f", f"{number}", 0) for number in range(1_000)]
    assert made.count(True) < 50_000 // CELL_BYTES


def test_what_is_full_can_be_made_smaller_and_emptied():
    table = a_table(20_000)
    while put(table, "own_f", f"k{table.held_bytes}", 4_000) is True:
        pass
    assert isinstance(put(table, "own_f", "k0", 9_000), StateFull)
    assert put(table, "own_f", "k0", 100) is True
    assert commit(table, "own_f", STEP, [], [StateChange("app", "k0", "value", "delete")]) is True
    assert put(table, "own_f", "again", 2_000) is True


changes = st.lists(st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(0, 300))), max_size=30)


@given(changes, st.sampled_from(["", "a", "c", "x"]), st.sampled_from(["", "b", "e"]))
def test_lists_and_counts_are_what_looking_at_all_cells_finds(made: list[tuple[str, int | None]], prefix: str, after: str):
    table = a_table()
    for key, size in made:
        op = StateChange("app", key, "value", "delete" if size is None else "put", encoding.encode(bytes(size or 0)))
        assert commit(table, "evil_f", STEP, [], [op]) is True
    scope = "tenant/evil/app/evil-app"
    live = {key: cell for (_, key), cell in table.cells.items() if cell.value is not None}
    wanted = [(key, live[key]) for key in sorted(live) if key.startswith(prefix) and key > after]
    assert table.list_keys(scope, prefix, after, 100) == wanted and table.list_keys(scope, prefix, after, 1) == wanted[:1]
    assert table.held_bytes == sum(CELL_BYTES + len(scope) + 1 + len(cell.value or b"") for cell in live.values())


# ------------------------------------------------------------------------------ time of the loop


elements = st.one_of(st.integers(0, 5), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2))
ops = st.one_of(
    st.builds(
        lambda one, verb: StateChange("app", "k", "set", verb, encoding.encode(one)),
        elements,
        st.sampled_from(["add", "discard"]),
    ),
    st.just(StateChange("app", "k", "set", "delete")),
)


@given(st.lists(ops, max_size=20))
def test_changes_made_together_are_as_if_made_one_by_one(given_ops: list[StateChange]):
    one_by_one = StateCell()
    for op in given_ops:
        one_by_one = apply_change(one_by_one, op)
    assert apply_changes(StateCell(), given_ops) == one_by_one


def test_ten_thousand_changes_of_a_set_decode_it_once(monkeypatch: pytest.MonkeyPatch):
    """One by one they took minutes of the loop."""
    sizes: list[int] = []
    decode = encoding.decode
    monkeypatch.setattr(app_state.encoding, "decode", lambda blob: (sizes.append(len(blob)), decode(blob))[1])
    cell = StateCell("set", encoding.encode(list(range(10_000))), 1)
    changed = apply_changes(cell, [StateChange("app", "k", "set", "add", encoding.encode(one)) for one in range(10_000, 20_000)])
    assert sum(size > 100 for size in sizes) == 1 and changed.version == 10_001
    assert len(decode(changed.value or b"")) == 20_000


def test_a_step_changes_so_much_and_no_more():
    table = a_table(2**30)
    add = StateChange("app", "k", "counter", "add", encoding.encode(1))
    many = commit(table, "own_f", STEP, [], [add] * (kv_state.MAX_CHANGES + 1))
    assert isinstance(many, BadValue) and "changes in one step" in many.message
    for key in ("a", "b"):
        large = encoding.encode(["x" * 600_000])
        assert commit(table, "own_f", STEP, [], [StateChange("app", key, "set", "add", large)]) is True
    both = [StateChange("app", key, "set", "add", encoding.encode(1)) for key in ("a", "b")]
    refused = commit(table, "own_f", STEP, [], both)
    assert isinstance(refused, BadValue) and "sets and maps" in refused.message
    assert commit(table, "own_f", STEP, [], both[:1]) is True


@pytest.mark.parametrize(
    ("kind", "arg"), [("counter", encoding.encode("text")), ("set", b"\xc1"), ("map", encoding.encode(None)), ("map", b"")]
)
def test_a_change_that_makes_no_sense_is_an_error_of_its_step(kind: Any, arg: bytes):
    assert isinstance(commit(a_table(), "own_f", STEP, [], [StateChange("app", "k", kind, "add", arg)]), LaminaError)


def test_a_full_state_is_507_and_counted_in_the_budget(tmp_path: Any):
    async def work() -> None:
        async with emulated(str(tmp_path / "s.db")) as gateway:
            table = gateway._runtime.state
            table._limit_bytes = 50_000
            async with Browser(gateway.port) as browser:
                text = json.dumps("x" * 20_000).encode()
                statuses = [(await browser.ask("PUT", f"/v1/state/k{number}?workflow=twice", text)).status for number in range(3)]
                refused = await browser.ask("PUT", "/v1/state/k9?workflow=twice", text)
            assert statuses == [200, 200, 507] and refused.json["code"] == "state-full"
            assert gateway.budget.layers()["state"] == table.held_bytes > 40_000

    run(work)
