"""Everything that can happen to a controller, in an order drawn from a seed.

`Chaos` plays client, engine and clock. After every event the controller's own invariants are checked, and the ledger's,
which knows nothing of the controller. `drain` then plays a world in which everything goes well: whatever was accepted
must end soon.

With `segments`, batches of functions without an SLO give way to others once their instance has been said to run in segments;
which functions have an SLO changes with every deployment.

With `adopts`, instances are found that were loaded under another controller, some of them still at work for it.

With `clients`, calls have all that a client may send with them: a tenant, a priority, a limit of cost, and the wish to survive
a restart. With `restarts`, the controller is lost at any moment, and another begins with what was on disk.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify
from typing import Any

from msgspec.structs import replace

from lamina import plugins, policies
from lamina.core import actions as do
from lamina.core import events as ev
from lamina.core.controller import Controller
from lamina.core.policy import DispatchRole
from lamina.core.workflow.flow import Choice, Each, Flow, Pass, Task
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.core.workflow.runs import WorkflowRun
from lamina.errors import NoCapacity
from lamina.policies import new_controller
from lamina.types import (
    NEVER_US,
    WHOLE_UNIT,
    Call,
    DeviceSpec,
    FunctionSpec,
    QuotaSpec,
    ScaleSpec,
    SliceLimits,
    Slo,
    Tenant,
    call_parts,
)
from tests.core import chaos_policy
from tests.core.chaos_flows import GUARDED_FLOWS
from tests.core.ledger import Ledger, Loaded

CALM_US = 10**9
"""The bad times end here; events before it come earlier, however long they last."""

MAX_EVENTS = 20_000
"""Of a world in which everything goes well, until its last call has ended."""

POLICIES = (*plugins.names("policies"), "chaos-arrival", "chaos-due")
"""Every policy there is: a new file is held to the same promises."""

QUICKER: dict[str, dict[str, object]] = {"aquatope": {"rounds": 2}}
"""How long one looks for the best plan is nothing to the promises here, and takes ten times the rest of it."""

FLOWS = (
    Flow("chain", {"a": Task("a", "f0", ("b",)), "b": Task("b", "f1", ("c",)), "c": Task("c", "f2")}, ("a",)),
    Flow(
        "diamond",
        {
            "a": Task("a", "f0", ("l", "r")),
            "l": Task("l", "f1", ("j",)),
            "r": Task("r", "f2", ("j",)),
            "j": Task("j", "f0", tokens_needed=2),
        },
        ("a",),
    ),
    Flow(
        "map",
        {"e": Each("e", Flow("body", {"x": Task("x", "f1")}, ("x",)), ("z",)), "z": Task("z", "f2")},
        ("e",),
    ),
    Flow(
        "deep",
        {
            "e": Each(
                "e",
                Flow(
                    "outer",
                    {
                        "i": Each("i", Flow("inner", {"p": Pass("p", ("t",)), "t": Task("t", "f3")}, ("p",)), ("u",)),
                        "u": Task("u", "f1"),
                    },
                    ("i",),
                ),
            )
        },
        ("e",),
    ),
    Flow(
        "choice",
        {
            "c": Choice("c", (("a",), ("b", "d"), ())),
            "a": Task("a", "f0", ("m",)),
            "b": Task("b", "f1", ("m",)),
            "d": Task("d", "f2"),
            "m": Pass("m", ("z",)),
            "z": Task("z", "f3"),
        },
        ("c",),
    ),
    Flow(
        "loop",
        {"a": Task("a", "f0", ("again",)), "again": Choice("again", (("a",), ("z",))), "z": Task("z", "f1")},
        ("a",),
    ),
    # two tokens reach an each, and a choice, that wait for one: both start twice, perhaps at the same time
    Flow(
        "twice",
        {
            "a": Task("a", "f0", ("e",)),
            "b": Task("b", "f1", ("e",)),
            "e": Each("e", Flow("body", {"x": Task("x", "f2")}, ("x",)), ("c",)),
            "c": Choice("c", (("z",), ())),
            "z": Pass("z"),
        },
        ("a", "b"),
    ),
    Flow("nothing", {"p": Pass("p", ("q",)), "q": Pass("q")}, ("p",)),
    Flow("empty-map", {"e": Each("e", Flow("body", {"p": Pass("p")}, ("p",)), ("q",)), "q": Pass("q")}, ("e",)),
    *GUARDED_FLOWS,
)


@dataclass
class Times:
    """A predictor that knows some functions and not others."""

    base_us: dict[str, int]
    per_job_us: int = 300
    load_us_: int = 20_000

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        base_us = self.base_us.get(function, 0) // max(1, cores)
        return base_us + self.per_job_us * batch + 500 // units if base_us else 0

    def load_us(self, function: str, kind: str) -> int:
        return self.load_us_ if function in self.base_us else 0

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        pass

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        pass

    def relax(self, function: str) -> None:
        pass


Question = tuple[str, int, str, int, str]
"""Call, scope, node, execution, stage. A loop asks it more than once."""


def question_of(asked: do.ResolveData) -> Question:
    return asked.call_id, asked.scope, asked.node, asked.execution_id, asked.stage


def make_policy(name: str, seed: int) -> DispatchRole:
    if name.startswith("chaos"):
        return chaos_policy.Policy(seed, "due" if name == "chaos-due" else "arrival", CALM_US)
    return policies.build(name, QUICKER.get(name))


@dataclass
class Chaos:
    """One world. `faults` is the share of steps that go wrong."""

    seed: int
    policy: str
    faults: float = 0.25
    late_ticks: bool = False
    crowd: bool = False  #: one small device and patient calls: everything is booked behind everything
    watched: bool = True  #: what is asked of a whole log needs no check at each of its moments
    clients: bool = False  #: calls have tenants, priorities, limits of cost, and may be durable
    restarts: bool = False  #: the controller may be lost
    segments: bool = False  #: batches of functions without an SLO come to give way to others
    adopts: bool = False  #: devices bring instances along
    rng: random.Random = field(init=False)
    log: list[tuple[int, ev.Event]] = field(default_factory=list)
    said: list[list[do.Action]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    now_us: int = 0
    calls: int = 0
    devices: int = 0
    ended: list[int] = field(default_factory=list)  #: batches that are over, for answers that come twice
    dying: list[str] = field(default_factory=list)  #: instances to be killed
    on_disk: dict[str, list[JournalEntry]] = field(default_factory=dict)  #: of durable calls, what a restart will find
    lost: list[str] = field(default_factory=list)  #: calls that were open when the controller was lost, and not durable
    answers: dict[Question, list[ev.DataResolved]] = field(default_factory=dict)  #: of durable calls: asked again, the same
    asked_again: Counter[Question] = field(default_factory=Counter)  #: since the last restart

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.controller = self.fresh()
        for _ in range(1 if self.crowd else self.rng.randint(1, 3)):
            self.tell(ev.DeviceJoined(self.a_device()))
        self.deploy_all()

    def fresh(self) -> Controller:
        rng = random.Random(self.seed)
        base_us = {f"f{i}": rng.randint(500, 20_000) for i in range(4) if rng.random() < 0.8}
        return new_controller(make_policy(self.policy, self.seed), Times(base_us))

    # ------------------------------------------------------------------ the world

    def tell(self, event: ev.Event, now_us: int | None = None) -> list[do.Action]:
        """One event through the controller, with every check there is."""
        at_us = self.now_us if now_us is None else now_us
        self.log.append((at_us, event))
        actions = self.controller.handle(at_us, event)
        self.ledger.happened(event)
        self.said.append(actions)
        self.ledger.asked(self.controller.now_us, event, actions)
        self.dying += [action.instance for action in actions if isinstance(action, do.Kill)]
        if self.watched:
            self.ledger.check(self.controller.now_us)
            self.controller.state.check()
            self.check_holds()
            assert self.controller.state.runs.keys() == self.ledger.open.keys(), "the ledger counts other calls"
        return actions

    def check_holds(self) -> None:
        """A deferred function will be asked about again in time: a tick is on its way that does not come after it."""
        for name, held in self.controller.state.deferred.items():
            if held.until_us < NEVER_US:
                assert min(self.ledger.ticks) <= max(held.until_us, self.controller.now_us + 1), f"{name} is overslept"

    def a_device(self) -> DeviceSpec:
        rng = self.rng
        self.devices += 1
        if self.crowd:
            limits = SliceLimits(batches_per_instance=rng.randint(1, 2))
            return DeviceSpec(id=f"d{self.devices}", kind="k", units=rng.randint(2, 4), memory_mib=500, limits=limits)
        limits = rng.choice(
            (
                SliceLimits(batches_per_instance=rng.randint(0, 2)),
                SliceLimits(batches_per_instance=rng.randint(0, 2)),
                SliceLimits(sizes=(1, 2, 4), aligned=True, batches_per_instance=rng.randint(0, 1)),
                SliceLimits(sizes=(2, 3), batches_per_instance=rng.randint(0, 2)),
                SliceLimits(sizes=(1, 2, 4), aligned=True, per_batch=False),
            )
        )
        return DeviceSpec(
            id=f"d{self.devices}",
            kind="k",
            units=rng.randint(max(limits.sizes, default=1), 8),
            memory_mib=rng.randint(100, 400),
            family=rng.choice(("gpu", "gpu", "cpu")),
            limits=limits,
            cores=rng.choice((0, 0, 3)),
            link_mib_per_s=rng.choice((0.0, 0.0, 100.0)),
            link_latency_us=rng.choice((0, 200)),
        )

    def a_function(self, name: str) -> FunctionSpec:
        spec = self.some_function(name)
        slo_us = self.rng.choice((50_000, 400_000))
        return replace(spec, slo=Slo(latency_us=slo_us)) if self.segments and self.rng.random() < 0.5 else spec

    def some_function(self, name: str) -> FunctionSpec:
        rng = self.rng
        if self.crowd:
            return FunctionSpec(
                name=name,
                max_batch=rng.choice((1, 2, 4)),
                gpu="may",
                share=rng.choice((0.25, 0.5, 0.5)),
                idempotent=rng.random() < 0.9,
                scale=ScaleSpec(max=rng.randint(1, 2)),
                home=rng.random() < 0.1,
            )
        home = rng.random() < 0.3
        return FunctionSpec(
            name=name,
            max_batch=rng.choice((1, 2, 4, 8)),
            cores=rng.randint(1, 3),
            share=rng.choice((0.25, 0.5) if home else (0.0, 0.25, 0.5, 1.0)),
            gpu=rng.choice(("may", "may", "may", "must", "no")),
            memory_mib=rng.randint(0, 100),
            home=home,
            lend=rng.random() < 0.6,
            quota=QuotaSpec(limit=rng.choice((1.0, 1.0, 0.3, 0.05)), window_us=40_000),
            scale=ScaleSpec(
                min=int(rng.random() < 0.2), max=1 if home else rng.randint(1, 4), idle_us=rng.choice((10_000, 1_000_000))
            ),
            idempotent=rng.random() < 0.8,
            max_queue=rng.choice((5, 10_000)),
            concurrency=(at_once := rng.choice((1, 1, 3, 40))),
            parts=WHOLE_UNIT if home else call_parts(rng.choice((1.0, 1.0, 0.25)), at_once),
        )

    # ------------------------------------------------------------------- one step

    def step(self) -> None:
        usual = {self.arrive: 5, self.finish: 4, self.load: 4, self.answer: 3, self.wait: 3, self.die: 1, self.beat: 1}
        wrong = {
            self.lose_instance: 4,
            self.lose_device: 1,
            self.join_device: 2,
            self.cancel: 2,
            self.fail_batch: 2,
            self.say_twice: 2,
            self.say_nonsense: 3,
            self.redeploy: 1,
            self.step_back: 1,
        }
        if self.clients:
            usual |= {self.write: 4, self.set_limits: 1}
        if self.segments:
            usual |= {self.cut: 2}
        if self.adopts:
            usual |= {self.find: 2}
        if self.restarts:
            wrong |= {self.restart: 2}
        happens = wrong if self.rng.random() < self.faults else usual
        self.rng.choices(list(happens), list(happens.values()))[0]()

    def arrive(self) -> None:
        rng = self.rng
        more = False
        for _ in range(rng.choice((1, 1, 2, 9))):
            self.calls += 1
            target = rng.choice([f"f{i}" for i in range(4)] + [flow.name for flow in FLOWS])
            patience_us = rng.choice((3 * CALM_US,) if self.crowd else (0, 8_000, 60_000, 500_000, 3 * CALM_US))
            deadline_us = self.now_us + patience_us
            expires_us = deadline_us + rng.choice((0, 0, 100_000))
            name = f"c{self.calls}" if rng.random() > 0.02 else f"c{max(1, self.calls - 3)}"
            more = rng.random() < 0.3
            call = Call(name, target, self.now_us, deadline_us, expires_us)
            self.tell(ev.CallArrived(self.a_client_says(call) if self.clients else call, more))
            if name in self.ledger.open and self.ledger.open[name].durable:
                self.on_disk.setdefault(name, [])
        if more and rng.random() < 0.7:  # else whatever happens next is the moment to decide
            self.tell(ev.ArrivalsDrained())

    def a_client_says(self, call: Call) -> Call:
        rng = self.rng
        return replace(
            call,
            tenant=rng.choice(("", "acme", "evil", "evil")),
            priority=rng.choice((0, 0, 0, 1, -5, 9)),
            # in time is the first wish: for company that makes it cheaper, a patient call waits for ever
            cost_limit=rng.choice((0.0, 0.0, 1e-12, 1e-4, 1.0)) if call.deadline_us < CALM_US else 0.0,
            size_bytes=rng.choice((0, 100, 10**7)),
            durable=rng.random() < 0.4,
        )

    def set_limits(self) -> None:
        rng = self.rng
        limits = Tenant(
            name=rng.choice(("acme", "evil", "other")),
            weight=rng.choice((1.0, 5.0)),
            rate_per_s=rng.choice((0.0, 0.0, 3.0, 100.0)),
            burst=rng.choice((0.0, 20.0)),
            concurrent=rng.choice((0, 0, 2, 20)),
            unit_s_per_day=rng.choice((0.0, 0.0, 0.05)),
        )
        self.tell(ev.TenantUpdated(limits, rng.choice((0.0, 0.0, 1e3))))

    def running(self) -> list[int]:
        return [batch_id for batch_id, lease in self.ledger.batches.items() if lease.running]

    def finish(self) -> None:
        if running := self.running():
            self.finish_one(self.rng.choice(running))

    def finish_one(self, batch_id: int, clean: bool = False) -> None:
        jobs = self.ledger.batches[batch_id].action.jobs
        if not jobs:  # what was abandoned has no results
            self.ended.append(batch_id)
            self.tell(ev.BatchFailed(batch_id, "abandoned"))
            return
        outcomes: tuple[ev.JobOutcome, ...] = ()
        if not clean and self.rng.random() < 0.2:
            names = ("", "Boom", "Other", "States.Timeout")
            told = [(self.rng.random() < 0.7, self.rng.choice(names)) for _ in jobs]
            outcomes = tuple(
                ev.JobOutcome(ok, "boom", name, not ok and name == "Other", () if ok else self.lost_steps(job), ok and not name)
                for (ok, name), job in zip(told, jobs, strict=True)
            )
        self.ended.append(batch_id)
        self.tell(ev.BatchFinished(batch_id, self.rng.randint(1, 20_000), outcomes))

    def lost_steps(self, job: do.JobRef) -> tuple[str, ...]:
        """Steps whose results a job needs, and that have gone with a machine; also some that it cannot need."""
        run = self.controller.state.runs.get(job.call_id)
        if not isinstance(run, WorkflowRun) or job.scope not in run.scopes or self.rng.random() < 0.5:
            return ()
        scope = run.scopes[job.scope]
        names = sorted({*scope.flow.nodes, *(scope.parent.flow.nodes if scope.parent is not None else ())} - {job.node})
        return tuple(self.rng.sample(names, min(len(names), self.rng.choice((1, 1, 2)))))

    def load(self) -> None:
        coming = [loaded.id for loaded in self.ledger.instances.values() if not loaded.ready]
        if coming:
            name = self.rng.choice(coming)
            abandoned = self.a_batch_left() if name in self.ledger.adopted else None
            self.tell(ev.InstanceReady(name, self.rng.choice((0, 5_000)), abandoned=abandoned))
            if self.segments and self.rng.random() < 0.7:  # while the function was loaded somewhere else, say
                self.tell(ev.InstanceSegmented(name, 1_000))

    def find(self) -> None:
        """A device had an instance loaded when it joined; of use or not."""
        if not self.ledger.devices:
            return
        rng, device = self.rng, self.rng.choice(list(self.ledger.devices.values()))
        name = rng.choice(list(self.ledger.functions))
        spec = self.ledger.functions[name]
        has_home = spec.home or not device.limits.per_batch
        mask = ((1 << spec.units_on(device)) - 1) << rng.choice((0, 0, 2)) if has_home else 0
        self.ledger.instances["found"] = Loaded("found", name, device.id, 0)  # until it is adopted, or unloaded
        actions = self.tell(ev.InstanceFound("found", device.id, name, mask=mask))
        assert self.ledger.instances.pop("found", None) is None or any(isinstance(one, do.Load) and one.adopts for one in actions)

    def a_batch_left(self) -> ev.AbandonedBatch | None:
        """What an instance may still be at, or say to be."""
        rng = self.rng
        mask = rng.choice((0, 1, 2, 3, 5, 15, 2**70))
        times = rng.choice((0, 900, 40_000)), rng.choice((0, 2_000, 10**12))
        return ev.AbandonedBatch(mask, *times, rng.choice((0, 1, 99))) if rng.random() < 0.7 else None

    def cut(self) -> None:
        """Graphs of an instance have been cut, or a batch has come to the end of a segment. An executor may say so of what has
        gone, or does not give way."""
        if self.rng.random() < 0.3:
            batch_id = self.rng.choice([*self.ledger.batches, 10**6])
            self.tell(ev.BatchPaused(batch_id, self.rng.choice((0, 3)), self.rng.choice((0, 400, 90_000))))
            return
        known = [*self.ledger.instances, "nobody"]
        self.tell(ev.InstanceSegmented(self.rng.choice(known), self.rng.choice((300, 1_000))))

    def die(self) -> None:
        """What is to be killed dies sooner or later."""
        if self.dying:
            self.tell(ev.InstanceLost(self.dying.pop(0), "hung"))

    def answer(self) -> None:
        if self.ledger.questions:
            at = self.rng.randrange(len(self.ledger.questions))
            self.answer_one(self.ledger.questions.pop(at), self.rng.random() < 0.05)

    def answer_one(self, asked: do.ResolveData, wrong: bool = False) -> None:
        # "again" and "c" are choices; the loop must not go on for ever
        value = self.rng.choice((0, 1)) if asked.node in ("again", "c") else self.rng.choice((0, 1, 1, 2, 5))
        if asked.stage != "begin":
            value = self.rng.choice((0, 0, 0, 1))
        limits = self.rng.choice(((), (), (2, 1), (1, 0))) if asked.node == "e" else ()
        error = self.rng.choice(("bad-items", "Bad", "bad-value")) if wrong else ""
        self.say(asked, ev.DataResolved(asked.call_id, asked.scope, asked.node, value, error, asked.execution_id, limits))

    def say(self, asked: do.ResolveData, answer: ev.DataResolved) -> None:
        """A run that is asked again, after a restart, is answered as it was: data follows from what is on disk."""
        if asked.call_id in self.on_disk:
            known, turn = self.answers.setdefault(question_of(asked), []), self.asked_again[question_of(asked)]
            self.asked_again[question_of(asked)] += 1
            if turn == len(known):
                known.append(answer)
            answer = known[turn]
        self.tell(answer)

    def write(self) -> None:
        """The store has written the next entries: they take effect."""
        for _ in range(min(len(self.ledger.journal), self.rng.choice((1, 1, 5)))):
            self.write_one()

    def write_one(self) -> None:
        asked = self.ledger.journal.popleft()
        self.on_disk[asked.call_id].append(asked.entry)
        self.tell(ev.Journaled(asked.call_id, asked.entry))

    def beat(self) -> None:
        """A heartbeat: of a job that runs, or of one that is not waited for."""
        if running := self.running():
            jobs = self.ledger.batches[self.rng.choice(running)].action.jobs
            job = self.rng.choice(jobs or (do.JobRef(0, "never", 0, ""),))
            self.tell(ev.Heartbeat(job.call_id, job.id))

    def wait(self) -> None:
        step_us = self.rng.choice((0, 1, 50, 900, 5_000, 40_000, 300_000))
        self.go_to(min(self.now_us + step_us, CALM_US - 1))

    def go_to(self, at_us: int) -> None:
        """Let time pass; ticks come when they are due, or all at the end if the machine is slow."""
        ticks = self.ledger.ticks
        while ticks and min(ticks) <= at_us:
            due_us = min(ticks)
            ticks.remove(due_us)
            self.now_us = max(self.now_us, at_us if self.late_ticks else due_us)
            self.tell(ev.Tick())
        self.now_us = max(self.now_us, at_us)

    # -------------------------------------------------------------------- trouble

    def restart(self) -> None:
        """The controller is lost with all it knew, and so are the calls that are not durable; another one takes over.

        Of the entries that were on their way to the disk the first ones may have got there, without the old one knowing."""
        for _ in range(self.rng.randint(0, len(self.ledger.journal))):
            asked = self.ledger.journal.popleft()
            self.on_disk[asked.call_id].append(asked.entry)
        left = {call_id: call for call_id, call in self.ledger.open.items() if call.durable}
        functions, devices = self.ledger.functions, self.ledger.devices
        self.lost += self.ledger.open.keys() - left.keys()
        self.ledger = Ledger(endings=self.ledger.endings)
        self.ended, self.dying = [], []
        self.asked_again.clear()
        self.controller = self.fresh()
        for device in devices.values():
            self.tell(ev.DeviceJoined(device))
        self.deploy(ev.Deployed(tuple(functions.values()), FLOWS if len(functions) == 4 else ()))
        if not self.ledger.functions:
            self.deploy_all()
        for call_id, call in left.items():
            self.tell(ev.CallRecovered(call))
            self.answer_as_before(call_id)
            for entry in tuple(self.on_disk[call_id]):
                self.tell(ev.Journaled(call_id, entry))
                self.answer_as_before(call_id)
            self.tell(ev.ReplayDone(call_id))

    def answer_as_before(self, call_id: str) -> None:
        again = True
        while again:
            mine = [asked for asked in self.ledger.questions if asked.call_id == call_id]
            known = [a for a in mine if self.asked_again[question_of(a)] < len(self.answers.get(question_of(a), ()))]
            again = bool(known)
            for asked in known:
                self.ledger.questions.remove(asked)
                self.say(asked, ev.DataResolved(call_id, asked.scope, asked.node))

    def lose_instance(self) -> None:
        if self.ledger.instances:
            busy = [lease.action.instance for lease in self.ledger.batches.values()]
            name = self.rng.choice(busy * 3 + list(self.ledger.instances))
            self.ended += [b for b, lease in self.ledger.batches.items() if lease.action.instance == name]
            self.tell(ev.InstanceLost(name))

    def lose_device(self) -> None:
        if self.ledger.devices and self.rng.random() < 0.4:
            name = self.rng.choice(list(self.ledger.devices))
            self.ended += [b for b, lease in self.ledger.batches.items() if lease.action.device == name]
            self.tell(ev.DeviceLost(name))

    def join_device(self) -> None:
        if len(self.ledger.devices) < 3:
            self.tell(ev.DeviceJoined(self.a_device()))

    def cancel(self) -> None:
        if self.ledger.open:
            self.tell(ev.CallCancelled(self.rng.choice(list(self.ledger.open))))

    def fail_batch(self) -> None:
        if self.ledger.batches:
            batch_id = self.rng.choice(list(self.ledger.batches))
            self.ended.append(batch_id)
            self.tell(ev.BatchFailed(batch_id, "out-of-memory"))

    def say_twice(self) -> None:
        if self.ended:
            batch_id = self.rng.choice(self.ended)
            self.tell(self.rng.choice((ev.BatchFinished(batch_id, 77), ev.BatchFailed(batch_id, "again"))))
        if self.log:
            _, event = self.rng.choice(self.log)
            if isinstance(event, ev.DataResolved | ev.InstanceLost | ev.DeviceJoined | ev.InstanceReady):
                self.tell(event)

    def say_nonsense(self) -> None:
        nonsense: list[ev.Event] = [
            ev.BatchFinished(10**9, 5),
            ev.BatchFailed(10**9, "?"),
            ev.InstanceReady("nobody"),
            ev.InstanceLost("nobody"),
            ev.DeviceLost("nothing"),
            ev.CallCancelled("never"),
            ev.DataResolved("never", 0, "x", 3),
            ev.Heartbeat("never", 5),
            ev.CallArrived(Call("lost", "no-such-target", self.now_us)),
            ev.Tick(),
        ]
        booked = [batch_id for batch_id, lease in self.ledger.batches.items() if not lease.running]
        if booked:  # its end overtakes that of the one before it
            self.ended.append(self.rng.choice(booked))
            nonsense += [ev.BatchFinished(self.ended[-1], 5)] * 4
        if self.running():  # a worker that cannot count, or whose clock is broken
            batch_id = self.rng.choice(self.running())
            self.ended.append(batch_id)
            nonsense.append(ev.BatchFinished(batch_id, -5, (ev.JobOutcome(),) * self.rng.choice((1, 3, 50))))
        if self.ledger.questions and self.ledger.questions[-1].call_id not in self.on_disk:
            asked = self.ledger.questions[-1]
            nonsense.append(ev.DataResolved(asked.call_id, asked.scope, asked.node, self.rng.choice((-1, 10**9))))
        self.tell(self.rng.choice(nonsense))

    def redeploy(self) -> None:
        if self.ledger.functions:
            self.deploy(ev.Deployed((self.a_function(f"f{self.rng.randrange(4)}"),), (self.rng.choice(FLOWS),)))
        else:
            self.deploy_all()

    def deploy_all(self) -> None:
        functions = tuple(self.a_function(f"f{i}") for i in range(4))
        self.deploy(ev.Deployed(functions, FLOWS))
        if not self.ledger.functions:  # less is asked for, and not that all of a workflow be together
            modest = tuple(replace(spec, gpu="may", share=0.25, cores=1, memory_mib=spec.memory_mib // 4) for spec in functions)
            self.deploy(ev.Deployed(modest))
            if self.ledger.functions:
                self.deploy(ev.Deployed((), FLOWS))

    def deploy(self, event: ev.Deployed) -> None:
        """A policy may refuse it for want of room. Then it has not happened: nothing has changed, and a replay that does
        not know of it goes on as this one does."""
        specs, flows = dict(self.ledger.functions), dict(self.controller.flows)
        try:
            self.tell(event)
        except NoCapacity:
            self.log.pop()
            assert {name: function.spec for name, function in self.controller.state.functions.items()} == specs
            assert self.controller.flows == flows
            self.controller.state.check()
            self.tell(ev.Tick())

    def step_back(self) -> None:
        self.tell(ev.Tick(), max(0, self.now_us - self.rng.randint(1, 5_000_000)))

    # ------------------------------------------------------------------------ end

    def drain(self) -> int:
        """All goes well from now on; returns how long it took until the last call had ended."""
        self.now_us = max(self.now_us, CALM_US)
        heapify(self.ledger.ticks)
        for name, family in (("cpu", "cpu"), ("gpu-1", "gpu"), ("gpu-2", "gpu"), ("gpu-3", "gpu")):
            spec = DeviceSpec(id=f"last-{name}", kind="k", units=8, memory_mib=4_000, family=family)
            self.tell(ev.DeviceJoined(spec))
        began_us, began = self.now_us, len(self.log)
        while self.ledger.open or self.ledger.batches:
            busy = self.go_well()
            if not busy:
                self.go_to(min(self.ledger.ticks))
            assert self.now_us - began_us < CALM_US, f"stuck: {sorted(self.ledger.open)}"
            assert len(self.log) - began < MAX_EVENTS, f"busy without an end: {sorted(self.ledger.open)[:9]}"
        self.controller.state.check_quiet()
        return self.now_us - began_us

    def go_well(self) -> bool:
        """One thing that was asked for is done; False if there was none."""
        if self.dying:
            self.die()
            return True
        for loaded in list(self.ledger.instances.values()):
            if not loaded.ready:
                self.tell(ev.InstanceReady(loaded.id, 1_000))
                return True
        if self.ledger.questions:
            asked = self.ledger.questions.pop()
            value = int(asked.stage == "begin")
            self.say(asked, ev.DataResolved(asked.call_id, asked.scope, asked.node, value, execution_id=asked.execution_id))
            return True
        if self.ledger.journal:
            self.write_one()
            return True
        if running := self.running():
            self.go_to(self.now_us + 1_000)
            if running[0] in self.ledger.batches:
                self.finish_one(running[0], clean=True)
            return True
        return False


def play(
    seed: int,
    policy: str,
    steps: int,
    *,
    faults: float = 0.25,
    late_ticks: bool = False,
    crowd: bool = False,
    watched: bool = True,
    clients: bool = False,
    restarts: bool = False,
    segments: bool = False,
    adopts: bool = False,
) -> Chaos:
    world = Chaos(seed, policy, faults, late_ticks, crowd, watched, clients, restarts, segments, adopts)
    for _ in range(steps):
        world.step()
    return world


def world_of(seed: int) -> dict[str, Any]:
    """What a seed stands for: `play(**world_of(seed))`."""
    rng = random.Random(seed)
    clients = rng.random() < 0.7
    return {
        "seed": seed,
        "policy": rng.choice(POLICIES),
        "steps": rng.choice((80, 40, 20, 10, 5)),
        "faults": rng.choice((0.0, 0.15, 0.3, 0.6)),
        "late_ticks": rng.random() < 0.5,
        "crowd": rng.random() < 0.5,
        "clients": clients,
        "restarts": clients and rng.random() < 0.6,
    }


def preempting_world_of(seed: int) -> dict[str, Any]:
    """Likewise, where batches give way to others. Most have a policy that makes use of it."""
    rng = random.Random(f"preempting/{seed}")
    usual = ("fifo", "edf", "frontier", "chaos-arrival", "chaos-due")
    return world_of(seed) | {"segments": True} | ({"policy": rng.choice(usual)} if rng.random() < 0.8 else {})


def adopting_world_of(seed: int) -> dict[str, Any]:
    """Likewise, where instances are found that were loaded, and are at work, under another controller. With policies of servers:
    the published ones keep books of their own, and run in the simulator alone."""
    rng = random.Random(f"adopting/{seed}")
    policy = rng.choice(("fifo", "edf", "frontier", "chaos-arrival", "chaos-due"))
    return world_of(seed) | {"adopts": True, "policy": policy, "segments": rng.random() < 0.3, "faults": rng.choice((0.15, 0.3))}


MAX_TICKS = 2_000
"""Of a thousand worlds the one with most has 350; where a policy asks to be woken in a microsecond, again and again, 90,000."""


def ends_in_quiet_with_one_ending_for_each_call(seed: int, world_of: Callable[[int], dict[str, Any]] = world_of) -> Chaos:
    """One world: every invariant after every event, and every call that was accepted ends once, those of a lost controller too
    if they are durable."""
    chaos = play(**world_of(seed))
    chaos.drain()
    assert not chaos.ledger.open, f"seed {seed}: accepted and never answered"
    ends = Counter(ending.call_id for ending in chaos.ledger.endings)
    arrived = Counter(event.call.id for _, event in chaos.log if isinstance(event, ev.CallArrived))
    assert ends + Counter(chaos.lost) == arrived, f"seed {seed}: an ending too many, or one that is missing"
    if world_of(seed)["policy"] in ("fifo", "edf", "frontier"):
        ticks = sum(isinstance(event, ev.Tick) for _, event in chaos.log)
        assert ticks < MAX_TICKS, f"seed {seed}: woken {ticks} times"
    return chaos
