"""KaaS, exclusive: GPUs belong to models. This is how functions with a GPU each are served, and the baseline of KaaS.

Source: "Serverless Accelerators" (UCB/EECS-2022-88), chapter 6, and the exclusive workers of KaaS. GPUs are dealt out to
the models in turn; with more models than GPUs some share one, and then a worker is restarted each time the model changes:
there is never more than one model on a GPU.

The thesis has a rule for stealing a GPU whose text has it the wrong way round. `steal` is the rule put right: where the
pressure of one model (rate x time of a request / its GPUs) has been above `ratio` times that of another at two looks in a
row, the other gives it a GPU, keeps at least one, and must not end up under more pressure than it took away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import Decision, UnloadInstance, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.published.kaas.whole_gpu_policy import WholeGpuPolicy, can_host, request_us


@dataclass(slots=True)
class Policy(WholeGpuPolicy):
    """The oldest request with its own GPU free."""

    steal: bool = False  #: move GPUs to models under pressure
    ratio: float = 1.5
    _owner: dict[str, list[str]] = field(default_factory=dict, init=False)  #: GPU -> models it belongs to
    _dealt: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()), init=False)  #: models and GPUs it was made for
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)  #: arrivals and time at the last look
    _rate: dict[str, float] = field(default_factory=dict, init=False)  #: requests per microsecond
    _wish: tuple[str, str] | None = field(default=None, init=False)  #: the move the last look found

    def choose(self, view: View) -> tuple[Job, Device] | None:
        self._assign_gpus(view)
        for job in sorted(self.oldest_requests(view), key=lambda job: job.id):
            for device in self.free_gpus(view):
                if job.function in self._owner[device.spec.id] and self.can_run_on(view, job, device):
                    return job, device
        return None

    def scale(self, view: View) -> Iterator[Decision]:
        self._assign_gpus(view)
        move = self._move(view) if self.steal else None
        agreed, self._wish = move == self._wish, move
        if move is None or not agreed:
            return
        taker, giver = move
        gpus = [gpu for gpu, owners in self._owner.items() if owners == [giver]]
        gpu = min(
            gpus, key=lambda name: (name not in self._free_order, self._chosen_at.get(name, 0))
        )  # an idle one, if there is one
        self._owner[gpu] = [taker]
        self._wish = None
        for one in list(view.devices[gpu].instances):
            if view.instances[one].function == giver:
                yield UnloadInstance(one)

    def _assign_gpus(self, view: View) -> None:
        """GPUs in turn; anew when models or GPUs come or go. Models without one share."""
        dealt = (tuple(view.functions), tuple(view.devices))
        if dealt == self._dealt:
            return
        self._dealt = dealt
        self._owner = {gpu: [] for gpu in view.devices}
        mine: dict[str, int] = dict.fromkeys(view.functions, 0)
        for gpu in view.devices.values():
            able = [name for name, function in view.functions.items() if can_host(function.spec, gpu.spec)]
            if able:
                poorest = min(able, key=lambda name: mine[name])
                self._owner[gpu.spec.id].append(poorest)
                mine[poorest] += 1
        for name, function in view.functions.items():
            able = [gpu.spec.id for gpu in view.devices.values() if can_host(function.spec, gpu.spec)]
            if able and not mine[name]:
                self._owner[min(able, key=lambda gpu: len(self._owner[gpu]))].append(name)

    def _make_room(self, view: View, device: Device, function: FunctionState) -> Iterator[Decision]:
        """A worker serves one model: another one means a new worker."""
        for one in list(device.instances):
            yield UnloadInstance(one)

    def _move(self, view: View) -> tuple[str, str] | None:
        """(model that takes a GPU, model that gives it), if there is one to move."""
        pressure: dict[str, float] = {}
        gpus: dict[str, int] = {}
        for name, function in view.functions.items():
            own = [view.devices[gpu] for gpu, owners in self._owner.items() if owners == [name]]
            if own:
                gpus[name] = len(own)
                pressure[name] = self._look_at(view, name, function) * request_us(view, name, own[0]) / len(own)
        givers = [name for name, count in gpus.items() if count > 1]
        if not givers:
            return None
        taker, giver = max(pressure, key=lambda name: pressure[name]), min(givers, key=lambda name: pressure[name])
        after = pressure[giver] * gpus[giver] / (gpus[giver] - 1)
        if pressure[taker] <= self.ratio * pressure[giver] or after >= pressure[taker]:
            return None
        return taker, giver

    def _look_at(self, view: View, name: str, function: FunctionState) -> float:
        count, at_us = self._seen.get(name, (0, 0))
        span_us = view.now_us - at_us
        if span_us >= self.period_us:
            fresh = (function.arrivals.count - count) / span_us
            self._rate[name] = 0.5 * (self._rate.get(name, fresh) + fresh)
            self._seen[name] = (function.arrivals.count, view.now_us)
        return self._rate.get(name, 0.0)
