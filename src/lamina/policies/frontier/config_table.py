"""Configuration tables: how a function can be run on each kind of device, ready for look-ups that cost a microsecond.

For every number of waiting jobs, and for every amount of free units on the device, a Pareto front: the configurations (batch,
units, cores) that none other beats in both time and cost, fastest first. The cheapest within a time is then one bisection.
Fronts are made when first asked for; each builds on the one for a job less. Tables are rebuilt when predictions have moved.

Which kinds of devices pay follows from them (`DeviceKinds`). A lone job may be cheapest on a few cores and a batch on a GPU. So
a function is on both, and the arrival rate decides: once jobs arrive while a batch runs, a kind that is slower than another and,
with the larger batch, dearer as well is not used any more, nor counted on. Taking it only because it is free would be too late
for the next step, and in the way of functions that have no choice.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import RowPredictor, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.core.unit_blocks import find_block
from lamina.core.workflow.flow import Flow
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.frontier import Frontier
from lamina.types import NEVER_US, WHOLE_UNIT, DeviceSpec, FunctionSpec

EVERY_SIZE_UP_TO = 64
"""Batch sizes up to this are all weighed, beyond it every eighth part."""

STALE_CHANGE = 0.03
"""A prediction that has changed by more than this makes a new table."""

FIRST_CHECK_US, CHECK_US = 10_000, 1_000_000
"""How often a table is compared with what is predicted now: at first often, while that is still being learnt, and less and less
often the longer it holds."""

NOISY_BUILDS = 10
"""Times the first of these, for a table that has had to be rebuilt so often: what still moves then is noise, and building one
takes as long as a batch."""

KINDS_FRESH_US = 50_000
"""How long the choice of device kinds is good for."""

NO_KINDS: frozenset[str] = frozenset()


class BatchConfig(NamedTuple):
    """One way to run a batch: cost is of one request, time of all of it."""

    cost: float
    time_us: int
    batch: int
    units: int
    cores: int


ParetoFront = tuple[list[int], list[BatchConfig]]


class LatencyFunction(Protocol):
    def __call__(self, batch: int, units: int, cores: int) -> int: ...


class RowFunction(Protocol):
    def __call__(self, batch: int, units: tuple[int, ...], cores: int) -> list[int]: ...


def sizes_up_to(most: int, every: int = EVERY_SIZE_UP_TO) -> list[int]:
    """1, 2, 3, ... up to `every`, then in steps of an eighth, and `most`."""
    found = list(range(1, min(most, every) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // 8)))
    return found


def unit_counts_on(spec: FunctionSpec, device: DeviceSpec) -> tuple[int, ...]:
    """Unit counts worth weighing: those the device has; where it has any, powers of two, their middles, and the wish. Where
    slices are soft a larger one is no faster."""
    wish = spec.units_on(device)
    if not device.limits.per_batch or device.limits.soft or spec.parts_on(device) < WHOLE_UNIT:
        return (wish,)
    if device.limits.sizes:
        return tuple(sorted(size for size in set(device.limits.sizes) if size <= device.units))
    ladder = {wish, device.units}
    power = 1
    while power < device.units:
        ladder |= {power, power * 3 // 2}
        power *= 2
    return tuple(sorted(size for size in ladder if size <= device.units))


def core_counts_on(spec: FunctionSpec, device: DeviceSpec) -> tuple[int, ...]:
    if not device.cores:
        return (0,)
    return tuple(sorted({*(count for count in sizes_up_to(device.cores, 8)[:16]), spec.cores_on(device)}))


@lru_cache(maxsize=65536)
def largest_fit(free: int, sizes: tuple[int, ...], aligned: bool, total: int) -> int:
    """The largest of these sizes that has a block among the free units; 0 if none has."""
    count = free.bit_count()
    for size in reversed(sizes):
        if size <= count and find_block(free, size, aligned, total):
            return size
    return 0


@dataclass(slots=True)
class ConfigTable:
    """Configurations of a function; `latency_us(batch, units, cores)` is 0 for unknown ones, which are left out."""

    latency_us: LatencyFunction
    max_batch: int
    unit_counts: tuple[int, ...]
    core_counts: tuple[int, ...]
    spec: DeviceSpec
    part: float = 1.0  #: of its units that one batch has
    times_built: int = 1  #: for this function and kind of device
    built_us: int = 0
    recheck_us: int = 0  #: when it is next compared with what is predicted
    function: FunctionSpec | None = None  #: that it was built for
    latencies_us: RowFunction | None = None  #: the same for all slices at once, if the predictor can say it
    batch_sizes: list[int] = field(init=False)
    is_known: bool = field(init=False)  #: a latency is known
    fastest: BatchConfig | None = field(init=False)  #: the least time that one job takes on any slice
    _prices: list[tuple[int, list[float]]] = field(init=False)  #: of all slices there are, by units and cores
    _rows: dict[int, list[list[int]]] = field(default_factory=dict)  #: by batch: times by units and cores
    _fronts: dict[tuple[int, int, int], ParetoFront] = field(default_factory=dict)
    _least_unit_us: dict[int, float] = field(default_factory=dict)  #: by number of jobs
    _samples: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.batch_sizes = sizes_up_to(self.max_batch)
        lease_price = self.spec.lease_price
        self._prices = [
            (units, [lease_price(units, cores) * self.part for cores in self.core_counts]) for units in self.unit_counts
        ]
        self._samples = self._sample()
        self.is_known = any(any(times) for times in self._samples)
        alone = self.pareto(1, self.unit_counts[-1], self.core_counts[-1])[1]
        self.fastest = alone[0] if alone else None

    def _sample(self) -> list[list[int]]:
        """Times of the least and the largest batch on all slices."""
        return [self._column(batch, self.core_counts[-1]) for batch in (1, self.max_batch)]

    def _column(self, batch: int, cores: int) -> list[int]:
        """Times of a batch on all slices with so many cores."""
        if self.latencies_us is not None:
            return self.latencies_us(batch, self.unit_counts, cores)
        return [self.latency_us(batch, units, cores) for units in self.unit_counts]

    def _times(self, batch: int) -> list[list[int]]:
        rows = self._rows.get(batch)
        if rows is None:
            columns = [self._column(batch, cores) for cores in self.core_counts]
            rows = self._rows[batch] = [list(row) for row in zip(*columns, strict=True)]
        return rows

    def is_stale(self) -> bool:
        """Whether predictions have moved since it was built."""
        for before, after in zip(self._samples, self._sample(), strict=True):
            for us, now_us in zip(before, after, strict=True):
                if abs(now_us - us) > STALE_CHANGE * us:
                    return True
        return False

    def cheapest_within(self, count: int, within_us: int) -> BatchConfig | None:
        """The cheapest batch of at most `count` that ends within this time, were all of the device free."""
        key = (count, self.unit_counts[-1], self.core_counts[-1])
        times, configs = self._fronts.get(key) or self._build_front(*key)
        place = bisect_right(times, within_us)
        return configs[place - 1] if place else None

    def best_throughput(self, allowed_us: int) -> BatchConfig | None:
        """The cheapest way in full batches that leaves half of the time for waiting; the fastest if there is none."""
        key = (self.max_batch, self.unit_counts[-1], self.core_counts[-1])
        times, configs = self._fronts.get(key) or self._build_front(*key)
        if not configs:
            return None
        if not allowed_us:
            return configs[-1]
        return configs[(bisect_right(times, allowed_us // 2) or bisect_right(times, allowed_us) or 1) - 1]

    def unit_us_per_request(self, config: BatchConfig) -> float:
        """Unit-microseconds per request; where it takes more of the cores, as many units as no other batch can use beside it."""
        units = float(config.units)
        if config.cores:
            units = max(units, self.spec.units * config.cores / self.spec.cores)
        return self.part * units * config.time_us / config.batch

    def least_unit_us(self, count: int) -> float:
        """Unit-microseconds of each of so many jobs, where that is least; 0 while unknown."""
        count = min(count, self.max_batch)
        found = self._least_unit_us.get(count)
        if found is None:
            config = self.cheapest_within(count, NEVER_US)
            found = self._least_unit_us[count] = self.unit_us_per_request(config) if config is not None else 0.0
        return found

    def pareto(self, count: int, units: int, cores: int) -> ParetoFront:
        """On at most so many units (a negative number: exactly so many) and cores, with `count` jobs waiting."""
        found = self._fronts.get((count, units, cores))
        return found if found is not None else self._build_front(count, units, cores)

    def configs(self, batch: int) -> list[BatchConfig]:
        """All ways to run a batch of this size."""
        return [BatchConfig(cost, us, batch, units, cores) for us, cost, _, units, cores in self._weighed(batch)]

    def _weighed(self, batch: int) -> list[tuple[int, float, int, int, int]]:
        """Time, cost, the batch below zero, units and cores of each: in that order the first of equals is the better one."""
        return [
            (us, price * us / batch, -batch, units, cores)
            for (units, prices), row in zip(self._prices, self._times(batch), strict=True)
            for cores, price, us in zip(self.core_counts, prices, row, strict=True)
            if us
        ]

    def _build_front(self, count: int, units: int, cores: int) -> ParetoFront:
        """From the front of fewer jobs there is nearest to it, and the larger batches that were not weighed there."""
        sizes, fronts = self.batch_sizes, self._fronts
        place = bisect_right(sizes, count) - 1
        if place < 0:
            return [], []
        configs: list[BatchConfig] = []
        start = place
        while start >= 0:
            below = fronts.get((sizes[start], units, cores))
            if below is not None:
                configs = below[1]
                break
            start -= 1
        if start < place:
            weighed = [one for size in sizes[start + 1 : place + 1] for one in self._weighed(size)]
            if units < self.unit_counts[-1] or cores < self.core_counts[-1]:  # below zero: exactly so many
                weighed = [one for one in weighed if one[4] <= cores and (one[3] <= units if units >= 0 else one[3] == -units)]
            configs = _undominated(configs, weighed)
        front = fronts[count, units, cores] = fronts[sizes[place], units, cores] = ([config[1] for config in configs], configs)
        return front


def _undominated(front: list[BatchConfig], weighed: list[tuple[int, float, int, int, int]]) -> list[BatchConfig]:
    """Of a front and more configurations, those not beaten in both time and cost, fastest first; of equal ones the larger
    batch."""
    kept: list[BatchConfig] = []
    least = math.inf
    before = [(us, cost, -batch, units, cores) for cost, us, batch, units, cores in front]
    for us, cost, batch, units, cores in sorted(before + weighed):
        if cost < least:
            kept.append(BatchConfig(cost, us, -batch, units, cores))
            least = cost
    return kept


class WarmHosts(NamedTuple):
    """Devices of one kind on which a function is warm."""

    table: ConfigTable
    devices: list[Device]

    @property
    def way_us(self) -> int:
        """Way to the nearest."""
        return min([device.way_us for device in self.devices])


class WarmSpots(NamedTuple):
    """Where a function is warm: good until its instances change, or a table has to be compared with predictions again."""

    until_us: int
    placements: int
    hosts: list[WarmHosts]
    tables: dict[str, ConfigTable]  #: by device


NOWHERE = WarmSpots(0, -1, [], {})


@dataclass(slots=True)
class ConfigTables:
    """Configuration tables per function and kind of device, rebuilt when predictions have moved."""

    fixed_slices: bool = False  #: of all slices, only the one that a function asks for
    _tables: dict[tuple[str, int], ConfigTable] = field(default_factory=dict)  #: by function and shape
    _shapes: dict[str, tuple[DeviceSpec, int]] = field(default_factory=dict)  #: by device
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    """Of shapes: kinds of devices on which a function has the same configurations. Hashed once, not for each look-up."""
    _warm: dict[str, WarmSpots] = field(default_factory=dict)  #: by function

    def warm_hosts(self, view: View, function: FunctionState) -> list[WarmHosts]:
        """Where it is warm, by kind of device."""
        return self._warm_spots(view, function).hosts

    def warm_tables(self, view: View, function: FunctionState) -> dict[str, ConfigTable]:
        """Its tables by the device, of those where it is warm."""
        return self._warm_spots(view, function).tables

    def _warm_spots(self, view: View, function: FunctionState) -> WarmSpots:
        name = function.spec.name
        found = self._warm.get(name, NOWHERE)
        if found.placements != function.placements or view.now_us >= found.until_us:
            by_table: dict[int, WarmHosts] = {}
            tables: dict[str, ConfigTable] = {}
            until_us = NEVER_US
            for instance in function.instances.values():
                if instance.phase is InstancePhase.WARM:
                    device = view.devices[instance.device]
                    table = tables[instance.device] = self.table_for(view, function, device)
                    until_us = min(until_us, table.recheck_us if table.is_known else 0)
                    by_table.setdefault(id(table), WarmHosts(table, [])).devices.append(device)
            found = self._warm[name] = WarmSpots(until_us, function.placements, list(by_table.values()), tables)
        return found

    def table_for(self, view: View, function: FunctionState, device: Device) -> ConfigTable:
        spec = device.spec
        known = self._shapes.get(spec.id)
        if known is None or known[0] is not spec:
            known = self._shapes[spec.id] = (spec, self._numbers.setdefault(_shape(spec), len(self._numbers)))
        key = (function.spec.name, known[1])
        table = self._tables.get(key)
        now_us = view.now_us
        if table is not None and table.function is not function.spec:  # deployed anew, or resized: other slices and batches
            table = None
        if table is not None and table.is_known and now_us < table.recheck_us:
            return table
        if table is None or table.is_stale():
            times_built = table.times_built + 1 if table is not None else 1
            table = self._tables[key] = self._build(view, function, device, times_built)
        least_us = FIRST_CHECK_US * min(table.times_built, NOISY_BUILDS)
        table.recheck_us = now_us + max(least_us, min(CHECK_US, now_us - table.built_us))
        return table

    def prepare(self, view: View, function: FunctionState) -> None:
        """Build what the first call of a loaded function would else have to wait for."""
        for hosts in self.warm_hosts(view, function):
            hosts.table.best_throughput(function.spec.slo.latency_us)

    def tables_of(self, view: View, function: FunctionState) -> list[ConfigTable]:
        """One per kind of device: those it is on, else those it could be on."""
        warm, devices = self.warm_tables(view, function), view.devices
        on = dict.fromkeys([instance.device for instance in function.instances.values()])
        could = on or [host for host, device in devices.items() if function.spec.fits_family(device.spec.family)]
        found = [warm.get(host) or self.table_for(view, function, devices[host]) for host in could]
        return list({id(table): table for table in found}.values())

    def invalidate(self, function: str) -> None:
        self._warm.pop(function, None)
        for key in [key for key in self._tables if key[0] == function]:
            del self._tables[key]

    def doubt(self, function: str) -> None:
        """Compare its tables with what is predicted now: a call that was admitted could not be served by them."""
        self._warm.pop(function, None)
        for key, table in self._tables.items():
            if key[0] == function:
                table.recheck_us = 0

    def _build(self, view: View, function: FunctionState, device: Device, times_built: int) -> ConfigTable:
        spec, where = function.spec, device.spec
        predictor = view.predictor
        latency_us: LatencyFunction = partial(predictor.latency_us, spec.name, where.kind)
        row = partial(predictor.latencies_us, spec.name, where.kind) if isinstance(predictor, RowPredictor) else None
        units, cores = unit_counts_on(spec, where), core_counts_on(spec, where)
        if self.fixed_slices:
            units, cores = (spec.units_on(where),), (spec.cores_on(where),)
        part = spec.parts_on(where) / WHOLE_UNIT
        return ConfigTable(
            latency_us, spec.max_batch, units, cores, where, part, times_built, view.now_us, function=spec, latencies_us=row
        )


def _shape(spec: DeviceSpec) -> tuple[object, ...]:
    """All that times and prices depend on: devices that share it share their tables."""
    return (spec.kind, spec.family, spec.units, spec.limits, spec.price_per_s, spec.cores, spec.core_price_per_s)


# ------------------------------------------------------------------------ kinds of devices


@dataclass(slots=True)
class DeviceKinds:
    """Kinds of devices that pay for each function, at the rate its jobs arrive."""

    tables: ConfigTables
    rates: ArrivalRates
    _dominated: dict[str, tuple[int, int, frozenset[str]]] = field(default_factory=dict)  #: until when, for which goal, which

    def last_dominated(self, name: str) -> frozenset[str]:
        """Those that did not pay when the function was served last."""
        known = self._dominated.get(name)
        return known[2] if known is not None else NO_KINDS

    def dominated(
        self, view: View, function: FunctionState, flow: Flow, slo_us: int, after: Frontier | None, is_overloaded: bool
    ) -> frozenset[str]:
        """Those that do not pay now, for calls with this goal and `after` to come. In overload a dear answer is better than
        none, unless it is in the way of steps that have no other place."""
        name = function.spec.name
        if len(function.instances) < 2:
            self._dominated.pop(name, None)
            return NO_KINDS
        known = self._dominated.get(name)
        if known is None or view.now_us >= known[0] or slo_us != known[1]:
            kinds = self._beaten(view, function, slo_us, after)
            if kinds and is_overloaded and not any(_is_only_on(view, view.functions[step], kinds) for step in flow.functions):
                kinds = NO_KINDS
            known = self._dominated[name] = (view.now_us + KINDS_FRESH_US, slo_us, kinds)
        return known[2]

    def _beaten(self, view: View, function: FunctionState, slo_us: int, after: Frontier | None) -> frozenset[str]:
        devices = {view.devices[one.device].spec.kind: view.devices[one.device] for one in function.instances.values()}
        if len(devices) < 2:
            return NO_KINDS
        gap_us = self.rates.interarrival_us(view.now_us, function)
        found = {
            kind: usual_cost(self.tables.table_for(view, function, on), gap_us, slo_us, after) for kind, on in devices.items()
        }
        return frozenset(
            kind for kind, (cost, us) in found.items() if any(other < cost and sooner < us for other, sooner in found.values())
        )


def _is_only_on(view: View, function: FunctionState, kinds: frozenset[str]) -> bool:
    return all(view.devices[one.device].spec.kind in kinds for one in function.instances.values())


def usual_cost(table: ConfigTable, gap_us: float, slo_us: int, after: Frontier | None) -> tuple[float, int]:
    """Cost, with all that comes after, and time of a batch of the jobs that arrive while one job runs alone."""

    def total(config: BatchConfig) -> float:
        if after is None:
            return config.cost if config.time_us <= slo_us else math.inf
        return config.cost + after.cost_within(slo_us - config.time_us)

    cost, time_us = math.inf, NEVER_US
    alone = min(table.pareto(1, table.unit_counts[-1], table.core_counts[-1])[1], key=total, default=None)
    if alone is not None:
        count = min(table.max_batch, 1 + int(alone.time_us / gap_us))
        for config in table.pareto(count, table.unit_counts[-1], table.core_counts[-1])[1]:
            if total(config) < cost:
                cost, time_us = total(config), config.time_us
    return cost, time_us
