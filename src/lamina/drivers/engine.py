"""Engine interface: what runs batches on devices. Drivers and the gateway use nothing else of an engine.

It is here, below the engines, because the real-time driver is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from lamina.core.actions import Action, JobRef
from lamina.core.events import Event
from lamina.expr import Expr, Leaf
from lamina.sdk.spans import InnerSpan
from lamina.types import DeviceSpec, FunctionSpec
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


MAX_EARLY_MESSAGES = 64


class MessageStream:
    """Stream of a call in both directions. As a sink of chunks it delivers what the function yields; what the client sends goes
    the other way, and waits for the start of the call. `on_taken` is told how many messages the function has taken."""

    def __init__(self, deliver: Callable[[bytes], None], on_taken: Callable[[int], None]) -> None:
        self._deliver = deliver
        self.on_taken = on_taken
        self._send: Callable[[bytes | None], None] | None = None
        self._early: list[bytes | None] = []

    def __call__(self, chunk: bytes) -> None:
        self._deliver(chunk)

    def put(self, message: bytes | None) -> bool:
        """Pass a message on; None: there are no more. False: too many have come before the call began."""
        if self._send is not None:
            self._send(message)
        elif len(self._early) >= MAX_EARLY_MESSAGES:
            return False
        else:
            self._early.append(message)
        return True

    def attach(self, send: Callable[[bytes | None], None]) -> None:
        """The call has begun: this is the way to it."""
        self._send = send
        early, self._early = self._early, []
        for message in early:
            send(message)


class JobValues(Protocol):
    """Store of the values of all runs, as an engine sees it."""

    @property
    def pieces(self) -> Mapping[str, Callable[[bytes], None]]: ...

    def inputs(self, job: JobRef, /) -> JobInput: ...

    def consumers(self, job: JobRef, /) -> frozenset[str]:
        """Functions that read its result as a whole, if they alone do."""
        ...

    def may_stay(self, job: JobRef, /) -> bool:
        """Whether its result is that of its call, and is fetched by the client's own front door from wherever it is."""
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


class TargetSource(Struct, frozen=True):
    """Source of a function or workflow: its app, the tenant that owns it, and the app's file."""

    app: str = ""  #: "": the app the server was started with, of which nothing else was deployed
    tenant: str = ""  #: "": the operator of the server
    path: str = ""  #: "": the engine's own app
    user: int = 0  #: its processes run as; 0: the server's
    python: str = ""  #: interpreter of the app's environment; "": the server's own
    name: str = ""  #: in its app, where that is another one than here: of a version served beside the stable one


class EngineShared:
    """What all engines of one server share: the sources of targets, why loads failed, and the server's callbacks."""

    def __init__(
        self,
        declared: Mapping[str, str] | None = None,
        spec_of: Callable[[str], FunctionSpec | None] = lambda function: None,
        log_level: str = "INFO",
        tenant_users: tuple[int, int] = (0, 0),
    ) -> None:
        """`declared` is added to the environment of the operator's own functions; `spec_of` finds what a function asks for;
        from `log_level` on it is shown what functions log. `tenant_users` are the first and last user that functions of tenants
        run as here; 0: they run as no others."""
        self.tenant_users = tenant_users
        self.log_level = log_level
        self.spec_of = spec_of
        self.declared = dict(declared or {})
        self.sources: dict[str, TargetSource] = {}  #: by function and workflow, of all that was deployed
        self.load_errors: dict[str, ErrorInfo] = {}
        self.probe_times: dict[str, Sequence[tuple[int, int, int]]] = {}  #: by function, of its last load: batch, units, us
        self.origin: OriginOf | None = None  #: tenant and trace of a job, for functions that ask
        self.on_spans: OnSpans | None = None
        self._tenant_environment: Callable[[str], dict[str, str]] = lambda tenant: {}
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

    def set_sources(self, sources: dict[str, TargetSource]) -> None:
        """Set where targets come from and whose they are. Done before the controller is told of them: it starts instances at
        once, and what an instance may see depends on its owner."""
        self.sources = sources

    def source(self, target: str) -> TargetSource:
        return self.sources.get(target, _OWN)

    def app_source(self, app: str) -> TargetSource | None:
        """Source of a deployed app, if there is such an app."""
        return next((source for source in self.sources.values() if source.app == app), None)

    def environment(self, function: str) -> dict[str, str]:
        """Environment variables for processes of a function: the secrets of its tenant, and what the operator has declared."""
        tenant = self.source(function).tenant
        return {**({} if tenant else self.declared), **self._tenant_environment(tenant)}

    def trace(self, origin: OriginOf, on_spans: OnSpans | None = None) -> None:
        """Tell functions the origin of their jobs, and report their spans."""
        self.origin, self.on_spans = origin, on_spans

    def set_environment(self, environment: Callable[[str], dict[str, str]]) -> None:
        """Set what makes the environment of a tenant's functions."""
        self._tenant_environment = environment


_OWN = TargetSource()
