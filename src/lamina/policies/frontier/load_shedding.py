"""Load shedding: when more is asked than there is, what there is is shared, max-min over tenants and targets by weight.

A *stream* is the calls of one target by one tenant. Its demand on a device is the calls it offers per second, times the
unit-seconds each takes in full batches. Where all demands exceed a device, each stream has a fair share of it
(`planner/max_min.py`): first tenants by weight, then the targets of each. A stream that asks for less than its share is not
held back. Of one that asks for more, a virtual clock says when all that was admitted of it will be done at its share: that is
the least latency it can be offered. So a call is still rejected only if what it is offered is beyond its deadline: a stream
with much time fills the time it has, one with little is held to its rate, and none is starved by another.

The clock counts only while another stream on the device is served worse: a smaller part of what its share would do is served of
late, or what waits of it would be late even at twice its share (`_compare`). To hold all to their rates at all times would leave
units idle whenever one of them has fewer calls than usual.

Demand is an estimate, so it is corrected. A device that is not busy although streams are held back can do more than was
thought; one on which streams that ask for less than their share are rejected, less. And no stream is held back on a device that
was not busy: a few calls more than usual in a fifth of a second are no overload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

from lamina.core.policy import View
from lamina.core.workflow.flow import Flow
from lamina.planner.max_min import Demand, max_min
from lamina.policies.frontier.backlog import MAX_HOSTS, BacklogModel, sampled_hosts
from lamina.types import Call

UPDATE_US = 200_000
"""How often demand is added up."""

MEMORY = 0.3
"""Weight of the last of these spans in the rate of a stream."""

FULL = 0.97
"""Part of a device that demand may fill before streams are held back."""

BUSY = 0.9
"""Part of its units in use from which on a device counts as busy."""

NEARLY_LATE = 0.8
"""Part of the time of a call: what is estimated to take longer leaves no room for others behind it."""

SERVED_STEP = 1 / 64
"""Weight of the last call in the part of a stream's calls that are served."""

PACE = 2.0
"""Times its share: a stream that would be late even at this pace is served worse than others."""

EVEN = 0.1
"""Parts that two streams get of their shares count as equal up to so much."""

LIGHT = EVEN - 0.01
"""A stream that asks for less than its share is to be served in full: so much sooner it counts as served worse."""

FEW, PART = 64, 16
"""Up to so many streams are added up at once; of more, so many with each call that arrives."""

NONE_SHED: Set[str] = frozenset()

Stream = tuple[str, str]
"""Target and tenant."""


@dataclass(slots=True)
class _Device:
    capacity: float = 1.0  #: what it can do, over what was thought
    busy: float = 0.0  #: sum of the busy shares seen
    seen: int = 0
    worst: float = 1.0  #: of its streams, how well the one is served that has least of its share
    has_dropped: bool = False  #: since then, what was admitted could not be in time any more
    is_overloaded: bool = False
    shed: set[str] = field(default_factory=set)  #: functions that none but such streams use
    shares: dict[Stream, float] = field(default_factory=dict)  #: in units, of streams that ask for more than that
    has_light: bool = False  #: there are streams that ask for less than their share
    is_light_short: bool = False  #: and one of them is not served in full
    is_owed: bool = False  #: part of its time is owed to a function, which is served before others until it has had it


@dataclass(slots=True)
class LoadShedder:
    """Demand and fair shares per device, and the virtual clock of every stream that asks for more than its share."""

    is_overloaded: bool = False  #: somewhere demand exceeds what there is
    _devices: dict[str, _Device] = field(default_factory=dict)
    _calls: dict[Stream, int] = field(default_factory=dict)  #: since the last update
    _rates: dict[Stream, float] = field(default_factory=dict)  #: calls per microsecond
    _served: dict[Stream, float] = field(default_factory=dict)  #: part of its calls, of late, that were not turned away
    _excess: dict[Stream, float] = field(default_factory=dict)  #: what it asks for over its share, of streams that ask for more
    _pressed: set[str] = field(default_factory=set)
    _interval_us: dict[Stream, float] = field(default_factory=dict)  #: between calls at its share, of streams held back
    _clock_us: dict[Stream, float] = field(default_factory=dict)  #: when what was admitted will be done at that rate
    _updated_us: int = 0
    _sweep: Iterator[None] | None = None  #: of the update under way

    def on_call_arrived(self, view: View, flow: Flow, call: Call, backlog: BacklogModel) -> int:
        """Count an arrival; the time until its stream has had its share for all that was admitted of it, 0 if not held back."""
        self.record_arrival(call)
        if flow.functions:
            first = view.functions[flow.functions[0]]
            hosts = first.instances_by_device
            for host in sampled_hosts(hosts, first.arrivals.count) if len(hosts) > MAX_HOSTS else hosts:
                device = view.devices[host]
                self.record_utilisation(host, device.busy.bit_count() / device.spec.units)
        if self._sweep is None and view.now_us - self._updated_us >= UPDATE_US:
            units = {name: device.spec.units for name, device in view.devices.items()}
            work_of = partial(_work_per_call, view, backlog)
            self._sweep = self._add_up(
                view.now_us,
                units,
                work_of,
                view.tenant_weight,
                partial(_requested_part, view),
                partial(_is_pressed, view),
                partial(_functions_of, view),
            )
        if self._sweep is not None and next(self._sweep, self) is self:
            self._sweep = None
        return self.delay_us(view.now_us, call)

    def record_arrival(self, call: Call) -> None:
        stream = (call.target, call.tenant)
        self._calls[stream] = self._calls.get(stream, 0) + 1

    def record_utilisation(self, device: str, busy: float) -> None:
        known = self._devices.get(device)
        if known is None:
            known = self._devices[device] = _Device()
        known.busy += busy
        known.seen += 1

    def delay_us(self, now_us: int, call: Call) -> int:
        return max(0, int(self._clock_us.get((call.target, call.tenant), 0.0)) - now_us) if self._interval_us else 0

    def on_admitted(self, now_us: int, call: Call, is_spare: bool = False) -> None:
        """Advance the virtual clock of its stream, unless it takes what would stand idle: that is no part of its share."""
        stream = (call.target, call.tenant)
        served = self._served.get(stream)
        if served is not None:
            self._served[stream] = served + SERVED_STEP * (1 - served)
        if self._interval_us and not is_spare:
            interval_us = self._interval_us.get(stream)
            if interval_us is not None:
                self._clock_us[stream] = max(now_us, self._clock_us.get(stream, 0.0)) + interval_us

    def on_dropped(self, call: Call, devices: Iterable[str]) -> None:
        """A call that was admitted could not be in time any more on the devices of its function: they were not idle."""
        self.on_refused(call.target, call.tenant, was_admitted=True)
        for name in devices:
            if (known := self._devices.get(name)) is not None:
                known.has_dropped = True

    def on_refused(self, target: str, tenant: str, was_admitted: bool = False) -> None:
        """A call was rejected, or dropped because it could not be in time any more."""
        stream = (target, tenant)
        served = self._served.get(stream, 1.0)
        if was_admitted:
            served = max(0.0, (served - SERVED_STEP) / (1 - SERVED_STEP))
        self._served[stream] = (1 - SERVED_STEP) * served

    def is_tight(self, devices: Iterable[str], call: Call) -> bool:
        """Whether another stream is served worse than one that has had its share, on a device of both; or would be served before
        it, because it is owed its part of the time: whatever is admitted beyond the share is then late."""
        mine = -1.0
        for name in devices:
            known = self._devices.get(name)
            if known is not None and known.is_overloaded:
                if known.is_owed and (call.target, call.tenant) in known.shares:
                    return True
                if mine < 0:
                    mine = self._satisfied((call.target, call.tenant))
                if known.worst < mine - EVEN:
                    return True
        return False

    def roomy_us(self, devices: Iterable[str], call: Call, needed_us: int, alone_us: Callable[[], int]) -> int:
        """The least time that a call of a stream that asks for more than its share must have, where others ask for less: what is
        among the last to be in time leaves no room for them. That holds before the stream has had its share, too, for what is
        admitted is kept: but only waiting counts then, not what it takes alone (`alone_us`). 0 for any other call."""
        stream = (call.target, call.tenant)
        for name in devices if self.is_overloaded else ():
            known = self._devices.get(name)
            if known is not None and known.is_overloaded and known.has_light and stream in known.shares:
                own_us = min(needed_us, alone_us())
                return own_us + int((needed_us - own_us) / NEARLY_LATE)
        return 0

    def _satisfied(self, stream: Stream) -> float:
        """How much it gets of its share: of all it asks for, if that is less."""
        if stream[0] in self._pressed:
            return 0.0
        return min(1.0, self._served.get(stream, 1.0) * self._excess.get(stream, 1.0))

    def shed_on(self, device: str) -> Set[str]:
        """Of a device that is asked for more than it can do: functions that no stream uses there but those that ask for more than
        their share."""
        known = self._devices.get(device)
        return known.shed if known is not None else NONE_SHED

    def update(
        self, now_us: int, units: Mapping[str, int], work: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]
    ) -> None:
        """Add up the demand on each device of so many units, and decide which streams are held back.

        `work`: per target and device, the unit-microseconds one call takes there; `weights`: of tenants.
        """
        for _ in self._add_up(now_us, units, lambda target: work.get(target, {}), lambda tenant: weights.get(tenant, 1.0)):
            pass

    def _add_up(
        self,
        now_us: int,
        units: Mapping[str, int],
        work_of: Callable[[str], Mapping[str, float]],
        weight_of: Callable[[str], float],
        request_of: Callable[[str], float] = lambda target: 0.0,
        is_pressed: Callable[[str, float], bool] = lambda target, per_us: False,
        functions_of: Callable[[str], Iterable[str]] = lambda target: (target,),
    ) -> Iterator[None]:
        """The same, some streams or devices at a time: of thousands, all would take longer than a call has."""
        span_us = max(UPDATE_US // 2, now_us - self._updated_us)
        self._updated_us = now_us
        calls, self._calls = self._calls, {}
        work: dict[str, Mapping[str, float]] = {}
        weights: dict[str, float] = {}
        needs: dict[str, dict[Stream, float]] = {}
        streams = dict.fromkeys([*self._rates, *calls])
        part = len(streams) if len(streams) <= FEW else PART
        for done, stream in enumerate(streams):
            if done and not done % part:
                yield
            fresh = calls.get(stream, 0) / span_us
            known = self._rates.get(stream)
            rate = self._rates[stream] = fresh if known is None else known + MEMORY * (fresh - known)
            if rate * 1e7 < 1e-3:
                del self._rates[stream]
                self._served.pop(stream, None)
                self._excess.pop(stream, None)
                continue
            target, tenant = stream
            if target not in work:
                work[target] = work_of(target)
            weights[tenant] = weight_of(tenant)
            for device, unit_us in work[target].items():
                needs.setdefault(device, {})[stream] = rate * unit_us
        for done, (name, count) in enumerate(units.items()):
            if done and not done % FEW:
                yield
            known_device = self._devices.setdefault(name, _Device())
            _divide(known_device, count, needs.get(name, {}), weights, request_of)
            for stream, share in known_device.shares.items():
                self._excess[stream] = max(1.0, needs[name][stream] / max(1e-9, share))
            for stream in needs.get(name, {}):
                if stream not in known_device.shares:
                    self._excess.pop(stream, None)
        for name in self._devices.keys() - units.keys():  # it has left
            del self._devices[name]
        self.is_overloaded = any(device.is_overloaded for device in self._devices.values())
        self._interval_us = self._held_back(work) if self.is_overloaded else {}
        for stream in [stream for stream in self._clock_us if stream not in self._interval_us]:
            del self._clock_us[stream]
        yield from self._compare(needs, is_pressed, functions_of)

    def _compare(
        self,
        needs: Mapping[str, Mapping[Stream, float]],
        is_pressed: Callable[[str, float], bool],
        functions_of: Callable[[str], Iterable[str]],
    ) -> Iterator[None]:
        """How well the stream is served that has least of its share, on each device. One whose calls would be late even if it had
        more than its share from now on has none of it."""
        rates: dict[str, float] = {}
        for (target, _), interval_us in self._interval_us.items():
            rates[target] = rates.get(target, 0.0) + 1 / interval_us
        pressed: set[str] = set()
        for done, (target, per_us) in enumerate(rates.items()):
            if done and not done % FEW:
                yield
            if is_pressed(target, PACE * per_us):
                pressed.add(target)
        self._pressed = pressed
        for done, (name, device) in enumerate(list(self._devices.items())):
            if done and not done % FEW:
                yield
            if not device.is_overloaded:
                device.shed = set()
                continue
            heavy, light = device.shares, [stream for stream in needs.get(name, {}) if stream not in device.shares]
            kept = {function for target, _ in light for function in functions_of(target)}
            device.shed = {function for target, _ in heavy for function in functions_of(target)} - kept
            fullest = min([self._satisfied(stream) for stream in light], default=1.0)
            device.is_light_short = fullest < 1 - EVEN + LIGHT
            device.worst = min([fullest - LIGHT if light else 1.0, *(self._satisfied(stream) for stream in heavy)])

    def _held_back(self, work: Mapping[str, Mapping[str, float]]) -> dict[Stream, float]:
        """Streams without room for all of their calls on any device, and the time between two calls at their shares."""
        found: dict[Stream, float] = {}
        for stream in self._rates:
            rate = 0.0
            for device, unit_us in work.get(stream[0], {}).items():
                share = self._devices[device].shares.get(stream) if device in self._devices else None
                if share is None:
                    break
                rate += share / unit_us
            else:
                if rate:
                    found[stream] = 1 / rate
        return found


def _work_per_call(view: View, backlog: BacklogModel, target: str) -> Mapping[str, float]:
    flow = view.flows.get(target)
    return backlog.work_per_call(view, flow) if flow is not None else {}


def _is_pressed(view: View, target: str, per_us: float) -> bool:
    """Whether what waits of a function would be late at so many jobs a microsecond."""
    function = view.functions.get(target)
    waiting = len(function.queue) if function is not None else 0
    if function is None or not waiting:
        return False
    return any(
        function.queue.slice(place - 1, 1)[0].due_us - view.now_us < place / per_us for place in (waiting, (waiting + 1) // 2)
    )


def _functions_of(view: View, target: str) -> Iterable[str]:
    flow = view.flows.get(target)
    return flow.functions if flow is not None else ()


def _requested_part(view: View, target: str) -> float:
    """Part of the time that a function is owed (`Quota(request=)`)."""
    function = view.functions.get(target)
    return function.spec.quota.request if function is not None and function.owed is not None else 0.0


def _divide(
    device: _Device,
    units: int,
    needs: Mapping[Stream, float],
    weights: Mapping[str, float],
    request_of: Callable[[str], float],
) -> None:
    """Divide a device among tenants by weight, and the part of each among its targets. A function that is owed a part of the
    time has the weight that gives it as much beside the others."""
    idle = device.seen > 0 and device.busy / device.seen < BUSY and not device.has_dropped
    if device.is_overloaded and idle:
        device.capacity = min(2.0, device.capacity * 1.05)
    elif device.is_overloaded and device.is_light_short:
        device.capacity = max(0.5, device.capacity * 0.95)
    elif not device.is_overloaded and device.seen:
        device.capacity += 0.1 * (1.0 - device.capacity)
    device.busy, device.seen, device.has_dropped = 0.0, 0, False
    left = FULL * units * device.capacity
    device.is_overloaded = sum(needs.values()) > left and (device.is_overloaded or not idle)
    device.shares.clear()
    device.is_owed = any(request_of(target) > 0 for target, _ in needs)
    if device.is_overloaded and len(needs) > 1:  # one alone competes with none but itself
        by_tenant: dict[str, dict[Stream, Demand]] = {}
        for stream, need in needs.items():
            weight, part = 1.0, min(0.99, request_of(stream[0]))
            if part:
                weight = max(1.0, part * (sum(tenant == stream[1] for _, tenant in needs) - 1) / (1 - part))
            by_tenant.setdefault(stream[1], {})[stream] = Demand(need, weight)
        asked = {
            tenant: Demand(sum(demand.need for demand in own.values()), weights.get(tenant, 1.0))
            for tenant, own in by_tenant.items()
        }
        for tenant, granted in max_min(left, asked).items():
            for stream, share in max_min(granted, by_tenant[tenant]).items():
                if share < needs[stream] * (1 - 1e-9):
                    device.shares[stream] = share
    device.has_light = 0 < len(device.shares) < len(needs)
