"""CPU engine with real worker processes; only the values are kept by a stand-in."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import uvloop

from lamina import encoding
from lamina.core.actions import DropJob, JobRef, Kill, Load, StartBatch, Unload
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost, InstanceReady
from lamina.engines.cpu import CpuEngine
from lamina.engines.process_engine import WorkerLimits
from lamina.errors import BadValue
from lamina.expr import Expr, Leaf
from lamina.ipc.framing import pack
from lamina.values.references import ErrorInfo, ShmRef, Stored
from lamina.worker.protocol import BatchDone, WorkerReady

pytestmark = pytest.mark.live

APP = '''
import os, socket, stat, sys
import lamina

app = lamina.App("test")

@app.function()
def echo(x):
    return x

@app.function(batch=8)
def invert(x):
    return [1 / value for value in x]

@app.function()
def wait(path):
    """Until somebody writes into the pipe at `path`."""
    with open(path, "rb") as pipe:
        return pipe.read().decode()

@app.function()
class Broken:
    def load(self):
        raise ValueError("the weights are missing")
    def __call__(self, x):
        return x

@app.function()
class Dying:
    def load(self):
        os.kill(os.getpid(), 9)
    def __call__(self, x):
        return x

@app.function()
class Polite:
    def __call__(self, x):
        self.path = x
    def close(self):
        open(self.path, "w").close()

@app.function()
def cores():
    return sorted(os.sched_getaffinity(0))

@app.function()
def threads():
    import numpy, threadpoolctl
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]

kept = []

@app.function()
def keep(x):
    kept.append(x)
    return float(kept[0][0])

@app.function()
def say(frame):
    """Send bytes of its own making to the gateway."""
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, frame)
        except OSError:
            pass

@app.function()
def parent():
    return os.getpid()
'''


@dataclass
class Given:
    args: dict[str, Expr] | None
    leaves: list[tuple[Leaf, Stored]]


@dataclass
class Stage:
    """An engine, what it reported, and the values of its jobs."""

    engine: CpuEngine
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    given: dict[int, Given] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    pieces: dict[str, Any] = field(default_factory=dict)
    last: int = 0

    def inputs(self, job: JobRef) -> Given:
        if job.id not in self.given:
            raise BadValue(f"no inputs for job {job.id}")
        return self.given[job.id]

    def put(self, job: JobRef, value: Stored) -> None:
        self.results[job.id] = value

    def put_error(self, job: JobRef, error: ErrorInfo) -> None:
        self.results[job.id] = error

    async def event(self) -> Event:
        return await asyncio.wait_for(self.events.get(), 60)

    async def load(self, function: str, instance: str = "", mask: int = 0) -> str:
        instance = instance or f"{function}-1"
        self.engine.perform(Load(instance, function, "cpu0", mask))
        event = await self.event()
        assert isinstance(event, InstanceReady), self.engine.load_errors
        assert event.instance == instance
        return instance

    def start(self, instance: str, *calls: dict[str, Any], mask: int = 1, after: int = 0) -> int:
        """Returns the number of the batch; its jobs are numbered ten times that, and on."""
        self.last += 1
        jobs = []
        for number, inputs in enumerate(calls, 10 * self.last):
            self.given[number] = Given(None, [(("input", name), self.stored(value)) for name, value in inputs.items()])
            jobs.append(JobRef(number, f"call-{number}", 0, "step"))
        function = instance.rpartition("-")[0]
        self.engine.perform(StartBatch(self.last, function, instance, "cpu0", mask, tuple(jobs), behind=after))
        return self.last

    def stored(self, value: Any) -> Stored:
        return value if isinstance(value, ShmRef) else encoding.encode(value)

    async def finished(self, batch: int) -> BatchFinished:
        event = await self.event()
        assert isinstance(event, BatchFinished), event
        assert event.batch_id == batch
        return event

    async def call(self, instance: str, *, mask: int = 1, **inputs: Any) -> Any:
        batch = self.start(instance, inputs, mask=mask)
        await self.finished(batch)
        return self.value(10 * batch)

    def value(self, job: int) -> Any:
        found = self.results[job]
        if isinstance(found, ErrorInfo):
            return found
        return encoding.decode(self.engine.references.reader.view(found) if isinstance(found, ShmRef) else found)


class Gate:
    """A pipe a function waits at: `reached` returns when it does, `open` lets it go on."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.path = str(folder / name)
        os.mkfifo(self.path)

    async def reached(self) -> None:
        self._file = await asyncio.wait_for(asyncio.to_thread(open, self.path, "wb", buffering=0), 60)

    def open(self) -> None:
        self._file.write(b"done")
        self._file.close()

    def leave(self) -> None:
        self._file.close()


@contextmanager
def few_files(left: int) -> Iterator[None]:
    """Only `left` more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    opened = []
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in opened:
            os.close(fd)


Play = Callable[[Callable[[Stage], Awaitable[None]]], None]


@pytest.fixture
def app(tmp_path: Path) -> str:
    path = tmp_path / "engine_app.py"
    path.write_text(APP)
    return str(path)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@asynccontextmanager
async def staged(app: str, shm: Path, limits: WorkerLimits | None = None) -> AsyncIterator[Stage]:
    stage = Stage(CpuEngine(app, limits=limits, shm_base=str(shm)))
    await stage.engine.start(stage.events.put_nowait, stage, lambda call_id: 0)
    pids: set[int] = set()
    try:
        yield stage
        pids = set(stage.engine.pids.values())
    finally:
        await stage.engine.stop(5)
    assert not list(shm.iterdir()), "files were left behind"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def play(app: str, shm: Path) -> Play:
    """Runs a scene, and then sees to it that no file and no process is left."""

    def run(scene: Callable[[Stage], Awaitable[None]]) -> None:
        async def main() -> None:
            async with staged(app, shm) as stage:
                await scene(stage)

        asyncio.run(main())

    return run


LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
VALUES = pytest.mark.parametrize("value", [b"x" * 1_000, b"x" * 1_000_000, numpy.arange(125_000)], ids=["1 KB", "1 MB", "tensor"])


@LOOPS
@VALUES
def test_an_echo_comes_back_as_it_went(app: str, shm: Path, run: Callable[[Coroutine[Any, Any, None]], None], value: Any) -> None:
    async def main() -> None:
        async with staged(app, shm) as stage:
            assert numpy.array_equal(await stage.call(await stage.load("echo"), x=value), value)

    run(main())


def test_a_batch_of_eight_comes_back_in_order(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        batch = stage.start(await stage.load("invert"), *[{"x": 2**n} for n in range(8)])
        assert (await stage.finished(batch)).outcomes == ()
        assert [stage.value(10 * batch + n) for n in range(8)] == [1 / 2**n for n in range(8)]

    play(scene)


def test_one_failing_job_in_a_batch_fails_alone(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        batch = stage.start(await stage.load("invert"), {"x": 1}, {"x": 0}, {"x": 4})
        outcomes = (await stage.finished(batch)).outcomes
        assert [(outcome.ok, outcome.error) for outcome in outcomes] == [(True, ""), (False, "function-failed"), (True, "")]
        assert stage.value(10 * batch + 1).type == "ZeroDivisionError"
        assert stage.value(10 * batch + 2) == 0.25

    play(scene)


def test_inputs_that_cannot_be_made_fail_their_job_alone(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("echo")
        stage.given[1] = Given(None, [(("input", "x"), encoding.encode(1))])
        jobs = (JobRef(1, "a", 0, "step"), JobRef(2, "b", 0, "step"))
        stage.engine.perform(StartBatch(1, "echo", instance, "cpu0", 1, jobs))
        await stage.finished(1)
        assert stage.value(1) == 1
        assert stage.value(2) == ErrorInfo("BadValue", "no inputs for job 2")

    play(scene)


def test_a_load_that_fails_is_told_in_the_users_words(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.perform(Load("broken-1", "broken", "cpu0"))
        assert await stage.event() == InstanceLost("broken-1", "load-failed")
        error = stage.engine.load_errors["broken"]
        assert (error.type, error.message) == ("ValueError", "the weights are missing")
        assert "in load" in error.trace
        assert "lamina/" not in error.trace

    play(scene)


def test_a_worker_that_dies_while_loading_has_failed_to_load(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.perform(Load("dying-1", "dying", "cpu0"))
        assert await stage.event() == InstanceLost("dying-1", "load-failed")
        assert "SIGKILL" in stage.engine.load_errors["dying"].message

    play(scene)


def test_a_load_that_takes_too_long_has_failed(app: str, shm: Path) -> None:
    async def main() -> None:
        async with staged(app, shm, WorkerLimits(load_s=0.001)) as stage:
            stage.engine.perform(Load("echo-1", "echo", "cpu0"))
            assert await stage.event() == InstanceLost("echo-1", "load-failed")
            assert stage.engine.load_errors["echo"].type == "LoadTimeout"

    asyncio.run(main())


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4])
def test_a_machine_out_of_files_fails_the_load_and_recovers(play: Play, left: int) -> None:
    async def scene(stage: Stage) -> None:
        with few_files(left):
            stage.engine.perform(Load("echo-1", "echo", "cpu0"))
        assert await stage.event() == InstanceLost("echo-1", "load-failed")
        assert stage.engine.load_errors["echo"].type == "OSError"
        await stage.load("echo", "echo-2")
        assert not stage.engine.load_errors

    play(scene)


def test_a_function_that_is_not_there_fails_to_load(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.perform(Load("ghost-1", "ghost", "cpu0"))
        assert await stage.event() == InstanceLost("ghost-1", "load-failed")
        assert "no function 'ghost'" in stage.engine.load_errors["ghost"].message

    play(scene)


@LOOPS
def test_a_worker_killed_in_its_batch_is_reported_once_and_harms_no_other(
    app: str, shm: Path, tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def main() -> None:
        async with staged(app, shm) as stage:
            victim, other = await stage.load("wait"), await stage.load("echo")
            gate = Gate(tmp_path)
            stage.start(victim, {"path": gate.path})
            await gate.reached()
            os.kill(stage.engine.pids[victim], signal.SIGKILL)
            assert await stage.event() == InstanceLost(victim, "worker-lost")
            gate.leave()
            assert await stage.call(other, x="still here") == "still here"
            assert stage.events.empty()

    run(main())


def test_a_worker_told_to_terminate_ends_its_batch_first(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        instance, gate = await stage.load("wait"), Gate(tmp_path)
        batch = stage.start(instance, {"path": gate.path})
        await gate.reached()
        os.kill(stage.engine.pids[instance], signal.SIGTERM)
        gate.open()
        await stage.finished(batch)
        assert stage.value(10 * batch) == "done"
        assert await stage.event() == InstanceLost(instance, "worker-lost")

    play(scene)


def test_an_idle_worker_told_to_terminate_leaves(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("echo")
        os.kill(stage.engine.pids[instance], signal.SIGTERM)
        assert await stage.event() == InstanceLost(instance, "worker-lost")

    play(scene)


def test_an_interrupt_is_not_for_workers(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("echo")
        os.kill(stage.engine.pids[instance], signal.SIGINT)
        assert await stage.call(instance, x=1) == 1

    play(scene)


def test_kill_ends_a_hung_worker_and_says_why(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        instance, gate = await stage.load("wait"), Gate(tmp_path)
        stage.start(instance, {"path": gate.path})
        await gate.reached()
        stage.engine.perform(Kill(instance, "hung"))
        assert await stage.event() == InstanceLost(instance, "hung")
        gate.leave()

    play(scene)


def test_unload_closes_the_function_and_is_no_loss(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        instance, other = await stage.load("polite"), await stage.load("echo")
        await stage.call(instance, x=str(tmp_path / "closed"))
        gone = os.pidfd_open(stage.engine.pids[instance])
        stage.engine.perform(Unload(instance))
        assert await asyncio.to_thread(select.select, [gone], [], [], 20) == ([gone], [], [])
        os.close(gone)
        await stage.call(other, x=1)  # whatever there was to report has been reported
        assert (tmp_path / "closed").exists()
        assert stage.events.empty()

    play(scene)


def test_a_batch_booked_on_the_same_worker_runs_behind_the_first(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        instance, gates = await stage.load("wait"), [Gate(tmp_path, "a"), Gate(tmp_path, "b")]
        first = stage.start(instance, {"path": gates[0].path})
        second = stage.start(instance, {"path": gates[1].path}, after=first)
        await gates[0].reached()
        gates[0].open()
        await stage.finished(first)
        await gates[1].reached()
        gates[1].open()
        await stage.finished(second)

    play(scene)


def test_a_batch_booked_on_another_worker_waits_for_the_first(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slow, fast, third = await stage.load("wait"), await stage.load("echo"), await stage.load("invert")
        gate = Gate(tmp_path)
        first = stage.start(slow, {"path": gate.path})
        second = stage.start(fast, {"x": 1}, after=first)
        await gate.reached()
        await stage.call(third, x=1)
        assert stage.events.empty()
        gate.open()
        await stage.finished(first)
        await stage.finished(second)

    play(scene)


def test_a_booked_batch_starts_also_when_the_one_before_it_dies(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slow, fast, gate = await stage.load("wait"), await stage.load("echo"), Gate(tmp_path)
        first = stage.start(slow, {"path": gate.path})
        second = stage.start(fast, {"x": 1}, after=first)
        await gate.reached()
        stage.engine.perform(Kill(slow, "hung"))
        assert await stage.event() == InstanceLost(slow, "hung")
        await stage.finished(second)
        gate.leave()

    play(scene)


def test_a_batch_booked_behind_one_that_has_ended_starts_at_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("echo")
        first = stage.start(instance, {"x": 1})
        await stage.finished(first)
        await stage.finished(stage.start(instance, {"x": 2}, after=first))

    play(scene)


def test_the_result_of_a_dropped_job_goes_nowhere(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("echo")
        batch = stage.start(instance, {"x": bytes(100_000)}, {"x": 2})
        stage.engine.perform(DropJob(10 * batch))
        await stage.finished(batch)
        assert stage.results.keys() == {10 * batch + 1}
        await stage.call(instance, x=bytes(100_000))
        assert stage.results[10 * stage.last].slot == 0  # the room it took is free again

    play(scene)


def test_slots_of_results_are_used_again_once_released(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance, seen = await stage.load("echo"), set()
        for _ in range(5):
            await stage.call(instance, x=bytes(100_000))
            ref = stage.results[10 * stage.last]
            seen.add(ref.slot)
            stage.engine.references.release(ref)
        assert seen == {0}
        assert stage.engine.references.pool.used_bytes == 0

    play(scene)


def test_a_value_outlives_its_worker_until_it_is_released(play: Play, shm: Path) -> None:
    async def scene(stage: Stage) -> None:
        instance, other = await stage.load("echo"), await stage.load("echo", "echo-2")
        await stage.call(instance, x=b"x" * 100_000)
        ref = stage.results[10 * stage.last]
        stage.engine.perform(Kill(instance, "hung"))
        await stage.event()
        assert await stage.call(other, x=ref) == b"x" * 100_000
        stage.engine.references.release(ref)
        assert not list(shm.glob(f"*/{ref.owner}-*"))

    play(scene)


def test_a_value_freed_under_a_running_batch_stays_as_it_was(play: Play, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slow, gate, pool = await stage.load("wait"), Gate(tmp_path), stage.engine.references.pool
        path = pool.put(encoding.encode(gate.path))
        assert path is not None
        ahead, late = Gate(tmp_path, "ahead"), stage.last + 2
        first = stage.start(slow, {"path": ahead.path})
        second = stage.start(slow, {"path": path}, after=first)
        stage.engine.references.release(path)
        assert pool.put(b"something else") != path
        await ahead.reached()
        ahead.open()
        await stage.finished(first)
        await gate.reached()
        gate.open()
        await stage.finished(second)
        assert (late, stage.value(10 * second)) == (second, "done")

    play(scene)


def test_an_array_the_user_keeps_does_not_change_under_them(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("keep")
        firsts = [await stage.call(instance, x=numpy.full(20_000, float(n))) for n in range(1, 5)]
        assert firsts == [1.0] * 4

    play(scene)


def test_a_batch_too_big_for_a_frame_may_be_tried_smaller(app: str, shm: Path) -> None:
    async def main() -> None:
        async with staged(app, shm, WorkerLimits(pool_bytes=0, spill_bytes=0)) as stage:
            instance = await stage.load("echo")
            batch = stage.start(instance, {"x": bytes(33 * 2**20)}, {"x": bytes(33 * 2**20)})
            assert await stage.event() == BatchFailed(batch, "frame-too-big")

    asyncio.run(main())


LIES = pytest.mark.parametrize(
    "lie",
    [
        b"\xff\xff\xff\xff",
        b"\x04\x00\x00\x00junk",
        bytes(pack(BatchDone(99, 0, []))),
        bytes(pack(BatchDone(1, 0, []))),
        bytes(pack(BatchDone(1, 0, [ShmRef("w1", 0, 2**31)]))),
        bytes(pack(BatchDone(1, 0, [ShmRef("gateway", 0, 1)]))),
        bytes(pack(BatchDone(1, 0, [b"\xc0"], [ShmRef("gateway", 0, 1)]))),
        bytes(pack(WorkerReady(1, 1))),
    ],
    ids=["length", "garbage", "other batch", "no results", "no such slot", "not its slot", "not its input", "ready again"],
)


@LIES
def test_a_worker_that_says_nonsense_is_lost(play: Play, lie: bytes) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("say")
        stage.engine.references.pool.put(b"the gateway's own")
        gone = os.pidfd_open(stage.engine.pids[instance])
        stage.start(instance, {"frame": lie})
        assert await stage.event() == InstanceLost(instance, "worker-lost")
        assert await asyncio.to_thread(select.select, [gone], [], [], 20) == ([gone], [], [])
        os.close(gone)
        assert stage.events.empty()

    play(scene)


several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@several_cores
def test_a_batch_runs_on_the_cores_of_its_lease(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance, allowed = await stage.load("cores"), sorted(os.sched_getaffinity(0))
        assert await stage.call(instance, mask=0b10) == allowed[1:2]
        assert await stage.call(instance, mask=0b11) == allowed[:2]
        assert await stage.call(instance, mask=0b01) == allowed[:1]

    play(scene)


@several_cores
def test_libraries_use_as_many_threads_as_the_lease_has_cores(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        instance = await stage.load("threads")
        await stage.call(instance, mask=0b01)  # brings numpy in
        assert set(await stage.call(instance, mask=0b01)) == {1}
        assert set(await stage.call(instance, mask=0b11)) == {2}

    play(scene)


def test_stop_does_not_wait_for_ever(app: str, shm: Path, tmp_path: Path) -> None:
    async def main() -> None:
        engine = CpuEngine(app, shm_base=str(shm))
        stage = Stage(engine)
        await engine.start(stage.events.put_nowait, stage, lambda call_id: 0)
        instance, gate = await stage.load("wait"), Gate(tmp_path)
        pid = engine.pids[instance]
        stage.start(instance, {"path": gate.path})
        await gate.reached()
        await engine.stop(0.01)
        gate.leave()
        assert not list(shm.iterdir())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_stop_waits_for_what_runs(app: str, shm: Path, tmp_path: Path) -> None:
    async def main() -> None:
        engine = CpuEngine(app, shm_base=str(shm))
        stage = Stage(engine)
        await engine.start(stage.events.put_nowait, stage, lambda call_id: 0)
        instance, gate = await stage.load("wait"), Gate(tmp_path)
        batch = stage.start(instance, {"path": gate.path})
        await gate.reached()
        stopping = asyncio.create_task(engine.stop(20))
        await asyncio.sleep(0)
        gate.open()
        await stopping
        await stage.finished(batch)
        assert stage.value(10 * batch) == "done"

    asyncio.run(main())


def test_stop_ends_even_if_a_loss_could_not_be_reported(app: str, shm: Path) -> None:
    told: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        stage = Stage(CpuEngine(app, shm_base=str(shm)))

        def post(event: Event) -> None:
            if isinstance(event, InstanceLost):
                raise ValueError("a defect")
            stage.events.put_nowait(event)

        await stage.engine.start(post, stage, lambda call_id: 0)
        instance = await stage.load("echo")
        os.kill(stage.engine.pids[instance], signal.SIGKILL)
        while not told:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(stage.engine.stop(0), 60)

    asyncio.run(main())
    assert told == ["a defect"]


ORPHAN = """
import asyncio, sys
from lamina import encoding
from lamina.core.actions import JobRef, Load, StartBatch
from lamina.engines.cpu import CpuEngine

class Given:
    args, leaves = None, [(("input", "path"), encoding.encode(sys.argv[3]))]

class Data:
    pieces = {}

    def inputs(self, job):
        return Given

async def main():
    engine, ready = CpuEngine(sys.argv[1], shm_base=sys.argv[2]), asyncio.Event()
    await engine.start(lambda event: ready.set(), Data(), lambda call_id: 0)
    engine.perform(Load("wait-1", "wait", "cpu0"))
    await ready.wait()
    engine.perform(StartBatch(1, "wait", "wait-1", "cpu0", 1, (JobRef(1, "a", 0, "step"),)))
    print(engine.pids["wait-1"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_busy_workers_die_with_their_gateway_and_the_next_cleans_up(app: str, shm: Path, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gateway = subprocess.Popen([sys.executable, "-c", ORPHAN, app, str(shm), gate.path], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    worker = os.pidfd_open(int(gateway.stdout.readline()))
    asyncio.run(gate.reached())
    gateway.kill()
    gateway.communicate()
    assert select.select([worker], [], [], 60) == ([worker], [], [])
    gate.leave()
    os.close(worker)
    assert len(list(shm.iterdir())) == 1

    async def main() -> None:
        await CpuEngine(app, shm_base=str(shm)).stop(0)

    asyncio.run(main())
    assert not list(shm.iterdir())
