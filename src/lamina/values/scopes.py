"""Scopes of a run's values, as the core numbers them: where each value was put, and from where it can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.core.workflow.flow import Flow, Node, inner_flows
from lamina.ipc.protocol import ErrorInfo, ShmRef, Stored
from lamina.values.asl_values import AslRun


@dataclass(slots=True)
class ValueScope:
    flow: Flow
    outer: ValueScope | None = None
    item: Stored | None = None
    results: dict[str, Stored] = field(default_factory=dict)
    children: dict[str, list[ValueScope]] = field(
        default_factory=dict
    )  #: items of each Each, branches of each Parallel, in order

    def scope_with(self, name: str) -> ValueScope | None:
        """The scope that contains a step of this name, looking outwards from here."""
        at: ValueScope | None = self
        while at is not None and name not in at.flow.nodes:
            at = at._block_with(name) or at.outer
        return at

    def _block_with(self, name: str) -> ValueScope | None:
        """The inner block of this scope that exports this step: `try` blocks and time limits are scopes of their own."""
        for block, inner in self.children.items():
            if name in ((self.flow.nodes[block].data or {}).get("block") or ()):
                return inner[-1]
        return None


@dataclass(slots=True)
class HeldValues:
    inputs: dict[str, Stored]
    scopes: dict[int, ValueScope]
    errors: dict[tuple[int, str], ErrorInfo] = field(default_factory=dict)  #: the last of each step
    asl_run: AslRun | None = None  #: of a flow written as states: then its values are there
    slots: list[ShmRef] = field(default_factory=list)  #: to be freed at its end
    durable: bool = False

    def make_scopes(self, scope: ValueScope, node: Node, first_scope: int, items: Sequence[Stored | None]) -> list[ValueScope]:
        """Add scopes for the items of a map or the branches of a parallel, numbered from `first_scope`."""
        flows = inner_flows(node)
        made = [ValueScope(flows[i if len(flows) > 1 else 0], scope, item) for i, item in enumerate(items)]
        self.scopes.update(enumerate(made, first_scope))
        return made
