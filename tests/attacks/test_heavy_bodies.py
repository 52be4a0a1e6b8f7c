"""Bulkheads: routes that decode in place take no body that would keep the loop, and sessions no messages without end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lamina.gateway.bootstrap import Gateway
from lamina.gateway.deploy.admin_routes import _body
from lamina.gateway.routes.codec_pool import CodecTooLarge
from lamina.gateway.routes.sessions import MAX_MESSAGE_BYTES, MAX_UNTAKEN
from lamina.gateway.routes.sockets import message_inputs
from lamina.sdk.binding import Param
from lamina.server.exchange import HttpRequest
from tests.serving import Browser, run, shared, write_app

pytestmark = pytest.mark.live

HEAVY = b'{"x":[' + b"[]," * 200_000 + b"[]]}"
APP = """
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import lamina

app = lamina.App("deaf")


@app.function(scale=lamina.Scale(min=1, max=1))
async def deaf(messages: AsyncIterator[Any], said: Any = None):
    yield "here"
    await asyncio.sleep(3600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("deaf"), APP)) as gateway:
        yield gateway


def asked(server: Gateway, *requests: tuple[str, str, bytes]) -> list[tuple[int, Any]]:
    async def work() -> list[tuple[int, Any]]:
        found = []
        async with Browser(server.port) as browser:
            for method, path, body in requests:
                answer = await browser.ask(method, path, body)
                found.append((answer.status, answer.json))
        return found

    return run(work)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/deaf/load",
        "/v1/functions/deaf/sessions",
        "/v1/tasks/any/success",
        "/v1/tasks/any/failure",
    ],
)
def test_a_heavy_body_is_not_decoded_on_the_loop(server: Gateway, path: str):
    ((status, said),) = asked(server, ("POST", path, HEAVY))
    assert status == 413, said


def test_a_heavy_body_of_management_is_not_decoded_whatever_it_says_it_is():
    for kind in (b"application/json", b"text/plain"):
        with pytest.raises(CodecTooLarge):
            _body(HttpRequest("POST", b"/v1/auth/log-in", b"", {b"content-type": kind}, HEAVY, True))


def test_a_heavy_message_of_a_websocket_is_not_decoded():
    with pytest.raises(CodecTooLarge):
        message_inputs((Param("x"),), HEAVY.decode())


def test_a_session_keeps_no_more_messages_than_its_function_takes(server: Gateway):
    ((status, about),) = asked(server, ("POST", "/v1/functions/deaf/sessions", b"{}"))
    assert status == 201
    place = f"/v1/sessions/{about['id']}/messages"
    message = json.dumps("x" * (MAX_MESSAGE_BYTES // 8)).encode()
    before = server.budget.layers().get("sessions", 0)
    sent = asked(server, *[("POST", place, message)] * (MAX_UNTAKEN + 1))
    statuses = [status for status, _ in sent]
    assert statuses[0] == 202 and statuses[-1] == 429 and sent[-1][1]["reason"] == "messages"
    assert 0 < server.budget.layers()["sessions"] - before <= 2 * MAX_MESSAGE_BYTES
    assert asked(server, ("POST", place, b'"' + b"x" * MAX_MESSAGE_BYTES + b'"'))[0][0] == 413
    asked(server, *[("DELETE", f"/v1/sessions/{about['id']}", b"")] * 2)
