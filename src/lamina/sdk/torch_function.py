"""Functions of torch files without user code: exported graphs, and safetensors beside a config.json that names the module.

{"module": "torchvision.models:resnet50", "arguments": {"num_classes": 10},
 "inputs": {"image": ["FP32", [-1, 3, 224, 224]]}, "outputs": {"scores": ["FP32", [-1, 10]]}}
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue, LoadFailed
from lamina.sdk.model_function import RowBatcher
from lamina.sdk.onnx_file import ModelFileSignature
from lamina.sdk.tensors import Port, Signature, Tensor
from lamina.sdk.torch_model import to_numpy
from lamina.sdk.weights_file import load_weights

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
        config = msgspec.json.decode(file.read_bytes(), type=SafetensorsConfig)
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

    def __call__(self, **inputs: Any) -> Any:
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
