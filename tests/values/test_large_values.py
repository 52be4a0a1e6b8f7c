"""Large values in workflows, by reference: they stay in shared memory from step to step, also as items of lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import encoding
from lamina.core.actions import JobRef, ResolveData
from lamina.core.workflow.error_policy import Fault
from lamina.ipc.protocol import ErrorInfo, ShmRef
from lamina.units import MIB
from lamina.values.run_values import RunValues
from lamina.values.shm import INLINE_BYTES, ShmPool, ShmReader

app = lamina.App("references")
BIG = b"x" * (INLINE_BYTES + 1)


@app.function()
def f(x):
    return x


@app.workflow()
def fan(x):
    return f(lamina.each(f, f(x)))


@app.workflow()
async def ways(x, y):
    if y > 3:
        z = await f(x)
    else:
        z = await f(y)
    return await f(z)


@app.workflow()
async def tried(x):
    try:
        y = await f(x)
    except ValueError as error:
        y = str(error)
    return await f(y)


@pytest.fixture
def data(tmp_path: Path) -> RunValues:
    return RunValues(ShmPool(str(tmp_path), "gateway", 16 * MIB), ShmReader(str(tmp_path)))


def opened(data: RunValues, name: str, **inputs: Any) -> RunValues:
    data.open("c", app.workflows[name].flow, {key: encoding.encode(value) for key, value in inputs.items()})
    return data


def in_memory(tmp_path: Path, value: Any) -> ShmRef:
    ref = ShmPool(str(tmp_path), "w1", 16 * MIB).put(encoding.encode(value))
    assert ref is not None
    return ref


def given(data: RunValues, node: str, scope: int = 0) -> list[Any]:
    return [stored for _, stored in data.inputs(JobRef(9, "c", scope, node)).leaves]


def test_large_items_of_a_list_are_parts_of_its_slot(data: RunValues, tmp_path: Path):
    opened(data, "fan", x=1)
    whole = in_memory(tmp_path, [BIG, 5, BIG])
    data.put(JobRef(1, "c", 0, "f"), whole)
    assert data.resolve(ResolveData("c", 0, "each"), 1).value == 3
    (first,), (second,), (third,) = (given(data, "f-2", scope) for scope in (1, 2, 3))
    assert (first.slot, third.slot, second) == (whole.slot, whole.slot, encoding.encode(5))
    assert [encoding.decode(ShmReader(str(tmp_path)).view(part)) for part in (first, third)] == [BIG, BIG]


def test_a_list_of_large_results_is_not_put_together_here(data: RunValues, tmp_path: Path):
    opened(data, "fan", x=1)
    data.put(JobRef(1, "c", 0, "f"), encoding.encode([1, 2]))
    data.resolve(ResolveData("c", 0, "each"), 1)
    refs = [in_memory(tmp_path / name, BIG) for name in ("a", "b") if not (tmp_path / name).mkdir()]
    for scope, ref in enumerate(refs, 1):
        data.put(JobRef(scope, "c", scope, "f-2"), ref)
    assert given(data, "f-3") == refs
    assert data.inputs(JobRef(9, "c", 0, "f-3")).args == {"x": ["list", ["node", "each/0"], ["node", "each/1"]]}


def test_a_list_of_small_results_is_one_value(data: RunValues):
    opened(data, "fan", x=1)
    data.put(JobRef(1, "c", 0, "f"), encoding.encode([1, 2]))
    data.resolve(ResolveData("c", 0, "each"), 1)
    for scope in (1, 2):
        data.put(JobRef(scope, "c", scope, "f-2"), encoding.encode(scope))
    assert given(data, "f-3") == [encoding.encode([1, 2])]


def test_a_value_that_comes_one_of_several_ways_is_not_opened(data: RunValues, tmp_path: Path):
    opened(data, "ways", x=1, y=5)
    assert data.resolve(ResolveData("c", 0, "if"), 1).value == 0
    ref = in_memory(tmp_path, BIG)
    data.put(JobRef(1, "c", 0, "f"), ref)
    assert given(data, "f-3") == [ref]


def test_a_value_out_of_a_block_is_not_opened(data: RunValues, tmp_path: Path):
    opened(data, "tried", x=1)
    assert data.resolve(ResolveData("c", 0, "try", 1), 1).value == 1
    ref = in_memory(tmp_path, BIG)
    data.put(JobRef(1, "c", 1, "f"), ref)
    data.resolve(ResolveData("c", 0, "try", 1, "end"), 2)
    assert given(data, "f-2") == [ref]


def test_after_a_caught_error_what_was_said_takes_the_place_of_the_value(data: RunValues):
    opened(data, "tried", x=1)
    data.resolve(ResolveData("c", 0, "try", 1), 1)
    data.put_error(JobRef(1, "c", 1, "f"), ErrorInfo("ValueError", "no"))
    data.resolve(ResolveData("c", 0, "try", 1, "catch", fault=Fault("function-failed", "ValueError", 1, "f", 1)), 2)
    assert given(data, "f-2") == [encoding.encode("no")]
