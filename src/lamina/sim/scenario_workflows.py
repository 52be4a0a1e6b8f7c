"""Reader of `[[workflow.step]]`: steps made into the flow that the controller executes.

    { name, function, after }                        a task
    { name, each = { expect, steps }, after }        its steps once per item
    { name, choice = [{ odds, steps }, ...], after } one of the branches
    { name, after }                                  nothing but a join

A step starts when all steps in `after` have ended, and at once if there are none. Choices are brackets: whichever branch
is taken, it ends in one invisible join, and what comes after the choice comes after that. So a step never waits for a
branch that was not taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.core.workflow.flow import Choice, Each, Flow, Node, Pass, Task
from lamina.errors import BadFlow
from lamina.sim.toml_fields import Field
from lamina.types import Slo


@dataclass(slots=True)
class _Step:
    name: str
    where: Field
    after: dict[str, Field]
    fields: dict[str, Field]
    then: list[str] = field(default_factory=list)  #: nodes that its end sends a token to


def read_workflow(name: str, slo: Slo, steps: Field, functions: Iterable[str]) -> Flow:
    flow = _Builder(set(functions)).flow(name, slo, steps)
    try:
        flow.check()
    except BadFlow as error:
        raise steps.error(error.message, error.hint or "look for steps that wait for each other") from None
    return flow


@dataclass(slots=True)
class _Builder:
    functions: set[str]
    nodes: dict[str, Node] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  #: of steps in this flow, branches of choices included

    def flow(self, name: str, slo: Slo, steps: Field) -> Flow:
        outer = self.nodes, self.names
        self.nodes, self.names = {}, set()
        start, _ = self._row(steps, ())
        flow = Flow(name, self.nodes, start, slo)
        self.nodes, self.names = outer
        return flow

    def _row(self, steps: Field, then: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
        """Steps side by side; ends without a successor go to `then`. Returns the first ones and the number of ends."""
        row: dict[str, _Step] = {}
        for where in steps.items():
            fields = where.table("name", "function", "each", "choice", "after")
            name = fields["name"].text() if "name" in fields else self._name_of(where, fields)
            if name in self.names:
                raise fields.get("name", where).error(f"there are two steps called {name!r}", "give them different names")
            self.names.add(name)
            after = {other.text(): other for other in fields["after"].items()} if "after" in fields else {}
            row[name] = _Step(name, where, after, fields)
        if not row:
            raise steps.error("there are no steps", "a workflow needs at least one")
        ends = set(row)
        for step in row.values():
            for name, other in step.after.items():
                if name not in row:
                    raise other.unknown_name(f"there is no step {name!r} beside this one", row.keys() - {step.name})
                row[name].then.append(step.name)
                ends.discard(name)
        self._check_acyclic(row)
        for step in row.values():
            if step.name in ends:
                step.then.extend(then)
            self._add(step)
        return tuple(step.name for step in row.values() if not step.after), len(ends)

    def _name_of(self, where: Field, fields: dict[str, Field]) -> str:
        if "function" not in fields:
            raise where.error("this step has no name", "only a step with a function may go without one")
        return fields["function"].text()

    def _check_acyclic(self, row: dict[str, _Step]) -> None:
        settled: set[str] = set()
        while open_steps := [step for step in row.values() if step.name not in settled]:
            able = [step.name for step in open_steps if settled.issuperset(step.after)]
            if not able:
                names = ", ".join(step.name for step in open_steps)
                raise open_steps[0].where.error(f"{names} wait for each other", "take one name out of an `after`")
            settled.update(able)

    def _add(self, step: _Step) -> None:
        kinds = [kind for kind in ("function", "each", "choice") if kind in step.fields]
        if len(kinds) > 1:
            raise step.where.error(f"{' and '.join(kinds)} in one step", "a step is one of them; make two steps of it")
        then, needs = tuple(step.then), max(1, len(step.after))
        kind = kinds[0] if kinds else ""
        if kind == "function":
            function = step.fields["function"]
            if function.text() not in self.functions:
                raise function.unknown_name(f"there is no function {function.value!r}", self.functions)
            self.nodes[step.name] = Task(step.name, function.value, then, needs)
        elif kind == "each":
            self.nodes[step.name] = self._each(step, then, needs)
        elif kind == "choice":
            self._choice(step, then, needs)
        else:
            self.nodes[step.name] = Pass(step.name, then, needs)

    def _each(self, step: _Step, then: tuple[str, ...], needs: int) -> Each:
        fields = step.fields["each"].table("expect", "steps")
        if "steps" not in fields:
            raise step.fields["each"].error("steps are missing", "each = { expect = 3, steps = [...] }")
        expect = fields["expect"].number(above=True) if "expect" in fields else 4.0
        return Each(step.name, self.flow(step.name, Slo(), fields["steps"]), then, needs, expect)

    def _choice(self, step: _Step, then: tuple[str, ...], needs: int) -> None:
        join = f"{step.name}.end"
        branches: list[tuple[str, ...]] = []
        odds: list[float] = []
        self.nodes[step.name] = Choice(step.name, (), needs)  # keeps its place and its name until the branches are known
        for place, branch in enumerate(step.fields["choice"].items()):
            fields = branch.table("odds", "steps")
            if "odds" not in fields:
                raise branch.error("odds are missing", "say how often this branch is taken: odds = 0.3")
            odds.append(fields["odds"].number())
            if "steps" not in fields or not fields["steps"].value:
                branches.append((join,) if then else ())
                continue
            gather = f"{join}{place}"
            start, ends = self._row(fields["steps"], (gather,) if then else ())
            if then:
                self.nodes[gather] = Pass(gather, (join,), ends)
            branches.append(start)
        if not branches or sum(odds) <= 0:
            raise step.fields["choice"].error("no branch can be taken", "give at least one branch with odds above 0")
        if then:
            self.nodes[join] = Pass(join, then)
        self.nodes[step.name] = Choice(step.name, tuple(branches), needs, tuple(odds))
