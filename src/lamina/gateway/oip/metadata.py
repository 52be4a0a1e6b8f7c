"""Metadata of the server and its models: metadata, configuration, index. REST and gRPC say the same."""

from __future__ import annotations

from typing import Any

import lamina
from lamina.gateway.oip.model_catalog import TEXT_SHAPE, ModelCatalog, ServedModel, port_dtype
from lamina.sdk.tensors import Port

EXTENSIONS = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
]


def server_metadata() -> dict[str, Any]:
    """Metadata of the server."""
    return {"name": "lamina", "version": lamina.__version__, "extensions": EXTENSIONS}


def model_metadata(catalogue: ModelCatalog, model: ServedModel) -> dict[str, Any]:
    """Metadata of a model."""

    def told(port: Port) -> dict[str, Any]:
        return {"name": port.name, "datatype": port_dtype(port), "shape": list(model.shape(port))}

    return {
        "name": model.name,
        "versions": sorted(catalogue.models[model.name]),
        "platform": model.signature.platform,
        "inputs": [told(port) for port in model.signature.inputs],
        "outputs": [told(port) for port in model.signature.outputs],
    }


def model_config(catalogue: ModelCatalog, model: ServedModel) -> dict[str, Any]:
    """Model configuration, as in a model repository's config.pbtxt."""

    def told(port: Port) -> dict[str, Any]:
        dtype = port_dtype(port)
        dims = list(port.tensor.shape) if port.tensor is not None else list(TEXT_SHAPE)
        return {"name": port.name, "data_type": "TYPE_STRING" if dtype == "BYTES" else f"TYPE_{dtype}", "dims": dims}

    platform, spec = model.signature.platform, model.spec
    found: dict[str, Any] = {
        "name": model.name,
        "platform": platform,
        "backend": platform.partition("_")[0],
        "version_policy": {"latest": {"num_versions": len(catalogue.models[model.name])}},
        "max_batch_size": spec.max_batch if spec is not None and model.is_batched else 0,
        "input": [told(port) if port.required else {**told(port), "optional": True} for port in model.signature.inputs],
        "output": [told(port) for port in model.signature.outputs],
        "model_transaction_policy": {"decoupled": model.signature.streams},
        "parameters": {},
    }
    if spec is not None:
        kind = "KIND_GPU" if spec.gpu == "must" else "KIND_AUTO" if spec.gpu == "may" else "KIND_CPU"
        found["instance_group"] = [{"name": model.target_name, "kind": kind, "count": spec.scale.max}]
    if model.is_batched:
        found["dynamic_batching"] = {"preferred_batch_size": [found["max_batch_size"]]}
    if model.call_target.slo.latency_us:
        found["parameters"]["slo"] = {"string_value": f"{model.call_target.slo.latency_us}us"}
    return found


def repository_index(catalogue: ModelCatalog, only_ready: bool, tenant: str) -> list[dict[str, str]]:
    """Index of the model repository."""
    found = []
    for model in catalogue.visible_to(tenant):
        reason = catalogue.unloaded.get(model.name)
        if reason is None or not only_ready:
            state = "READY" if reason is None else "UNAVAILABLE"
            found.append({"name": model.name, "version": model.version, "state": state, "reason": reason or ""})
    return found
