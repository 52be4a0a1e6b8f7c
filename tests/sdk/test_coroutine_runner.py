"""`async def` functions: served, computed in process and tested like any other."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

import lamina
from lamina.sdk.user_errors import user_trace
from lamina.testing import Runtime

app = lamina.App("awaits")
EVENTS: list[str] = []


@app.function()
async def plus(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


@app.function()
async def words(text: str) -> AsyncIterator[str]:
    try:
        for word in text.split():
            await asyncio.sleep(0)
            yield word
    finally:
        EVENTS.append("words closed")


@app.function(batch=4)
async def doubled(x: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * one for one in x]


@app.function()
async def units() -> int:
    await asyncio.sleep(0)
    return lamina.context().units


@app.function()
async def broken(x: int) -> int:
    raise ValueError(f"no {x}")


@app.function()
class Session:
    async def load(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def __call__(self, x: int) -> bool:
        return asyncio.get_running_loop() is self.loop

    async def close(self) -> None:
        EVENTS.append("session closed")


@app.workflow()
async def twice(x: int) -> int:
    return await plus(await plus(x))


@app.workflow()
async def twice_with_types(x: int) -> int:
    y = await plus.aio(x)
    return await plus.aio(y)


@app.workflow()
def plainly(x: int) -> int:
    return plus(plus(x))  # type: ignore[return-value,arg-type]


def test_it_runs_in_process():
    assert plus.local(1) == 2


def test_it_runs_under_another_loop():
    async def notebook() -> int:
        return plus.local(1)

    assert asyncio.run(notebook()) == 2


def test_in_plain_python_it_is_awaited():
    async def both() -> tuple[int, bool]:
        return await plus(1), await Session(1)  # type: ignore[call-arg,misc]

    assert asyncio.run(both()) == (2, True)
    app.close()


def test_a_batch_is_one_call():
    assert doubled.local(4) == 8


def test_what_it_yields_is_a_list():
    assert words.local("a b") == ["a", "b"]


def test_a_stream_that_is_not_wanted_any_more_is_closed():
    runner = words.open()
    taken: list[str] = []
    EVENTS.clear()
    runner.run([{"text": "a b c"}], lambda item: taken.append(item) or False)  # type: ignore[func-returns-value]
    assert (taken, EVENTS) == (["a"], ["words closed"])


def test_its_context_is_that_of_the_batch():
    assert units.local() == 1


def test_what_it_opened_stays_open_between_calls():
    runner = Session.open()  # type: ignore[attr-defined]
    assert runner.run([{"x": 1}, {"x": 2}]) == [True, True]
    assert runner.run([{"x": 3}]) == [True]


def test_it_is_closed_on_its_loop():
    runner = Session.open()  # type: ignore[attr-defined]
    EVENTS.clear()
    runner.close()
    assert EVENTS == ["session closed"]


def test_its_errors_show_its_own_frames_alone():
    error = broken.open().run([{"x": 3}])[0]
    assert [line.split(", in ")[1] for line in user_trace(error).splitlines() if ", in " in line] == ["broken"]


@pytest.mark.parametrize("name", ["twice", "twice_with_types", "plainly"])
def test_it_is_a_step_of_a_workflow(name: str):
    assert Runtime(app).call(name, 1) == 3


@pytest.mark.parametrize("workflow", [twice, twice_with_types, plainly])
def test_a_workflow_of_it_computes_in_process(workflow: lamina.Workflow):
    assert workflow.local(1) == 3


def test_a_loop_that_is_never_closed_ends_with_its_owner():
    async def notebook() -> int:
        return doubled.open().run([{"x": 2}])[0]

    assert asyncio.run(notebook()) == 4
    gc.collect()  # warnings are errors here
