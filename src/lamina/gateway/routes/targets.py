"""Call targets: the functions and workflows a server offers, found by path; owner of that list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina.access.authorization import Grant
from lamina.core.workflow.flow import Flow
from lamina.errors import UnknownTarget
from lamina.gateway.observability.metrics import CallOutcomes
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
    returns: dict[str, Any] = field(default_factory=dict)  #: JSON Schema of a result, with its own `$defs`; {}: any
    split: TrafficSplit | None = field(default=None, compare=False)  #: versions that share its calls
    shadow: CallTarget | None = field(default=None, compare=False)  #: version that gets a copy of every call
    version: str = ""  #: of the app it is from
    cache_us: int = 0  #: how long its results are kept; 0: not at all


class TrafficSplit:
    """Traffic split of a target: the version named by a header, else versions in proportion to their weights.

    Proportions are exact and without dice (smooth weighted round robin): of any hundred calls in a row, a version with weight 10
    gets ten. Asynchronous runs stay with `stable`: a repeated request with the same idempotency key must find its run.
    """

    def __init__(
        self,
        stable: CallTarget,
        weights: Sequence[tuple[CallTarget, float]],
        by_header: Sequence[tuple[bytes, bytes, CallTarget]] = (),
    ) -> None:
        self.stable = stable
        self._arms = [(target, weight) for target, weight in weights if weight > 0]
        self._credit = [0.0] * len(self._arms)
        self._total = sum(weight for _, weight in self._arms)
        self._by_header = by_header

    @property
    def targets(self) -> list[CallTarget]:
        """All that share the calls."""
        return [self.stable, *(target for target, _ in self._arms), *(target for *_, target in self._by_header)]

    @property
    def is_by_weight_alone(self) -> bool:
        """Whether neither headers nor parameters matter: then a body can be read before a version is chosen."""
        return not self._by_header and all(target.params == self.stable.params for target, _ in self._arms)

    def choose(self, headers: Mapping[bytes, bytes]) -> CallTarget:
        if b"prefer" in headers:
            return self.stable
        for name, value, target in self._by_header:
            if headers.get(name) == value:
                return target
        best, credit = 0, self._credit
        for index, (_, weight) in enumerate(self._arms):
            credit[index] += weight
            if credit[index] > credit[best]:
                best = index
        credit[best] -= self._total
        return self._arms[best][0]


class TargetRegistry:
    """What can be called, as of the last deployment. Subscribers are told of every change."""

    def __init__(
        self, targets: Iterable[CallTarget], outcomes: Callable[[str], CallOutcomes] = lambda target: CallOutcomes()
    ) -> None:
        self.outcomes = outcomes  #: of the calls of a target so far
        self._subscribers: list[Callable[[], None]] = []
        self._optional: list[Callable[[], set[str]]] = []
        self.replace(targets)

    def replace(self, targets: Iterable[CallTarget]) -> None:
        self.all = list(targets)
        self.by_path = {f"/v1/{target.kind}s/{target.name}".encode(): target for target in self.all}
        for notify in self._subscribers:
            notify()

    def function_for(self, grant: Grant, name: str) -> CallTarget:
        """A function by name, as far as it is there for this client."""
        target = self.by_path.get(f"/v1/functions/{name}".encode("latin-1", "replace"))
        if target is None or not grant.sees(target.tenant):
            raise UnknownTarget(f"no function {name[:80]!r}", hint="GET /v1/functions lists them")
        return target

    def subscribe(self, notify: Callable[[], None]) -> None:
        self._subscribers.append(notify)

    def add_optional(self, functions: Callable[[], set[str]]) -> None:
        """Functions that readiness does not wait for: their instances belong to a rollout."""
        self._optional.append(functions)

    def optional_functions(self) -> set[str]:
        return set().union(*(functions() for functions in self._optional))


def kind_of(flow: Flow) -> str:
    """What a flow is to clients: bodies that compete are one function."""
    return "function" if flow.competing else "workflow"


def call_targets(app: App) -> list[CallTarget]:
    functions = [
        CallTarget(f.name, "function", f.params, f.spec.slo, f.doc, "", f.signature, f.result_schema, cache_us=f.spec.cache_us)
        for f in app.functions.values()
    ]
    workflows = [
        CallTarget(w.name, kind_of(w.flow), w.params, w.flow.slo, w.doc, "", w.signature, w.result_schema)
        for w in app.workflows.values()
    ]
    return functions + workflows
