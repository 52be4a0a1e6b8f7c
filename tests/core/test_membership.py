"""Membership of devices: silence, draining, adoption. Every test drives a controller by events alone."""

from __future__ import annotations

from lamina import policies
from lamina.core.actions import Action, Kill, Load, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import (
    AbandonedBatch,
    BatchFailed,
    BatchFinished,
    CallArrived,
    Deployed,
    DeviceDraining,
    DeviceJoined,
    DeviceLost,
    DeviceSuspended,
    Event,
    InstanceFound,
    InstanceLost,
    InstanceReady,
    Tick,
)
from lamina.policies import new_controller
from lamina.predict.online import OnlinePredictor
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec


class World:
    """A controller whose time stands still unless it is told."""

    def __init__(self, *nodes: str, min_instances: int = 1, max_instances: int = 4, idempotent: bool = True) -> None:
        self.controller: Controller = new_controller(policies.build("edf"), OnlinePredictor())
        self.now_us = 0
        self.actions: list[Action] = []
        for node in nodes:
            self.join(node)
        scale = ScaleSpec(min=min_instances, max=max_instances)
        self.post(Deployed((FunctionSpec(name="f", scale=scale, max_batch=4, idempotent=idempotent),)))

    def join(self, node: str) -> None:
        self.post(DeviceJoined(DeviceSpec(id=f"{node}.cpu", kind="cpu", units=1, memory_mib=1_000, family="cpu", node=node)))

    def post(self, event: Event) -> list[Action]:
        self.now_us += 10
        found = self.controller.handle(self.now_us, event)
        self.controller.state.check()
        self.actions += found
        return found

    def taken(self, kind: type) -> list:
        found = [action for action in self.actions if type(action) is kind]
        self.actions = [action for action in self.actions if type(action) is not kind]
        return found

    def ready(self) -> list[Load]:
        loads = self.taken(Load)
        for load in loads:
            self.post(InstanceReady(load.instance))
        return loads

    def call(self, name: str) -> None:
        self.post(CallArrived(Call(name, "f", self.now_us)))


def test_a_silent_device_gets_nothing_new_until_it_is_back():
    world = World("a")
    world.ready()
    world.post(DeviceSuspended("a.cpu"))
    world.call("one")
    assert world.taken(StartBatch) == []
    world.post(DeviceSuspended("a.cpu", False))
    assert [batch.device for batch in world.taken(StartBatch)] == ["a.cpu"]


def test_what_runs_on_a_silent_device_is_waited_for():
    world = World("a", "b", min_instances=2)
    world.ready()
    world.call("one")
    (batch,) = world.taken(StartBatch)
    world.post(DeviceSuspended(batch.device))
    assert world.taken(StartBatch) == []
    world.post(BatchFinished(batch.batch_id, 5))
    assert not world.controller.state.runs


def test_a_silent_device_takes_no_instance():
    world = World("a", min_instances=0)
    world.post(DeviceSuspended("a.cpu"))
    world.join("b")
    world.call("one")
    assert [load.device for load in world.ready()] == ["b.cpu"]


def test_what_ran_on_a_lost_machine_runs_elsewhere_and_is_not_to_blame():
    world = World("a", "b", min_instances=2)
    world.ready()
    world.call("one")
    for _ in range(5):  # as often as a poisonous job would never be tried
        (batch,) = world.taken(StartBatch)
        other = "b" if batch.device == "a.cpu" else "a"
        world.post(DeviceLost(batch.device, blames=False))
        (again,) = world.taken(StartBatch)
        assert again.device == f"{other}.cpu"
        world.actions.append(again)
        world.join("b" if other == "a" else "a")
        world.ready()
    (last,) = world.taken(StartBatch)
    world.post(BatchFinished(last.batch_id, 5))
    assert not world.controller.state.runs


def test_what_must_not_run_twice_fails_with_its_machine():
    world = World("a", "b", min_instances=2, idempotent=False)
    world.ready()
    world.call("one")
    (batch,) = world.taken(StartBatch)
    world.post(DeviceLost(batch.device, blames=False))
    assert world.taken(StartBatch) == [] and not world.controller.state.runs


def test_an_instance_on_a_draining_device_leaves_when_its_successor_is_ready():
    world = World("a", "b")
    (first,) = world.ready()
    other = "b.cpu" if first.device == "a.cpu" else "a.cpu"
    world.post(DeviceDraining(first.device))
    (second,) = world.taken(Load)
    assert second.device == other and world.taken(Unload) == []
    world.call("one")
    assert [batch.device for batch in world.taken(StartBatch)] == [first.device]  # it serves as long as it is the only one
    world.post(InstanceReady(second.instance))
    world.call("two")
    assert [batch.device for batch in world.taken(StartBatch)] == [other]


def test_the_last_instance_in_use_stays_on_a_draining_device_that_has_no_other_beside_it():
    world = World("a")
    (first,) = world.ready()
    world.post(DeviceDraining("a.cpu"))
    assert world.taken(Unload) == []
    world.join("b")
    (second,) = world.ready()
    assert second.device == "b.cpu"
    assert [unload.instance for unload in world.taken(Unload)] == [first.instance]


def test_an_idle_instance_that_need_not_stand_leaves_a_draining_device_at_once():
    world = World("a", "b", min_instances=0)
    world.call("one")
    (first,) = world.ready()
    (batch,) = world.taken(StartBatch)
    world.post(BatchFinished(batch.batch_id, 5))
    world.post(DeviceDraining(first.device))
    assert [unload.instance for unload in world.taken(Unload)] == [first.instance]
    assert world.taken(Load) == []


def test_what_a_device_has_loaded_is_adopted_and_not_loaded_again():
    world = World(min_instances=0)
    world.join("a")
    world.post(InstanceFound("a:f-7", "a.cpu", "f"))
    (load,) = world.taken(Load)
    assert load.adopts == "a:f-7" and load.device == "a.cpu"
    world.post(InstanceReady(load.instance))
    world.call("one")
    assert [batch.instance for batch in world.taken(StartBatch)] == [load.instance]
    assert world.taken(Load) == []


def test_what_a_device_brings_along_takes_the_place_of_what_another_is_still_loading():
    """After a change of leader devices join one by one: the first is given what the second has."""
    world = World(max_instances=1)
    world.join("a")
    (begun,) = world.taken(Load)
    world.call("one")
    world.join("b")
    world.post(InstanceFound("b:f-7", "b.cpu", "f"))
    assert [unload.instance for unload in world.taken(Unload)] == [begun.instance]
    (load,) = world.taken(Load)
    assert load.adopts == "b:f-7"
    world.post(InstanceReady(load.instance))
    assert [batch.instance for batch in world.taken(StartBatch)] == [load.instance]


def test_what_was_adopted_a_moment_ago_gives_way_to_nothing():
    world = World(min_instances=2, max_instances=2)
    for node in ("a", "b", "c", "d"):
        world.join(node)
        if node != "a":
            world.post(InstanceFound(f"{node}:f-1", f"{node}.cpu", "f"))
    loads = world.taken(Load)
    gone = {unload.instance for unload in world.taken(Unload)}
    assert gone == {*(load.instance for load in loads if not load.adopts), "d:f-1"}
    assert [load.adopts for load in loads if load.adopts] == ["b:f-1", "c:f-1"]


def test_a_successor_of_a_draining_instance_gives_way_to_nothing():
    world = World("a", "b", max_instances=2)
    (first,) = world.ready()
    world.post(DeviceDraining(first.device))
    (successor,) = world.taken(Load)
    world.join("c")
    world.post(InstanceFound("c:f-1", "c.cpu", "f"))
    assert successor.instance not in [unload.instance for unload in world.taken(Unload)]


def test_what_is_of_no_use_is_unloaded_under_the_name_it_has():
    world = World("a")
    world.ready()
    for number, found in enumerate(
        [
            InstanceFound("a:other", "a.cpu", "other"),  # no such function
            InstanceFound("a:old", "a.cpu", "f", version="1"),  # of another version
            InstanceFound("a:gone", "b.cpu", "f"),  # no such device
            InstanceFound("a:home", "a.cpu", "f", mask=1),  # it has a slice of its own, which is not wanted
        ],
        1,
    ):
        world.post(found)
        assert [unload.instance for unload in world.taken(Unload)] == [found.name], number
    assert world.taken(Load) == []


def test_a_function_that_stands_twice_stands_on_two_machines():
    world = World("a", "b", "c", min_instances=2)
    assert len({load.device for load in world.ready()}) == 2


def test_what_stands_twice_on_one_machine_moves_apart_when_another_joins():
    world = World(min_instances=2)
    world.post(DeviceJoined(DeviceSpec(id="a.cpu", kind="cpu", units=4, memory_mib=1_000, family="cpu", node="a")))
    assert [load.device for load in world.ready()] == ["a.cpu", "a.cpu"]
    world.join("b")
    world.now_us += 1_000_000
    world.post(Tick())
    (moved,) = world.ready()
    assert moved.device == "b.cpu"
    assert len(world.taken(Unload)) == 1
    world.now_us += 1_000_000
    world.post(Tick())
    assert world.taken(Load) == [] and world.taken(Unload) == []


# ----------------------------------------------------------------------------- machines where nothing can be loaded


def test_what_cannot_be_loaded_on_one_machine_is_loaded_on_another():
    world = World("a", "b")
    (first,) = world.taken(Load)
    world.call("one")
    world.post(InstanceLost(first.instance, "load-failed"))
    (second,) = world.taken(Load)
    assert second.device != first.device
    world.post(InstanceReady(second.instance))
    assert [batch.device for batch in world.taken(StartBatch)] == [second.device]


def test_what_can_be_loaded_nowhere_is_loaded_less_and_less_often_and_its_calls_fail():
    world = World("a", "b")
    tried = []
    world.call("one")
    for _ in range(40):
        for load in world.taken(Load):
            tried.append(load.device)
            world.post(InstanceLost(load.instance, "load-failed"))
        world.now_us += 100_000
        world.post(Tick())
    assert 4 <= len(tried) < 12 and set(tried) == {"a.cpu", "b.cpu"}
    assert not world.controller.state.runs


def test_a_machine_that_joins_is_a_second_chance():
    world = World("a")
    for _ in range(20):
        for load in world.taken(Load):
            world.post(InstanceLost(load.instance, "load-failed"))
        world.now_us += 100_000
        world.post(Tick())
    world.join("b")
    loads = world.taken(Load)
    if loads[0].device == "a.cpu":
        world.post(InstanceLost(loads[0].instance, "load-failed"))
        loads = world.taken(Load)
    assert [load.device for load in loads] == ["b.cpu"]


def test_a_machine_is_tried_again_after_a_while():
    world = World("a", "b", min_instances=2)
    first, second = world.taken(Load)
    world.post(InstanceLost(first.instance, "load-failed"))
    world.post(InstanceReady(second.instance))
    world.now_us += 61_000_000
    world.post(Tick())
    world.post(Tick())
    assert first.device in [load.device for load in world.taken(Load)]


def test_a_new_version_that_one_machine_cannot_load_is_loaded_on_another():
    world = World("a", "b")
    (old,) = world.ready()
    world.post(Deployed((FunctionSpec(name="f", scale=ScaleSpec(min=1, max=4), max_batch=4, version="2"),)))
    (new,) = world.taken(Load)
    world.post(InstanceLost(new.instance, "load-failed"))
    (again,) = world.taken(Load)
    assert again.device != new.device
    world.post(InstanceReady(again.instance))
    assert [unload.instance for unload in world.taken(Unload)] == [old.instance]
    assert not world.controller.rolling_update.halted


def _until_quiet(world: World, at_least: int = 1) -> list[str]:
    """Let loads get ready, one by one, until there are no more; the devices of the instances that stand then."""
    state = world.controller.state
    for _ in range(20):
        for load in world.taken(Load):
            if load.instance in state.instances:
                world.post(InstanceReady(load.instance))
            warm = [one for one in state.functions["f"].instances.values() if one.phase.value in ("warm", "draining")]
            assert len(warm) >= at_least, "the last copy has left before another was ready"
        world.now_us += 1_000_000
        world.post(Tick())
    return [one.device for one in state.functions["f"].instances.values()]


def test_a_version_that_is_deployed_while_a_machine_drains_ends_up_elsewhere():
    world = World("a", "b")
    (first,) = world.ready()
    other = "b.cpu" if first.device == "a.cpu" else "a.cpu"
    world.post(DeviceDraining(first.device))
    world.post(Deployed((FunctionSpec(name="f", scale=ScaleSpec(min=1, max=4), max_batch=4, version="2"),)))
    assert _until_quiet(world) == [other]
    (left,) = world.controller.state.functions["f"].instances.values()
    assert left.version == "2"


def test_a_machine_that_drains_while_a_version_is_deployed_ends_up_empty():
    world = World("a", "b", min_instances=2)
    world.ready()
    world.post(Deployed((FunctionSpec(name="f", scale=ScaleSpec(min=2, max=4), max_batch=4, version="2"),)))
    world.post(DeviceDraining("a.cpu"))
    devices = _until_quiet(world)
    assert "a.cpu" not in devices and devices
    assert {one.version for one in world.controller.state.functions["f"].instances.values()} == {"2"}


def test_an_old_version_serves_on_where_no_machine_takes_the_new_one():
    world = World("a")
    (old,) = world.ready()
    world.post(DeviceDraining("a.cpu"))
    world.post(Deployed((FunctionSpec(name="f", scale=ScaleSpec(min=1, max=4), max_batch=4, version="2"),)))
    assert _until_quiet(world) == ["a.cpu"] and world.taken(Unload) == []
    world.join("b")
    assert _until_quiet(world) == ["b.cpu"]
    assert [unload.instance for unload in world.taken(Unload)] == [old.instance]


def adopted_busy(predicted_us: int, ran_us: int, load_us: int = 300_000, *, idempotent: bool = True) -> tuple[World, StartBatch]:
    """An instance is found that is at work for the leader before."""
    world = World(min_instances=0, max_instances=1, idempotent=idempotent)
    world.now_us = 10_000_000
    world.controller.predictor.observe_load("f", "cpu", load_us)
    world.join("a")
    world.post(InstanceFound("a:f-7", "a.cpu", "f"))
    (load,) = world.taken(Load)
    world.post(InstanceReady(load.instance, abandoned=AbandonedBatch(1, predicted_us, ran_us)))
    (batch,) = world.taken(StartBatch)
    assert batch.instance == load.instance and batch.mask == 1 and not batch.jobs
    return world, batch


def tick(world: World, after_us: int) -> list[str]:
    """Instances that are killed when so much time has passed."""
    world.now_us += after_us
    world.post(Tick())
    return [kill.instance for kill in world.taken(Kill)]


def test_an_adopted_instance_that_is_at_work_is_busy_until_that_has_ended():
    world, batch = adopted_busy(2_000_000, 500_000)
    (booked,) = world.controller.state.batches.values()
    assert 1_400_000 < booked.expected_end_us - world.now_us <= 1_500_000
    world.call("one")
    assert world.taken(StartBatch) == []
    world.post(BatchFailed(batch.batch_id, "abandoned"))
    assert [one.instance for one in world.taken(StartBatch)] == [batch.instance]
    assert not world.taken(Kill)


def test_another_instance_takes_the_calls_meanwhile():
    world, _ = adopted_busy(2_000_000, 500_000)
    world.post(Deployed((FunctionSpec(name="f", scale=ScaleSpec(max=2), max_batch=4),)))
    world.join("b")
    tick(world, 800_000)
    assert world.taken(Load) == []  # none waits
    world.call("one")
    tick(world, 200_000)
    (load,) = world.ready()
    assert load.device == "b.cpu"
    assert [one.instance for one in world.taken(StartBatch)] == [load.instance]


def test_what_is_abandoned_is_ended_when_it_keeps_calls_waiting_for_longer_than_a_load_takes():
    world, batch = adopted_busy(2_000_000, 1_500_000)
    assert tick(world, 2_000_000) == []  # it is late, and in the way of none
    world.call("one")
    assert tick(world, 1_000_000) == [batch.instance]
    world.post(InstanceLost(batch.instance, "abandoned"))
    (load,) = world.ready()
    assert [one.instance for one in world.taken(StartBatch)] == [load.instance]


def test_what_is_abandoned_is_waited_for_as_long_as_a_load_takes():
    world, batch = adopted_busy(2_000_000, 1_500_000, load_us=3_000_000)
    world.call("one")
    assert [tick(world, 1_000_000) for _ in range(3)] == [[], [], []]
    assert tick(world, 1_000_000) == [batch.instance]


def test_what_is_abandoned_and_expected_to_take_far_longer_than_a_load_is_ended_when_calls_have_waited_for_that():
    world, batch = adopted_busy(60_000_000, 1_000_000, load_us=1_500_000)
    assert tick(world, 3_000_000) == []
    world.call("one")
    assert [tick(world, 1_000_000) for _ in range(2)] == [[], [batch.instance]]


def test_what_is_abandoned_is_ended_for_the_calls_of_another_function_that_has_no_other_units():
    world, batch = adopted_busy(60_000_000, 1_000_000)
    world.post(Deployed((FunctionSpec(name="g", scale=ScaleSpec(max=1)),)))
    world.post(InstanceFound("a:g-1", "a.cpu", "g"))
    world.ready()
    world.post(CallArrived(Call("one", "g", world.now_us)))
    assert world.taken(StartBatch) == [] and tick(world, 1_000_000) == [batch.instance]
    world.post(InstanceLost(batch.instance, "abandoned"))
    assert [one.function for one in world.taken(StartBatch)] == ["g"]


def test_what_must_not_run_twice_and_is_abandoned_ends_by_itself_or_hangs():
    world, batch = adopted_busy(2_000_000, 1_500_000, idempotent=False)
    world.call("one")
    assert [tick(world, 1_000_000) for _ in range(7)] == [[]] * 7
    assert [tick(world, 1_000_000) for _ in range(2)] == [[], [batch.instance]]  # after five times its time


def test_what_is_abandoned_leaves_its_device_with_its_instance():
    world, batch = adopted_busy(2_000_000, 1_500_000)
    world.post(InstanceLost(batch.instance))
    assert not world.controller.state.batches and not world.controller.state.devices["a.cpu"].busy
    world, _ = adopted_busy(2_000_000, 1_500_000)
    world.post(DeviceLost("a.cpu", blames=False))
    assert not world.controller.state.batches


def test_a_draining_instance_is_not_kept_by_what_is_abandoned():
    world, batch = adopted_busy(2_000_000, 1_500_000)
    world.join("b")
    world.post(DeviceDraining("a.cpu"))
    world.ready()
    assert tick(world, 1_000_000) + tick(world, 1_000_000) == [batch.instance]
    world.post(InstanceLost(batch.instance, "abandoned"))
    assert not world.controller.state.devices["a.cpu"].instances


def test_units_that_another_batch_has_by_now_are_not_leased_twice():
    world, _ = adopted_busy(2_000_000, 500_000)
    world.post(Deployed((FunctionSpec(name="g"),)))
    world.post(InstanceFound("a:g-1", "a.cpu", "g"))
    (load,) = world.taken(Load)
    world.post(InstanceReady(load.instance, abandoned=AbandonedBatch(1, 1_000, 0)))
    assert world.taken(StartBatch) == [] and len(world.controller.state.batches) == 1
    world.post(InstanceReady(load.instance, abandoned=AbandonedBatch(2**70, 1_000, 0)))  # nor what is no slice
    assert len(world.controller.state.batches) == 1
