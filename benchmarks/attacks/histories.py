"""Client-side histories of runs, counters and keys, and the check of what they were told: nothing lost, doubled or stale.

A client writes down when it asked, when it was answered, and what. An answer that did not come is unknown: it may have had its
effect or not. The checker knows nothing of the server but these answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 4.0


@dataclass(slots=True)
class Answer:
    """Status and body; status 0: it was never sent, -1: it was, and no answer came."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def code(self) -> str:
        return str(self.body.get("code", "")) if isinstance(self.body, dict) else ""

    @property
    def had_no_effect(self) -> bool:
        return self.status == 0 or self.code == "not-leader"


async def ask(url: str, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S, **headers: str) -> Answer:
    """One request on a connection of its own."""
    host, _, port = url.removeprefix("http://").partition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return Answer(0)
            data = b"" if body is None else json.dumps(body).encode()
            named = {"host": f"{host}:{port}", "content-type": "application/json", "connection": "close"} | headers
            lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(data)}"]
            lines += [f"{name.replace('_', '-')}: {value}" for name, value in named.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            return _parse(await reader.read())
    except (TimeoutError, OSError, ValueError):
        return Answer(-1)
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _parse(said: bytes) -> Answer:
    head, gap, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    if not gap or len(body) < int(headers.get("content-length", "0")):
        return Answer(-1)
    return Answer(int(first.split(" ")[1]), json.loads(body) if body else None, headers)


class Following:
    """A client of several servers: goes where the leader is said to be, or to the next one."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.at = self.urls[0]

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        """Ask until it is known to have been sent to a server that takes it, or not to have been answered."""
        while True:
            answer = await ask(self.at, method, path, body, **options)
            if answer.is_ok or not (answer.status <= 0 or answer.status == 503):
                return answer
            leader = answer.headers.get("lamina-leader", "")
            self.at = leader if leader and leader != self.at else self._next()
            if not answer.had_no_effect:
                return answer
            await asyncio.sleep(0.02)

    def _next(self) -> str:
        known = self.urls.index(self.at) if self.at in self.urls else -1
        return self.urls[(known + 1) % len(self.urls)]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on a key that one client writes with rising numbers."""

    kind: str  #: "write" or "read"
    began_s: float
    ended_s: float
    value: int  #: written, or read; 0: there was none
    is_known: bool = True


@dataclass(slots=True)
class History:
    """What all clients asked and were told."""

    runs: dict[str, list[str]] = field(default_factory=dict)  #: by idempotency key: the runs it was answered with
    calls: dict[str, bool] = field(default_factory=dict)  #: by name: whether it was answered, and did not end unknown
    keys: dict[str, list[Op]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)  #: answers that should not be


class Clients:
    """Clients that start runs, make calls, write and read keys, until told to stop."""

    def __init__(self, urls: Sequence[str], seed: str = "") -> None:
        self.urls = list(urls)
        self.history = History()
        self.answered_s: list[float] = []  #: when writes were answered
        self._prefix = seed
        self._tasks: list[asyncio.Task[None]] = []
        self._is_on = True

    def start(self, *, runs: int = 2, calls: int = 2, keys: int = 2, readers: int = 2, pause_s: float = 0.05) -> None:
        work = [self._start_runs(number, pause_s) for number in range(runs)]
        work += [self._make_calls(number, pause_s) for number in range(calls)]
        work += [self._write_key(number, pause_s) for number in range(keys)]
        work += [self._read_key(number % keys, pause_s) for number in range(readers)]
        self._tasks = [asyncio.create_task(one) for one in work]

    async def stop(self) -> History:
        self._is_on = False
        await asyncio.gather(*self._tasks)
        return self.history

    async def _start_runs(self, client: int, pause_s: float) -> None:
        """Start runs. An unknown start is asked for again, with the same key, until it is known."""
        to, number = Following(self.urls), 0
        while self._is_on:
            number += 1
            name = f"{self._prefix}run-{client}-{number}"
            path = f"/v1/workflows/{'act_once' if number % 2 else 'act_thrice'}"
            ids = self.history.runs[name] = []
            while len(ids) < (2 if number % 5 == 0 else 1):  # now and then the same is asked for once more
                answer = await to.ask("POST", path, name, prefer="respond-async", idempotency_key=name)
                if answer.status == 202:
                    ids.append(answer.body["id"])
                    self.answered_s.append(time.monotonic())
                else:
                    self._note_refusal(answer)
                await asyncio.sleep(pause_s)

    async def _make_calls(self, client: int, pause_s: float) -> None:
        to, number = Following(self.urls), 0
        while self._is_on:
            number += 1
            name = f"{self._prefix}call-{client}-{number}"
            answer = await to.ask("POST", "/v1/functions/act", {"what": "mark", "name": name})
            self.history.calls[name] = answer.is_ok
            if answer.is_ok and answer.body != name:
                self.history.odd.append(f"{name}: answered with {answer.body!r}")
            self._note_refusal(answer)
            await asyncio.sleep(pause_s)

    async def _write_key(self, key: int, pause_s: float) -> None:
        to, number = Following(self.urls), 0
        ops = self.history.keys.setdefault(f"{self._prefix}key-{key}", [])
        while self._is_on:
            number += 1
            began_s = time.monotonic()
            answer = await to.ask("PUT", f"/v1/state/{self._prefix}key-{key}", number)
            ops.append(Op("write", began_s, time.monotonic(), number, answer.is_ok))
            if answer.is_ok:
                self.answered_s.append(time.monotonic())
            self._note_refusal(answer)
            await asyncio.sleep(pause_s)

    async def _read_key(self, key: int, pause_s: float) -> None:
        ops = self.history.keys.setdefault(f"{self._prefix}key-{key}", [])
        while self._is_on:
            for url in self.urls:  # both servers: a standby must not answer with what it knew
                began_s = time.monotonic()
                answer = await ask(url, "GET", f"/v1/state/{self._prefix}key-{key}")
                if answer.is_ok:
                    ops.append(Op("read", began_s, time.monotonic(), answer.body["value"]))
                elif answer.code == "not-found":
                    ops.append(Op("read", began_s, time.monotonic(), 0))
                else:
                    self._note_refusal(answer)
            await asyncio.sleep(pause_s)

    def _note_refusal(self, answer: Answer) -> None:
        if not answer.is_ok:
            self.history.refused[answer.code or str(answer.status)] += 1
            if answer.status not in (-1, 0, 503):
                self.history.odd.append(f"{answer.status} {answer.body}")


# -------------------------------------------------------------------------------- the check


@dataclass(slots=True)
class Verdict:
    runs: int = 0
    calls: int = 0
    writes: int = 0
    reads: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.stale or self.odd)

    def add(self, other: Verdict) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value if isinstance(value, int) else len(value) for name, value in found.items()}


async def judge(history: History, urls: Sequence[str], limit_s: float = 60.0) -> Verdict:
    """Ask the servers what became of everything, and compare with what the clients were told."""
    verdict = Verdict(odd=list(history.odd), runs=len(history.runs), calls=len(history.calls))
    to, until_s = Following(urls), time.monotonic() + limit_s
    for name, ids in history.runs.items():
        if len(set(ids)) > 1:
            verdict.doubled.append(f"{name}: {sorted(set(ids))}")
        for id in sorted(set(ids)):
            state = await _final_state(to, id, until_s)
            if state != "succeeded":
                verdict.lost.append(f"{name}: run {id} is {state or 'not over'}")
    counts = await _counts(to, [*history.runs, *history.calls])
    for name in history.runs:
        _compare(verdict, name, counts[name], True)
    for name, is_known in history.calls.items():
        _compare(verdict, name, counts[name], is_known)
    for key, ops in history.keys.items():
        verdict.writes += sum(op.kind == "write" for op in ops)
        verdict.reads += sum(op.kind == "read" for op in ops)
        verdict.stale += [f"{key}: {what}" for what in stale_reads(ops)]
    return verdict


async def _final_state(to: Following, id: str, until_s: float) -> str:
    while True:
        answer = await to.ask("GET", f"/v1/runs/{id}")
        if answer.is_ok and answer.body["state"] not in ("queued", "running"):
            return str(answer.body["state"])
        if answer.status == 404:
            return "unknown to the server"
        if time.monotonic() > until_s:
            return ""
        await asyncio.sleep(0.05)


async def _counts(to: Following, names: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for first in range(0, len(names), 200):
        some = names[first : first + 200]
        while True:
            answer = await to.ask("POST", "/v1/functions/act", {"what": "counts", "name": some}, timeout_s=30.0)
            if answer.is_ok:
                break
            await asyncio.sleep(0.1)
        found |= dict(zip(some, answer.body, strict=True))
    return found


def _compare(verdict: Verdict, name: str, count: int, is_known: bool) -> None:
    if count > 1:
        verdict.doubled.append(f"{name}: counted {count} times")
    elif count < 1 and is_known:
        verdict.lost.append(f"{name}: not counted")


def stale_reads(ops: list[Op]) -> list[str]:
    """Reads that no order of events explains, of a register with one writer and rising values.

    A read gives the last write, or one under way: never less than what was acknowledged, or read, before it began; never what was
    not yet asked for when it ended.
    """
    found = []
    writes = [op for op in ops if op.kind == "write"]
    reads = [op for op in ops if op.kind == "read"]
    known = sorted((op.ended_s, op.value) for op in [*(w for w in writes if w.is_known), *reads])
    least, next_known = 0, 0
    begun = {op.value: op.began_s for op in writes}
    for read in sorted(reads, key=lambda op: op.began_s):
        while next_known < len(known) and known[next_known][0] < read.began_s:
            least = max(least, known[next_known][1])
            next_known += 1
        if read.value < least:
            found.append(f"read {read.value} when {least} was known")
        if read.value and begun.get(read.value, float("inf")) > read.ended_s:
            found.append(f"read {read.value} before it was written")
    return found
