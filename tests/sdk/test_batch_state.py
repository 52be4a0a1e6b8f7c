"""State of the requests of one batch: each has its own transaction, and none is harmed by another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lamina
from lamina import encoding
from lamina.sdk.app_state import (
    BatchState,
    InMemoryState,
    StateCell,
    StateChange,
    StateKey,
    Verdict,
    apply_changes,
)
from lamina.sdk.context import BatchContext, active_context, context
from lamina.state.kv_state import StateTable
from lamina.testing import Runtime

KEYS = ("a", "b")

# What a request does: reads or changes of one key. `copy` writes to one key what was read at another.
ACTS = st.one_of(
    st.tuples(st.just("read"), st.sampled_from(KEYS)),
    st.tuples(st.just("add"), st.sampled_from(KEYS), st.integers(0, 2)),
    st.tuples(st.just("copy"), st.sampled_from(KEYS), st.sampled_from(KEYS)),
    st.tuples(st.just("delete"), st.sampled_from(KEYS)),
)


def act(transaction: Any, what: tuple[Any, ...]) -> Any:
    """Do one thing; what it saw, if it read."""
    if what[0] == "read":
        return transaction.read("app", what[1], "counter")
    if what[0] == "add":
        transaction.change(StateChange("app", what[1], "counter", "add", encoding.encode(what[2])))
    elif what[0] == "delete":
        transaction.change(StateChange("app", what[1], "counter", "delete"))
    else:
        seen = transaction.read("app", what[1], "counter") or 0
        transaction.change(StateChange("app", what[2], "counter", "delete"))
        transaction.change(StateChange("app", what[2], "counter", "add", encoding.encode(seen)))
        return seen
    return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_committed_is_what_the_requests_would_have_done_one_after_another(data: st.DataObject):
    """Requests act in any interleaving, some fail, and others commit before they do: of those that count, each saw what a serial
    run in the order of the batch would have shown it, and the state is what that run leaves."""
    count = data.draw(st.integers(1, 4))
    cells: dict[StateKey, StateCell] = {}
    table = StateTable("app")
    steps = [(f"call-{place}", 0, "f") for place in range(count)]

    def others_commit() -> None:
        other = BatchState(lambda place, key: table.read(table.resolve_key("f", "other", *key)))
        for what in data.draw(st.lists(ACTS, max_size=2)):
            act(other.transaction(0), what)
        table.commit("f", [("other", 0, "f")], other.changes(lambda place: True))

    others_commit()
    batch = BatchState(lambda place, key: table.read(table.resolve_key("f", steps[place][0], *key)))
    did: list[list[tuple[tuple[Any, ...], Any]]] = [[] for _ in range(count)]
    for _ in range(data.draw(st.integers(0, 8))):
        place, what = data.draw(st.integers(0, count - 1)), data.draw(ACTS)
        did[place].append((what, act(batch.transaction(place), what)))
    if data.draw(st.booleans()):
        others_commit()
    failed = data.draw(st.sets(st.integers(0, count - 1)))
    before = dict(table.cells)
    changes = batch.changes(lambda place: place not in failed)
    verdicts: dict[int, Verdict] = table.commit("f", steps, changes)

    cells = dict(before)
    for place in range(count):
        if verdicts.get(place) is not True:
            continue
        serial = BatchState(lambda _, key: cells.get(("app/app", key[1]), StateCell()))
        for what, saw in did[place]:
            assert act(serial.transaction(0), what) == saw
        for key in {op.key for op in serial.transaction(0).ops}:
            ops = [op for op in serial.transaction(0).ops if op.key == key]
            cells["app/app", key] = apply_changes(cells.get(("app/app", key), StateCell()), ops)
    shown = {place: cell.value for place, cell in table.cells.items() if cell.value is not None}
    assert shown == {place: cell.value for place, cell in cells.items() if cell.value is not None}
    assert failed.isdisjoint(verdicts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=8))
def test_requests_of_one_batch_that_read_and_write_the_same_key_all_count(keys: list[str]):
    table = StateTable("app")
    batch = BatchState(lambda place, key: table.read(table.resolve_key("f", "call", *key)))
    seen = [act(batch.transaction(place), ("copy", key, key)) for place, key in enumerate(keys)]
    steps = [(f"call-{place}", 0, "f") for place in range(len(keys))]
    verdicts = table.commit("f", steps, batch.changes(lambda place: True))
    assert seen == [0] * len(keys) and all(verdict is True for verdict in verdicts.values())


def test_a_request_that_has_read_changes_of_one_that_failed_is_stale_and_alone():
    state = InMemoryState()
    batch = BatchState(lambda place, key: state.read(key))
    act(batch.transaction(0), ("add", "a", 1))
    assert act(batch.transaction(1), ("read", "a")) == 1
    act(batch.transaction(2), ("add", "b", 1))
    changes = batch.changes(lambda place: place != 0)
    assert state.commit_batch(changes) == {1: False, 2: True}
    assert "a" not in {key for _, key in state._cells}


def test_a_request_with_a_change_that_makes_no_sense_fails_alone():
    state = InMemoryState()
    state.apply([StateChange("app", "a", "counter", "add", encoding.encode(5))])
    batch = BatchState(lambda place, key: state.read(key))
    batch.transaction(0).change(StateChange("app", "a", "set", "add", encoding.encode(1)))
    assert act(batch.transaction(1), ("read", "a")) == 5
    verdicts = state.commit_batch(batch.changes(lambda place: True))
    assert isinstance(verdicts[0], lamina.errors.Conflict)
    assert verdicts[1] is False  # it cannot be known there that the first will not count: it runs again


def test_what_is_rolled_back_is_read_anew_and_was_not_changed():
    state = InMemoryState()
    batch = BatchState(lambda place, key: state.read(key))
    act(batch.transaction(0), ("add", "a", 1))
    here = batch.checkpoint()
    act(batch.transaction(0), ("copy", "a", "b"))
    act(batch.transaction(1), ("add", "b", 7))
    batch.roll_back(here)
    assert state.commit_batch(batch.changes(lambda place: True)) == {0: True}
    assert {key for _, key in state._cells} == {"a"}


# ------------------------------------------------------------------------------------------------------ as a user writes it


def an_app() -> lamina.App:
    app = lamina.App("batches")

    @app.function(batch=8)
    def visit(user: Any) -> Any:
        counts = []
        for request, name in zip(lamina.context().requests, user, strict=True):
            with request:
                app.state[name] = app.state.get(name, 0) + 1
                counts.append(app.state[name] if name != "bad" else ValueError("bad"))
        return counts

    @app.function(batch=8)
    def careless(user: Any) -> Any:
        return [app.state.get(name) for name in user]

    return app


def test_each_request_of_a_batch_has_its_own_state_and_one_that_fails_leaves_nothing():
    app = an_app()
    runtime = Runtime(app)
    pending = [runtime.submit("visit", user=name) for name in ("ann", "bad", "ann", "bob")]
    found = []
    for one in pending:
        try:
            found.append(one.result())
        except lamina.errors.FunctionFailed:
            found.append("failed")
    assert found == [1, "failed", 2, 1]
    assert app.state["ann"] == 2 and "bad" not in app.state


def test_state_outside_of_a_request_of_a_batch_is_refused_with_the_way_to_write_it():
    with pytest.raises(lamina.errors.LaminaError, match="each has its own") as refused:
        an_app().functions["careless"].local("ann")
    assert "lamina.context().requests" in str(refused.value)


def test_a_batch_of_one_called_locally_has_its_state_too():
    app = an_app()
    assert app.functions["visit"].local("ann") == 1
    assert app.state["ann"] == 1


def test_the_context_of_a_request_is_its_own():
    whole = BatchContext(batch=2, call_ids=("c1", "c2"), places=(3, 5))
    with active_context(whole):
        assert [request.call_id for request in context().requests] == ["c1", "c2"]
        with whole.requests[1]:
            assert (context().call_id, context().batch, context().places) == ("c2", 1, (5,))
        assert context() is whole


def test_requests_that_run_again_begin_with_nothing_changed():
    """A batch that raises is halved: what its requests had changed by then must not count twice."""
    app = lamina.App("halves")

    @app.function(batch=4)
    def fragile(x: Any) -> Any:
        for request, one in zip(lamina.context().requests, x, strict=True):
            with request:
                app.state.counter("n").add(1)
                if one == 3:
                    raise ValueError("three")
        return list(x)

    runtime = Runtime(app)
    pending = [runtime.submit("fragile", x=number) for number in range(4)]
    good = 0
    for one in pending:
        try:
            one.result()
            good += 1
        except lamina.errors.FunctionFailed:
            pass
    assert good == 3 and app.state.counter("n").value == 3


def test_pre_and_post_of_a_model_have_the_state_of_their_request():
    torch = pytest.importorskip("torch")
    app = lamina.App("models")

    @app.function(batch=4)
    class Double(lamina.TorchModel):
        def load(self) -> Any:
            return torch.nn.Identity(), torch.zeros(1, 1)

        def pre(self, x: float, user: str = "") -> Any:
            app.state.counter(user).add(1)
            return [x]

        def post(self, row: Any) -> Any:
            app.state["last"] = float(row[0])
            return float(row[0])

    runtime = Runtime(app)
    pending = [runtime.submit("double", x=float(number), user=f"u{number % 2}") for number in range(4)]
    assert [one.result() for one in pending] == [0.0, 1.0, 2.0, 3.0]
    assert (app.state.counter("u0").value, app.state["last"]) == (2, 3.0)
