"""C3: a second server on the same store. It knows nothing and does nothing until it leads, and then knows all there is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.attacks.histories import Op, stale_reads
from benchmarks.attacks.pair import APP, database
from benchmarks.attacks.takeovers import play

from lamina import AsyncClient, Client
from lamina.bootstrap import open_local
from lamina.errors import Unreachable
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.sdk.client_codec import ClientRequest, ClientResponse, LeaderRoute, servers_at
from lamina.store.open import open_store
from tests.serving import Answer, Browser, run, write_app

pytestmark = pytest.mark.live


@contextlib.asynccontextmanager
async def server(folder: Path) -> AsyncIterator[Gateway]:
    runtime = open_local(str(write_app(folder, APP)))
    gateway = await open_gateway(runtime, ListenConfig(), store=open_store(str(folder / "runs.db")))
    try:
        yield gateway
    finally:
        await gateway.stop(5)


@contextlib.asynccontextmanager
async def began(folder: Path) -> AsyncIterator[Gateway]:
    """A server that has made its store."""
    async with server(folder) as gateway:
        assert (await said(gateway, "PUT", "/v1/state/k", b"7")).status == 200
        yield gateway


async def said(gateway: Gateway, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    async with Browser(gateway.port) as browser:
        return await browser.ask(method, path, body, **headers)


async def until_it_leads(gateway: Gateway) -> None:
    while (await said(gateway, "GET", "/readyz")).status != 200:
        await asyncio.sleep(0.01)


def test_c3_a_standby_does_nothing_and_says_where_the_leader_is(tmp_path: Path):
    asked = [
        ("PUT", "/v1/state/k", b"1"),
        ("GET", "/v1/state/k", b""),
        ("DELETE", "/v1/state/k", b""),
        ("GET", "/v1/state", b""),
        ("POST", "/v1/functions/mark", b'"x"'),
        ("GET", "/v1/functions/mark", b""),
        ("GET", "/v1/functions", b""),
        ("POST", "/v2/models/mark/infer", b"{}"),
        ("GET", "/v1/runs", b""),
        ("GET", "/v1/bill", b""),
        ("GET", "/readyz", b""),
    ]

    async def work() -> Any:
        async with began(tmp_path) as leader, server(tmp_path) as standby:
            refused = [await said(standby, *one) for one in asked]
            refused.append(await said(standby, "POST", "/v1/functions/mark", b'"x"', prefer="respond-async"))
            healths = [(await said(one, "GET", "/healthz")).json for one in (leader, standby)]
            return leader.url, refused, healths, (await said(leader, "GET", "/v1/state/k")).json["value"]

    url, refused, healths, value = run(work)
    assert {(answer.status, answer.json["code"]) for answer in refused} == {(503, "not-leader")}
    assert {answer.headers.get("lamina-leader") for answer in refused} == {url}
    assert {answer.json["leader"] for answer in refused} == {url}
    assert [one["role"] for one in healths] == ["leader", "standby"]
    assert value == 7


def test_c3_a_server_that_takes_over_has_read_everything_the_one_before_has_written(tmp_path: Path):
    async def work() -> Any:
        async with began(tmp_path) as first, server(tmp_path) as second:
            for name in ("a", "b", "b"):
                await said(first, "POST", "/v1/functions/mark", f'"{name}"'.encode())
            await said(first, "PUT", "/v1/state/k", b'"new"')
            begun = (await said(first, "POST", "/v1/workflows/steps", b'"c"', prefer="respond-async")).json["id"]
            await first.stop(5)
            await until_it_leads(second)
            result = await said(second, "GET", f"/v1/runs/{begun}/result?wait_ms=20000")
            counted = await said(second, "POST", "/v1/functions/counts", b'["a", "b", "c", "total"]')
            return (await said(second, "GET", "/v1/state/k")).json, result.json, counted.json

    key, result, counted = run(work)
    assert (key["value"], key["version"]) == ("new", 2)
    assert result == "c"
    assert counted == [1, 2, 1, 4]


def test_c3_of_two_servers_that_began_before_there_was_a_store_one_steps_down(tmp_path: Path):
    async def work() -> Any:
        async with server(tmp_path) as first, server(tmp_path) as second:
            made = await said(first, "PUT", "/v1/state/k", b"1")
            lost = await said(second, "PUT", "/v1/state/k", b"2")
            await second.deposed.wait()
            after = await said(second, "GET", "/v1/state/k")
            return made.status, lost.status, after, (await said(first, "GET", "/v1/state/k")).json["value"]

    made, lost, after, value = run(work)
    assert (made, lost, after.status, after.json["code"], value) == (200, 503, 503, "not-leader", 1)


def test_c3_a_leader_that_loses_its_term_answers_with_nothing_it_knew(tmp_path: Path):
    """The term is raised behind its back, as by a server that took over while this one was frozen."""
    import sqlite3

    async def work() -> Any:
        async with server(tmp_path) as old:
            await said(old, "PUT", "/v1/state/k", b"1")
            with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as file, file:
                file.execute("UPDATE leader SET term = term + 1, holder = 'other', address = 'http://other'")
            answers = [
                await said(old, "GET", "/v1/state/k"),
                await said(old, "POST", "/v1/functions/counts", b'["total"]'),
                await said(old, "POST", "/v1/functions/mark", b'"x"'),
                await said(old, "PUT", "/v1/state/k", b"2"),
                await said(old, "POST", "/v1/functions/mark", b'"x"', prefer="respond-async"),
            ]
            await old.deposed.wait()
            return answers, await said(old, "PUT", "/v1/state/k", b"2")

    answers, after = run(work)
    assert [answer.status for answer in answers] == [503] * 5
    assert {answer.json["code"] for answer in answers} <= {"leadership-lost", "not-leader", "store-down"}
    assert (after.json["code"], after.headers["lamina-leader"]) == ("not-leader", "http://other")


def test_c3_a_server_that_loses_the_lead_while_it_takes_over_does_not_serve(tmp_path: Path):
    import sqlite3

    async def work() -> Any:
        async with began(tmp_path):
            pass
        store = open_store(str(tmp_path / "runs.db"))

        async def lose(*_: object) -> Any:
            with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as file, file:
                file.execute("UPDATE leader SET term = term + 1, holder = 'other', address = 'http://other'")
            while store.term:
                await asyncio.sleep(0.01)
            return lambda triggers: None

        gateway = await open_gateway(open_local(str(write_app(tmp_path, APP))), ListenConfig(), store=store, prepare=lose)
        try:
            return gateway.deposed.is_set(), await said(gateway, "GET", "/v1/state/k")
        finally:
            await gateway.stop(1)

    is_deposed, answer = run(work)
    assert is_deposed
    assert (answer.status, answer.json["code"]) == (503, "not-leader")


def test_c3_takeovers_of_a_pair_on_sqlite_lose_nothing_double_nothing_and_read_nothing_stale():
    found = asyncio.run(play("sqlite", "", 2, 1, ("kill", "freeze")))
    assert found.verdict.is_good, found.verdict
    assert found.events[0].has_changed and found.verdict.runs and found.verdict.reads


def test_c3_takeovers_of_a_pair_on_postgresql_lose_nothing_double_nothing_and_read_nothing_stale():
    pytest.importorskip("psycopg")
    with database() as url:
        if not url:
            pytest.skip("no PostgreSQL server is installed")
        found = asyncio.run(play("postgres", url, 2, 1, ("cut", "freeze")))
    assert found.verdict.is_good, found.verdict
    assert found.events[0].has_changed and found.verdict.runs and found.verdict.reads


# ---------------------------------------------------------------------------- the checker itself


def write(value: int, began_s: float, ended_s: float, *, known: bool = True) -> Op:
    return Op("write", began_s, ended_s, value, known)


def read(value: int, began_s: float, ended_s: float) -> Op:
    return Op("read", began_s, ended_s, value)


@pytest.mark.parametrize(
    ("ops", "count"),
    [
        ([write(1, 0, 1), read(1, 2, 3)], 0),
        ([write(1, 0, 1), read(0, 2, 3)], 1),  # acknowledged, and gone
        ([write(1, 0, 5), read(0, 1, 2), read(1, 3, 4)], 0),  # under way: either
        ([write(1, 0, 1), write(2, 2, 9, known=False), read(2, 3, 4), read(1, 5, 6)], 1),  # seen, and gone
        ([write(1, 0, 1), write(2, 2, 9, known=False), read(1, 5, 6)], 0),
        ([read(1, 0, 1), write(1, 2, 3)], 1),  # from nowhere
    ],
)
def test_the_checker_finds_reads_that_no_order_of_events_explains(ops: list[Op], count: int):
    assert len(stale_reads(ops)) == count


# ------------------------------------------------------------------------------- clients


def test_c3_a_client_of_the_standby_goes_to_the_leader_and_to_the_next_one(tmp_path: Path):
    async def work() -> Any:
        async with began(tmp_path) as first, server(tmp_path) as second:
            named, both = AsyncClient(second.url), AsyncClient(f"{first.url},{second.url}")
            done = [await named.call("mark", {"name": "a"}), await both.call("mark", {"name": "b"})]
            begun = await named.start("steps", {"name": "c"})
            done.append(await begun.result("20s"))
            await first.stop(5)
            done += [await both.call("mark", {"name": "d"}), await begun.result("20s")]
            counted = await both.call("counts", {"names": ["a", "b", "c", "d"]})
            await named.close()
            await both.close()
            return done, counted

    done, counted = run(work)
    assert done == ["a", "b", "c", "d", "c"]
    assert counted == [1, 1, 1, 1]


def test_c3_a_blocking_client_goes_to_the_leader_too(tmp_path: Path):
    async def work() -> Any:
        async with began(tmp_path), server(tmp_path) as second:
            client = Client(second.url)
            return await asyncio.to_thread(client.call, "mark", {"name": "a"})

    assert run(work) == "a"


def test_c3_a_client_is_not_led_from_an_encrypted_server_to_one_that_is_not():
    route = LeaderRoute(servers_at("https://a:1,https://b:2", "secret"), "5s")
    assert route.go_on("http://evil:3") and route.current.url == "https://b:2"
    assert route.go_on("https://c:4") and (route.current.url, route.current.token) == ("https://c:4", "secret")


def test_c3_what_may_have_been_done_is_not_sent_again():
    attempt = LeaderRoute(servers_at("http://a:1,http://b:2", ""), "5s").begin(0.0)
    call = ClientRequest("POST", "/v1/functions/f", {})
    start = ClientRequest("POST", "/v1/functions/f", {"idempotency-key": "k"})
    lost = ClientResponse(503, {}, b'{"code": "leadership-lost"}')
    refused = ClientResponse(503, {}, b'{"code": "not-leader"}')
    assert not attempt.repeats_error(Unreachable("it broke off"), call, 1.0)
    assert attempt.repeats_error(Unreachable("it broke off"), start, 1.0)
    assert [attempt.repeats_response(one, call, 1.0) for one in (lost, refused)] == [False, True]
    assert attempt.repeats_response(lost, start, 1.0)
    assert not attempt.repeats_response(refused, call, 100.0)
