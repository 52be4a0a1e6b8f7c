"""Torch files as `TorchModel`: where there is a GPU they run there as a CUDA graph, on the slice a batch is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.errors import BadValue
from lamina.sdk.tensor_conversion import to_tensor
from lamina.sdk.tensors import NUMPY, Port, Signature
from lamina.sdk.torch_model import TorchModel


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

    def pre(self, **named: Any) -> Any:  # type: ignore[override]
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
