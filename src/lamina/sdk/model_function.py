"""Functions of model files, without user code: the parameters are the inputs the file names.

ONNX files and torch modules run in batches on the CPU; a torch file is also a `TorchModel`, which runs on a GPU as a CUDA graph,
on the slice a batch is given. Torch files are exported graphs, or safetensors beside a config.json that names the module:

    {"module": "torchvision.models:resnet50", "arguments": {"num_classes": 10},
     "inputs": {"image": ["FP32", [-1, 3, 224, 224]]}, "outputs": {"scores": ["FP32", [-1, 10]]}}
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue, LoadFailed
from lamina.sdk.binding import NOTHING, Param
from lamina.sdk.function import Function
from lamina.sdk.json_schema import port_schema
from lamina.sdk.model_signatures import ModelFileSignature
from lamina.sdk.onnx import OnnxModel
from lamina.sdk.pretrained import read_pretrained
from lamina.sdk.tensors import NUMPY, Port, Signature, Tensor, to_tensor
from lamina.sdk.torch_model import TorchModel, to_numpy
from lamina.sdk.weights_file import load_weights
from lamina.types import FunctionSpec

if TYPE_CHECKING:
    from lamina.sdk.app import App


log = logging.getLogger(__name__)

MAX_NOISE = 0.05
"""Of the largest number of a result: what quantized models are off by when the scale of a batch is another."""


def no_code() -> None:
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
        unbatched: str = "",
    ) -> None:
        super().__init__(app, no_code, spec, place)
        self.batching = f"one at a time: {unbatched}" if unbatched else f"batch {spec.max_batch}"  #: as users are told
        self.target = make
        self.is_class = True
        self.signature = signature
        self.params = tuple(Param(port.name, port.required, schema=port_schema(port)) for port in signature.inputs)
        self.defaults = {port.name: NOTHING if port.required else None for port in signature.inputs}

    @property
    def result_schema(self) -> dict[str, Any]:
        ports = self.signature.outputs
        schemas = {port.name: port_schema(port) for port in ports}
        if len(ports) == 1:
            return schemas[ports[0].name]
        return {"type": "object", "properties": schemas, "required": list(schemas)}

    @property
    def doc(self) -> str:
        return f"The model {Path(self.place).name}"  # its folder is no client's business

    def __repr__(self) -> str:
        return f"<model {self.name!r} of app {self.app.name!r}>"


class RowBatcher:
    """Row batching: requests of a batch as arrays with a first axis that counts them, and back.

    Items of unequal shape cannot be in one array: they run after one another. What a file calls its first axis is no proof that
    rows are strangers to each other (a softmax over it, scores of every text against every image): the first batch is compared
    with what its first row gives alone. If that is another result, requests are run one at a time from then on.
    """

    def __init__(self, signature: Signature, batched: bool, name: str = "model") -> None:
        self._name = name
        self._are_independent: bool | None = None  #: whether a row is the same in company; None: no batch of unlike rows was seen
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

        if len(rows) > 1 and self._are_independent is False:
            return [result for row in rows for result in self._run_group([row], forward)]
        outputs = forward({name: numpy.stack([row[name] for row in rows]) for name in rows[0]})
        for name, array in outputs.items():
            if not array.shape or len(array) != len(rows):
                if len(rows) > 1:  # its first axis is no batch after all: one at a time it may be right
                    return [result for row in rows for result in self._run_group([row], forward)]
                raise ValueError(f"output {name!r} has shape {list(array.shape)} for a batch of {len(rows)}")
        if len(rows) > 1 and self._are_independent is None and not self._compare_alone(rows, outputs, forward):
            return self._run_group(rows, forward)
        return [self._result({name: array[at] for name, array in outputs.items()}) for at in range(len(rows))]

    def _compare_alone(
        self, rows: list[dict[str, Any]], outputs: dict[str, Any], forward: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> bool:
        """Whether the first row gives alone what it has given in company."""
        first = {name: array[None] for name, array in rows[0].items()}
        alone = forward(first)
        if all(_is_close(alone[name][0], array[0]) for name, array in outputs.items()):
            if any(not _is_close(row[name], rows[0][name]) for row in rows[1:] for name in row):
                self._are_independent = True  # of equal rows a mean is what each of them is
            return True
        again = forward(first)
        self._are_independent = not all(_is_close(again[name][0], array[0]) for name, array in alone.items())  # it plays dice
        if not self._are_independent:
            log.warning("%s: requests of one batch change each other's results: they are run one at a time", self._name)
        return self._are_independent

    def _result(self, outputs: dict[str, Any]) -> Any:
        values = {name: _plain(array) for name, array in outputs.items()}
        return next(iter(values.values())) if self._single else values


def _array(port: Port, value: Any) -> Any:
    """The array of an input. The runner has made the tensor; text is objects here."""
    import numpy

    assert port.tensor is not None, "a model file's inputs are tensors"
    if port.tensor.dtype != "BYTES":
        return value
    held = numpy.array(value, dtype=object)
    return numpy.vectorize(lambda one: one.decode("utf-8", "replace"), otypes=[object])(held) if held.size else held


def _is_close(left: Any, right: Any) -> bool:
    """Whether two results are one, but for the noise of another order of summation, or of scales made of a whole batch."""
    import numpy

    left, right = numpy.asarray(left), numpy.asarray(right)
    if left.shape != right.shape or left.dtype.kind not in "fiu":
        return left.shape == right.shape and bool((left == right).all())
    if not left.size:
        return True
    least = 1.0 if left.dtype.kind in "iu" else 1e-6
    largest = float(numpy.nanmax(numpy.abs(left.astype("f8")), initial=0.0))
    return bool(numpy.allclose(left, right, rtol=MAX_NOISE, atol=max(least, MAX_NOISE * largest), equal_nan=True))


def _plain(array: Any) -> Any:
    """An output as a value: text becomes text, or lists of it; everything else stays an array."""
    if isinstance(array, str | bytes):  # one element of an array of text
        return array
    return array if array.dtype != object else array.tolist()


class OnnxFunction:
    def __init__(self, path: Path, signature: Signature, batched: bool) -> None:
        self._model = OnnxModel(path, ["CPUExecutionProvider"])
        self._outputs = [port.name for port in signature.outputs]
        self._rows = RowBatcher(signature, batched, path.name)

    def load(self) -> None:
        self._model.session()

    def __call__(self, /, **inputs: Any) -> Any:
        return self._rows.run(inputs, self._forward)

    def _forward(self, feeds: dict[str, Any]) -> dict[str, Any]:
        session = self._model.session()
        try:
            results = session.run(self._outputs, feeds)
        except Exception as error:
            if type(error).__name__ == "InvalidArgument":  # the caller's: the file says what fits, and this does not
                raise BadValue(str(error).partition("\n")[0]) from None
            raise
        return dict(zip(self._outputs, results, strict=True))


_TORCH = {"BF16": "bfloat16"}
CONFIG = "config.json"


class SafetensorsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    module: str
    inputs: dict[str, tuple[str, list[int]]]
    outputs: dict[str, tuple[str, list[int]]]
    arguments: dict[str, Any] = {}


def read_safetensors(path: Path) -> tuple[ModelFileSignature, Callable[[], Any]]:
    """Signature from the config.json, and a factory of the module."""
    file = path.parent / CONFIG
    try:
        content = file.read_bytes()
        named = msgspec.json.decode(content, type=dict[str, Any])
        if "architectures" in named and "module" not in named:
            return read_pretrained(path, named)
        config = msgspec.json.decode(content, type=SafetensorsConfig)
    except (OSError, msgspec.MsgspecError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise BadValue(
            f"{file}: {said}", hint="name module, inputs and outputs there: docs/reference/open-inference.md"
        ) from None
    tensors = (*config.inputs.values(), *config.outputs.values())
    batched = all(shape and shape[0] == -1 for _, shape in tensors) and bool(config.inputs)
    ports = [
        tuple(Port(name, Tensor(dtype, shape[int(batched) :])) for name, (dtype, shape) in found.items())
        for found in (config.inputs, config.outputs)
    ]
    return ModelFileSignature(Signature(ports[0], ports[1], "pytorch_safetensors"), batched), partial(_build, config, path)


def _build(config: SafetensorsConfig, path: Path) -> Any:
    where, _, name = config.module.partition(":")
    try:
        made = getattr(import_module(where), name)(**config.arguments)
    except (ImportError, AttributeError, TypeError) as error:
        raise LoadFailed(
            f"{path.parent / CONFIG}: module {config.module!r}: {error}", hint="write package.module:Class"
        ) from None
    load_weights(made, path)
    return made.eval().requires_grad_(False)


def load_exported(path: Path) -> Any:
    """Load an exported graph from a copy without its sample inputs: torch may open those with pickle, and they are not needed."""
    import torch

    with tempfile.TemporaryFile() as copy, zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as kept:
        for name in source.namelist():
            if "/data/sample_inputs/" in name:
                kept.writestr(name, b"")
                continue
            with source.open(name) as part, kept.open(name, "w", force_zip64=True) as into:
                shutil.copyfileobj(part, into, 2**20)
        kept.close()
        copy.seek(0)
        return torch.export.load(copy).module()


class TorchFunction:
    """Function of a torch file on the CPU. `least`: batches of fewer rows are padded."""

    def __init__(self, make: Callable[[], Any], least: int, signature: Signature, batched: bool) -> None:
        self._make = make
        self._least = least if batched else 0
        self._rows = RowBatcher(signature, batched)
        self._inputs = [(port.name, port.tensor.dtype) for port in signature.inputs if port.tensor is not None]
        self._outputs = [port.name for port in signature.outputs]
        self._module: Any = None

    def load(self) -> None:
        try:
            import torch
        except ImportError:
            raise LoadFailed("torch is not installed", hint="pip install 'lamina[torch]'") from None
        self._torch = torch
        self._module = self._make()

    def __call__(self, /, **inputs: Any) -> Any:
        return self._rows.run(inputs, self._forward)

    def _forward(self, feeds: dict[str, Any]) -> dict[str, Any]:
        torch = self._torch
        arrays = [torch.from_numpy(feeds[name].copy()) for name, _ in self._inputs]
        count = len(arrays[0]) if self._least else 0
        if count < self._least:
            arrays = [torch.cat([array, array[-1:].expand(self._least - count, *array.shape[1:])]) for array in arrays]
        wanted = [
            array.to(getattr(torch, _TORCH[dtype])) if dtype in _TORCH else array
            for array, (_, dtype) in zip(arrays, self._inputs, strict=True)
        ]
        with torch.inference_mode():
            made = self._module(*wanted)
        parts = made if isinstance(made, tuple | list) else (made,)
        found = [to_numpy(part) for part in parts]
        return {name: array[:count] if self._least else array for name, array in zip(self._outputs, found, strict=True)}


class TorchFileModel(TorchModel):
    """TorchModel of a file. `make` opens it; batches of fewer rows than `least` are padded."""

    def __init__(self, make: Callable[[], Any], least: int, signature: Signature, batched: bool) -> None:
        self._make = make
        self._least = least
        self._inputs = signature.inputs
        self._outputs = [port.name for port in signature.outputs]

    def load(self) -> tuple[Any, Any]:
        import torch

        example = []
        for port in self._inputs:
            assert port.tensor is not None, "a model file's inputs are tensors"
            example.append(torch.zeros((1, *port.tensor.shape), dtype=getattr(torch, NUMPY[port.tensor.dtype])))
        return _inference_module(self._make(), self._least), tuple(example)

    def pre(self, /, **named: Any) -> Any:  # type: ignore[override]
        return tuple(_input_tensor(port, named) for port in self._inputs)

    def post(self, row: Any) -> Any:
        parts = row if isinstance(row, tuple) else (row,)
        return dict(zip(self._outputs, parts, strict=True)) if len(self._outputs) > 1 else parts[0]


def check_gpu_signature(signature: Signature, batched: bool) -> None:
    """Check that a signature can be captured as a graph: one size of everything but the batch."""
    for port in signature.inputs:
        assert port.tensor is not None, "a model file's inputs are tensors"
        if port.tensor.dtype in ("BYTES", "BF16") or not batched or -1 in port.tensor.shape:
            raise BadValue(
                f"gpu: input {port.name!r} is {port.tensor.dtype} {list(port.tensor.shape)}{'' if batched else ', not batched'}",
                hint="a GPU takes batches of numbers of one shape: export the model so, or leave gpu out",
            )


def _input_tensor(port: Port, named: dict[str, Any]) -> Any:
    assert port.tensor is not None, "a model file's inputs are tensors"
    return to_tensor(port.name, port.tensor, named[port.name])


def _inference_module(inner: Any, least: int) -> Any:
    """Inference module around an exported graph, which has no train mode to switch."""
    import torch

    class Whole(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def train(self, mode: bool = True) -> Any:
            return self

        def forward(self, *parts: Any) -> Any:
            count = parts[0].shape[0]
            if count >= least:
                return self.inner(*parts)
            filled = [torch.cat([part, part[-1:].expand(least - count, *part.shape[1:])]) for part in parts]
            made = self.inner(*filled)
            return tuple(part[:count] for part in made) if isinstance(made, tuple | list) else made[:count]

    return Whole()
