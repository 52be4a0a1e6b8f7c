"""Outputs of emulated devices for clients that speak in tensors: zeros of the dtypes and shapes that the metadata promises.

No function runs there, so there is no result; a client that was told what it will get must get that all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lamina import encoding
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.emulated import EmulatedValues
from lamina.gateway.routes.targets import CallTarget
from lamina.sdk.tensors import NUMPY, Port, Signature, Tensor


def set_emulated_outputs(loop: RealtimeDriver, targets: Iterable[CallTarget]) -> None:
    """Set the outputs of all targets; does nothing where functions really run."""
    if isinstance(loop.data, EmulatedValues):
        typed = [(target.name, target.signature) for target in targets if target.signature is not None]
        loop.data.answers = {name: encoding.encode(zero_outputs(signature)) for name, signature in typed}


def zero_outputs(signature: Signature) -> Any:
    """One request's result; lengths that may vary are 1, and what has no type is null."""
    made = {port.name: _zero(port) for port in signature.outputs}
    return made if len(made) > 1 else next(iter(made.values()))


def _zero(port: Port) -> Any:
    tensor = port.tensor
    if tensor is None:
        return None
    shape = [1 if size < 0 else size for size in tensor.shape]
    return _empty_texts(shape) if tensor.dtype == "BYTES" else _array(tensor, shape)


def _empty_texts(shape: Sequence[int]) -> Any:
    return [_empty_texts(shape[1:]) for _ in range(shape[0])] if shape else b""


def _array(tensor: Tensor, shape: Sequence[int]) -> Any:
    import numpy

    return numpy.zeros(shape, NUMPY[tensor.dtype])
