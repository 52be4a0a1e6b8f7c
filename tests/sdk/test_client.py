from __future__ import annotations

import re
import socket
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import lamina
from lamina.errors import BadValue, Cancelled, DeadlineExceeded, FunctionFailed, LaminaError, Refused, UnknownTarget, Unreachable

from .scripted_server import DROP, Scripted, Seen, http, ok, problem, serving, silent

pytestmark = pytest.mark.live


def echo(seen: Seen) -> bytes:
    return ok(seen.inputs)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with serving(echo) as script:
        yield script


@pytest.fixture
def client(server: Scripted) -> Iterator[lamina.Client]:
    with lamina.Client(server.url, timeout="60s") as made:
        yield made


# ------------------------------------------------------------------- calls


def test_a_call_sends_its_inputs_and_returns_the_value(client: lamina.Client):
    assert client.call("echo", {"x": 1, "data": b"\x00\xff"}) == {"x": 1, "data": b"\x00\xff"}


def test_arrays_travel_both_ways(client: lamina.Client):
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    found = client.call("echo", {"x": array})["x"]
    assert found.dtype == array.dtype
    assert (found == array).all()


def test_options_cannot_be_taken_for_inputs(client: lamina.Client, server: Scripted):
    client.call("echo", {"deadline": 1, "kind": 2}, deadline="50ms")
    assert server.seen[0].inputs == {"deadline": 1, "kind": 2}
    assert server.seen[0].headers["lamina-deadline-ms"] == "50"


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [("image", "inputs are a dict: call(NAME, {'image': ...})"), ("dedline", "did you mean 'deadline'?")],
)
def test_inputs_as_keywords_are_told_where_they_belong(client: lamina.Client, keyword: str, hint: str):
    with pytest.raises(lamina.errors.BadValue) as error:
        client.call("classify", **{keyword: 1})  # type: ignore[arg-type]
    assert (error.value.message, error.value.hint) == (f"{keyword}: no option of a call", hint)


def test_a_detailed_call_tells_its_latency(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: ok(3, lamina_latency_ms=12.5, lamina_batch=4)
    answer = client.call_detailed("f")
    assert (answer.value, answer.latency_ms, answer.batch) == (3, 12.5, 4)


def test_a_token_goes_with_every_request(server: Scripted):
    with lamina.Client(server.url, token="secret") as client:
        client.call("f")
    assert server.seen[0].headers["authorization"] == "Bearer secret"


def test_a_name_that_is_no_function_is_looked_for_among_the_workflows(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: ok(1) if "/workflows/" in seen.path else problem(404, "unknown-target", detail="no")
    client.call("page"), client.call("page")
    assert [seen.path for seen in server.seen] == ["/v1/functions/page", "/v1/workflows/page", "/v1/workflows/page"]


def test_a_name_that_is_neither_is_unknown(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: problem(404, "unknown-target", detail="nothing here")
    with pytest.raises(UnknownTarget, match="no function or workflow 'nope' at http"):
        client.call("nope")


def test_a_refusal_is_raised_with_its_offer(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: problem(429, "refused", detail="too late", offer_ms=80)
    with pytest.raises(Refused) as caught:
        client.call("f")
    assert caught.value.offer_ms == 80


def test_lists_and_health_are_read(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: http(200, f'["{seen.path}"]'.encode(), "application/json")
    assert (client.functions(), client.workflows(), client.health()) == (["/v1/functions"], ["/v1/workflows"], ["/healthz"])


def test_a_body_is_bound_by_the_parameters_the_server_lists(client: lamina.Client, server: Scripted):
    listing = b'[{"name": "f", "inputs": [{"name": "x", "required": true}]}]'
    server.answer = lambda seen: http(200, listing if seen.path == "/v1/functions" else b"[]", "application/json")
    assert client.bind("f", 3) == {"x": 3}


def test_after_reading_the_listings_the_right_address_is_asked_at_once(client: lamina.Client, server: Scripted):
    listing = b'[{"name": "w", "inputs": [{"name": "x", "required": true}]}]'
    server.answer = lambda seen: http(200, listing if seen.path == "/v1/workflows" else b"[]", "application/json")
    client.call("w", client.bind("w", 3))
    assert [seen.path for seen in server.seen] == ["/v1/functions", "/v1/workflows", "/v1/workflows/w"]


# ------------------------------------------------------------- connections


def test_connections_are_kept_between_calls(client: lamina.Client, server: Scripted):
    client.call("f"), client.call("f")
    assert [(seen.connection, seen.number) for seen in server.seen] == [(1, 1), (1, 2)]


def test_a_server_that_closes_is_connected_to_again(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: ok(1, close=True)
    assert [client.call("f"), client.call("f")] == [1, 1]
    assert server.connections == 2


def test_a_kept_connection_that_drops_before_an_answer_is_tried_once_more(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: DROP if (seen.connection, seen.number) == (1, 2) else ok(seen.connection)
    client.call("f")
    assert client.call("f") == 2


def test_the_second_attempt_is_the_last(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: ok(1) if (seen.connection, seen.number) == (1, 1) else DROP
    client.call("f")
    with pytest.raises(Unreachable, match="without an answer"):
        client.call("f")
    assert len(server.seen) == 3


def test_a_new_connection_that_drops_is_not_tried_again(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: DROP
    with pytest.raises(Unreachable):
        client.call("f")
    assert len(server.seen) == 1


def test_an_answer_that_breaks_off_is_not_tried_again(client: lamina.Client, server: Scripted):
    def answer(seen: Seen) -> bytes:
        return ok("x" * 100) if seen.number == 1 else ok("x" * 100, connection="close")[:60] + b"\r\nconnection: close"

    server.answer = answer
    client.call("f")
    with pytest.raises(Unreachable, match="broke off"):
        client.call("f")
    assert len(server.seen) == 2


def test_a_second_response_to_one_request_is_not_taken_for_the_next(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: ok(seen.connection) + ok("more", lamina_call_id="other")
    assert client.call_detailed("f").call_id == ""
    assert client.call("f") == 2


def test_a_missing_server_is_said_plainly():
    with serving(echo) as script:
        url = script.url
    with lamina.Client(url) as client, pytest.raises(Unreachable, match=f"no server at {url}"):
        client.call("f")


def test_a_server_that_says_nothing_runs_into_the_timeout(server: Scripted):
    server.answer = silent
    with lamina.Client(server.url, timeout="50ms") as client, pytest.raises(DeadlineExceeded, match="within 50ms"):
        client.call("f")


def test_one_client_serves_many_threads(client: lamina.Client):
    results: list[Any] = [None] * 20

    def work(number: int) -> None:
        results[number] = [client.call("echo", {"x": (number, turn)})["x"] for turn in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[[number, turn] for turn in range(5)] for number in range(20)]


# --------------------------------------------------------- spawn and map


def test_a_spawned_call_gives_its_result_later(client: lamina.Client, server: Scripted):
    go = threading.Event()
    server.answer = lambda seen: ok(go.wait(60))
    call = client.spawn("f")
    assert not call.done()
    go.set()
    assert call.get("60s") is True
    assert call.done()


def test_waiting_can_end_before_the_call_does(client: lamina.Client, server: Scripted):
    go = threading.Event()
    server.answer = lambda seen: ok(go.wait(60))
    call = client.spawn("f")
    with pytest.raises(TimeoutError, match="not done within 10ms"):
        call.get("10ms")
    go.set()
    assert call.get() is True


def test_a_spawned_call_raises_its_error_from_get(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: problem(429, "refused")
    call = client.spawn("f")
    with pytest.raises(Refused):
        call.get()


def test_a_cancelled_call_hangs_up(client: lamina.Client, server: Scripted):
    arrived, gone = threading.Event(), threading.Event()

    def answer(seen: Seen) -> bytes:
        arrived.set()
        if seen.gone():
            gone.set()
        return DROP

    server.answer = answer
    call = client.spawn("f")
    assert arrived.wait(60)
    assert call.cancel()
    assert gone.wait(60)
    with pytest.raises(Cancelled):
        call.get()


def test_a_call_that_is_done_cannot_be_cancelled(client: lamina.Client):
    call = client.spawn("echo", {"x": 1})
    call.get()
    assert not call.cancel()


def test_map_keeps_the_order_whatever_ends_first(client: lamina.Client, server: Scripted):
    together = threading.Barrier(4)

    def answer(seen: Seen) -> bytes:
        together.wait(60)  # passes only if four are under way at once
        return ok(seen.inputs["x"])

    server.answer = answer
    assert list(client.map("f", [{"x": x} for x in range(8)], max_concurrency=4)) == list(range(8))


def test_map_keeps_to_its_concurrency(client: lamina.Client, server: Scripted):
    lock, under_way, peak = threading.Lock(), [], []

    def answer(seen: Seen) -> bytes:
        with lock:
            under_way.append(1)
            peak.append(len(under_way))
        said = echo(seen)
        with lock:
            under_way.pop()
        return said

    server.answer = answer
    list(client.map("f", [{"x": x} for x in range(30)], max_concurrency=2))
    assert max(peak) <= 2


def test_the_first_error_ends_a_map(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: problem(500, "function-failed") if seen.inputs["x"] == 1 else echo(seen)
    results = client.map("f", [{"x": x} for x in range(3)], max_concurrency=1)
    assert next(results) == {"x": 0}
    with pytest.raises(FunctionFailed):
        next(results)


def test_a_map_may_return_errors(client: lamina.Client, server: Scripted):
    server.answer = lambda seen: problem(500, "function-failed") if seen.inputs["x"] == 1 else echo(seen)
    results = list(client.map("f", [{"x": x} for x in range(3)], return_errors=True))
    assert [type(result) for result in results] == [dict, FunctionFailed, dict]


def test_a_map_left_early_calls_the_rest_off(client: lamina.Client, server: Scripted):
    arrived, gone = threading.Event(), threading.Event()

    def answer(seen: Seen) -> bytes:
        if seen.inputs["x"] == 0:
            return ok(0)
        arrived.set()
        if seen.gone():
            gone.set()
        return DROP

    server.answer = answer
    results = client.map("f", ({"x": x} for x in range(2)), max_concurrency=2)
    next(results)
    assert arrived.wait(60)
    results.close()  # type: ignore[attr-defined]
    assert gone.wait(60)


# ----------------------------------------------------- functions of an app


@pytest.fixture
def app(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> Iterator[lamina.App]:
    monkeypatch.setenv("LAMINA_URL", server.url)
    made = lamina.App("remote")
    yield made
    made.close()


def test_remote_calls_the_server_of_the_environment(app: lamina.App, server: Scripted):
    @app.function()
    def square(x): ...

    assert square.remote(3) == {"x": 3}
    assert server.seen[0].path == "/v1/functions/square"


def test_a_workflow_is_called_under_its_own_address(app: lamina.App, server: Scripted):
    @app.workflow()
    def page(image, scale=1): ...

    assert page.remote(3) == {"image": 3}
    assert server.seen[0].path == "/v1/workflows/page"


def test_remote_calls_share_their_connection(app: lamina.App, server: Scripted):
    @app.function()
    def square(x): ...

    square.remote(1), square.remote(2)
    assert server.connections == 1


def test_a_function_streams_from_the_server_of_the_environment(app: lamina.App):
    @app.function()
    def square(x): ...

    assert list(square.stream(3)) == [{"x": 3}]


def test_spawn_and_map_of_a_function(app: lamina.App):
    @app.function()
    def square(x): ...

    assert square.spawn(3).get("5s") == {"x": 3}
    assert list(square.map([1, 2])) == [{"x": 1}, {"x": 2}]


def test_items_of_a_map_name_the_arguments_where_there_are_several(app: lamina.App):
    @app.function()
    def add(a, b=0): ...

    assert list(add.map([{"a": 1}, {"a": 2, "b": 3}])) == [{"a": 1}, {"a": 2, "b": 3}]


def test_a_remote_error_shows_the_users_frames_and_the_public_call_only(app: lamina.App, server: Scripted):
    server.answer = lambda seen: problem(500, "function-failed", detail="ValueError: bad", trace="File app.py, line 3")

    @app.function()
    def square(x): ...

    with pytest.raises(LaminaError) as caught:
        square.remote(3)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[1:] == ["remote", "call"]
    assert "File app.py, line 3" in "".join(traceback.format_exception(caught.value))


def test_without_an_address_it_is_the_usual_server_with_the_usual_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_URL", "http://models.example:9000")
    monkeypatch.setenv("LAMINA_TOKEN", "lmt_x")
    server = lamina.Client().server
    assert (server.host, server.port, server.token) == ("models.example", 9000, "lmt_x")
    assert lamina.Client("http://other.example").server.token == ""  # a token is for the server it was made for


def test_a_time_without_a_unit_is_refused_by_name() -> None:
    with pytest.raises(BadValue, match="timeout: 5 has no unit"):
        lamina.Client(timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deadline": "0ms"}, "deadline: '0ms' is no time at all"),
        ({"deadline": "25h"}, "deadline: '25h' is longer than a day"),
        ({"priority": 11}, "priority: 11 is not a number from -10 to 10"),
        ({"priority": "high"}, "priority: 'high' is not a number"),
        ({"cost_limit": -1}, "cost_limit: -1 is not a number from 0"),
        ({"cost_limit": float("nan")}, "cost_limit: nan is not a number from 0"),
        ({"kind": "function"}, "kind: 'function' is none"),
    ],
)
def test_wrong_options_are_told_by_their_own_names_before_anything_is_sent(
    client: lamina.Client, server: Scripted, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadValue, match=re.escape(says)):
        client.call("f", {"x": 1}, **options)
    assert server.seen == []


def test_a_run_without_an_id_is_none(client: lamina.Client) -> None:
    with pytest.raises(BadValue, match="is that of no run"):
        client.run("")


@pytest.mark.parametrize("url", ["http://gpu1:8700/v1", "http://gpu1:8700/v1/functions/f", "https://gpu1/lamina/v2/models"])
def test_the_address_of_something_at_a_server_is_not_that_of_a_server(url: str) -> None:
    with pytest.raises(BadValue) as caught:
        lamina.Client(url)
    assert caught.value.hint == f'give the server alone: "{url[: url.index("/v")]}"'


def test_a_path_before_ours_is_kept() -> None:
    assert lamina.Client("https://gpu1/v1/lamina").server.base == "/v1/lamina"


def test_a_server_without_tls_is_guessed_at() -> None:
    def answer() -> None:
        with plain.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as plain:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unreachable) as caught:
            lamina.Client(f"https://127.0.0.1:{plain.getsockname()[1]}").call("f")
        thread.join()
    assert caught.value.hint == "does it speak TLS? if not, write http://"


def test_a_stream_is_asked_of_the_next_server_if_one_is_not_there(server: Scripted):
    server.answer = lambda seen: DROP if len(server.seen) > 1 else ok(7)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        urls = f"http://127.0.0.1:{gone.getsockname()[1]},{server.url}"
    with lamina.Client(urls) as client:
        assert list(client.stream("f")) == [7]
        with pytest.raises(Unreachable, match="without an answer"):
            list(client.stream("f"))
