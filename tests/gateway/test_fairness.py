"""A tenant at ten times its quota on a real server, with real sockets and workers: what others wait stays what it was.

Their p99 does too: `tests/sim/test_tenants.py`, where no machine has other things to do. Here it would be its worst moment."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from lamina.access.desk import Desk
from tests.gateway.managed import ROOT, Managed, managed
from tests.serving import Browser, run

pytestmark = pytest.mark.live

APP = """
import time, lamina
app = lamina.App("shared")

@app.function(scale=lamina.Scale(min=2, max=2), slo=lamina.SLO("5s"))
def work(x):
    time.sleep(0.06)
    return x
"""
RATE, SPAN_S = 8, 3.0


async def calls(server: Managed, token: str, per_s: float) -> list[tuple[float, int]]:
    """Open loop: one every 1/per_s seconds, whatever became of those before; seconds and status of each."""
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Task[tuple[float, int]]] = []
    begin_s = loop.time()

    async def one(due_s: float) -> tuple[float, int]:
        async with Browser(server.gateway.port) as browser:
            answer = await browser.post("/v1/functions/work", 1, Authorization=f"Bearer {token}")
            return loop.time() - due_s, answer.status

    for number in range(int(per_s * SPAN_S)):
        due_s = begin_s + number / per_s
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        answers.append(asyncio.create_task(one(due_s)))
    return [await answer for answer in answers]


def test_ten_times_the_quota_does_not_move_the_median_of_another_tenant_by_more_than_a_quarter(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)

    async def work() -> tuple[list[float], list[float], list[int]]:
        async with managed(app, tmp_path / "kept") as server:
            quiet = await server.token("invoke", tenant="quiet")
            noisy = await server.token("invoke", tenant="noisy", rate_per_s=RATE, burst=1)
            assert await Desk(server.admin.access).do(ROOT, "tenant/list", {})
            while (await server.call("/readyz", method="GET")).status != 200:
                await asyncio.sleep(0.02)
            within: list[float] = []
            beyond: list[float] = []
            refused: list[int] = []
            for times, factor in ((within, 1), (beyond, 10)):
                mine, theirs = await asyncio.gather(calls(server, quiet, RATE), calls(server, noisy, factor * RATE))
                times += [took_s for took_s, status in mine if status == 200]
                refused.append(sum(status == 429 for _, status in theirs))
            return within, beyond, refused

    within, beyond, refused = run(work)
    assert min(len(within), len(beyond)) >= 0.8 * RATE * SPAN_S, "what is within the quota is served"
    before_ms, after_ms = (1e3 * statistics.median(times) for times in (within, beyond))
    assert after_ms <= max(1.25 * before_ms, 120), f"{before_ms:.0f} ms, then {after_ms:.0f} ms, of which 60 are work"
    assert refused[1] >= 0.8 * 9 * RATE * SPAN_S, "what is beyond the quota is refused"
