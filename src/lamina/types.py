"""Frozen values that all layers share. Times are integer microseconds, memory is MiB, and every name carries its unit.

They are msgspec structs rather than dataclasses: creating one costs a quarter, and the same class reads a scenario file,
writes the event log and crosses a socket without a line of conversion code. `gc=False` marks those that are made for every
call and hold plain values only: they cannot be part of a cycle, so the collector need not look at them.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

NEVER_US = 2**62
"""A time that does not come. An int, so that it compares and adds like any other."""

WHOLE_UNIT = 1_000
"""Parts of a unit. A batch leases all of them; one of a light or concurrent function a few, beside others of that kind."""

MAX_CONCURRENCY = WHOLE_UNIT
"""Calls one instance may serve at once."""

OnMiss = Literal["shed", "serve"]

MIN_SHARE_KEPT = 0.75
"""Of its share of a device a function keeps at least so much when that is rounded to units."""


class Slo(Struct, frozen=True, kw_only=True):
    """A latency goal: `latency_us` from arrival to answer, for a share `target` of the calls.

    `on_miss` says what a late answer is worth: "shed" nothing (it is refused or dropped as soon as that is known),
    "serve" still something (it is served until `timeout_us`).
    """

    latency_us: int = 0  #: 0: no goal
    target: float = 0.99
    on_miss: OnMiss = "shed"
    timeout_us: int = 60_000_000


class ScaleSpec(Struct, frozen=True, kw_only=True):
    """Limits of autoscaling: how many instances a function may have. Zero by default: without calls it costs nothing."""

    min: int = 0
    max: int = 8
    idle_us: int = 60_000_000


class QuotaSpec(Struct, frozen=True, kw_only=True):
    """Time quota inside a slice: at least `request` when it is asked for, never more than `limit`."""

    request: float = 0.0
    limit: float = 1.0
    window_us: int = 40_000


class SliceLimits(Struct, frozen=True, kw_only=True):
    """Capabilities of a device, as data, so that no policy asks which kind it is."""

    sizes: tuple[int, ...] = ()  #: unit counts a slice may have; empty: any
    aligned: bool = False  #: a slice starts at a multiple of its size, counted from either end (fixed catalogues of partitions)
    per_batch: bool = True  #: a slice may be chosen anew for every batch; else only standing slices
    batches_per_instance: int = 1  #: batches one instance runs at once; 0: as many as there are slices
    soft: bool = False  #: a slice is a turn beside others and not a place: each runs on all of the device


class DeviceSpec(Struct, frozen=True, kw_only=True):
    """A device: a row of equal units."""

    id: str
    kind: str  #: profiles are looked up by it: "cpu", "h200", "v100", ...
    units: int
    memory_mib: int
    family: Literal["cpu", "gpu"] = "gpu"
    node: str = ""
    limits: SliceLimits = SliceLimits()
    price_per_s: float = 1.0  #: of the whole device
    owned: bool = False  #: paid for whether it is used or not: no call need wait to save some of its time
    launched: bool = False  #: on a machine that was asked for, and may be given back
    cores: int = 0  #: of its host, held by batches besides units; 0: not counted
    core_price_per_s: float = 0.0  #: of one of them
    link_mib_per_s: float = 0.0  #: how fast data comes in from another node; 0: moving it is free
    link_latency_us: int = 0

    def unit_price(self) -> float:
        """Price of one unit for one microsecond."""
        return self.price_per_s / self.units / 1e6

    def lease_price(self, units: int, cores: int) -> float:
        """Price of a slice for one microsecond."""
        return units * (self.price_per_s / self.units / 1e6) + cores * self.core_price_per_s / 1e6

    def transfer_us(self, source: DeviceSpec, kib: int) -> int:
        """Transfer time from another device; 0 on the same node."""
        if source.id == self.id or (self.node and source.node == self.node) or not self.link_mib_per_s:
            return 0
        return self.link_latency_us + int(kib / 1024 / self.link_mib_per_s * 1e6)


Objective = Literal["", "deadline", "latency", "cost", "throughput"]
OBJECTIVES: Final = ("deadline", "latency", "cost", "throughput")
"""What a policy aims at: in time at the least cost; the least mean response; the least cost, as late as the goal allows; the most
work done. "": `deadline` with a latency goal, `latency` without."""


class FunctionSpec(Struct, frozen=True, kw_only=True):
    """A named unit of work, as the controller sees it."""

    name: str
    max_batch: int = 1
    cores: int = 1  #: units wanted on a CPU device
    concurrency: int = 1  #: calls that one instance serves at once on its cores
    parts: int = WHOLE_UNIT  #: of each of its cores that one call takes: less than all if it is light, or one of several at once
    share: float = 0.0  #: part of a GPU wanted; 0: needs none, and may run on one all the same only if `gpu` says so
    gpu: Literal["no", "may", "must"] = "no"
    memory_mib: int = 0
    input_kib: int = 0  #: what a job usually gets from the step before it
    isolated: bool = False  #: a process of its own on a GPU; on cores every instance has one
    home: bool = False  #: owns its slice: no other function leases it, unless `lend`
    lend: bool = True
    quota: QuotaSpec = QuotaSpec()
    scale: ScaleSpec = ScaleSpec()
    slo: Slo = Slo()
    objective: Objective = ""
    idempotent: bool = True  #: may be run again if its worker dies
    max_queue: int = 10_000
    version: str = ""  #: of its code: instances of another one are replaced
    cache_us: int = 0  #: how long its results are kept by the gateway; 0: not at all

    def fits_family(self, family: str) -> bool:
        return self.gpu != "must" if family == "cpu" else self.gpu != "no"

    def units_on(self, device: DeviceSpec) -> int:
        """Units of `device` one batch takes by default: the smallest size it has that covers the request, else its largest.

        A share is rounded down, so that those which add up to one device run there at the same time; up only where down would
        take more than a quarter of it, which happens to shares of less than three units. 0.33 of 15 is a third.
        """
        if device.family == "cpu":
            wish = self.cores
        elif self.share:
            exact = self.share * device.units
            wish = int(exact + 1 / (device.units + 1))  # so little is short in all of them that it never adds up to a unit
            wish += wish < MIN_SHARE_KEPT * exact
        else:
            wish = device.units
        wish = min(max(1, wish), device.units)
        if not device.limits.sizes:
            return wish
        sizes = sorted(size for size in device.limits.sizes if size <= device.units)
        return next((size for size in sizes if size >= wish), sizes[-1])

    def parts_on(self, device: DeviceSpec) -> int:
        """Parts of each of its units that one batch leases: on cores its own, elsewhere all."""
        return self.parts if device.family == "cpu" and device.limits.per_batch else WHOLE_UNIT

    def batches_at_once(self, device: DeviceSpec) -> int:
        """Batches one instance may run at once; 0: as many as there are slices."""
        return self.concurrency if self.parts_on(device) < WHOLE_UNIT else device.limits.batches_per_instance

    def busy_instances_on(self, device: DeviceSpec) -> int:
        """Instances that can all be busy at once; further ones would only wait for each other. At least 1."""
        units, parts = self.units_on(device), self.parts_on(device)
        if parts < WHOLE_UNIT:
            return max(1, device.units * WHOLE_UNIT // (units * parts * self.concurrency))
        return max(1, device.units * device.limits.batches_per_instance // units)

    def cores_on(self, device: DeviceSpec) -> int:
        """Cores of the host one batch takes by default, where they are counted."""
        return min(self.cores, device.cores)


def call_parts(core_part: float, concurrency: int) -> int:
    """Parts of each core that one call takes, where so many share that part of it."""
    return max(1, int(WHOLE_UNIT * core_part / concurrency))


class Call(Struct, frozen=True, gc=False):
    """One request. `deadline_us` is the goal; past `expires_us` no answer is worth anything."""

    id: str
    target: str
    arrived_us: int
    deadline_us: int = NEVER_US
    expires_us: int = NEVER_US
    tenant: str = ""
    priority: int = 0
    cost_limit: float = 0.0  #: 0: none
    size_bytes: int = 0
    durable: bool = False  #: what moves it on is written down first, so that it survives a restart
    objective: Objective = ""  #: "": that of its function


class Tenant(Struct, frozen=True, kw_only=True):
    """A tenant: its weight in fair sharing when devices are contended, and its limits; 0: no limit."""

    name: str
    weight: float = 1.0
    rate_per_s: float = 0.0  #: calls
    burst: float = 0.0  #: calls that may come at once; 0: as many as in a second
    concurrent: int = 0  #: calls under way
    unit_s_per_day: float = 0.0  #: units x seconds held, over the last 24 hours
    memory_mib: int = 0  #: of all instances its functions may have


def call_for(
    id: str,
    target: str,
    arrived_us: int,
    slo: Slo,
    *,
    deadline_us: int = 0,
    tenant: str = "",
    priority: int = 0,
    cost_limit: float = 0.0,
    size_bytes: int = 0,
    objective: Objective = "",
) -> Call:
    """A call under `slo`; a caller's own `deadline_us` (absolute) takes its place."""
    timeout_us = arrived_us + slo.timeout_us
    goal_us = deadline_us or (arrived_us + slo.latency_us if slo.latency_us else timeout_us)
    expires_us = goal_us if slo.on_miss == "shed" else max(goal_us, timeout_us)
    return Call(id, target, arrived_us, goal_us, expires_us, tenant, priority, cost_limit, size_bytes, objective=objective)
