"""A loaded instance of a function: what a worker holds, and what `.local` opens in process.

A request must not fail because of its neighbours. When a batched call raises, the batch is halved until the request
that made it raise stands alone; a function that must not run twice (`idempotent=False`) fails as a whole instead.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any

from lamina.encoding import RaisedResponse, Response
from lamina.errors import BadValue, LoadFailed
from lamina.sdk.binding import NOTHING
from lamina.sdk.context import active_context, context, requests_again
from lamina.sdk.loaded_kernel_graph import LoadedKernelGraph
from lamina.sdk.tensors import to_tensor
from lamina.sdk.torch_model import LoadedTorchModel, TorchModel
from lamina.sdk.user_errors import message_of, user_frames_only

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from lamina.sdk.coroutine_runner import CoroutineRunner
    from lamina.sdk.function import Function

Inputs = dict[str, Any]
Emit = Callable[[Any], bool]


class Runner:
    def __init__(self, function: Function[..., Any]) -> None:
        """Instantiate and load; the user's error, if any, is the cause of the `LoadFailed` that is raised."""
        self.name = function.name
        self._batched = function.spec.max_batch > 1
        self._may_rerun = function.spec.idempotent
        self._defaults = function.defaults
        self._closed = False
        self._streams = function.streams
        self._is_async = function.is_async
        self._incoming = function.incoming
        self._convert_message = function.convert_message
        self._coroutines: CoroutineRunner | None = None
        self._converters = function.converters
        self._tensors = {port.name: port.tensor for port in function.signature.inputs if port.tensor is not None}
        self._instance: Any = None
        self.model: LoadedTorchModel | LoadedKernelGraph | None = None  #: what the GPU executor runs there instead of on the host
        self._call: Callable[..., Any] = function.target
        if function.is_class:
            try:
                self._instance = self._call = function.target(*function.bound[0], **function.bound[1])
                if isinstance(self._instance, TorchModel):
                    self.model = LoadedTorchModel(self._instance)
                elif isinstance(self._instance, LoadedKernelGraph):
                    self.model = self._instance
                elif hasattr(self._instance, "load"):
                    self._awaited(self._instance.load())
            except (Exception, SystemExit) as error:
                raise LoadFailed(f"function {self.name!r} cannot be loaded: {message_of(error)}") from user_frames_only(error)

    def warm_up(self) -> None:
        """For a worker, before it takes calls."""
        if isinstance(self.model, LoadedKernelGraph):
            self.model.warm_up()

    def run(self, calls: list[Inputs], emit: Emit | None = None) -> list[Any]:
        """Run a batch: one entry per call, its result or the exception that it ended with.

        `emit` takes what is yielded as it comes, and returns false when no more is wanted.
        """
        if not self._batched and self.model is None:
            return [self._convert_inputs(inputs) or self._call_safely(inputs, emit) for inputs in calls]
        results: list[Any] = [self._missing_parameter(inputs) or self._convert_inputs(inputs) for inputs in calls]
        valid = [index for index, wrong in enumerate(results) if wrong is None]
        if valid:
            run = self._run_batch if self.model is None else self.model.run
            whole = context() if len(valid) == len(calls) else context().narrowed(valid)
            with active_context(whole):
                found = run([calls[index] for index in valid])
            for index, result in zip(valid, found, strict=True):
                results[index] = result
        return results

    def close(self) -> None:
        """Call the instance's own `close`, if it has one, once."""
        if not self._closed:
            self._closed = True
            try:
                if hasattr(self._instance, "close"):
                    self._awaited(self._instance.close())
            finally:
                if self._coroutines is not None:
                    self._coroutines.close()

    def _missing_parameter(self, inputs: Inputs) -> Exception | None:
        for name, default in self._defaults.items():
            if default is NOTHING and name not in inputs:
                return BadValue(f"missing parameter {name!r}")
        return None

    def _convert_inputs(self, inputs: Inputs) -> Exception | None:
        """Convert inputs to the tensors, dataclasses and the like they are annotated as."""
        try:
            for name, make in self._converters.items():
                if name in inputs:
                    inputs[name] = make(inputs[name])
            for name, tensor in self._tensors.items():
                if name in inputs and self.model is None:  # a TorchModel has its own way
                    inputs[name] = to_tensor(name, tensor, inputs[name])
        except BadValue as error:
            return error
        return None

    def _run_batch(self, calls: list[Inputs]) -> list[Any]:
        columns = {name: [inputs.get(name, default) for inputs in calls] for name, default in self._defaults.items()}
        result = self._call_safely(columns)
        if not isinstance(result, Exception):
            return self._split_results(result, len(calls))
        if len(calls) == 1 or not self._may_rerun:
            return [result] * len(calls)
        half, results = len(calls) // 2, list[Any]()
        for indices in (range(half), range(half, len(calls))):
            with requests_again(indices):
                results += self._run_batch([calls[index] for index in indices])
        return results

    def _call_safely(self, inputs: Inputs, emit: Emit | None = None) -> Any:
        try:
            self._open_messages(inputs)
            result = self._call(**inputs)
            if self._is_async:
                result = self._coroutine_runner().iterate(result) if self._streams else self._coroutine_runner().run(result)
            return _collect_items(result, emit) if self._streams else result
        except SystemExit as error:
            return RuntimeError(f"function {self.name!r} called sys.exit({error.code!r})")
        except Response as response:
            return RaisedResponse(response)
        except Exception as error:
            return error

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop of the instance, which `load` ran on."""
        return self._coroutine_runner().run(coroutine)

    async def run_concurrently(self, inputs: Inputs, emit: Emit | None, threads: Executor | None) -> Any:
        """One call on the loop of the instance, beside others: its result, or the exception that it ended with. A generator that
        is not asynchronous runs in one of the `threads`."""
        wrong = self._convert_inputs(inputs)
        if wrong is not None:
            return wrong
        try:
            if threads is not None:
                import asyncio

                around = contextvars.copy_context()
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(threads, around.run, self._call_safely, inputs, emit)
            self._open_messages(inputs)
            result = self._call(**inputs)
            if not self._streams:
                return await result
            items: list[Any] = []
            async for item in result:
                if emit is None:
                    items.append(item)
                elif not emit(item):
                    await result.aclose()
                    break
            return items if emit is None else None
        except SystemExit as error:
            return RuntimeError(f"function {self.name!r} called sys.exit({error.code!r})")
        except Response as response:
            return RaisedResponse(response)
        except Exception as error:
            return error

    def _open_messages(self, inputs: Inputs) -> None:
        """A list given for what a function reads message by message is read that way; each message is converted as it is read."""
        given = inputs.get(self._incoming) if self._incoming else None
        if isinstance(given, list | tuple):
            inputs[self._incoming] = given = _each(given)
        if isinstance(given, AsyncIterator) and self._convert_message is not None:
            inputs[self._incoming] = _converted(given, self._convert_message)

    def _coroutine_runner(self) -> CoroutineRunner:
        if self._coroutines is None:
            from lamina.sdk.coroutine_runner import CoroutineRunner

            self._coroutines = CoroutineRunner()
        return self._coroutines

    def _awaited(self, result: Any) -> Any:
        """Await the result of a hook: `load` and `close` may be `async def` as well."""
        return self._coroutine_runner().run(result) if inspect.iscoroutine(result) else result

    def _split_results(self, result: Any, count: int) -> list[Any]:
        if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
            wrong: Exception = TypeError(
                f"function {self.name!r} returned {type(result).__name__} for a batch of {count}; "
                "a batched function returns a list with one entry per request"
            )
        elif len(result) != count:
            wrong = ValueError(
                f"function {self.name!r} returned {len(result)} results for a batch of {count}; "
                "a batched function returns one entry per request, in their order"
            )
        else:
            return list(result)
        return [wrong] * count


async def _each(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def _converted(messages: AsyncIterator[Any], convert: Callable[[Any], Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield convert(message)


def _collect_items(items: Generator[Any, Any, Any], emit: Emit | None) -> list[Any] | None:
    """The yielded items as a list, unless `emit` takes each as it comes. Either way each is a heartbeat."""
    kept: list[Any] = []
    beat = context().heartbeat
    for item in items:
        if emit is None:
            kept.append(item)
        if not (beat() if emit is None else emit(item)):
            items.close()
    return kept if emit is None else None
