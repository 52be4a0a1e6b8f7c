"""CPU worker in this process: what it makes of a batch. The process around it is tested with the engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from lamina import encoding
from lamina.expr import Expr, Leaf
from lamina.ipc.framing import FrameChannel
from lamina.values.references import ErrorInfo, ShmRef, Stored
from lamina.values.shm import ShmPool, ShmReader
from lamina.worker import main as live_worker
from lamina.worker.cpu_affinity import WorkerAffinity, available_mib, cpu_device
from lamina.worker.main import FunctionWorker, WorkerSetup
from lamina.worker.protocol import BatchDone, JobFrame, RunBatch, to_worker_reader

APP = """
import lamina

app = lamina.App("test")
seen = []

@app.function()
def echo(x):
    return x

@app.function()
def subtract(a, b):
    return a - b

@app.function(batch=8)
def invert(x):
    seen.append(len(x))
    return [1 / value for value in x]

@app.function(batch=8)
def interrupted(x):
    if "stop" in x:
        raise KeyboardInterrupt
    return x

@app.function(batch=8, idempotent=False)
def interrupted_once(x):
    raise KeyboardInterrupt

@app.function()
def strange(x):
    return object() if x else None

@app.function()
def unspeakable():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError
    raise Mute

@app.function()
def half_a_pair():
    raise ValueError("\\ud800")

kept = []

@app.function()
def keep(x):
    kept.append(x)
    return float(kept[0].sum())

@app.function(batch=4)
def about(x):
    c = lamina.context()
    return [[c.units, c.batch, list(c.call_ids), c.device, c.remaining_ms() > 1000]] * len(x)
"""


@pytest.fixture
def open_worker(tmp_path: Path) -> Iterator[Callable[..., FunctionWorker]]:
    path = tmp_path / "worker_app.py"
    path.write_text(APP)
    ends: list[socket.socket] = []

    def make(function: str, pool_bytes: int = 2**22) -> FunctionWorker:
        setup = WorkerSetup(str(path), function, "cpu0", 0, str(tmp_path), "w1", pool_bytes, 0)
        ends.extend(socket.socketpair())
        return FunctionWorker(setup, FrameChannel(ends[-1], to_worker_reader()), *live_worker.load(setup), WorkerAffinity())

    yield make
    for end in ends:
        end.close()


def job(number: int, args: dict[str, Expr] | None = None, **leaves: Any) -> JobFrame:
    found: list[tuple[Leaf, Stored]] = [
        (("input", name), value if isinstance(value, ShmRef) else encoding.encode(value)) for name, value in leaves.items()
    ]
    return JobFrame(number, f"call-{number}", args, found)


def run(worker: FunctionWorker, *jobs: JobFrame) -> BatchDone:
    return worker.run(RunBatch(1, 0, list(jobs)))


def opened(results: list[bytes | ShmRef | ErrorInfo]) -> list[Any]:
    return [encoding.decode(result) if isinstance(result, bytes) else result for result in results]


def test_without_expressions_every_input_is_the_argument_of_its_name(open_worker: Callable[..., FunctionWorker]) -> None:
    assert opened(run(open_worker("subtract"), job(1, b=2, a=10)).results) == [8]


def test_expressions_make_arguments_of_leaves(open_worker: Callable[..., FunctionWorker]) -> None:
    args: dict[str, Expr] = {"a": ["input", "pair", 1], "b": ["input", "pair", 0]}
    assert opened(run(open_worker("subtract"), job(1, args, pair=[1, 5])).results) == [4]


def test_an_absent_leaf_gives_way_to_the_next(open_worker: Callable[..., FunctionWorker]) -> None:
    args: dict[str, Expr] = {"x": ["first", ["node", "skipped"], ["input", "x"]]}
    assert opened(run(open_worker("echo"), job(1, args, x="here")).results) == ["here"]


def test_results_come_in_the_order_of_the_jobs(open_worker: Callable[..., FunctionWorker]) -> None:
    done = run(open_worker("invert"), job(1, x=1), job(2, x=2), job(3, x=4))
    assert opened(done.results) == [1.0, 0.5, 0.25]


def test_one_failing_job_fails_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    first, second, third = opened(run(open_worker("invert"), job(1, x=1), job(2, x=0), job(3, x=4)).results)
    assert (first, third) == (1.0, 0.25)
    assert (second.type, second.message) == ("ZeroDivisionError", "division by zero")


def test_an_error_tells_of_the_users_lines_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    (error,) = opened(run(open_worker("invert"), job(1, x=0)).results)
    assert "return [1 / value for value in x]" in error.trace
    assert "lamina/live" not in error.trace


def test_what_gets_past_the_runner_hits_the_guilty_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    good, bad = opened(run(open_worker("interrupted"), job(1, x="go"), job(2, x="stop")).results)
    assert good == "go"
    assert bad.type == "KeyboardInterrupt"


def test_what_must_not_run_twice_fails_as_a_whole(open_worker: Callable[..., FunctionWorker]) -> None:
    results = opened(run(open_worker("interrupted_once"), job(1, x=1), job(2, x=2)).results)
    assert [result.type for result in results] == ["KeyboardInterrupt"] * 2


def test_a_leaf_that_is_no_value_fails_its_job_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    bad = JobFrame(1, "c", None, [(("input", "x"), b"\xc1")])
    first, second = opened(run(open_worker("echo"), bad, job(2, x="fine")).results)
    assert (first.type, second) == ("BadValue", "fine")


def test_a_slot_that_is_not_there_fails_its_job_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    first, second = opened(run(open_worker("echo"), job(1, x=ShmRef("gateway", 9, 9)), job(2, x="fine")).results)
    assert (first.type, second) == ("BadSlot", "fine")


def test_inputs_that_could_not_be_made_fail_their_job_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    absent = ErrorInfo("Absent", "no step 'a'")
    frame = JobFrame(1, "c", None, [], error=absent)
    assert opened(run(open_worker("echo"), frame, job(2, x="fine")).results) == [absent, "fine"]


def test_a_result_that_cannot_travel_fails_its_job_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    first, second = opened(run(open_worker("strange"), job(1, x=True), job(2, x=False)).results)
    assert (first.type, second) == ("TypeError", None)  # of the function; `BadValue` would blame the caller


@pytest.mark.parametrize(("function", "message"), [("unspeakable", "(its text could not be read)"), ("half_a_pair", "?")])
def test_an_error_with_a_broken_text_is_still_reported(
    open_worker: Callable[..., FunctionWorker], function: str, message: str
) -> None:
    (error,) = run(open_worker(function), job(1)).results
    assert isinstance(error, ErrorInfo)
    assert error.message == message


def test_a_large_result_goes_into_shared_memory(open_worker: Callable[..., FunctionWorker], tmp_path: Path) -> None:
    array = numpy.arange(50_000)
    (ref,) = run(open_worker("echo"), job(1, x=array)).results
    assert isinstance(ref, ShmRef)
    assert (encoding.decode(ShmReader(str(tmp_path)).view(ref)) == array).all()


def test_a_large_result_goes_inline_when_there_is_no_room(open_worker: Callable[..., FunctionWorker]) -> None:
    (blob,) = run(open_worker("echo", pool_bytes=0), job(1, x=bytes(100_000))).results
    assert isinstance(blob, bytes)


def test_a_result_that_fits_no_frame_fails_its_job_alone(open_worker: Callable[..., FunctionWorker]) -> None:
    done = run(open_worker("echo", pool_bytes=0), job(1, x=bytes(33 * 2**20)), job(2, x="fine"))
    first, second = opened(done.results)
    assert (first.type, second) == ("ResultTooBig", "fine")


def test_what_the_user_still_looks_into_is_reported(open_worker: Callable[..., FunctionWorker], tmp_path: Path) -> None:
    pool = ShmPool(str(tmp_path), "gateway", 2**20)
    ref = pool.put(encoding.encode(numpy.ones(10_000)))
    assert run(open_worker("keep"), job(1, x=ref)).still_viewed == [ref]


def test_what_is_used_and_dropped_is_not(open_worker: Callable[..., FunctionWorker], tmp_path: Path) -> None:
    pool = ShmPool(str(tmp_path), "gateway", 2**20)
    ref = pool.put(encoding.encode(numpy.ones(10_000)))
    assert run(open_worker("echo"), job(1, x=ref)).still_viewed == []


def test_the_context_tells_of_the_batch(open_worker: Callable[..., FunctionWorker]) -> None:
    worker = open_worker("about")
    results = opened(run(worker, job(1, x=0), job(2, x=0)).results)
    assert results[0] == [len(os.sched_getaffinity(0)), 2, ["call-1", "call-2"], "cpu0", True]


def test_a_deadline_leaves_as_much_time_as_there_is(open_worker: Callable[..., FunctionWorker]) -> None:
    late = JobFrame(1, "c", None, job(1, x=0).leaves, deadline_us=1)
    assert opened(run(open_worker("about"), late).results)[0][-1] is False


def test_the_machine_is_a_device_of_its_cores() -> None:
    device = cpu_device()
    assert (device.units, device.family) == (len(os.sched_getaffinity(0)), "cpu")
    assert 0 < device.memory_mib < available_mib()
