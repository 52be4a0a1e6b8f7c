"""M1, M3: a path that is not UTF-8, and rows that are damaged, get an answer like anything else."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

from lamina.gateway.observability import billing
from tests.attacks.gateways import emulated
from tests.attacks.test_c4_quarantine import ASYNC, until_state
from tests.serving import Browser, run

BAD_TEXT = ("%ff", "%c3%28", "a%80", "%ed%a0%80")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
def test_m1_a_key_that_is_not_utf8_is_a_bad_request(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            for text in BAD_TEXT:
                for place in ("/v1/state/", "/v1/runs/", "/v1/functions/", "/v2/models/", "/"):
                    answer = await browser.ask(method, place + text)
                    assert 400 <= answer.status < 500, (place, text, answer.body)

    with caplog.at_level(logging.ERROR, "lamina"):
        run(work)
    assert not caplog.records


@pytest.mark.parametrize("column", ["result", "problem", "about", "created_us", "notes"])
def test_m3_a_damaged_row_is_answered(tmp_path: Path, column: str) -> None:
    place = str(tmp_path / "runs.db")

    async def work() -> None:
        async with emulated(place) as gateway, Browser(gateway.port) as browser:
            id = (await browser.post("/v1/workflows/twice", 1, **ASYNC)).json["id"]
            await until_state(browser, id, "succeeded")
            damage = sqlite3.connect(place)
            if column == "notes":
                damage.execute("UPDATE notes SET body = ?", (b"\xc1",))
            elif column == "problem":
                damage.execute("UPDATE runs SET result = NULL, problem = ?", (b'{"status": "x"}',))
            elif column == "created_us":
                damage.execute("UPDATE runs SET created_us = 'yesterday', ended_us = 'today'")
            else:
                damage.execute(f"UPDATE runs SET {column} = ?", (b"\xc1 nonsense",))
            damage.commit()
            damage.close()
            for path in (f"/v1/runs/{id}", f"/v1/runs/{id}/result", f"/v1/runs/{id}/history", "/v1/runs"):
                answer = await browser.ask("GET", path)
                assert answer.status in (200, 400, 422, 500), (path, answer.body)
                if answer.status != 200:
                    assert answer.json["code"]

    run(work)


def test_m3_a_damaged_bill_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a row that is none")

    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            id = (await browser.post("/v1/functions/echo", 1, **ASYNC)).json["id"]
            await until_state(browser, id, "succeeded")
            monkeypatch.setattr(billing, "_grouped", fail)
            answer = await browser.ask("GET", "/v1/bill")
            assert answer.status == 500 and answer.json["code"] == "internal"

    run(work)
