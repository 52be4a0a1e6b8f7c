"""Model catalog: visibility by tenant, and which version is meant."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.access.authorization import AccessRule, Grant
from lamina.access.records import Identity
from lamina.errors import BadValue, UnknownTarget
from lamina.gateway.oip.inference import timeout_and_priority
from lamina.gateway.oip.model_catalog import ModelCatalog, model_config, model_metadata, repository_index
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.sdk.tensors import Port, Signature, Tensor
from lamina.types import FunctionSpec, ScaleSpec, Slo

OPERATOR = Grant(Identity(), AccessRule("read", "visible"))
PORTS = (Port("x", Tensor("FP32", [4])),)


def target(name: str, *, model: str = "", version: str = "1", tenant: str = "") -> CallTarget:
    signature = Signature(PORTS, PORTS, model=model, version=version)
    return CallTarget(name, "function", (), Slo(latency_us=50_000), "", tenant, signature)


def catalogue(*targets: CallTarget) -> tuple[ModelCatalog, TargetRegistry]:
    registry = TargetRegistry(targets)
    return ModelCatalog(registry, lambda name: FunctionSpec(name=name, max_batch=8, scale=ScaleSpec(max=3))), registry


def test_the_newest_version_is_meant_where_none_is_named() -> None:
    found, _ = catalogue(target("m.v9", model="m", version="9"), target("m", model="m", version="10"))
    assert (found.find("m", "", OPERATOR).target_name, found.find("m", "9", OPERATOR).target_name) == ("m", "m.v9")
    assert model_metadata(found, found.find("m", "", OPERATOR))["versions"] == ["10", "9"]


@pytest.mark.parametrize(("name", "version"), [("none", ""), ("m", "2")])
def test_what_is_not_there_is_unknown(name: str, version: str) -> None:
    with pytest.raises(UnknownTarget):
        catalogue(target("m"))[0].find(name, version, OPERATOR)


def test_a_tenants_models_are_its_own() -> None:
    found, _ = catalogue(target("ours"), target("theirs", tenant="acme"))
    acme, other = [Grant(Identity(tenant), AccessRule("read", "visible")) for tenant in ("acme", "other")]
    assert [one["name"] for one in repository_index(found, False, other)] == ["ours"]
    assert [one["name"] for one in repository_index(found, False, acme)] == ["ours", "theirs"]
    with pytest.raises(UnknownTarget):
        found.find("theirs", "", other)


def test_what_is_deployed_later_is_there_at_once() -> None:
    found, registry = catalogue(target("m"))
    assert list(found.models) == ["m"]
    registry.replace([target("n")])
    assert list(found.models) == ["n"]


def test_the_configuration_is_what_a_repository_would_say() -> None:
    found, _ = catalogue(target("m"))
    said = model_config(found, found.find("m", "", OPERATOR))
    assert said["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert (said["max_batch_size"], said["instance_group"][0]["count"]) == (8, 3)
    assert said["parameters"] == {"slo": {"string_value": "50000us"}}


@pytest.mark.parametrize(("level", "ours"), [(0, 0), (1, 10), (2, 9), (11, 0), (21, -10), (500, -10)])
def test_their_first_priority_is_our_highest(level: int, ours: int) -> None:
    assert timeout_and_priority({"priority": level, "timeout": 7}) == (7, ours)


@pytest.mark.parametrize(
    "parameters", [{"timeout": -1}, {"timeout": 1.5}, {"timeout": True}, {"priority": "high"}, {"timeout": 2**70}]
)
def test_wishes_of_another_kind_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match="parameters"):
        timeout_and_priority(parameters)
