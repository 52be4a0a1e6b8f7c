"""Engine interface: what runs batches on devices. Drivers and the gateway use nothing else of an engine.

It is here, below the engines, because the real-time driver is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lamina.core.actions import Action, JobRef
from lamina.core.events import Event
from lamina.expr import Expr, Leaf
from lamina.sdk.spans import InnerSpan
from lamina.types import DeviceSpec
from lamina.values.references import ErrorInfo, Stored
from lamina.values.slot_refs import SlotReferences

Origin = tuple[str, str]
"""Of a job: its tenant, and the `traceparent` of its step."""

OriginOf = Callable[[JobRef, int], Origin]
"""Of a job in a batch."""

OnSpans = Callable[[int, list[InnerSpan]], None]
"""Batch, and the spans its function reported."""

OnFunctionOutput = Callable[[str, str, tuple[str, ...], str], None]
"""Function, instance, the calls it was for, and the line it printed."""


class JobInput(Protocol):
    """Arguments of a job: the expressions that make them, and the values these read."""

    @property
    def args(self) -> dict[str, Expr] | None: ...

    @property
    def leaves(self) -> list[tuple[Leaf, Stored]]: ...


class JobValues(Protocol):
    """Store of the values of all runs, as an engine sees it."""

    @property
    def pieces(self) -> Mapping[str, Callable[[bytes], None]]: ...

    def inputs(self, job: JobRef, /) -> JobInput: ...

    def consumers(self, job: JobRef, /) -> frozenset[str]:
        """Functions that read its result as a whole, if they alone do."""
        ...

    def put(self, job: JobRef, value: Stored, /) -> None: ...

    def put_error(self, job: JobRef, error: ErrorInfo, /) -> None: ...


class Engine(Protocol):
    """Runs batches on devices. All calls come on the loop's thread and return at once."""

    @property
    def shared(self) -> EngineShared: ...

    @property
    def references(self) -> SlotReferences | None:
        """Shared memory of the server; None where no bytes move."""
        ...

    @property
    def devices(self) -> Sequence[DeviceSpec]: ...

    @property
    def load_errors(self) -> dict[str, ErrorInfo]:
        """By function: why its last load failed, until one succeeds."""
        ...

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        """Begin. `deadline_us` tells until when a call is worth running, on `clock_us`; 0 without a limit."""
        ...

    def perform(self, action: Action) -> None: ...

    async def stop(self, grace_s: float) -> None:
        """Drain within `grace_s`, then kill the rest; afterwards there is no process and no file left."""
        ...


class EngineShared:
    """What all engines of one server share: where functions are loaded from, why loads failed, and the server's callbacks."""

    def __init__(self) -> None:
        self.app_paths: dict[str, str] = {}  #: by function: where it is loaded from now, if not from the engine's app
        self.load_errors: dict[str, ErrorInfo] = {}
        self.origin: OriginOf | None = None  #: tenant and trace of a job, for functions that ask
        self.on_spans: OnSpans | None = None
        self.environment: Callable[[str], dict[str, str]] = lambda function: {}  #: for processes of a function: secrets, say
        self.echoes_output = True  #: what functions print goes to stderr too
        self._output_listeners: list[OnFunctionOutput] = []

    @property
    def collects_output(self) -> bool:
        return bool(self._output_listeners)

    def subscribe_output(self, listener: OnFunctionOutput, *, echo: bool = True) -> None:
        """Call `listener` with every line that functions print; without `echo`, instead of its going to stderr as it is.

        Subscribe before the start: a process whose output is not collected has no pipe."""
        self._output_listeners.append(listener)
        self.echoes_output = self.echoes_output and echo

    def on_output(self, function: str, instance: str, calls: tuple[str, ...], line: str) -> None:
        for listener in self._output_listeners:
            listener(function, instance, calls, line)

    def set_app_paths(self, paths: dict[str, str]) -> None:
        """Load functions from these files from now on."""
        self.app_paths = paths

    def trace(self, origin: OriginOf, on_spans: OnSpans | None = None) -> None:
        """Tell functions the origin of their jobs, and report their spans."""
        self.origin, self.on_spans = origin, on_spans

    def set_environment(self, environment: Callable[[str], dict[str, str]]) -> None:
        self.environment = environment
