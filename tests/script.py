"""Script of events for tests that read like the specification: a world in a few words.

    script.given(FunctionSpec(name="f"), takes={"f": 900})
    assert script.at(0).arrives("c1", within_us=500) == [Reject("c1", "deadline", ...)]

`given` says what there is. `at` moves the clock; ticks that were asked for come on the way, and so do the ends of
batches and loads where the script plays the engine (`given(engine=True)`). Everything that is said is recorded, the
controller's invariants and an independent ledger are checked after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.policy import DispatchRole
from lamina.core.workflow.flow import Flow
from lamina.drivers.virtual import DeviceChange, Scheduled, VirtualDriver
from lamina.policies import fifo, new_controller
from lamina.types import NEVER_US, Call, DeviceSpec, FunctionSpec, SliceLimits
from tests.core.ledger import Ledger

Takes = int | tuple[int, int] | Callable[[int, int], int]
"""Of one batch: always the same, or (fixed, per job), or a function of batch size and units."""

GPU = DeviceSpec(id="gpu0", kind="gpu", units=1, memory_mib=1_000)
BIG_GPU = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))


def a_function(name: str = "f", *, max_batch: int = 1, gpu: str = "must", share: float = 1.0, **more: object) -> FunctionSpec:
    return FunctionSpec(name=name, max_batch=max_batch, gpu=gpu, share=share, **more)  # type: ignore[arg-type]


@dataclass
class Known:
    """Predictor with the latencies and load times that the script says."""

    takes: dict[str, Takes]
    loads: dict[str, int]
    seen: list[tuple[str, int, int]] = field(default_factory=list)

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        takes = self.takes.get(function, 0)
        if callable(takes):
            return takes(batch, units)
        return takes if isinstance(takes, int) else takes[0] + takes[1] * batch

    def load_us(self, function: str, kind: str) -> int:
        return self.loads.get(function, 0)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        self.seen.append((function, batch, device_us))

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        self.seen.append((function, 0, load_us))

    def relax(self, function: str) -> None:
        pass


class Script:
    """The virtual driver with an engine that can be switched on, under the eyes of the ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.said: list[tuple[int, do.Action]] = []
        self.engine = False
        self.fate: Callable[[do.StartBatch], ev.Event | None] = self._finish
        self.answers: dict[str, list[int]] = {}  #: to questions, by node; 1 where nothing is said
        self._begun: set[int] = set()
        self._last: list[do.Action] = []

    # ---------------------------------------------------------------------- given

    def given(
        self,
        *functions: FunctionSpec,
        flows: Iterable[Flow] = (),
        devices: Iterable[DeviceSpec] = (GPU,),
        policy: DispatchRole | None = None,
        takes: dict[str, Takes] | None = None,
        loads: dict[str, int] | None = None,
        warm: bool = True,
        engine: bool = False,
    ) -> Script:
        """What there is. `warm`: one instance of each function stands already (on the first device that suits it)."""
        self.predictor = Known(takes or {}, loads or {})
        self.controller = new_controller(policy or fifo.Policy(), self.predictor)
        self.driver = VirtualDriver(self.controller, self, observers=[self._observe], on_end=lambda now_us, ending: None)
        for device in devices:
            self.tell(ev.DeviceJoined(device))
        warmed = tuple(_standing(spec) for spec in functions) if warm else functions
        self.tell(ev.Deployed(warmed, tuple(flows)))
        if warm:
            for instance in list(self.ledger.instances):
                self.tell(ev.InstanceReady(instance))
        self.engine = engine
        return self

    # ----------------------------------------------------------------------- acts

    @property
    def now_us(self) -> int:
        return self.driver.now_us()

    def at(self, now_us: int) -> Script:
        """Let time pass until then; what is due on the way happens."""
        self.driver.run(until_us=now_us)
        return self

    def oversleep(self, until_us: int) -> Script:
        """Let time pass, and lose the ticks that were due."""
        self.driver.drop_ticks(until_us)
        return self.at(until_us)

    def tell(self, event: ev.Event) -> list[do.Action]:
        self.driver.post(event)
        return [action for action in self._last if not isinstance(action, do.WakeAt)]

    def _observe(self, now_us: int, event: ev.Event, actions: list[do.Action]) -> None:
        self._last = actions
        self.said += [(now_us, action) for action in actions]
        self.ledger.happened(event)
        if isinstance(event, ev.Tick):
            self.ledger.ticks = [at_us for at_us in self.ledger.ticks if at_us > now_us]
        self.ledger.asked(now_us, event, actions)
        self.ledger.check(now_us)
        self.controller.state.check()
        if self.engine:  # batches that were booked begin when the one before them has ended
            for lease in self.ledger.batches.values():
                if lease.running and lease.action.behind and lease.action.batch_id not in self._begun:
                    self._begin(lease.action)

    def arrives(
        self, *names: str, target: str = "f", within_us: int = 0, expires_us: int = 0, priority: int = 0
    ) -> list[do.Action]:
        """Calls, all at this moment. `within_us` is the goal, and the end of all use unless `expires_us` says otherwise."""
        said: list[do.Action] = []
        for name in names:
            deadline_us = self.now_us + within_us if within_us else NEVER_US
            end_us = self.now_us + expires_us if expires_us else deadline_us
            call = Call(name, target, self.now_us, deadline_us, end_us, priority=priority)
            said += self.tell(ev.CallArrived(call))
        return said

    def finishes(self, batch_id: int = 0, took_us: int = 1_000, outcomes: tuple[ev.JobOutcome, ...] = ()) -> list[do.Action]:
        """This batch, or the one that has run longest."""
        return self.tell(ev.BatchFinished(batch_id or self.running[0].batch_id, took_us, outcomes))

    def ready(self, instance: str, load_us: int = 0) -> list[do.Action]:
        return self.tell(ev.InstanceReady(instance, load_us))

    def loses(self, instance: str, reason: str = "worker-lost") -> list[do.Action]:
        return self.tell(ev.InstanceLost(instance, reason))

    # --------------------------------------------------------------------- claims

    @property
    def batches(self) -> list[do.StartBatch]:
        """Every batch so far."""
        return [action for _, action in self.said if isinstance(action, do.StartBatch)]

    @property
    def sizes(self) -> list[int]:
        return [len(batch.jobs) for batch in self.batches]

    @property
    def served(self) -> list[tuple[str, ...]]:
        """The calls in each batch."""
        return [tuple(job.call_id for job in batch.jobs) for batch in self.batches]

    @property
    def running(self) -> list[do.StartBatch]:
        return [lease.action for lease in self.ledger.batches.values() if lease.running]

    @property
    def endings(self) -> dict[str, do.Reply | do.FailCall | do.Reject]:
        return {ending.call_id: ending for ending in self.ledger.endings}

    def ending(self, call_id: str) -> str:
        """In a word: "reply", or why not."""
        end = self.endings.get(call_id)
        if end is None:
            return "open"
        return "reply" if isinstance(end, do.Reply) else end.error if isinstance(end, do.FailCall) else end.reason

    def all(self, kind: type[do.Action]) -> list[tuple[int, do.Action]]:
        """When such actions were asked for, and which."""
        return [(at_us, action) for at_us, action in self.said if isinstance(action, kind)]

    # ----------------------------------------------------------------- the engine

    def before_event(self, now_us: int, event: ev.Event | DeviceChange) -> Scheduled:
        return ()

    def perform(self, now_us: int, action: do.Action) -> Scheduled:
        if not self.engine:
            return ()
        match action:
            case do.StartBatch() if not action.behind:
                self._begin(action)
            case do.Load():
                load_us = self.predictor.load_us(action.function, "")
                return [(now_us + load_us, ev.InstanceReady(action.instance, load_us))]
            case do.ResolveData():
                values = self.answers.get(action.node)
                value = int(action.stage == "begin")
                if values and action.stage == "begin":
                    value = values.pop(0)
                answer = ev.DataResolved(action.call_id, action.scope, action.node, value, execution_id=action.execution_id)
                return [(now_us, answer)]
            case do.Kill():
                return [(now_us, ev.InstanceLost(action.instance, action.reason))]
        return ()

    def _begin(self, batch: do.StartBatch) -> None:
        self._begun.add(batch.batch_id)
        end = self.fate(batch)
        if end is not None:
            self.driver.schedule(self.now_us + self._time_us(batch), end)

    def _finish(self, batch: do.StartBatch) -> ev.Event:
        return ev.BatchFinished(batch.batch_id, self._time_us(batch))

    def _time_us(self, batch: do.StartBatch) -> int:
        return self.predictor.latency_us(batch.function, "", len(batch.jobs), batch.mask.bit_count()) or 1_000


def _standing(spec: FunctionSpec) -> FunctionSpec:
    scale = msgspec.structs.replace(spec.scale, min=max(1, spec.scale.min))
    return msgspec.structs.replace(spec, scale=scale)
