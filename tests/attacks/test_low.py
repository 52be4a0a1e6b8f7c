"""The low list: small defects, each with a test by its name."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from lamina import encoding
from lamina.core.actions import FailCall
from lamina.engines.process_engine import LogPipe
from lamina.errors import FunctionFailed
from lamina.gateway.observability.logs import TextFormatter
from lamina.gateway.routes.http_codec import encode_result
from lamina.server.origins import OriginPolicy
from tests.attacks.gateways import emulated
from tests.serving import Browser, raw, read_answer, request, run

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def test_a_host_with_something_behind_its_brackets_is_foreign() -> None:
    origins = OriginPolicy("127.0.0.1")
    for host in (b"[127.0.0.1]evil.example", b"[::1]evil.example:8700", b"[::1]", b"127.0.0.1"):
        refused = origins.refusal("GET", {b"host": host})
        assert (refused is not None) == (b"evil" in host), host


@pytest.mark.parametrize("version", ["2.0", "3.0", "0.9", "1.2"])
def test_a_request_line_with_another_version_is_not_taken(version: str) -> None:
    async def work() -> None:
        async with emulated() as gateway:
            answer = await raw(gateway.port, b"GET /healthz HTTP/%s\r\nHost: localhost\r\n\r\n" % version.encode())
            assert answer is not None and answer.status in (400, 505)

    run(work)


def test_a_result_without_a_json_form_is_an_error_of_the_function() -> None:
    with pytest.raises(FunctionFailed, match="its result") as caught:
        encode_result(encoding.encode({1.5: "x", (1, 2): "y"}), b"application/json")
    assert caught.value.status == 500 and caught.value.code == "function-failed"


def test_a_clients_422_is_no_failure_of_the_service() -> None:
    async def work() -> None:
        async with emulated() as gateway:
            gateway.metrics.on_call_ended("echo", FailCall("c1", "bad-value"), "acme")
            lines = gateway.metrics.exposition().decode().splitlines()
            counted = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines if not line.startswith("#")}
            assert counted['lamina_calls_total{outcome="refused",target="echo"}'] == "1.0"
            assert counted.get('lamina_calls_total{outcome="failed",target="echo"}', "0.0") == "0.0"

    run(work)


@pytest.mark.slow
def test_a_client_that_has_closed_its_half_is_answered() -> None:
    async def work() -> None:
        async with emulated() as gateway:
            await asyncio.gather(*(ask(gateway.port) for _ in range(3)))

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST", "/v1/workflows/nap", b"{}"))
        writer.write_eof()
        answer = await read_answer(reader)
        while answer.status == 100:  # a client must expect any number of them
            answer = await read_answer(reader)
        assert answer.status == 200
        assert await reader.read() == b"", "there was nothing else to be asked"
        writer.close()

    run(work)


def test_a_client_that_has_closed_all_of_it_is_not_waited_for() -> None:
    async def work() -> None:
        async with emulated() as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(request("POST", "/v1/workflows/slumber", b"{}"))
            while not gateway.driver._pending:
                await asyncio.sleep(0.001)
            writer.close()
            while gateway.driver._pending:  # it would end by itself after an hour
                await asyncio.sleep(0.001)

    run(work)


def test_terminal_escapes_of_users_are_shown_and_not_obeyed() -> None:
    record = logging.LogRecord("lamina", logging.INFO, "", 0, "said: %s", (ESCAPE,), None)
    line = TextFormatter("%(message)s").format(record)
    assert line == "said: \\x1b]0;owned\\x07\\x1b[2J\\x9b31m"
    assert encoding.escape_controls("a\tb\nc \u00e9 \u4e2d") == "a\tb\nc \u00e9 \u4e2d"


def piped(data: list[bytes], capsys: pytest.CaptureFixture[str], **limits: int) -> tuple[list[str], str]:
    """What a process printed as its listener and stderr see it."""
    lines: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        pipe = LogPipe(loop, lambda function, calls, text: lines.append(text), **limits)
        for piece in data:
            os.write(pipe.fd, piece)
            pipe._read()
        pipe.close_child_end()
        pipe.close()

    asyncio.run(work())
    return lines, capsys.readouterr().err


def test_what_a_function_prints_does_not_reach_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = piped([ESCAPE.encode() + b"\n"], capsys)
    assert shown == "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\n"


def test_a_function_that_prints_without_end_fills_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = b"x" * 999 + b"\n"
    lines, shown = piped([line] * 1_000, capsys, bytes_per_s=1, burst=10_000)
    assert len(lines) == 10 and len(shown) < 11_000


def test_what_was_dropped_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = piped([b"x" * 500 + b"\n", b"y" * 600 + b"\n", b"z\n"], capsys, bytes_per_s=1, burst=1_000)
    assert [line[:1] for line in lines] == ["x", "(", "z"] and "601 bytes" in lines[1]


def test_a_browser_still_gets_its_answers_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            for _ in range(3):
                assert (await browser.post("/v1/functions/echo", 1)).status == 200

    run(work)
