"""Workflow operators: `each`, `when`, `gather`, `sleep`, `callback`, `timeout`. Recorded in workflows, plain Python elsewhere."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from lamina.core.workflow.error_policy import ErrorPolicy
from lamina.errors import BadFlow, LaminaError
from lamina.sdk.recorder import Recorder
from lamina.sdk.symbols import Symbol, UnawaitedCall, duration_us
from lamina.sdk.user_errors import user_place
from lamina.sdk.workflow_tracing import EachLimits, InProcess, WorkflowTracer, call_mode

TOKEN = "token"
"""Parameter of a function that `callback` calls, for its task token."""


def each(
    body: Callable[..., Any],
    items: Any,
    *,
    expect: float | None = None,
    max_concurrency: int = 0,
    tolerate: int | float | None = None,
) -> Any:
    """Map `body` over the items, all at once or `max_concurrency` at a time; a list of the results in their order.

    It fails as soon as more items have than `tolerate` (a number, or a part below 1); those that failed are left out.
    `expect` is the usual number of items, which helps planning; it is known if `items` is a list of known length.
    """
    if not callable(body):
        raise BadFlow(f"{user_place()}: each needs something to call for every item", hint="write each(function, items)")
    if max_concurrency < 0 or (tolerate is not None and (tolerate < 0 or (isinstance(tolerate, float) and tolerate > 1))):
        raise BadFlow(
            f"{user_place()}: each with max_concurrency={max_concurrency}, tolerate={tolerate}",
            hint="numbers from 0 on; a part of the items as 0.1",
        )
    where = call_mode.get()
    if isinstance(where, WorkflowTracer):
        if expect is None:
            expect = float(len(items)) if isinstance(items, list | tuple) else 4.0
        return where.each(body, items, expect, EachLimits(max_concurrency, tolerate))
    if isinstance(where, InProcess) and where.is_async:
        return _each_awaited(body, list(items), tolerate)
    if tolerate is None:
        return [body(item) for item in items]
    budget = _FailureBudget(len(items), tolerate)
    return [result for item in items for result in budget.call(body, item)]


async def _each_awaited(body: Callable[[Any], Any], items: list[Any], tolerate: int | float | None) -> list[Any]:
    budget = _FailureBudget(len(items), tolerate)
    found: list[Any] = []
    for item in items:
        try:
            found.append(await _awaited(body(item)))
        except Exception as error:
            budget.on_failure(error)
    return found


class _FailureBudget:
    """Count of tolerated failures; raises at one too many."""

    def __init__(self, count: int, tolerate: int | float | None) -> None:
        self._failures_allowed = int(count * tolerate + 1e-9) if isinstance(tolerate, float) else tolerate or 0

    def call(self, body: Callable[[Any], Any], item: Any) -> list[Any]:
        try:
            return [body(item)]
        except LaminaError:
            raise
        except Exception as error:
            self.on_failure(error)
            return []

    def on_failure(self, error: Exception) -> None:
        self._failures_allowed -= 1
        if self._failures_allowed < 0:
            raise error


def when(condition: Any, then: Any, otherwise: Any = None) -> Any:
    """The value of `then` or `otherwise`. Give lambdas: only the branch that is taken runs."""
    where = call_mode.get()
    if not isinstance(where, WorkflowTracer) or not isinstance(condition, Symbol):
        return _value(then if _is_true(condition) else otherwise)
    return where.when(condition, {"then": lambda: _value(then), "otherwise": lambda: _value(otherwise)})


def gather(*parts: Any, wait_for: int | None = None) -> Any:
    """Run all parts at once; a list of their results. With `wait_for`, of the first so many that end, in the order given, and
    the rest is cancelled. To be awaited, in an `async def` workflow."""
    if wait_for is not None and not 1 <= wait_for <= len(parts):
        raise BadFlow(f"{user_place()}: gather waits for {wait_for} of {len(parts)}", hint="wait_for counts from 1 on")
    where = call_mode.get()
    if isinstance(where, Recorder) and not where.eager:
        if len(parts) == 1 and isinstance(parts[0], UnawaitedCall) and parts[0].what == "gather(*...)":
            return UnawaitedCall("gather(...)", parts[0].make)
        return UnawaitedCall("gather(...)", lambda: where.gather(list(parts), wait_for))
    if isinstance(where, WorkflowTracer):
        if wait_for is None:
            return list(parts)  # in a plain def they run at once anyway
        raise BadFlow(f"{user_place()}: gather(wait_for=...) in a plain def", hint="write async def, and await it")
    return _gather_in_process(parts, len(parts) if wait_for is None else wait_for)


async def _gather_in_process(parts: tuple[Any, ...], enough: int) -> list[Any]:
    """`gather` in process: one after the other, until enough have a result."""
    found: list[Any] = []
    budget = _FailureBudget(len(parts), len(parts) - enough)
    for part in parts:
        if len(found) == enough:
            if inspect.iscoroutine(part):
                part.close()
            continue
        try:
            found.append(await _awaited(part))
        except Exception as error:
            budget.on_failure(error)
    return found


def sleep(duration: str | float) -> Any:
    """Wait "5s", or so many seconds: to be awaited. No resources are held meanwhile."""
    wait_us = duration_us(duration, "sleep")
    where = call_mode.get()
    if isinstance(where, Recorder):
        return UnawaitedCall("sleep(...)", lambda: where.wait(wait_us))
    if isinstance(where, WorkflowTracer):
        raise BadFlow(f"{user_place()}: sleep in a plain def", hint="write async def, and await it")
    return asyncio.sleep(wait_us / 1e6)


def callback(
    function: Any, *args: Any, timeout: str | float | None = None, heartbeat: str | float | None = None, **kwargs: Any
) -> Any:
    """Call a function with a task token, as its parameter `token`, and wait until the outcome is reported by that token: by a
    person, or by another service. To be awaited; what was reported is the result. Nothing is held meanwhile.

    `timeout` is for the whole, `heartbeat` the longest silence. In process the function's own result stands for the report.
    """
    params = {param.name for param in getattr(function, "params", ())}
    if TOKEN not in params:
        name = getattr(function, "name", None) or repr(function)
        raise BadFlow(f"{user_place()}: callback: {name} has no parameter {TOKEN!r}", hint=f"write def {name}(..., {TOKEN}: str)")
    where = call_mode.get()
    if isinstance(where, Recorder):
        policy = ErrorPolicy(
            timeout_us=duration_us(timeout, "timeout") if timeout is not None else 0,
            heartbeat_us=duration_us(heartbeat, "heartbeat") if heartbeat is not None else 0,
        )
        return where.callback(function, args, kwargs, policy, TOKEN)
    if isinstance(where, WorkflowTracer):
        raise BadFlow(f"{user_place()}: callback in a plain def", hint="write async def, and await it")
    return _called_back(function, args, kwargs)


async def _called_back(function: Any, args: Any, kwargs: Any) -> Any:
    return await _awaited(function(*args, **{TOKEN: "in-process", **kwargs}))


class Timeout:
    """Time limit of a block: `async with timeout("5s"):`. What is awaited inside is done by then, or `TimeoutError` is raised."""

    def __init__(self, duration_us: int) -> None:
        self.duration_us = duration_us

    async def __aenter__(self) -> Timeout:
        self._limit = asyncio.timeout(self.duration_us / 1e6)
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._limit.__aexit__(*error)


def timeout(duration: str | float) -> Timeout:
    """Time limit for several steps of an `async def` workflow; `.timeout(...)` of a function is one for a call."""
    return Timeout(duration_us(duration, "timeout"))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _value(branch: Any) -> Any:
    return branch() if callable(branch) else branch


def _is_true(condition: Any) -> bool:
    """Truth as the traced workflow sees it: `~True` is -2 in Python, which is true, and was meant to be false."""
    if type(condition) is int and condition == ~True:
        return False
    return bool(condition)
