"""Workflow builder: state by state, with explicit transitions, in the Amazon States Language.

    tag = step(tagger).retry(on=[TimeoutError], attempts=2)
    look = tag >> choice().when(var("$.nsfw") > 0.8, step(blur)).otherwise(succeed())
    moderate = workflow("moderate", look, app=app)

Each part is a state of the States Language, so what is built can be exported, and what is imported is the same thing.
One value travels along: a state reads it (`input`), and puts its result into it (`result`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from lamina.asl.document import TOKEN_SUFFIX
from lamina.errors import BadFlow
from lamina.sdk.function import Function
from lamina.sdk.symbols import Comparisons

if TYPE_CHECKING:
    from lamina.sdk.app import App
    from lamina.sdk.resources import SLO
    from lamina.sdk.states_workflow import StatesWorkflow

DISCARD: Any = object()
"""`result=DISCARD`: the result is thrown away, and the value goes on as it was."""

S = TypeVar("S", bound="StateBuilder")
Errors = Sequence[str | type[BaseException]]


class Fragment:
    """Fragment of a state machine: its first state, and the open ends that another fragment may follow."""

    first: StateBuilder

    def open_ends(self) -> list[StateBuilder]:
        raise NotImplementedError

    def __rshift__(self, other: Fragment | Function[..., Any]) -> FragmentChain:
        after = as_fragment(other)
        for end in self.open_ends():
            end.set_next(after.first)
        return FragmentChain(self.first, after)


class FragmentChain(Fragment):
    def __init__(self, first: StateBuilder, last: Fragment) -> None:
        self.first = first
        self._last = last

    def open_ends(self) -> list[StateBuilder]:
        return self._last.open_ends()


class StateBuilder(Fragment):
    """Builder of one state. `fields` are those of the document; states it refers to are named when the whole is known."""

    def __init__(
        self,
        kind: str,
        preferred_name: str,
        fields: dict[str, Any],
        *,
        branches: Iterable[Fragment | Function[..., Any]] = (),
        function: Function[..., Any] | None = None,
        body_field: str = "ItemProcessor",
    ) -> None:
        self.first = self
        self.kind = kind
        self.preferred_name = preferred_name
        self.fields = fields
        self.function = function
        self.branches = [as_fragment(branch).first for branch in branches]  #: first states of the machines inside
        self.body_field = body_field  #: of a Map, the field its machine is in
        self.next: StateBuilder | None = None
        self.catchers: list[tuple[dict[str, Any], StateBuilder]] = []
        self.potential_next: list[StateBuilder] = []  #: where else its function may send it
        self.machine_fields: dict[str, Any] = {}  #: of the machine that begins here: its fields besides its states

    def open_ends(self) -> list[StateBuilder]:
        return [] if self.kind in ("Succeed", "Fail") else [self]

    def set_next(self, after: StateBuilder) -> None:
        if self.next is not None and self.next is not after:
            raise BadFlow(
                f"{self.preferred_name!r} is followed by {self.next.preferred_name!r} already",
                hint="use choice() to go one of two ways",
            )
        self.next = after

    def successors(self) -> list[StateBuilder]:
        """Successor states, in order."""
        return [*([self.next] if self.next else []), *(state for _, state in self.catchers), *self.potential_next]

    def named(self: S, name: str) -> S:
        self.preferred_name = name
        return self

    def retry(
        self: S,
        on: Errors = ("States.ALL",),
        *,
        attempts: int = 3,
        interval_s: int = 1,
        backoff: float = 2.0,
        max_delay_s: int | None = None,
        jitter: bool = False,
    ) -> S:
        """Retry after these errors, with exponential backoff, for up to `attempts` tries in all; MaxAttempts of a document counts
        those after the first. The first retrier that names an error counts."""
        if attempts < 1:
            raise BadFlow(f"retry with attempts={attempts}", hint="from 1 on: the first one counts")
        entry: dict[str, Any] = {
            "ErrorEquals": _error_names(on),
            "IntervalSeconds": interval_s,
            "MaxAttempts": attempts - 1,
            "BackoffRate": backoff,
        }
        if max_delay_s is not None:
            entry["MaxDelaySeconds"] = max_delay_s
        if jitter:
            entry["JitterStrategy"] = "FULL"
        self._fallible_fields("retry").setdefault("Retry", []).append(entry)
        return self

    def catch(self: S, on: Errors = ("States.ALL",), *, then: Fragment | Function[..., Any], result: Any = None) -> S:
        """Go on with `then` after these errors; `result` is where Error and Cause are put."""
        self._fallible_fields("catch")
        entry = {"ErrorEquals": _error_names(on), **_result_field(result)}
        self.catchers.append((entry, as_fragment(then).first))
        return self

    def timeout(self: S, seconds: int) -> S:
        return self._limit("TimeoutSeconds", seconds)

    def heartbeat(self: S, seconds: int) -> S:
        return self._limit("HeartbeatSeconds", seconds)

    def _limit(self: S, field: str, seconds: int) -> S:
        if self.kind != "Task":
            raise BadFlow(
                f"{self.preferred_name!r} is a {self.kind}; {field} belongs to a step", hint="give the workflow a timeout_s"
            )
        self.fields[field] = seconds
        return self

    def _fallible_fields(self, verb: str) -> dict[str, Any]:
        if self.kind not in ("Task", "Parallel", "Map"):
            raise BadFlow(f".{verb} of {self.preferred_name!r}, a {self.kind}", hint="steps, parallel and each can fail")
        return self.fields


class ChoiceBuilder(StateBuilder):
    """Builder of a Choice state: `choice().when(condition, then)...otherwise(then)`. What follows it follows every branch."""

    def __init__(self, preferred_name: str, fields: dict[str, Any]) -> None:
        super().__init__("Choice", preferred_name, fields)
        self.rules: list[tuple[dict[str, Any], Fragment]] = []
        self.default: Fragment | None = None

    def when(self, condition: Condition | Mapping[str, Any], then: Fragment | Function[..., Any]) -> ChoiceBuilder:
        rule = condition.rule if isinstance(condition, Condition) else dict(condition)
        self.rules.append((rule, as_fragment(then)))
        return self

    def otherwise(self, then: Fragment | Function[..., Any]) -> ChoiceBuilder:
        self.default = as_fragment(then)
        return self

    def open_ends(self) -> list[StateBuilder]:
        found = [end for _, then in self.rules for end in then.open_ends()]
        found += self.default.open_ends() if self.default is not None else [self]
        return list(dict.fromkeys(found))

    def successors(self) -> list[StateBuilder]:
        targets = [then.first for _, then in self.rules]
        return [*targets, *([self.default.first] if self.default else []), *([self.next] if self.next else [])]


# ------------------------------------------------------------------------------------------------------------------- pieces


def step(
    function: Function[..., Any] | str,
    *,
    name: str | None = None,
    input: str | Mapping[str, Any] | None = None,
    select: Mapping[str, Any] | None = None,
    result: Any = None,
    output: str | None = None,
    wait_for_token: bool = False,
) -> StateBuilder:
    """Task state: calls a function. `input` is a path or a template, `select` reshapes the result, `result` is where it goes.

    With `wait_for_token` it ends when its outcome is reported by the token in `$$.Task.Token`, which `input` hands out.
    """
    resource = function if isinstance(function, str) else function.name
    fields = {"Resource": resource + TOKEN_SUFFIX if wait_for_token else resource, **_data_fields(input, select, result, output)}
    bound = function if isinstance(function, Function) else None
    return StateBuilder("Task", name or _short_name(resource), fields, function=bound)


def pass_(
    value: Any = DISCARD, *, name: str = "pass", input: Any = None, result: Any = None, output: str | None = None
) -> StateBuilder:
    """Pass state: a constant, or what a template makes of the value."""
    fields = {} if value is DISCARD else {"Result": value}
    return StateBuilder("Pass", name, {**fields, **_data_fields(input, None, result, output)})


def wait(seconds: int | str | None = None, *, until: str | None = None, name: str = "wait") -> StateBuilder:
    """Wait state: for `seconds`, or until a timestamp; a path, beginning with $, finds either in the value."""
    if (seconds is None) == (until is None):
        raise BadFlow("wait needs either seconds or until")
    value, field = (seconds, "Seconds") if until is None else (until, "Timestamp")
    is_path = isinstance(value, str) and value.startswith("$")
    return StateBuilder("Wait", name, {f"{field}Path" if is_path else field: value})


def succeed(*, name: str = "succeed", output: str | None = None) -> StateBuilder:
    return StateBuilder("Succeed", name, {} if output is None else {"OutputPath": output})


def fail(error: str = "", cause: str = "", *, name: str = "fail") -> StateBuilder:
    """Fail state: the workflow fails. Paths, beginning with $, find error and cause in the value."""
    fields = {}
    for field, value in (("Error", error), ("Cause", cause)):
        if value:
            fields[f"{field}Path" if value.startswith("$") else field] = value
    return StateBuilder("Fail", name, fields)


def choice(*, name: str = "choice", input: str | None = None) -> ChoiceBuilder:
    return ChoiceBuilder(name, {} if input is None else {"InputPath": input})


def parallel(
    *branches: Fragment | Function[..., Any],
    wait_for: int | None = None,
    name: str = "parallel",
    input: str | Mapping[str, Any] | None = None,
    select: Mapping[str, Any] | None = None,
    result: Any = None,
    output: str | None = None,
) -> StateBuilder:
    """Parallel state: a list of the results of all branches; with `wait_for`, of the first so many, the rest is cancelled."""
    fields = _data_fields(input, select, result, output)
    if wait_for is not None:
        fields["WaitForNumBranches"] = wait_for
    return StateBuilder("Parallel", name, fields, branches=branches)


def each(
    body: Fragment | Function[..., Any],
    *,
    items: str | None = None,
    item: Mapping[str, Any] | None = None,
    max_concurrency: int = 0,
    tolerate: int | float | None = None,
    name: str = "each",
    input: str | None = None,
    select: Mapping[str, Any] | None = None,
    result: Any = None,
    output: str | None = None,
) -> StateBuilder:
    """Map state: `body` for every item of the list at `items`; `item` is a template for what it gets. A whole number in
    `tolerate` is how many items may fail, one below 1 which part of them."""
    fields = _data_fields(input, select, result, output)
    fields |= {} if items is None else {"ItemsPath": items}
    fields |= {} if item is None else {"ItemSelector": dict(item)}
    fields |= {"MaxConcurrency": max_concurrency} if max_concurrency else {}
    if isinstance(tolerate, float):
        fields["ToleratedFailurePercentage"] = tolerate * 100
    elif tolerate is not None:
        fields["ToleratedFailureCount"] = tolerate
    return StateBuilder("Map", name, fields, branches=[body])


def build(first: Fragment | Function[..., Any], *, comment: str = "", timeout_s: int = 0) -> dict[str, Any]:
    """The state machine document of a fragment."""
    from lamina.sdk.builder_document import document_of

    document = document_of(as_fragment(first).first)
    document |= {"Comment": comment} if comment else {}
    return document | ({"TimeoutSeconds": timeout_s} if timeout_s else {})


def workflow(
    name: str,
    first: Fragment | Function[..., Any],
    *,
    app: App,
    slo: SLO | str | None = None,
    timeout_s: int = 0,
    comment: str = "",
) -> StatesWorkflow:
    """Register what was built as a workflow of an app."""
    from lamina.sdk.builder_document import states_of
    from lamina.sdk.states_workflow import add_workflow

    begin = as_fragment(first).first
    functions = {state.function.name: state.function for state in states_of(begin) if state.function is not None}
    return add_workflow(app, build(begin, comment=comment, timeout_s=timeout_s), name, slo=slo, bind=functions)


def as_fragment(part: Fragment | Function[..., Any]) -> Fragment:
    if isinstance(part, Function):
        return step(part)
    if not isinstance(part, Fragment):
        raise BadFlow(f"{part!r} is no part of a workflow", hint="use step, choice, parallel, each, wait, pass_, succeed or fail")
    return part


# ----------------------------------------------------------------------------------------------------------- conditions

_NAMES = {"==": "Equals", "<": "LessThan", ">": "GreaterThan", "<=": "LessThanEquals", ">=": "GreaterThanEquals"}


class Condition:
    """A condition; `rule` is its choice rule in a document."""

    __slots__ = ("rule",)

    def __init__(self, rule: dict[str, Any]) -> None:
        self.rule = rule

    def __and__(self, other: Condition) -> Condition:
        return Condition({"And": [*self._parts("And"), *other._parts("And")]})

    def __or__(self, other: Condition) -> Condition:
        return Condition({"Or": [*self._parts("Or"), *other._parts("Or")]})

    def __invert__(self) -> Condition:
        return Condition({"Not": self.rule})

    def __bool__(self) -> bool:
        raise BadFlow("a condition is decided when the workflow runs", hint="combine conditions with & | ~, not and, or, not")

    def _parts(self, head: str) -> list[Any]:
        return list(self.rule[head]) if head in self.rule else [self.rule]


class Var(Comparisons[Condition]):
    """Left side of a comparison: a path into the value of the workflow."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def matches(self, pattern: str) -> Condition:
        """String match; `*` matches anything."""
        return self._test("StringMatches", pattern)

    def is_present(self) -> Condition:
        return self._test("IsPresent", True)

    def is_null(self) -> Condition:
        return self._test("IsNull", True)

    def is_numeric(self) -> Condition:
        return self._test("IsNumeric", True)

    def is_string(self) -> Condition:
        return self._test("IsString", True)

    def is_boolean(self) -> Condition:
        return self._test("IsBoolean", True)

    def is_timestamp(self) -> Condition:
        return self._test("IsTimestamp", True)

    def _test(self, name: str, value: Any) -> Condition:
        return Condition({"Variable": self.path, name: value})

    def _compare(self, sign: str, other: Any) -> Condition:
        """A comparison; its type follows from the type of the right side."""
        if sign == "!=":
            return ~self._compare("==", other)
        if isinstance(other, Var):
            kinds = ["Numeric", "String"] + (["Boolean"] if sign == "==" else [])
            return Condition({"Or": [{"Variable": self.path, f"{kind}{_NAMES[sign]}Path": other.path} for kind in kinds]})
        if other is None and sign == "==":
            return self.is_null()
        if isinstance(other, bool):
            if sign != "==":
                raise BadFlow(f"{self.path} {sign} {other}: truth is not ordered", hint="compare with ==")
            return self._test("BooleanEquals", other)
        if isinstance(other, int | float):
            return self._test(f"Numeric{_NAMES[sign]}", other)
        if isinstance(other, str):
            return self._test(f"String{_NAMES[sign]}", other)
        if isinstance(other, datetime):
            moment = other.astimezone(UTC).isoformat().replace("+00:00", "Z")
            return self._test(f"Timestamp{_NAMES[sign]}", moment)
        raise BadFlow(
            f"{self.path} cannot be compared with a {type(other).__name__}", hint="use a text, a number, a bool or a datetime"
        )


def var(path: str) -> Var:
    """A path to compare: `var("$.score")`."""
    return Var(path)


# -------------------------------------------------------------------------------------------------------------------- parts


def _data_fields(
    input: str | Mapping[str, Any] | None, select: Mapping[str, Any] | None, result: Any, output: str | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if isinstance(input, str):
        fields["InputPath"] = input
    elif input is not None:
        fields["Parameters"] = dict(input)
    if select is not None:
        fields["ResultSelector"] = dict(select)
    fields |= _result_field(result)
    return fields if output is None else {**fields, "OutputPath": output}


def _result_field(result: Any) -> dict[str, Any]:
    if result is DISCARD:
        return {"ResultPath": None}
    return {} if result is None else {"ResultPath": result}


def _error_names(on: Errors) -> list[str]:
    if isinstance(on, str) or not isinstance(on, Iterable):
        raise BadFlow(f"on={on!r}: give a list of error names or classes", hint='on=["States.Timeout", ValueError]')
    return [error if isinstance(error, str) else error.__name__ for error in on]


def _short_name(resource: str) -> str:
    """Default name of a state: the last part of the resource it calls."""
    return re.split(r"[/:]", resource)[-1] or resource
