"""Admission probes: a device must not lie idle while calls for it are rejected, whatever was learnt in overload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from benchmarks.gpu.five import profiles, specs_for
from benchmarks.gpu.twin import Twin, Virtual
from benchmarks.gpu.zoo import FIVE

from lamina.core.actions import Reject, StartBatch
from lamina.core.events import CallArrived, Deployed, DeviceJoined, InstanceReady
from lamina.core.policy import DispatchRole
from lamina.policies import edf, frontier, new_controller
from lamina.predict import online
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.types import DeviceSpec, ScaleSpec, SliceLimits, Slo, call_for
from tests.script import BIG_GPU, Script, a_function

MS = 1_000
both = pytest.mark.parametrize("policy", [edf.Policy, frontier.Policy], ids=["edf", "frontier"])


def after_broken_promises(script: Script, policy: Callable[[], DispatchRole]) -> Script:
    """Calls that should take 60 of their 100 ms and took 101, so often that as much is set aside as may be."""
    script.given(a_function(slo=Slo(latency_us=100 * MS)), devices=[BIG_GPU], policy=policy(), takes={"f": 60 * MS})
    for number in range(60):
        script.at(number * 200 * MS).arrives(f"late{number}", within_us=100 * MS)
        if script.running:
            script.at(script.now_us + 101 * MS).finishes(took_us=101 * MS)
    return script.at(12_000 * MS)


@both
def test_a_reserve_rejects_no_call_on_an_idle_device(script: Script, policy: Callable[[], DispatchRole]):
    said = after_broken_promises(script, policy).arrives("c", within_us=100 * MS)
    assert not [action for action in said if isinstance(action, Reject)]


@both
def test_while_one_of_them_runs_the_reserve_counts(script: Script, policy: Callable[[], DispatchRole]):
    after_broken_promises(script, policy).arrives("c", within_us=100 * MS)
    said = script.at(12_001 * MS).arrives("next", within_us=100 * MS)
    assert [type(action) for action in said] == [Reject]


@pytest.mark.parametrize(("margin", "refused"), [(0.05, True), (-0.1, False)])
def test_edf_with_a_margin_below_zero_sets_nothing_aside(script: Script, margin: float, refused: bool):
    after_broken_promises(script, lambda: edf.Policy(margin=margin)).arrives("c", within_us=100 * MS)
    said = script.at(12_001 * MS).arrives("next", within_us=160 * MS)
    assert any(isinstance(action, Reject) for action in said) is refused


def in_time(policy: str, owned: bool, rate: float) -> Counter[str]:
    """Of five models on an H200 in virtual time, calls in time in the last half of a second, when all has been learnt."""
    profile_list, table = profiles()
    limits = SliceLimits(sizes=(3,), aligned=True, batches_per_instance=0)
    device = DeviceSpec(id="gpu0", kind="h200", units=15, memory_mib=140_000, limits=limits, owned=owned)
    specs, slicer, items = specs_for(5, 3, fixed=False), SimpleNamespace(device=device), dict.fromkeys(FIVE, 0)
    loop = Twin(slicer, Virtual(table), specs, items, policy, device, profile_list, None, {})
    rates = dict.fromkeys(FIVE, rate)
    loop.open(rates, 0.25)
    return [loop.open(rates, 0.5, seed).by_function for seed in (1, 2, 3, 4)][-1]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [840, 3_500], ids=["1.2 times", "5 times"])
@pytest.mark.parametrize("owned", [True, False], ids=["owned", "rented"])
def test_of_more_than_a_gpu_can_bear_no_less_is_answered(owned: bool, rate: int):
    assert in_time("frontier", owned, rate).total() >= 0.95 * in_time("frontier", owned, 700).total()


@pytest.mark.slow
def test_in_overload_no_model_is_shed_for_others_that_are_not_served_either():
    """bert_base in batches of three would take less of the device than resnet50, but has no time to gather three. 750 are offered
    of each."""
    found = in_time("frontier", True, 1_500)
    assert found["resnet50"] >= 200
    assert min(found.values()) >= 75


def test_where_goals_are_milliseconds_a_prediction_that_shuts_the_door_is_doubted_within_a_few_of_them():
    """One run in which everything stood still, and no other since: by what was learnt, no call could ever be in time."""
    predictor = online.OnlinePredictor(
        ProfileTable([Profile(function="f", device="gpu", points=[Point(batch=1, units=8, p50_us=1 * MS)])])
    )
    predictor.observe("f", "gpu", 1, 8, 30 * MS)
    controller = new_controller(edf.Policy(), predictor)
    slo = Slo(latency_us=3 * MS)
    events = [DeviceJoined(BIG_GPU), Deployed(functions=(a_function(slo=slo, scale=ScaleSpec(min=1)),)), InstanceReady("f-1", 1)]
    for event in events:
        controller.handle(0, event)
    answers = [
        controller.handle(at_us, CallArrived(call_for(f"c{at_us}", "f", at_us, slo))) for at_us in range(0, 100 * MS, 5 * MS)
    ]
    assert any(isinstance(action, StartBatch) for said in answers for action in said)
