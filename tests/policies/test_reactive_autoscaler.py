"""The reactive autoscaler: from zero, up with the load, down again when calls stop."""

from __future__ import annotations

from lamina.core.actions import Load, Unload
from lamina.core.events import DeviceJoined
from lamina.types import DeviceSpec, ScaleSpec, SliceLimits
from tests.script import GPU, Script, a_function

MS = 1_000
S = 1_000_000
ROOMY = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000)


def loads(script: Script) -> list[str]:
    return [load.function for _, load in script.all(Load)]


def gone(script: Script) -> list[tuple[int, str]]:
    return [(at_us, unload.instance) for at_us, unload in script.all(Unload)]


def test_nothing_is_loaded_before_the_first_call(script: Script):
    script.given(a_function(), warm=False)
    script.at(10 * S)
    assert loads(script) == []


def test_the_first_call_loads_one_instance_and_the_next_ones_wait_for_it(script: Script):
    script.given(a_function(), warm=False)
    script.arrives("c1", "c2", "c3")
    assert loads(script) == ["f"]


def test_an_idle_instance_is_removed_after_as_long_as_its_function_allows(script: Script):
    spec = a_function(scale=ScaleSpec(idle_us=30 * S))
    script.given(spec, takes={"f": 5 * MS}, loads={"f": 100 * MS}, warm=False, engine=True)
    script.at(0).arrives("c1")
    script.at(29 * S)
    assert gone(script) == []
    script.at(33 * S)
    assert [name for _, name in gone(script)] == ["f-1"]


def test_a_function_that_was_busy_goes_to_zero_all_the_same(script: Script):
    """An average that only halves must not keep it for ever."""
    spec = a_function(scale=ScaleSpec(idle_us=10 * S))
    script.given(spec, takes={"f": 5 * MS}, warm=False, engine=True)
    for i in range(500):
        script.at(i * 10 * MS).arrives(f"c{i}")
    script.at(18 * S)
    assert script.controller.state.instances == {}


def test_after_zero_the_next_call_brings_it_back(script: Script):
    spec = a_function(scale=ScaleSpec(idle_us=5 * S))
    script.given(spec, takes={"f": 5 * MS}, warm=False, engine=True)
    script.at(0).arrives("c1")
    script.at(20 * S).arrives("c2")
    script.at(21 * S)
    assert loads(script) == ["f", "f"]
    assert script.ending("c2") == "reply"


def test_the_minimum_stands_from_the_start_and_stays(script: Script):
    script.given(a_function(share=0.25, scale=ScaleSpec(min=2, idle_us=1 * S)), devices=[ROOMY], warm=False, engine=True)
    script.at(60 * S)
    assert loads(script) == ["f", "f"]
    assert gone(script) == []


def test_a_lost_instance_of_the_minimum_is_replaced(script: Script):
    script.given(a_function(scale=ScaleSpec(min=1)), warm=False, engine=True)
    script.at(1 * S).loses("f-1")
    script.at(3 * S)
    assert loads(script) == ["f", "f"]


def test_more_load_than_one_instance_carries_brings_more(script: Script):
    """300 calls a second of 10 ms each need three; at three quarters of what they can do, four."""
    script.given(a_function(share=0.125), devices=[ROOMY], takes={"f": 10 * MS}, warm=False, engine=True)
    for i in range(900):
        script.at(i * 3_333).arrives(f"c{i}")
    assert loads(script) == ["f"] * 4


def test_never_more_than_the_maximum(script: Script):
    spec = a_function(share=0.125, scale=ScaleSpec(max=2))
    script.given(spec, devices=[ROOMY], takes={"f": 10 * MS}, warm=False, engine=True)
    for i in range(900):
        script.at(i * 3_333).arrives(f"c{i}")
    assert loads(script) == ["f"] * 2


def test_no_more_instances_than_there_are_slices_for_them(script: Script):
    script.given(a_function(share=0.5), devices=[ROOMY], takes={"f": 10 * MS}, warm=False, engine=True)
    for i in range(900):
        script.at(i * 3_333).arrives(f"c{i}")
    assert loads(script) == ["f"] * 2


def test_one_instance_is_enough_where_it_fills_many_slices(script: Script):
    many = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=9, limits=SliceLimits(batches_per_instance=0))
    script.given(a_function(share=0.125), devices=[many], takes={"f": 10 * MS}, warm=False, engine=True)
    for i in range(900):
        script.at(i * 3_333).arrives(f"c{i}")
    assert loads(script) == ["f"]


def test_surplus_instances_go_when_the_load_does(script: Script):
    spec = a_function(share=0.125, scale=ScaleSpec(idle_us=3 * S))
    script.given(spec, devices=[ROOMY], takes={"f": 10 * MS}, warm=False, engine=True)
    for i in range(900):
        script.at(i * 3_333).arrives(f"c{i}")
    for i in range(20):
        script.at((4 + i) * S).arrives(f"d{i}")
    assert len(script.controller.state.instances) == 1


def test_memory_is_never_promised_twice(script: Script):
    big = [a_function(name, memory_mib=400) for name in "fgh"]
    script.given(*big, devices=[GPU])
    assert loads(script) == ["f", "g"]


def test_an_unused_instance_makes_room_for_one_that_calls_wait_for(script: Script):
    big = [a_function(name, memory_mib=400) for name in "fgh"]
    script.given(*big, devices=[GPU], takes=dict.fromkeys("fgh", 5 * MS), warm=False, engine=True)
    script.at(0).arrives("c1", target="f")
    script.at(1 * S).arrives("c2", target="g")
    script.at(2 * S).arrives("c3", target="h")
    script.at(3 * S)
    assert script.ending("c3") == "reply"
    assert [name for _, name in gone(script)] == ["f-1"]  # the one that was idle longest


def test_what_is_at_work_does_not_make_room(script: Script):
    big = [a_function(name, memory_mib=700) for name in "fg"]
    script.given(*big, devices=[GPU], warm=False)
    script.arrives("c1", target="f")
    script.ready("f-1")
    script.arrives("c2", target="g")
    assert gone(script) == []


def test_a_guaranteed_minimum_does_not_make_room(script: Script):
    big = [a_function("f", memory_mib=700, scale=ScaleSpec(min=1)), a_function("g", memory_mib=700)]
    script.given(*big, devices=[GPU], warm=False, engine=True)
    script.at(1 * S).arrives("c2", target="g")
    script.at(5 * S)
    assert gone(script) == []


def test_a_gpu_is_preferred_where_both_would_do(script: Script):
    cpu = DeviceSpec(id="cpu0", kind="cpu", family="cpu", units=64, memory_mib=9_000)
    script.given(a_function(gpu="may"), devices=[cpu, GPU])
    assert [load.device for _, load in script.all(Load)] == ["gpu0"]


def test_an_instance_for_which_homes_have_left_no_place_is_moved(script: Script):
    """On a device with aligned slices, a home in the wrong place can leave no block of four."""
    tight = DeviceSpec(id="a", kind="gpu", units=7, memory_mib=900, limits=SliceLimits(sizes=(1, 2, 4), aligned=True))
    wide = DeviceSpec(id="b", kind="gpu", units=4, memory_mib=900)
    f = a_function("f", share=0.5)
    g = a_function("g", share=0.25, home=True, lend=False)
    script.given(f, g, devices=[tight], takes={"f": 5 * MS, "g": 5 * MS}, warm=False, engine=True)
    script.at(0).arrives("f1", target="f")
    script.at(1 * S).arrives("g1", target="g")
    script.at(2 * S).arrives("f2", target="f")
    script.tell(DeviceJoined(wide))
    script.at(6 * S)
    assert script.ending("f2") == "reply"
