"""App state: what a transaction sees and writes, and conflicts of two of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import encoding
from lamina.drivers.engine import TargetSource
from lamina.errors import BadValue, Conflict, StoreDown
from lamina.sdk.app_state import StateCell, StateChange, StateChanges, Transaction, Verdict, apply_change
from lamina.state.kv_state import KeyWatch, StateTable, Step
from lamina.testing import Runtime
from lamina.types import Call


@pytest.fixture
def app() -> lamina.App:
    return lamina.App("stateful")


def test_values_come_back_as_they_were_put(app: lamina.App):
    app.state["k"] = {"a": [1, b"x", None]}
    assert app.state["k"] == {"a": [1, b"x", None]}


def test_what_is_not_there_has_a_default_or_is_an_error(app: lamina.App):
    assert app.state.get("k", 3) == 3
    assert "k" not in app.state
    with pytest.raises(KeyError):
        app.state["k"]


def test_what_is_deleted_is_gone(app: lamina.App):
    app.state["k"] = 1
    del app.state["k"]
    assert "k" not in app.state


def test_a_counter_counts(app: lamina.App):
    app.state.counter("n").add(2)
    app.state.counter("n").add(-5)
    assert app.state.counter("n").value == -3


def test_a_set_holds_things_once_in_their_order(app: lamina.App):
    for item in ("b", "a", "b", "c"):
        app.state.set("s").add(item)
    app.state.set("s").discard("a")
    assert list(app.state.set("s")) == ["b", "c"]


def test_a_map_changes_entry_by_entry(app: lamina.App):
    names = app.state.map("m")
    names["a"], names["b"] = 1, 2
    del names["a"]
    assert (names.entries, names.get("a"), names["b"]) == ({"b": 2}, None, 2)


def test_a_key_keeps_its_kind(app: lamina.App):
    app.state.counter("k").add(1)
    with pytest.raises(Conflict, match="'k' is a counter, not a set"):
        app.state.set("k").add(1)


@pytest.mark.parametrize("key", ["", "x" * 513, 5])
def test_a_key_that_cannot_be_one_is_refused(app: lamina.App, key: Any):
    with pytest.raises(BadValue, match="state: key"):
        app.state[key] = 1


def test_a_value_that_is_too_large_is_refused(app: lamina.App):
    with pytest.raises(BadValue, match="bytes at 'k'"):
        app.state["k"] = bytes(2**20 + 1)


def test_what_grows_piece_by_piece_has_the_same_limit(app: lamina.App):
    app.state.set("s").add(bytes(2**19))
    with pytest.raises(BadValue, match="bytes at 's'"):
        app.state.set("s").add(bytes(2**19 + 1))
    assert len(app.state.set("s")) == 1


def test_a_function_that_fails_has_changed_nothing(app: lamina.App):
    @app.function()
    def f(x):
        app.state["k"] = x
        lamina.context().state["own"] = x
        raise ValueError

    with pytest.raises(ValueError):
        f.local(1)
    assert "k" not in app.state


def test_a_function_sees_what_it_has_changed(app: lamina.App):
    @app.function()
    def f(x):
        app.state.counter("n").add(x)
        return app.state.counter("n").value

    assert (f.local(2), f.local(3), app.state.counter("n").value) == (2, 5, 5)


def test_a_run_in_virtual_time_keeps_what_its_steps_change(app: lamina.App):
    @app.function()
    def f(x):
        app.state.counter("n").add(x)
        if x > 2:
            raise ValueError("too much")

    @app.workflow()
    async def w(xs):
        await lamina.each(f, xs, tolerate=5)

    Runtime(app).call("w", [1, 2, 3, 4])
    assert app.state.counter("n").value == 3


def test_the_state_of_a_step_needs_a_step():
    with pytest.raises(BadValue, match="none outside of a step"):
        lamina.context().state  # noqa: B018


# ------------------------------------------------------------------------------------------------------------- the gateway

STEP = ("call-1", 0, "f")


def commit(table: StateTable, function: str, step: Step, reads: list[tuple[str, str, int]], ops: list[StateChange]) -> Verdict:
    """Commit one step by itself."""
    return table.commit(function, [step], [StateChanges(0, reads, ops)])[0]


def put(key: str, value: Any) -> StateChange:
    return StateChange("app", key, "value", "put", encoding.encode(value))


def test_what_was_read_must_still_be_so():
    table = StateTable("a")
    assert commit(table, "f", STEP, [("app", "k", 0)], [put("k", 1)]) is True
    assert commit(table, "f", STEP, [("app", "k", 0)], [put("k", 2)]) is False
    assert table.read(("app/a", "k")) == StateCell("value", encoding.encode(1), 1)


def test_a_step_that_has_read_nothing_is_never_out_of_date():
    table = StateTable("a")
    for _ in range(3):
        assert commit(table, "f", STEP, [], [StateChange("app", "n", "counter", "add", encoding.encode(1))]) is True
    assert encoding.decode(table.read(("app/a", "n")).value or b"") == 3


def test_changes_that_make_no_sense_are_all_left_out():
    table = StateTable("a")
    verdict = commit(table, "f", STEP, [], [put("k", 1), StateChange("app", "k", "counter", "add", encoding.encode(1))])
    assert isinstance(verdict, Conflict)
    assert table.read(("app/a", "k")) == StateCell()


def test_a_key_that_was_deleted_and_made_anew_is_not_what_was_read():
    table = StateTable("a")
    commit(table, "f", STEP, [], [put("k", 1)])
    commit(table, "f", STEP, [], [StateChange("app", "k", "value", "delete")])
    commit(table, "f", STEP, [], [put("k", 1)])
    assert commit(table, "f", STEP, [("app", "k", 1)], [put("k", 2)]) is False


def test_keys_that_come_and_go_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.state.kv_state.MAX_DELETED", 3)
    table = StateTable("a")
    for number in range(10):
        commit(table, "f", STEP, [], [put(f"k{number}", 1)])
        commit(table, "f", STEP, [], [StateChange("app", f"k{number}", "value", "delete")])
    commit(table, "f", STEP, [], [put("k9", 2)])
    assert sorted(key for _, key in table.cells) == ["k7", "k8", "k9"]
    assert table.read(("app/a", "k9")) == StateCell("value", encoding.encode(2), 3)


def test_changes_do_not_pile_up_for_a_store_that_is_down(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.state.kv_state.MAX_UNWRITTEN", 2)
    waiting: list[Any] = []

    class Down:
        down = None

        def write(self, work: Any, done: Any = None, *, required: bool = False) -> None:
            waiting.append(done)

    table = StateTable("a")
    table.persist_to(Down())  # type: ignore[arg-type]
    assert [commit(table, "f", STEP, [], [put("k", number)]) for number in (1, 2)] == [True, True]
    assert isinstance(commit(table, "f", STEP, [], [put("k", 3)]), StoreDown)
    waiting[0](None)
    assert commit(table, "f", STEP, [], [put("k", 4)]) is True


def test_an_app_that_was_deployed_later_has_state_of_its_own():
    sources = {"g": TargetSource("second"), "h": TargetSource("second", "acme")}
    table = StateTable("first", source_of=lambda target: sources.get(target, TargetSource()))
    commit(table, "f", STEP, [], [put("k", 1)])
    commit(table, "g", STEP, [], [put("k", 2)])
    commit(table, "h", STEP, [], [put("k", 3)])
    scopes = ("app/first", "app/second", "tenant/acme/app/second")
    assert [encoding.decode(table.read((scope, "k")).value or b"") for scope in scopes] == [1, 2, 3]


def test_putting_what_is_there_triggers_nothing():
    told: list[Any] = []
    table = StateTable("a")
    table.set_watches("a", [KeyWatch("app/a", "k*", "w")])
    table.subscribe(told.extend)
    for value in (1, 1, 2):
        commit(table, "f", STEP, [], [put("key", value)])
    commit(table, "f", STEP, [], [put("other", 1)])
    assert [(write.key, write.starts, encoding.decode(write.value)) for write in told] == [("key", ("w",), 1), ("key", ("w",), 2)]


def test_while_the_store_cannot_be_read_nothing_is_made_up():
    table = StateTable("a")
    table.set_down(StoreDown("no"))
    assert isinstance(commit(table, "f", STEP, [], [put("k", 1)]), StoreDown)
    with pytest.raises(StoreDown):
        Transaction(table).read("app/a", "k", "value")


def test_changes_of_a_durable_run_wait_for_its_result():
    told: list[Any] = []
    table = StateTable("a", lambda call_id: Call(call_id, "f", 0, durable=True))
    table.set_watches("a", [KeyWatch("app/a", "k", "w")])
    table.subscribe(told.extend)
    commit(table, "f", STEP, [], [put("k", 1)])
    assert told == [] and table.same_transaction("call-1", 0, "another") is None
    found = table.same_transaction(*STEP)
    assert found is not None
    found[1](None)
    assert [write.key for write in told] == ["k"]
    assert table.same_transaction(*STEP) is None


ops = st.sampled_from(
    [
        StateChange("app", "k", "counter", "add", encoding.encode(2)),
        StateChange("app", "k", "counter", "add", encoding.encode(-1)),
        StateChange("app", "k", "counter", "delete"),
    ]
)


@given(st.lists(ops, max_size=8))
def test_a_transaction_sees_what_will_be(changes: list[StateChange]):
    table = StateTable("a")

    class Keeper:
        def read(self, place: tuple[str, str]) -> StateCell:
            return table.read(table.resolve_key("f", "call-1", *place))

    transaction = Transaction(Keeper())
    for op in changes:
        transaction.change(op)
    seen = transaction.read("app", "k", "counter")
    commit(table, "f", STEP, [], changes)
    found = table.read(("app/a", "k")).value
    assert seen == (None if found is None else encoding.decode(found))


def test_a_version_counts_every_change():
    cell = StateCell()
    for op in (put("k", 1), put("k", 2), StateChange("app", "k", "value", "delete")):
        cell = apply_change(cell, op)
    assert cell == StateCell("", None, 3)
