"""Sessions: a call that lives on between requests, found again by its id."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from lamina.gateway.bootstrap import Gateway
from tests.serving import shared, write_app

pytestmark = pytest.mark.live

APP = """
from collections.abc import AsyncIterator
from typing import Any

import lamina

app = lamina.App("chat")
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE)
async def chat(messages: AsyncIterator[Any], greeting: str = "hello"):
    yield greeting
    async for message in messages:
        if message == "fail":
            raise ValueError("no")
        yield {"heard": message}
    yield "bye"


@app.function(scale=ONE)
async def flood(messages: AsyncIterator[Any]):
    async for message in messages:
        for number in range(message):
            yield number


@app.function()
def plain(x: int) -> int:
    return x
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("chat"), APP)) as gateway:
        yield gateway


def ask(server: Gateway, method: str, path: str, value: Any = None) -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    link.request(method, path, None if value is None else json.dumps(value), {"content-type": "application/json"})
    answer = link.getresponse()
    body = answer.read()
    link.close()
    return answer.status, json.loads(body) if body else None


def opened(server: Gateway, name: str = "chat", value: Any = None, query: str = "") -> str:
    status, about = ask(server, "POST", f"/v1/functions/{name}/sessions{query}", {} if value is None else value)
    assert status == 201, about
    return f"/v1/sessions/{about['id']}"


def read(server: Gateway, place: str, after: int, count: int = 1) -> list[Any]:
    """The next values, as they come."""
    found: list[Any] = []
    while len(found) < count:
        _, said = ask(server, "GET", f"{place}/messages?after={after + len(found)}&wait_ms=30000")
        assert said["first"] == after + len(found) + 1 or not said["values"]
        found += said["values"]
        if said["ended"] is not None:
            break
    return found


def test_messages_of_several_requests_reach_one_call(server: Gateway) -> None:
    place = opened(server, value={"greeting": "hi"})
    assert read(server, place, 0) == ["hi"]
    assert ask(server, "POST", f"{place}/messages", "a")[0] == 202
    assert read(server, place, 1) == [{"heard": "a"}]
    assert ask(server, "POST", f"{place}/messages", {"b": 1})[0] == 202
    assert read(server, place, 2) == [{"heard": {"b": 1}}]


def test_what_was_not_read_is_given_again(server: Gateway) -> None:
    place = opened(server)
    ask(server, "POST", f"{place}/messages", 1)
    assert read(server, place, 0, 2) == ["hello", {"heard": 1}]
    assert read(server, place, 1) == [{"heard": 1}]


def test_an_ended_session_says_how_it_ended(server: Gateway) -> None:
    place = opened(server)
    assert ask(server, "DELETE", place)[0] == 200
    assert read(server, place, 0, 2) == ["hello", "bye"]
    _, said = ask(server, "GET", f"{place}/messages?after=2&wait_ms=30000")
    assert said["ended"] == {"status": 200}
    assert ask(server, "POST", f"{place}/messages", 1)[0] == 409


def test_a_failure_of_the_function_is_its_end(server: Gateway) -> None:
    place = opened(server)
    ask(server, "POST", f"{place}/messages", "fail")
    read(server, place, 0)
    _, said = ask(server, "GET", f"{place}/messages?after=1&wait_ms=30000")
    assert said["ended"]["status"] == 500 and "ValueError" in json.dumps(said["ended"])


def test_a_session_that_is_not_named_for_its_idle_time_is_cancelled(server: Gateway) -> None:
    id = opened(server, query="?idle=1s").rpartition("/")[2]
    while not (ended := next(one["ended"] for one in ask(server, "GET", "/v1/sessions")[1] if one["id"] == id)):
        pass
    assert ended["problem"]["code"] == "idle"


def test_ending_it_twice_cancels_its_call(server: Gateway) -> None:
    place = opened(server, "flood")
    ask(server, "DELETE", place)
    _, about = ask(server, "DELETE", place)
    assert about["ended"] is not None or about["last"] == 0


def test_a_function_that_yields_more_than_is_kept_is_ended(server: Gateway) -> None:
    place = opened(server, "flood")
    ask(server, "POST", f"{place}/messages", 5_000)
    while True:
        _, about = ask(server, "GET", place)
        if about["ended"] is not None:
            break
    assert about["ended"]["status"] == 499 and about["unread"] == 1_000


@pytest.mark.parametrize(
    ("method", "path", "value", "status"),
    [
        ("POST", "/v1/functions/plain/sessions", {"x": 1}, 400),
        ("POST", "/v1/functions/none/sessions", {}, 404),
        ("POST", "/v1/functions/chat/sessions?idle=9d", {}, 400),
        ("POST", "/v1/functions/chat/sessions", {"nothing": 1}, 400),
        ("GET", "/v1/sessions/none", None, 404),
        ("GET", "/v1/sessions/none/messages", None, 404),
    ],
)
def test_what_cannot_be_is_refused(server: Gateway, method: str, path: str, value: Any, status: int) -> None:
    assert ask(server, method, path, value)[0] == status


@pytest.mark.parametrize("asked", ["after=-1", "after=x", f"after={'9' * 5_000}", "wait_ms=1e3"])
def test_a_number_that_cannot_be_read_is_the_clients_error(server: Gateway, asked: str) -> None:
    place = opened(server)
    status, said = ask(server, "GET", f"{place}/messages?{asked}")
    assert (status, said["detail"].partition(":")[0]) == (400, asked.partition("=")[0]), said
    ask(server, "DELETE", place)


def test_open_sessions_are_listed(server: Gateway) -> None:
    place = opened(server)
    assert place.rpartition("/")[2] in {one["id"] for one in ask(server, "GET", "/v1/sessions")[1]}
