"""Torch models: `class Classify(lamina.TorchModel)` makes a function of a torch module.

The user says what the module is (`load`), how a request becomes tensors (`pre`) and how a row of the output becomes an
answer (`post`). Batching, padding, devices, CUDA graphs and paging of weights are then ours: on a GPU the module runs as a
graph on whatever slice a batch is given, on a CPU it runs as it is, on the cores of its slice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from lamina.errors import BadValue
from lamina.sdk.context import RequestContext, active_context, context, requests_of
from lamina.sdk.model_sources import fetch_model
from lamina.sdk.weights_file import load_weights

Inputs = dict[str, Any]


class TorchModel:
    """Base class of torch models. The `example` that `load` returns is a batch of one: a tensor, or a tuple of them for a module
    with several inputs."""

    weights: str = ""  #: a .safetensors file, or its address, read into the module after `load`
    weights_sha256: str = ""  #: checksum that it must have; "": any

    def load(self) -> tuple[Any, Any]:
        """Load the module: returns (module, example)."""
        raise NotImplementedError("write load(self): it returns a torch module and an example input, a batch of one")

    def pre(self, x: Any) -> Any:
        """One request's inputs as an array without the batch dimension, or a tuple of them; its parameters are the function's."""
        return x

    def post(self, row: Any) -> Any:
        """One answer from one row of the output, a numpy array, or a tuple of them."""
        return row

    def __call__(self, **inputs: Any) -> Any:
        raise BadValue("a TorchModel is called with whole batches", hint="use .local(...) or a client")


class LoadedTorchModel:
    """A loaded torch model: the module ready for inference, on the host."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        loaded = model.load()
        if not isinstance(loaded, tuple) or len(loaded) != 2:
            raise BadValue(
                f"{type(model).__name__}.load returned {type(loaded).__name__}", hint="return (module, example), a batch of one"
            )
        self.module, example = loaded
        self.example: tuple[Any, ...] = tuple(example) if isinstance(example, tuple | list) else (example,)
        if hasattr(self.module, "eval"):
            self.module.eval().requires_grad_(False)
        if model.weights:
            load_weights(self.module, fetch_model(model.weights, sha256=model.weights_sha256))
        self._device = os.environ.get("LAMINA_TORCH_DEVICE", "cpu")
        if self._device != "cpu":  # alone in its process
            self.module.to(self._device)
        self.has_post = type(model).post is not TorchModel.post
        self.takes_device_values = type(model).pre is TorchModel.pre  #: else the user's own `pre` wants arrays of the host

    @property
    def has_pre(self) -> bool:
        return not self.takes_device_values

    @property
    def has_host_code(self) -> bool:
        """Whether a request runs code of the user's besides the module."""
        return self.has_pre or self.has_post

    def rows(self, calls: Sequence[Inputs]) -> list[Any]:
        """Each request prepared: a tuple of arrays, or the exception its inputs ended with. Its context is its own."""
        if not self.has_pre:
            return [self._row(inputs) for inputs in calls]
        return [in_request(request, self._row, inputs) for request, inputs in zip(requests_of(len(calls)), calls, strict=True)]

    def answers(self, rows: Sequence[Any]) -> list[Any]:
        """One answer, or exception, per row of the output; in the context of its request, as well."""
        if not self.has_post:
            return list(rows)
        return [in_request(request, self._answer, row) for request, row in zip(requests_of(len(rows)), rows, strict=True)]

    def run(self, calls: Sequence[Inputs]) -> list[Any]:
        """Run a batch on the host: pre, forward, post; a request that cannot be prepared fails alone."""
        results = self.rows(calls)
        good = [index for index, row in enumerate(results) if not isinstance(row, Exception)]
        if good:
            try:
                outputs = self.forward([results[index] for index in good])
                with active_context(context().narrowed(good)):
                    answers: list[Any] = self.answers(outputs)
            except Exception as error:
                answers = [error] * len(good)
            for index, answer in zip(good, answers, strict=True):
                results[index] = answer
        return results

    def forward(self, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        import numpy as np
        import torch

        with torch.inference_mode():
            inputs = [
                torch.as_tensor(np.stack([np.asarray(row[place]) for row in rows])).to(self._device, part.dtype)
                for place, part in enumerate(self.example)
            ]
            return output_rows(self.module(*inputs), len(rows))

    def _row(self, inputs: Inputs) -> Any:
        try:
            row = self.model.pre(**inputs)
            parts = tuple(row) if isinstance(row, tuple) else (row,)
            if len(parts) != len(self.example):
                raise BadValue(f"pre gave {len(parts)} inputs, the module takes {len(self.example)}")
            return tuple(_checked_input(part, example) for part, example in zip(parts, self.example, strict=True))
        except SystemExit as error:  # it may end its call, not its process
            return RuntimeError(f"{type(self.model).__name__}.pre called sys.exit({error.code!r})")
        except Exception as error:
            return error

    def _answer(self, row: Any) -> Any:
        try:
            return self.model.post(row)
        except SystemExit as error:
            return RuntimeError(f"{type(self.model).__name__}.post called sys.exit({error.code!r})")
        except Exception as error:
            return error


def in_request(request: RequestContext, work: Callable[[Any], Any], given: Any) -> Any:
    with request:
        return work(given)


def output_rows(output: Any, count: int) -> list[Any]:
    """One entry per request of a batch's output on the host, as numpy has it."""
    parts = output if isinstance(output, tuple | list) else (output,)
    columns = [to_numpy(part[:count]) for part in parts]
    return list(zip(*columns, strict=True)) if parts is output else list(columns[0])


def to_numpy(tensor: Any) -> Any:
    """A torch tensor as numpy has it, on the host; bfloat16, which numpy does not have, as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _checked_input(part: Any, example: Any) -> Any:
    """Check the shape of an input before it is batched with others; tensors that are on a device already stay there."""
    import numpy as np

    is_there = hasattr(part, "is_cuda") or hasattr(part, "ready")
    array = part if is_there else np.asarray(part)
    if not is_there and array.dtype.kind not in "biuf":
        raise BadValue(f"input of type {type(part).__name__}, not numbers", hint="write pre(self, ...): it returns an array")
    shape, wanted = tuple(getattr(array, "tensor", array).shape), tuple(example.shape[1:])
    if shape != wanted:
        raise BadValue(f"input of shape {list(shape)}, the module takes {list(wanted)}")
    return array
