"""A loaded kernel graph: what a worker holds of it, how requests become its buffers, and its outputs their answers.

A request gives every input a value, or the key of a buffer: `{"key": "photos/1"}`. A constant may be given a key, too, and an
output: then the result stays in the data layer under that key, and the answer says so. Keys are those of the caller's tenant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from lamina.errors import BadValue, Cancelled, NotFound, did_you_mean
from lamina.kernels.graph import Buffer, KernelGraph
from lamina.kernels.host_run import HostGraph, stack_rows
from lamina.kernels.validation import KernelPlan, checked_key
from lamina.sdk.context import context
from lamina.sdk.tensors import Tensor, to_tensor

OIP_DTYPES = {
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bool": "BOOL",
}
"""Names that requests have for dtypes of buffers. Complex numbers have none: they are for temporaries and constants."""


class BufferAccess(Protocol):
    """Buffers by key, as the requests of one batch may reach them."""

    def read(self, request: int, key: str) -> Any:
        """The array under a key of the tenant of that request of the batch. Raises `NotFound`."""
        ...

    def write(self, request: int, key: str, array: Any) -> None: ...


class InMemoryBuffers:
    """Buffers of this process alone: for tests, notebooks and whatever runs outside of a server."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}

    def read(self, request: int, key: str) -> Any:
        if key not in self._arrays:
            raise NotFound(f"no buffer under key {key!r}", hint="app.local_buffers.write(0, key, array) puts one there")
        return self._arrays[key]

    def write(self, request: int, key: str, array: Any) -> None:
        self._arrays[checked_key(key)] = array.copy()


class BoundRequest:
    """Request with its buffers: arrays of its inputs, constants it names, and keys to leave outputs under."""

    __slots__ = ("constants", "inputs", "kept")

    def __init__(self, inputs: tuple[Any, ...], constants: dict[str, Any], kept: dict[str, str]) -> None:
        self.inputs, self.constants, self.kept = inputs, constants, kept


class LoadedKernelGraph:
    """Kernel graph ready for batches: it stands where a loaded torch model does, in a worker and in an executor."""

    has_post = True
    has_host_code = False
    takes_device_values = False

    def __init__(self, graph: KernelGraph, plan: KernelPlan) -> None:
        self.graph, self.plan = graph, plan
        self._inputs, self._outputs = graph.of_kind("input"), graph.of_kind("output")
        self._tensors = {one.name: Tensor(OIP_DTYPES[one.dtype], one.shape) for one in self._inputs}
        self._opened: HostGraph | None = None

    @property
    def host(self) -> HostGraph:
        """The graph on the host: kernels are opened when it is first needed, which on a device it is not."""
        if self._opened is None:
            self._opened = HostGraph(self.graph, self.plan)
        return self._opened

    @property
    def example(self) -> tuple[Any, ...]:
        """A batch of one, of zeros."""
        import numpy as np

        return tuple(np.zeros((1, *one.shape), one.dtype) for one in self._inputs)

    def warm_up(self) -> None:
        """Run each launch once on zeros, for a worker: what kernels import and compile in their first run is not to be taken for
        the time of a request. A graph that needs more than zeros, or cannot be opened, says so to its first request."""
        with suppress(Exception):
            for _ in islice(self.host.steps(*self.example), len(self.plan.order)):
                pass

    # --------------------------------------------------------------------- batches

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run a batch on the host; a request that cannot be bound, or whose result cannot be kept, fails alone."""
        results: list[Any] = [self._bound(place, call) for place, call in enumerate(calls)]
        groups: dict[tuple[tuple[str, int], ...], dict[int, BoundRequest]] = {}
        for place, bound in enumerate(results):
            if isinstance(bound, BoundRequest):  # those with the same constants run together
                same = tuple(sorted((name, id(array)) for name, array in bound.constants.items()))
                groups.setdefault(same, {})[place] = bound
        for members in groups.values():
            for place, answer in self._run_together(members):
                results[place] = answer
        return results

    def _run_together(self, members: Mapping[int, BoundRequest]) -> list[tuple[int, Any]]:
        """Answers of requests with the same constants. If a kernel raises they run in halves, until the one it raised for is
        alone: a graph changes nothing outside of it, so it may."""
        bound = list(members.values())
        try:
            outputs = self._outputs_of(bound)
        except Cancelled as error:
            return [(place, error) for place in members]
        except Exception as error:
            if len(members) == 1:
                return [(place, error) for place in members]
            places, half = list(members), len(members) // 2
            parts = ({place: members[place] for place in part} for part in (places[:half], places[half:]))
            return [answer for part in parts for answer in self._run_together(part)]
        rows = zip(*outputs, strict=True)
        return [(place, self._kept(place, one, row)) for (place, one), row in zip(members.items(), rows, strict=True)]

    def _outputs_of(self, bound: Sequence[BoundRequest]) -> tuple[Any, ...]:
        """Outputs of requests with the same constants. Each launch is a heartbeat."""
        beat = context().heartbeat
        for outputs in self.host.steps(*stack_rows([one.inputs for one in bound]), constants=bound[0].constants):
            if outputs is not None:
                return outputs
            if not beat():
                break
        raise Cancelled("cancelled: its clients have left")

    def rows(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Inputs of each request for an executor: a tuple of arrays, or an exception."""
        found: list[Any] = []
        for place, call in enumerate(calls):
            keyed = next((name for name, value in call.items() if isinstance(value, Mapping)), None)
            bound: BoundRequest | Exception
            if keyed is None:
                bound = self._bound(place, call)
            else:
                bound = BadValue(f"{keyed[:80]}: requests name no keys on a GPU", hint="send the array, or leave an output out")
            found.append(bound.inputs if isinstance(bound, BoundRequest) else bound)
        return found

    def answers(self, rows: Sequence[Any]) -> list[Any]:
        """One answer for each row of outputs."""
        return [self._answer(row if isinstance(row, tuple) else (row,), {}) for row in rows]

    def _answer(self, row: tuple[Any, ...], kept: Mapping[str, str]) -> Any:
        shown = [
            (one.name, {"key": kept[one.name]} if one.name in kept else array)
            for one, array in zip(self._outputs, row, strict=True)
        ]
        return dict(shown) if len(shown) > 1 else shown[0][1]

    def _kept(self, place: int, bound: BoundRequest, row: tuple[Any, ...]) -> Any:
        import numpy as np

        try:
            for one, array in zip(self._outputs, row, strict=True):
                if one.name in bound.kept:
                    _access().write(place, bound.kept[one.name], np.asarray(array))  # a row without axes is a number
        except Exception as error:
            return error
        return self._answer(row, bound.kept)

    # --------------------------------------------------------------------- requests

    def _bound(self, place: int, call: Mapping[str, Any]) -> BoundRequest | Exception:
        try:
            return self.bind(place, call)
        except Exception as error:
            return error

    def bind(self, place: int, call: Mapping[str, Any]) -> BoundRequest:
        """Bind the buffers of a request; raises `BadValue`, which names the buffer, what was given and what to do."""
        given = {name: value for name, value in call.items() if value is not None}
        known = {one.name: one for one in self.graph.spec.buffers if one.kind != "temporary"}
        for name in given:
            if name not in known:
                raise BadValue(
                    f"{name[:80]!r}: no buffer of this graph", hint=did_you_mean(name, known, f"there is {', '.join(known)}")
                )
        inputs = tuple(self._input(place, one, given) for one in self._inputs)
        constants = {}
        for one in self.graph.of_kind("constant"):
            key = _key_in(one, given[one.name]) if one.name in given else one.key
            if key and (one.name in given or one.name not in self.graph.constants):
                constants[one.name] = self._read(place, one, key)
        kept: dict[str, str] = {}
        for one in self._outputs:
            if one.name in given:
                key = _key_in(one, given[one.name])
                other = next((name for name, taken in kept.items() if taken == key), None)
                if other is not None:
                    raise BadValue(
                        f"{one.name}: key {key!r} is that of {other!r} too", hint="leave each output under a key of its own"
                    )
                kept[one.name] = key
        return BoundRequest(inputs, constants, kept)

    def _input(self, place: int, buffer: Buffer, given: Mapping[str, Any]) -> Any:
        if buffer.name not in given:
            raise BadValue(f"{buffer.name}: missing", hint=f'send {buffer.dtype} {list(buffer.shape)}, or {{"key": ...}}')
        value = given[buffer.name]
        if isinstance(value, Mapping):
            return self._read(place, buffer, _key_in(buffer, value))
        return to_tensor(buffer.name, self._tensors[buffer.name], value)

    def _read(self, place: int, buffer: Buffer, key: str) -> Any:
        array = _access().read(place, key)
        dtype, shape = getattr(getattr(array, "dtype", None), "name", type(array).__name__), tuple(getattr(array, "shape", ()))
        if dtype != buffer.dtype or shape != buffer.shape:
            raise BadValue(
                f"{buffer.name}: under key {key!r} is {dtype} {list(shape)}, the graph takes {buffer.dtype} {list(buffer.shape)}",
                hint="put an array of that dtype and shape there, or name another key",
            )
        return array


def _access() -> BufferAccess:
    found = context().buffers
    if found is None:
        raise BadValue("key: there is no data layer here", hint="call it on a server, or with .local(...)")
    return found


def _key_in(buffer: Buffer, value: Any) -> str:
    if not isinstance(value, Mapping) or set(value) != {"key"}:
        said = (
            f"an object with {', '.join(map(str, list(value)[:5])) or 'nothing'}"
            if isinstance(value, Mapping)
            else type(value).__name__
        )
        raise BadValue(
            f'{buffer.name}: {said} where {{"key": ...}} is taken', hint=f"{buffer.name} is an {buffer.kind} of this graph"
        )
    return checked_key(value["key"], f"{buffer.name}: key")
