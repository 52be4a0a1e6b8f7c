"""Base of ESG and its rivals: queues per step of a workflow, invokers, and configurations tried in turn.

Every queue that is not empty is visited in turn. A visit asks the policy for configurations, best first, and starts the
first one that some invoker has room for. If none fits, the queue is put aside; after a few such rounds the smallest
configurations that are still in time are tried, so that nothing starves while there is any room at all.

A late answer is worth nothing unless the call says otherwise, and no published planner says what to do with it. Here all
of them let a job go once even the fastest configuration is too late for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, Drop, Hold, LoadOn, Opening, Start, View
from lamina.core.queue import Job, Order
from lamina.core.state import FunctionState
from lamina.planner.batching import together
from lamina.planner.configs import Config
from lamina.planner.esg.afw import Key, Line, lines
from lamina.planner.esg.invokers import Places, home, home_units, loadable, make_room
from lamina.planner.esg.tables import Knobs, Tables
from lamina.planner.esg.warm import bring_up, keep_alive

ROUND_US = 10_000
"""A round over all queues takes the published controller about that long: nothing is tried again sooner for nothing."""


class Aside(NamedTuple):
    """A queue for which there was no place: in so many rounds, last at that time."""

    rounds: int = 0
    last_us: int = -ROUND_US

    def again(self, now_us: int) -> Aside:
        return Aside(self.rounds + 1, now_us) if now_us - self.last_us >= ROUND_US else self


@dataclass(slots=True)
class AfwPolicy:
    """A policy of this family says how configurations are ranked; the rest is here."""

    batches: tuple[int, ...] = ()  #: sizes weighed; empty: as the function allows
    cores: tuple[int, ...] = ()  #: of the host; empty: up to eight, as the device allows
    units: tuple[int, ...] = ()  #: of a slice; empty: as the device allows
    patience: int = 3  #: rounds without a place before the smallest configurations are tried
    prewarm: bool = False  #: load what has gone in time for the next call, by the usual gap between calls
    period_us: int = 1_000_000
    order: Order = "arrival"
    any_size: bool = field(default=True, init=False)  #: the largest slices may be taken where time is short
    stats: dict[str, int] = field(default_factory=dict, init=False)
    _tables: Tables = field(default_factory=Tables, init=False)
    _aside: dict[Key, Aside] = field(default_factory=dict, init=False)
    _sizes: dict[str, list[list[Config]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._tables = Tables(Knobs(self.batches, self.cores, self.units))

    # ------------------------------------------------- what a policy of this family says

    def ranked(self, view: View, line: Line, jobs: list[Job]) -> Sequence[Config]:
        """Configurations for the first of these jobs, best first. All tables of the workflow's functions are known."""
        raise NotImplementedError

    def forget(self) -> None:
        """Profiles have moved, so whatever was worked out from them is void."""

    def local(self, line: Line) -> bool:
        """Does a job go where its input is, and a call's first step to its home?"""
        return True

    def started(self, view: View, line: Line, jobs: list[Job], config: Config) -> None:
        """These are about to start with that."""

    # ----------------------------------------------------------------------- the roles

    def scale(self, view: View) -> Iterator[Decision]:
        if self._tables.look(view):
            self._sizes.clear()
            self.forget()
        yield from keep_alive(view, self.period_us, self.prewarm)

    def dispatch(self, view: View) -> Iterator[Decision]:
        open_to = {name: self._places(view, function) for name, function in view.waiting.items()}
        todo = [line for name, function in view.waiting.items() if open_to[name].open for line in lines(function)]
        while todo:
            again = []
            for line in todo:
                name = line.function.spec.name
                if name not in open_to:
                    open_to[name] = self._places(view, line.function)
                placed = yield from self._visit(view, line, open_to[name])
                if placed:
                    open_to.clear()
                    if line.jobs:
                        again.append(line)
            todo = again
        for name, function in list(view.waiting.items()):
            until_us = yield from self._put_aside(view, function)
            yield Hold(name, until_us, len(function.queue) + 1)

    def _visit(self, view: View, line: Line, places: Places) -> Generator[Decision, None, bool]:
        """One batch of this queue, if there is a place for one."""
        yield from self._drop_lost(view, line)
        function, key = line.function, line.key
        jobs = together(line.jobs[: function.spec.max_batch])
        if not jobs:
            self._aside.pop(key, None)
            return False
        aside = self._aside.get(key, Aside())
        if places.open:
            found = self._find(view, line, jobs, places, aside.rounds >= self.patience)
            if found is not None:
                config, opening, why = found
                self._aside.pop(key, None)
                self.started(view, line, jobs[: config.batch], config)
                yield Start(jobs[: config.batch], opening, why)
                line.tidy()
                return True
        self._aside[key] = aside.again(view.now_us)
        return False

    def _find(self, view: View, line: Line, jobs: list[Job], places: Places, force: bool) -> tuple[Config, Opening, str] | None:
        """The first configuration that is in time for a job and has a place."""
        known = [self._tables.of(view, view.functions[name]) for name in line.flow.functions]
        ranked = self.ranked(view, line, jobs) if all(table is not None for table in known) else asked_for(view, line, jobs)
        first = self._first(view, line)
        latest_us = max(job.expires_us for job in jobs) - view.now_us
        for config in chain(ranked, self._fallback(view, line, jobs) if force else ()):
            opening = places.find(config, first) if config.time_us <= latest_us else None
            if opening is not None and _in_time(view, jobs[: config.batch], opening):
                return config, opening, _why(ranked, config) if view.explaining else ""
        return None

    def _places(self, view: View, function: FunctionState) -> Places:
        return Places(view, function, self._tables.kinds.get(function.spec.name, ""))

    def _drop_lost(self, view: View, line: Line) -> Iterator[Decision]:
        line.tidy()
        table = self._tables.of(view, line.function)
        fastest_us = int(table.time_us.min()) if table is not None else 0
        lost = [job for job in line.jobs if view.now_us + fastest_us > job.expires_us]
        for job in lost:
            if job.id in job.run.jobs:  # dropping one may have ended the run of another
                yield Drop(job)
        if lost:
            line.tidy()

    def _first(self, view: View, line: Line) -> str:
        """The invoker that is asked first: where the input is, else the function's home."""
        if not self.local(line):
            return ""
        name = line.function.spec.name
        return line.jobs[0].at or home(view, name, self._tables.kinds.get(name, ""))

    def _fallback(self, view: View, line: Line, jobs: list[Job]) -> Iterator[Config]:
        """Fallback configurations after too many rounds; at last what no table knows, on devices without a plan."""
        yield from self._smallest(view, line.function, jobs)
        asked = asked_for(view, line, jobs)
        yield from asked
        yield Config(len(jobs), min(config.cpus for config in asked), 1, 0, 0.0)

    def _smallest(self, view: View, function: FunctionState, jobs: list[Job]) -> Iterator[Config]:
        """As little of a device as possible, then more; on that as many jobs as there are and leave the first one in time."""
        within_us = jobs[0].due_us - view.now_us
        for by_batch in self._by_size(function):
            fits = [config for config in by_batch if config.batch <= len(jobs) and config.time_us <= within_us]
            yield fits[-1] if fits else by_batch[0]

    def _by_size(self, function: FunctionState) -> list[list[Config]]:
        """Its configurations by what they take of a device, least first; of each the smallest batch first."""
        name = function.spec.name
        if name not in self._sizes and name in self._tables.known:
            table = self._tables.known[name]
            sizes: dict[tuple[int, int], list[Config]] = {}
            for config in sorted(table[place] for place in range(len(table))):
                sizes.setdefault((config.units, config.cpus), []).append(config)
            self._sizes[name] = [sizes[size] for size in sorted(sizes)]
        return self._sizes.get(name, [])

    def _put_aside(self, view: View, function: FunctionState) -> Generator[Decision, None, int]:
        """Nothing fits. Load another instance where that helps; returns when to look again."""
        standing = [one for one in function.instances.values() if one.phase in (Phase.LOADING, Phase.WARM)]
        loading = any(one.phase is Phase.LOADING for one in standing)
        job = function.queue.head()
        if not standing:
            yield from bring_up(view, function, job.at)
        elif not loading and len(standing) < function.spec.scale.max and view.now_us >= function.not_before_us:
            sizes = self._by_size(function)
            kind = self._tables.kinds.get(function.spec.name, "")
            device = loadable(view, function, job.at, kind, sizes[0][0]) if sizes else None
            if device is not None and _helps(function, device.spec.id, device.spec.limits.batches_per_instance):
                yield from make_room(view, function, device)
                yield LoadOn(function.spec.name, device.spec.id, home_units(function, device))
        if self._places(view, function).open:
            return view.now_us + ROUND_US
        return view.no_opening_until_us(function)  # the end of a batch or of a load will be told


def _helps(function: FunctionState, device: str, limit: int) -> bool:
    """One instance that may run any number of batches is enough for a device."""
    return limit > 0 or all(instance.device != device for instance in function.instances.values())


def _in_time(view: View, jobs: list[Job], opening: Opening) -> bool:
    """Would at least one of them be in time? No other policy may start a batch otherwise either."""
    device = opening.device
    took_us = view.latency_us(jobs[0].function, device, len(jobs), opening.units, opening.cores)
    if not took_us:
        return True
    return view.now_us + took_us + view.transfer_us(jobs, device) <= max(job.expires_us for job in jobs)


def asked_for(view: View, line: Line, jobs: list[Job]) -> list[Config]:
    """The configuration its author asked for, where the batch time is unknown."""
    spec = line.function.spec
    sizes = dict.fromkeys((spec.cores_on(device.spec), spec.units_on(device.spec)) for device in view.devices.values())
    return [Config(len(jobs), cores, units, 0, 0.0) for cores, units in sizes]


def _why(ranked: Sequence[Config], config: Config) -> str:
    place = next((place for place, one in enumerate(ranked, 1) if one == config), 0)
    rank = f"{place} of {len(ranked)} configurations" if place else "the smallest, after too many rounds without a place"
    return f"{rank}: batch {config.batch}, {config.cpus} cores, {config.units} units, {config.time_us / 1e3:.1f} ms"
