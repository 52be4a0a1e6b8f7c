"""Fallback pods: a function with work and no pod gets one, whatever the plan says."""

from __future__ import annotations

import pytest

from lamina import policies
from lamina.types import FunctionSpec, ScaleSpec
from tests.policies.gpus import MS, UNITS, a_model, gpus, loads, unloads
from tests.script import Script

WHO_KEEP_PODS = ("has", "fastgshare")


def given(script: Script, policy: str, *functions: FunctionSpec) -> None:
    """Nobody knows how long any of them takes."""
    script.given(*functions, devices=gpus(1), policy=policies.build(policy), engine=True, warm=False)


@pytest.mark.parametrize("policy", WHO_KEEP_PODS)
def test_a_function_without_a_profile_is_loaded_when_it_is_called(script: Script, policy: str):
    given(script, policy, a_model(scale=ScaleSpec(min=0, max=4)))
    script.at(10 * MS).arrives("c", target="f", within_us=900 * MS)
    assert [load.function for load in loads(script)] == ["f"]


@pytest.mark.parametrize("policy", WHO_KEEP_PODS)
def test_a_pod_without_work_goes_for_one_that_has_some(script: Script, policy: str):
    given(script, policy, *(a_model(name, share=1.0, scale=ScaleSpec(min=0, max=4)) for name in "fg"))
    script.at(10 * MS).arrives("c", target="f", within_us=900 * MS)
    first = loads(script)[0]
    assert first.mask.bit_count() == UNITS
    script.at(500 * MS).arrives("d", target="g", within_us=900 * MS)
    assert [gone.instance for gone in unloads(script)] == [first.instance]


@pytest.mark.parametrize("policy", WHO_KEEP_PODS)
def test_a_function_without_a_profile_that_must_always_stand_is_loaded_before_it_is_called(script: Script, policy: str):
    given(script, policy, a_model(scale=ScaleSpec(min=1, max=4)))
    assert [load.function for load in loads(script)] == ["f"]
