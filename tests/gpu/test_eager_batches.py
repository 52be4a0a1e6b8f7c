"""No batch waits for a graph: not for its own, not for another's. Everything is on slices of nothing; captures end when the test
says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import encoding
from lamina.gpu import graph_capture
from lamina.gpu.executor_loop import STUCK_US
from lamina.gpu.protocol import (
    BatchHung,
    FunctionLoaded,
    FunctionLoadFailed,
    FunctionUnloaded,
    LoadFunction,
    MoveSlice,
    RunOnSlice,
    UnloadFunction,
)
from lamina.gpu.runtime import HostRuntime
from lamina.gpu.weight_cache import NoDeviceMemory
from lamina.ipc.framing import StopProcess
from lamina.worker.protocol import BatchDone, BatchHeartbeat, JobFrame
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, torch

app = lamina.App("tested")

class Identity(lamina.TorchModel):
    def load(self):
        return torch.nn.Identity(), torch.zeros(1, 2)
    def post(self, row):
        return [float(value) for value in row]

app.function(gpu="1/4", batch=4, name="same")(type("Same", (Identity,), {}))
app.function(gpu="1/4", batch=4, name="other")(type("Other", (Identity,), {}))
"""
HOME = 0b1111
LIKELY = [HOME << start for start in range(13)]
UNLIKELY, WHOLE = 0b11, 0xFFFF
LARGEST = 4

Made = tuple[int, int]


class Gated(HostRuntime):
    """Captures that `holds` names end when `gate` is opened; then they are made, or fail with `error`."""

    def __init__(self, holds: Callable[[int, int], bool] = lambda bucket, mask: False, error: Exception | None = None) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.tried: list[Made] = []
        self.launched_by: list[str] = []
        self.holds, self.error, self.fits = holds, error, LARGEST
        self.fail_launch: list[Exception] = []

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> Any:
        self.tried.append((bucket, slice_.mask))
        if self.holds(bucket, slice_.mask):
            self.begun.set()
            assert self.gate.wait(20), "nobody opened the gate"
            if self.error is not None:
                raise self.error
        if bucket > self.fits:
            raise MemoryError
        return super().capture(work, example, bucket, slice_, block)

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        if items[0] is not None:
            self.launched_by.append(threading.current_thread().name.partition("_")[0])
        if items[0] is not None and self.fail_launch:
            raise self.fail_launch.pop()
        return super().launch(plan, items, **options)


class Stage(GpuStage):
    def __init__(self, folder: Path, runtime: Gated, **options: Any) -> None:
        self.runtime = runtime
        super().__init__(write_app(folder, APP), runtime=runtime, **options)

    def load(self, function: str = "same", *, again: bool = False, home: int = 0) -> FunctionLoaded:
        self.tell(LoadFunction(f"{function}#1", function, home, 0, is_reload=again))
        found = self.hear(FunctionLoaded, FunctionLoadFailed)
        assert isinstance(found, FunctionLoaded), found
        if isinstance(self.runtime, Gated):
            self.runtime.launched_by.clear()
        return found

    def start(
        self, count: int = 1, *, mask: int = UNLIKELY, deadline_us: int = 0, batch_id: int = 7, after: int = 0, on: str = "same"
    ) -> None:
        jobs = [JobFrame(n, "c", None, [(("in", "x"), encoding.encode([n, n]))], deadline_us) for n in range(count)]
        self.tell(RunOnSlice(batch_id, f"{on}#1", mask, after, jobs, [False] * count))

    def answers(self) -> list[Any]:
        return [encoding.decode(result) for result in self.hear(BatchDone).results]

    def graphs(self, function: str = "same") -> set[Made]:
        plans = self.worker._executor.models[f"{function}#1"].plans
        return {place for place, plan in list(plans.items()) if plan.is_captured}

    def settle(self, batch_id: int = 99) -> None:
        """All that was said so far has been taken in: a batch goes through the same thread."""
        self.start(mask=HOME, batch_id=batch_id)
        while self.hear(BatchDone).batch_id != batch_id:
            pass

    def close(self) -> None:
        if (gate := getattr(self.runtime, "gate", None)) is not None:
            gate.set()
        super().close()


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(runtime: Gated | None = None, **options: Any) -> Stage:
        made.append(Stage(tmp_path, runtime or Gated(), **options))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def elsewhere(bucket: int, mask: int) -> bool:
    return mask not in LIKELY


def further(bucket: int, mask: int) -> bool:
    return bucket not in (1, LARGEST)


# ------------------------------------------------------------------------------------------- before it is ready


def test_a_function_is_ready_with_graphs_of_its_smallest_and_its_largest_batch_on_all_likely_slices(stages: Any):
    stage = stages(Gated(further))
    stage.load()
    assert stage.graphs() == {(bucket, mask) for bucket in (1, LARGEST) for mask in LIKELY}


def test_after_a_restart_it_is_ready_with_one_graph(stages: Any):
    stage = stages(Gated(lambda bucket, mask: (bucket, mask) != (LARGEST, HOME)))
    stage.load(again=True)
    assert stage.graphs() == {(LARGEST, HOME)}


def test_with_a_home_it_is_ready_with_graphs_of_that_and_further_slices_follow(stages: Any):
    """While its home is busy, a batch may be given units of others; while its neighbours are idle, theirs as well."""
    home = HOME << 3
    stage = stages(Gated(lambda bucket, mask: mask != home))
    stage.load(home=home)
    assert stage.graphs() >= {(bucket, home) for bucket in (1, LARGEST)}
    assert {mask for _, mask in stage.graphs()} == {home}
    stage.runtime.gate.set()
    while {mask for _, mask in stage.graphs()} != {*LIKELY, WHOLE}:
        stage.settle()


def test_graphs_of_other_sizes_follow_while_the_executor_is_idle(stages: Any):
    stage = stages(Gated(lambda bucket, mask: (bucket, mask) == (2, LIKELY[-1])))
    stage.load()
    assert stage.runtime.begun.wait(20)
    assert {(2, mask) for mask in LIKELY} <= set(stage.runtime.tried)


def test_with_many_graphs_only_sizes_that_batches_have_are_captured(stages: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph_capture, "MAX_IN_ADVANCE", 10)
    stage = stages()
    stage.load()
    stage.settle()
    assert not {bucket for bucket, _ in stage.graphs()} - {1, LARGEST}
    stage.start(2, mask=LIKELY[3])
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0]] and stage.runtime.launched_by[-1] == "serving"
    while (2, LIKELY[3]) not in stage.graphs():
        stage.settle()
    assert {place for place in stage.graphs() if place[0] == 2} == {(2, LIKELY[3])}


# ------------------------------------------------------------------------------------ while one is being captured


def test_a_capture_delays_no_batch_of_another_function(stages: Any):
    stage = stages(Gated(further))
    stage.load()
    stage.load("other")
    assert stage.runtime.begun.wait(20)
    stage.start(on="other", mask=HOME)
    assert stage.answers() == [[0.0, 0.0]] and not stage.runtime.gate.is_set()


def test_a_capture_delays_no_batch_of_its_own_function_that_has_a_graph(stages: Any):
    stage = stages(Gated(further))
    stage.load()
    assert stage.runtime.begun.wait(20)
    stage.start(2, mask=HOME)
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0]] and stage.runtime.launched_by == ["serving"]


def test_nor_one_that_has_none_not_even_on_the_very_place(stages: Any):
    stage = stages(Gated(elsewhere))
    stage.load()
    stage.start()
    stage.hear(BatchDone)
    assert stage.runtime.begun.wait(20)  # the graph for that place is under way
    stage.start(3, batch_id=8)
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] and stage.runtime.launched_by == ["make-same"] * 2


def test_once_it_is_made_the_next_batch_uses_it(stages: Any):
    stage = stages(Gated(elsewhere))
    stage.load()
    stage.start()
    assert stage.hear(BatchDone).is_warmup  # how long it took says nothing of the next one
    stage.runtime.gate.set()
    while (1, UNLIKELY) not in stage.graphs():
        stage.settle()
    stage.runtime.launched_by.clear()
    stage.start(batch_id=8)
    assert not stage.hear(BatchDone).is_warmup and stage.runtime.launched_by == ["serving"]


def test_further_graphs_are_captured_one_at_a_time_while_batches_run(stages: Any):
    stage = stages(Gated(lambda bucket, mask: mask not in LIKELY or bucket not in (1, LARGEST)))
    stage.load()
    stage.load("other")
    stage.runtime.begun.wait(20)
    tried = len(stage.runtime.tried)
    for number in range(20):
        stage.start(mask=HOME, batch_id=10 + number)
        stage.hear(BatchDone)
    assert len(stage.runtime.tried) - tried <= 1


# ----------------------------------------------------------------------------------------------- what goes wrong


def test_a_slice_without_a_capturable_graph_is_served_eagerly_and_not_tried_again(stages: Any):
    stage = stages(Gated(elsewhere, RuntimeError("it waits for the device")))
    stage.runtime.gate.set()
    stage.load()
    for number in range(4):
        stage.start(3, batch_id=10 + number)
        assert stage.answers() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    stage.start(3, batch_id=20)
    assert not stage.hear(BatchDone).is_warmup  # all will be like it
    stage.settle()
    assert stage.runtime.tried.count((LARGEST, UNLIKELY)) == 4  # each thread once, and once more in case it was spoilt


def test_a_module_that_cannot_be_captured_at_all_runs_in_its_makers_thread(stages: Any):
    stage = stages(Gated(lambda bucket, mask: True, RuntimeError("it waits for the device")))
    stage.runtime.gate.set()
    stage.load()
    stage.start(3, mask=HOME)
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] and stage.runtime.launched_by == ["make-same"]


def test_a_largest_batch_that_does_not_fit_is_halved(stages: Any):
    runtime = Gated()
    runtime.fits = 2
    stage = stages(runtime)
    stage.load()
    stage.start(LARGEST, mask=HOME)
    assert len(stage.answers()) == LARGEST


def test_a_graph_that_finds_no_memory_on_a_further_slice_makes_batches_no_smaller(stages: Any):
    stage = stages(Gated(elsewhere, MemoryError()))
    stage.load()
    stage.start(LARGEST)
    stage.hear(BatchDone)
    stage.runtime.gate.set()
    stage.settle()
    assert stage.worker._executor.models["same#1"].largest_fit == LARGEST


def test_without_room_for_its_weights_a_batch_waits_until_others_have_ended(stages: Any):
    stage = stages()
    stage.load()
    stage.runtime.fail_launch.append(NoDeviceMemory("no room"))
    stage.start(mask=HOME)
    stage.start(mask=HOME << 4, batch_id=8)
    assert {stage.hear(BatchDone).batch_id, stage.hear(BatchDone).batch_id} == {7, 8}


def test_what_others_end_in_the_same_moment_is_room_too(stages: Any):
    """Nothing is under way any more when it is heard that there was none."""
    stage = stages()
    stage.load()
    stage.runtime.fail_launch.append(NoDeviceMemory("no room"))
    stage.start(mask=HOME)
    assert stage.answers() == [[0.0, 0.0]]


def test_without_batches_pending_event_it_says_that_there_is_no_memory(stages: Any):
    stage = stages()
    stage.load()
    stage.runtime.fail_launch.append(never := NoDeviceMemory("no room"))
    never.is_permanent = True
    stage.start(mask=HOME)
    assert stage.hear(BatchDone).results[0].type == "NoDeviceMemory"


class Stuck(HostRuntime):
    """An eager run on the unlikely slice does not end before the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        if plan.slice.mask == UNLIKELY:
            self.gate.wait(20)
        return super().launch(plan, items, **options)

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> Any:
        if slice_.mask == UNLIKELY:
            raise RuntimeError("no graph")
        return super().capture(work, example, bucket, slice_, block)


def test_a_batch_without_a_graph_that_hangs_is_noticed(stages: Any):
    stage = stages(Stuck())
    stage.tell(LoadFunction("same#1", "same", 0, 0))
    stage.hear(FunctionLoaded)
    job = JobFrame(1, "c", None, [(("in", "x"), encoding.encode([1, 1]))])
    stage.tell(RunOnSlice(7, "same#1", UNLIKELY, 0, [job], [False], 200_000))
    assert stage.hear(BatchHung).batch_id == 7


def test_one_that_waits_behind_another_for_the_maker_says_that_it_is_alive(stages: Any):
    stage = stages(Stuck())
    stage.tell(LoadFunction("same#1", "same", 0, 0))
    stage.hear(FunctionLoaded)
    stage.start()
    stage.start(batch_id=8)
    assert stage.hear(BatchHeartbeat).batch_id == 8


def test_a_batch_long_past_its_deadline_sends_no_heartbeat_so_that_its_thread_is_noticed(stages: Any):
    stage = stages(Stuck())
    stage.tell(LoadFunction("same#1", "same", 0, 0))
    stage.hear(FunctionLoaded)
    stage.start()
    stage.start(batch_id=8, deadline_us=time.monotonic_ns() // 1000 - STUCK_US - 1_000_000)
    stage.start(batch_id=9)
    assert [stage.hear(BatchHeartbeat).batch_id, stage.hear(BatchHeartbeat).batch_id] == [9, 9]


def test_a_batch_past_its_deadline_ends_without_having_run(stages: Any):
    stage = stages()
    stage.load()
    stage.start(deadline_us=time.monotonic_ns() // 1000 - 1_000_000)
    done = stage.hear(BatchDone)
    assert (done.device_us, done.results[0].type, stage.runtime.launched_by) == (0, "TimeoutError", [])


def test_one_that_fails_at_once_is_told_of_at_once_though_the_one_it_is_booked_behind_runs(stages: Any):
    stage = stages(Stuck())
    stage.tell(LoadFunction("same#1", "same", 0, 0))
    stage.hear(FunctionLoaded)
    stage.start(mask=HOME)
    stage.hear(BatchDone)
    stage.start(batch_id=7)
    bad = JobFrame(9, "c", None, [(("in", "x"), encoding.encode("no"))])
    stage.tell(RunOnSlice(8, "same#1", HOME, 0, [bad], [False]))
    assert stage.hear(BatchDone).batch_id == 8


def test_one_booked_behind_a_batch_without_a_graph_runs_after_it(stages: Any):
    stage = stages(Gated(elsewhere))
    stage.load()
    stage.start()
    stage.start(mask=HOME, batch_id=8, after=7)
    assert [stage.hear(BatchDone).batch_id, stage.hear(BatchDone).batch_id] == [7, 8]


def test_an_executor_that_is_told_to_stop_answers_what_is_under_way_first(stages: Any):
    stage = stages(Gated(elsewhere))
    stage.load()
    stage.start()
    stage.start(mask=HOME, batch_id=8, after=7)
    stage.tell(StopProcess())
    assert [stage.hear(BatchDone).batch_id, stage.hear(BatchDone).batch_id] == [7, 8]


# ------------------------------------------------------------------------------------------------- coming, going, moving


def test_a_function_unloaded_during_a_capture_leaves_and_harms_no_other(stages: Any):
    stage = stages(Gated(further))
    stage.load()
    assert stage.runtime.begun.wait(20)  # and more are to be made
    stage.tell(UnloadFunction("same#1"))
    stage.runtime.gate.set()
    stage.hear(FunctionUnloaded)
    stage.load("other")
    stage.start(on="other", mask=HOME)
    assert stage.answers() == [[0.0, 0.0]]


def test_a_function_unloaded_while_it_is_loading_is_not_kept(stages: Any):
    stage = stages(Gated(lambda bucket, mask: True))
    stage.tell(LoadFunction("same#1", "same", 0, 0))
    assert stage.runtime.begun.wait(20)
    stage.tell(UnloadFunction("same#1"))
    stage.runtime.gate.set()
    assert (
        isinstance(stage.hear(FunctionUnloaded, FunctionLoaded), FunctionUnloaded)
        and "same#1" not in stage.worker._executor.models
    )


def test_a_load_that_fails_in_its_first_run_leaves_nothing_behind(stages: Any):
    stage = stages()
    stage.runtime.fail_launch.append(ArithmeticError("no"))
    stage.tell(LoadFunction("same#1", "same", 0, 0))
    assert stage.hear(FunctionLoadFailed).error.type == "ArithmeticError"
    stage.hear(FunctionUnloaded)
    assert "same#1" not in stage.worker._executor.models


def test_where_a_function_is_to_stand_from_now_on_graphs_are_made_before_it_runs_there(stages: Any):
    stage = stages(Gated(lambda bucket, mask: mask == UNLIKELY << 2))
    stage.load()
    stage.tell(MoveSlice("same#1", UNLIKELY << 2))
    assert stage.runtime.begun.wait(20)
    stage.start(mask=HOME)  # which serves meanwhile
    assert stage.answers() == [[0.0, 0.0]]


def test_a_batch_on_its_way_when_its_function_moves_keeps_its_slice(stages: Any):
    stage = stages(Gated(lambda bucket, mask: mask == UNLIKELY << 2))
    stage.load()
    stage.start(2, mask=HOME)
    stage.tell(MoveSlice("same#1", UNLIKELY << 2))
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0]]


class Long(HostRuntime):
    """Graphs whose first replay takes long, and is over before anything else is asked for; captured again, they are cut."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, int, int]] = []

    def wants_segments(self, took_us: int) -> bool:
        return took_us > 2_000

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> Any:
        self.captured.append((bucket, slice_.mask, work_sm_us))
        return super().capture(work, example, bucket, slice_, block)

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        flight = super().launch(plan, items, **options)
        if items[0] is None:
            flight._found = 200_000, []
        return flight


@pytest.mark.parametrize("home", [0, HOME << 3])
def test_a_graph_that_turns_out_to_be_long_while_it_is_loaded_is_captured_again(stages: Any, home: int):
    """With a home, graphs for further slices are wanted before it, and may not be captured until it is ready."""
    stage = stages(Long())
    stage.load(home=home)
    ends_s = time.monotonic() + 20
    while not [one for one in stage.runtime.captured if one[:2] == (LARGEST, home or HOME) and one[2]]:
        assert time.monotonic() < ends_s, stage.runtime.captured
        time.sleep(0.01)
