"""Small things that a newcomer stumbled over, each by its name."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lamina
from lamina import cli
from lamina.asl.document import resources_of
from lamina.asl.errors import BadDocument
from lamina.asl.export import line_numbers, portability
from lamina.asl.lint import check, lint
from lamina.errors import BadFlow, BadValue
from lamina.plugins import DEFAULT_POLICY
from lamina.predict.device_presets import PRESETS, UNMEASURED, parse_devices
from lamina.sdk.builder import step
from lamina.sdk.states_workflow import from_asl
from lamina.testing import Runtime, Server
from tests.serving import Browser, served, write_app

INVOKE = "arn:aws:states:::lambda:invoke"


def order(**task: Any) -> dict[str, Any]:
    return {"StartAt": "Resize", "States": {"Resize": {"Type": "Task", "End": True, **task}}}


# ---------------------------------------------------------------------- attempts=3 means three


def test_three_attempts_are_three_tries() -> None:
    app, tries = lamina.App("tries"), []

    @app.function()
    def flaky(x: int) -> int:
        tries.append(x)
        raise OSError("again")

    @app.workflow()
    async def wf(x: int):
        return await flaky.retry([OSError], attempts=3, interval_s=0)(x)

    with pytest.raises(lamina.errors.FunctionFailed):
        Runtime(app).call("wf", 1)
    assert tries == [1, 1, 1]
    assert step(flaky).retry(attempts=3).fields["Retry"][0]["MaxAttempts"] == 2


def test_no_attempt_at_all_is_refused() -> None:
    app = lamina.App("none")
    function = app.function(name="f")(lambda x: x)
    with pytest.raises(BadFlow, match="attempts=0"):
        function.retry(attempts=0)
    with pytest.raises(BadFlow, match="attempts=0"):
        step(function).retry(attempts=0)


# ------------------------------------------------------------------------------- lambda:invoke


@pytest.mark.parametrize("name", ["resize", "resize:$LATEST", "arn:aws:lambda:eu-west-1:123456789012:function:resize:$LATEST"])
def test_a_task_of_aws_own_editor_calls_the_function_that_it_names(name: str) -> None:
    app = lamina.App("aws")

    @app.function()
    def resize(width: int) -> dict[str, int]:
        return {"pixels": width * width}

    document = order(Resource=INVOKE, Parameters={"FunctionName": name, "Payload.$": "$.image.width"}, OutputPath="$.Payload")
    from_asl(document, name="wf", app=app, bind={"resize": resize})
    assert Runtime(app).call("wf", {"image": {"width": 4}}) == {"pixels": 16}


def test_functions_of_lambda_invoke_are_told_apart() -> None:
    document = order(Resource=INVOKE, Parameters={"FunctionName": "resize", "Payload.$": "$"}, Next="Tag")
    del document["States"]["Resize"]["End"]
    document["States"]["Tag"] = {"Type": "Task", "Resource": INVOKE, "Parameters": {"FunctionName": "tag"}, "End": True}
    assert resources_of(document) == ["resize", "tag"]


def test_a_function_that_only_the_data_names_is_refused_by_the_linter() -> None:
    with pytest.raises(BadDocument, match="FunctionName"):
        check(order(Resource=INVOKE, Parameters={"FunctionName.$": "$.name", "Payload.$": "$"}))


# ------------------------------------------------------------------------------- task tokens


@pytest.mark.parametrize(
    "task",
    [
        {"Resource": f"{INVOKE}.waitForTaskToken", "Parameters": {"FunctionName": "ask"}},
        {"Resource": "ask", "Parameters": {"token.$": "$$.Task.Token"}},
    ],
)
def test_a_task_that_waits_without_a_token_or_hands_one_out_for_nothing_is_found_by_the_linter(task: dict[str, Any]) -> None:
    [problem] = lint(order(**task))
    assert "$$.Task.Token" in problem.message


# -------------------------------------------------------------------------------- lint lines


def test_remarks_of_the_linter_have_the_line_of_their_state() -> None:
    document = {
        "StartAt": "Validate Order",
        "States": {
            "Validate Order": {"Type": "Task", "Resource": "arn:aws:lambda:::function:a", "Next": "Pay"},
            "Pay": {"Type": "Task", "Resource": "arn:aws:lambda:::function:b", "TimeoutSeconds": 5, "Next": "Ship, {now}"},
            "Ship, {now}": {"Type": "Task", "Resource": "c", "TimeoutSeconds": 5, "End": True},
        },
    }
    text = json.dumps(document, indent=2)
    lines = text.splitlines()
    remarks = portability(document, text)
    shown = {remark.split(": ")[2]: lines[int(remark.split(":")[0]) - 1].strip() for remark in remarks}
    assert shown == {"TimeoutSeconds": '"Validate Order": {', "Resource": '"Resource": "c",'}


def test_line_numbers_are_those_of_a_parser() -> None:
    text = '{\n  "a": [1,\n    {"b": "x, y: {"}\n  ],\n  "c": {}\n}'
    assert line_numbers(text) == {"$": 1, "$.a": 2, "$.a[0]": 2, "$.a[1]": 3, "$.a[1].b": 3, "$.c": 5}


# --------------------------------------------------------------------- 413 through the client


def test_a_body_that_is_too_large_is_told_as_such_by_both_clients() -> None:
    import asyncio

    app = lamina.App("large")

    @app.function()
    def size(blob: bytes) -> int:
        return len(blob)

    inputs = {"blob": b"x" * (40 << 20)}
    with Server(app) as server:
        with pytest.raises(BadValue, match="larger than"):
            server.client.call("size", inputs)

        async def call() -> Any:
            async with lamina.AsyncClient(server.url) as client:
                return await client.call("size", inputs)

        with pytest.raises(BadValue, match="larger than"):
            asyncio.run(call())


# -------------------------------------------------------------- one default policy, more GPUs


def test_all_commands_have_one_default_policy() -> None:
    import click

    context = click.Context(cli.root)
    found = {}
    for name in cli.root.list_commands(context):
        command = cli.root.get_command(context, name)
        assert command is not None
        for param in command.params:
            if param.name == "policy" and isinstance(param.default, str):
                found[name] = param.default
    assert set(found.values()) == {DEFAULT_POLICY} and {"serve", "run", "dev"} <= set(found)


def test_common_gpus_have_presets_and_those_never_measured_are_marked() -> None:
    assert {"a100", "h100", "l4", "l40s", "b200"} == UNMEASURED
    assert [device.id for device in parse_devices("a100x2,l4")] == ["a100-0", "a100-1", "l4-0"]
    assert PRESETS["l4"].memory_mib < PRESETS["a100"].memory_mib < PRESETS["b200"].memory_mib


# ------------------------------------------------------- a plain call inside of a function


def test_a_plain_call_of_a_class_inside_a_function_goes_to_the_served_instance() -> None:
    app, loaded, threads = lamina.App("twice"), [], []

    @app.function()
    class Model:
        def load(self) -> None:
            loaded.append(threading.current_thread().name)

        def __call__(self, x: int) -> int:
            threads.append(threading.current_thread().name)
            return 2 * x

    @app.function()
    def add(x: int, y: int) -> int:
        threads.append(threading.current_thread().name)
        return x + y

    @app.function()
    def outer(x: int) -> int:
        return add(Model(x), 1)  # type: ignore[arg-type, call-arg]

    with Server(app) as server:
        assert [server.client.call("outer", {"x": x}) for x in (1, 2)] == [3, 5]
    assert [name.split("-")[0] for name in loaded] == ["model"]
    assert [name.split("-")[0] for name in threads] == ["model", "outer"] * 2  # a plain function is called where it is


@pytest.mark.live
def test_clients_take_just_the_value_where_one_parameter_is_enough() -> None:
    app = lamina.App("short")

    @app.function()
    def half(x: float, digits: int = 2) -> float:
        return round(x / 2, digits)

    @app.function()
    def total(x: Any) -> float:
        return float(sum(x))

    @app.function()
    def tell(about: str) -> Iterator[str]:
        yield about
        yield about.upper()

    @app.function()
    def both(x: float, y: float) -> float:
        return x + y

    @app.function()
    def nothing() -> int:
        return 0

    @app.workflow()
    def quarter(x: float) -> float:
        return half(half(x))

    async def asynchronous(url: str) -> list[Any]:
        async with lamina.AsyncClient(url) as client:
            return [await client.call("half", 3.0), [one async for one in client.stream("tell", "a")]]

    with Server(app) as server:
        client = server.client
        assert [client.call("half", 3.0), client.call("half", 0), client.call("quarter", 4.0)] == [1.5, 0.0, 1.0]
        assert client.call("total", np.ones(3)) == client.call("total", [1, 2]) == 3.0
        assert list(client.stream("tell", "a")) == ["a", "A"] and list(client.map("half", [2.0, 4.0])) == [1.0, 2.0]
        assert asyncio.run(asynchronous(server.url)) == [1.5, ["a", "A"]]
        with pytest.raises(BadValue, match="float given where an object is needed"):
            client.call("both", 1.0)
        with pytest.raises(BadValue, match="ndarray given; this target takes no input"):
            client.call("nothing", np.ones(3))


# ---------------------------------------------------------------------- what must not run twice is not said to have


def test_a_worker_that_dies_is_not_said_to_have_died_twice(tmp_path: Path) -> None:
    """A function with `idempotent=False` runs once, and its clients were told that the next worker had died as well."""
    text = "import os, lamina\napp = lamina.App('once')\n@app.function(idempotent=False)\ndef once() -> int:\n    os._exit(1)\n"

    async def work() -> Any:
        async with served(write_app(tmp_path, text)) as gateway, Browser(gateway.port) as browser:
            return await browser.post("/v1/functions/once", {})

    answer = asyncio.run(work())
    assert answer.status == 503 and answer.json["code"] == "worker-lost"
    assert "next one" not in answer.json["detail"] and "what may be repeated" in answer.json["detail"]
