"""`kill -9` of the gateway with thousands of queued runs: nothing accepted is lost, nothing finished is done again.

The witnesses are outside of the server: every step appends a line to a file, the clients remember what was accepted, and after
each kill the database is read as it was left. A step whose result was in it must not appear in the file again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.postgres import private_server
from benchmarks.report import Report
from benchmarks.servers import APPS, free_port, wait_for
from lamina import encoding
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.errors import LaminaError, StoreDown, Unreachable
from lamina.sdk.async_client import AsyncClient


@dataclass
class Witness:
    """What was seen, and what follows from it."""

    accepted: dict[str, str] = field(default_factory=dict)  #: run by key
    kills: int = 0
    queued: list[int] = field(default_factory=list)  #: runs not ended, at each kill
    answer_s: list[float] = field(default_factory=list)  #: from the start of the process to a first synchronous answer
    run_s: list[float] = field(default_factory=list)  #: to the end of a first run
    committed: list[set[str]] = field(default_factory=list)  #: steps whose results were in the database, before each start
    lost: int = 0
    wrong: int = 0
    doubled: int = 0
    again: int = 0  #: steps under way at a kill, and done again
    took_s: float = 0.0


class Gateway:
    def __init__(self, folder: Path, store: str, step_s: float) -> None:
        self.folder = folder
        self.store = store
        self.step_s = step_s
        self.port = free_port()
        self.generation = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.started_us = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """How long it took to the first answer."""
        self.generation += 1
        declared = {
            "LEDGER": str(self.folder / "ledger"),
            "LEDGER_GENERATION": str(self.generation),
            "LEDGER_STEP_S": str(self.step_s),
        }
        env = {**os.environ, **declared}
        command = [sys.executable, "-m", "lamina", "serve", str(APPS / "ledger.py"), "--port", str(self.port), "--json"]
        log = (self.folder / "server.log").open("ab")
        began_s = time.monotonic()
        self.started_us = time.time_ns() // 1000
        self.process = subprocess.Popen(
            [*command, "--store", self.store, *(f"--env={name}" for name in declared)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        log.close()
        wait_for(f"{self.url}/v1/functions/plain", f'"s{self.generation}"'.encode(), limit_s=120.0)
        return time.monotonic() - began_s

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(20)


def crash(
    store: str, folder: Path, *, runs: int, kills: int, step_s: float = 0.0, pause_s: float = 1.0, seed: int = 1
) -> Witness:
    return asyncio.run(_crash(store, folder, runs, kills, step_s, pause_s, seed))


async def _crash(store: str, folder: Path, runs: int, kills: int, step_s: float, pause_s: float, seed: int) -> Witness:
    rng, witness, gateway = random.Random(seed), Witness(), Gateway(folder, store, step_s)
    began_s = time.monotonic()
    witness.committed.append(set())
    witness.answer_s.append(await asyncio.to_thread(gateway.start))
    submitting = asyncio.create_task(_submit(gateway, witness, runs))
    try:
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.2, 2 * pause_s))
            while not witness.accepted:  # a kill before anything was promised shows nothing
                await asyncio.sleep(0.01)
            await asyncio.to_thread(gateway.kill)
            witness.kills += 1
            left = await asyncio.to_thread(_look, store, gateway.started_us)
            witness.committed.append(left.committed)
            witness.queued.append(left.open)
            if left.first_end_us:
                witness.run_s.append((left.first_end_us - gateway.started_us) / 1e6)
            witness.answer_s.append(await asyncio.to_thread(gateway.start))
        await submitting
        await _all_over(gateway)
    finally:
        submitting.cancel()
        await asyncio.to_thread(gateway.stop)
    witness.took_s = time.monotonic() - began_s
    _judge(witness, folder, await asyncio.to_thread(_look, store, gateway.started_us))
    return witness


async def _submit(gateway: Gateway, witness: Witness, runs: int) -> None:
    """Each with a key of its own, so that asking again after a broken connection does not start another."""
    places = asyncio.Semaphore(64)
    async with AsyncClient(gateway.url, timeout="20s", max_connections=64) as client:

        async def one(number: int) -> None:
            kind, target, key = ("workflows", "flow", f"w{number}") if number % 2 else ("functions", "plain", f"f{number}")
            async with places:
                while key not in witness.accepted:
                    try:
                        run = await client.start(target, {"key": key}, kind=kind, idempotency_key=key)
                        witness.accepted[key] = run.id
                    except (Unreachable, StoreDown):
                        await asyncio.sleep(0.05)

        await asyncio.gather(*(one(number) for number in range(runs)))


async def _all_over(gateway: Gateway, limit_s: float = 300.0) -> None:
    until_s = time.monotonic() + limit_s
    async with AsyncClient(gateway.url) as client:
        for state in ("queued", "running"):
            while time.monotonic() < until_s:
                with contextlib.suppress(LaminaError):
                    if not [one async for one in _first(client, state)]:
                        break
                await asyncio.sleep(0.1)


async def _first(client: AsyncClient, state: str) -> Any:
    async for one in client.runs(state=state):
        yield one
        return


# ------------------------------------------------------------------ the database, from outside


@dataclass
class Left:
    committed: set[str]  #: "step key" of all steps whose results are there
    open: int
    ended: dict[str, list[tuple[str, Any]]]  #: by key: state and result of each run
    first_end_us: int


def _look(store: str, since_us: int) -> Left:
    with _connection(store) as rows:
        committed = set()
        for body, value in rows("SELECT body, value FROM notes WHERE value IS NOT NULL"):
            note = msgspec.msgpack.decode(bytes(body), type=JournalEntry)
            result = encoding.decode(bytes(value))
            committed.add(f"{note.function} {result[0].partition('.')[0] if note.function == 'split' else result}")
        ended: dict[str, list[tuple[str, Any]]] = {}
        still, first_us = 0, 0
        for target, state, inputs, result, ended_us in rows("SELECT target, state, inputs, result, ended_us FROM runs"):
            key = encoding.decode(msgspec.msgpack.decode(bytes(inputs), type=dict[str, bytes])["key"])
            given = None if result is None else encoding.decode(bytes(result))
            ended.setdefault(key, []).append((state, given))
            still += state in ("queued", "running")
            if target == "plain" and state == "succeeded":
                committed.add(f"plain {key}")
            if ended_us > since_us:
                first_us = min(first_us or ended_us, ended_us)
        return Left(committed, still, ended, first_us)


@contextlib.contextmanager
def _connection(store: str) -> Iterator[Any]:
    if "://" in store:
        import psycopg

        with psycopg.connect(store) as server:
            yield lambda sql: server.execute(sql).fetchall()
    else:
        file = sqlite3.connect(store)
        try:
            assert file.execute("PRAGMA integrity_check").fetchone()[0] == "ok", "the database is damaged"
            yield lambda sql: file.execute(sql).fetchall()
        finally:
            file.close()


def _judge(witness: Witness, folder: Path, left: Left) -> None:
    for key in witness.accepted:
        found = left.ended.get(key, [])
        good = [result for state, result in found if state == "succeeded"]
        witness.lost += not good
        witness.doubled += len(found) > 1
        witness.wrong += any(result != key for result in good)
    lines = Counter[str]()
    for line in (folder / "ledger").read_text().splitlines():
        generation, step, key = line.split(" ")
        witness.doubled += f"{step} {key}" in witness.committed[int(generation)]
        lines[f"{step} {key}"] += 1
    witness.again = sum(count - 1 for count in lines.values())
    expected = {f"{step} {key}" for key in witness.accepted for step in (("split", "join") if key[0] == "w" else ("plain",))}
    witness.lost += len(expected - lines.keys())


def run(report: Report, runs: int = 10_000, kills: int = 20) -> None:
    with tempfile.TemporaryDirectory() as place:
        tell(report, "SQLite", crash(str(Path(place) / "runs.db"), Path(place), runs=runs, kills=kills, step_s=0.02, pause_s=0.4))
    with tempfile.TemporaryDirectory() as place, private_server() as url:
        if url:
            tell(report, "PostgreSQL", crash(url, Path(place), runs=runs, kills=kills, step_s=0.02, pause_s=0.4))


def tell(report: Report, name: str, seen: Witness) -> None:
    queued = sorted(seen.queued)
    report.add(f"{name}: gateways killed", float(seen.kills), "", queued=queued, took_s=round(seen.took_s, 1))
    report.add(f"{name}: accepted and lost", float(seen.lost), "runs", most=0, accepted=len(seen.accepted))
    report.add(f"{name}: doubled", float(seen.doubled + seen.wrong), "steps", most=0, done_again_under_way=seen.again)
    slowest = max(seen.answer_s[1:], default=0.0)
    report.add(f"{name}: first answer after a restart, worst", slowest, "s", most=2.0, all=_rounded(seen.answer_s[1:]))
    report.add(f"{name}: first run ended after a restart, worst", max(seen.run_s), "s", all=_rounded(seen.run_s))


def _rounded(times_s: list[float]) -> list[float]:
    return [round(one, 2) for one in sorted(times_s)]
