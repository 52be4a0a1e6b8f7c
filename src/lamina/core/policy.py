"""The interface of policies: their roles, the decisions they may make, and the view they get.

A policy is one file with a class `Policy`: its fields are its options, and it has up to four roles.

    admit(view, call)  -> Admitted or Reject now or never; None admits without an estimate
    dispatch(view)     -> decisions          which jobs, how many, on which slice; asked after every event
    scale(view)        -> decisions          standing instances; asked every `period_us`, and when a function needs an instance
    deploy(view, functions, flows)           may refuse what could not be given what it asks for; optional

A role it leaves out is served by `policies/defaults.py`. It looks and decides; the controller checks each decision and
applies it before asking for the next, so a generator sees what its last `yield` did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from lamina.core.actions import Reject
from lamina.core.scheduling.bandwidth import BandwidthRule, bandwidth_rule
from lamina.core.scheduling.jobs import Job, Order
from lamina.core.scheduling.slots import Slot as Slot
from lamina.core.scheduling.slots import next_slot_us, reserved_units, slots
from lamina.types import NEVER_US, Call, FunctionSpec

if TYPE_CHECKING:
    from lamina.core.scheduling.admission_margin import AdmissionMargin
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import Batch, ControllerState, FunctionState, Instance
    from lamina.core.workflow.flow import Flow


LEAST_COST_TTL_US = 10_000
"""How long the least cost of a workflow is believed once it has been worked out."""


class Admitted(Struct, frozen=True, gc=False):
    """Admission with the latency expected. Telling it is optional, and makes the next estimate better."""

    estimate_us: int


class Start(Struct, frozen=True):
    """Start these waiting jobs of one function as a batch in this slot."""

    jobs: list[Job]
    slot: Slot
    why: str = ""


class Drop(Struct, frozen=True):
    """Drop a waiting job that cannot be in time any more; its call ends here, and its place goes to one that can."""

    job: Job
    reason: str = "deadline"


class Defer(Struct, frozen=True, gc=False):
    """Defer a function: do not ask about it until then, unless it has `count` jobs, a more urgent one comes, or something
    changes on a device it is on. Costs one dictionary look-up per arrival instead of one decision.

    `ignore_devices`: it waits for a larger batch, not for a slot, so changes on devices do not matter.
    """

    function: str
    until_us: int
    count: int
    ignore_devices: bool = False


class RecheckAt(Struct, frozen=True):
    """Ask again then, even if nothing happens."""

    at_us: int


class LoadInstance(Struct, frozen=True):
    """Load an instance on that device; `home_units` reserves a slice for it, `quota` a share of the time there only.

    `beside` names an instance whose slice it shares: same units, and together no more than all of the time.
    """

    function: str
    device: str
    home_units: int = 0
    quota: float = 1.0
    beside: str = ""


class UnloadInstance(Struct, frozen=True):
    """Unload an instance once it has finished what it has."""

    instance: str


class ResizeInstance(Struct, frozen=True):
    """Resize the reserved slice, or its share of the time. As many units as now: it stays where it is."""

    instance: str
    home_units: int
    quota: float = 1.0


class RequestDevice(Struct, frozen=True):
    kind: str


class ReturnDevice(Struct, frozen=True):
    """Return an empty device."""

    device: str


Decision = Start | Drop | Defer | RecheckAt | LoadInstance | UnloadInstance | ResizeInstance | RequestDevice | ReturnDevice


class Predictor(Protocol):
    """Predictor of latencies and load times, in microseconds; 0 means not known yet."""

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        """Time to plan with: seldom exceeded, so an upper quantile rather than the mean."""
        ...

    def load_us(self, function: str, kind: str) -> int: ...

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        """Learn from a measured latency."""
        ...

    def observe_load(self, function: str, kind: str, load_us: int) -> None: ...

    def relax(self, function: str) -> None:
        """Believe predictions less: calls are rejected because of them, and nothing runs that could prove them wrong."""
        ...


@runtime_checkable
class AdmitRole(Protocol):
    def admit(self, view: View, call: Call) -> Admitted | Reject | None: ...


class DispatchRole(Protocol):
    order: Order

    def dispatch(self, view: View) -> Iterable[Decision]: ...


@runtime_checkable
class DeployRole(Protocol):
    def deploy(self, view: View, functions: tuple[FunctionSpec, ...], flows: tuple[Flow, ...]) -> None:
        """Raise `NoCapacity` if these could not all be given what they ask for; nothing is changed then."""
        ...


@runtime_checkable
class ScaleRole(Protocol):
    period_us: int

    def scale(self, view: View) -> Iterable[Decision]: ...


@dataclass(slots=True, eq=False)
class View:
    """Read-only view of the state and the time, with the questions policies ask most."""

    _state: ControllerState
    predictor: Predictor
    _margin: AdmissionMargin | None = None
    now_us: int = 0
    picks_slice_size: bool = False  #: the policy may give a batch other slices than its function asks for
    explain: bool = False  #: `Start.why` will be read
    booking_horizon_us: int = NEVER_US  #: no booking earlier than this before a slice is free: another tenant's turn may come
    bandwidth: BandwidthRule | None = field(init=False)  #: limits what may run side by side; None: demands are not known
    needs_instance: dict[str, None] = field(default_factory=dict)
    """For the scale role: functions that lack an instance, or on whose account it is asked."""
    memo: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By workflow: a cached result and until when it holds."""
    recent_estimates: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By target: the last estimate, and until when it is recent."""
    _least_costs: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By workflow: what it costs at least, and until when that is believed."""

    def __post_init__(self) -> None:
        self.bandwidth = bandwidth_rule(self.predictor)

    @property
    def functions(self) -> dict[str, FunctionState]:
        return self._state.functions

    @property
    def waiting(self) -> dict[str, FunctionState]:
        """Functions with jobs in their queue that are not on hold."""
        return self._state.waiting

    @property
    def devices(self) -> dict[str, Device]:
        return self._state.devices

    @property
    def instances(self) -> dict[str, Instance]:
        return self._state.instances

    @property
    def flows(self) -> dict[str, Flow]:
        return self._state.flows

    @property
    def batches(self) -> dict[int, Batch]:
        return self._state.batches

    def latency_us(self, function: str, device: Device, batch: int, units: int, cores: int = 0) -> int:
        return self.predictor.latency_us(function, device.spec.kind, batch, units, cores)

    def transfer_us(self, jobs: Iterable[Job], device: Device) -> int:
        """Time to bring the inputs of these jobs to the device, one after another."""
        if not device.spec.link_mib_per_s:
            return 0
        total_us = 0
        for job in jobs:
            source = self._state.devices.get(job.input_device)
            if source is not None:
                total_us += device.spec.transfer_us(source.spec, self._state.functions[job.function].spec.input_kib)
        return total_us

    @property
    def deferred(self) -> dict[str, Defer]:
        """Functions with jobs that this policy has deferred."""
        return self._state.deferred

    def least_cost(self, flow: Flow) -> float:
        """Least cost of its jobs in full batches where they are cheapest, on slices the policy may give them; 0 for what is
        not known, and for what a choice may leave out. Worked out anew every so often, as predictions move."""
        until_us, least = self._least_costs.get(flow.name, (0, 0.0))
        if until_us <= self.now_us:
            least = sum(
                [
                    int(times) * self._least_function_cost(self._state.functions[name].spec)
                    for name, times in flow.expected_jobs.items()
                ]
            )
            self._least_costs[flow.name] = (self.now_us + LEAST_COST_TTL_US, least)
        return least

    def _least_function_cost(self, spec: FunctionSpec) -> float:
        prices = []
        for device in self._state.devices.values():
            where = device.spec
            if spec.fits_family(where.family):
                units: Iterable[int] = (spec.units_on(where),)
                cores: Iterable[int] = (spec.cores_on(where),)
                if self.picks_slice_size:
                    units = (where.limits.sizes or range(1, where.units + 1)) if where.limits.per_batch else units
                    cores = range(1, where.cores + 1) if where.cores else cores
                for size, hands in product(units, cores):
                    batch_us = self.latency_us(spec.name, device, spec.max_batch, size, hands)
                    prices.append(batch_us * where.lease_price(size, hands) / spec.max_batch)
        return min(prices, default=0.0)

    def admission_margin_us(self, target: str) -> int:
        """Margin to add to an estimate so that as many calls of this target are in time as its SLO asks for."""
        return self._margin.margin_us(target) if self._margin is not None else 0

    def can_host(self, function: FunctionState) -> bool:
        """Whether there is a device it could ever be loaded on."""
        spec = function.spec
        return bool(function.instances) or any(
            spec.fits_family(device.spec.family) and spec.memory_mib <= device.spec.memory_mib
            for device in self._state.devices.values()
        )

    def slots(self, function: FunctionState, units: int = 0, cores: int = 0) -> Iterator[Slot]:
        """Slots for one more batch, soonest kinds first: see `scheduling/slots.py`."""
        return slots(self, function, units, cores)

    def max_units_by_bandwidth(self, function: FunctionState, device: Device, after: Batch | None = None) -> int:
        """The largest slice within the bandwidth limit for one more batch; with `after`, once that one has ended."""
        if self.bandwidth is None:
            return device.spec.units
        return self.bandwidth.max_units(function.spec.name, device, self._state.batches, after)

    def can_colocate(self, function: FunctionState, device: Device) -> bool:
        """Whether the bandwidth limit lets it run beside the instances there at any time."""
        if self.bandwidth is None:
            return True
        others = [self._state.instances[name] for name in device.instances]
        return self.bandwidth.can_colocate(function, device, [one for one in others if one.function != function.spec.name])

    def next_slot_us(self, function: FunctionState) -> int:
        """When a function without a slot may have one again: a quota refills by itself, all else takes an event."""
        return next_slot_us(self, function)

    def reserved_units(self, instance: Instance, device: Device) -> int:
        """Units reserved for others: not lent at all, or wanted by their owner at this moment."""
        return reserved_units(self, instance, device)
