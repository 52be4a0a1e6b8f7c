"""States Language documents of the builder: written from states that refer to each other, and read back into such.

A document that was read can be changed and extended like one written here.
"""

from __future__ import annotations

from typing import Any

from lamina.asl.document import inner_machines
from lamina.sdk.builder import ChoiceBuilder, StateBuilder

_LINKS = ("Next", "Choices", "Default", "Catch", "Branches", "Iterator", "ItemProcessor", "Type")


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
        ordered: dict[StateBuilder, None] = {}
        todo = [first]
        while todo:
            state = todo.pop(0)
            if state not in ordered:
                ordered[state] = None
                todo = [*state.successors(), *todo]
        for state in ordered:
            self._name(state)
        states = {self._names[state]: self._state(state) for state in ordered}
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


def builder_of(document: dict[str, Any]) -> StateBuilder:
    """The first state of a valid document; `build` of it gives the document again."""
    states = {name: _state(name, state) for name, state in document["States"].items()}
    for name, written in document["States"].items():
        state = states[name]
        if isinstance(state, ChoiceBuilder):
            for rule in written["Choices"]:
                state.when({key: value for key, value in rule.items() if key != "Next"}, states[rule["Next"]])
            if "Default" in written:
                state.otherwise(states[written["Default"]])
        elif "Next" in written:
            state.set_next(states[written["Next"]])
        for entry in written.get("Catch", ()):
            state.catchers.append(({key: value for key, value in entry.items() if key != "Next"}, states[entry["Next"]]))
        state.potential_next.extend(states[name] for name in written.get("PotentialNext", ()))
    first = states[document["StartAt"]]
    first.machine_fields.update({key: value for key, value in document.items() if key not in ("States", "StartAt")})
    return first


def _state(name: str, written: dict[str, Any]) -> StateBuilder:
    fields = {key: value for key, value in written.items() if key not in _LINKS and not (key == "End" and value is True)}
    if written["Type"] == "Choice":
        return ChoiceBuilder(name, fields)
    branches = [builder_of(inner) for inner in inner_machines(written)]
    body_field = "Iterator" if "Iterator" in written else "ItemProcessor"
    return StateBuilder(written["Type"], name, fields, branches=branches, body_field=body_field)
