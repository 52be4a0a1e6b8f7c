"""Load at a rising rate, and what became of it.

Open loop: a request is sent when its time has come, whether or not earlier ones are answered. Waiting for answers
before sending more would hide overload, because a slow server would then be asked less.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import lamina
from lamina.errors import DeadlineExceeded, LaminaError, Refused

Ending = Literal["in time", "late", "dropped", "refused", "failed"]
"""Refused: not accepted. Dropped: accepted, and given up when it could no longer be in time."""

STAGES = ("detect", "orient", "recognise")


@dataclass(frozen=True, slots=True)
class Outcome:
    sent_s: float  #: since the load began
    latency_ms: float
    ending: Ending


@dataclass(frozen=True, slots=True)
class StageCount:
    """Of one stage, as the server counts since it started."""

    batches: float = 0.0
    jobs: float = 0.0
    busy_s: float = 0.0

    def since(self, before: StageCount) -> StageCount:
        return StageCount(self.batches - before.batches, self.jobs - before.jobs, self.busy_s - before.busy_s)

    @property
    def mean_batch(self) -> float:
        return self.jobs / self.batches if self.batches else 0.0

    @property
    def batch_ms(self) -> float:
        return 1000 * self.busy_s / self.batches if self.batches else 0.0

    @property
    def job_ms(self) -> float:
        return 1000 * self.busy_s / self.jobs if self.jobs else 0.0


@dataclass(slots=True)
class Step:
    rate_hz: float
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    stages: dict[str, StageCount] = field(default_factory=dict)

    def count(self, ending: Ending) -> int:
        return sum(outcome.ending == ending for outcome in self.outcomes)

    def latency_ms(self, quantile: float) -> float:
        """Of the answers, in time or late; a refusal comes in a millisecond and would flatter."""
        answered = sorted(o.latency_ms for o in self.outcomes if o.ending in ("in time", "late"))
        return answered[min(len(answered) - 1, int(quantile * len(answered)))] if answered else 0.0


class Load:
    """Sends pages in turn to one server."""

    def __init__(self, client: lamina.AsyncClient, url: str, pages: list[bytes], deadline_ms: float, seed: int) -> None:
        self._client = client
        self._host = url.removeprefix("http://")
        self._pages = pages
        self._deadline_ms = deadline_ms
        self._rng = random.Random(seed)
        self._began_s = time.perf_counter()
        self._open: set[asyncio.Task[None]] = set()
        self._sent = 0

    async def capacity_hz(self, seconds: float, at_once: int) -> float:
        """Pages a second when there are always some waiting, counted from the first answer to the last."""
        ends_s = time.perf_counter() + seconds
        done_s: list[float] = []

        async def one_after_another() -> None:
            while time.perf_counter() < ends_s:
                await self._client.call("read_page", {"image": self._next()}, deadline="60s")
                done_s.append(time.perf_counter())

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))
        steady = [at_s for at_s in done_s if at_s <= ends_s] or done_s  # afterwards the queue runs dry
        if len(steady) < 3:
            return len(done_s) / (seconds + max(done_s) - ends_s)
        return (len(steady) - 1) / (steady[-1] - steady[0])

    async def run(self, steps: list[Step], on_change: Callable[[int, Step], None]) -> None:
        """All steps, then whatever is still under way. Outcomes belong to the step in which they were sent."""
        self._began_s = next_s = time.perf_counter()
        counts = await self.stage_counts()
        for index, step in enumerate(steps):
            ends_s = next_s + step.seconds
            # as many as the rate says, at times that chance chooses: in a few seconds a Poisson stream may offer a third less
            for at_s in sorted(next_s + self._rng.uniform(0, step.seconds) for _ in range(round(step.rate_hz * step.seconds))):
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                task = asyncio.create_task(self._send(step, partial(on_change, index, step)))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            await asyncio.sleep(max(0.0, ends_s - time.perf_counter()))
            next_s = ends_s
            before, counts = counts, await self.stage_counts()
            step.stages = {stage: counts[stage].since(before[stage]) for stage in STAGES}
            on_change(index, step)
        if self._open:
            await asyncio.wait(self._open)

    async def _send(self, step: Step, changed: Callable[[], None]) -> None:
        sent_s = time.perf_counter()
        step.sent += 1
        ending: Ending
        try:
            await self._client.call("read_page", {"image": self._next()}, deadline=f"{self._deadline_ms:g}ms")
            ending = "in time" if (time.perf_counter() - sent_s) * 1000 <= self._deadline_ms else "late"
        except Refused:
            ending = "refused"
        except DeadlineExceeded:
            ending = "dropped"
        except LaminaError:
            ending = "failed"
        step.outcomes.append(Outcome(sent_s - self._began_s, (time.perf_counter() - sent_s) * 1000, ending))
        changed()

    def _next(self) -> bytes:
        self._sent += 1
        return self._pages[self._sent % len(self._pages)]

    async def stage_counts(self) -> dict[str, StageCount]:
        return counts_in(await asyncio.to_thread(get, self._host, "/metrics"))


def get(host: str, path: str) -> str:
    """The body of a plain GET, or "" if there is no good answer."""
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        return body if answer.status == 200 else ""
    except OSError:
        return ""
    finally:
        connection.close()


def counts_in(metrics: str) -> dict[str, StageCount]:
    """The sums this demo needs, out of Prometheus' text format."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("lamina_batch_size_", "lamina_step_seconds_")):
            found[name] = float(value)
    return {
        stage: StageCount(
            found.get(f'lamina_batch_size_count{{function="{stage}"}}', 0.0),
            found.get(f'lamina_batch_size_sum{{function="{stage}"}}', 0.0),
            found.get(f'lamina_step_seconds_sum{{function="{stage}"}}', 0.0),
        )
        for stage in STAGES
    }
