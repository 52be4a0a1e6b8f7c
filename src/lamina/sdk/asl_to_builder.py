"""States Language reader for the builder: an imported document can be changed and extended like one written here."""

from __future__ import annotations

from typing import Any

from lamina.asl.document import inner_machines
from lamina.sdk.builder import ChoiceBuilder, StateBuilder

_LINKS = ("Next", "Choices", "Default", "Catch", "Branches", "Iterator", "ItemProcessor", "Type")


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
            state.next = states[written["Next"]]
        for entry in written.get("Catch", ()):
            state.catchers.append(({key: value for key, value in entry.items() if key != "Next"}, states[entry["Next"]]))
        state.potential_next = [states[name] for name in written.get("PotentialNext", ())]
    first = states[document["StartAt"]]
    first.machine_fields = {key: value for key, value in document.items() if key not in ("States", "StartAt")}
    return first


def _state(name: str, written: dict[str, Any]) -> StateBuilder:
    kept = {key: value for key, value in written.items() if key not in _LINKS and not (key == "End" and value is True)}
    state = ChoiceBuilder(name, kept) if written["Type"] == "Choice" else StateBuilder(written["Type"], name, kept)
    for inner in inner_machines(written):
        state.branches.append(builder_of(inner))
    state.body_field = "Iterator" if "Iterator" in written else "ItemProcessor"
    return state
