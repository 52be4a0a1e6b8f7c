"""Disconnects (T11): clients that leave at any moment. Their waiting calls are not started, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lamina import policies
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.values.slot_refs import WorkerSlots
from tests.serving import Browser, request, run, write_app

pytestmark = pytest.mark.live

APP = """
import time
import lamina

app = lamina.App("left")


@app.function(scale=lamina.Scale(min=1, max=1))
def work(client, x, seen):
    with open(seen, "a") as file:
        file.write(f"{client} {time.monotonic()}\\n")
    time.sleep(0.01)
"""
AT_ONCE = 100
STAY_S = 0.1  # the longest anybody waits; the queue is longer than that
NOTICE_S = 0.02  # from a closed socket to whoever decides, where nothing else runs
LARGE = b"[" + b",".join([b"0.1234567"] * 4_000) + b"]"  # by shared memory where there are several processes


@dataclass
class Left:
    waiting: int = 0  #: calls that had not begun when their client left
    begun: int = 0  #: those of them that were begun after all
    kept: int = 0  #: runs, queued jobs, values and slots that are still there
    files: int = 0  #: open ones, more than before
    grown_mib: float = 0.0


async def leave_early(gateway: Gateway, count: int, seen: Path) -> Left:
    rng = random.Random(11)
    gone_s: dict[int, float] = {}
    room = asyncio.Semaphore(AT_ONCE)

    async def client(number: int) -> None:
        async with room:
            large, is_whole = rng.random() < 0.3, rng.random() < 0.9
            body = b'{"client": %d, "x": %s, "seen": "%s"}' % (number, LARGE if large else b"0", str(seen).encode())
            message = request("POST", "/v1/functions/work", body)
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(message if is_whole else message[: rng.randrange(len(message))])
            await asyncio.sleep(rng.uniform(0.0, STAY_S))
            if is_whole:
                gone_s[number] = time.monotonic()
            writer.transport.abort()

    files, memory = len(os.listdir("/proc/self/fd")), _resident_mib()
    worst = asyncio.create_task(_worst_delay_s())
    await asyncio.gather(*(client(number) for number in range(count)))
    worst.cancel()
    notice_s = NOTICE_S + 3 * await worst
    async with Browser(gateway.port) as browser:
        assert (await browser.post("/v1/functions/work", {"client": -1, "x": 0, "seen": str(seen)})).status == 200
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_nothing_kept(gateway), 5)
    lines = (line.split() for line in seen.read_text().splitlines())
    begun_s = {int(number): float(at_s) for number, at_s in lines}
    waiting = {number: at_s for number, at_s in gone_s.items() if begun_s.get(number, at_s + 1) > at_s}
    late = [number for number, at_s in waiting.items() if begun_s.get(number, 0.0) > at_s + notice_s]
    grown = (len(os.listdir("/proc/self/fd")) - files, _resident_mib() - memory)
    return Left(len(waiting), len(late), _kept(gateway), *grown)


async def _worst_delay_s() -> float:
    """How long this machine has kept its processes waiting; asked for by cancelling it."""
    worst_s = 0.0
    while True:
        begin_s = time.monotonic()
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            return worst_s
        worst_s = max(worst_s, time.monotonic() - begin_s - 0.005)


async def _nothing_kept(gateway: Gateway) -> None:
    while _kept(gateway):
        await asyncio.sleep(0.01)


def _kept(gateway: Gateway) -> int:
    state = gateway.driver.controller.state
    ledger = gateway.driver.engine.references
    assert ledger is not None
    slots = [one for one in ledger._slots.values() if isinstance(one, WorkerSlots)]
    held = sum(len(one.held) + len(one._readers) for one in slots) + ledger.pool.used_bytes
    return held + len(state.runs) + len(gateway.driver.data._runs) + sum(len(one.queue) for one in state.functions.values())


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def found(folder: Path, count: int, ingress: int, limit_s: float = 100) -> Left:
    async def work() -> Left:
        live = open_local(str(write_app(folder, APP)), policy=policies.build("edf"))
        gateway = await open_gateway(live, ListenConfig(ingress=ingress))
        try:
            while not gateway.router.is_ready():
                await asyncio.sleep(0.01)
            return await leave_early(gateway, count, folder / "seen")
        finally:
            await gateway.stop(1)

    left: Left = run(work, limit_s)
    return left


@pytest.mark.parametrize("ingress", [0, 2])
def test_work_for_a_client_that_has_left_is_not_begun_and_nothing_of_it_stays(tmp_path: Path, ingress: int) -> None:
    left = found(tmp_path, 300, ingress)
    assert left.waiting > 200 and left.begun <= 0.01 * left.waiting + 1
    assert left.kept == 0 and left.files <= 2


@pytest.mark.slow
@pytest.mark.parametrize("ingress", [0, 2])
def test_five_thousand_leavers(tmp_path: Path, ingress: int) -> None:
    left = found(tmp_path, 5_000, ingress, 110)
    print(f"ingress {ingress}: {left}")
    assert left.waiting > 3_500 and left.begun <= 0.01 * left.waiting
    assert left.kept == 0 and left.files <= 2 and left.grown_mib < 30
