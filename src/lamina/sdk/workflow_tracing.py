"""Workflow tracing: a workflow function, run once with symbols for values, becomes a flow.

Every call of a decorated function on the way is a step, and a step waits for the steps whose results it uses. Steps
live in regions: the workflow itself, the body of an `each`, one branch of a `when`. A region runs as a whole or not at
all, so whatever a step inside uses from outside is waited for by the `each` or `when` that owns the region: tokens
never cross a border, values may. A value never leaves the region it was made in, except as the result of that region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from lamina.core.workflow.error_policy import ErrorPolicy
from lamina.core.workflow.flow import Choice, Each, Flow, Node, Pass, Task
from lamina.errors import BadFlow, BadValue
from lamina.expr import Expr
from lamina.sdk.annotation_conversion import field_hint
from lamina.sdk.binding import NOTHING, bind_arguments
from lamina.sdk.symbols import Symbol, form_of
from lamina.sdk.user_errors import user_place
from lamina.types import Slo

if TYPE_CHECKING:
    from lamina.sdk.function import Function


@dataclass(frozen=True, slots=True)
class InProcess:
    """Mode of a workflow that is computed in process. In an `async def` one, a call gives something to await."""

    mocks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class EachLimits:
    """Limits of an each: how many items run at once, and how many (or which part of them) may fail."""

    max_concurrency: int = 0
    tolerate: int | float | None = None


NO_LIMITS = EachLimits()


@dataclass(slots=True, eq=False)
class TracedRegion:
    """Region of steps that run as a whole. `owner` is the each or when that decides whether it runs; the workflow has none."""

    owner: TracedStep | None = None
    is_scope: bool = True  #: a flow of its own, with items; a branch shares the flow around it
    steps: list[TracedStep] = field(default_factory=list)
    item_step: TracedStep | None = None  #: passes the item on to bodies inside this one

    @property
    def scope(self) -> TracedRegion:
        region = self
        while not region.is_scope:
            assert region.owner is not None
            region = region.owner.region
        return region

    def entry_steps(self) -> tuple[str, ...]:
        """Names of the steps that wait for no other in this region."""
        return tuple(step.name for step in self.steps if not step.waits_for)


@dataclass(slots=True, eq=False)
class TracedStep:
    """Step being traced: `make` gets the names of its successors and the tokens it needs, and gives the node."""

    name: str
    region: TracedRegion
    make: Callable[[TracedStep, tuple[str, ...], int], Node]
    data: dict[str, Any] = field(default_factory=dict)
    waits_for: dict[TracedStep, None] = field(default_factory=dict)
    inner: list[TracedRegion] = field(default_factory=list)
    any_of: bool = False  #: the first token is enough: only one of those it waits for will run

    def node(self, next: tuple[str, ...]) -> Node:
        return self.make(self, next, 1 if self.any_of else max(1, len(self.waits_for)))


class WorkflowTracer:
    """Tracer of one workflow. `functions` are those it may call."""

    def __init__(self, workflow: str, functions: Mapping[str, Any]) -> None:
        self.workflow = workflow
        self._functions = functions
        self._used: dict[str, int] = {}
        self._root = self._region = TracedRegion()
        self._after: dict[TracedStep, None] = {}  #: what every new step of this region waits for, whatever it uses

    # ------------------------------------------------- what user code calls

    def call(self, function: Function[..., Any], args: Any, kwargs: Any, policy: ErrorPolicy | None = None) -> Any:
        """Record a step, with arguments as Python passes them."""
        try:
            inputs = bind_arguments(function.params, args, kwargs)
        except BadValue as error:
            raise BadFlow(f"{user_place()}: {function.name}(...): {error.message}", hint=error.hint) from None
        return self.task(function, inputs, policy)

    def task(
        self, function: Function[..., Any], inputs: dict[str, Any], policy: ErrorPolicy | None = None, token: str = ""
    ) -> Any:
        """Record a step. `token`: it waits for a report, and this parameter of its function gets its token."""
        if self._functions.get(function.name) is not function:
            raise BadFlow(
                f"workflow {self.workflow!r} calls {function.name!r} of another app, {function.app.name!r}",
                hint="define workflow and functions on one App",
            )

        def make(step: TracedStep, next: tuple[str, ...], needs: int) -> Node:
            return Task(step.name, function.name, next, needs, step.data, policy, waits_for_report=bool(token))

        step = self._step(function.name, make)
        step.data["args"] = {name: self._expression(form_of(value), step) for name, value in inputs.items()}
        if token:
            step.data["token"] = token
            return Symbol(["node", step])
        return Symbol(["node", step], function.returns)

    def each(self, body: Callable[[Any], Any], items: Any, expect: float, limits: EachLimits = NO_LIMITS) -> Any:
        """Record an each. With a tolerance it resolves its data at its end, to learn which items are missing."""
        part = limits.tolerate if isinstance(limits.tolerate, float) else None
        count = None if part is not None or limits.tolerate is None else int(limits.tolerate)
        resolves_data = limits.tolerate is not None

        def make(step: TracedStep, next: tuple[str, ...], needs: int) -> Node:
            return Each(
                step.name, inner, next, needs, expect, step.data, None, resolves_data, limits.max_concurrency, count, part
            )

        step = self._step("each", make)
        step.data["items"] = self._expression(form_of(items), step)
        region = TracedRegion(step)
        item = Symbol(["item", region], field_hint(items.hint, 0) if isinstance(items, Symbol) else None)
        result = self._in_region(region, lambda: body(item))
        inner = self._flow(region, step.name, Slo(), result)
        hint = result.hint if isinstance(result, Symbol) else None
        return Symbol(["node", step], GenericAlias(list, (hint,)) if hint is not None else None)

    def when(self, condition: Symbol, branches: Mapping[str, Callable[[], Any]]) -> Any:
        """Record a choice of two branches, and the value of the one that is taken."""
        step, guards = self._choice("when", condition)
        ends = []
        for (name, branch), guard in zip(branches.items(), guards, strict=True):
            region = self._branch(step)
            result = self._in_region(region, branch)
            ends.append(self._pass(name, ["when", guard, form_of(result)], region))
        return Symbol(["node", self._merge_step("merged", ends, step.region)])

    def parameter(self, name: str, default: Any = NOTHING, hint: Any = None) -> Symbol:
        """A parameter of the workflow. A default is part of the flow, since a run has nothing else to fill it in."""
        if default is NOTHING:
            return Symbol(["input", name], hint)
        return Symbol(["node", self._pass(name, ["first", ["input", name], form_of(default)], self._root)], hint)

    def finish(self, slo: Slo, result: Any) -> Flow:
        flow = self._flow(self._root, self.workflow, slo, result)
        flow.check()
        return flow

    # ------------------------------------------------------------- branches

    def _choice(self, name: str, condition: Symbol) -> tuple[TracedStep, tuple[Expr, Expr]]:
        """A choice step, and the guards of its two branches."""

        def make(step: TracedStep, next: tuple[str, ...], needs: int) -> Node:
            return Choice(step.name, tuple(branch.entry_steps() for branch in step.inner), needs, (), step.data)

        step = self._step(name, make)
        step.data["rules"] = [self._expression(condition.form, step)]
        return step, (condition.form, ["not", condition.form])

    def _branch(self, owner: TracedStep) -> TracedRegion:
        region = TracedRegion(owner, is_scope=False)
        owner.inner.append(region)
        return region

    def _merge_step(self, name: str, ends: list[TracedStep], region: TracedRegion, *, has_value: bool = True) -> TracedStep:
        """A step that starts when one of the branches has ended; its value, if it has one, is that of the one that was taken."""
        merged = self._pass(name, ["value", None], region, any_of=True)
        merged.waits_for.update(dict.fromkeys(ends))
        if has_value:
            merged.data["value"] = ["first", *(["node", end.name] for end in ends)]
        return merged

    # ------------------------------------------------------------- regions

    def _in_region(self, region: TracedRegion, body: Callable[[], Any]) -> Any:
        outside, after = self._region, self._after
        self._region, self._after = region, {}
        try:
            return body()
        finally:
            self._region, self._after = outside, after

    def _step(
        self,
        name: str,
        make: Callable[[TracedStep, tuple[str, ...], int], Node],
        region: TracedRegion | None = None,
        *,
        any_of: bool = False,
    ) -> TracedStep:
        """A new step. Names are unique over all regions: an expression finds a step outside its own by name alone."""
        count = self._used.get(name, 0) + 1
        while count > 1 and f"{name}-{count}" in self._used:
            count += 1
        self._used[name] = count
        unique = name if count == 1 else f"{name}-{count}"
        self._used.setdefault(unique, 1)
        step = TracedStep(unique, region or self._region, make, any_of=any_of)
        if region is None:
            step.waits_for.update(self._after)
        step.region.steps.append(step)
        return step

    def _pass(self, name: str, form: Expr | None, region: TracedRegion, *, any_of: bool = False) -> TracedStep:
        """A step that only passes a value on, if it has one. `any_of`: the first token is enough."""

        def make(step: TracedStep, next: tuple[str, ...], needs: int) -> Node:
            return Pass(step.name, next, needs, step.data)

        step = self._step(name, make, region, any_of=any_of)
        if form is not None:
            step.data["value"] = self._expression(form, step)
        return step

    def _flow(self, region: TracedRegion, name: str, slo: Slo, result: Any) -> Flow:
        form = self._expression(form_of(result), None, region)
        if not region.steps:
            self._pass("pass", ["value", None], region)
        steps = list(_all_steps(region))
        followers: dict[TracedStep, list[str]] = {step: [] for step in steps}
        for step in steps:
            for earlier in step.waits_for:
                followers[earlier].append(step.name)
        nodes = {step.name: step.node(tuple(followers[step])) for step in steps}
        return Flow(name, nodes, region.entry_steps(), slo, {"result": form})

    # ------------------------------------------- from symbols to expressions

    def _expression(self, form: Expr, user: TracedStep | None, region: TracedRegion | None = None) -> Expr:
        """Expression of a form, with names for steps; what it uses becomes a dependency of `user`, or of the owner around it."""
        where = region or (user.region if user else self._root)
        head = form[0]
        if head == "node":
            self._add_dependency(form[1], user, where)
            return ["node", form[1].name, *form[2:]]
        if head == "inside":  # of a block that has ended: its steps are seen from here, and it is what is waited for
            self._add_dependency(form[1], user, where)
            return ["node", form[2].name, *form[3:]]
        if head == "item":
            if form[1] is where.scope:
                return ["item", *form[2:]]
            return self._expression(["node", self._item_step(form[1]), *form[2:]], user, where)
        if head in ("value", "input"):
            return form
        if head == "dict":
            return ["dict", {key: self._expression(inner, user, where) for key, inner in form[1].items()}]
        return [head, *(self._expression(inner, user, where) for inner in form[1:])]

    def _item_step(self, region: TracedRegion) -> TracedStep:
        """Step that passes an item on: an item is visible in its own body only; nested bodies get it as the value of a step."""
        if region.item_step is None:
            region.item_step = self._pass("item", ["item", region], region)
        return region.item_step

    def _add_dependency(self, used: TracedStep, user: TracedStep | None, where: TracedRegion) -> None:
        while where is not used.region:
            if where.owner is None:
                raise BadFlow(
                    f"workflow {self.workflow!r} uses the result of {used.name!r} outside the each or when it belongs to",
                    hint="return it from the lambda, and use what each or when returns",
                )
            user, where = where.owner, where.owner.region
        if user is not None and user is not used:
            user.waits_for[used] = None


def _all_steps(region: TracedRegion) -> list[TracedStep]:
    """Steps of the region and of its branches; a body is a flow of its own."""
    found = []
    for step in region.steps:
        found.append(step)
        for inner in step.inner:
            found += _all_steps(inner)
    return found


call_mode: ContextVar[WorkflowTracer | InProcess | None] = ContextVar("lamina_mode", default=None)
"""What a call of a decorated function means here; None: plain Python."""


@contextmanager
def plain_python() -> Iterator[None]:
    """Leave the workflow mode: the code of a step is plain Python."""
    token = call_mode.set(None)
    try:
        yield
    finally:
        call_mode.reset(token)
