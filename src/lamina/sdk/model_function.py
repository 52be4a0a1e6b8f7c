"""Functions of model files, without user code: the parameters are the inputs the file names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lamina.sdk.binding import NOTHING, Param
from lamina.sdk.function import Function
from lamina.sdk.tensors import Port, Signature
from lamina.types import FunctionSpec

if TYPE_CHECKING:
    from lamina.sdk.app import App


def _no_code() -> None:
    """Placeholder target: there is no code to inspect."""


class ModelFunction(Function[..., Any]):
    """A function of a model file. `make` opens the file, in a worker; what it makes has `load` and is called with whole batches,
    as a user's class is."""

    def __init__(
        self,
        app: App,
        spec: FunctionSpec,
        signature: Signature,
        make: Callable[[], Any],
        place: str,
    ) -> None:
        super().__init__(app, _no_code, spec, place)
        self.target = make
        self.is_class = True
        self.signature = signature
        self.params = tuple(Param(port.name, port.required) for port in signature.inputs)
        self.defaults = {port.name: NOTHING if port.required else None for port in signature.inputs}

    @property
    def doc(self) -> str:
        return f"The model in {self.place}"

    def __repr__(self) -> str:
        return f"<model {self.name!r} of app {self.app.name!r}>"


class RowBatcher:
    """Row batching: requests of a batch as arrays with a first axis that counts them, and back.

    Items of unequal shape cannot be in one array: they run after one another.
    """

    def __init__(self, signature: Signature, batched: bool) -> None:
        self._inputs = {port.name: port for port in signature.inputs}
        self._batched = batched
        self._single = len(signature.outputs) == 1

    def run(self, named: dict[str, Any], forward: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        """Run a batch; `forward` takes and gives arrays by name."""
        if not self._batched:
            feeds = {name: _array(self._inputs[name], value) for name, value in named.items() if value is not None}
            return self._result(forward(feeds))
        count = len(next(iter(named.values())))
        rows = [
            {name: _array(self._inputs[name], column[at]) for name, column in named.items() if column[at] is not None}
            for at in range(count)
        ]
        groups: dict[Any, list[int]] = {}
        for at, row in enumerate(rows):
            groups.setdefault(tuple((name, array.shape) for name, array in row.items()), []).append(at)
        results: list[Any] = [None] * count
        for members in groups.values():
            for at, result in zip(members, self._run_group([rows[at] for at in members], forward), strict=True):
                results[at] = result
        return results

    def _run_group(self, rows: list[dict[str, Any]], forward: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Any]:
        import numpy

        outputs = forward({name: numpy.stack([row[name] for row in rows]) for name in rows[0]})
        for name, array in outputs.items():
            if not array.shape or len(array) != len(rows):
                raise ValueError(f"output {name!r} has shape {list(array.shape)} for a batch of {len(rows)}")
        return [self._result({name: array[at] for name, array in outputs.items()}) for at in range(len(rows))]

    def _result(self, outputs: dict[str, Any]) -> Any:
        told = {name: _plain(array) for name, array in outputs.items()}
        return next(iter(told.values())) if self._single else told


def _array(port: Port, value: Any) -> Any:
    """The array of an input. The runner has made the tensor; text is objects here."""
    import numpy

    assert port.tensor is not None, "a model file's inputs are tensors"
    if port.tensor.dtype != "BYTES":
        return value
    held = numpy.array(value, dtype=object)
    return numpy.vectorize(lambda one: one.decode("utf-8", "replace"), otypes=[object])(held) if held.size else held


def _plain(array: Any) -> Any:
    """An output as a value: text becomes lists of bytes; everything else stays an array."""
    import numpy

    if array.dtype != object:
        return array
    return numpy.vectorize(lambda one: one if isinstance(one, bytes) else str(one).encode(), otypes=[object])(array).tolist()
