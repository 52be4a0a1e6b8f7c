"""Model catalog: what is deployed, seen through the protocol; and its metadata, which REST and gRPC tell alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lamina
from lamina.access.authorization import Grant
from lamina.errors import UnknownTarget
from lamina.gateway.oip.tensors import SIZES
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.sdk.tensors import RESULT, Plain, Port, Signature
from lamina.types import FunctionSpec

TEXT_SHAPE = (1,)
"""A value as JSON text is one element."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target as a model. `batched`: the first axis of every tensor counts requests, and each row is a call of its own."""

    name: str
    version: str
    call_target: CallTarget
    signature: Signature
    spec: FunctionSpec | None  #: of a function
    is_batched: bool
    ports: dict[str, Port] = field(compare=False)  #: inputs by name

    @property
    def target_name(self) -> str:
        """Name of the function or workflow that is called."""
        return self.call_target.name

    def takes(self, port: Port, dtype: str) -> bool:
        """Whether an input may have a datatype: without a tensor in its annotation, any of numbers, but for text and bytes."""
        return dtype == port_dtype(port) or (port.tensor is None and port.plain in ("", "number") and dtype in SIZES)

    def shape(self, port: Port) -> tuple[int, ...]:
        """Shape of a port, as clients see it."""
        inner = tuple(port.tensor.shape) if port.tensor is not None else TEXT_SHAPE
        return (-1, *inner) if self.is_batched else inner


def port_dtype(port: Port) -> str:
    return port.tensor.dtype if port.tensor is not None else "BYTES"


_PLAIN: dict[str, Plain] = {"string": "text", "number": "number", "integer": "number", "boolean": "number"}
"""By the JSON type of a workflow's parameter, whose annotations say no more here."""


def make_model(target: CallTarget, spec: FunctionSpec | None) -> ServedModel:
    """The model of a target; without a tensor signature it takes and gives JSON text."""
    signature = target.signature
    if signature is None:
        signature = Signature(
            tuple(Port(one.name, None, one.required, _PLAIN.get(one.type, "")) for one in target.params), (Port(RESULT),)
        )
    batched = spec is not None and spec.max_batch > 1
    name = target.name if target.tenant else signature.model or target.name  # names of functions are kept apart by owner
    ports = {port.name: port for port in signature.inputs}
    return ServedModel(name, signature.version, target, signature, spec, batched, ports)


class ModelCatalog:
    """Models by name and version; the highest version is meant where none is named. Rebuilt when deployments change.

    A name is one owner's: what a tenant has deployed is no version of another's model, whatever its app says it is."""

    def __init__(self, registry: TargetRegistry, spec_of: Callable[[str], FunctionSpec | None]) -> None:
        self._registry = registry
        self._spec_of = spec_of
        self._targets: list[CallTarget] | None = None
        self._models: dict[str, dict[str, ServedModel]] = {}
        self.unloaded: dict[str, str] = {}  #: names that were unloaded, and why

    @property
    def models(self) -> dict[str, dict[str, ServedModel]]:
        if self._registry.all is not self._targets:
            self._targets = self._registry.all
            self._models = {}
            owners: dict[str, str] = {}
            for target in sorted(self._targets, key=lambda target: bool(target.tenant)):  # the operator's first
                model = make_model(target, self._spec_of(target.name) if target.kind == "function" else None)
                if owners.setdefault(model.name, target.tenant) == target.tenant:
                    self._models.setdefault(model.name, {})[model.version] = model
        return self._models

    def find(self, name: str, version: str, grant: Grant) -> ServedModel:
        versions = self.models.get(name)
        missing = UnknownTarget(f"no model {name[:80]!r}", hint="POST /v2/repository/index lists them")
        if versions is None:
            raise missing
        grant.check_owner(latest_version(versions).call_target.tenant, missing)
        if not version:
            return latest_version(versions)
        if version not in versions:
            raise UnknownTarget(f"model {name!r} has no version {version[:80]!r}", hint=f"there is {', '.join(versions)}")
        return versions[version]

    def visible_to(self, grant: Grant) -> list[ServedModel]:
        versions = (model for versions in self.models.values() for model in versions.values())
        return [model for model in versions if grant.sees(model.call_target.tenant)]

    def is_loaded(self, model: ServedModel) -> bool:
        return model.name not in self.unloaded


def latest_version(versions: dict[str, ServedModel]) -> ServedModel:
    """The highest version."""
    return versions[max(versions, key=lambda version: (int(version) if version.isdigit() else 0, version))]


# --------------------------------------------------------------------- metadata

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


def repository_index(catalogue: ModelCatalog, only_ready: bool, grant: Grant) -> list[dict[str, str]]:
    """Index of the model repository."""
    found = []
    for model in catalogue.visible_to(grant):
        reason = catalogue.unloaded.get(model.name)
        if reason is None or not only_ready:
            state = "READY" if reason is None else "UNAVAILABLE"
            found.append({"name": model.name, "version": model.version, "state": state, "reason": reason or ""})
    return found
