"""Base of ESG and its rivals: queues per step of a workflow, invokers, and configurations tried in turn.

Every queue that is not empty is visited in turn. A visit asks the policy for configurations, best first, and starts the
first one that some invoker has room for. If none fits, the queue is deferred; after a few such rounds the smallest
configurations that are still in time are tried, so that nothing starves while there is any room at all.

A late answer is worth nothing unless the call says otherwise, and no published planner says what to do with it. Here all
of them let a job go once even the fastest configuration is too late for it.

Step queues are ESG's application-function-wise queues: jobs of one step of one workflow, apart from those of others that call the
same function. A batch is made of one of them, because its jobs have the same work before and after them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, Defer, Drop, LoadInstance, Slot, Start, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import ROOT, flow_of, workflow_run
from lamina.planner.batching import batchable_prefix
from lamina.planner.configs import ProfiledConfig
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import scope_name
from lamina.published.esg.config_tables import ConfigKnobs, PredictedConfigs
from lamina.published.esg.invokers import (
    WarmPlaces,
    device_to_load,
    home_device,
    home_units,
    keep_alive,
    load_instance,
    make_room,
)

MAX_JOBS_SEEN = 1_024
"""Jobs of one function that are looked at in one visit: more than can be started at once on any machine we know."""

MAX_CACHED = 4_096
"""Answers that are kept by goal: callers may ask for any time they like, and memory is not theirs to spend."""

StepKey = tuple[str, NodePath]


@dataclass(slots=True)
class StepQueue:
    """Jobs of one step of one workflow, in the order of its function's queue."""

    function: FunctionState
    flow: Flow
    path: NodePath
    jobs: list[Job] = field(default_factory=list)

    @property
    def key(self) -> StepKey:
        return self.flow.name, self.path

    def drop_started(self) -> None:
        """Drop jobs that have been started or have gone."""
        self.jobs = [job for job in self.jobs if job.is_queued and job.id in job.run.jobs]


def step_path(job: Job) -> NodePath:
    """Where its step is in the workflow: the names of what it is inside of, then its own."""
    if job.scope == ROOT:
        return (job.node,)
    scope = workflow_run(job.run).scopes[job.scope]
    names = [job.node]
    while scope.parent is not None:
        names.append(scope_name(scope.parent.flow.nodes[scope.node], scope.id - scope.fan_out_id))
        scope = scope.parent
    return tuple(reversed(names))


def round_down(goal_us: int, grain: float) -> int:
    """Down to steps of this factor, so that goals nearly the same have one answer; 0: as it is."""
    if not grain or goal_us < 1:
        return goal_us
    base = math.log1p(grain)
    return min(goal_us, int(math.exp(base * math.floor(math.log(goal_us) / base))))


def step_queues(function: FunctionState) -> list[StepQueue]:
    """Queues of one function that are not empty, in the order of their first jobs."""
    found: dict[tuple[int, NodePath], StepQueue] = {}
    for job in function.queue.first(MAX_JOBS_SEEN):
        path, flow = step_path(job), flow_of(job.run)
        queue = found.get((id(flow), path))
        if queue is None:
            queue = found[id(flow), path] = StepQueue(function, flow, path)
        queue.jobs.append(job)
    return list(found.values())


ROUND_US = 10_000
"""A round over all queues takes the published controller about that long: nothing is tried again sooner for nothing."""


class DeferredQueue(NamedTuple):
    """A queue for which there was no place: in so many rounds, last at that time."""

    rounds: int = 0
    last_us: int = -ROUND_US

    def next_round(self, now_us: int) -> DeferredQueue:
        return DeferredQueue(self.rounds + 1, now_us) if now_us - self.last_us >= ROUND_US else self


@dataclass(slots=True)
class StepQueuePolicy:
    """A policy of this family says how configurations are ranked; the rest is here."""

    batches: tuple[int, ...] = ()  #: sizes weighed; empty: as the function allows
    cores: tuple[int, ...] = ()  #: of the host; empty: up to eight, as the device allows
    units: tuple[int, ...] = ()  #: of a slice; empty: as the device allows
    patience: int = 3  #: rounds without a place before the smallest configurations are tried
    prewarm: bool = False  #: load what has gone in time for the next call, by the usual gap between calls
    period_us: int = 1_000_000
    order: Order = "arrival"
    picks_slice_size: bool = field(default=True, init=False)  #: the largest slices may be taken where time is short
    stats: dict[str, int] = field(default_factory=dict, init=False)
    _tables: PredictedConfigs = field(default_factory=PredictedConfigs, init=False)
    _deferred: dict[StepKey, DeferredQueue] = field(default_factory=dict, init=False)
    _sizes: dict[str, list[list[ProfiledConfig]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._tables = PredictedConfigs(ConfigKnobs(self.batches, self.cores, self.units))

    # ------------------------------------------------- what a policy of this family says

    def rank_configs(self, view: View, queue: StepQueue, jobs: list[Job]) -> Sequence[ProfiledConfig]:
        """Configurations for the first of these jobs, best first. All tables of the workflow's functions are known."""
        raise NotImplementedError

    def on_profiles_changed(self) -> None:
        """Profiles have moved, so whatever was worked out from them is void."""

    def prefers_locality(self, queue: StepQueue) -> bool:
        """Does a job go where its input is, and a call's first step to its home?"""
        return True

    def on_start(self, view: View, queue: StepQueue, jobs: list[Job], config: ProfiledConfig) -> None:
        """These are about to start with that."""

    # ----------------------------------------------------------------------- the roles

    def scale(self, view: View) -> Iterator[Decision]:
        if self._tables.refresh(view):
            self._sizes.clear()
            self.on_profiles_changed()
        yield from keep_alive(view, self.period_us, self.prewarm)

    def dispatch(self, view: View) -> Iterator[Decision]:
        open_to = {name: self._places(view, function) for name, function in view.waiting.items()}
        todo = [queue for name, function in view.waiting.items() if open_to[name].open for queue in step_queues(function)]
        while todo:
            again = []
            for queue in todo:
                name = queue.function.spec.name
                if name not in open_to:
                    open_to[name] = self._places(view, queue.function)
                placed = yield from self._visit(view, queue, open_to[name])
                if placed:
                    open_to.clear()
                    if queue.jobs:
                        again.append(queue)
            todo = again
        for name, function in list(view.waiting.items()):
            until_us = yield from self._defer(view, function)
            yield Defer(name, until_us, len(function.queue) + 1)

    def _visit(self, view: View, queue: StepQueue, places: WarmPlaces) -> Generator[Decision, None, bool]:
        """One batch of this queue, if there is a place for one."""
        yield from self._drop_lost(view, queue)
        function, key = queue.function, queue.key
        jobs = batchable_prefix(queue.jobs[: function.spec.max_batch])
        if not jobs:
            self._deferred.pop(key, None)
            return False
        deferred = self._deferred.get(key, DeferredQueue())
        if places.open:
            found = self._find(view, queue, jobs, places, deferred.rounds >= self.patience)
            if found is not None:
                config, opening, why = found
                self._deferred.pop(key, None)
                self.on_start(view, queue, jobs[: config.batch], config)
                yield Start(jobs[: config.batch], opening, why)
                queue.drop_started()
                return True
        self._deferred[key] = deferred.next_round(view.now_us)
        return False

    def _find(
        self, view: View, queue: StepQueue, jobs: list[Job], places: WarmPlaces, force: bool
    ) -> tuple[ProfiledConfig, Slot, str] | None:
        """The first configuration that is in time for a job and has a place."""
        known = [self._tables.table_for(view, view.functions[name]) for name in queue.flow.functions]
        ranked = (
            self.rank_configs(view, queue, jobs)
            if all(table is not None for table in known)
            else requested_configs(view, queue, jobs)
        )
        first = self._first_invoker(view, queue)
        latest_us = max(job.expires_us for job in jobs) - view.now_us
        for config in chain(ranked, self._fallback(view, queue, jobs) if force else ()):
            opening = places.find(config, first) if config.time_us <= latest_us else None
            if opening is not None and _in_time(view, jobs[: config.batch], opening):
                return config, opening, _why(ranked, config) if view.explain else ""
        return None

    def _places(self, view: View, function: FunctionState) -> WarmPlaces:
        return WarmPlaces(view, function, self._tables.kinds.get(function.spec.name, ""))

    def _drop_lost(self, view: View, queue: StepQueue) -> Iterator[Decision]:
        queue.drop_started()
        table = self._tables.table_for(view, queue.function)
        fastest_us = int(table.time_us.min()) if table is not None else 0
        lost = [job for job in queue.jobs if view.now_us + fastest_us > job.expires_us]
        for job in lost:
            if job.id in job.run.jobs:  # dropping one may have ended the run of another
                yield Drop(job)
        if lost:
            queue.drop_started()

    def _first_invoker(self, view: View, queue: StepQueue) -> str:
        """The invoker that is asked first: where the input is, else the function's home."""
        if not self.prefers_locality(queue):
            return ""
        name = queue.function.spec.name
        return queue.jobs[0].input_device or home_device(view, name, self._tables.kinds.get(name, ""))

    def _fallback(self, view: View, queue: StepQueue, jobs: list[Job]) -> Iterator[ProfiledConfig]:
        """Fallback configurations after too many rounds; at last what no table knows, on devices without a plan."""
        yield from self._smallest(view, queue.function, jobs)
        asked = requested_configs(view, queue, jobs)
        yield from asked
        yield ProfiledConfig(len(jobs), min(config.cpus for config in asked), 1, 0, 0.0)

    def _smallest(self, view: View, function: FunctionState, jobs: list[Job]) -> Iterator[ProfiledConfig]:
        """As little of a device as possible, then more; on that as many jobs as there are and leave the first one in time."""
        within_us = jobs[0].due_us - view.now_us
        for by_batch in self._by_size(function):
            fits = [config for config in by_batch if config.batch <= len(jobs) and config.time_us <= within_us]
            yield fits[-1] if fits else by_batch[0]

    def _by_size(self, function: FunctionState) -> list[list[ProfiledConfig]]:
        """Its configurations by what they take of a device, least first; of each the smallest batch first."""
        name = function.spec.name
        if name not in self._sizes and name in self._tables.tables:
            table = self._tables.tables[name]
            sizes: dict[tuple[int, int], list[ProfiledConfig]] = {}
            for config in sorted(table[place] for place in range(len(table))):
                sizes.setdefault((config.units, config.cpus), []).append(config)
            self._sizes[name] = [sizes[size] for size in sorted(sizes)]
        return self._sizes.get(name, [])

    def _defer(self, view: View, function: FunctionState) -> Generator[Decision, None, int]:
        """Nothing fits. Load another instance where that helps; returns when to look again."""
        standing = [one for one in function.instances.values() if one.phase in (InstancePhase.LOADING, InstancePhase.WARM)]
        loading = any(one.phase is InstancePhase.LOADING for one in standing)
        job = function.queue.head()
        if not standing:
            yield from load_instance(view, function, job.input_device)
        elif not loading and len(standing) < function.spec.scale.max and view.now_us >= function.load_not_before_us:
            sizes = self._by_size(function)
            kind = self._tables.kinds.get(function.spec.name, "")
            device = device_to_load(view, function, job.input_device, kind, sizes[0][0]) if sizes else None
            if device is not None and _would_help(function, device.spec.id, device.spec.limits.batches_per_instance):
                yield from make_room(view, function, device)
                yield LoadInstance(function.spec.name, device.spec.id, home_units(function, device))
        if self._places(view, function).open:
            return view.now_us + ROUND_US
        return view.next_slot_us(function)  # the end of a batch or of a load will be told


def _would_help(function: FunctionState, device: str, limit: int) -> bool:
    """One instance that may run any number of batches is enough for a device."""
    return limit > 0 or all(instance.device != device for instance in function.instances.values())


def _in_time(view: View, jobs: list[Job], opening: Slot) -> bool:
    """Would at least one of them be in time? No other policy may start a batch otherwise either."""
    device = opening.device
    took_us = view.latency_us(jobs[0].function, device, len(jobs), opening.units, opening.cores)
    if not took_us:
        return True
    return opening.at_us + took_us + view.transfer_us(jobs, device) <= max(job.expires_us for job in jobs)


def requested_configs(view: View, queue: StepQueue, jobs: list[Job]) -> list[ProfiledConfig]:
    """The configuration its author asked for, where the batch time is unknown."""
    spec = queue.function.spec
    sizes = dict.fromkeys((spec.cores_on(device.spec), spec.units_on(device.spec)) for device in view.devices.values())
    return [ProfiledConfig(len(jobs), cores, units, 0, 0.0) for cores, units in sizes]


def _why(ranked: Sequence[ProfiledConfig], config: ProfiledConfig) -> str:
    place = next((place for place, one in enumerate(ranked, 1) if one == config), 0)
    rank = f"{place} of {len(ranked)} configurations" if place else "the smallest, after too many rounds without a place"
    return f"{rank}: batch {config.batch}, {config.cpus} cores, {config.units} units, {config.time_us / 1e3:.1f} ms"
