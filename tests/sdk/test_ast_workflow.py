"""`async def` workflows: their flow computes what Python computes, in Python's order; the rest is refused by line."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import msgspec
import pytest

import lamina
from lamina import each, gather
from lamina.core.workflow.flow import Each, Fail, Flow, Parallel, Task, Wait
from lamina.errors import BadFlow, BadValue, FunctionFailed
from lamina.testing import Runtime

app = lamina.App("reading")
calls: list[str] = []


@app.function()
def inc(x):
    return x + 1


@app.function()
def double(x):
    return 2 * x


@app.function()
def add(a, b):
    return a + b


@app.function()
def boom(x):
    raise ValueError(f"no {x}")


@app.function()
def odd_fails(x):
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


@app.function()
def below(n):
    return list(range(n))


@app.function()
def missing(x):
    raise FileNotFoundError(f"no file {x}")


@app.function()
def flaky(x):
    calls.append("flaky")
    if len(calls) < 3:
        raise OSError("not yet")
    return x


@app.workflow()
async def in_turn(x):
    a = await inc(x)
    await double(5)
    return await add(a, 1)


@app.workflow()
async def at_once(x):
    a = await inc(x)
    b, c = await gather(double(a), inc(a))
    return {"b": b, "c": c}


@app.workflow()
async def ways(x):
    if x > 10:
        y = await inc(x)
        z = 1
    elif x > 5 and not (x == 7 or x == 8):
        y, z = await double(x), 2
    else:
        return "small"
    return [await add(y, z), y]


@app.workflow()
async def one_way(x, y=3):
    if x > 1:
        y = await inc(y)
    return await add(x, y)


@app.workflow()
async def an_expression(x):
    y = await inc(x) if x > 3 else 0
    return [y, x or 5, x and 6, 0 < x < 4, x is None, x is not None]


@app.workflow()
async def caught(x):
    try:
        y = await inc(x)
        y = await boom(y)
    except (KeyError, ValueError) as error:
        y = str(error)
    return y


@app.workflow()
async def not_caught(x):
    try:
        return await boom(x)
    except KeyError:
        return "wrong"


@app.workflow()
async def caught_by_a_base(x):
    try:
        return await missing(x)
    except OSError as error:
        return str(error)


@app.workflow()
async def returned_from_a_try(x):
    try:
        return await boom(x)
    except ValueError:
        pass
    return await inc(x)


@app.workflow()
async def with_else(x):
    try:
        y = await odd_fails(x)
        z = await double(x)
    except Exception as error:
        return {"error": str(error)}
    else:
        y = await add(y, z)
    return [y, z]


@app.workflow()
async def tried_twice(x):
    try:
        try:
            y = await boom(x)
        except KeyError:
            y = 1
    except ValueError:
        y = await inc(x)
    return y


@app.workflow()
async def raising(x):
    if x > 3:
        raise LookupError("too big")
    return await inc(x)


@app.workflow()
async def around(x):
    try:
        a = await raising(x)
    except LookupError as error:
        a = str(error)
    return a


@app.workflow()
async def loops(n):
    xs = await below(n)

    async def both(x):
        y = await inc(x)
        return await add(x, y)

    found = {
        "each": await each(inc, xs, max_concurrency=2),
        "turns": [await double(x) for x in xs],
        "gather": await gather(*(inc(x) for x in xs)),
        "known": await asyncio.gather(*[double(k) for k in [1, 2]]),
        "inner": await each(both, xs),
        "lambda": await each(lambda x: add(x, n), xs),
    }
    for x in xs:
        await inc(x)
    return found


@app.workflow()
async def tolerant(n):
    return await each(odd_fails, await below(n), tolerate=0.5)


@app.workflow()
async def tried_in_an_each(n):
    async def one(x):
        try:
            return await odd_fails(x)
        except ValueError as error:
            return {"x": x, "said": str(error)}

    return await each(one, await below(n))


@app.workflow()
async def quorum(x):
    return await gather(boom(x), inc(x), double(x), wait_for=2)


@app.workflow()
def plain(x):
    return add(inc(x), double(x))


@app.workflow()
def plain_choice(x):
    return lamina.when(inc(x) > 3, lambda: double(x), lambda: inc(x))


@app.workflow()
async def holding_a_plain_choice(x):
    y = await plain_choice(x)
    return await add(y, x)


@app.workflow()
async def holding_a_plain_one(x):
    y = await plain(x)
    return await inc(y)


async def helper(x, by=2):
    for _ in range(by):
        x = await inc(x)
    return x


@app.workflow()
async def helped(x):
    return await helper(x, by=3)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(app)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("in_turn", 1), ("at_once", 1), ("ways", 20), ("ways", 6), ("ways", 7), ("ways", 1), ("one_way", 1), ("one_way", 5),
        ("an_expression", 4), ("an_expression", 0), ("an_expression", 2), ("caught", 1), ("caught_by_a_base", 1),
        ("returned_from_a_try", 1), ("with_else", 2), ("with_else", 3), ("tried_twice", 1), ("raising", 1), ("around", 1),
        ("around", 9), ("loops", 3), ("loops", 0), ("tolerant", 4), ("tried_in_an_each", 3), ("quorum", 5),
        ("holding_a_plain_one", 4), ("holding_a_plain_choice", 1), ("holding_a_plain_choice", 5), ("helped", 1),
    ],
)  # fmt: skip
def test_what_is_read_computes_what_python_computes(runtime: Runtime, name: str, given: int):
    assert runtime.call(name, given) == app.workflows[name].local(given)


def test_an_async_workflow_can_be_awaited():
    assert asyncio.run(at_once(1)) == {"b": 4, "c": 3}


def test_mocks_take_the_place_of_steps():
    assert at_once.local(1, mocks={"double": lambda x: 50}) == {"b": 50, "c": 3}


def test_what_comes_after_an_await_waits_for_it():
    nodes = in_turn.flow.nodes
    assert (in_turn.flow.start, nodes["inc"].next, nodes["double"].next) == (("inc",), ("double", "add"), ("add",))


def test_what_is_gathered_starts_at_once():
    assert at_once.flow.nodes["inc"].next == ("double", "inc-2")


def test_a_loop_takes_one_item_after_the_other():
    last = [node for node in loops.flow.nodes.values() if isinstance(node, Each)][-1]
    assert last.max_concurrency == 1


def test_an_uncaught_error_ends_the_run_with_what_was_said(runtime: Runtime):
    with pytest.raises(FunctionFailed, match="ValueError: no 1"):
        runtime.call("not_caught", 1)


def test_a_raise_ends_the_run_with_what_was_said(runtime: Runtime):
    with pytest.raises(FunctionFailed, match="LookupError: too big"):
        runtime.call("raising", 9)
    assert any(isinstance(node, Fail) for node in raising.flow.nodes.values())


def test_more_failures_than_tolerated_end_the_run(runtime: Runtime):
    with pytest.raises(FunctionFailed, match="ExceedToleratedFailureThreshold"):
        runtime.call("tried_with_less")


@app.workflow()
async def tried_with_less():
    return await each(odd_fails, [1, 3, 4], tolerate=1)


def test_a_quorum_is_a_parallel_that_waits_for_some():
    (node,) = [node for node in quorum.flow.nodes.values() if isinstance(node, Parallel)]
    assert (node.wait_for, len(node.branches)) == (2, 3)


def test_a_read_flow_travels_as_plain_data():
    for made in (ways, with_else, loops, quorum):
        assert msgspec.convert(msgspec.to_builtins(made.flow), Flow) == made.flow


# ------------------------------------------------------------------------------------------------ time, and trying again


@app.workflow()
async def retried(x):
    return await flaky.retry([OSError], attempts=3, interval_s=2, backoff=3)(x)


@app.workflow()
def retried_in_a_plain_def(x):
    return inc(flaky.retry([OSError], attempts=3)(x))


@app.workflow()
async def limited(x):
    try:
        async with lamina.timeout("3s"):
            await lamina.sleep(2)
            await lamina.sleep("2s")
    except TimeoutError:
        return "late"
    return "in time"


@pytest.mark.parametrize("name", ["retried", "retried_in_a_plain_def"])
def test_a_step_is_tried_again(name: str, runtime: Runtime):
    calls.clear()
    runtime.call(name, 4)
    assert len(calls) == 3


def test_pauses_between_tries_grow(runtime: Runtime):
    calls.clear()
    before_ms = runtime.now_ms
    runtime.call("retried", 4)
    assert 8_000 <= runtime.now_ms - before_ms < 8_100


def test_in_process_tries_are_made_at_once():
    calls.clear()
    assert retried.local(4) == 4


def test_a_block_that_takes_too_long_raises_a_timeout(runtime: Runtime):
    before_ms = runtime.now_ms
    assert runtime.call("limited", 1) == "late"
    assert 3_000 <= runtime.now_ms - before_ms < 3_100


def test_a_sleep_holds_nothing():
    (node, *_) = [node for body in _blocks(limited.flow) for node in body.nodes.values() if isinstance(node, Wait)]
    assert node.duration_us == 2_000_000


def _blocks(flow: Flow) -> list[Flow]:
    bodies = [node.body for node in flow.nodes.values() if isinstance(node, Each)]
    return bodies + [inner for body in bodies for inner in _blocks(body)]


def test_limits_of_a_call_are_those_of_its_step():
    @app.workflow()
    async def careful(x):
        return await inc.timeout("30s").heartbeat(5)(x)

    (node,) = careful.flow.nodes.values()
    assert isinstance(node, Task) and node.error_policy is not None
    assert (node.error_policy.timeout_us, node.error_policy.heartbeat_us) == (30_000_000, 5_000_000)
    del app.workflows["careful"]


# ------------------------------------------------------------------------------------------------- what cannot be recorded


def refused(body: Any) -> tuple[BadFlow, int]:
    """The error, and its line counted from the def."""
    made = app.workflow(name="refused")(body)
    try:
        with pytest.raises(BadFlow) as caught:
            _ = made.flow
    finally:
        del app.workflows["refused"]
    place, _, _ = caught.value.message.partition(": ")
    name, _, line = place.partition(":")
    assert name == "test_ast_workflow.py", caught.value.message
    return caught.value, int(line) - inspect.getsourcelines(body)[1]


async def a_while(x):
    y = await inc(x)
    while y < 3:
        y = await inc(y)
    return y


async def a_sum(x):
    y = await inc(x)
    return y + 1


async def a_call_not_awaited(x):
    inc(x)
    return x


async def an_argument_not_awaited(x):
    return await inc(inc(x))


async def a_carried_value(x):
    total = 0
    for y in await below(x):
        total = await add(total, y)
    return total


async def a_finally(x):
    try:
        return await inc(x)
    finally:
        await double(x)


async def a_half_return(x):
    try:
        if x > 3:
            return await inc(x)
        await double(x)
    except ValueError:
        pass
    return 1


async def an_f_string(x):
    return f"{await inc(x)} pieces"


async def an_attribute(x):
    return (await inc(x)).real


async def a_stranger(x):
    return await asyncio.wait_for(inc(x), 3)


async def an_unset_name(x):
    for y in await below(x):
        z = await inc(y)
    return z


async def an_f_of_python(x):
    return len(await below(x))


async def a_break(x):
    for y in [1, 2]:
        if x > y:
            break
    return y


async def a_match(x):
    match x:
        case 1:
            return 2


async def a_loud_error(x):
    try:
        return await inc(x)
    except ValueError as error:
        return error.args


@pytest.mark.parametrize(
    ("body", "line", "says", "hint"),
    [
        (a_while, 2, "a while loop", "choice()"),
        (a_sum, 2, "cannot calculate with", "function"),
        (a_call_not_awaited, 1, "inc(...) is never awaited", "await inc(...)"),
        (an_argument_not_awaited, 1, "used before it is there", "await inc(...)"),
        (a_carried_value, 2, "changes 'total' from turn to turn", "each"),
        (a_finally, 1, "finally", "after the try"),
        (a_half_return, 2, "some ways return here", "on every way or on none"),
        (an_f_string, 1, "f-string", "function"),
        (an_attribute, 1, ".real of a value", "function"),
        (a_stranger, 1, "", "gather"),
        (an_unset_name, 3, "'z' is not set on every way here", "before the loop"),
        (an_f_of_python, 1, "cannot count", "function"),
        (a_break, 3, "break", "what to loop over"),
        (a_match, 1, "match", "elif"),
        (a_loud_error, 4, ".args of an error", "str(error)"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_its_line_and_a_way_out(body: Any, line: int, says: str, hint: str):
    error, at = refused(body)
    assert (at, says in error.message, hint in error.hint) == (line, True, True), error


def test_a_constant_that_does_not_hold_is_found_while_reading():
    async def body(x):
        return await inc([1, 2][5])

    error, _ = refused(body)
    assert "IndexError" in error.message


def test_a_wrong_argument_is_found_while_reading():
    async def body(x):
        return await inc(z=x)

    made = app.workflow(name="refused")(body)
    with pytest.raises(BadValue, match="unknown parameter 'z'"):
        _ = made.flow
    del app.workflows["refused"]


def test_an_async_workflow_inside_a_plain_one_is_refused():
    made = app.workflow(name="refused")(lambda x: at_once(x))
    with pytest.raises(BadFlow, match="'at_once' is an async def"):
        _ = made.flow
    del app.workflows["refused"]
