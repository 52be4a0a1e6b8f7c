"""A tenant at ten times its quota on a real server, with real sockets and workers: others wait behind no more of its calls.

How long they wait is measured where no machine has other things to do: in `tests/sim/test_tenants.py`, and by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lamina.core.actions import StartBatch
from lamina.core.events import CallArrived
from tests.gateway.deploy.admin_fixture import Managed, managed
from tests.serving import Browser, run

pytestmark = pytest.mark.live

APP = """
import time, lamina
app = lamina.App("shared")

@app.function(scale=lamina.Scale(min=2, max=2), slo=lamina.SLO("30s"))
def work(x):
    time.sleep(0.06)
    return x
"""
RATE, SPAN_S = 8, 3.0
AT_ONCE = 4  #: two run, and two may be booked behind them


@dataclass
class Line:
    """Calls that began between the arrival of a call and its start."""

    tenants: dict[str, str] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)  #: by call that has not begun: those of others
    waited_for: list[int] = field(default_factory=list)  #: by those of `quiet`

    def watch(self, now_us: int, event: Any, actions: list[Any]) -> None:
        if isinstance(event, CallArrived):
            self.tenants[event.call.id] = event.call.tenant
            self.ahead[event.call.id] = 0
        for job in [job for action in actions if isinstance(action, StartBatch) for job in action.jobs]:
            tenant, behind = self.tenants[job.call_id], self.ahead.pop(job.call_id, 0)
            if tenant == "quiet":
                self.waited_for.append(behind)
            for call_id in self.ahead:
                self.ahead[call_id] += self.tenants[call_id] != tenant


async def calls(server: Managed, token: str, per_s: float) -> list[int]:
    """Open loop: one every 1/per_s seconds, whatever became of those before; the status of each."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def one() -> int:
        async with Browser(server.gateway.port) as browser:
            return (await browser.post("/v1/functions/work", 1, Authorization=f"Bearer {token}")).status

    answers: list[asyncio.Task[int]] = []
    for number in range(int(per_s * SPAN_S)):
        await asyncio.sleep(max(0.0, begin_s + number / per_s - loop.time()))
        answers.append(asyncio.create_task(one()))
    return [await answer for answer in answers]


def test_ten_times_the_quota_puts_no_more_calls_before_those_of_another_tenant(tmp_path: Path) -> None:
    app, line = tmp_path / "app.py", Line()
    app.write_text(APP)

    async def work() -> tuple[list[int], list[int], float]:
        async with managed(app, tmp_path / "kept", on_event=line.watch) as server:
            quiet = await server.token("invoke", tenant="quiet")
            noisy = await server.token("invoke", tenant="noisy", rate_per_s=RATE, burst=1)
            while (await server.call("/readyz", method="GET")).status != 200:
                await asyncio.sleep(0.02)
            begin_s = asyncio.get_running_loop().time()
            mine, theirs = await asyncio.gather(calls(server, quiet, RATE), calls(server, noisy, 10 * RATE))
            return mine, theirs, asyncio.get_running_loop().time() - begin_s

    mine, theirs, took_s = run(work)
    assert set(mine) == {200} and len(line.waited_for) == len(mine)
    assert max(line.waited_for) <= AT_ONCE
    assert set(theirs) == {200, 429} and theirs.count(200) <= RATE * took_s + 2
