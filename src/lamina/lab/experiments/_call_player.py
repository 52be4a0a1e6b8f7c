"""Player of a list of calls through the simulator, where a scenario's own loads are not enough.

Experiments that follow a printed trace need calls at given instants and loads that take exactly as long as printed;
others give each call a cost limit. Controller, executor and loop are those of `sim.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Action, Load, Reject, Reply, StartBatch
from lamina.core.events import BatchFinished, Event
from lamina.drivers.driver import Ending, EventObserver
from lamina.drivers.virtual import simulate
from lamina.predict.profile_table import ProfileTable
from lamina.sim.cost_accounting import CostAccounting
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.sim.run import build_controller, random_stream, setup_events
from lamina.sim.scenario import Scenario
from lamina.types import Call


@dataclass(slots=True)
class FirstStart:
    """One call's first batch. `start_us` is when work for it began: the load, if it was made to wait for one of its own."""

    call: Call
    function: str
    device: str
    start_us: int
    cold: bool

    @property
    def wait_us(self) -> int:
        return self.start_us - self.call.arrived_us


@dataclass(slots=True)
class PlayedCalls:
    """Calls as they were played: how each ended, and when and where its first batch started."""

    ledger: CostAccounting
    ended_us: int = 0
    calls: dict[str, Call] = field(default_factory=dict)
    endings: dict[str, Ending] = field(default_factory=dict)
    starts: dict[str, FirstStart] = field(default_factory=dict)
    loads: int = 0
    _loading: dict[str, int] = field(default_factory=dict)  #: instance that has served no call yet -> when its load began
    _booked: dict[int, StartBatch] = field(default_factory=dict)  #: by the batch they are behind

    @property
    def replies(self) -> list[Reply]:
        return [ending for ending in self.endings.values() if isinstance(ending, Reply)]

    @property
    def refused(self) -> int:
        return sum(isinstance(ending, Reject) for ending in self.endings.values())

    @property
    def cost(self) -> float:
        """Of everything that was held, as in `sim.summary`."""
        return sum(account.cost(self.ended_us) for account in self.ledger.all_devices())

    @property
    def bill(self) -> dict[str, float]:
        """The three prices of `lab.comparison`."""
        devices = self.ledger.all_devices()
        offered_us = max((call.arrived_us for call in self.calls.values()), default=0)
        rent = sum(account.occupied_cost(self.ended_us) for account in devices) * offered_us / max(1, self.ended_us)
        return {"used": sum(account.used_cost() for account in devices), "held": self.cost, "rent": rent}

    def on_action(self, now_us: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, BatchFinished) and event.batch_id in self._booked:
            self._begin(now_us, self._booked.pop(event.batch_id))
        for action in actions:
            if isinstance(action, Load):
                self.loads += 1
                self._loading[action.instance] = now_us
            elif isinstance(action, StartBatch):
                if action.behind:
                    self._booked[action.behind] = action
                else:
                    self._begin(now_us, action)

    def _begin(self, now_us: int, action: StartBatch) -> None:
        load_us = self._loading.pop(action.instance, None)
        for job in action.jobs:
            call = self.calls[job.call_id]
            start_us = now_us if load_us is None else max(load_us, call.arrived_us)
            started = FirstStart(call, action.function, action.device, start_us, load_us is not None)
            self.starts.setdefault(call.id, started)


def play_calls(
    scenario: Scenario,
    calls: Iterable[Call],
    *,
    load_noise: float = 0.0,
    check: bool = False,
    watch: EventObserver | None = None,
    on_end: Callable[[int, Ending], None] | None = None,
) -> PlayedCalls:
    """Until every call has ended. The scenario's own loads are left aside."""
    controller = build_controller(scenario)
    table = ProfileTable(list(scenario.profiles), margin=scenario.margin)
    world = HardwareModel(
        table, random_stream(scenario.seed, "world"), scenario.noise, load_noise, interference=scenario.interference
    )
    executor = SimulatedExecutor(
        controller, world, seed=scenario.seed, templates=scenario.templates, spare_devices=dict(scenario.spare_devices)
    )
    played = PlayedCalls(executor.accounting)

    def noted(calls: Iterable[Call]) -> Iterator[Call]:
        for call in calls:
            played.calls[call.id] = call
            yield call

    def ended(now_us: int, ending: Ending) -> None:
        assert ending.call_id not in played.endings, f"{ending.call_id} ended twice"
        played.endings[ending.call_id] = ending
        if on_end is not None:
            on_end(now_us, ending)

    def watched(now_us: int, event: Event, actions: list[Action]) -> None:
        if check:
            controller.state.check()
        played.on_action(now_us, event, actions)
        if watch is not None:
            watch(now_us, event, actions)

    played.ended_us = simulate(controller, executor, noted(calls), setup=setup_events(scenario), on_end=ended, watch=watched)
    assert played.endings.keys() == played.calls.keys(), "a call never ended"
    controller.state.check_quiet()
    return played
