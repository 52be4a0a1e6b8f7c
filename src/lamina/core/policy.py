"""The interface of policies: their roles, the decisions they may make, and the view they get.

A policy is one file with a class `Policy`: its fields are its options, and it has up to six roles.

    admit(view, call)  -> Admitted or Reject now or never; None admits without an estimate
    dispatch(view)     -> decisions          which jobs, how many, on which slice; asked after every event
    scale(view)        -> decisions          standing instances; asked every `period_us`, and when a function needs an instance
    deploy(view, functions, flows)           may refuse what could not be given what it asks for; optional
    warm_up()                                prepare for workflows, which are being deployed; optional
    prepare(view, function)                  prepare for calls of a function, which has been loaded; optional

A scale role it leaves out is served by `policies/defaults.py`. It looks and decides; the controller checks each decision and
applies it before asking for the next, so a generator sees what its last `yield` did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from lamina.core.actions import Reject
from lamina.core.bandwidth import bandwidth_rule
from lamina.core.scheduling.jobs import Job, SoleTask, Target
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.slots import Slot as Slot
from lamina.core.scheduling.slots import next_slot_us, reserved_units, slots
from lamina.core.scheduling.state import Clock
from lamina.core.waiting_lines import Rank
from lamina.types import WHOLE_UNIT, Call, DeviceSpec, FunctionSpec

if TYPE_CHECKING:
    from lamina.core.scheduling.admission import AdmissionMargin
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import Batch, ControllerState, FunctionState, Instance
    from lamina.core.workflow.flow import Flow


LEAST_COST_TTL_US = 10_000
"""How long the least cost of a workflow is believed once it has been worked out."""


class Admitted(Struct, frozen=True, gc=False):
    """Admission with the latency expected. Telling it is optional, and makes the next estimate better."""

    estimate_us: int


class BodyChoice(Struct, frozen=True):
    """The body of a competing function that gets a call, with the estimate of its admission."""

    task: SoleTask
    estimate_us: int = 0


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

    `ignore_devices`: it waits for a larger batch, not for a slot, so changes on devices do not matter. `rank`: its place in line
    for a slot, least first; when something changes it is asked about only if those before it leave it something. `slot`: when a
    slot may be committed, and behind which batch; the first in line on its device are asked then. `why`: the rule behind it, a
    constant text for `lamina explain`.
    """

    function: str
    until_us: int
    count: int
    ignore_devices: bool = False
    rank: Rank | None = None
    slot: tuple[int, int] | None = None
    why: str = ""


class RecheckAt(Struct, frozen=True):
    """Ask again then, even if nothing happens."""

    at_us: int


class RescaleAt(Struct, frozen=True):
    """Ask the scale role again then, sooner than its period: it looks at many functions some at a time."""

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


Decision = (
    Start | Drop | Defer | RecheckAt | RescaleAt | LoadInstance | UnloadInstance | ResizeInstance | RequestDevice | ReturnDevice
)


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
class RowPredictor(Protocol):
    """A predictor that says the latencies of a batch on several slices at once, at less than one by one; optional."""

    def latencies_us(self, function: str, kind: str, batch: int, units: Sequence[int], cores: int = 0) -> list[int]: ...


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
class WarmUpRole(Protocol):
    def warm_up(self) -> None:
        """Do once what the first decision about a workflow must not wait for; called when workflows are deployed."""
        ...


@runtime_checkable
class PrepareRole(Protocol):
    def prepare(self, view: View, function: FunctionState) -> None:
        """Work out what the first call of the function must not wait for; called when it has been loaded somewhere."""
        ...


@runtime_checkable
class ScaleRole(Protocol):
    period_us: int

    def scale(self, view: View) -> Iterable[Decision]: ...


def _no_margin_us(target: str) -> int:
    return 0


def _equal_weight(tenant: str) -> float:
    return 1.0


class View(Clock):
    """Read-only view of the state and the time, with the questions policies ask most.

    A policy keeps what it has worked out itself; nothing here is written but by the controller, through the methods at the end.
    """

    __slots__ = (
        "_least_costs", "_state", "admission_margin_us", "backlogged", "bandwidth", "batches", "deferred", "devices", "explain",
        "flows", "functions", "instances", "needs_instance", "picks_slice_size", "predictor", "spares_paused", "tenant_weight",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        state: ControllerState,
        predictor: Predictor,
        flows: Mapping[str, Flow] | None = None,
        margin: AdmissionMargin | None = None,
        tenant_weight: Callable[[str], float] = _equal_weight,
        *,
        picks_slice_size: bool = False,
        spares_paused: bool = False,
        explain: bool = False,
    ) -> None:
        super().__init__()
        self._state = state
        self._least_costs: dict[str, tuple[int, float]] = {}  #: by target, and until when it is believed
        self.predictor = predictor
        self.picks_slice_size = picks_slice_size  #: the policy may give a batch other slices than its function asks for
        self.spares_paused = spares_paused  #: the policy starts nothing that makes a batch that gives way late
        self.explain = explain  #: `Start.why` will be read
        self.admission_margin_us: Callable[[str], int] = margin.margin_us if margin is not None else _no_margin_us
        """Margin to add to an estimate so that as many calls of this target are in time as its SLO asks for."""
        self.tenant_weight = tenant_weight  #: weight of a tenant in fair sharing
        self.bandwidth = bandwidth_rule(predictor)  #: limits what may run side by side; None: demands are not known
        self.functions = state.functions
        self.flows: Mapping[str, Flow] = flows if flows is not None else {}
        self.devices = state.devices
        self.instances = state.instances
        self.batches = state.batches
        self.waiting: Mapping[str, FunctionState] = state.waiting  #: functions with jobs to be asked about: what is not deferred
        self.deferred = state.deferred  #: functions with jobs that this policy has deferred
        self.backlogged: Mapping[str, Mapping[str, FunctionState]] = state.backlogged
        """By device: functions on it that have jobs, to be asked about or deferred."""
        self.needs_instance: Mapping[str, None] = {}  #: for the scale role: functions that lack an instance

    @property
    def booking_horizon_us(self) -> int:
        """No booking earlier than this before a slice is free: another tenant's turn may come."""
        return self._state.booking_horizon_us

    # ------------------------------------------------------------- predictions

    def latency_us(self, function: str, device: Device, batch: int, units: int, cores: int = 0) -> int:
        return self.predictor.latency_us(function, device.spec.kind, batch, units, cores)

    def fastest_us(self, function: str) -> int:
        """Latency of a job alone on the device that suits it best, with the way there and back; 0 while not known."""
        spec, latency_us = self.functions[function].spec, self.predictor.latency_us
        times: dict[tuple[str, int], int] = {}
        ways: dict[tuple[str, int], int] = {}
        for device in self.devices.values():
            where = device.spec
            kind = (where.kind, where.units)
            if kind in ways and device.way_us < ways[kind]:
                ways[kind] = device.way_us
            if spec.fits_family(where.family) and kind not in times:
                us = 0
                if self.picks_slice_size and where.limits.per_batch:
                    us = latency_us(function, where.kind, 1, max(where.limits.sizes, default=where.units), where.cores)
                us = us or latency_us(function, where.kind, 1, spec.units_on(where), spec.cores_on(where))
                times[kind], ways[kind] = us, device.way_us
        return min((us + ways[kind] if us else 0 for kind, us in times.items()), default=0)

    def reach_us(self, device: Device) -> int:
        """Where a batch starts at once: when its time begins to count (`Slot.at_us`)."""
        return self.now_us + device.way_us

    def transfer_us(self, jobs: Iterable[Job], device: Device) -> int:
        """Time to bring the inputs of these jobs to the device, one after another."""
        if not device.spec.link_mib_per_s:
            return 0
        total_us = 0
        for job in jobs:
            source = self.devices.get(job.input_device)
            if source is not None:
                total_us += device.spec.transfer_us(source.spec, self.functions[job.function].spec.input_kib)
        return total_us

    def least_cost(self, target: Target) -> float:
        """Least cost of its jobs in full batches where they are cheapest, on slices the policy may give them; 0 for what is
        not known, and for what a choice may leave out. Worked out anew every so often, as predictions move."""
        until_us, least = self._least_costs.get(target.name, (0, 0.0))
        if until_us <= self.now_us:
            jobs = target.expected_jobs.items()
            least = sum([int(times) * self._least_function_cost(self.functions[name].spec) for name, times in jobs])
            self._least_costs[target.name] = (self.now_us + LEAST_COST_TTL_US, least)
        return least

    def _least_function_cost(self, spec: FunctionSpec) -> float:
        prices = []
        devices = {_priced_as(device.spec): device for device in self.devices.values()}  # one of those that are alike
        for device in devices.values():
            where = device.spec
            if spec.fits_family(where.family):
                units: Iterable[int] = (spec.units_on(where),)
                cores: Iterable[int] = (spec.cores_on(where),)
                if self.picks_slice_size:
                    units = (where.limits.sizes or range(1, where.units + 1)) if where.limits.per_batch else units
                    cores = range(1, where.cores + 1) if where.cores else cores
                for size, core_count in product(units, cores):
                    batch_us = self.latency_us(spec.name, device, spec.max_batch, size, core_count)
                    part = spec.parts_on(where) / WHOLE_UNIT
                    prices.append(batch_us * where.lease_price(size, core_count) * part / spec.max_batch)
        return min(prices, default=0.0)

    # ------------------------------------------------------------------- slots

    def slots(self, function: FunctionState, units: int = 0, cores: int = 0) -> Iterator[Slot]:
        """Slots for one more batch, soonest kinds first: see `scheduling/slots.py`."""
        return slots(self, function, units, cores)

    def next_slot_us(self, function: FunctionState) -> int:
        """When a function without a slot may have one again: a quota refills by itself, all else takes an event."""
        return next_slot_us(self, function)

    def reserved_units(self, instance: Instance, device: Device) -> int:
        """Units reserved for others: not lent at all, or wanted by their owner at this moment."""
        return reserved_units(self, instance, device)

    def max_units_by_bandwidth(self, function: FunctionState, device: Device, after: Batch | None = None) -> int:
        """The largest slice within the bandwidth limit for one more batch; with `after`, once that one has ended."""
        if self.bandwidth is None:
            return device.spec.units
        return self.bandwidth.max_units(function.spec.name, device, self.batches, after)

    def can_colocate(self, function: FunctionState, device: Device) -> bool:
        """Whether the bandwidth limit lets it run beside the instances there at any time."""
        if self.bandwidth is None:
            return True
        others = [self.instances[name] for name in device.instances]
        return self.bandwidth.can_colocate(function, device, [one for one in others if one.function != function.spec.name])

    def can_host(self, function: FunctionState) -> bool:
        """Whether there is a device it could ever be loaded on."""
        spec = function.spec
        return bool(function.instances) or any(
            spec.fits_family(device.spec.family) and spec.memory_mib <= device.spec.memory_mib for device in self.devices.values()
        )

    # ---------------------------------------------------------- the controller

    def set_explain(self, explain: bool) -> None:
        self.explain = explain

    def show_starved(self, functions: Mapping[str, None]) -> None:
        self.needs_instance = functions

    def hide(self, functions: Collection[str]) -> None:
        """Leave these out of `waiting`: it is the turn of others. None of them: show all."""
        waiting = self._state.waiting
        self.waiting = _Visible(waiting, functions) if functions else waiting


def _priced_as(spec: DeviceSpec) -> tuple[object, ...]:
    """What the cost of a batch there follows from."""
    return (spec.kind, spec.family, spec.units, spec.cores, spec.price_per_s, spec.core_price_per_s, spec.limits)


class _Visible(Mapping[str, "FunctionState"]):
    """Waiting functions without some, as they come and go."""

    def __init__(self, waiting: Mapping[str, FunctionState], hidden: Collection[str]) -> None:
        self._waiting = waiting
        self._hidden = hidden

    def __getitem__(self, name: str) -> FunctionState:
        if name in self._hidden:
            raise KeyError(name)
        return self._waiting[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._waiting if name not in self._hidden)

    def __len__(self) -> int:
        return sum(name not in self._hidden for name in self._waiting)
