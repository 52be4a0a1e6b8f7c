"""Faults of machines under load: a leader with a standby and three agents, killed, frozen, cut off, drained; with histories.

    python -m benchmarks.attacks.machines --faults 200 --out results/attacks/machines.json

Agents reach each server through a relay that can be cut, in both directions or in one, and that can be slow; every second round
they are in network namespaces, whose cables are pulled and whose packets get lost. Beside clients that keep histories, one
function holds 70 % of all units. A fault's time is the longest that clients of plain calls were without an answer, from then
until all is well again: of a function with one instance in all, and of one that stands on two machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
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
from benchmarks.attacks.network import Network, has_namespaces, machines
from benchmarks.attacks.pair import APP, Pair, free_ports_for_agents, postgres_pair, sqlite_pair
from benchmarks.servers import free_port

TOKEN = "a token of the campaign alone"
NODES = ("a", "b", "c")
CODE = (
    APP
    + """

import os
import time


@app.function(scale=lamina.Scale(min=2, max=2))
def twin(what, name):  # on two machines, always
    return os.getppid() if what == "where" else name


@app.function(scale=lamina.Scale(min=3, max=6))
def work(seconds):
    time.sleep(seconds)


@app.function(scale=lamina.Scale(min=1, max=1))
def lone(what, name):  # on one machine
    return os.getppid() if what == "where" else name
"""
)
LOAD, WORK_S, UNITS = 0.7, 0.1, len(NODES) * len(os.sched_getaffinity(0))
"""Share of the units that `work` holds, for how long each, and how many there are."""

KINDS = (
    "agent-kill",
    "agent-freeze",
    "agent-blip",
    "agent-cut",
    "agent-deaf",
    "agent-mute",
    "agent-slow",
    "agent-far",
    "drain",
    "leader-kill",
    "leader-freeze",
)
ON_NETWORKS = ("agent-cable", "agent-loss")
ON_POSTGRES = ("store-away", "leader-without-store")
PER_ROUND = 17
DELAY_S, LOSS_PERCENT = 0.003, 3


@dataclass(slots=True)
class MachineFault:
    kind: str
    place: str  #: loopback or namespaces
    stood_there: bool  #: the one instance of `lone` was on that machine
    twin_stood_there: bool  #: one of the two of `twin` was
    silence_s: float  #: the longest without an answer of the function with one instance
    twin_silence_s: float  #: the same of the one that stands on two machines
    twin_slowest_s: float  #: its slowest call
    front_slowest_s: float  #: the slowest through a front door, by clients that repeat nothing
    failed: int  #: plain calls that were answered with an error, or not at all


class Relay:
    """Way of one agent to one server. `deaf`: what the server says does not arrive; `mute`: nor does what the agent says;
    `cut`: nothing does, either way. `delay_s`: what is said arrives so much later."""

    def __init__(self, host: str, to: int) -> None:
        self.host, self.port, self._to = host, free_port(), to
        self.delay_s = 0.0
        self._from_agent, self._to_agent = asyncio.Event(), asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.mend()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, self.host, self.port)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._from_agent.wait()  # a connection is not made while the cable is out
        try:
            other, to = await asyncio.open_connection(self.host, self._to)
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
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        await flows.wait()  # an end does not get through either
        writer.close()

    def cut(self) -> None:
        self._from_agent.clear()
        self._to_agent.clear()

    def deafen(self) -> None:
        self._to_agent.clear()

    def mute(self) -> None:
        self._from_agent.clear()

    def mend(self) -> None:
        self.delay_s = 0.0
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

    def __init__(self, folder: Path, ports: Sequence[int], network: Network | None) -> None:
        self._folder, self.network = folder, network
        host = network.host if network is not None else "127.0.0.1"
        self.relays = {name: [Relay(host, port) for port in ports] for name in NODES}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        for name, relays in self.relays.items():
            for relay in relays:
                await relay.start()
            self.begin(name)

    def begin(self, name: str) -> None:
        joins = ",".join(f"{relay.host}:{relay.port}" for relay in self.relays[name])
        within = self.network.within(name) if self.network is not None else ()
        command = [*within, sys.executable, "-m", "lamina", "agent", "--join", joins, "--name", name, "--gpu", "no"]
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
    """Clients of a call that may be repeated: how long were they without an answer, how long did each take, how many failed?"""

    urls: list[str]
    function: str
    repeats: bool = True  #: a call whose answer is not known is asked again; False: the front door is to see to that
    answered: list[tuple[float, float]] = field(default_factory=list)  #: when, and after how long
    failed: int = 0
    _is_on: bool = True
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, count: int = 4) -> None:
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(count)]

    async def _call(self, client: int) -> None:
        to, number = Following(self.urls), 0
        while self._is_on:
            number += 1
            body, began_s = {"what": "pass", "name": f"{client}-{number}"}, time.monotonic()
            while True:  # until it is answered: a client that may repeat
                answer = await to.ask("POST", f"/v1/functions/{self.function}", body, timeout_s=10.0 if self.repeats else 30.0)
                if answer.is_ok or not self.repeats or (answer.status > 0 and answer.status != 503):
                    break
            if answer.is_ok:
                self.answered.append((time.monotonic(), time.monotonic() - began_s))
            else:
                self.failed += 1
            await asyncio.sleep(0.02)

    def silence_s(self, began_s: float) -> float:
        times = [began_s, *(at_s for at_s, _ in self.answered if at_s > began_s), time.monotonic()]
        return round(max(after - before for before, after in itertools.pairwise(times)), 3)

    def slowest_s(self, began_s: float) -> float:
        return round(max((took_s for at_s, took_s in self.answered if at_s > began_s), default=0.0), 3)

    async def stop(self) -> None:
        self._is_on = False
        await asyncio.gather(*self._tasks)


@dataclass(slots=True)
class Load:
    """Open-loop clients that hold a share of all units with calls that wait."""

    urls: list[str]
    failed: int = 0
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._arrive())

    async def _arrive(self) -> None:
        while True:
            await asyncio.sleep(WORK_S / (LOAD * UNITS))
            if len(self._calls) < 10 * UNITS:
                call = asyncio.create_task(self._call())
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _call(self) -> None:
        to = Following(self.urls)
        for _ in range(100):
            answer = await to.ask("POST", "/v1/functions/work", {"seconds": WORK_S}, timeout_s=10.0)
            if answer.is_ok or (answer.status > 0 and answer.status != 503):
                break
        self.failed += not answer.is_ok

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


@dataclass(slots=True)
class Attacked:
    """A cluster under load."""

    pair: Pair
    agents: Agents
    lone: PlainCalls
    twin: PlainCalls
    front: PlainCalls  #: of `twin`, through a front door
    load: Load

    @property
    def failed(self) -> int:
        return self.lone.failed + self.twin.failed + self.front.failed + self.load.failed

    async def nodes_of(self, function: str, asks: int) -> set[str]:
        """Machines whose agents have answered some calls of a function."""
        names = {process.pid: name for name, process in self.agents.processes.items()}
        to = Following(self.pair.urls)
        body = {"what": "where", "name": ""}
        answers = [await to.ask("POST", f"/v1/functions/{function}", body) for _ in range(asks)]
        return {names.get(answer.body, "") for answer in answers if answer.is_ok}

    async def inflict(self, kind: str, rng: random.Random) -> MachineFault:
        leader = await self.pair.both_up()
        lone, twin = await self.nodes_of("lone", 1), await self.nodes_of("twin", 8)
        name, failed, began_s = rng.choice(NODES), self.failed, time.monotonic()
        if kind.startswith(("agent", "drain")):
            await self._at_agent(kind, name)
        elif kind == "store-away":
            await self._without_store(list(self.pair.proxies))
        elif kind == "leader-without-store":
            await self._without_store([self.pair.proxies[leader]])
        else:
            await self._at_leader(kind, leader)
        await asyncio.sleep(1.0)
        await self.pair.both_up()
        return MachineFault(
            kind=kind,
            place="namespaces" if self.agents.network is not None else "loopback",
            stood_there=name in lone,
            twin_stood_there=name in twin,
            silence_s=self.lone.silence_s(began_s),
            twin_silence_s=self.twin.silence_s(began_s),
            twin_slowest_s=self.twin.slowest_s(began_s),
            front_slowest_s=self.front.slowest_s(began_s),
            failed=self.failed - failed,
        )

    async def _at_agent(self, kind: str, name: str) -> None:
        agents, relays, network = self.agents, self.agents.relays[name], self.agents.network
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
            case "agent-cut" | "agent-deaf" | "agent-mute":
                for relay in relays:
                    {"agent-cut": relay.cut, "agent-deaf": relay.deafen, "agent-mute": relay.mute}[kind]()
                await asyncio.sleep(2.0 if kind == "agent-cut" else 4.0)
                for relay in relays:
                    relay.mend()
            case "agent-far":
                for relay in relays:
                    relay.delay_s = DELAY_S
                await asyncio.sleep(3.0)
                for relay in relays:
                    relay.mend()
            case "agent-cable":
                assert network is not None
                network.pull(name)
                await asyncio.sleep(2.0)
                network.plug(name)
            case "agent-loss":
                assert network is not None
                network.lose(name, LOSS_PERCENT)
                await asyncio.sleep(4.0)
                network.lose_nothing(name)
            case "drain":
                agents.signal(name, signal.SIGTERM)
                await agents.ended(name)
                agents.begin(name)

    async def _at_leader(self, kind: str, leader: int) -> None:
        if kind == "leader-kill":
            self.pair.servers[leader].kill()
            await self.pair.leader()
            return
        self.pair.servers[leader].signal(signal.SIGSTOP)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(8.0):
                while not await self.pair.servers[1 - leader].is_ready():
                    await asyncio.sleep(0.02)
        self.pair.servers[leader].signal(signal.SIGCONT)

    async def _without_store(self, ways: Sequence[Any]) -> None:
        for way in ways:
            way.cut()
        await asyncio.sleep(2.0)
        for way in ways:
            way.mend()


@contextlib.asynccontextmanager
async def opened(name: str, url: str, network: Network | None) -> AsyncIterator[tuple[Pair, Agents, str]]:
    """A pair of servers without devices of their own, three agents, and a front door."""
    os.environ["LAMINA_JOIN_TOKEN"] = TOKEN
    ports = [free_ports_for_agents() for _ in range(2)]
    host = network.host if network is not None else "127.0.0.1"
    options = [("--no-devices", "--agents", f"{host}:{port}") for port in ports]
    holder: list[Agents] = []

    async def with_agents(pair: Pair) -> None:
        holder.append(Agents(pair.folder, ports, network))
        await holder[0].start()

    opening = sqlite_pair(options, with_agents, CODE) if name == "sqlite" else postgres_pair(url, options, with_agents, CODE)
    try:
        async with opening as pair:
            joins = ",".join(f"{host}:{port}" for port in ports)
            async with _front_door(pair.folder, joins) as front:
                yield pair, holder[0], front
    finally:
        for agents in holder:
            await agents.stop()


@contextlib.asynccontextmanager
async def _front_door(folder: Path, joins: str) -> AsyncIterator[str]:
    """A front door in a process of its own; its address."""
    command = [sys.executable, "-m", "lamina", "ingress", "--join", joins, "--port", "0", "--json", "--hold", "30s"]
    with (folder / "front.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        told = json.loads(await asyncio.to_thread(process.stdout.readline))
        yield str(told["url"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def play(
    name: str, url: str, faults: int, seed: int, kinds: Sequence[str] = (), *, uses_namespaces: bool = False
) -> Round[MachineFault]:
    """Some faults with one cluster and one store, and the verdict about them."""
    rng = random.Random(seed)
    found = Round[MachineFault](name, seed)
    more = (ON_NETWORKS if uses_namespaces else ()) + (ON_POSTGRES if name == "postgres" else ())
    kinds = kinds or (*KINDS, *more)
    with machines(*NODES) if uses_namespaces else contextlib.nullcontext() as network:
        async with opened(name, url, network) as (pair, agents, front):
            clients = Clients(pair.urls)
            under = Attacked(
                *(pair, agents, PlainCalls(pair.urls, "lone"), PlainCalls(pair.urls, "twin")),
                front=PlainCalls([front], "twin", repeats=False),
                load=Load(pair.urls),
            )
            clients.start()
            under.lone.start()
            under.twin.start()
            under.front.start(2)
            under.load.start()
            try:
                for number in range(faults):
                    kind = kinds[(number + seed) % len(kinds)] if number < len(kinds) else rng.choice(kinds)
                    await asyncio.sleep(rng.uniform(0.2, 0.8))
                    found.events.append(await under.inflict(kind, rng))
                await pair.both_up()
            finally:
                await under.lone.stop()
                await under.twin.stop()
                await under.front.stop()
                await under.load.stop()
                history = await clients.stop()
            found.verdict = await judge(history, pair.urls)
            if not found.verdict.is_good:
                for log in sorted(pair.folder.glob("*.log")):
                    print(f"--- {log.name}\n{log.read_text()[-3_000:]}")
    return found


def summary(rounds: Sequence[Round[MachineFault]]) -> dict[str, Any]:
    events = [event for one in rounds for event in one.events]
    at_agents = [event for event in events if event.kind.startswith(("agent", "drain"))]
    others = [event for event in events if event not in at_agents]
    return {
        "faults": len(events),
        "in_namespaces": sum(event.place == "namespaces" for event in events),
        "calls_failed": sum(event.failed for event in events),
        **judged(rounds),
        "silence_s": {
            "one instance, on that machine": spread((event.kind, event.silence_s) for event in at_agents if event.stood_there),
            "one instance, elsewhere": spread((event.kind, event.silence_s) for event in at_agents if not event.stood_there),
            "one instance": spread((event.kind, event.silence_s) for event in others),
            "two instances": spread((event.kind, event.twin_silence_s) for event in events),
        },
        "slowest_call_s": {
            "two instances, one on that machine": spread(
                (event.kind, event.twin_slowest_s) for event in at_agents if event.twin_stood_there
            ),
            "two instances, elsewhere": spread(
                (event.kind, event.twin_slowest_s) for event in at_agents if not event.twin_stood_there
            ),
            "two instances": spread((event.kind, event.twin_slowest_s) for event in others),
            "through a front door": spread((event.kind, event.front_slowest_s) for event in events),
        },
    }


def main() -> None:
    parser = options_for("faults")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--per-round", type=int, default=PER_ROUND)
    options = parser.parse_args()
    kinds = tuple(kind for kind in options.kinds.split(",") if kind)
    may_split = has_namespaces()

    def played(name: str, url: str, faults: int, seed: int) -> Any:
        in_spaces = may_split and seed // 2 % 2 == 1
        some = tuple(kind for kind in kinds if in_spaces or kind not in ON_NETWORKS)
        some = tuple(kind for kind in some if name == "postgres" or kind not in ON_POSTGRES)
        return play(name, url, faults, seed, some, uses_namespaces=in_spaces)

    run_campaign(
        options,
        "faults",
        options.per_round,
        played,
        counted=lambda one: len(one.events),
        tell=lambda event: f"{event.kind} {event.silence_s:.2f} {event.twin_silence_s:.2f}",
        summary=summary,
        made=MachineFault,
    )


if __name__ == "__main__":
    main()
