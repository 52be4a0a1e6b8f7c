"""Drawings of flows: annotations of steps, and what is left out so that the rest can be seen."""

from __future__ import annotations

import re
from typing import Any

import lamina
from lamina.asl.annotations import StepNote, measured_notes, planned_notes
from lamina.asl.compile import compile_flow
from lamina.asl.draw import draw_flow

app = lamina.App("drawn")


@app.function(batch=8)
def fast(x):
    return x


@app.function(batch=8)
def slow(x):
    return x


@app.function()
def join(a, b):
    return a


@app.function()
def stranger(x):
    return x


MS = 1_000
TIMES = {"fast": 5, "slow": 20, "join": 10, "stranger": 0}


def time_us(function: str, batch: int) -> int:
    return TIMES[function] * MS * (1 + batch) // 2


def figures(body: Any, slo: str = "100ms") -> dict[str, str]:
    made = app.workflow(name="w", slo=slo)(body)
    del app.workflows["w"]
    found = planned_notes(made.flow, time_us, {"fast": 8, "slow": 8, "join": 1})
    return {name: figure.text + (" !" if figure.critical else "") for name, figure in found.items()}


def test_slack_is_what_is_left_on_the_longest_way_through_a_step():
    assert figures(lambda x: join(fast(x), slow(x))) == {
        "fast": "5 ms · slack 85 ms · batch 8",
        "slow": "20 ms · slack 70 ms · batch 8 !",
        "join": "10 ms · slack 70 ms · batch 1 !",
    }


def test_a_batch_is_as_large_as_the_slack_allows():
    assert figures(lambda x: slow(fast(x)), "50ms")["slow"] == "20 ms · slack 25 ms · batch 2 !"


def test_a_way_that_is_too_long_says_by_how_much():
    assert figures(lambda x: slow(slow(x)), "30ms")["slow"] == "20 ms · late by 10 ms · batch 1 !"


def test_what_runs_inside_of_an_each_has_the_slack_of_the_whole():
    found = figures(lambda xs: join(lamina.each(lambda x: slow(fast(x)), xs), 1))
    assert found["slow"] == "20 ms · slack 65 ms · batch 4 !"


def test_a_quorum_does_not_wait_for_its_slowest():
    async def body(x):
        return await lamina.gather(fast(x), fast(x), slow(x), wait_for=2)

    assert figures(body)["slow"] == "20 ms · slack 95 ms · batch 8 !"


def test_a_step_without_a_profile_says_so():
    assert figures(lambda x: stranger(x)) == {"stranger": "no profile"}


def test_a_run_shows_what_was_measured():
    flow = app.workflow(name="w")(lambda x: join(fast(x), slow(x))).flow
    del app.workflows["w"]
    step = {"kind": "step", "scope": 0, "ok": True, "queued_us": 1_000 * MS, "batch": 2}
    events: list[dict[str, Any]] = [
        {"kind": "began", "at_us": 1_000 * MS},
        {**step, "step": "fast", "began_us": 1_000 * MS, "ended_us": 1_004 * MS},
        {**step, "step": "fast", "began_us": 1_010 * MS, "ended_us": 1_016 * MS},
        {**step, "step": "slow", "began_us": 1_000 * MS, "ended_us": 1_030 * MS, "ok": False},
    ]
    assert measured_notes(flow, events, deadline_us=1_025 * MS) == {
        "fast": StepNote("2 x 5 ms · queued 5 ms · slack 9 ms · batch 2"),
        "slow": StepNote("30 ms · late by 5 ms · batch 2", critical=True),
        "join": StepNote("not run"),
    }


def texts(graph: str) -> list[str]:
    return [text.replace("#gt;", ">") for text in re.findall(r'"(.*?)"', graph)]


def edges(graph: str) -> int:
    return len(re.findall(r"-\.?->", graph))


def test_steps_that_only_pass_values_on_are_not_drawn():
    @app.workflow()
    async def w(x):
        y = await fast(x)
        if y > 3:
            z = await slow(y)
        else:
            z = y
        return await join(z, y)

    del app.workflows["w"]
    graph = draw_flow(w.flow, {"slow": StepNote("20 ms", critical=True)}, "goal none")
    assert texts(graph) == ["w  goal none", "fast", "if<br/>choice", "slow<br/>20 ms", "join", "fast > 3", "otherwise"]
    assert edges(graph) == 4
    assert len(re.findall(r"class n\d+ critical", graph)) == 1


def test_an_edge_that_follows_from_others_is_not_drawn():
    made = app.workflow(name="w")(lambda x: join(slow(fast(x)), fast(x)))
    del app.workflows["w"]
    assert edges(draw_flow(made.flow)) == 3


def test_where_errors_lead_and_where_not_are_two_edges():
    @app.workflow()
    async def w(x):
        try:
            y = await fast(x)
        except (ValueError, KeyError):
            y = await slow(x)
        return await join(y, x)

    del app.workflows["w"]
    graph = draw_flow(w.flow)
    assert "(ValueError, KeyError)" in texts(graph)
    assert (edges(graph), graph.count("-.->")) == (3, 1)
    assert (draw_flow(w.flow, format="dot").count("->"), draw_flow(w.flow, format="dot").count("style=dashed")) == (3, 1)


def test_what_runs_inside_of_a_step_is_drawn_inside_of_it():
    made = app.workflow(name="w")(lambda xs: join(lamina.each(lambda x: slow(fast(x)), xs), 1))
    del app.workflows["w"]
    inner = draw_flow(made.flow).split("subgraph")[1].split("end\n")[0]
    assert texts(inner) == ["each<br/>for each item", "fast", "slow"]
    assert "subgraph cluster_" in draw_flow(made.flow, format="dot")


def test_names_cannot_break_out_of_their_labels():
    name = 'a"]<script>\n`b`'
    flow = compile_flow({"StartAt": name, "States": {name: {"Type": "Succeed"}}}, "w", lambda resource: (resource, None))
    label = next(line for line in draw_flow(flow).splitlines() if line.startswith("    n0"))
    assert label == '    n0(["a#quot;]#lt;script#gt; #96;b#96;<br/>succeed"]):::succeed'
    assert 'label="a\\"]<script>\\n`b`\\nsucceed"' in draw_flow(flow, format="dot")
