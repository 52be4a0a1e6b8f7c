"""Prediction cache: equal calls of one tenant share a result, and nothing else does."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina.errors import BadValue
from lamina.gateway.routes.prediction_cache import CachedResult, CacheKey, PredictionStore
from lamina.testing import Server
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run


class Shop:
    """An app whose functions count their executions, and wait where they are told to."""

    def __init__(self) -> None:
        self.app = app = lamina.App("shop")
        self.ran: list[Any] = []
        self.begun, self.gate = threading.Semaphore(0), threading.Event()

        @app.function(cache="10m", scale=lamina.Scale(min=1))
        def price(x: float) -> float:
            self.ran.append(x)
            return 2 * x

        @app.function(cache="10m", scale=lamina.Scale(min=1))
        def slow(x: float) -> float:
            self.ran.append(x)
            self.begun.release()
            assert self.gate.wait(60)
            if x < 0:
                raise ValueError("below zero")
            return 2 * x

        @app.function(cache="10m")
        def broken(x: float) -> float:
            self.ran.append(x)
            raise ValueError("no")

        @app.function(cache="10m")
        def missing(x: float) -> lamina.Response:
            self.ran.append(x)
            return lamina.Response("none", status=404)

        @app.function(cache="10m")
        def count(x: float) -> int:
            self.ran.append(x)
            app.state.counter("n").add()
            return 1


def ask(server: Server, path: str, value: Any, **headers: str) -> tuple[int, Any, str]:
    """Status, value and `Lamina-Cache` of a call."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    head = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    link.request("POST", path, json.dumps(value), head)
    answer = link.getresponse()
    body = answer.read()
    link.close()
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode()
    return answer.status, found, answer.headers.get("lamina-cache", "")


def lookups(server: Server, target: str, result: str) -> int:
    text = server.gateway.metrics.exposition().decode()
    name = f'lamina_cache_lookups_total{{result="{result}",target="{target}"}}'
    other = f'lamina_cache_lookups_total{{target="{target}",result="{result}"}}'
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in text.splitlines() if line.startswith((name, other)))


def test_an_equal_call_is_answered_without_running_again() -> None:
    shop = Shop()
    with Server(shop.app) as server:
        first = ask(server, "/v1/functions/price", {"x": 3})
        again = ask(server, "/v1/functions/price", 3)
    assert (first, again, shop.ran) == ((200, 6.0, "miss"), (200, 6.0, "hit"), [3])


def test_a_hit_counts_in_attainment_and_costs_nothing() -> None:
    shop = Shop()
    with Server(shop.app) as server:
        server.client.call("price", {"x": 3})
        hit = server.client.call_detailed("price", {"x": 3})
        text = server.gateway.metrics.exposition().decode()
    assert (hit.value, hit.cache, hit.cost) == (6.0, "hit", 0.0)
    assert 'lamina_calls_total{outcome="met",target="price"} 2.0' in text


def test_no_cache_computes_anew_and_no_store_keeps_nothing() -> None:
    shop = Shop()
    with Server(shop.app) as server:
        ask(server, "/v1/functions/price", 1)
        anew = ask(server, "/v1/functions/price", 1, cache_control="no-cache")
        client = server.client.call_detailed("price", {"x": 1}, fresh=True)
        ask(server, "/v1/functions/price", 2, cache_control="no-store")
        after = ask(server, "/v1/functions/price", 2)
    assert anew[2] == client.cache == after[2] == "miss"
    assert shop.ran == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["broken", "missing", "count"])
def test_failures_error_responses_and_functions_with_state_are_not_kept(name: str) -> None:
    shop = Shop()
    with Server(shop.app) as server:
        for _ in range(2):
            ask(server, f"/v1/functions/{name}", 1)
    assert shop.ran == [1, 1]


def test_an_equal_inference_is_answered_without_running_again() -> None:
    shop = Shop()
    body = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["3.0"]}]}
    with Server(shop.app) as server:
        found = [ask(server, "/v2/models/price/infer", body)[:2] for _ in range(2)]
    assert [(status, value["outputs"][0]["data"]) for status, value in found] == [(200, ["6.0"])] * 2
    assert shop.ran == [3.0]


def test_equal_calls_in_flight_run_once() -> None:
    shop = Shop()
    with Server(shop.app) as server, ThreadPoolExecutor(6) as clients:
        first = clients.submit(ask, server, "/v1/functions/slow", 5)
        assert shop.begun.acquire(timeout=60)
        others = [clients.submit(ask, server, "/v1/functions/slow", 5) for _ in range(5)]
        while lookups(server, "slow", "joined") < 5:
            pass
        shop.gate.set()
        assert first.result() == (200, 10.0, "miss")
        assert [one.result() for one in others] == [(200, 10.0, "hit")] * 5
    assert shop.ran == [5]


def test_a_tighter_deadline_does_not_wait_for_a_patient_call() -> None:
    shop = Shop()
    with Server(shop.app, units=2) as server, ThreadPoolExecutor(6) as clients:
        first = clients.submit(ask, server, "/v1/functions/slow", 5)
        assert shop.begun.acquire(timeout=60)
        hurried = ask(server, "/v1/functions/slow", 5, lamina_deadline_ms="1")
        shop.gate.set()
        assert first.result()[0] == 200 and hurried[0] in (429, 504)
        assert lookups(server, "slow", "joined") == 0


@pytest.mark.slow
def test_followers_of_a_failed_call_run_by_themselves() -> None:
    shop = Shop()
    with Server(shop.app) as server, ThreadPoolExecutor(3) as clients:
        first = clients.submit(ask, server, "/v1/functions/slow", -1)
        assert shop.begun.acquire(timeout=60)
        others = [clients.submit(ask, server, "/v1/functions/slow", -1) for _ in range(2)]
        while lookups(server, "slow", "joined") < 2:
            pass
        shop.gate.set()
        assert [one.result()[0] for one in (first, *others)] == [500] * 3
    assert shop.ran == [-1, -1, -1]


def test_a_client_that_leaves_takes_nothing_from_those_that_follow_it() -> None:
    shop = Shop()
    with Server(shop.app) as server, ThreadPoolExecutor(2) as clients:
        leaving = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        leaving.request("POST", "/v1/functions/slow", "7", {"content-type": "application/json"})
        assert shop.begun.acquire(timeout=60)
        other = clients.submit(ask, server, "/v1/functions/slow", 7)
        while lookups(server, "slow", "joined") < 1:
            pass
        leaving.close()
        assert ask(server, "/v1/functions/price", 1)[0] == 200  # read after the connection was closed
        shop.gate.set()
        assert other.result() == (200, 14.0, "hit")
    assert shop.ran.count(7) == 1


APP = """
import lamina
app = lamina.App("shop")

@app.function(scale=lamina.Scale(min=1, max=1), cache="10m")
def price(x):
    return ["{version}", x]
"""


@pytest.mark.live
@pytest.mark.parametrize("ingress", [0, 1])
def test_tenants_share_no_entries_and_a_deployment_clears_them(tmp_path: Path, ingress: int) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP.format(version="v0"))

    async def work() -> list[tuple[str, str]]:
        async with managed(app, tmp_path / "kept", ingress=ingress) as server:
            tokens = [await server.token("invoke", tenant=name) for name in ("one", "two")]
            found = []
            for token in (tokens[0], tokens[0], tokens[1]):
                answer = await server.call("/v1/functions/price", 1, token)
                found.append((answer.json[0], answer.headers["lamina-cache"]))
            assert (await server.deploy("shop", APP.format(version="v1"), await server.token("deploy"))).status == 200
            while True:
                answer = await server.call("/v1/functions/price", 1, tokens[0])
                if answer.json[0] == "v1" and answer.headers.get("lamina-cache") == "hit":
                    break
                assert (answer.json[0], answer.headers.get("lamina-cache")) != ("v0", "hit")
            return found

    assert run(work) == [("v0", "miss"), ("v0", "hit"), ("v0", "miss")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "0s"}, "cache: '0s' is out of range"),
        ({"cache": "30d"}, "cache: '30d' is out of range"),
        ({"cache": "1m", "idempotent": False}, "cache: given beside idempotent=False"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue, match=said):
        lamina.App("a").function(**options)


def test_a_function_that_yields_is_not_cached() -> None:
    with pytest.raises(BadValue, match="cache= of a function that yields"):

        @lamina.App("a").function(cache="1m")
        def words() -> Any:
            yield 1


# -------------------------------------------------------------------------- the store


def key(tenant: str, number: int) -> CacheKey:
    return (tenant, "price", "", number.to_bytes(2, "big"))


def test_an_entry_ends_with_its_time() -> None:
    store = PredictionStore(1 << 20)
    store.put(key("a", 1), CachedResult(b"x", until_us=100))
    assert store.get(key("a", 1), 99) == b"x"
    assert store.get(key("a", 1), 100) is None and len(store) == 0


def test_a_tenant_that_fills_its_half_evicts_its_own_entries_first() -> None:
    store = PredictionStore(1 << 16)
    store.put(key("quiet", 1), CachedResult(b"x", until_us=100))
    for number in range(1_000):
        store.put(key("loud", number), CachedResult(bytes(500), until_us=100))
    assert store.get(key("quiet", 1), 1) == b"x"
    assert store.get(key("loud", 0), 1) is None and store.get(key("loud", 999), 1) is not None


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 6_000), st.booleans(), st.integers(0, 3)), max_size=60
)


@given(STEPS)
def test_the_store_is_within_its_limits_and_returns_what_was_put_last(steps: list[tuple[str, int, int, bool, int]]) -> None:
    store, last = PredictionStore(16_384), {}
    for now_us, (tenant, number, size, is_put, reclaimed) in enumerate(steps):
        if is_put:
            blob = bytes([number]) * size
            store.put(key(tenant, number), CachedResult(blob, until_us=now_us + 20))
            last[tenant, number] = (blob, now_us + 20)
        found = store.get(key(tenant, number), now_us)
        assert found is None or (found == last[tenant, number][0] and now_us < last[tenant, number][1])
        store.reclaim(reclaimed * 1_000)
        store.check()
