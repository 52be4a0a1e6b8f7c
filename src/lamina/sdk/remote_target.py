"""Remote calls of functions and workflows: `.remote`, `.aio`, `.stream`, `.spawn`, `.submit`, `.map` at `LAMINA_URL`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from lamina.errors import BadFlow
from lamina.sdk.annotation_conversion import result_converter
from lamina.sdk.binding import Param, bind, bind_arguments
from lamina.sdk.workflow_tracing import WorkflowTracer, call_mode

if TYPE_CHECKING:
    from lamina.sdk.app import App
    from lamina.sdk.client import RunHandle, SpawnedCall

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
V = TypeVar("V")


class RemoteTarget(Generic[P, R_co]):
    """A target with a name and parameters that a server can run. `kind` is its part of the URL.

    `R_co` is what a call in plain Python gives. What a server answers is the end of it: of an `async def` what it returns, of
    something that yields the list.
    """

    app: App
    name: str
    params: tuple[Param, ...]
    kind: str
    returns: Any  #: annotation of one result; None: there is none
    __call__: Callable[..., Any]

    @overload
    def remote(self: RemoteTarget[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    def remote(self: RemoteTarget[P, Iterator[V]], *args: P.args, **kwargs: P.kwargs) -> list[V]: ...
    @overload
    def remote(self: RemoteTarget[P, AsyncIterator[V]], *args: P.args, **kwargs: P.kwargs) -> list[V]: ...
    @overload
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """One request; waits for its result."""
        inputs = self._inputs("remote", args, kwargs)
        return self._as_annotated(self.app.client().call(self.name, inputs, kind=self.kind))

    @overload
    def aio(self: RemoteTarget[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs) -> Awaitable[V]: ...
    @overload
    def aio(self: RemoteTarget[P, Iterator[V]], *args: P.args, **kwargs: P.kwargs) -> Awaitable[list[V]]: ...
    @overload
    def aio(self: RemoteTarget[P, AsyncIterator[V]], *args: P.args, **kwargs: P.kwargs) -> Awaitable[list[V]]: ...
    @overload
    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]: ...
    def aio(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """`.remote` for asyncio. In an `async def` workflow it is the step itself, with a type that can be awaited."""
        if call_mode.get() is not None:
            step: Awaitable[Any] = self(*args, **kwargs)
            return step
        return self._typed_call(self._inputs("aio", args, kwargs))

    @overload
    def stream(self: RemoteTarget[P, Iterator[V]], *args: P.args, **kwargs: P.kwargs) -> Iterator[V]: ...
    @overload
    def stream(self: RemoteTarget[P, AsyncIterator[V]], *args: P.args, **kwargs: P.kwargs) -> Iterator[V]: ...
    @overload
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]: ...
    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """One request; what a function yields, item by item as it comes."""
        inputs = self._inputs("stream", args, kwargs)
        return self.app.client().stream(self.name, inputs, kind=self.kind)

    def spawn(self, *args: P.args, **kwargs: P.kwargs) -> SpawnedCall:
        """One request, without waiting: the `SpawnedCall` gives the result later."""
        inputs = self._inputs("spawn", args, kwargs)
        return self.app.client().spawn(self.name, inputs, kind=self.kind)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> RunHandle:
        """Start a durable run, which survives this process and the server's: the `RunHandle` gives the result later."""
        inputs = self._inputs("submit", args, kwargs)
        return self.app.client().start(self.name, inputs, kind=self.kind)

    def map(self, items: Iterable[Any], *, max_concurrency: int = 16, return_errors: bool = False) -> Iterator[Any]:
        """One request per item, at most `max_concurrency` at once; results in the order of the items.

        An item is the argument itself, or a dict of arguments if there are several parameters. The first error ends it,
        unless `return_errors` makes results of errors.
        """
        self._not_traced("map")
        bound = (bind(self.params, item) for item in items)
        return self.app.client().map(
            self.name, bound, max_concurrency=max_concurrency, return_errors=return_errors, kind=self.kind
        )

    @cached_property
    def _as_annotated(self) -> Callable[[Any], Any]:
        """Made once: a decoder for a type takes longer to make than most results to convert."""
        return result_converter(self.returns)

    async def _typed_call(self, inputs: dict[str, Any]) -> Any:
        return self._as_annotated(await self.app.async_client().call(self.name, inputs, kind=self.kind))

    def _inputs(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        self._not_traced(verb)
        return bind_arguments(self.params, args, kwargs)

    def _not_traced(self, verb: str) -> None:
        if isinstance(call_mode.get(), WorkflowTracer):
            raise BadFlow(f".{verb} of {self.name!r} inside a workflow", hint=f"call it: {self.name}(...)")
