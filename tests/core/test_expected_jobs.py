"""Expected jobs of runs in flight count in completion estimates; and admission that closed opens again."""

from __future__ import annotations

from typing import Any

import pytest

import lamina
from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.errors import Refused
from lamina.predict.online import OnlinePredictor
from lamina.testing import Runtime
from lamina.types import DeviceSpec


def pages() -> lamina.App:
    app = lamina.App("pages")

    @app.function(scale=lamina.Scale(min=1, max=1))
    def cut(page: int) -> list[int]:
        return [page] * 8

    @app.function(scale=lamina.Scale(min=1, max=1))
    def read(line: int) -> int:
        return line

    @app.workflow(slo="500ms")
    def whole(page: int) -> Any:
        return lamina.each(lambda line: read(line), cut(page), expect=8)

    return app


def one_core() -> list[DeviceSpec]:
    return [DeviceSpec(id="c", kind="test", family="cpu", units=1, memory_mib=10_000)]


@pytest.mark.parametrize("policy", ["edf", "frontier"])
def test_lines_that_are_not_cut_yet_are_counted_before_the_next_page_is_admitted(policy: str) -> None:
    """A page takes 10 + 8 x 20 ms on the only core; two fit into half a second, no third or fourth."""
    runtime = Runtime(pages(), takes={"cut": "10ms", "read": "20ms"}, devices=one_core(), policy=policy)
    taken = [runtime.submit("whole", number) for number in range(2)]
    assert not runtime.controller.state.functions["read"].queue.jobs()
    for late in [runtime.submit("whole", number) for number in (2, 3)]:
        with pytest.raises(Refused):
            late.result()
    assert [page.result() for page in taken] == [[0] * 8, [1] * 8]
    assert runtime.now_ms <= 500


def test_nothing_is_expected_of_runs_that_have_ended() -> None:
    runtime = Runtime(pages(), mocks={"cut": lambda page: [page] * 3})
    runtime.call("whole", 1)
    runtime.submit("whole", 2).cancel()
    assert runtime.controller.state.functions["read"].expected_jobs == 0
    assert runtime.controller.state.functions["cut"].expected_jobs == 0


def test_visits_follow_items_branches_and_joins() -> None:
    body = Flow("body", {"b": Task("b", "g")}, ("b",))
    flow = Flow(
        "f",
        {
            "a": Task("a", "f", ("pick",)),
            "pick": Choice("pick", (("x",), ("y",)), odds=(3.0, 1.0)),
            "x": Task("x", "f", ("end",)),
            "y": Each("y", body, ("end",), expected_items=4.0),
            "end": Pass("end", ("z1", "z2")),
            "z1": Task("z1", "h", ("join",)),
            "z2": Task("z2", "h", ("join",)),
            "join": Task("join", "k", tokens_needed=2),
        },
        ("a",),
    )
    assert flow.expected_jobs == {"f": 1.75, "g": 1.0, "h": 2.0, "k": 1.0}


def test_a_loop_counts_once() -> None:
    flow = Flow(
        "f",
        {"a": Task("a", "f", ("again",)), "again": Choice("again", (("a",), ("end",))), "end": Pass("end")},
        ("a",),
    )
    assert flow.expected_jobs == {"f": 1.0}


def test_a_prediction_that_rejects_all_calls_is_doubted_until_a_probe_is_admitted() -> None:
    app = lamina.App("door")

    @app.function(slo="10ms", scale=lamina.Scale(min=1, max=1))
    def quick(x: int) -> int:
        return x

    runtime = Runtime(app, takes={"quick": "4ms"}, policy="edf", devices=one_core())
    slow = OnlinePredictor()
    runtime.controller.predictor = runtime.controller.view.predictor = slow
    slow.observe("quick", "test", 1, 1, 4_000)
    for _ in range(30):
        slow.observe("quick", "test", 1, 1, 16_000)  # the machine was busy with something else for a while
    with pytest.raises(Refused):
        runtime.call("quick", 1)
    answers = 0
    for _ in range(20):  # one call a second, each turned away, each a reason to doubt
        runtime.advance("1s")
        try:
            answers += runtime.call("quick", 1)
        except Refused:
            continue
    assert answers >= 10


def test_a_function_too_cold_for_its_goal_is_loaded_by_those_it_turns_away() -> None:
    app = lamina.App("cold")

    @app.function(slo="50ms")
    def late(x: int) -> int:
        return x

    runtime = Runtime(app, takes={"late": "5ms"}, load_takes="2s")
    refused = 0
    for _ in range(5):
        try:
            assert runtime.call("late", 1) == 1
        except Refused:
            refused += 1
        runtime.advance("1s")
    assert 0 < refused < 5
