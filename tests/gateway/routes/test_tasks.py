"""Steps that wait for a report: by a person or another service, with a token, over restarts and over `kill -9`."""

from __future__ import annotations

import asyncio
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.asl.lint import lint
from lamina.errors import BadFlow, BadValue, Conflict, FunctionFailed, LaminaError, NotFound, Unreachable
from lamina.sdk.builder import step
from lamina.sdk.client import Client
from lamina.testing import Server
from lamina.values.task_tokens import TaskTokens
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run

TOKENS: queue.Queue[str] = queue.Queue()


def shop() -> lamina.App:
    app = lamina.App("approvals")

    @app.function()
    def ask(amount: int, token: str) -> str:
        TOKENS.put(token)
        return "asked"

    @app.function()
    def book(answer: Any) -> Any:
        return {"booked": answer}

    @app.workflow(slo=lamina.SLO(timeout="60s"))
    async def order(amount: int):
        answer = await lamina.callback(ask, amount)
        return await book(answer)

    @app.workflow(slo=lamina.SLO(timeout="60s"))
    async def patient(amount: int):
        try:
            return await lamina.callback(ask, amount, timeout="50ms")
        except TimeoutError:
            return await book("nothing")

    @app.workflow(slo=lamina.SLO(timeout="60s"))
    async def careful(amount: int):
        try:
            return await lamina.callback(ask, amount)
        except ValueError:
            return await book("refused")

    return app


def test_a_step_ends_with_the_value_that_is_reported() -> None:
    with Server(shop()) as server:
        pending = server.app.target("order").spawn(3)
        server.client.complete_task(TOKENS.get(timeout=60), {"by": "ann"})
        assert pending.get("60s") == {"booked": {"by": "ann"}}


def test_a_reported_failure_is_raised_by_its_name() -> None:
    with Server(shop()) as server:
        pending = server.app.target("careful").spawn(3)
        server.client.fail_task(TOKENS.get(timeout=60), "ValueError", "too much")
        assert pending.get("60s") == {"booked": "refused"}
        pending = server.app.target("careful").spawn(4)
        server.client.fail_task(TOKENS.get(timeout=60), "Denied", "not today")
        with pytest.raises(FunctionFailed, match="Denied"):
            pending.get("60s")


def test_a_report_that_does_not_come_is_a_timeout() -> None:
    with Server(shop()) as server:
        assert server.client.call("patient", {"amount": 3}) == {"booked": "nothing"}
        token = TOKENS.get(timeout=60)
        with pytest.raises(Conflict):
            server.client.complete_task(token, 1)


def test_a_task_is_reported_once() -> None:
    with Server(shop()) as server:
        pending = server.app.target("order").spawn(3)
        token = TOKENS.get(timeout=60)
        server.client.heartbeat_task(token)
        server.client.complete_task(token, "yes")
        assert pending.get("60s") == {"booked": "yes"}
        with pytest.raises(Conflict):
            server.client.complete_task(token, "no")


@pytest.mark.parametrize("token", ["x", "AAAA", "A" * 600, "é"])
def test_a_token_that_was_not_given_out_is_of_no_task(token: str) -> None:
    with Server(shop()) as server, pytest.raises(NotFound):
        server.client.complete_task(token, 1)


def test_a_token_of_another_server_or_a_changed_one_cannot_be_read() -> None:
    tokens = TaskTokens()
    made = tokens.make("call-1", 7)
    assert tokens.read(made) == ("call-1", 7)
    for wrong in (TaskTokens().make("call-1", 7), made[:-2], made[:5] + ("A" if made[5] != "A" else "B") + made[6:], ""):
        with pytest.raises(BadValue):
            tokens.read(wrong)


def test_in_plain_python_the_function_itself_answers() -> None:
    assert shop().target("order").local(3) == {"booked": "asked"}
    assert TOKENS.get(timeout=60) == "in-process"


def test_a_function_without_the_parameter_is_refused_by_name() -> None:
    app = lamina.App("a")

    @app.function()
    def tell(x: int) -> None: ...

    @app.workflow()
    async def wrong(x: int):
        return await lamina.callback(tell, x)

    with pytest.raises(BadFlow, match="tell has no parameter 'token'"):
        app.deployed()


def test_states_wait_for_a_task_token() -> None:
    app = shop()
    chart = step("arn:aws:states:::lambda:invoke.waitForTaskToken", name="Ask").fields
    document = {
        "StartAt": "Ask",
        "States": {
            "Ask": {
                "Type": "Task",
                "Resource": chart["Resource"],
                "Parameters": {"FunctionName": "ask", "Payload": {"amount.$": "$.amount", "token.$": "$$.Task.Token"}},
                "Next": "Book",
            },
            "Book": {"Type": "Task", "Resource": "book", "End": True},
        },
    }
    lamina.sdk.workflow.Workflow.from_asl(document, app=app, name="machine", slo=lamina.SLO(timeout="60s"))
    with Server(app) as server:
        pending = app.target("machine").spawn({"amount": 2})
        server.client.complete_task(TOKENS.get(timeout=60), "ok")
        assert pending.get("60s") == {"booked": "ok"}


def test_the_linter_wants_wait_and_token_together() -> None:
    def problems(resource: str, parameters: dict[str, Any]) -> list[str]:
        state = {"Type": "Task", "Resource": resource, "Parameters": parameters, "End": True}
        return [str(one) for one in lint({"StartAt": "A", "States": {"A": state}})]

    assert not problems("ask.waitForTaskToken", {"token.$": "$$.Task.Token"})
    assert "do not hand out" in problems("ask.waitForTaskToken", {"x": 1})[0]
    assert "does not wait for it" in problems("ask", {"token.$": "$$.Task.Token"})[0]


APP = """
import lamina
from pathlib import Path

app = lamina.App("approvals")


@app.function()
def ask(amount: int, token: str) -> str:
    with open(Path(__file__).parent / "tokens", "a") as out:
        out.write(token + chr(10))
    return "asked"


@app.function()
def book(answer):
    return {"booked": answer}


@app.workflow(slo=lamina.SLO(timeout="10m"))
async def order(amount: int):
    return await book(await lamina.callback(ask, amount))
"""


@pytest.mark.live
def test_a_task_belongs_to_the_tenant_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    path.write_text(APP)

    async def work() -> tuple[int, int, Any]:
        async with managed(path, tmp_path / "kept") as server:
            mine, other = [await server.token("invoke", "read", tenant=name) for name in ("mine", "other")]
            begun = asyncio.create_task(server.call("/v1/workflows/order", 3, mine))
            tokens = tmp_path / "tokens"
            while not tokens.exists() or not tokens.read_text().endswith("\n"):
                await server.call("/healthz", None, mine, method="GET")
            token = tokens.read_text().strip()
            denied = await server.call(f"/v1/tasks/{token}/success", 1, other)
            taken = await server.call(f"/v1/tasks/{token}/success", 1, mine)
            return denied.status, taken.status, (await begun).json

    assert run(work) == (404, 204, {"booked": 1})


def serve(path: Path) -> tuple[subprocess.Popen[bytes], Client]:
    command = [sys.executable, "-m", "lamina", "serve", str(path), "--port", "0", "--store", str(path.parent / "kept.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        if b"listening on" in line:
            return process, Client(line.split()[2].decode())
    raise AssertionError("the server did not start")


@pytest.mark.live
def test_a_waiting_step_survives_kill_9_and_its_function_is_not_called_again(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    path.write_text(APP)
    process, client = serve(path)
    begun = client.start("order", {"amount": 3})
    tokens = tmp_path / "tokens"
    while not any(event["kind"] == "waits" for event in client.run(begun.id).history()):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process, client = serve(path)
    try:
        (token,) = tokens.read_text().split()
        until_s = time.monotonic() + 60
        while True:
            try:
                client.complete_task(token, "late, but there")
                break
            except (Conflict, Unreachable, LaminaError):  # the run is being read again
                assert time.monotonic() < until_s
        assert client.run(begun.id).result(timeout="60s") == {"booked": "late, but there"}
        assert len(tokens.read_text().split()) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
