"""Recorder of `async def` workflows: the same steps and regions as traced ones, and an order among them.

`await` means what it means in Python: what comes after it starts when it has ended; `gather` starts several at once. Branches
(`if`, `except`) are regions of the flow they leave, and join again in a step that takes whichever comes. What
`try` or `timeout` surrounds is a block: an each of one item, so that a failure in it, or its end, is one event. Its
values are seen from outside by the names of its steps, and are never copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lamina.core.workflow.error_policy import Catcher, ErrorPolicy
from lamina.core.workflow.flow import Each, Fail, Flow, Node, Parallel, Wait
from lamina.errors import BadFlow, BadValue
from lamina.expr import Expr
from lamina.sdk.binding import bind_arguments
from lamina.sdk.symbols import Symbol, UnawaitedCall, form_of
from lamina.sdk.user_errors import user_place
from lamina.sdk.workflow_tracing import NO_LIMITS, EachLimits, TracedRegion, TracedStep, WorkflowTracer
from lamina.types import Slo

MAX_STEPS = 5_000
"""Of one workflow: ways that part and return at different places are recorded twice, and must end some time."""

Errors = tuple[str, ...]

_UNSET: Final = object()
"""A variable that a branch has not set."""


@dataclass(slots=True)
class BlockOutcome:
    """Outcome of a block of code: it goes on (with these variables), returns a value, or raises."""

    status: Literal["on", "return", "raise"] = "on"
    value: Any = None
    env: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class BranchPath:
    """One of several branches. `guard` is true, or at least there, only where it was taken; the last of several needs none."""

    region: TracedRegion
    guard: Expr | None
    after: dict[TracedStep, None]
    outcome: BlockOutcome


Body = Callable[[], BlockOutcome]


class Recorder(WorkflowTracer):
    """Tracer of awaited calls: they are recorded where they are awaited, except in a plain `def` workflow inside (`eager`)."""

    eager = False

    def task(self, function: Any, inputs: dict[str, Any], policy: ErrorPolicy | None = None, token: str = "") -> Any:
        def make() -> Symbol:
            return self._then(WorkflowTracer.task(self, function, inputs, policy, token))

        return make() if self.eager else UnawaitedCall(f"{function.name}(...)", make)

    def callback(self, function: Any, args: Any, kwargs: Any, policy: ErrorPolicy, token: str) -> Any:
        """Record a step that ends when its outcome is reported."""
        rest = tuple(param for param in function.params if param.name != token)

        def make() -> Symbol:
            try:
                inputs = bind_arguments(rest, args, kwargs)
            except BadValue as error:
                raise BadFlow(f"{user_place()}: {function.name}(...): {error.message}", hint=error.hint) from None
            return self._then(WorkflowTracer.task(self, function, inputs, policy, token))

        return make() if self.eager else UnawaitedCall(f"callback({function.name}, ...)", make)

    def each(self, body: Callable[[Any], Any], items: Any, expect: float, limits: EachLimits = NO_LIMITS) -> Any:
        def one(item: Any) -> Any:
            return awaited(body(item))

        def make() -> Symbol:
            return self._then(WorkflowTracer.each(self, one, items, expect, limits))

        return make() if self.eager else UnawaitedCall("each(...)", make)

    def when(self, condition: Symbol, branches: Any) -> Any:
        found = {name: (lambda branch=branch: awaited(branch())) for name, branch in branches.items()}
        return self._then(WorkflowTracer.when(self, condition, found))

    def record_plain(self, target: Callable[[], Any]) -> Any:
        """Record a plain def workflow inside this one: steps run as their values arrive; what follows waits for all of them."""
        known, eager, self.eager = len(self._region.steps), self.eager, True
        try:
            result = target()
        finally:
            self.eager = eager
        made = [step for step in self._region.steps[known:] if not step.inner]  # tokens of a choice go to its branches alone
        self._after = dict.fromkeys(made) or self._after
        return result

    def _then(self, symbol: Symbol) -> Symbol:
        """Make the next step wait for this one."""
        if not self.eager:
            self._after = {symbol.form[1]: None}
        return symbol

    # ---------------------------------------------------------------- several at once

    def gather(self, parts: list[Any], wait_for: int | None) -> Any:
        if wait_for is not None:
            return self._quorum(parts, wait_for)
        before, after, results = self._after, dict[TracedStep, None](), []
        for part in parts:
            self._after = dict(before)
            results.append(awaited(part))
            after.update(self._after)
        self._after = after or before
        return results

    def _quorum(self, parts: list[Any], wait_for: int) -> Symbol:
        flows: list[Flow] = []

        def make(step: TracedStep, next: tuple[str, ...], needs: int) -> Node:
            return Parallel(step.name, tuple(flows), next, needs, wait_for, step.data, None, resolves_data=True)

        step = self._step("gather", make)
        for number, part in enumerate(parts, 1):
            region = TracedRegion(step)
            result = self._in_region(region, lambda part=part: awaited(part))  # type: ignore[misc]
            flows.append(self._flow(region, f"{step.name}.{number}", Slo(), result))
        return self._then(Symbol(["node", step]))

    # ------------------------------------------------------------------- one by itself

    def wait(self, duration_us: int) -> None:
        self._after = {self._step("sleep", lambda step, next, needs: Wait(step.name, next, needs, duration_us)): None}

    def fail(self, error: str, cause: str) -> None:
        self._step("raise", lambda step, next, needs: Fail(step.name, error, cause, needs))

    # ------------------------------------------------------------------ branches

    def choose(self, condition: Symbol, bodies: tuple[Body, Body], names: Iterable[str]) -> BlockOutcome:
        """Record a choice of two branches; `names` are the variables that are read later."""
        step, guards = self._choice("if", condition)
        return self._join(
            step, [self._path(self._branch(step), guard, body) for guard, body in zip(guards, bodies, strict=True)], names
        )

    def block(
        self,
        name: str,
        policy: ErrorPolicy,
        body: Body,
        names: Iterable[str],
        handlers: list[tuple[Errors, Callable[[Symbol], BlockOutcome]]],
        then: Callable[[BlockOutcome], BlockOutcome],
        catches: Iterable[str] = (),
    ) -> BlockOutcome:
        """Record a try or timeout block: `body` as one unit that may fail or take too long. A handler goes on after errors of its
        names, with what was said about them; `then` goes on after the body. `catches` says how each handler was written."""
        names = list(names)

        def make(step: TracedStep, next: tuple[str, ...], needs: int) -> Node:
            if not handlers:
                return Each(step.name, inner, next, needs, 1.0, step.data, policy)
            caught = zip((errors for errors, _ in handlers), step.inner, strict=False)
            catch = tuple(Catcher(errors, region.entry_steps()) for errors, region in caught)
            handled = ErrorPolicy(policy.retry, catch, policy.timeout_us, policy.heartbeat_us)
            return Each(step.name, inner, step.inner[-1].entry_steps(), needs, 1.0, step.data, handled, resolves_data=True)

        step = self._step(name, make)
        step.data["items"] = ["value", [None]]
        if handlers:
            step.data["catches"] = list(catches)
        region = TracedRegion(step)
        outcome: BlockOutcome = self._in_region(region, body)
        shown = self._outward(step, region, outcome, names)
        inner = self._flow(region, step.name, Slo(), None)
        if outcome.status == "raise" and not handlers:
            return outcome
        if not handlers:
            self._after = {step: None}
            return then(shown)
        paths = [self._caught(step, handle) for _, handle in handlers]
        paths.append(self._path(self._branch(step), None, (lambda: shown) if outcome.status == "raise" else lambda: then(shown)))
        return self._join(step, paths, names)

    def _outward(self, step: TracedStep, region: TracedRegion, outcome: BlockOutcome, names: list[str]) -> BlockOutcome:
        """The outcome of a block, as it is seen from outside."""
        shows: list[str] = []
        step.data["block"] = shows

        def outward(name: str, value: Any) -> Any:
            form = form_of(value) if _holds_symbol(value) else ["value", None]
            if form[0] == "value":
                return value
            end = self._pass(name, form, region)
            shows.append(end.name)
            return Symbol(["inside", step, end])

        env = {name: outward(name, value) if name in names else value for name, value in outcome.env.items()}
        value = outward("result", outcome.value) if outcome.status == "return" else None
        return BlockOutcome(outcome.status, value, env)

    def _caught(self, owner: TracedStep, handle: Callable[[Symbol], BlockOutcome]) -> BranchPath:
        region = self._branch(owner)
        caught = self._pass("caught", None, region)  # what was said about the error: there only if it was caught

        def body() -> BlockOutcome:
            self._after = {caught: None}
            return handle(Symbol(["node", caught]))

        return self._path(region, ["node", caught], body)

    def _path(self, region: TracedRegion, guard: Expr | None, body: Body) -> BranchPath:
        def run() -> tuple[BlockOutcome, dict[TracedStep, None]]:
            outcome = body()
            return outcome, self._after

        outcome, after = self._in_region(region, run)
        if len(self._used) > MAX_STEPS:
            raise BadFlow(
                f"{user_place()}: workflow {self.workflow!r} has more than {MAX_STEPS} steps",
                hint="returns inside of nested ifs repeat what follows them; return at the end",
            )
        return BranchPath(region, guard, after, outcome)

    def _join(self, owner: TracedStep, paths: list[BranchPath], names: Iterable[str]) -> BlockOutcome:
        """Join the branches again, except those that raise."""
        going = [path for path in paths if path.outcome.status != "raise"]
        for path in paths:
            if path.outcome.status == "raise" and not path.region.steps:
                self._pass("end", ["value", None], path.region)
        if not going:
            return BlockOutcome("raise")
        if len({path.outcome.status for path in going}) > 1:
            raise BadFlow(
                f"{user_place()}: some ways return here and others go on",
                hint="inside of try and timeout return on every way or on none; or keep the value and return it afterwards",
            )
        ends = []
        for path in going:
            end = self._pass("end", ["value", None], path.region)
            end.waits_for.update(path.after)
            ends.append(end)
        self._after = {self._merge_step("joined", ends, owner.region, has_value=False): None}
        if going[0].outcome.status == "return":
            return BlockOutcome("return", self._merged_value(owner, "result", [(path, path.outcome.value) for path in going]))
        env = dict(going[-1].outcome.env)
        for name in names:
            if any(name in path.outcome.env for path in going):
                env[name] = self._merged_value(owner, name, [(path, path.outcome.env.get(name, _UNSET)) for path in going])
        return BlockOutcome(env=env)

    def _merged_value(self, owner: TracedStep, name: str, found: list[tuple[BranchPath, Any]]) -> Any:
        """The value of a variable after branches have joined."""
        first = found[0][1]
        if all(value is first for _, value in found) and len(found) > 1:
            return first
        ends, unset = list[TracedStep](), list[TracedStep]()
        for path, value in found:
            if value is _UNSET:  # what comes later must not wait for it in vain
                unset.append(self._pass(name, None, path.region))
                unset[-1].waits_for.update(path.after)
                continue
            form = form_of(value)
            ends.append(self._pass(name, form if path.guard is None else ["when", path.guard, form], path.region))
        merged = self._merge_step(name, ends, owner.region)
        merged.waits_for.update(dict.fromkeys(unset))
        return Symbol(["node", merged])


def awaited(part: Any) -> Any:
    """The result of something awaited."""
    return part.make() if isinstance(part, UnawaitedCall) else part


def _holds_symbol(value: Any) -> bool:
    """Whether it is, or holds, the result of a step: other things are known when the workflow is recorded."""
    if isinstance(value, list | tuple):
        return any(_holds_symbol(one) for one in value)
    if isinstance(value, dict):
        return any(_holds_symbol(one) for one in value.values())
    return isinstance(value, Symbol | UnawaitedCall)
