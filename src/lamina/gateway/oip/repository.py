"""Model repository: loading and unloading on demand, for clients that manage what is resident.

A model that was loaded this way keeps at least one instance until it is unloaded; an unloaded one gives up its instances and is
rejected under /v2. Neither changes what is deployed, and nothing is taken from a client but a name: no files, no settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from lamina.access.authorization import Grant
from lamina.core.events import Deployed
from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.state import FunctionState
from lamina.errors import BadValue, LaminaError, LoadFailed
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.types import ScaleSpec

POLL_S = 0.01
LOAD_TIMEOUT_S = 300.0
_NONE = ScaleSpec(min=0, idle_us=0)

OnEnd = Callable[[LaminaError | None], None]


class ModelRepository:
    """Loads and unloads models by changing the scale of their functions."""

    def __init__(self, inference: InferenceService) -> None:
        self._inference = inference
        self._scales: dict[str, ScaleSpec] = {}  #: as deployed, of what was changed here

    def load(self, name: str, grant: Grant, parameters: Mapping[str, Any], on_end: OnEnd) -> None:
        _check_parameters(parameters)
        model = self._inference.catalogue.find(name, "", grant)
        self._inference.catalogue.unloaded.pop(name, None)
        for function in self._functions(name):
            scale = self._scales.get(function.spec.name, function.spec.scale)
            self._set(function, replace(scale, min=max(1, scale.min), max=max(1, scale.max)))
        self._wait_loaded(model, asyncio.get_running_loop().time() + LOAD_TIMEOUT_S, on_end)

    def unload(self, name: str, grant: Grant, parameters: Mapping[str, Any], on_end: OnEnd) -> None:
        _check_parameters(parameters, "unload_dependents")
        self._inference.catalogue.find(name, "", grant)
        self._inference.catalogue.unloaded[name] = "unloaded"
        for function in self._functions(name):
            self._set(function, replace(_NONE, max=function.spec.scale.max))
        on_end(None)

    def statistics(self, grant: Grant) -> dict[str, Any]:
        return {
            "model_stats": [self._inference.statistics.as_dict(model) for model in self._inference.catalogue.visible_to(grant)]
        }

    def _functions(self, name: str) -> list[FunctionState]:
        """Functions of all versions; a workflow has none of its own."""
        known = self._inference.driver.controller.state.functions
        versions = self._inference.catalogue.models[name].values()
        return [known[model.target_name] for model in versions if model.target_name in known]

    def _set(self, function: FunctionState, scale: ScaleSpec) -> None:
        self._scales.setdefault(function.spec.name, function.spec.scale)
        self._inference.driver.post(Deployed((replace(function.spec, scale=scale),)))

    def _wait_loaded(self, model: ServedModel, until_s: float, on_end: OnEnd) -> None:
        """Poll until its newest version is warm, or cannot be loaded."""
        loop = self._inference.driver
        function = loop.controller.state.functions.get(model.target_name)
        if function is None or any(one.phase is InstancePhase.WARM for one in function.instances.values()):
            on_end(None)
            return
        error = loop.engine.load_errors.get(model.target_name)
        now_s = asyncio.get_running_loop().time()
        if error is not None:
            on_end(LoadFailed(f"model {model.name!r} cannot be loaded: {error.type}: {error.message}"))
        elif now_s > until_s:
            on_end(LoadFailed(f"model {model.name!r} is still not loaded", hint="is there room for it?"))
        else:
            asyncio.get_running_loop().call_later(POLL_S, self._wait_loaded, model, until_s, on_end)


def _check_parameters(parameters: Mapping[str, Any], *known: str) -> None:
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise BadValue(f"parameters.{unknown[0][:40]}: not taken from clients", hint="put it where the server reads it")
