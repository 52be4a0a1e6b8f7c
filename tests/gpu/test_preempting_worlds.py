"""Worlds of batches that give way on one device, in an order drawn from a seed: the executor keeps what the controller promised.

The test plays the controller: of two batches that give way no two have a unit in common, nor of two that do not. It tells each
batch what is on its units, as `StartBatch.overlaps` does. After every step: no segment of a batch has run while something that it
gives way to had its units; those that wait are told as paused, and no others. In the end all have their own results.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lamina.errors import BadValue
from lamina.gpu.executor import SliceExecutor
from lamina.gpu.slicers.null import NullSlicer, null_device

UNITS = 8
ONE = np.zeros((1, 3), dtype=np.float32)
LONGS, QUICKS, STEPS = 3, 4, 6


class Failure(Exception):
    pass


@dataclass(eq=False)
class Stepwise:
    """Adds one in each of its steps, and notes that it ran. It fails for what is below zero, in its last step."""

    name: str
    ran: list[str]
    count: int = STEPS

    def _step(self, batch: np.ndarray) -> np.ndarray:
        self.ran.append(self.name)
        return batch + 1

    def _last(self, batch: np.ndarray) -> np.ndarray:
        self.ran.append(self.name)
        if (batch < 0).any():
            raise Failure(self.name)
        return batch + 1

    @property
    def segments(self) -> list[Any]:
        return [*[self._step] * (self.count - 1), self._last]

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        for step in self.segments:
            batch = step(batch)
        return batch


@dataclass
class World:
    seed: int
    ran: list[str] = field(default_factory=list)
    giving: dict[int, tuple[str, int, float]] = field(default_factory=dict)  #: ticket -> model, units, input
    urgent: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)  #: of the urgent: they run beside the executor
    blockers: dict[int, set[int]] = field(default_factory=dict)  #: ticket that gives way -> what it waits for
    ended: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.executor = SliceExecutor(NullSlicer(null_device(units=UNITS)))
        for number in range(LONGS):
            self.load(f"long{number}", STEPS)
        for number in range(QUICKS):
            self.load(f"quick{number}", 1)

    def load(self, name: str, steps: int) -> None:
        module = Stepwise(name, self.ran, steps)
        self.executor.load(name, module if steps > 1 else lambda batch: module(batch), ONE, buckets=(1, 2))
        self.executor.models.prepare(name, [(1 << n) - 1 << at for n in (1, 2, 4, 8) for at in range(0, UNITS, n)])

    def play(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choices(
                [self.give_way, self.hurry, self.reserve, self.release, self.poll, self.unload], [3, 5, 2, 3, 12, 1]
            )[0]()
            self.check()
        for _ in range(10_000):
            if not (self.giving or self.urgent):
                break
            self.release()
            self.poll()
            self.check()
        assert not self.giving and not self.urgent, f"seed {self.seed}: it does not end"
        assert not self.executor.has_work and not self.executor.paused and not self.executor._open

    # --------------------------------------------------------------------- what happens

    def free(self, held: dict[int, tuple[str, int, float]]) -> int:
        """A slice of units that none of these has; 0 if the one that was drawn is taken."""
        units = self.rng.choice((1, 2, 4, 8))
        mask = (1 << units) - 1 << units * self.rng.randrange(UNITS // units)
        return 0 if any(mask & other for _, other, _ in held.values()) else mask

    def on(self, mask: int, held: dict[int, tuple[str, int, float]]) -> list[int]:
        return [ticket for ticket, (_, other, _) in held.items() if mask & other]

    def give_way(self) -> None:
        idle = {f"long{number}" for number in range(LONGS)} - {name for name, _, _ in self.giving.values()}
        if idle and (mask := self.free(self.giving)):
            name, value = self.rng.choice(sorted(idle)), self.rng.choice((1.0, 5.0, -100.0))
            others = self.on(mask, self.urgent)
            ticket = self.executor.submit(name, [np.full(3, value, np.float32)], mask, preempted_by=others)
            self.giving[ticket], self.blockers[ticket] = (name, mask, value), set(others)

    def hurry(self) -> None:
        if mask := self.free(self.urgent):
            name, value = f"quick{self.rng.randrange(QUICKS)}", self.rng.choice((2.0, 7.0, -100.0))
            others = self.on(mask, self.giving)
            row = [np.full(3, value, np.float32)]
            ticket = self.executor.submit(name, row, mask, preempts=others, preemptible=False)
            self.start_urgent(ticket, name, mask, value, others)

    def reserve(self) -> None:
        if mask := self.free(self.urgent):
            others = self.on(mask, self.giving)
            ticket = self.executor.reserve(others)
            self.start_urgent(ticket, "", mask, 0.0, others)
            self.reserved.add(ticket)

    def start_urgent(self, ticket: int, name: str, mask: int, value: float, others: list[int]) -> None:
        self.urgent[ticket] = (name, mask, value)
        for one in others:
            self.blockers[one].add(ticket)

    def release(self) -> None:
        if self.reserved:
            ticket = self.rng.choice(sorted(self.reserved))
            self.reserved.remove(ticket)
            self.executor.release(ticket)
            self.over(ticket)

    def over(self, ticket: int) -> None:
        (self.giving if ticket in self.giving else self.urgent).pop(ticket)
        self.blockers.pop(ticket, None)
        for waiting in self.blockers.values():
            waiting.discard(ticket)

    def poll(self) -> None:
        held_up = {name: set(self.blockers[ticket]) for ticket, (name, _, _) in self.giving.items()}
        before = len(self.ran)
        for done in self.executor.poll():
            name, _, value = self.giving.get(done.ticket) or self.urgent[done.ticket]
            steps = STEPS if name.startswith("long") else 1
            if value < 0:
                assert isinstance(done.error, Failure) and done.error.args == (name,)
            else:
                assert done.error is None and [float(row[0]) for row in done.outputs or []] == [value + steps]
            self.over(done.ticket)
            self.ended += 1
        for name in set(self.ran[before:]) & held_up.keys():
            assert not held_up[name] & self.executor._open.keys(), f"seed {self.seed}: a segment beside what has its units"

    def unload(self) -> None:
        """Not under its batches; and it can be loaded again."""
        name = self.rng.choice([f"long{number}" for number in range(LONGS)])
        if any(name == other for other, _, _ in self.giving.values()):
            with pytest.raises(BadValue, match="under way"):
                self.executor.unload(name)
        else:
            self.executor.unload(name)
            self.load(name, STEPS)

    def check(self) -> None:
        assert self.executor.paused == {ticket for ticket in self.giving if self.waits(ticket)}
        over = {*self.giving, *self.urgent} - self.executor._open.keys()  # what failed at once, and is told by the next poll
        assert all(held[ticket][2] < 0 for held in (self.giving, self.urgent) for ticket in over & held.keys())
        assert self.executor._open.keys() <= {*self.giving, *self.urgent}

    def waits(self, ticket: int) -> bool:
        return bool(self.blockers[ticket] & self.executor._open.keys())


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_a_batch_that_gives_way_runs_only_while_its_units_are_its_own(first: int) -> None:
    ended = 0
    for seed in range(first, first + 50):
        world = World(seed)
        world.play(120)
        ended += world.ended
    assert ended > 500
