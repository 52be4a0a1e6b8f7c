"""States of a workflow that was written in Python (`def`, `async def`): the same steps, as a document of the States Language.

The value that travels through the states has the inputs of the workflow (`$.input`), and the results of its steps by their names
(`$.steps`). Steps that wait for the same ones run in a Parallel state; what states cannot put side by side runs in turn, with the
same results. Values that a template cannot make (comparisons, defaults, lists of objects) are made by Pass and Choice states.

What the language has no word for is refused with the reason: `NotInStates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina.core.workflow.error_policy import ErrorPolicy
from lamina.core.workflow.flow import Choice, Each, Fail, Flow, Node, Parallel, Pass, Succeed, Task, Wait
from lamina.errors import BadFlow
from lamina.expr import Expr, leaf_of

Control = tuple[tuple[str, int], ...]
"""Branches that a node is in, from the outside in: the node that chose, and the number of the branch."""

State = dict[str, Any]


class NotInStates(BadFlow):
    """A workflow, or a part of one, that the States Language cannot say."""


def export_flow(flow: Flow, params_of: Callable[[str], Sequence[str]]) -> dict[str, Any]:
    """The document of a flow that was traced or read from Python; `params_of` tells the parameters of a function."""
    machine = _Machine(flow, _Names(), params_of)
    machine.add("begin", {"Type": "Pass", "Parameters": {"input.$": "$", "steps": {}}})
    machine.add_flow(flow)
    machine.add_result(flow.data["result"])
    document = machine.document()
    if flow.timeout_us:
        document["TimeoutSeconds"] = _seconds(flow.timeout_us, flow.name, "its time limit")
    return document


class _Names:
    """Names of states, unique in the whole document."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def claim(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._used:
            count += 1
            name = f"{wanted}-{count}"
        self._used.add(name)
        return name


@dataclass(slots=True)
class _Machine:
    """A machine that grows at its open ends: states that have no successor yet."""

    flow: Flow
    names: _Names
    params_of: Callable[[str], Sequence[str]]
    places: dict[str, str] = field(default_factory=dict)  #: paths of the results of steps, by step
    optional: set[str] = field(default_factory=set)  #: steps that may have no value: variables that only some branches have set
    states: dict[str, State] = field(default_factory=dict)
    open_ends: list[Callable[[str], None]] = field(default_factory=list)
    start: str = ""

    # ------------------------------------------------------------------ states

    def add(self, wanted: str, state: State) -> str:
        """Add a state behind all open ends; its own end is open then, unless it has none."""
        name = self.names.claim(wanted)
        if not self.states:
            self.start = name
        for link in self.open_ends:
            link(name)
        self.states[name] = state
        self.open_ends = [] if state["Type"] in ("Fail", "Succeed", "Choice") else [lambda after: state.update(Next=after)]
        return name

    def document(self) -> dict[str, Any]:
        for state in self.states.values():
            if state["Type"] not in ("Fail", "Succeed", "Choice") and "Next" not in state:
                state["End"] = True
        return {"StartAt": self.start, "States": self.states}

    def inner(self, flow: Flow) -> _Machine:
        return _Machine(flow, self.names, self.params_of, dict(self.places), set(self.optional))

    def choose(self, wanted: str, branches: Sequence[tuple[State | None, Callable[[], None]]]) -> None:
        """A Choice: each branch has a rule, the last one none; `build` adds its states. All of them go on behind it."""
        choice: State = {"Type": "Choice", "Choices": []}
        self.add(wanted, choice)
        ends: list[Callable[[str], None]] = []
        for rule, build in branches:
            if rule is None:
                self.open_ends = [lambda after: choice.update(Default=after)]
            else:
                choice["Choices"].append(rule)
                self.open_ends = [lambda after, rule=rule: rule.update(Next=after)]  # type: ignore[misc]
            build()
            ends += self.open_ends
        self.open_ends = ends

    # ------------------------------------------------------------------- flows

    def add_flow(self, flow: Flow) -> None:
        self._add_region(_controls(flow), ())

    def _add_region(self, controls: dict[str, Control], here: Control) -> None:
        """Add the nodes of one region, each behind those it waits for; nodes of inner regions go with the node that chooses."""
        depth = len(here)
        own = [name for name, control in controls.items() if control == here]
        owner_of = {
            name: name if control == here else control[depth][0]
            for name, control in controls.items()
            if control[:depth] == here and len(control) >= depth
        }
        waits: dict[str, set[str]] = {name: set() for name in own}
        for name, owner in owner_of.items():
            for later in _successors(self.flow.nodes[name]):
                target = owner_of.get(later)
                if target is not None and target != owner:
                    waits[target].add(owner)
        done: set[str] = set()
        while len(done) < len(own):
            ready = [name for name in own if name not in done and waits[name] <= done]
            if not ready:
                raise NotInStates(
                    f"workflow {self.flow.name!r}: steps that wait for each other", hint="export it without the loop"
                )
            light = [name for name in ready if isinstance(self.flow.nodes[name], Pass)]
            heavy = [name for name in ready if _can_be_branch(self.flow.nodes[name])]
            if light:
                chosen = light[:1]
            elif len(heavy) > 1:
                chosen = heavy
            else:
                chosen = heavy or ready[:1]
            if len(chosen) > 1:
                self._add_together(chosen)
            else:
                self._add_node(self.flow.nodes[chosen[0]], controls, here)
            done.update(chosen)

    def _add_together(self, names: Sequence[str]) -> None:
        """Steps that wait for nothing of each other, in a Parallel state."""
        branches = []
        for name in names:
            branch = self.inner(self.flow)
            branch._add_node(self.flow.nodes[name], {name: ()}, ())
            branch.add_result(["node", name])
            branches.append(branch.document())
        group = self.names.claim(" and ".join(names))
        selector = {f"{index}.$": f"$[{index}]" for index in range(len(names))}
        state = {"Type": "Parallel", "Branches": branches, "ResultSelector": selector, "ResultPath": _member("$.steps", group)}
        self.names._used.discard(group)
        self.add(group, state)
        for index, name in enumerate(names):
            self.places[name] = _member(_member("$.steps", group), str(index))

    def _add_node(self, node: Node, controls: dict[str, Control], here: Control) -> None:
        match node:
            case Task():
                self._add_task(node)
            case Pass():
                if node.data and "value" in node.data and node.data["value"] != ["value", None]:
                    self._set(node.name, node.data["value"])
            case Wait():
                self.add(node.name, {"Type": "Wait", "Seconds": _seconds(node.duration_us, node.name, "sleep")})
            case Fail():
                self.add(node.name, {"Type": "Fail", "Error": node.error, "Cause": node.cause})
            case Choice():
                branches = [lambda at=at: self._add_region(controls, (*here, (node.name, at))) for at in (0, 1)]
                self.choose(node.name, [(self.rule(node.data["rules"][0]), branches[0]), (None, branches[1])])
            case Each() if node.data.get("block") is not None:
                self._add_block(node, controls, here)
            case Each():
                self._add_map(node)
            case Parallel():
                raise NotInStates(
                    f"{node.name}: gather(wait_for={node.wait_for}): states wait for all branches", hint="gather without wait_for"
                )
            case Succeed():
                raise NotInStates(f"{node.name}: it ends early", hint="return at the end")

    def _add_task(self, node: Task) -> None:
        if node.waits_for_report:
            raise NotInStates(
                f"{node.name}: a step that waits for a report has no portable form", hint="write it with the builder: step(...)"
            )
        state: State = {"Type": "Task", "Resource": node.function}
        args = node.data["args"]
        if len(self.params_of(node.function)) == 1 and args:  # what goes in is its value, not an object with its name
            state["InputPath"] = self.path(next(iter(args.values())))
        else:
            state["Parameters"] = self.template(args)
        state.update(_policy_fields(node.name, node.error_policy))
        self._add_result_state(node.name, state)

    def _add_map(self, node: Each) -> None:
        body = self.inner(node.body)
        body.add_flow(node.body)
        body.add_result(node.body.data["result"])
        if node.tolerated_failures is not None or node.tolerated_failure_share is not None:
            raise NotInStates(
                f"{node.name}: failed items that are tolerated are None here, and missing there", hint="leave tolerate= out"
            )
        selector = {"input.$": "$.input", "steps.$": "$.steps", "item.$": "$$.Map.Item.Value"}
        state: State = {"Type": "Map", "ItemsPath": self.path(node.data["items"]), "ItemSelector": selector}
        if node.max_concurrency:
            state["MaxConcurrency"] = node.max_concurrency
        state.update(ItemProcessor=body.document(), **_policy_fields(node.name, node.error_policy))
        self._add_result_state(node.name, state)

    def _add_block(self, node: Each, controls: dict[str, Control], here: Control) -> None:
        """A `try` block: a Parallel of one branch, whose steps are seen behind it; handlers are what its catchers go to."""
        policy = node.error_policy or ErrorPolicy()
        if policy.timeout_us or policy.heartbeat_us:
            raise NotInStates(
                f"{node.name}: a time limit around several steps; only tasks and whole machines have one",
                hint="give the steps .timeout(...)",
            )
        body = self.inner(node.body)
        body.add_flow(node.body)
        body.add("steps", {"Type": "Pass", "OutputPath": "$.steps"})
        state: State = {"Type": "Parallel", "Branches": [body.document()], "ResultPath": "$.block"}
        state.update(_policy_fields(node.name, policy))
        self.add(node.name, state)
        self.places.update(body.places)
        self.optional |= body.optional
        success = self.open_ends
        ends: list[Callable[[str], None]] = []
        if policy.catch:
            state["Catch"] = []
            for number, catcher in enumerate(policy.catch):
                caught = next((name for name in catcher.next if name.startswith("caught")), "caught")
                entry: State = {"ErrorEquals": list(catcher.errors), "ResultPath": _member("$.steps", caught)}
                state["Catch"].append(entry)
                self.open_ends = [lambda after, entry=entry: entry.update(Next=after)]  # type: ignore[misc]
                self.add(caught, {"Type": "Pass"})
                self._add_region(controls, (*here, (node.name, number)))
                ends += self.open_ends
        self.open_ends = success
        self.add(f"{node.name} done", {"Type": "Pass", "InputPath": "$.block[0]", "ResultPath": "$.steps"})
        if policy.catch:
            self._add_region(controls, (*here, (node.name, len(policy.catch))))
        self.open_ends = ends + self.open_ends

    def _add_result_state(self, name: str, state: State) -> None:
        state["ResultPath"] = self.places[name] = _member("$.steps", name)
        self.add(name, state)

    # ------------------------------------------------------------------- values

    def add_result(self, expr: Expr) -> None:
        """The last state: what comes out is the value of an expression."""
        self.add("result", _pass_of(self, expr))

    def _set(self, name: str, expr: Expr) -> None:
        """States that put the value of an expression where results of steps are."""
        while expr[0] == "when":  # its branch was taken, where this runs
            expr = expr[2]
        place = self.places[name] = _member("$.steps", name)
        if expr[0] == "first":
            self._set_first(name, expr[1:], place)
        elif expr[0] == "node" and expr[1] in self.optional:
            self._set_first(name, [expr], place)
        elif _is_condition(expr):
            made = [lambda value=value: self._put(name, ["value", value], place) for value in (True, False)]
            self.choose(f"{name}?", [(self.rule(expr), made[0]), (None, made[1])])
        else:
            self._put(name, expr, place)

    def _put(self, name: str, expr: Expr, place: str) -> None:
        self.add(name, {**_pass_of(self, expr), "ResultPath": place})

    def _set_first(self, name: str, choices: Sequence[Expr], place: str) -> None:
        """The first value that is there: of the branch that was taken, or an input before its default."""
        rules: list[tuple[State | None, Callable[[], None]]] = []
        last: Callable[[], None] = lambda: None  # noqa: E731
        comes_before = sum(name in _successors(node) for node in self.flow.nodes.values())
        is_sure = len(choices) >= comes_before and all(expr[1] not in self.optional for expr in choices if expr[0] == "node")
        if is_sure or choices[-1][0] == "value":
            *choices, sure = choices
            last = lambda: self._put(name, sure, place)  # noqa: E731
        else:
            self.optional.add(name)
        for expr in choices:
            if leaf_of(expr) is None:
                raise NotInStates(f"{name}: whether a value made of others is there", hint="give it a name by a step of its own")
            present: State = {"Variable": self._leaf(expr), "IsPresent": True}
            rules.append((present, lambda expr=expr: self._put(name, expr, place)))  # type: ignore[misc]
        if rules:
            self.choose(f"{name}?", [*rules, (None, last)])
        else:
            last()

    def path(self, expr: Expr) -> str:
        """Path of a value; states that make it, if it has none yet."""
        if leaf_of(expr) is not None:
            return self._leaf(expr)
        name = self.names.claim("value")
        self.names._used.discard(name)
        self._set(name, expr)
        return self.places[name]

    def _leaf(self, expr: Expr) -> str:
        if expr[0] == "input":
            return _walk(_member("$.input", expr[1]), expr[2:])
        if expr[0] == "item":
            return _walk("$.item", expr[1:])
        return _walk(self.places.get(expr[1], _member("$.steps", expr[1])), expr[2:])

    def template(self, parts: dict[str, Expr]) -> dict[str, Any]:
        """A payload template that makes an object of these."""
        made: dict[str, Any] = {}
        for key, expr in parts.items():
            if key.endswith(".$"):
                raise NotInStates(f"a key {key!r}: what ends in .$ is a path there", hint="rename it")
            match expr[0]:
                case "value":
                    made[key] = _constant(expr[1])
                case "dict":
                    made[key] = self.template(expr[1])
                case "list":
                    made[f"{key}.$"] = self._array(expr)
                case _:
                    made[f"{key}.$"] = self.path(expr)
        return made

    def _array(self, expr: Expr) -> str:
        return f"States.Array({', '.join(self._argument(inner) for inner in expr[1:])})"

    def _argument(self, expr: Expr) -> str:
        """An argument of an intrinsic function."""
        if expr[0] == "list":
            return self._array(expr)
        if expr[0] == "value" and isinstance(expr[1], str | int | float | bool | None):
            return _literal(expr[1])
        return self.path(expr)

    # --------------------------------------------------------------- conditions

    def rule(self, expr: Expr) -> State:
        """A condition as a Choice rule."""
        match expr[0]:
            case "and" | "or":
                return {expr[0].capitalize(): [self.rule(inner) for inner in expr[1:]]}
            case "not":
                return {"Not": self.rule(expr[1])}
            case "!=":
                return {"Not": self.rule(["==", *expr[1:]])}
            case "<" | "<=" | ">" | ">=" | "==":
                return self._comparison(expr[0], expr[1], expr[2])
            case "value":
                return {"Variable": "$.input", "IsPresent": bool(expr[1])}
        raise NotInStates("the truth of a value: states compare", hint="write x == True, x > 0 or x != '' instead of x")

    def _comparison(self, sign: str, left: Expr, right: Expr) -> State:
        if left[0] == "value":
            if right[0] == "value":
                raise NotInStates(f"{left[1]!r} {sign} {right[1]!r} compares two constants", hint="leave it out")
            return self._comparison(_MIRRORED[sign], right, left)
        variable = self.path(left)
        word = _COMPARES[sign]
        if right[0] != "value":
            other = self.path(right)
            kinds = ("Numeric", "String", "Boolean") if sign == "==" else ("Numeric", "String")
            return {"Or": [_both(kind, variable, other, word) for kind in kinds]}
        given = right[1]
        if given is None and sign == "==":
            return {"Variable": variable, "IsNull": True}
        if isinstance(given, bool):
            kind = "Boolean"
        elif isinstance(given, int | float):
            kind = "Numeric"
        elif isinstance(given, str):
            kind = "String"
        else:
            kind = ""
        if not kind or (kind == "Boolean" and sign != "=="):
            raise NotInStates(f"{sign} {given!r}: states compare numbers, text, true and false", hint="compare in a function")
        return {"Variable": variable, f"{kind}{word}": given}


_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}
_COMPARES = {"<": "LessThan", "<=": "LessThanEquals", ">": "GreaterThan", ">=": "GreaterThanEquals", "==": "Equals"}


def _both(kind: str, left: str, right: str, word: str) -> State:
    """A comparison of two values of one kind; of values of another it is false."""
    is_kind = f"Is{kind}"
    return {
        "And": [
            {"Variable": left, is_kind: True},
            {"Variable": right, is_kind: True},
            {"Variable": left, f"{kind}{word}Path": right},
        ]
    }


def _is_condition(expr: Expr) -> bool:
    return expr[0] in ("and", "or", "not", "!=", *_COMPARES)


def _pass_of(machine: _Machine, expr: Expr) -> State:
    """A Pass state that makes a value."""
    while expr[0] == "when":
        expr = expr[2]
    match expr[0]:
        case "value":
            return {"Type": "Pass", "Result": _constant(expr[1])}
        case "dict":
            return {"Type": "Pass", "Parameters": machine.template(expr[1])}
        case "list":
            name = machine.names.claim("list")
            machine.places[name] = _member("$.steps", name)
            machine.names._used.discard(name)
            machine.add(name, {"Type": "Pass", "Parameters": {"of.$": machine._array(expr)}, "ResultPath": machine.places[name]})
            return {"Type": "Pass", "InputPath": _member(machine.places[name], "of")}
    return {"Type": "Pass", "InputPath": machine.path(expr)}


def _controls(flow: Flow) -> dict[str, Control]:
    """The branches that each node is in. Branches that end in one node are joined there."""
    found: dict[str, Control] = dict.fromkeys(flow.start, ())
    before: dict[str, list[Control]] = {}
    pending = list(flow.start)
    waits: dict[str, int] = {}
    for node in flow.nodes.values():
        for later in _successors(node):
            waits[later] = waits.get(later, 0) + 1
    while pending:
        name = pending.pop(0)
        node, here = flow.nodes[name], found[name]
        for number, names in enumerate(_branches(node)):
            for later in names:
                control = here if number < 0 else (*here, (name, number))
                before.setdefault(later, []).append(control)
        for later in node.next if not _branches(node) else ():
            before.setdefault(later, []).append(here)
        for later in _successors(node):
            if len(before[later]) == waits[later] and later not in found:
                found[later] = _joined(before[later], flow.nodes[later].tokens_needed)
                pending.append(later)
    if len(found) != len(flow.nodes):
        raise NotInStates(f"workflow {flow.name!r}: steps that wait for each other", hint="export it without the loop")
    return {name: found[name] for name in flow.nodes}


def _joined(controls: list[Control], tokens_needed: int) -> Control:
    """Of a node behind these: the innermost, if it waits for all of them; what they have in common, if one is enough."""
    if tokens_needed >= len(controls):
        return max(controls, key=len)
    common: list[tuple[str, int]] = []
    for parts in zip(*controls, strict=False):
        if any(part != parts[0] for part in parts):
            break
        common.append(parts[0])
    return tuple(common)


def _branches(node: Node) -> list[tuple[str, ...]]:
    """Nodes that begin the branches of a node that chooses: a choice, or a block with handlers."""
    if isinstance(node, Choice):
        return list(node.branches)
    if isinstance(node, Each) and node.error_policy is not None and node.error_policy.catch:
        return [*(catcher.next for catcher in node.error_policy.catch), node.next]
    return []


def _successors(node: Node) -> Iterable[str]:
    branches = _branches(node)
    return [name for names in branches for name in names] if branches else node.next


def _can_be_branch(node: Node) -> bool:
    return isinstance(node, Task | Wait) or (isinstance(node, Each) and node.data.get("block") is None)


def _policy_fields(name: str, policy: ErrorPolicy | None) -> State:
    if policy is None:
        return {}
    fields: State = {}
    if policy.timeout_us:
        fields["TimeoutSeconds"] = _seconds(policy.timeout_us, name, "timeout")
    if policy.heartbeat_us:
        fields["HeartbeatSeconds"] = _seconds(policy.heartbeat_us, name, "heartbeat")
    if policy.retry:
        fields["Retry"] = []
        for one in policy.retry:
            retrier: State = {"ErrorEquals": list(one.errors), "IntervalSeconds": _seconds(one.interval_us, name, "interval_s")}
            retrier.update(MaxAttempts=one.attempts, BackoffRate=one.backoff)
            if one.max_delay_us:
                retrier["MaxDelaySeconds"] = _seconds(one.max_delay_us, name, "max_delay_s")
            if one.jitter:
                retrier["JitterStrategy"] = "FULL"
            fields["Retry"].append(retrier)
    return fields


def _seconds(time_us: int, name: str, what: str) -> int:
    if time_us % 1_000_000 or not time_us:
        raise NotInStates(f"{name}: {what} of {time_us / 1e6:g} s: states have whole seconds", hint="round it")
    return time_us // 1_000_000


def _constant(value: Any) -> Any:
    """A constant as a template has it. Raises for what a document cannot hold, or would take for a path."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.endswith(".$"):
                raise NotInStates(f"a key {key!r}: keys are text there, and what ends in .$ is a path", hint="rename it")
        return {key: _constant(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_constant(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise NotInStates(f"a constant of type {type(value).__name__}: a document holds JSON", hint="make it in a function")


def _literal(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("{", "\\{").replace("}", "\\}")
        return f"'{escaped}'"
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value)


def _member(path: str, key: str) -> str:
    if key.isidentifier() and key.isascii():
        return f"{path}.{key}"
    escaped = key.replace("\\", "\\\\").replace("'", "\\'")
    return f"{path}['{escaped}']"


def _walk(path: str, keys: Sequence[Any]) -> str:
    for key in keys:
        if isinstance(key, int) and key < 0:
            raise NotInStates(f"[{key}]: states count from the front", hint="take the item in a function")
        path = f"{path}[{key}]" if isinstance(key, int) else _member(path, key)
    return path
