"""Is this a state machine? Every remark says where (a JSON path), by which clause, and what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lamina.asl import fields, template, times
from lamina.asl.fields import Dialect
from lamina.asl.intrinsics import IntrinsicError, is_call, parse_call
from lamina.asl.lint_care import care_problems, is_whole
from lamina.asl.lint_choice import choice_problems
from lamina.asl.paths import PathError, kind_of, member, parse, parse_reference
from lamina.errors import BadFlow


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    clause: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: [{self.clause}] {self.message}"


class BadDocument(BadFlow):
    """A text that is no valid state machine; `problems` are all that was found."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in problems))
        self.problems = problems
        self.source = source


def lint(document: Any, dialect: Dialect = "strict") -> list[Problem]:
    """All that is wrong; empty for a valid document."""
    checker = _Checker(dialect)
    try:
        checker.machine(document, "$", top=True)
    except RecursionError:
        checker.say("$", "JSON", "nested too deeply to be read")
    return checker.found


def check(document: Any, dialect: Dialect = "strict", source: str = "") -> None:
    if problems := lint(document, dialect):
        raise BadDocument(problems, source)


def read(text: str | bytes, source: str = "") -> Any:
    """A document from JSON; a name that stands twice in one object is refused, since one of the two would be lost."""
    try:
        return json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except _TwinError as error:
        raise BadDocument([Problem("$", "JSON", str(error))], source) from None
    except (ValueError, RecursionError) as error:
        raise BadDocument([Problem("$", "JSON", f"not JSON: {error}")], source) from None


class _TwinError(ValueError):
    pass


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise _TwinError(f"{twice!r} stands twice in one object")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


@dataclass(slots=True)
class _Checker:
    dialect: Dialect
    found: list[Problem] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  #: of all states, and where

    def say(self, path: str, clause: str, message: str) -> None:
        self.found.append(Problem(path, clause, message))

    # ---------------------------------------------------------------- machines

    def machine(self, document: Any, path: str, *, top: bool) -> None:
        clause = "Top-level fields"
        if not isinstance(document, dict):
            self.say(path, clause, f"a state machine is an object, not a {kind_of(document)}")
            return
        if self._jsonata(document, path):
            return
        allowed = fields.TOP if top else fields.INNER
        for key in document:
            if top and key in fields.EXTENDED_TOP:
                if self.dialect == "strict":
                    self.say(member(path, key), clause, f"{key} is known in the extended dialect only")
            elif key not in allowed:
                self.say(member(path, key), clause, f"there is no field {key!r} here")
        self._text(document, "Comment", path, clause)
        self._text(document, "Version", path, clause)
        if top and "TimeoutSeconds" in document:
            self._seconds(document, "TimeoutSeconds", path, clause)
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
            self._name(name, member(f"{path}.States", name))
            self.state(state, member(f"{path}.States", name), states)
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
                self.say(member(path, name), "Transitions", "no transition leads to this state")
        ends = [name for name, state in states.items() if state.get("Type") in ("Succeed", "Fail") or state.get("End") is True]
        if not ends:
            self.say(path, "Transitions", "no state is terminal: none has End, Succeed or Fail")

    def _jsonata(self, part: dict[str, Any], path: str) -> bool:
        """JSONata is another language for the same data; half of it read as JSONPath would be worse than none."""
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
            self.say(path, "States: common fields", f"a state is an object, not a {kind_of(state)}")
            return
        kind = state.get("Type")
        if kind not in fields.STATES:
            known = ", ".join(fields.STATES)
            self.say(f"{path}.Type", "States: common fields", f"Type must be one of {known}, not {kind!r}")
            return
        if self._jsonata(state, path):
            return
        self._known_fields(state, kind, path)
        self._text(state, "Comment", path, "States: common fields")
        self._transition(state, kind, path, states)
        self._data(state, kind, path)
        for key in ("Retry", "Catch"):
            if key in state and key in fields.STATES[kind]:
                for at, clause, message in care_problems(state, key, path):
                    self.say(at, clause, message)
        catchers = state.get("Catch")
        for index, entry in enumerate(catchers if isinstance(catchers, list) and "Catch" in fields.STATES[kind] else ()):
            if isinstance(entry, dict):
                self.next(entry.get("Next"), f"{path}.Catch[{index}].Next", states)
                if entry.get("ResultPath") is not None:
                    self.reference(entry["ResultPath"], f"{path}.Catch[{index}].ResultPath", "Errors: Catch", writes=True)
        getattr(self, f"_{kind.lower()}")(state, path, states)

    def _known_fields(self, state: dict[str, Any], kind: str, path: str) -> None:
        extra = fields.EXTENDED.get(kind, set())
        for key in state:
            if key in fields.UNSUPPORTED and kind == "Map":
                self.say(f"{path}.{key}", "Map State", f"{key} is not supported: it {fields.UNSUPPORTED[key]}")
            elif key in extra:
                if self.dialect == "strict":
                    self.say(f"{path}.{key}", f"{kind} State", f"{key} is known in the extended dialect only")
            elif key not in fields.STATES[kind] | fields.COMMON:
                self.say(member(path, key), f"{kind} State", f"a {kind} state has no field {key!r}")

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

    def _data(self, state: dict[str, Any], kind: str, path: str) -> None:
        for key in ("InputPath", "OutputPath"):
            if state.get(key) is not None:
                self.path(state[key], f"{path}.{key}", "Input and Output Processing")
        if state.get("ResultPath") is not None:
            self.reference(state["ResultPath"], f"{path}.ResultPath", "ResultPath", writes=True)
        for key in ("Parameters", "ResultSelector", "ItemSelector"):
            if key in state:
                for at, message in template.problems(state[key], f"{path}.{key}"):
                    self.say(at, "Payload Template", message)
        if "ResultSelector" in state and not isinstance(state["ResultSelector"], dict):
            self.say(f"{path}.ResultSelector", "Payload Template", "a ResultSelector is an object")

    # --------------------------------------------------------------- each kind

    def _task(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        clause = "Task State"
        if not isinstance(state.get("Resource"), str) or not state["Resource"]:
            self.say(f"{path}.Resource", clause, "Resource must be a text that names what to call")
        for name in ("Timeout", "Heartbeat"):
            key, other = f"{name}Seconds", f"{name}SecondsPath"
            if key in state:
                self._seconds(state, key, path, f"{clause}: timeouts")
            if other in state:
                self.reference(state[other], f"{path}.{other}", f"{clause}: timeouts")
            if key in state and other in state:
                self.say(f"{path}.{other}", f"{clause}: timeouts", f"{key} and {other} exclude each other")
        timeout, heartbeat = state.get("TimeoutSeconds"), state.get("HeartbeatSeconds")
        if isinstance(timeout, int) and isinstance(heartbeat, int) and heartbeat >= timeout:
            self.say(f"{path}.HeartbeatSeconds", f"{clause}: timeouts", "must be smaller than TimeoutSeconds")
        ways = state.get("PotentialNext", [])
        if not isinstance(ways, list):
            self.say(f"{path}.PotentialNext", f"{clause}: PotentialNext", "must be an array of state names")
        else:
            for index, name in enumerate(ways):
                self.next(name, f"{path}.PotentialNext[{index}]", states)

    def _pass(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        pass

    def _succeed(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        pass

    def _fail(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        for key in ("Error", "Cause"):
            self._text(state, key, path, "Fail State")
            other = f"{key}Path"
            if other in state:
                if key in state:
                    self.say(f"{path}.{other}", "Fail State", f"{key} and {other} exclude each other")
                self.expression(state[other], f"{path}.{other}", "Fail State")

    def _choice(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        for at, clause, message in choice_problems(state, path):
            self.say(at, clause, message)
        if "Default" in state:
            self.next(state["Default"], f"{path}.Default", states)
        rules = state.get("Choices")
        for index, rule in enumerate(rules if isinstance(rules, list) else []):
            if isinstance(rule, dict):
                self.next(rule.get("Next"), f"{path}.Choices[{index}].Next", states)

    def _wait(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        clause = "Wait State"
        given = [key for key in ("Seconds", "SecondsPath", "Timestamp", "TimestampPath") if key in state]
        if len(given) != 1:
            self.say(
                path, clause, f"needs exactly one of Seconds, SecondsPath, Timestamp, TimestampPath, and has {given or 'none'}"
            )
        if "Seconds" in state and not is_whole(state["Seconds"], 0, fields.MAX_SECONDS):
            self.say(f"{path}.Seconds", clause, f"must be an integer from 0 on, not {state['Seconds']!r}")
        if "Timestamp" in state and times.parse_us(state["Timestamp"]) is None:
            self.say(f"{path}.Timestamp", clause, f"{state['Timestamp']!r} is no timestamp such as 2026-03-14T01:59:00Z")
        for key in ("SecondsPath", "TimestampPath"):
            if key in state:
                self.reference(state[key], f"{path}.{key}", clause)

    def _parallel(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        clause = "Parallel State"
        branches = state.get("Branches")
        if not isinstance(branches, list) or not branches:
            self.say(f"{path}.Branches", clause, "Branches must be an array of at least one state machine")
            return
        for index, branch in enumerate(branches):
            self.machine(branch, f"{path}.Branches[{index}]", top=False)
        if "WaitForNumBranches" in state:
            count = state["WaitForNumBranches"]
            if isinstance(count, list) and len(count) == 1:
                count = count[0]
            if not is_whole(count, 1, len(branches)):
                self.say(
                    f"{path}.WaitForNumBranches",
                    f"{clause}: WaitForNumBranches",
                    f"must be one number from 1 to {len(branches)}, not {state['WaitForNumBranches']!r}",
                )

    def _map(self, state: dict[str, Any], path: str, states: dict[str, Any]) -> None:
        clause = "Map State"
        given = [key for key in ("ItemProcessor", "Iterator") if key in state]
        if len(given) != 1:
            self.say(path, clause, "needs either an ItemProcessor or an Iterator")
        for inner in given:
            self.machine(state[inner], f"{path}.{inner}", top=False)
        if "ItemSelector" in state and "Parameters" in state:
            self.say(f"{path}.Parameters", clause, "ItemSelector and Parameters exclude each other")
        if "ItemsPath" in state:
            self.path(state["ItemsPath"], f"{path}.ItemsPath", clause)
        for key, most in (("MaxConcurrency", 10**9), ("ToleratedFailureCount", 10**9), ("ToleratedFailurePercentage", 100)):
            if key in state and f"{key}Path" in state:
                self.say(f"{path}.{key}Path", clause, f"{key} and {key}Path exclude each other")
            if key in state:
                value = state[key]
                whole = key != "ToleratedFailurePercentage"
                if kind_of(value) != "number" or not 0 <= value <= most or (whole and not isinstance(value, int)):
                    self.say(f"{path}.{key}", clause, f"must be a number from 0 to {most}, not {value!r}")
            if f"{key}Path" in state:
                self.reference(state[f"{key}Path"], f"{path}.{key}Path", clause)

    # ------------------------------------------------------------------- parts

    def _text(self, part: dict[str, Any], key: str, path: str, clause: str) -> None:
        if key in part and not isinstance(part[key], str):
            self.say(f"{path}.{key}", clause, f"{key} must be a string, not a {kind_of(part[key])}")

    def _seconds(self, part: dict[str, Any], key: str, path: str, clause: str) -> None:
        if not is_whole(part[key], 1, fields.MAX_SECONDS):
            self.say(f"{path}.{key}", clause, f"must be a positive integer, not {part[key]!r}")

    def path(self, text: Any, at: str, clause: str) -> None:
        try:
            parse(text) if isinstance(text, str) else parse("")
        except PathError as error:
            self.say(at, f"Paths; {clause}", str(error) if isinstance(text, str) else f"{text!r} is no path")

    def reference(self, text: Any, at: str, clause: str, *, writes: bool = False) -> None:
        try:
            path = parse_reference(text if isinstance(text, str) else "")
            if writes and path.context:
                self.say(at, f"Reference Paths; {clause}", "the context object cannot be written to")
        except PathError as error:
            self.say(at, f"Reference Paths; {clause}", str(error) if isinstance(text, str) else f"{text!r} is no path")

    def expression(self, text: Any, at: str, clause: str) -> None:
        """A reference path, or an intrinsic function."""
        if isinstance(text, str) and is_call(text):
            try:
                parse_call(text)
            except IntrinsicError as error:
                self.say(at, f"Intrinsic Functions; {clause}", str(error))
        else:
            self.path(text, at, clause)


def targets(state: dict[str, Any]) -> list[Any]:
    """All states one may go to from this one."""
    found = [state.get("Next"), state.get("Default")]
    for key in ("Choices", "Catch"):
        entries = state.get(key)
        found += [entry.get("Next") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    ways = state.get("PotentialNext")
    found += ways if isinstance(ways, list) else []
    return [name for name in found if isinstance(name, str)]
