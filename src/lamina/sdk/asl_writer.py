"""States Language writer: from builder states that refer to each other to a document in which they have names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.sdk.builder import StateBuilder


def short_name(resource: str) -> str:
    """Default name of a state: the last part of the resource it calls."""
    return re.split(r"[/:]", resource)[-1] or resource


def document_of(first: StateBuilder) -> dict[str, Any]:
    return _Writer().machine(first)


def states_of(first: StateBuilder) -> list[StateBuilder]:
    """All states of a machine, nested ones too, each once."""
    found: dict[StateBuilder, None] = {}
    todo = [first]
    while todo:
        state = todo.pop(0)
        if state not in found:
            found[state] = None
            todo += [*state.successors(), *state.branches]
    return list(found)


class _Writer:
    """Writer of one document. Names are unique over the whole of it; a name that is taken gets a number."""

    def __init__(self) -> None:
        self._names: dict[StateBuilder, str] = {}
        self._taken: set[str] = set()

    def machine(self, first: StateBuilder) -> dict[str, Any]:
        line: dict[StateBuilder, None] = {}
        todo = [first]
        while todo:
            state = todo.pop(0)
            if state not in line:
                line[state] = None
                todo = [*state.successors(), *todo]
        for state in line:
            self._name(state)
        states = {self._names[state]: self._state(state) for state in line}
        return {**first.machine_fields, "StartAt": self._names[first], "States": states}

    def _name(self, state: StateBuilder) -> None:
        if state in self._names:
            return
        name, count = state.preferred_name, 1
        while name in self._taken:
            count += 1
            name = f"{state.preferred_name}-{count}"
        self._taken.add(name)
        self._names[state] = name

    def _state(self, state: StateBuilder) -> dict[str, Any]:
        from lamina.sdk.builder import ChoiceBuilder

        written = {"Type": state.kind, **state.fields}
        if isinstance(state, ChoiceBuilder):
            written["Choices"] = [{**rule, "Next": self._names[then.first]} for rule, then in state.rules]
            default = state.default.first if state.default is not None else state.next
            return written | ({"Default": self._names[default]} if default is not None else {})
        if state.kind == "Parallel":
            written["Branches"] = [self.machine(inner) for inner in state.branches]
        elif state.kind == "Map":
            written[state.body_field] = self.machine(state.branches[0])
        if state.catchers:
            written["Catch"] = [{**entry, "Next": self._names[then]} for entry, then in state.catchers]
        if state.kind in ("Succeed", "Fail"):
            return written
        return written | ({"Next": self._names[state.next]} if state.next is not None else {"End": True})
