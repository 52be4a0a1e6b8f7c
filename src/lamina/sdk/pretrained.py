"""Hugging Face folders as they lie on disk: config.json and model.safetensors, built by `transformers`, read without pickle.

The class is the one that config.json names, looked up in `transformers` itself: code that a folder brings along is not run.
What goes in and comes out follows from the kind of model: token ids and a mask, or pictures; logits, or hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lamina.errors import BadValue, LoadFailed
from lamina.sdk.model_signatures import ModelFileSignature
from lamina.sdk.tensors import Port, Signature, Tensor


def read_pretrained(path: Path, config: dict[str, Any]) -> tuple[ModelFileSignature, Callable[[], Any]]:
    """Signature from the config.json of a folder, and a factory of its module."""
    name = str((config.get("architectures") or [""])[0])
    inputs, (output, shape) = _inputs(config, path), _output(name, config, path)
    ports = tuple(Port(key, Tensor(dtype, dims)) for key, (dtype, dims) in inputs.items())
    signature = Signature(ports, (Port(output, Tensor("FP32", shape)),), "pytorch_safetensors")
    return ModelFileSignature(signature, True), partial(_build, path.parent, name, tuple(inputs), output)


def _inputs(config: dict[str, Any], path: Path) -> dict[str, tuple[str, list[int]]]:
    if "vocab_size" in config:
        return {"input_ids": ("INT64", [-1]), "attention_mask": ("INT64", [-1])}
    size = config.get("image_size")
    if size is not None:
        height, width = size if isinstance(size, list) else (size, size)
        return {"pixel_values": ("FP32", [int(config.get("num_channels", 3)), int(height), int(width)])}
    raise BadValue(f"{path.parent}: no model of text or pictures", hint="export it to ONNX, or write a TorchModel for it")


def _output(name: str, config: dict[str, Any], path: Path) -> tuple[str, list[int]]:
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels", 2))
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return "logits", [labels]
    if name.endswith("ForTokenClassification"):
        return "logits", [-1, labels]
    if name.endswith(("ForMaskedLM", "ForCausalLM", "LMHeadModel")):
        return "logits", [-1, int(config.get("vocab_size", -1))]
    if name.endswith("Model"):
        return "last_hidden_state", [-1, int(config.get("hidden_size", -1))]
    raise BadValue(
        f"{path.parent}/config.json: {name[:80]!r} is not served as it is", hint="export it to ONNX, or write a TorchModel for it"
    )


def _build(folder: Path, name: str, inputs: tuple[str, ...], output: str) -> Any:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise LoadFailed(f"{error.name} is not installed", hint="pip install 'lamina[torch]' transformers") from None
    kind = getattr(transformers, name, None)
    if kind is None:
        raise LoadFailed(f"{folder}/config.json: transformers has no {name!r}", hint="code that a folder brings along is not run")
    try:
        inner = kind.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    except Exception as error:  # its errors have no common root
        raise LoadFailed(f"{folder} cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from None

    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *parts: Any) -> Any:
            return getattr(self.inner(**dict(zip(inputs, parts, strict=True))), output)

    return Named().eval().requires_grad_(False)
