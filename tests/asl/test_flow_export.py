"""Workflows written in Python, exported as documents: what the document does is what the Python does."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lamina
from lamina.asl.export import extended_fields
from lamina.asl.flow_export import NotInStates
from lamina.asl.lint import lint
from lamina.errors import FunctionFailed
from lamina.sdk.states_workflow import from_asl
from lamina.testing import Runtime

HEAD = """
import lamina

app = lamina.App("exported")
called = []


@app.function()
def inc(x):
    called.append(x)
    return x + 1


@app.function()
def pair(a, b=7):
    return {"a": a, "b": b, "sum": a + b}


@app.function()
def odd(x):
    if x % 2:
        raise ValueError("odd")
    return x // 2


@app.function()
def numbers():
    return [1, 2, 3]


@app.function()
def same(value):
    return value

"""

_number = itertools.count()


def loaded(folder: Path, text: str) -> Any:
    """The app of a file, which workflows are read from."""
    path = folder / f"exported_{next(_number)}.py"
    path.write_text(HEAD + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.app


def outcome(runtime: Runtime, name: str, *args: Any, **inputs: Any) -> Any:
    try:
        return runtime.call(name, *args, **inputs)
    except FunctionFailed as error:
        return ("failed", str(error).split(":")[0])


def check_same(app: Any, inputs: list[dict[str, Any]], name: str = "flow") -> dict[str, Any]:
    """The document, which is valid and strict, after it has given the same as the workflow for all of these."""
    document: dict[str, Any] = json.loads(json.dumps(app.workflows[name].to_asl()))
    assert lint(document, "strict") == [] and extended_fields(document) == []
    from_asl(document, app=app, name="states", dialect="strict")
    runtime = Runtime(app)
    for one in inputs:
        assert outcome(runtime, "states", one) == outcome(runtime, name, **one), one
    return document


CASES = {
    "a chain": ("def flow(x):\n    return inc(inc(x))", [{"x": 1}]),
    "a default": ("def flow(x, k=5):\n    return pair(x, k)", [{"x": 1}, {"x": 1, "k": 9}, {"x": 1, "k": 0}]),
    "a constant": ("def flow(x):\n    return {'n': 3, 'l': [1, {'a': None}], 'x': x}", [{"x": "t"}]),
    "fields": ("def flow(x):\n    p = pair(x)\n    return [p['sum'], p['a']]", [{"x": 4}]),
    "lists of objects": ("def flow(x):\n    return same([{'v': inc(x)}, ['it\\'s {x}', x]])", [{"x": 4}]),
    "several at once": ("def flow(x):\n    return pair(inc(x), inc(10))", [{"x": 4}]),
    "a branch": (
        "def flow(x):\n    return lamina.when(inc(x) > 3, lambda: inc(x), lambda: {'small': x})",
        [{"x": 1}, {"x": 3}, {"x": 2}],
    ),
    "branches in branches": (
        "def flow(x):\n    y = inc(x)\n"
        "    return lamina.when(y > 3, lambda: lamina.when(y > 5, lambda: inc(y), lambda: y), lambda: inc(inc(y)))",
        [{"x": 0}, {"x": 3}, {"x": 7}],
    ),
    "a map": ("def flow(xs, k=1):\n    return lamina.each(lambda v: pair(inc(v), k), xs)", [{"xs": []}, {"xs": [1, 5], "k": 3}]),
    "a map in a map": (
        "def flow(xs):\n    return lamina.each(lambda row: lamina.each(lambda v: pair(v, row[0]), row), xs)",
        [{"xs": [[1, 2], [3]]}],
    ),
    "a map of what a step made": ("def flow():\n    return lamina.each(inc, numbers())", [{}]),
    "a comparison as a value": ("def flow(x):\n    return same(inc(x) > 3)", [{"x": 1}, {"x": 5}]),
    "two values compared": (
        "def flow(x, y):\n    return same(x == y)",
        [{"x": 1, "y": 1}, {"x": "a", "y": "b"}, {"x": 1, "y": "1"}],
    ),
    "and, or, not": (
        "async def flow(x, y):\n    if (x > 1 and y != 'no') or not x >= 0:\n        return await inc(x)\n    return y",
        [{"x": 2, "y": "yes"}, {"x": 2, "y": "no"}, {"x": -1, "y": "no"}, {"x": 0, "y": "z"}],
    ),
    "try": (
        "async def flow(x):\n    try:\n        y = await odd(x)\n"
        "        z = await inc(y)\n    except ValueError:\n        z = await inc(100)\n    return [z, x]",
        [{"x": 4}, {"x": 5}],
    ),
    "what was said of an error": (
        "async def flow(x):\n    try:\n        return await odd(x)\n"
        "    except ValueError as error:\n        return await same(error)",
        [{"x": 4}, {"x": 5}],
    ),
    "try in try": (
        "async def flow(x):\n    try:\n        try:\n            y = await odd(x)\n"
        "        except KeyError:\n            y = await inc(0)\n"
        "    except ValueError:\n        y = await inc(50)\n    return y",
        [{"x": 4}, {"x": 5}],
    ),
    "an error that nothing catches": ("async def flow(x):\n    y = await odd(x)\n    return await inc(y)", [{"x": 4}, {"x": 5}]),
    "raise": (
        "async def flow(x):\n    if x > 3:\n        raise ValueError('too much')\n    return await inc(x)",
        [{"x": 1}, {"x": 5}],
    ),
    "gather and sleep": (
        "async def flow(x):\n    a, b = await lamina.gather(inc(x), pair(x))\n"
        "    await lamina.sleep('2s')\n    return await pair(a, b['sum'])",
        [{"x": 1}],
    ),
    "retry and timeout": (
        "async def flow(x):\n    return await odd.retry(on=[ValueError], attempts=2, interval_s=1).timeout(5)(x)",
        [{"x": 2}, {"x": 3}],
    ),
    "a workflow in a workflow": (
        "def inner(x):\n    return pair(inc(x))\n\n\n@app.workflow()\n"
        "async def flow(x):\n    p = await inner(x)\n    return await inc(p['sum'])",
        [{"x": 1}],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_document_does_what_the_python_does(case: str, tmp_path: Path):
    text, inputs = CASES[case]
    check_same(loaded(tmp_path, f"\n@app.workflow()\n{text}\n"), inputs)


def test_steps_that_wait_for_the_same_run_side_by_side(tmp_path: Path):
    app = loaded(tmp_path, "\n@app.workflow()\ndef flow(x):\n    return [inc(x), pair(x), inc(7)]\n")
    document = check_same(app, [{"x": 1}])
    (group,) = [state for state in document["States"].values() if state["Type"] == "Parallel"]
    assert len(group["Branches"]) == 3


REFUSED = {
    "wait_for": ("async def flow(x):\n    return await lamina.gather(inc(x), inc(x), wait_for=1)", "wait for all branches"),
    "the truth of a value": ("async def flow(x):\n    if x:\n        return await inc(x)\n    return x", "states compare"),
    "parts of a second": ("async def flow(x):\n    await lamina.sleep('500ms')\n    return x", "whole seconds"),
    "a time limit around steps": (
        "async def flow(x):\n    async with lamina.timeout(5):\n        y = await inc(x)\n    return y",
        "time limit around several steps",
    ),
    "bytes": ("def flow(x):\n    return same(b'12')", "a document holds JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_states_cannot_say_is_refused_with_the_reason(case: str, tmp_path: Path):
    text, why = REFUSED[case]
    workflow = loaded(tmp_path, f"\n@app.workflow()\n{text}\n").workflows["flow"]
    with pytest.raises(NotInStates, match=why) as refused:
        workflow.to_asl()
    assert refused.value.hint
    assert why in workflow.portability()[0]


# ----------------------------------------------------------------------------------------------------- any workflow


@st.composite
def bodies(draw: st.DrawFn, depth: int = 0, known: tuple[str, ...] = ("x", "y")) -> tuple[list[str], tuple[str, ...]]:
    """Statements of an `async def` over numbers, and the variables that are there afterwards."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3 if depth else 5))):
        value = draw(st.sampled_from(known))
        other = draw(st.sampled_from(known))
        fresh = f"v{draw(st.integers(0, 3))}"
        kind = draw(st.sampled_from(["call", "pair", "gather", "each"] + (["if", "try"] if depth < 2 else [])))
        if kind == "call":
            lines.append(f"{fresh} = await inc({value})")
        elif kind == "pair":
            lines += [f"p = await pair({value}, {other})", f"{fresh} = p['sum']"]
        elif kind == "gather":
            lines.append(f"{fresh}, _ = await lamina.gather(inc({value}), inc({other}))")
        elif kind == "each":
            lines += [f"e = await lamina.each(inc, [{value}, {other}])", f"{fresh} = e[1]"]
        else:
            inner, _ = draw(bodies(depth + 1, known))
            after, _ = draw(bodies(depth + 1, known))
            if kind == "if":
                sign = draw(st.sampled_from([">", "==", "!=", "<="]))
                lines += [f"if {value} {sign} {draw(st.integers(-2, 12))}:", *indented(inner), "else:", *indented(after)]
            else:
                lines += ["try:", f"    t = await odd({value})", *indented(inner), "except ValueError:", *indented(after)]
            continue  # variables set in one branch alone are not read afterwards
        known = (*known, fresh) if fresh not in known else known
    return lines, known


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(bodies(), st.lists(st.tuples(st.integers(-5, 12), st.integers(-5, 12)), min_size=3, max_size=3))
@pytest.mark.slow
def test_any_workflow_of_steps_branches_maps_and_handlers_is_the_same_as_a_document(
    tmp_path_factory: pytest.TempPathFactory, body: tuple[list[str], tuple[str, ...]], inputs: list[tuple[int, int]]
):
    lines, known = body
    text = "\n".join(["", "@app.workflow()", "async def flow(x, y=3):", *indented(lines), f"    return [{', '.join(known)}]", ""])
    app = loaded(tmp_path_factory.mktemp("any"), text)
    check_same(app, [{"x": x, "y": y} for x, y in inputs] + [{"x": 4}])


def test_the_first_app_of_the_documentation_can_be_exported():
    app = lamina.App("first")

    @app.function(batch=16)
    def sentiment(text: Any) -> Any:
        return [0.5 if "good" in one else 0.0 for one in text]

    @app.function()
    def shout(text: str) -> str:
        return text.upper()

    @app.workflow()
    def react(text: Any) -> Any:
        score = sentiment(text)
        return lamina.when(score > 0.2, lambda: shout(text), lambda: text)

    check_same(app, [{"text": "good day"}, {"text": "day"}], "react")
