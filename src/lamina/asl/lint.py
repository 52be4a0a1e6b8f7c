"""Linter of state machine documents. Every problem has a JSON path, a clause of the language, and a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lamina.asl import fields
from lamina.asl.errors import BadDocument, LintProblem
from lamina.asl.fields import Dialect
from lamina.asl.lint_states import (
    Finding,
    choice_problems,
    data_problems,
    fail_problems,
    map_problems,
    quorum_problems,
    reference_problems,
    retry_problems,
    seconds_problems,
    task_problems,
    text_problems,
    wait_problems,
)
from lamina.asl.paths import json_type_of, member_path


def lint(document: Any, dialect: Dialect = "strict") -> list[LintProblem]:
    """All problems of a document; empty for a valid one."""
    checker = _Checker(dialect)
    try:
        checker.machine(document, "$", top=True)
    except RecursionError:
        checker.say("$", "JSON", "nested too deeply to be read")
    return checker.found


def check(document: Any, dialect: Dialect = "strict", source: str = "") -> None:
    if problems := lint(document, dialect):
        raise BadDocument(problems, source)


@dataclass(slots=True)
class _Checker:
    dialect: Dialect
    found: list[LintProblem] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  #: of all states, and where

    def say(self, path: str, clause: str, message: str) -> None:
        self.found.append(LintProblem(path, clause, message))

    def say_all(self, found: Iterable[Finding]) -> None:
        self.found += [LintProblem(*one) for one in found]

    # ---------------------------------------------------------------- machines

    def machine(self, document: Any, path: str, *, top: bool) -> None:
        clause = "Top-level fields"
        if not isinstance(document, dict):
            self.say(path, clause, f"a state machine is an object, not a {json_type_of(document)}")
            return
        if self._jsonata(document, path):
            return
        allowed = fields.TOP if top else fields.INNER
        for key in document:
            if top and key in fields.EXTENDED_TOP:
                if self.dialect == "strict":
                    self.say(member_path(path, key), clause, f"{key} is known in the extended dialect only")
            elif key not in allowed:
                self.say(member_path(path, key), clause, f"there is no field {key!r} here")
        self.say_all(text_problems(document, "Comment", path, clause))
        self.say_all(text_problems(document, "Version", path, clause))
        if top:
            self.say_all(seconds_problems(document, "TimeoutSeconds", path, clause))
        states = document.get("States")
        if not isinstance(states, dict) or not states:
            self.say(f"{path}.States", clause, "States must be an object with at least one state")
            return
        start = document.get("StartAt")
        if not isinstance(start, str):
            self.say(f"{path}.StartAt", clause, "StartAt must be the name of a state")
        elif start not in states:
            self.say(f"{path}.StartAt", clause, f"there is no state {start!r}")
        for name, state in states.items():
            self._name(name, member_path(f"{path}.States", name))
            self.state(state, member_path(f"{path}.States", name), states)
        if isinstance(start, str) and start in states and all(isinstance(state, dict) for state in states.values()):
            self._reach(states, start, f"{path}.States")

    def _name(self, name: str, path: str) -> None:
        if not name or len(name) > fields.MAX_NAME:
            self.say(path, "States: state name", f"a name has 1 to {fields.MAX_NAME} characters, not {len(name)}")
        if name in self.names:
            self.say(path, "States: state name", f"{name!r} is used already, at {self.names[name]}")
        self.names[name] = path

    def _reach(self, states: dict[str, Any], start: str, path: str) -> None:
        reached, todo = {start}, [start]
        while todo:
            for name in targets(states[todo.pop()]):
                if name in states and name not in reached:
                    reached.add(name)
                    todo.append(name)
        for name in states:
            if name not in reached:
                self.say(member_path(path, name), "Transitions", "no transition leads to this state")
        ends = [name for name, state in states.items() if state.get("Type") in ("Succeed", "Fail") or state.get("End") is True]
        if not ends:
            self.say(path, "Transitions", "no state is terminal: none has End, Succeed or Fail")

    def _jsonata(self, part: dict[str, Any], path: str) -> bool:
        """Refuse JSONata: another language for the same data; half of it read as JSONPath would be worse than none."""
        language = part.get("QueryLanguage", "JSONPath")
        hint = "write the document with JSONPath"
        if language == "JSONata":
            self.say(f"{path}.QueryLanguage", "Query language", f"JSONata is not supported; {hint}")
            return True
        if language != "JSONPath":
            self.say(f"{path}.QueryLanguage", "Query language", f"{language!r} is neither JSONPath nor JSONata")
        if part.get("Type") in fields.STATES:
            for key in sorted(fields.JSONATA & part.keys()):
                what = "variables are" if key == "Assign" else "JSONata is"
                self.say(f"{path}.{key}", "Query language", f"{what} not supported, and {key} belongs to it; {hint}")
                return True
        return False

    # ------------------------------------------------------------------ states

    def state(self, state: Any, path: str, states: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            self.say(path, "States: common fields", f"a state is an object, not a {json_type_of(state)}")
            return
        kind = state.get("Type")
        if kind not in fields.STATES:
            known = ", ".join(fields.STATES)
            self.say(f"{path}.Type", "States: common fields", f"Type must be one of {known}, not {kind!r}")
            return
        if self._jsonata(state, path):
            return
        self._known_fields(state, kind, path)
        self.say_all(text_problems(state, "Comment", path, "States: common fields"))
        self._transition(state, kind, path, states)
        self.say_all(data_problems(state, path))
        for key in ("Retry", "Catch"):
            if key in state and key in fields.STATES[kind]:
                self.say_all(retry_problems(state, key, path))
        if "Catch" in fields.STATES[kind]:
            self._catchers(state.get("Catch"), path, states)
        self._of_its_kind(state, kind, path, states)

    def _catchers(self, catchers: Any, path: str, states: dict[str, Any]) -> None:
        for index, entry in enumerate(catchers if isinstance(catchers, list) else ()):
            if isinstance(entry, dict):
                at = f"{path}.Catch[{index}]"
                self.next(entry.get("Next"), f"{at}.Next", states)
                if entry.get("ResultPath") is not None:
                    self.say_all(reference_problems(entry["ResultPath"], f"{at}.ResultPath", "Errors: Catch", writes=True))

    def _of_its_kind(self, state: dict[str, Any], kind: str, path: str, states: dict[str, Any]) -> None:
        match kind:
            case "Task":
                self.say_all(task_problems(state, path))
                potential = state.get("PotentialNext")
                for index, name in enumerate(potential if isinstance(potential, list) else ()):
                    self.next(name, f"{path}.PotentialNext[{index}]", states)
            case "Choice":
                self._choice(state, path, states)
            case "Wait":
                self.say_all(wait_problems(state, path))
            case "Fail":
                self.say_all(fail_problems(state, path))
            case "Parallel":
                self._parallel(state, path)
            case "Map":
                self._map(state, path)

    def _known_fields(self, state: dict[str, Any], kind: str, path: str) -> None:
        extra = fields.EXTENDED.get(kind, set())
        for key in state:
            if key in fields.UNSUPPORTED and kind == "Map":
                self.say(f"{path}.{key}", "Map State", f"{key} is not supported: it {fields.UNSUPPORTED[key]}")
            elif key in extra:
                if self.dialect == "strict":
                    self.say(f"{path}.{key}", f"{kind} State", f"{key} is known in the extended dialect only")
            elif key not in fields.STATES[kind] | fields.COMMON:
                self.say(member_path(path, key), f"{kind} State", f"a {kind} state has no field {key!r}")

    def _transition(self, state: dict[str, Any], kind: str, path: str, states: dict[str, Any]) -> None:
        if kind in ("Choice", "Succeed", "Fail"):
            return
        clause = "Transitions"
        if "End" in state and not isinstance(state["End"], bool):
            self.say(f"{path}.End", clause, "End must be true or false")
        ends = state.get("End") is True
        if ends and "Next" in state:
            self.say(path, clause, "a state has Next or End, not both")
        elif not ends and "Next" not in state:
            self.say(path, clause, "a state that is not terminal has a Next")
        elif not ends:
            self.next(state["Next"], f"{path}.Next", states)

    def next(self, name: Any, path: str, states: dict[str, Any]) -> None:
        if not isinstance(name, str) or name not in states:
            self.say(path, "Transitions", f"there is no state {name!r} beside this one")

    # -------------------------------------------------------- with others inside, or after them

    def _choice(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        self.say_all(choice_problems(state, path))
        if "Default" in state:
            self.next(state["Default"], f"{path}.Default", states)
        rules = state.get("Choices")
        for index, rule in enumerate(rules if isinstance(rules, list) else []):
            if isinstance(rule, dict):
                self.next(rule.get("Next"), f"{path}.Choices[{index}].Next", states)

    def _parallel(self, state: dict[str, Any], path: str) -> None:
        branches = state.get("Branches")
        if not isinstance(branches, list) or not branches:
            self.say(f"{path}.Branches", "Parallel State", "Branches must be an array of at least one state machine")
            return
        for index, branch in enumerate(branches):
            self.machine(branch, f"{path}.Branches[{index}]", top=False)
        self.say_all(quorum_problems(state, path, len(branches)))

    def _map(self, state: dict[str, Any], path: str) -> None:
        given = [key for key in ("ItemProcessor", "Iterator") if key in state]
        if len(given) != 1:
            self.say(path, "Map State", "needs either an ItemProcessor or an Iterator")
        for inner in given:
            self.machine(state[inner], f"{path}.{inner}", top=False)
        self.say_all(map_problems(state, path))


def targets(state: dict[str, Any]) -> list[Any]:
    """Names of all states a state may go to."""
    found = [state.get("Next"), state.get("Default")]
    for key in ("Choices", "Catch"):
        entries = state.get(key)
        found += [entry.get("Next") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    potential = state.get("PotentialNext")
    found += potential if isinstance(potential, list) else []
    return [name for name in found if isinstance(name, str)]
