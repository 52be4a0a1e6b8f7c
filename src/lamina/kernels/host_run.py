"""Kernel graphs on the host: launches are the kernels' twins on numpy arrays, one by one, and a run may pause between two.

This is the twin of the device for tests and servers without one. It keeps to the same plan of memory: temporaries share one
piece, by the same offsets, so that a graph that would go wrong there goes wrong here. Outputs and temporaries are zero when a run
begins: a kernel that writes less than it declares shows zeros, and nothing of another request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lamina.errors import BadValue, LoadFailed
from lamina.kernels.graph import Argument, Buffer, KernelGraph
from lamina.kernels.sources import HostKernel
from lamina.kernels.validation import KernelPlan, check_graph


class HostGraph:
    """Loaded graph: kernels opened, constants in memory. Calls take one array for each input, with the batch axis first."""

    def __init__(self, graph: KernelGraph, plan: KernelPlan | None = None) -> None:
        self.graph, self.plan = graph, plan or check_graph(graph)
        self._inputs, self._outputs = graph.of_kind("input"), graph.of_kind("output")
        self._kernels = [self._open(place) for place in self.plan.order]
        self.constants = {name: as_constant(graph.buffer(name), make()) for name, make in graph.constants.items()}
        self._free: dict[int, list[Any]] = {}  #: memory for temporaries by batch, of runs that have ended

    def _open(self, place: int) -> HostKernel:
        launch = self.graph.spec.launches[place]
        roles = [arg.role for arg in launch.args if isinstance(arg, Argument)]
        return self.graph.kernels[launch.kernel].open_host(roles)

    @property
    def launches(self) -> int:
        """Launches of one run."""
        return len(self.plan.order) * self.graph.spec.iterations

    def __call__(self, *inputs: Any, constants: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Run it all; one array for each output."""
        (outputs,) = [found for found in self.steps(*inputs, constants=constants) if found is not None]
        return outputs

    def steps(self, *inputs: Any, constants: Mapping[str, Any] | None = None) -> Iterator[tuple[Any, ...] | None]:
        """Run it launch by launch: None after each but the last, then the outputs."""
        import numpy as np

        held = {**self.constants, **(constants or {})}
        missing = next((one for one in self.graph.of_kind("constant") if one.name not in held), None)
        if missing is not None:
            raise BadValue(f"constant {missing.name!r}: nothing under key {missing.key!r}", hint="put it there first")
        count = len(inputs[0]) if inputs else 1
        free = self._free.setdefault(count, [])
        memory = free.pop() if free else np.empty(self.plan.temporary_bytes * count, np.uint8)
        memory.fill(0)
        arrays = {buffer.name: _read_only(array) for buffer, array in zip(self._inputs, inputs, strict=True)}
        arrays |= {name: _read_only(array) for name, array in held.items()}
        arrays |= {buffer.name: np.zeros((count, *buffer.shape), buffer.dtype) for buffer in self._outputs}
        for name, at in self.plan.offsets.items():
            buffer = self.graph.buffer(name)
            part = memory[at * count : at * count + buffer.nbytes * count]
            arrays[name] = part.view(buffer.dtype).reshape(count, *buffer.shape)
        for buffer in self.graph.spec.buffers:
            if buffer.start:
                arrays[buffer.name][...] = arrays[buffer.start]
        left = self.launches
        for _ in range(self.graph.spec.iterations):
            for place, kernel in zip(self.plan.order, self._kernels, strict=True):
                kernel(*self._arguments(place, arrays))
                left -= 1
                if left:
                    yield None
        free.append(memory)
        yield tuple(arrays[buffer.name] for buffer in self._outputs)

    def _arguments(self, place: int, arrays: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        for arg in self.graph.spec.launches[place].args:
            if isinstance(arg, Argument):
                found.append(arrays[arg.buffer] if arg.role != "in" else _read_only(arrays[arg.buffer]))
            else:
                found.append(arg)
        return found


def as_constant(buffer: Buffer, value: object) -> Any:
    """Contents of a constant, as it was declared."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype.name != buffer.dtype or array.shape != buffer.shape:
        made = f"{array.dtype.name} {list(array.shape)}"
        raise LoadFailed(
            f"constant {buffer.name!r}: {made} where {buffer.dtype} {list(buffer.shape)} is declared",
            hint="make it as it is declared",
        )
    return array


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def stack_rows(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Requests as arrays with a batch axis, one for each input."""
    import numpy as np

    return [np.stack(column) for column in zip(*rows, strict=True)]
