"""Kernel graphs in the executor: a run pauses between two kernels and goes on bit-equal; and the module of a device, with a
launcher that runs the twins on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lamina import kernels
from lamina.errors import LoadFailed
from lamina.gpu.executor import SliceExecutor
from lamina.gpu.slicers.null import NullSlicer
from lamina.kernels.graph import Argument, KernelGraph, Launch
from lamina.kernels.host_run import HostGraph
from lamina.kernels.validation import check_graph

SEEN: list[str] = []


@kernels.numpy_kernel
def smooth(x, y):
    SEEN.append("smooth")
    y[...] = (x + np.roll(x, 1, -1) + np.roll(x, -1, -1)) / np.float32(3)


@kernels.numpy_kernel
def shift(x, by, y):
    SEEN.append("shift")
    y[...] = x + np.float32(by)


def long_graph(iterations: int = 4) -> KernelGraph:
    g = kernels.GraphBuilder()
    x = g.input("x", "float32", (32,))
    y, t = g.output("y", "float32", (32,), start=x), g.temporary("t", "float32", (32,))
    g.launch(smooth, y, kernels.out(t))
    g.launch(shift, t, 0.1, kernels.out(y))
    return g.build(iterations)


def short_graph() -> KernelGraph:
    g = kernels.GraphBuilder()
    g.launch(shift, g.input("x", "float32", (32,)), 5, kernels.out(g.output("y", "float32", (32,))))
    return g.build()


@pytest.fixture
def executor() -> SliceExecutor:
    made = SliceExecutor(NullSlicer())
    for name, graph in (("long", long_graph()), ("short", short_graph())):
        made.load(name, HostGraph(graph), (np.zeros((1, 32), np.float32),), buckets=(1, 2))
        made.models.prepare(name, [1])
    SEEN.clear()
    return made


def finish(executor: SliceExecutor) -> dict[int, Any]:
    found = {}
    while executor.has_work:
        for done in executor.poll():
            found[done.ticket] = done
    return found


def test_a_graph_pauses_between_two_kernels_and_goes_on_bit_equal(executor: SliceExecutor):
    rng = np.random.default_rng(7)
    for pause_at in range(1, 8):
        item = rng.random(32, dtype=np.float32)
        (whole,) = HostGraph(long_graph())(item[None])
        SEEN.clear()
        long = executor.submit("long", [item], 1)
        while len(SEEN) < pause_at:
            executor.poll()
        urgent = executor.submit("short", [item], 1, preempts=[long])
        found = finish(executor)
        assert SEEN[pause_at] == "shift" and len(SEEN) == 9, "the urgent one ran next"
        assert found[long].outputs[0][0].tobytes() == whole[0].tobytes()
        assert found[urgent].outputs[0][0].tobytes() == (item + np.float32(5)).tobytes()


def test_a_kernel_that_fails_ends_its_own_batch_and_no_other():
    @kernels.numpy_kernel
    def broken(x, y):
        raise ZeroDivisionError("of its own")

    g = kernels.GraphBuilder()
    g.launch(broken, g.input("x", "float32", (32,)), kernels.out(g.output("y", "float32", (32,))))
    executor = SliceExecutor(NullSlicer())
    executor.load("broken", HostGraph(g.build()), (np.zeros((1, 32), np.float32),), buckets=(1,))
    executor.load("short", HostGraph(short_graph()), (np.zeros((1, 32), np.float32),), buckets=(1,))
    for name in ("broken", "short"):
        executor.models.prepare(name, [1])
    bad = executor.submit("broken", [np.zeros(32, np.float32)], 1)
    good = executor.submit("short", [np.zeros(32, np.float32)], 1)
    found = finish(executor)
    assert isinstance(found[bad].error, ZeroDivisionError)
    assert found[good].error is None and found[good].outputs[0][0][0] == 5


class TwinLauncher:
    """A launcher that runs a kernel's twin on the memory it is given the addresses of."""

    def __init__(self, graph: KernelGraph) -> None:
        self._graph, self.launches = graph, list[tuple[str, int]]()

    def compile(self, kernel: Any) -> Any:
        return kernel

    def launch(self, compiled: Any, launch: Launch, batch: int, stream: int, values: Sequence[Any]) -> None:
        self.launches.append((launch.name, batch))
        args = []
        for arg, value in zip(launch.args, values, strict=True):
            if isinstance(arg, Argument):
                buffer = self._graph.buffer(arg.buffer)
                has_rows = buffer.kind != "constant"
                rows = batch if has_rows else 1
                raw = (ctypes.c_uint8 * (buffer.nbytes * rows)).from_address(value.value)
                array = np.frombuffer(raw, buffer.dtype)
                args.append(array.reshape((batch, *buffer.shape) if has_rows else buffer.shape))
            else:
                args.append(value)
        compiled.twin(*args)


def test_the_module_of_a_device_launches_what_the_host_runs():
    torch = pytest.importorskip("torch")
    from lamina.gpu.kernel_module import device_module

    def weigh(x, w, y):
        y[...] = x * w

    source = 'extern "C" __global__ void weigh(const float* x, const float* w, float* y) {}'
    weighing = kernels.cuda_kernel(source, "weigh", twin=weigh)
    moving = kernels.cuda_kernel(
        'extern "C" __global__ void move(const float* x, float by, float* y) {}', "move", twin=shift.twin
    )
    g = kernels.GraphBuilder()
    x, w = g.input("x", "float32", (8,)), g.constant("w", "float32", (8,), value=lambda: np.arange(8, dtype=np.float32))
    t, y = g.temporary("t", "float32", (8,)), g.output("y", "float32", (8,))
    g.launch(weighing, x, w, kernels.out(t), grid=(1,), block=(8,))
    g.launch(moving, t, 1.0, kernels.out(y), grid=(1,), block=(8,))
    graph = g.build(iterations=2)
    launcher = TwinLauncher(graph)
    module, example = device_module(graph, check_graph(graph), launcher, lambda: 0)
    assert [tuple(part.shape) for part in example] == [(1, 8)]
    batch = np.random.default_rng(3).random((3, 8), dtype=np.float32)
    (found,) = module(torch.from_numpy(batch))
    assert found.numpy().tobytes() == HostGraph(graph)(batch)[0].tobytes()
    assert launcher.launches == [("weigh-0", 3), ("move-1", 3)] * 2
    assert [name for name, _ in module.named_buffers()] == ["constant_w"], "constants move with the weights"


def test_a_kernel_for_the_host_alone_is_refused_on_a_device():
    pytest.importorskip("torch")
    from lamina.gpu.kernel_module import device_module

    graph = short_graph()
    with pytest.raises(LoadFailed, match="runs on the host alone"):
        device_module(graph, check_graph(graph), TwinLauncher(graph), lambda: 0)


def test_compiled_kernels_are_found_again_by_source_and_compiler_and_a_torn_file_is_not(tmp_path):
    from lamina.gpu.kernel_module import CubinCache

    text = 'extern "C" __global__ void k(float* a) {{ a[0] = {}; }}'
    one, other = (kernels.cuda_kernel(text.format(number), "k") for number in (1, 2))
    cache = CubinCache(tmp_path / "deep", "nvrtc 13.0 sm_90")
    assert cache.find(one) is None
    cache.put(one, b"image")
    assert cache.find(one) == b"image" and cache.find(other) is None
    assert CubinCache(tmp_path / "deep", "nvrtc 13.1 sm_90").find(one) is None, "another compiler"
    cache.path(one).write_bytes(cache.path(one).read_bytes()[:-1])
    assert cache.find(one) is None
    CubinCache(tmp_path / ("x" * 300), "nvrtc").put(one, b"image")  # a folder that cannot be: no error
