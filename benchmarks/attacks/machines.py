"""Faults of machines under load: a leader with a standby and three agents, killed, frozen, cut off, drained; with histories.

    python -m benchmarks.attacks.machines --faults 200 --out results/attacks/machines.json

Agents reach each server through a relay that can be cut, in both directions or in one. A fault's time is the longest that clients
of plain calls were without an answer from then until all is well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attacks.campaign import Round, judged, options_for, run_campaign, spread
from benchmarks.attacks.histories import Clients, Following, judge
from benchmarks.attacks.pair import Pair, free_port, postgres_pair, sqlite_pair

TOKEN = "a token of the campaign alone"
NODES = ("a", "b", "c")
KINDS = (
    "agent-kill",
    "agent-freeze",
    "agent-blip",
    "agent-cut",
    "agent-deaf",
    "agent-slow",
    "drain",
    "leader-kill",
    "leader-freeze",
)
PER_ROUND = 12


@dataclass(slots=True)
class MachineFault:
    kind: str
    silence_s: float  #: the longest without an answer to a plain call
    failed: int  #: plain calls that were answered with an error, or not at all


class Relay:
    """Way of one agent to one server. `deaf`: what the server says does not arrive; `cut`: nothing does, either way."""

    def __init__(self, to: int) -> None:
        self.port, self._to = free_port(), to
        self._from_agent, self._to_agent = asyncio.Event(), asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.mend()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._from_agent.wait()  # a connection is not made while the cable is out
        try:
            other, to = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        ways = ((reader, to, self._from_agent), (other, writer, self._to_agent))
        for way in ways:
            task = asyncio.create_task(self._copy(*way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await flows.wait()
                writer.write(data)
                await writer.drain()
        await flows.wait()  # an end does not get through either
        writer.close()

    def cut(self) -> None:
        self._from_agent.clear()
        self._to_agent.clear()

    def deafen(self) -> None:
        self._to_agent.clear()

    def mend(self) -> None:
        self._from_agent.set()
        self._to_agent.set()

    async def stop(self) -> None:
        self.mend()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Agents:
    """Three agents of a pair of servers, each with ways of its own."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        self._folder = folder
        self.relays = {name: [Relay(port) for port in ports] for name in NODES}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        for name, relays in self.relays.items():
            for relay in relays:
                await relay.start()
            self.begin(name)

    def begin(self, name: str) -> None:
        joins = ",".join(f"127.0.0.1:{relay.port}" for relay in self.relays[name])
        command = [sys.executable, "-m", "lamina", "agent", "--join", joins, "--name", name, "--gpu", "no"]
        command += ["--folder", str(self._folder / ".agents" / name)]
        env = {**os.environ, "LAMINA_JOIN_TOKEN": TOKEN}
        with (self._folder / f"agent-{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    async def ended(self, name: str) -> None:
        while self.processes[name].poll() is None:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        for relays in self.relays.values():
            for relay in relays:
                await relay.stop()


@dataclass(slots=True)
class PlainCalls:
    """Clients of a call that may be repeated: how long were they without an answer, and how many failed?"""

    urls: list[str]
    answered_s: list[float] = field(default_factory=list)
    failed: int = 0
    _is_on: bool = True
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, count: int = 4) -> None:
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(count)]

    async def _call(self, client: int) -> None:
        to, number = Following(self.urls), 0
        while self._is_on:
            number += 1
            answer = await to.ask("POST", "/v1/functions/act", {"what": "pass", "name": f"{client}-{number}"}, timeout_s=10.0)
            if answer.is_ok:
                self.answered_s.append(time.monotonic())
            elif answer.status > 0 and answer.status != 503:
                self.failed += 1
            await asyncio.sleep(0.02)

    def silence_s(self, began_s: float) -> float:
        times = [began_s, *(at_s for at_s in self.answered_s if at_s > began_s), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))

    async def stop(self) -> None:
        self._is_on = False
        await asyncio.gather(*self._tasks)


async def inflict(pair: Pair, agents: Agents, calls: PlainCalls, kind: str, rng: random.Random) -> MachineFault:
    leader = await pair.both_up()
    name, failed, began_s = rng.choice(NODES), calls.failed, time.monotonic()
    relays = agents.relays[name]
    match kind:
        case "agent-kill":
            agents.signal(name, signal.SIGKILL)
            await agents.ended(name)
            await asyncio.sleep(0.3)
            agents.begin(name)
        case "agent-freeze" | "agent-blip":
            agents.signal(name, signal.SIGSTOP)
            await asyncio.sleep(0.2 if kind == "agent-blip" else 2.0)
            agents.signal(name, signal.SIGCONT)
        case "agent-slow":
            for _ in range(20):  # it gets a tenth of its time
                agents.signal(name, signal.SIGSTOP)
                await asyncio.sleep(0.09)
                agents.signal(name, signal.SIGCONT)
                await asyncio.sleep(0.01)
        case "agent-cut" | "agent-deaf":
            for relay in relays:
                (relay.cut if kind == "agent-cut" else relay.deafen)()
            await asyncio.sleep(2.0 if kind == "agent-cut" else 4.0)
            for relay in relays:
                relay.mend()
        case "drain":
            agents.signal(name, signal.SIGTERM)
            await agents.ended(name)
            agents.begin(name)
        case "leader-kill":
            pair.servers[leader].kill()
            await pair.leader()
        case "leader-freeze":
            pair.servers[leader].signal(signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(8.0):
                    while not await pair.servers[1 - leader].is_ready():
                        await asyncio.sleep(0.02)
            pair.servers[leader].signal(signal.SIGCONT)
    await asyncio.sleep(1.0)
    await pair.both_up()
    return MachineFault(kind, round(calls.silence_s(began_s), 3), calls.failed - failed)


@contextlib.asynccontextmanager
async def opened(name: str, url: str) -> AsyncIterator[tuple[Pair, Agents]]:
    """A pair of servers without devices of their own, and three agents."""
    os.environ["LAMINA_JOIN_TOKEN"] = TOKEN
    ports = [free_port() for _ in range(2)]
    options = [("--no-devices", "--agents", f"127.0.0.1:{port}") for port in ports]
    holder: list[Agents] = []

    async def with_agents(pair: Pair) -> None:
        holder.append(Agents(pair.folder, ports))
        await holder[0].start()

    opening = sqlite_pair(options, with_agents) if name == "sqlite" else postgres_pair(url, options, with_agents)
    try:
        async with opening as pair:
            yield pair, holder[0]
    finally:
        for agents in holder:
            await agents.stop()


async def play(name: str, url: str, faults: int, seed: int, kinds: Sequence[str] = KINDS) -> Round[MachineFault]:
    """Some faults with one cluster and one store, and the verdict about them."""
    rng = random.Random(seed)
    found = Round[MachineFault](name, seed)
    async with opened(name, url) as (pair, agents):
        clients, calls = Clients(pair.urls), PlainCalls(pair.urls)
        clients.start()
        calls.start()
        try:
            for number in range(faults):
                kind = kinds[(number + seed) % len(kinds)] if number < len(kinds) else rng.choice(kinds)
                await asyncio.sleep(rng.uniform(0.2, 0.8))
                found.events.append(await inflict(pair, agents, calls, kind, rng))
            await pair.both_up()
        finally:
            await calls.stop()
            history = await clients.stop()
        found.verdict = await judge(history, pair.urls)
        if not found.verdict.is_good:
            for log in sorted(pair.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3_000:]}")
    return found


def summary(rounds: Sequence[Round[MachineFault]]) -> dict[str, Any]:
    times = [(event.kind, event.silence_s) for one in rounds for event in one.events]
    return {
        "faults": len(times),
        "calls_failed": sum(event.failed for one in rounds for event in one.events),
        **judged(rounds),
        "silence_s": spread(times),
    }


def main() -> None:
    parser = options_for("faults")
    parser.add_argument("--kinds", default="")
    options = parser.parse_args()
    kinds = tuple(kind for kind in options.kinds.split(",") if kind) or KINDS

    def played(name: str, url: str, faults: int, seed: int) -> Any:
        return play(name, url, faults, seed, kinds)

    run_campaign(
        options,
        "faults",
        PER_ROUND,
        played,
        counted=lambda one: len(one.events),
        tell=lambda event: f"{event.kind} {event.silence_s:.2f}",
        summary=summary,
    )


if __name__ == "__main__":
    main()
