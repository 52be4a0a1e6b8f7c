"""Time, cancelling and state of workflows on real workers: what the simulator shows must be so here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.bootstrap import open_local
from lamina.errors import DeadlineExceeded, FunctionFailed
from lamina.gateway.bootstrap import open_gateway
from tests.serving import write_app

pytestmark = pytest.mark.live

APP = '''
import asyncio
import threading
import time
import lamina

app = lamina.App("lively")
one = lamina.Scale(max=1)


@app.function(scale=one)
def work(seconds, beats=False, path=""):
    if path:
        with open(path, "a") as file:
            file.write("x")
    ctx = lamina.context()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
        if beats:
            ctx.heartbeat()
    return seconds


@app.function(scale=one)
def fail(item, path):
    with open(path, "a") as file:
        file.write("x")
    raise ValueError("no")


@app.function(scale=one)
def unknown(path):
    """Nobody knows yet how long it takes, so nobody refuses it."""
    with open(path, "a") as file:
        file.write("x")
    time.sleep(0.4)


@app.function(scale=one)
def left(before):
    return [*before, lamina.context().remaining_ms()]


@app.function(scale=lamina.Scale(min=2, max=2))
def count(by, fails=False):
    """Reads, thinks and writes: two at once would lose counts without a transaction."""
    state = lamina.context().state
    seen = state.get("seen", 0)
    time.sleep(0.01)
    state["seen"] = seen + by
    app.state.counter("calls").add(1)
    app.state.set("by").add(by)
    if fails:
        raise ValueError("after all")
    return seen + by


@app.function(scale=one)
def look():
    return {"calls": app.state.counter("calls").value, "by": app.state.set("by").items}


@app.function(batch=4, scale=one)
def batched(x):
    app.state["x"] = 1
    return x


@app.function(batch=8, scale=one, slo="10s")
def tallied(by, fails=False):
    """The sum so far, read and written by every request of a batch."""
    sums = []
    for request, number, is_bad in zip(lamina.context().requests, by, fails):
        with request:
            app.state["sum"] = app.state.get("sum", 0) + number
            app.state.counter("tallies").add(1)
            sums.append(ValueError("bad") if is_bad else app.state["sum"])
    return sums


@app.function(batch=8, scale=one, slo="10s")
def phased(by):
    """All reads of a batch come before its first change: requests that share a key find it changed, and run again."""
    requests = lamina.context().requests
    found = []
    for request in requests:
        with request:
            found.append(app.state.get("phased", 0))
    for request, before, number in zip(requests, found, by):
        with request:
            app.state["phased"] = before + number
    return [before + number for before, number in zip(found, by)]


@app.function(concurrency=16, scale=one, slo="10s")
async def interleaved(by):
    before = app.state.get("interleaved", 0)
    await asyncio.sleep(0.002)
    app.state["interleaved"] = before + by
    return before + by


@app.function(concurrency=4, scale=one)
def streamed(by):
    """A generator in a thread reads state as well."""
    for number in range(by):
        app.state.counter("streamed").add(1)
        yield app.state.counter("streamed").value


@app.workflow()
async def heard(seconds):
    try:
        return await work.heartbeat("300ms")(seconds)
    except TimeoutError as error:
        return str(error)


@app.workflow()
async def heard_in_time(seconds):
    return await work.heartbeat("1s")(seconds, True)


@app.workflow()
async def limited(seconds):
    try:
        async with lamina.timeout("200ms"):
            return await work(seconds)
    except TimeoutError:
        return "late"


@app.workflow(slo=lamina.SLO("20s"))
async def in_a_row():
    return await left(await left([]))


@app.workflow()
async def first_of(path):
    return await lamina.gather(*[work(0.2, False, path) for _ in range(6)], wait_for=1)


@app.workflow()
async def all_of(items, path):
    return await lamina.each(lambda item: fail(item, path), items, tolerate=0.1)


@app.workflow()
async def in_time(path):
    for _ in range(5):
        await unknown(path)


@app.workflow()
async def counted(by, fails=False):
    return await count(by, fails)


@app.workflow()
async def counted_elsewhere(by):
    return await count(by)
'''


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lamina.Client]:
    path = write_app(tmp_path_factory.mktemp("lively"), APP)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    gateway = asyncio.run_coroutine_threadsafe(open_gateway(open_local(str(path))), loop).result(100)
    try:
        with lamina.Client(gateway.url, timeout="60s") as made:
            made.call("work", {"seconds": 0.0})  # its worker is up: what follows is not about that
            yield made
    finally:
        asyncio.run_coroutine_threadsafe(gateway.stop(5), loop).result(100)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def call(client: lamina.Client, name: str, **inputs: Any) -> Any:
    return client.call(name, inputs, kind="workflows")


def test_a_step_that_is_silent_for_too_long_is_given_up(client: lamina.Client):
    assert "silent for longer" in call(client, "heard", seconds=2.0)


def test_a_step_that_says_it_is_alive_may_take_its_time(client: lamina.Client):
    assert call(client, "heard_in_time", seconds=1.2) == 1.2


def test_a_block_is_left_when_its_time_is_up(client: lamina.Client):
    assert call(client, "limited", seconds=2.0) == "late"


def test_every_step_knows_what_is_left_of_the_run(client: lamina.Client):
    call(client, "in_a_row")  # first calls wait for a load as long as it takes
    first_ms, second_ms = call(client, "in_a_row")
    assert 0 < second_ms < first_ms < 20_000


def test_what_a_quorum_does_not_need_is_not_run(client: lamina.Client, tmp_path: Path):
    assert call(client, "first_of", path=str(tmp_path / "ran")) == [0.2]
    call(client, "limited", seconds=0.0)  # behind whatever was still booked
    assert len((tmp_path / "ran").read_text()) <= 2  # of six: the first, and one already booked behind it


def test_an_each_ends_when_more_have_failed_than_it_tolerates(client: lamina.Client, tmp_path: Path):
    with pytest.raises(FunctionFailed, match="ExceedToleratedFailureThreshold"):
        call(client, "all_of", items=list(range(40)), path=str(tmp_path / "ran"))
    assert 5 <= len((tmp_path / "ran").read_text()) < 40


def test_what_is_left_of_a_late_run_is_not_run(client: lamina.Client, tmp_path: Path):
    with pytest.raises(DeadlineExceeded):
        client.call("in_time", {"path": str(tmp_path / "ran")}, kind="workflows", deadline="1200ms")
    with (tmp_path / "ran").open("a+") as file:
        file.seek(0)
        assert len(file.read()) < 5


# ------------------------------------------------------------------------------------------------------------------ state


def test_changes_of_state_are_seen_by_the_next_and_none_is_lost(client: lamina.Client):
    with ThreadPoolExecutor(8) as pool:
        seen = sorted(pool.map(lambda _: call(client, "counted", by=1), range(16)))
    assert seen == list(range(1, 17))


def test_a_step_that_fails_changes_nothing(client: lamina.Client):
    before = client.call("look", {})
    with pytest.raises(FunctionFailed, match="after all"):
        call(client, "counted", by=1_000, fails=True)
    assert client.call("look", {}) == before


def test_each_workflow_has_state_of_its_own(client: lamina.Client):
    assert call(client, "counted_elsewhere", by=5) == 5


def test_state_of_a_batch_as_a_whole_is_refused(client: lamina.Client):
    with pytest.raises(FunctionFailed, match="each has its own"):
        client.call("batched", {"x": 1})


def test_requests_of_a_batch_change_state_one_after_another_and_one_that_fails_leaves_nothing(client: lamina.Client):
    def one(number: int) -> Any:
        try:
            return client.call("tallied", {"by": 1, "fails": number % 4 == 0}, deadline="30s")
        except FunctionFailed:
            return "failed"

    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(one, range(48)))
    assert found.count("failed") == 12
    assert sorted(one for one in found if one != "failed") == list(range(1, 37))


def test_requests_of_a_batch_that_find_what_they_read_changed_run_again(client: lamina.Client):
    with ThreadPoolExecutor(12) as pool:
        found = sorted(pool.map(lambda _: client.call("phased", {"by": 1}, deadline="30s"), range(24)))
    assert found == list(range(1, 25))


def test_calls_at_once_in_one_instance_have_their_own_state_and_lose_nothing(client: lamina.Client):
    with ThreadPoolExecutor(8) as pool:
        found = sorted(pool.map(lambda _: client.call("interleaved", {"by": 1}, deadline="30s"), range(16)))
    assert found == list(range(1, 17))


def test_a_generator_in_a_thread_reads_and_changes_state(client: lamina.Client):
    with ThreadPoolExecutor(3) as pool:
        pieces = list(pool.map(lambda _: list(client.stream("streamed", {"by": 3})), range(1)))
    assert pieces == [[1, 2, 3]]
    assert list(client.stream("streamed", {"by": 1})) == [4]
