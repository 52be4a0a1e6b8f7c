"""Functions: a decorated callable or class, still what it was in Python, and a target that can be served, called and mapped.

Calling it means three things, and the place decides which. In plain Python a plain function is just called. Inside a
workflow that is being traced, the call is recorded as a step. Inside a workflow that is being computed in process, it
is one request, as it would be when served, so a batched function gets a batch of one.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.sdk.annotation_conversion import converters_of, result_hint, typed_params
from lamina.sdk.binding import Param, bind_arguments, defaults_of, params_of
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.remote_target import RemoteTarget
from lamina.sdk.runner import Runner
from lamina.sdk.step_options import Errors, StepOptions
from lamina.sdk.symbols import UnawaitedCall
from lamina.sdk.tensors import Signature, signature_of
from lamina.sdk.torch_model import TorchModel
from lamina.sdk.user_errors import user_frames_only
from lamina.sdk.workflow_tracing import WorkflowTracer, call_mode, plain_python
from lamina.types import FunctionSpec

if TYPE_CHECKING:
    from lamina.sdk.app import App

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")


class Function(RemoteTarget[P, R]):
    """A function of an app, made by `@app.function(...)`. `target` is the callable or class as it was written."""

    kind = "functions"

    def __init__(self, app: App, target: Any, spec: FunctionSpec, place: str) -> None:
        self.app = app
        self.target = target
        self.spec = spec
        self.name = spec.name
        self.place = place
        self.isolated = False  #: a process of its own on the GPU
        self.home = spec.home  #: as it was asked for; an isolated function has one on its GPU in any case
        self.is_class = inspect.isclass(target)
        if self.is_class:
            _check_class(target, place)
        body = (target.pre if issubclass(target, TorchModel) else target.__call__) if self.is_class else target
        self.is_async = inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body)
        self.streams = inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body)  #: it yields its answer in pieces
        if self.streams:
            if spec.max_batch > 1:
                raise BadValue(f"{place}: a batched function that yields", hint="leave batch= out: it answers one at a time")
            self.spec = replace(spec, idempotent=False)  # what was yielded cannot be taken back
        without_self = functools.partial(body, None) if self.is_class else body
        self.params: tuple[Param, ...] = typed_params(params_of(without_self, place), body, batched=spec.max_batch > 1)
        self.defaults: dict[str, Any] = defaults_of(without_self)  #: per parameter, NOTHING where one is required
        self.converters = converters_of(body, batched=spec.max_batch > 1)  #: for parameters that are more than JSON
        self.returns = result_hint(body, batched=spec.max_batch > 1, streams=self.streams)  #: annotation of one result
        self._body = body
        self._local: Runner | None = None
        self._lock = threading.RLock()
        functools.update_wrapper(self, target, updated=())

    @functools.cached_property
    def signature(self) -> Signature:
        """Inputs and outputs as tensors, as far as the annotations tell."""
        return signature_of(self._body, self.params, wrapped=self.spec.max_batch > 1, streams=self.streams)

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.target.__doc__ or (self.is_class and self.target.__call__.__doc__) or "")

    def __repr__(self) -> str:
        return f"<function {self.name!r} of app {self.app.name!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        where = call_mode.get()
        if isinstance(where, WorkflowTracer):
            return cast(R, where.call(self, args, kwargs))
        if where is not None and where.is_async:
            return cast(R, UnawaitedCall(f"{self.name}(...)", lambda: self.call_once(*args, **kwargs)))
        return cast(R, self.call_once(*args, **kwargs))

    def call_once(self, *args: Any, **kwargs: Any) -> Any:
        """Call it now, in plain Python or in a workflow that is computed in process."""
        where = call_mode.get()
        if where is None and not self.is_class:
            return self.target(*args, **kwargs)
        if where is not None and not isinstance(where, WorkflowTracer) and self.name in where.mocks:
            with plain_python():
                return where.mocks[self.name](*args, **kwargs)
        if where is None and self.is_async and not self.streams:
            return self._call_async(bind_arguments(self.params, args, kwargs))
        return self._run_one(bind_arguments(self.params, args, kwargs))

    async def _call_async(self, inputs: dict[str, Any]) -> Any:
        """Coroutine of one call: in plain Python an `async def` is awaited, a class's `__call__` too."""
        return self._run_one(inputs)

    def retry(self, on: Errors = ("States.ALL",), **how: Any) -> StepOptions:
        """A step with retries: `f.retry([OSError], attempts=3, interval_s=1, backoff=2.0)(x)`. See `StepOptions.retry`."""
        return StepOptions(self).retry(on, **how)

    def timeout(self, duration: str | float) -> StepOptions:
        """A step with a time limit for each attempt: `f.timeout("30s")(x)`."""
        return StepOptions(self).timeout(duration)

    def heartbeat(self, duration: str | float) -> StepOptions:
        """A step that must send heartbeats: `f.heartbeat("5s")(x)`."""
        return StepOptions(self).heartbeat(duration)

    def open(self) -> Runner:
        """Load an instance. Raises `LoadFailed`, caused by the user's own error."""
        return Runner(self)

    @overload
    def local(self: Function[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    def local(self: Function[P, Iterator[V]], *args: P.args, **kwargs: P.kwargs) -> list[V]: ...
    @overload
    def local(self: Function[P, AsyncIterator[V]], *args: P.args, **kwargs: P.kwargs) -> list[V]: ...
    @overload
    def local(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def local(self, *args: Any, **kwargs: Any) -> Any:
        """One request, handled in this process as a worker would: loaded once, a batch of one."""
        return self._run_one(self._inputs("local", args, kwargs))

    def _run_one(self, inputs: dict[str, Any]) -> Any:
        with self._lock, plain_python(), self.app.transaction() as changes:
            with active_context(BatchContext(units=self.spec.cores, transaction=changes)):
                if self._local is None:
                    self._local = self.open()
                result = self._local.run([inputs])[0]
            if isinstance(result, Exception):  # and nothing that it changed is kept
                raise user_frames_only(result)
        return result

    def close(self) -> None:
        """Close the local instance; the next local request opens it anew."""
        with self._lock:
            opened, self._local = self._local, None
        if opened is not None:
            opened.close()


def _check_class(target: type, place: str) -> None:
    if not inspect.isfunction(inspect.getattr_static(target, "__call__", None)):
        raise BadValue(
            f"{place}: class {target.__name__} has no __call__", hint="write def __call__(self, ...): it handles requests"
        )
    init = inspect.getattr_static(target, "__init__", None)
    if inspect.isfunction(init):
        for param in list(inspect.signature(init).parameters.values())[1:]:
            if param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD):
                raise BadValue(
                    f"{place}: {target.__name__}.__init__ needs {param.name!r}", hint="workers make instances without arguments"
                )
