"""Worlds: clients that call, start runs, repeat themselves and leave; servers that die; and what must be true afterwards.

    python -m tests.soak server 17          plays world 17, and says what is wrong with it

The history is the clients' own: what they were told, and nothing of what the server believes.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from lamina.server import http_server
from tests.world.machine import CLOCK, Machine
from tests.world.server import Pipe, Reply, Server
from tests.world.tenants import Tenants

SECOND_US = 1_000_000
PATIENCE_US = 3 * SECOND_US
"""How long a client waits for an answer before it asks again, elsewhere."""

NAMES = ("a", "b")
ENDED = ("succeeded", "failed", "cancelled", "quarantined")
HONEST = ("worker-lost", "out-of-memory", "load-failed", "cost")
"""Ways to fail that are the world's, which kills the workers of one step twice or takes their memory; and the client's limit."""


@dataclass
class Asked:
    """One run that a client wants, under its key, however often it has to ask."""

    target: str
    body: dict[str, Any]
    key: str
    headers: dict[str, str] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)  #: it was told; more than one would be two runs
    refused: str = ""  #: for good


@dataclass
class History:
    runs: list[Asked] = field(default_factory=list)
    puts: Counter[str] = field(default_factory=Counter)  #: per key, the last value that was acknowledged
    sent: Counter[str] = field(default_factory=Counter)  #: per key, the last value that was sent
    answers: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  #: every answer, with its time

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.told).encode()).hexdigest()


class World:
    def __init__(self, seed: int, file: Path) -> None:
        self.seed = seed
        self.machine = Machine(seed)
        self.rng = random.Random(seed ^ 0x5EED)
        self.favourite = 0
        self.folder = str(file.parent).encode()
        self.history = History()
        policy = self.rng.choice(("frontier", "frontier", "edf", "fifo"))
        faults = self.rng.choice((0.0, 0.05, 0.3))
        disk = self.rng.choice((0.0, 0.0, 0.05))
        names = self.rng.choice((("one",), ("one", "two")))
        self.servers = [Server(self.machine, name, file, policy, faults, disk) for name in names]
        self.kills, self.freezes = self.rng.choice((0, 1, 3)), self.rng.choice((0, 0, 2))
        self.jumps = self.rng.choice((0, 0, 2))
        self.jumped = 0
        self.policy, self.faults = policy, faults
        self.tenants = Tenants(self) if self.rng.random() < 0.4 else None

    # ------------------------------------------------------------------ clients

    def send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        on_reply: Callable[[Reply], None],
        *,
        management: bool = False,
    ) -> Pipe | None:
        """Send a request to the server that answered last; the next one goes to the other if this one has no answer."""
        server = self.servers[self.favourite % len(self.servers)]

        def answered(reply: Reply) -> None:
            self.history.answers[reply.status] += 1
            body = reply.body.replace(self.folder, b"")  # which is another one each time
            self.history.told.append(f"{self.machine.now_us} {method} {path} {reply.status} {body!r}")
            if reply.status in (0, 503):
                self.favourite += 1
            on_reply(reply)

        pipe = server.request(method, path, body, headers, answered, management=management)
        if pipe is not None:
            self.machine.call_at(self.machine.now_us + PATIENCE_US, pipe.close)
        return pipe

    def call(self) -> None:
        """A call whose client waits, and may leave."""
        n = self.rng.randint(0, 9)
        headers = self._options()

        def answered(reply: Reply) -> None:
            if reply.status == 200 and reply.json != n:
                self.history.wrong.append(f"echo({n}) answered {reply.body!r}")

        pipe = self.send("POST", "/v1/functions/echo", n, headers, answered)
        if pipe is not None and self.rng.random() < 0.1:
            self.machine.call_at(self.machine.now_us + self.rng.choice((0, 1_000, 20_000)), pipe.close)

    def start_run(self) -> None:
        target = self.rng.choice(("chain", "chain", "mixed", "hopeless"))
        n = self.rng.randint(1, 9)
        body = {"x": n} if target == "hopeless" else {"name": self.rng.choice(NAMES), "n": n}
        asked = Asked(target, body, f"key-{len(self.history.runs)}", self._options())
        asked.headers.pop("lamina-deadline-ms", None)
        self.history.runs.append(asked)
        self.ask(asked)
        if self.rng.random() < 0.2:
            self.ask(asked)  # a nervous client

    def ask(self, asked: Asked) -> None:
        def answered(reply: Reply) -> None:
            if reply.status in (200, 202):
                asked.ids.add(reply.json["id"])
            elif reply.status in (0, 429, 503):
                self.machine.call_at(self.machine.now_us + self.rng.randint(10_000, 500_000), lambda: self.ask(asked))
            else:
                asked.refused = f"{reply.status} {reply.body!r}"

        headers = {"prefer": "respond-async", "idempotency-key": asked.key, **asked.headers}
        body = asked.body if asked.target != "hopeless" else asked.body["x"]
        self.send("POST", f"/v1/workflows/{asked.target}", body, headers, answered)

    def put(self) -> None:
        """Values of one key are sent one after another, so that the last one acknowledged is what must be there."""
        key = f"put-{self.rng.randint(0, 2)}"
        if self.history.sent[key] != self.history.puts[key]:
            return
        self.history.sent[key] += 1
        value = self.history.sent[key]

        def answered(reply: Reply) -> None:
            if reply.status in (200, 201, 204):
                self.history.puts[key] = value
            else:  # it may have been made, or not: it is sent again until that is known
                self.machine.call_at(self.machine.now_us + self.rng.randint(10_000, 500_000), send)

        def send() -> None:
            self.send("PUT", f"/v1/state/{key}", value, {}, answered)

        send()

    def get(self) -> None:
        key = f"put-{self.rng.randint(0, 2)}"
        known = self.history.puts[key]

        def answered(reply: Reply) -> None:
            if reply.status == 404 and known:
                self.history.wrong.append(f"{key}: {known} was put and acknowledged, and is not there")
            if reply.status == 200 and _value(reply) < known:
                self.history.wrong.append(f"{key}: {_value(reply)} was read after {known} had been acknowledged")

        self.send("GET", f"/v1/state/{key}", None, {}, answered)

    def _options(self) -> dict[str, str]:
        rng = self.rng
        made = {}
        if rng.random() < 0.2:
            made["lamina-priority"] = str(rng.randint(-10, 10))
        if rng.random() < 0.1:
            made["lamina-cost-limit"] = rng.choice(("1e-12", "0.5", "100"))
        if rng.random() < 0.2:
            made["lamina-deadline-ms"] = rng.choice(("1", "30", "5000"))
        return made

    # ------------------------------------------------------------------- the play

    def play(self) -> None:
        machine, rng = self.machine, self.rng
        for server in self.servers:
            server.start()
            machine.run(server.has_started, machine.now_us + 60 * SECOND_US)
            if server.error is not None:
                raise server.error
        end_us = machine.now_us + rng.choice((1, 3)) * SECOND_US
        acts = [self.call, self.call, self.start_run, self.start_run, self.put, self.get]
        if self.tenants is not None:
            self.tenants.set_up()
            acts += [self.tenants.call, self.tenants.call, self.tenants.start_run, self.tenants.start_run]
            acts += [self.tenants.pry, self.tenants.list_runs, self.tenants.revoke, self.tenants.hurry]
        for _ in range(rng.choice((5, 20, 60))):
            machine.call_at(rng.randint(machine.now_us, end_us), rng.choice(acts))
        for fault, times in ((self.kill, self.kills), (self.freeze, self.freezes), (self.jump, self.jumps)):
            for _ in range(times):
                machine.call_at(rng.randint(machine.now_us, end_us), fault)
        machine.call_at(machine.now_us, self.replace_deposed)
        machine.run(lambda: False, end_us)
        for server in self.servers:
            server.calm()
        if not machine.run(self.is_settled, end_us + 600 * SECOND_US):
            self.history.wrong.append(f"not settled after ten minutes: {self.unsettled()}")
        self.check()

    def kill(self) -> None:
        self.restart(self.rng.choice(self.servers), self.rng.choice((1_000, 300_000, 3_000_000)))

    def restart(self, server: Server, after_us: int) -> None:
        if server.loop is not None:
            server.kill()
            self.machine.call_at(self.machine.now_us + after_us, server.start)

    def freeze(self) -> None:
        """A process that gets no time, and wakes up later as if nothing had been."""
        server = self.rng.choice(self.servers)
        self.machine.frozen.add(server)
        for_us = self.rng.choice((50_000, 1_000_000, 6_000_000))
        self.machine.call_at(self.machine.now_us + for_us, lambda: self.machine.frozen.discard(server))

    def jump(self) -> None:
        """The wall clock is set."""
        self.jumped += 1
        CLOCK.wall_jump_us += self.rng.choice((-3_600, -1, 1, 3_600)) * SECOND_US

    def replace_deposed(self) -> None:
        """What `lamina serve` does when another server has taken the lead: it is started again, as a standby."""
        for server in self.servers:
            if server not in self.machine.frozen and server.gateway is not None and server.gateway.deposed.is_set():
                self.restart(server, 10_000)
        self.machine.call_at(self.machine.now_us + 100_000, self.replace_deposed)

    def is_settled(self) -> bool:
        """Every client has what it wanted to know."""
        if any(server.pipes for server in self.servers) or not all(server.is_up for server in self.servers):
            return False
        if self.tenants is not None and not self.tenants.is_settled:
            return False
        if any(self.history.puts[key] != value for key, value in self.history.sent.items()):
            return False
        return all(run.ids or run.refused for run in self.history.runs)

    def unsettled(self) -> list[str]:
        return [run.key for run in self.history.runs if not (run.ids or run.refused)]

    def read(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        """Ask until a server has an answer."""
        limit_us = self.machine.now_us + 60 * SECOND_US
        while self.machine.now_us < limit_us:
            got: list[Reply] = []
            self.send("GET", path, None, headers or {}, got.append)
            self.machine.run(lambda got=got: bool(got), limit_us)  # type: ignore[misc]
            if got and got[0].status not in (0, 503):
                return got[0]
            self.machine.run(lambda: False, self.machine.now_us + 50_000)
        return Reply(0)

    def wait_for_run(self, id: str, limit_us: int) -> Reply:
        """A run when it has ended, as the operator sees it."""
        shown = self.read(f"/v1/runs/{id}")
        while shown.status == 200 and shown.json["state"] not in ENDED and self.machine.now_us < limit_us:
            self.machine.run(lambda: False, self.machine.now_us + SECOND_US)
            shown = self.read(f"/v1/runs/{id}")
        return shown

    def check(self) -> None:
        wrong = self.history.wrong
        least: Counter[str] = Counter()  #: added by runs that succeeded
        most: Counter[str] = Counter()  #: with what those that failed may have added before
        limit_us = self.machine.now_us + 600 * SECOND_US
        for run in self.history.runs:
            if run.refused:
                wrong.append(f"{run.key}: refused for good: {run.refused}")
                continue
            if len(run.ids) != 1:
                wrong.append(f"{run.key}: is {len(run.ids)} runs")
                continue
            (id,) = run.ids
            shown = self.wait_for_run(id, limit_us)
            state = shown.json["state"] if shown.status == 200 else f"{shown.status}"
            wanted = "failed" if run.target == "hopeless" else "succeeded"
            if state != wanted and not _has_failed_honestly(shown):
                wrong.append(f"{run.key} ({run.target}) is {state}, not {wanted}: {shown.body[:400]!r}")
            elif run.target != "hopeless":
                added = run.body["n"] * (2 if run.target == "chain" else 1)
                most[run.body["name"]] += added
                least[run.body["name"]] += added if state == "succeeded" else 0
        for name in NAMES:
            shown = self.read(f"/v1/state/sum-{name}")
            found = _value(shown) if shown.status == 200 else 0
            if not least[name] <= found <= most[name]:
                wrong.append(f"sum-{name} is {found}, and what ended adds up to {least[name]}, at most {most[name]}")
        self.check_followers(limit_us)
        if self.tenants is not None:
            self.tenants.check(_has_failed_honestly, lambda id: self.wait_for_run(id, limit_us))
        for key, value in self.history.puts.items():
            shown = self.read(f"/v1/state/{key}")
            if value and (shown.status != 200 or _value(shown) != value):
                wrong.append(f"{key}: {value} was acknowledged last, and it is {shown.body!r}")

    def check_followers(self, limit_us: int) -> None:
        """Every change of a sum starts one run, which counts it; none is lost or made twice. A run may fail where workers do."""
        changes = sum(_version(self.read(f"/v1/state/sum-{name}")) for name in NAMES)
        followed = -1
        while self.machine.now_us < limit_us:
            shown = self.read("/v1/state/followed")
            followed = _value(shown) if shown.status == 200 else 0
            if followed >= changes or self.faults:
                break
            self.machine.run(lambda: False, self.machine.now_us + SECOND_US)
        if followed > changes or (followed < changes and not self.faults):
            self.history.wrong.append(f"{changes} changes, and {followed} of them were followed")


def _has_failed_honestly(shown: Reply) -> bool:
    if shown.status != 200 or shown.json["state"] != "failed":
        return False
    problem = shown.json.get("problem", {})
    return problem.get("reason", problem.get("code", "")) in HONEST


def _version(reply: Reply) -> int:
    return int(reply.json["version"]) if reply.status == 200 else 0


def _value(reply: Reply) -> Any:
    found = reply.json
    return found["value"] if isinstance(found, dict) and "value" in found else found


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def play(seed: int, quiet: bool = True) -> World:
    """Play one world; what was wrong is in its history."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        if quiet:
            stack.enter_context(_quiet())
        world = World(seed, Path(folder) / "world.db")

        async def listen(factory: Any, host: str, port: int, **options: Any) -> Any:
            return await world.machine.owner.listen(factory, host, port)  # type: ignore[attr-defined]

        rng = random.Random(seed ^ 0x1D5)
        for name, size in (("token_hex", 2), ("token_bytes", 1), ("token_urlsafe", 2)):  # ids are drawn from the seed as well
            make = (lambda n=32: rng.randbytes(n)) if size == 1 else (lambda n=32: rng.randbytes(n).hex())
            stack.enter_context(mock.patch.object(secrets, name, make))
        stack.enter_context(mock.patch.object(http_server, "listen", listen))
        stack.enter_context(world.machine.running())
        try:
            world.play()
        finally:
            for server in world.servers:
                server.kill()
        return world
