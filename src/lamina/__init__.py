"""Lamina serves machine-learning functions and workflows on slices of GPUs, each with a latency goal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina import errors as errors
    from lamina.encoding import Response as Response
    from lamina.gateway.asgi import asgi as asgi
    from lamina.sdk.app import App as App
    from lamina.sdk.async_client import AsyncClient as AsyncClient
    from lamina.sdk.client import Client as Client
    from lamina.sdk.context import context as context
    from lamina.sdk.model_sources import fetch_model as fetch_model
    from lamina.sdk.onnx import onnx_model as onnx_model
    from lamina.sdk.resources import CPU as CPU
    from lamina.sdk.resources import GPU as GPU
    from lamina.sdk.resources import SLO as SLO
    from lamina.sdk.resources import Quota as Quota
    from lamina.sdk.resources import Scale as Scale
    from lamina.sdk.tensors import Tensor as Tensor
    from lamina.sdk.torch_model import TorchModel as TorchModel
    from lamina.sdk.weights_file import load_weights as load_weights
    from lamina.sdk.workflow_ops import callback as callback
    from lamina.sdk.workflow_ops import each as each
    from lamina.sdk.workflow_ops import gather as gather
    from lamina.sdk.workflow_ops import sleep as sleep
    from lamina.sdk.workflow_ops import timeout as timeout
    from lamina.sdk.workflow_ops import when as when

__version__ = "0.1.0"

_HOMES = {
    "App": "sdk.app",
    "AsyncClient": "sdk.async_client",
    "CPU": "sdk.resources",
    "Client": "sdk.client",
    "GPU": "sdk.resources",
    "Quota": "sdk.resources",
    "Response": "encoding",
    "SLO": "sdk.resources",
    "Scale": "sdk.resources",
    "Tensor": "sdk.tensors",
    "TorchModel": "sdk.torch_model",
    "asgi": "gateway.asgi",
    "callback": "sdk.workflow_ops",
    "context": "sdk.context",
    "each": "sdk.workflow_ops",
    "gather": "sdk.workflow_ops",
    "load_weights": "sdk.weights_file",
    "fetch_model": "sdk.model_sources",
    "onnx_model": "sdk.onnx",
    "sleep": "sdk.workflow_ops",
    "timeout": "sdk.workflow_ops",
    "when": "sdk.workflow_ops",
}

__all__ = [*sorted(_HOMES), "errors"]


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: a worker or a simulation that needs a part imports a part."""
    if name == "errors":
        return import_module("lamina.errors")
    if name in _HOMES:
        return getattr(import_module(f"lamina.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lamina' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
