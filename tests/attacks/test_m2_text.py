"""M2: NUL and halves of surrogate pairs, which PostgreSQL or Unicode cannot hold: refused where they come in, by all stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.errors import BadValue
from lamina.gateway.bootstrap import open_gateway
from lamina.store import kv
from lamina.store.open import open_store
from tests.serving import Browser, run, write_app
from tests.store.conftest import place as place
from tests.store.conftest import postgres_url as postgres_url
from tests.store.kit import within, written

APP = """
import lamina

app = lamina.App("texts")


@app.function(scale=lamina.Scale(min=1, max=1))
def keep(key):
    app.state[key] = 1
    return "kept"


@app.function(scale=lamina.Scale(max=1))
def entry(name):
    app.state.map("m")[name] = 1
    return "kept"
"""

ODD = ["a\0b", "\0", "x\ud800y"]


@pytest.mark.parametrize("key", ODD)
def test_m2_a_key_that_a_store_cannot_hold_is_refused_by_all_of_them(place: str, key: str):
    async def work(store: Any) -> Any:
        return await written(store, lambda db: kv.put(db, "app/a", key, "value", b"", 1)), await written(
            store, lambda db: kv.put(db, key, "k", "value", b"", 1)
        )

    for told in within(place, work):
        assert isinstance(told, BadValue) and "NUL or half a surrogate pair" in told.message


@pytest.mark.live
def test_m2_a_server_refuses_such_keys_and_targets_and_keeps_such_values(place: str, tmp_path: Path):
    async def work() -> Any:
        gateway = await open_gateway(open_local(str(write_app(tmp_path, APP))), store=open_store(place))
        try:
            async with Browser(gateway.port) as browser:
                refused = [
                    await browser.ask("PUT", "/v1/state/a%00b", b"1"),
                    await browser.ask("GET", "/v1/state/a%00b"),
                    await browser.ask("PUT", "/v1/state/a%ED%A0%80b", b"1"),
                    await browser.ask("PUT", "/v1/state/k?workflow=a%00b", b"1"),
                    await browser.ask("GET", "/v1/runs?target=%00"),
                    await browser.ask("GET", "/v1/runs?before=%00"),
                ]
                ended = []
                for target in ("keep", "entry"):
                    begun = await browser.post(f"/v1/functions/{target}", "a\0b", prefer="respond-async")
                    ended.append(await browser.ask("GET", f"/v1/runs/{begun.json['id']}/result?wait_ms=20000"))
                value = await browser.ask("PUT", "/v1/state/v", b'"a\\u0000b"')
            return refused, ended, value
        finally:
            await gateway.stop(5)

    async def after() -> Any:
        gateway = await open_gateway(open_local(str(write_app(tmp_path, APP))), store=open_store(place))
        try:
            async with Browser(gateway.port) as browser:
                return [
                    (await browser.ask("GET", "/v1/state/v")).json["value"],
                    [one["key"] for one in (await browser.ask("GET", "/v1/state")).json["keys"]],
                ]
        finally:
            await gateway.stop(5)

    refused, ended, value = run(work)
    assert {answer.status for answer in refused} <= {400, 404}
    assert [answer.status for answer in ended] == [422, 422]  # such a run ends, and says why
    assert value.status == 200
    assert run(after) == ["a\0b", ["v"]]
