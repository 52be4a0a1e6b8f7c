"""The Knative autoscaler on whole GPUs."""

from __future__ import annotations

from msgspec.structs import replace

from lamina.core.actions import AddDevice, ReleaseDevice
from lamina.core.events import DeviceJoined
from lamina.published.kserve.policies.kserve import Policy
from lamina.types import FunctionSpec, ScaleSpec
from tests.policies.gpus import GPU, MS, UNITS, S, a_model, called, gpus, loads, shapes, simulated, takes
from tests.script import Script


def given(script: Script, *functions: FunctionSpec, count: int = 4, policy: Policy | None = None) -> Script:
    names = [spec.name for spec in functions]
    script.given(
        *functions,
        devices=gpus(count),
        policy=policy or Policy(),
        takes={name: lambda batch, units: 100 * MS for name in names},
        loads=dict.fromkeys(names, 500 * MS),
        engine=True,
        warm=False,
    )
    for load in loads(script):
        script.ready(load.instance)
    return script


def test_a_pod_has_a_whole_gpu(script: Script):
    given(script, a_model())
    assert shapes(script.controller) == [(UNITS, 100)]


def test_two_functions_never_share_a_gpu(script: Script):
    given(script, a_model("a"), a_model("b"))
    assert len({load.device for load in loads(script)}) == 2


def test_a_function_without_a_gpu_to_itself_waits(script: Script):
    given(script, a_model("a"), a_model("b"), count=1)
    script.at(10 * S)
    assert len(loads(script)) == 1


def test_the_first_call_wakes_a_function_from_zero(script: Script):
    given(script, a_model(scale=ScaleSpec(min=0)))
    assert loads(script) == []
    script.at(1 * S).arrives("c1")
    assert len(loads(script)) == 1


def test_pods_follow_the_mean_number_in_flight_over_a_minute(script: Script):
    """100 ms each, batches of 8: 40 a second are about 4 in flight, and a target of 1 x 0.7 asks for 6 pods."""
    given(script, a_model(scale=ScaleSpec(min=1, max=9)), count=9, policy=Policy(concurrency=1.0, panic_at=99.0))
    called(script, 40, 60)
    assert 5 <= len(shapes(script.controller)) <= 8


def test_a_burst_makes_it_panic_and_follow_the_last_six_seconds(script: Script):
    calm = given(Script(), a_model(), policy=Policy(concurrency=2.0, panic_at=99.0))
    script = given(script, a_model(), policy=Policy(concurrency=2.0))
    for one in (calm, script):
        called(one, 1, 50)
        called(one, 60, 5)
    assert len(shapes(script.controller)) > len(shapes(calm.controller))


def test_nothing_is_taken_away_during_a_panic(script: Script):
    given(script, a_model(), policy=Policy(concurrency=2.0))
    called(script, 60, 8)
    many = len(shapes(script.controller))
    script.at(script.now_us + 30 * S)
    assert len(shapes(script.controller)) == many > 1


def test_the_last_pod_goes_a_window_and_a_grace_after_the_last_call(script: Script):
    given(script, a_model(scale=ScaleSpec(min=0)))
    called(script, 5, 3)
    script.at(70 * S)
    assert len(shapes(script.controller)) == 1
    script.at(100 * S)
    assert shapes(script.controller) == []


def test_it_is_asked_for_a_device_when_none_is_free_and_gives_it_back(script: Script):
    given(script, a_model(), count=1, policy=Policy(concurrency=2.0))
    called(script, 60, 8)
    assert script.all(AddDevice)
    script.tell(DeviceJoined(replace(GPU, id="more")))
    called(script, 60, 8)
    assert {load.device for load in loads(script)} == {"gpu0", "more"}
    script.at(script.now_us + 200 * S)
    assert [action.device for _, action in script.all(ReleaseDevice)] == ["more"]


def test_devices_of_others_are_never_given_back(script: Script):
    given(script, a_model())
    script.at(300 * S)
    assert script.all(ReleaseDevice) == []


def test_every_call_is_answered_and_whole_gpus_are_paid_for():
    result = simulated(a_model(), policy="kserve", rates={"f": [(10, 20.0)]})
    assert result.total.answered == result.total.offered
    assert result.devices[0].held > 0.99
    assert takes(1, UNITS) / MS < result.total.p50_ms < 20
