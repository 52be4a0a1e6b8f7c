"""The load tool: calls leave when they are due, and are counted from then."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from lamina.cli.load import command
from lamina.errors import BadValue, Unreachable
from lamina.load.generator import run, run_load
from lamina.load.load_plan import LoadPlan, parse_stages
from lamina.load.report import html_report, live_view
from lamina.load.results import LoadResult, LoadTally, SecondStats

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers in turn, one per request; an empty one hangs up."""
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    lock = threading.Lock()

    def serve(connection: socket.socket) -> None:
        with connection:
            while True:
                data = b""
                while b"\r\n\r\n" not in data:
                    try:
                        piece = connection.recv(65_536)
                    except ConnectionResetError:  # whoever is stopped hangs up
                        return
                    if not piece:
                        return
                    data += piece
                with lock:
                    answer = answers[len(seen) % len(answers)]
                    seen.append(data)
                if not answer:
                    return
                connection.sendall(answer)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/f", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def plan(url: str, **more: object) -> LoadPlan:
    return msgspec.structs.replace(LoadPlan(url=url, stages=((0.3, 100.0),), shape="even", patience_s=60.0), **more)


@pytest.mark.live
def test_every_call_that_was_due_is_accounted_for() -> None:
    with answering(OK, BUSY, CHUNKED) as (url, seen):
        result = run(plan(url))
    assert (result.offered, result.in_time, result.refused, len(seen)) == (30, 20, 10, 30)


@pytest.mark.live
def test_a_server_that_hangs_up_costs_its_call_and_no_other() -> None:
    with answering(OK, b"") as (url, _):
        result = run(plan(url))
    assert (result.in_time, result.failed, result.unanswered) == (15, 15, 0)


@pytest.mark.live
def test_a_call_that_waits_for_a_connection_is_timed_from_when_it_was_due() -> None:
    slow = socket.create_server(("127.0.0.1", 0))
    released = threading.Event()

    def serve() -> None:
        connection, _ = slow.accept()
        with connection:
            for number in range(30):
                connection.recv(65_536)
                if not number:
                    threading.Timer(0.5, released.set).start()
                released.wait()  # the first answer is held back until all calls are due
                connection.sendall(OK)

    threading.Thread(target=serve, daemon=True).start()
    with slow:
        result = run(plan(f"http://127.0.0.1:{slow.getsockname()[1]}/", connections=1))
    assert result.answered.p50_ms > 300  # due at 150 ms or so, answered after 500


@pytest.mark.live
def test_a_body_larger_than_the_socket_buffer_arrives_whole() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    body = bytes(range(256)) * 40_000
    got: list[int] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            data = 0
            while data < len(body):
                data += len(connection.recv(65_536))
            got.append(data)
            connection.sendall(OK)

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        result = run(plan(url, body=body, stages=((0.1, 10.0),)))
    assert result.in_time == 1
    assert got[0] >= len(body)


@pytest.mark.live
def test_the_child_process_tells_each_second_and_then_the_result() -> None:
    told = []
    with answering(OK) as (url, _):
        result = run_load(plan(url, stages=((1.2, 50.0),)), told.append)
    assert [second.at_s for second in told][:2] == [1, 2]
    assert sum(second.offered for second in told) == result.offered == 60


@pytest.mark.live
def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unreachable, match=str(port)):
        run_load(plan(f"http://127.0.0.1:{port}/"))


def test_an_answer_at_the_goal_is_in_time_and_one_after_it_is_late() -> None:
    tally = LoadTally(slo_us=1000)
    for took_us in (1000, 1001):
        tally.call_ended("200", took_us)
    assert (tally.counts["in_time"], tally.counts["late"]) == (1, 1)


@pytest.mark.parametrize(("text", "stages"), [("200", ((10.0, 200.0),)), ("1x10s,2.5x500ms", ((10.0, 1.0), (0.5, 2.5)))])
def test_rates_are_a_number_or_stages(text: str, stages: object) -> None:
    assert parse_stages(text, 10.0) == stages


@pytest.mark.parametrize("text", ["", "0", "fast", "-1", "10x", "10x0s"])
def test_a_rate_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_stages(text, 10.0)
    assert "rate" in str(caught.value).lower() or "time" in str(caught.value).lower()


@pytest.mark.parametrize("shape", ["poisson", "gamma", "ramp", "steps"])
def test_arrivals_repeat_with_the_seed(shape: str) -> None:
    one = plan("http://h/", shape=shape, stages=((1.0, 100.0), (1.0, 300.0)))
    assert list(one.arrivals()) == list(one.arrivals())
    assert 250 < len(list(one.arrivals())) < 550


@pytest.mark.live
def test_the_command_prints_json_and_writes_a_page(tmp_path) -> None:  # type: ignore[no-untyped-def]
    html = tmp_path / "load.html"
    with answering(OK) as (url, seen):
        options = [url, "--rate", "50", "--duration", "200ms", "--slo", "50ms", "--json", "--html", str(html), "--body", "{}"]
        done = CliRunner().invoke(command, options, catch_exceptions=False)
    result = msgspec.json.decode(done.stdout.splitlines()[0], type=LoadResult)
    assert result.offered == len(seen)
    assert "calls in time" in html.read_text()


def test_a_page_of_nothing_is_still_a_page() -> None:
    result = LoadTally(0).result(url="http://h/<b>", shape="poisson", seed=1, seconds=1.0, unanswered=0)
    assert "&lt;b&gt;" in html_report(result)


@pytest.mark.live
def test_a_run_that_is_stopped_says_what_it_saw() -> None:
    def stop(second: SecondStats) -> None:
        if second.at_s == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with answering(OK) as (url, _):
        result = run_load(plan(url, stages=((60.0, 50.0),)), stop)
    assert result.stopped
    assert 1 <= result.seconds < 60
    assert result.offered >= 40


def test_a_run_that_is_over_shows_no_last_second() -> None:
    """Nothing is offered in it: its figures would stand above those of the whole run."""
    seconds = [SecondStats(0, offered=50, in_time=50, p99_ms=3.0), SecondStats(1, in_time=1, p50_ms=9.0, p99_ms=9.0)]

    def shown(*, is_over: bool) -> str:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(live_view(seconds, 20.0, is_over=is_over))
        return console.export_text()

    assert "offered 0/s" in shown(is_over=False)
    assert "offered" not in shown(is_over=True) and "calls/s" in shown(is_over=True)
