"""Rolling update: a new version of a function takes over while calls go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.queues import Order
from lamina.policies import fifo
from lamina.types import DeviceSpec, FunctionSpec
from tests.properties import examples
from tests.script import BIG_GPU, GPU, Script, a_function


@pytest.fixture
def script() -> Script:
    return Script()


def version(spec: FunctionSpec, name: str) -> FunctionSpec:
    return msgspec.structs.replace(spec, version=name, scale=msgspec.structs.replace(spec.scale, min=1))


def loads(script: Script) -> list[str]:
    return [action.instance for _, action in script.all(do.Load)]  # type: ignore[attr-defined]


def unloads(script: Script) -> list[str]:
    return [action.instance for _, action in script.all(do.Unload)]  # type: ignore[attr-defined]


def test_the_new_one_is_ready_before_the_old_one_leaves(script: Script) -> None:
    spec = a_function()
    script.given(spec)
    script.tell(ev.Deployed((version(spec, "2"),)))
    assert (loads(script), unloads(script)) == (["f-1", "f-2"], [])
    script.ready("f-2")
    assert unloads(script) == ["f-1"]


def test_what_the_old_one_has_begun_it_finishes(script: Script) -> None:
    spec = a_function()
    script.given(spec, takes={"f": 1_000})
    script.arrives("c1")
    script.tell(ev.Deployed((version(spec, "2"),)))
    script.ready("f-2")
    assert unloads(script) == []
    script.finishes()
    assert (script.ending("c1"), unloads(script)) == ("reply", ["f-1"])


def test_calls_that_come_during_the_change_go_to_the_instance_that_stands(script: Script) -> None:
    spec = a_function()
    script.given(spec, takes={"f": 1_000}, loads={"f": 50_000}, engine=True)
    script.tell(ev.Deployed((version(spec, "2"),)))
    for number in range(80):
        script.at(number * 1_000)
        script.arrives(f"c{number}", within_us=20_000)
    script.at(1_000_000)
    assert {script.ending(f"c{number}") for number in range(80)} == {"reply"}
    assert {batch.instance for batch in script.batches} == {"f-1", "f-2"}


def test_without_room_for_both_the_old_one_leaves_first_and_calls_wait(script: Script) -> None:
    spec = a_function(memory_mib=600)
    script.given(spec, takes={"f": 1_000}, loads={"f": 5_000}, engine=True)
    script.tell(ev.Deployed((version(spec, "2"),)))
    script.arrives("c1", within_us=100_000)
    script.at(200_000)
    assert (unloads(script), script.ending("c1")) == (["f-1"], "reply")


def test_a_neighbouring_device_with_room_will_do(script: Script) -> None:
    spec = a_function(memory_mib=600)
    script.given(spec, devices=(GPU, DeviceSpec(id="gpu1", kind="gpu", units=1, memory_mib=1_000)))
    script.tell(ev.Deployed((version(spec, "2"),)))
    assert (loads(script), unloads(script)) == (["f-1", "f-2"], [])


def test_one_at_a_time(script: Script) -> None:
    spec = msgspec.structs.replace(a_function(share=0.25, home=True), scale=msgspec.structs.replace(a_function().scale, min=2))
    per_instance = msgspec.structs.replace(BIG_GPU, limits=msgspec.structs.replace(BIG_GPU.limits, batches_per_instance=1))
    script.given(spec, devices=(per_instance,))
    assert loads(script) == ["f-1", "f-2"]
    script.tell(ev.Deployed((msgspec.structs.replace(spec, version="2"),)))
    assert loads(script) == ["f-1", "f-2", "f-3"]
    script.ready("f-3")
    script.ready("f-4")
    assert unloads(script) == ["f-1", "f-2"]


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(script: Script) -> None:
    spec = a_function()
    script.given(spec, takes={"f": 1_000})
    script.tell(ev.Deployed((version(spec, "bad"),)))
    script.loses("f-2", "load-failed")
    script.arrives("c1")
    script.finishes()
    assert script.ending("c1") == "reply"
    assert script.controller.rolling_update.halted == {"f": "bad"}


def test_the_same_version_again_replaces_nothing(script: Script) -> None:
    spec = a_function()
    script.given(spec)
    script.tell(ev.Deployed((version(spec, ""),)))
    assert loads(script) == ["f-1"]


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 8_000), st.sampled_from("ccccdl")), max_size=40), st.sampled_from([100, 600]))
def test_whatever_comes_between_every_call_ends_well_and_only_the_last_version_is_left(
    happenings: list[tuple[int, str]], memory_mib: int
) -> None:
    """Calls, deployments and workers that die, in any order; with room for both versions and without."""
    spec = a_function(max_batch=2, memory_mib=memory_mib)
    script = Script().given(spec, takes={"f": 1_000}, loads={"f": 3_000}, engine=True)
    number = 0
    for count, (gap_us, kind) in enumerate(happenings):
        script.at(script.now_us + gap_us)
        if kind == "c":
            script.arrives(f"c{count}", within_us=10_000_000)
        elif kind == "d":
            number += 1
            script.tell(ev.Deployed((version(spec, str(number)),)))
        elif script.controller.state.instances:
            script.loses(next(iter(script.controller.state.instances)), "worker-lost")
    script.at(script.now_us + 60_000_000)
    assert all(
        script.ending(f"c{count}") in ("reply", "worker-lost") for count, (_, kind) in enumerate(happenings) if kind == "c"
    )
    standing = {instance.version for instance in script.controller.state.instances.values()}
    assert standing == {str(number) if number else ""} or script.controller.rolling_update.halted


def test_a_lost_device_is_not_the_fault_of_the_version_that_was_being_loaded_there(script: Script) -> None:
    spec = a_function(memory_mib=600)
    others = [DeviceSpec(id=f"gpu{number}", kind="gpu", units=1, memory_mib=1_000) for number in (1, 2)]
    script.given(spec, devices=(GPU, *others))
    script.tell(ev.Deployed((version(spec, "2"),)))
    [_, successor] = script.all(do.Load)
    script.tell(ev.DeviceLost(successor[1].device))  # type: ignore[attr-defined]
    assert script.controller.rolling_update.halted == {}
    script.tell(ev.Deployed((version(spec, "3"),)))
    script.tell(ev.InstanceLost(loads(script)[-1]))
    assert script.controller.rolling_update.halted == {"f": "3"}, "a worker that dies while it loads is"


def test_a_policy_cannot_unload_the_successor(script: Script) -> None:
    """It counts two instances where one is wanted, and finds the newest superfluous."""

    class Impatient:
        order: Order = "arrival"
        period_us = 1_000

        def dispatch(self, view: View) -> Iterable[Decision]:
            return fifo.Policy().dispatch(view)

        def scale(self, view: View) -> Iterator[Decision]:
            for function in view.functions.values():
                instances = list(function.instances)
                if not instances:
                    yield LoadInstance("f", "gpu0")
                yield from [UnloadInstance(name) for name in instances[1:]]

    spec = a_function()
    script.given(spec, policy=Impatient())
    script.tell(ev.Deployed((version(spec, "2"),)))
    script.at(10_000)
    assert (loads(script), unloads(script)) == (["f-1", "f-2"], [])
    script.ready("f-2")
    assert unloads(script) == ["f-1"]
