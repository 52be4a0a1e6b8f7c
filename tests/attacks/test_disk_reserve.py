"""The last of a disk is not for new runs: a client that fills it with inputs stops no run that was accepted."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.attacks.gateways import emulated
from tests.serving import Browser, run


@pytest.mark.slow
def test_a_disk_that_is_nearly_full_takes_no_new_runs_and_goes_on_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = {"free": 50 * 2**30}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * 2**30, free=left["free"]))

    async def work() -> Any:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:

            async def start(name: str) -> Any:
                return await browser.ask("POST", f"/v1/workflows/{name}", b"1", prefer="respond-async")

            accepted = (await start("nap")).json["id"]
            left["free"] = 2**30 - 1
            while (refused := await start("twice")).status == 202:
                await asyncio.sleep(0.05)
            called = await browser.ask("POST", "/v1/functions/echo", b"1")
            ended = await browser.ask("GET", f"/v1/runs/{accepted}/result?wait_ms=30000")
            left["free"] = 50 * 2**30
            while (again := await start("twice")).status != 202:
                await asyncio.sleep(0.05)
            return refused, called.status, ended.status, again.status

    refused, *statuses = run(work)
    assert (refused.status, refused.json["code"]) == (503, "store-down") and "nearly full" in refused.json["detail"]
    assert statuses == [200, 200, 202]
