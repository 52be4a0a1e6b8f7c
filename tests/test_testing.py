"""The test kit itself: an app in process, with mocks and a clock that only moves when told."""

from __future__ import annotations

from typing import Any

import pytest

import lamina
from lamina.core.events import InstanceLost
from lamina.errors import BadValue, Cancelled, FunctionFailed, Refused
from lamina.testing import Runtime


def make_app() -> lamina.App:
    app = lamina.App("kit")

    @app.function(batch=4, slo="50ms")
    def double(x: list[float]) -> list[float]:
        return [2 * one for one in x]

    @app.function()
    def split(text: str) -> list[str]:
        return text.split()

    @app.function()
    def boom(x: Any) -> None:
        raise ValueError(f"not {x}")

    @app.workflow(slo="100ms")
    def doubled(text: str) -> Any:
        return lamina.each(lambda word: double(word), split(text))

    @app.workflow(slo="1s")
    def careful(x: float) -> Any:
        twice = double(x)
        return lamina.when(twice > 10, lambda: boom(twice), lambda: twice)

    return app


def test_a_call_takes_the_time_it_is_said_to_take() -> None:
    runtime = Runtime(make_app(), takes={"double": "7ms"})
    assert runtime.call("double", 4) == 8
    assert runtime.now_ms == 7


def test_calls_that_wait_together_run_together() -> None:
    runtime = Runtime(make_app(), takes={"double": lambda batch: 5 + batch}, devices=None)
    calls = [runtime.submit("double", number) for number in range(9)]
    assert [call.result() for call in calls] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert sum(len(batch.jobs) for batch in runtime.batches) == 9
    assert max(len(batch.jobs) for batch in runtime.batches) == 4


def test_workflows_run_with_steps_mocked() -> None:
    runtime = Runtime(make_app(), mocks={"split": lambda text: [1, 2, 3], "double": lambda x: f"<{x}>"})
    assert runtime.call("doubled", "whatever") == ["<1>", "<2>", "<3>"]


def test_an_each_over_nothing_gives_nothing() -> None:
    assert Runtime(make_app()).call("doubled", "") == []


def test_errors_come_back_as_the_user_raised_them() -> None:
    runtime = Runtime(make_app())
    with pytest.raises(FunctionFailed, match="ValueError: not 7") as caught:
        runtime.call("boom", 7)
    assert "test_testing.py" in caught.value.remote_trace
    assert "lamina/" not in caught.value.remote_trace
    with pytest.raises(FunctionFailed, match="not 12") as caught:
        runtime.call("careful", 6)
    assert caught.value.step == "boom"


def test_what_cannot_be_in_time_is_refused_with_an_offer() -> None:
    runtime = Runtime(make_app(), takes={"double": "80ms"})
    with pytest.raises(Refused) as caught:
        runtime.call("double", 1)
    assert caught.value.reason == "deadline"
    assert caught.value.offer_ms is not None
    assert caught.value.offer_ms >= 80
    assert runtime.now_ms == 0


def test_the_clock_moves_only_when_told() -> None:
    runtime = Runtime(make_app(), takes={"double": "7ms"})
    call = runtime.submit("double", 1)
    runtime.advance("6ms")
    assert not call.done
    runtime.advance("2ms")
    assert call.done
    assert runtime.now_ms == 8
    assert call.reply is not None
    assert call.reply.latency_us == 7_000


def test_a_fault_can_be_injected_at_any_moment() -> None:
    runtime = Runtime(make_app(), takes={"double": "20ms"})
    call = runtime.submit("double", 1)
    runtime.advance("5ms")
    (instance,) = runtime.controller.state.functions["double"].instances
    runtime.post(InstanceLost(instance, "worker-lost"))
    assert call.result() == 2
    assert call.reply is not None
    assert call.reply.retries == 1
    assert runtime.now_ms == 25


def test_a_cancelled_call_ends_there() -> None:
    runtime = Runtime(make_app(), takes={"double": "20ms"})
    call = runtime.submit("double", 1)
    call.cancel()
    with pytest.raises(Cancelled):
        call.result()


def test_mocks_and_times_for_functions_that_are_not_there_are_refused() -> None:
    with pytest.raises(BadValue, match="'triple' is no function"):
        Runtime(make_app(), mocks={"triple": lambda x: x})
    with pytest.raises(BadValue, match="parameter"):
        Runtime(make_app()).call("double", y=1)
