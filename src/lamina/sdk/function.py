"""Functions: a decorated callable or class, still what it was in Python, and a target that can be served, called and mapped.

Calling it means three things, and the place decides which. In plain Python a plain function is just called. Inside a
workflow that is being traced, the call is recorded as a step. Inside a workflow that is being computed in process, it
is one request, as it would be when served, so a batched function gets a batch of one.

Step options (`tag.retry([OSError], attempts=3).timeout(30)(image)`) are those of the builder. In process the attempts are made at
once, without pauses, and time limits are not kept.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from lamina.core.workflow.error_policy import ALL, TIMEOUT, ErrorPolicy, Retrier, matches
from lamina.encoding import RaisedResponse
from lamina.errors import BadFlow, BadValue
from lamina.sdk.annotation_conversion import (
    converters_of,
    incoming_param,
    is_async,
    message_converter,
    result_hint,
    typed_params,
)
from lamina.sdk.app_state import WHICH_REQUEST, BatchState
from lamina.sdk.binding import Param, bind_arguments, defaults_of, params_of
from lamina.sdk.context import BatchContext, active_context, context
from lamina.sdk.json_schema import schema_of
from lamina.sdk.remote_target import RemoteTarget
from lamina.sdk.runner import Runner
from lamina.sdk.symbols import UnawaitedCall, duration_us
from lamina.sdk.tensors import Signature, signature_of
from lamina.sdk.torch_model import TorchModel
from lamina.sdk.user_errors import user_frames_only, user_place
from lamina.sdk.workflow_tracing import WorkflowTracer, call_mode, plain_python
from lamina.types import WHOLE_UNIT, FunctionSpec

if TYPE_CHECKING:
    from lamina.sdk.app import App, FunctionOptions

DEFAULT_CONCURRENCY = 64
"""Calls at once of a function that takes messages while it runs."""

Errors = Sequence[str | type[BaseException]]


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
V = TypeVar("V")


class Function(RemoteTarget[P, R_co]):
    """A function of an app, made by `@app.function(...)`. `target` is the callable or class as it was written."""

    kind = "functions"

    def __init__(
        self,
        app: App,
        target: Any,
        spec: FunctionSpec,
        place: str,
        *,
        home: bool | None = None,
        options: FunctionOptions | None = None,
        bound: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
    ) -> None:
        self._options: FunctionOptions = options or {}
        self.bound = bound  #: arguments of its class
        self.app = app
        self.target = target
        self.spec = spec
        self.name = spec.name
        self.place = place
        self.home = spec.home if home is None else home  #: as asked for; an isolated function has one on its GPU in any case
        self.is_class = inspect.isclass(target)
        self.needs_arguments = self.is_class and _needs_arguments(target, place, bound)  #: it cannot be served without `bind`
        self.runs_in_graphs = self.is_class and issubclass(target, TorchModel)  #: on a GPU, as CUDA graphs
        body = (target.pre if self.runs_in_graphs else target.__call__) if self.is_class else target
        self.is_async = is_async(body)
        self.streams = inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body)  #: it yields its answer in pieces
        if self.streams:
            if spec.max_batch > 1:
                raise BadValue(f"{place}: a batched function that yields", hint="leave batch= out: it answers one at a time")
            if spec.cache_us:
                raise BadValue(f"{place}: cache= of a function that yields", hint="leave one of them out: pieces are not kept")
            self.spec = replace(self.spec, idempotent=False)  # what was yielded cannot be taken back
        self.incoming = incoming_param(body) if self.is_async else ""  #: parameter for messages that come while it runs
        if self.incoming and spec.cache_us:
            raise BadValue(f"{place}: cache= of a function that takes messages while it runs", hint="leave cache= out")
        self.convert_message = message_converter(body, self.incoming) if self.incoming else None
        if self.incoming and self.spec.concurrency == 1:
            at_once = DEFAULT_CONCURRENCY  # it waits for its client most of the time
            self.spec = replace(self.spec, concurrency=at_once, parts=max(1, self.spec.parts // at_once))
        self._check_concurrency(place)
        without_self = functools.partial(body, None) if self.is_class else body
        #: whether annotations are of lists with an entry per request; `pre` of a torch model takes one request at a time
        self._is_wrapped = spec.max_batch > 1 and not self.runs_in_graphs
        wrapped = self._is_wrapped
        self.params: tuple[Param, ...] = typed_params(params_of(without_self, place), body, batched=wrapped)
        self.defaults: dict[str, Any] = defaults_of(without_self)  #: per parameter, NOTHING where one is required
        self.converters = converters_of(body, batched=wrapped)  #: for parameters that are more than JSON
        self.returns = result_hint(body, batched=wrapped, streams=self.streams)  #: annotation of one result
        self._body = body
        self._local: Runner | None = None
        self._lock = threading.RLock()
        functools.update_wrapper(self, target, updated=())

    def _check_concurrency(self, place: str) -> None:
        spec = self.spec
        if spec.concurrency > 1 and not (self.is_async or self.streams):
            hint = "write async def, or yield; plain functions run side by side in several instances: Scale(max=...)"
            raise BadValue(f"{place}: concurrency={spec.concurrency} of a function that neither awaits nor yields", hint=hint)
        taken = "batch" if spec.max_batch > 1 else "gpu" if spec.gpu != "no" else "home" if spec.home else ""
        if spec.parts < WHOLE_UNIT and taken:
            what = "concurrency" if spec.concurrency > 1 else "a part of a core"
            raise BadValue(f"{place}: {what} together with {taken}=", hint="leave one of them out")

    @functools.cached_property
    def signature(self) -> Signature:
        """Inputs and outputs as tensors, as far as the annotations tell."""
        return signature_of(self._body, self.params, wrapped=self._is_wrapped, streams=self.streams)

    @property
    def result_schema(self) -> dict[str, Any]:
        """JSON Schema of one result; {}: any."""
        return schema_of(self.returns, "serialization")

    def update_spec(self, **fields: Any) -> None:
        """Replace fields of the spec, before it is deployed."""
        self.spec = replace(self.spec, **fields)

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.target.__doc__ or (self.is_class and self.target.__call__.__doc__) or "")

    def __repr__(self) -> str:
        return f"<function {self.name!r} of app {self.app.name!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        where = call_mode.get()
        if isinstance(where, WorkflowTracer):
            return cast(R_co, where.call(self, args, kwargs))
        if where is not None and where.is_async:
            return cast(R_co, UnawaitedCall(f"{self.name}(...)", lambda: self.call_once(*args, **kwargs)))
        return cast(R_co, self.call_once(*args, **kwargs))

    def call_once(self, *args: Any, **kwargs: Any) -> Any:
        """Call it now, in plain Python or in a workflow that is computed in process."""
        where = call_mode.get()
        if where is None and not self.is_class:
            return self.target(*args, **kwargs)
        if where is None and self._local is None and context().function not in ("", self.name):
            if self.is_async and not self.streams:
                return self.aio(*args, **kwargs)
            return self.remote(*args, **kwargs)  # it is served: its weights are not loaded a second time in this worker
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

    def options(self, **changes: Unpack[FunctionOptions]) -> Function[P, R_co]:
        """The same code as another function, with other options: `Model.options(name="model-fast", slo="20ms")`."""
        return self._again(self.bound, changes)

    def bind(self, *args: Any, name: str | None = None, **kwargs: Any) -> Function[P, R_co]:
        """The class with arguments, as a function of its own: `Model.bind(path="b.onnx", name="model-b")`. A class whose
        `__init__` needs arguments is served only so. `name` is the function's, no argument; by default that of the class."""
        if not self.is_class:
            raise BadValue(f"{user_place()}: bind: {self.name!r} is no class", hint="give the arguments with each call")
        return self._again((args, kwargs), {"name": name} if name is not None or not self.needs_arguments else {})

    def _again(self, bound: tuple[tuple[Any, ...], dict[str, Any]], changes: FunctionOptions) -> Function[P, R_co]:
        if changes.get("name") is None and not self.needs_arguments:
            raise BadValue(f"{user_place()}: {self.name!r} again, without a name of its own", hint="give name=")
        options: Any = {"name": self.name, **self._options, **changes}
        if options["name"] is None:
            options["name"] = self.name
        return cast("Function[P, R_co]", self.app.add_function(self.target, options, bound))

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
    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def local(self, *args: Any, **kwargs: Any) -> Any:
        """One request, handled in this process as a worker would: loaded once, a batch of one."""
        return self._run_one(self._inputs("local", args, kwargs))

    def _run_one(self, inputs: dict[str, Any]) -> Any:
        with self._lock, plain_python(), self.app.transaction() as changes:
            state = BatchState(lambda place, key: self.app.local_state.read(key), alone=changes)
            whole = changes if self.spec.max_batch == 1 else WHICH_REQUEST
            around = BatchContext(units=self.spec.cores, transaction=whole, buffers=self.app.local_buffers, batch_state=state)
            with active_context(around):
                if self._local is None:
                    self._local = self.open()
                result = self._local.run([inputs])[0]
            if isinstance(result, RaisedResponse):
                raise result.response
            if isinstance(result, Exception):  # and nothing that it changed is kept
                raise user_frames_only(result)
        return result

    def close(self) -> None:
        """Close the local instance; the next local request opens it anew."""
        with self._lock:
            opened, self._local = self._local, None
        if opened is not None:
            opened.close()


def _needs_arguments(target: type, place: str, bound: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Check a class and what was bound to it; whether arguments are missing."""
    if not inspect.isfunction(inspect.getattr_static(target, "__call__", None)):
        raise BadValue(
            f"{place}: class {target.__name__} has no __call__", hint="write def __call__(self, ...): it handles requests"
        )
    init = inspect.getattr_static(target, "__init__", None)
    if not inspect.isfunction(init):
        if bound[0] or bound[1]:
            raise BadValue(f"{place}: {target.__name__} takes no arguments", hint="write def __init__(self, path): ...")
        return False
    try:
        inspect.signature(init).bind(None, *bound[0], **bound[1])
    except TypeError as error:
        if bound[0] or bound[1]:
            raise BadValue(f"{place}: {target.__name__}: {error}", hint="give what its __init__ takes") from None
        return True
    return False


class StepOptions:
    """A function with step options. Each method returns a new one, so that they can be kept and combined."""

    def __init__(self, function: Function[..., Any], policy: ErrorPolicy | None = None) -> None:
        self._function = function
        self._policy = policy or ErrorPolicy()

    def __repr__(self) -> str:
        return f"<{self._function.name!r} with {self._policy}>"

    def retry(
        self,
        on: Errors = (ALL,),
        *,
        attempts: int = 3,
        interval_s: float = 1,
        backoff: float = 2.0,
        max_delay_s: float | None = None,
        jitter: bool = False,
    ) -> StepOptions:
        """Retry after these errors, with exponential backoff, for up to `attempts` tries in all. The first retrier that names an
        error counts."""
        if attempts < 1 or interval_s < 0 or backoff < 1:
            raise BadFlow(
                f"{user_place()}: retry with attempts={attempts}, interval_s={interval_s}, backoff={backoff}",
                hint="attempts from 1 on (the first one counts), interval_s from 0 on, backoff from 1 on",
            )
        pause = (round(interval_s * 1e6), attempts - 1, backoff, round((max_delay_s or 0) * 1e6), jitter)
        return StepOptions(self._function, replace(self._policy, retry=(*self._policy.retry, Retrier(error_names(on), *pause))))

    def timeout(self, duration: str | float) -> StepOptions:
        """Time limit of one attempt, queueing included: "30s", or seconds."""
        return StepOptions(self._function, replace(self._policy, timeout_us=duration_us(duration, "timeout")))

    def heartbeat(self, duration: str | float) -> StepOptions:
        """Longest time between heartbeats while it runs; `context().heartbeat()` sends one."""
        return StepOptions(self._function, replace(self._policy, heartbeat_us=duration_us(duration, "heartbeat")))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = call_mode.get()
        if isinstance(where, WorkflowTracer):
            return where.call(self._function, args, kwargs, self._policy)
        if where is not None and where.is_async:
            return UnawaitedCall(f"{self._function.name}(...)", lambda: self._call_with_retries(args, kwargs))
        return self._call_with_retries(args, kwargs)

    def _call_with_retries(self, args: Any, kwargs: Any) -> Any:
        used = [0] * len(self._policy.retry)
        while True:
            try:
                return self._function.call_once(*args, **kwargs)
            except Exception as error:
                index = next((i for i, r in enumerate(self._policy.retry) if matches(r.errors, type(error).__name__)), -1)
                if index < 0 or used[index] >= self._policy.retry[index].attempts:
                    raise
                used[index] += 1


def error_names(on: Errors) -> tuple[str, ...]:
    """Error names to retry on: of a class, its own name; `TimeoutError` also stands for a time limit that was exceeded."""
    if isinstance(on, str) or not isinstance(on, Sequence):
        raise BadFlow(f"{user_place()}: on={on!r}", hint='give a list: on=["States.Timeout", ValueError]')
    found: list[str] = []
    for error in on:
        found.append(error if isinstance(error, str) else error.__name__)
        if error is TimeoutError:
            found.append(TIMEOUT)
    return tuple(found)
