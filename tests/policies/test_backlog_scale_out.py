"""Scale-out by backlog: calls that wait beside free units bring one more instance, whatever rates and times say."""

from __future__ import annotations

from itertools import pairwise

from lamina.core.actions import Load
from lamina.policies import frontier
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec
from tests.script import Script

S = 1_000_000
LONG_US = 2 * S


def cores(count: int, memory_mib: int = 4_000) -> DeviceSpec:
    return DeviceSpec(id="cpu", kind="cpu", units=count, memory_mib=memory_mib, family="cpu")


def a_function(**more: object) -> FunctionSpec:
    return FunctionSpec(name="f", scale=ScaleSpec(max=8), memory_mib=100, **more)  # type: ignore[arg-type]


def played(script: Script, device: DeviceSpec, spec: FunctionSpec, takes_us: int = LONG_US, load_us: int = S // 10) -> Script:
    """A function of which nothing is known yet: predictions say no time, and batches take this long."""
    script.given(spec, devices=[device], policy=frontier.Policy(), loads={"f": load_us}, warm=False, engine=True)
    script._time_us = lambda batch: takes_us  # type: ignore[method-assign]
    return script


def loads(script: Script) -> int:
    return len(script.all(Load))


def test_long_calls_take_the_second_core_that_is_free(script: Script):
    played(script, cores(2), a_function())
    script.at(0).arrives("c1", "c2", "c3", "c4")
    script.at(3 * S)
    assert loads(script) == 2 and len(script.running) == 2
    script.at(7 * S)  # one after the other they would take until 8.1
    assert {script.ending(call) for call in ("c1", "c2", "c3", "c4")} == {"reply"}


def test_one_more_at_a_time_until_no_unit_is_free(script: Script):
    played(script, cores(3), a_function(), takes_us=60 * S)
    script.at(0).arrives(*(f"c{number}" for number in range(10)))
    seen = []
    for second in range(1, 9):
        script.at(second * S)
        seen.append(loads(script))
    assert seen[0] == 1 and seen[-1] == 3
    assert all(after - before <= 1 for before, after in pairwise(seen))


def test_an_instance_that_takes_more_calls_at_once_is_filled_first(script: Script):
    played(script, cores(2), a_function(concurrency=4, parts=64), takes_us=60 * S)
    script.at(0).arrives(*(f"c{number}" for number in range(4)))
    script.at(5 * S)
    assert loads(script) == 1
    script.arrives("c4")
    script.at(8 * S)
    assert loads(script) == 2 and len(script.running) == 5


def test_a_wait_shorter_than_a_load_brings_none(script: Script):
    played(script, cores(2), a_function(), load_us=3 * S)
    script.at(0).arrives("c1", "c2")
    script.at(10 * S)
    assert loads(script) == 1


def test_what_waited_for_the_first_load_only_brings_none(script: Script):
    played(script, cores(2), a_function(), takes_us=S // 2, load_us=3 * S)
    script.at(0).arrives("c1", "c2", "c3")
    script.at(10 * S)
    assert loads(script) == 1


def test_a_burst_of_quick_calls_brings_none(script: Script):
    played(script, cores(2), a_function(), takes_us=S // 100)
    script.at(0).arrives(*(f"c{number}" for number in range(50)))
    script.at(5 * S)
    assert loads(script) == 1


def test_no_more_than_the_function_may_have(script: Script):
    spec = FunctionSpec(name="f", scale=ScaleSpec(max=1), memory_mib=100)
    played(script, cores(4), spec, takes_us=60 * S)
    script.at(0).arrives("c1", "c2", "c3")
    script.at(10 * S)
    assert loads(script) == 1
