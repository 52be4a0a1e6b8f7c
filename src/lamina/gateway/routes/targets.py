"""Call targets: the functions and workflows a server offers, found by path; owner of that list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lamina.sdk.app import App
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
from lamina.types import Slo


@dataclass(frozen=True, slots=True)
class CallTarget:
    """A callable target: a function or a workflow, with its parameters and SLO."""

    name: str
    kind: str  #: "function" or "workflow"
    params: tuple[Param, ...]
    slo: Slo
    doc: str = ""
    tenant: str = ""  #: its owner; "": all tenants may call it
    signature: Signature | None = None  #: what it takes and gives as tensors, where that is known


class TargetRegistry:
    """What can be called, as of the last deployment. Subscribers are told of every change."""

    def __init__(self, targets: Iterable[CallTarget]) -> None:
        self._subscribers: list[Callable[[], None]] = []
        self._optional: list[Callable[[], set[str]]] = []
        self.replace(targets)

    def replace(self, targets: Iterable[CallTarget]) -> None:
        self.all = list(targets)
        self.by_path = {f"/v1/{target.kind}s/{target.name}".encode(): target for target in self.all}
        for notify in self._subscribers:
            notify()

    def subscribe(self, notify: Callable[[], None]) -> None:
        self._subscribers.append(notify)

    def add_optional(self, functions: Callable[[], set[str]]) -> None:
        """Functions that readiness does not wait for: their instances belong to a rollout."""
        self._optional.append(functions)

    def optional_functions(self) -> set[str]:
        return set().union(*(functions() for functions in self._optional))


def call_targets(app: App) -> list[CallTarget]:
    functions = [CallTarget(f.name, "function", f.params, f.spec.slo, f.doc, "", f.signature) for f in app.functions.values()]
    workflows = [CallTarget(w.name, "workflow", w.params, w.flow.slo, w.doc, "", w.signature) for w in app.workflows.values()]
    return functions + workflows
