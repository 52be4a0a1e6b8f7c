"""Kernel graphs on a real GPU: CUDA C by NVRTC and Triton against their twins, in graphs, with constants that are paged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import kernels
from lamina.errors import LoadFailed
from lamina.gpu.driver import NoGpu
from lamina.gpu.executor import SliceExecutor, open_executor
from lamina.gpu.slicers.green import GreenSlicer
from lamina.kernels.graph import KernelGraph
from lamina.kernels.host_run import HostGraph
from lamina.kernels.validation import check_graph

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

SOURCE = """
extern "C" __global__ void weigh(const float *x, const float *w, float by, int n, float *y) {
    int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place < n) y[blockIdx.z * n + place] = x[blockIdx.z * n + place] * w[place] * by;
}
"""
N = 1_000


def weigh_twin(x: Any, w: Any, by: float, n: int, y: Any) -> None:
    y[...] = x * w * np.float32(by)


def weighing(iterations: int = 1, seed: int = 0) -> KernelGraph:
    kernel = kernels.cuda_kernel(SOURCE, "weigh", twin=weigh_twin)
    g = kernels.GraphBuilder()
    x = g.input("x", "float32", (N,))
    w = g.constant("w", "float32", (N,), value=lambda: np.random.default_rng(seed).random(N, dtype=np.float32))
    t, y = g.temporary("t", "float32", (N,)), g.output("y", "float32", (N,), start=x)
    g.launch(kernel, y, w, 1.5, N, kernels.out(t), grid=(4,), block=(256,))
    g.launch(kernel, t, w, 0.5, N, kernels.out(y), grid=(4,), block=(256,))
    return g.build(iterations)


@pytest.fixture(scope="module")
def slicer() -> GreenSlicer:
    try:
        return GreenSlicer()
    except NoGpu as error:
        pytest.skip(str(error))


@pytest.fixture
def executor(slicer: GreenSlicer) -> SliceExecutor:
    return open_executor(slicer, weights_mib=4)


def load(executor: SliceExecutor, name: str, graph: KernelGraph) -> None:
    from lamina.gpu.kernel_module import NvrtcLauncher, device_module

    module, example = device_module(
        graph, check_graph(graph), NvrtcLauncher(), lambda: int(torch.cuda.current_stream().cuda_stream)
    )
    executor.load(name, module, example, buckets=(1, 4))


def run(executor: SliceExecutor, name: str, items: list[Any], mask: int = 1) -> np.ndarray:
    executor.submit(name, items, mask)
    while True:
        for done in executor.poll():
            assert done.error is None, done.error
            assert done.outputs is not None
            return np.stack([row[0] if isinstance(row, tuple) else row for row in done.outputs])


def test_cuda_c_computes_what_its_twin_does_captured_or_not(executor: SliceExecutor):
    graph = weighing(iterations=3)
    load(executor, "weigh", graph)
    items = np.random.default_rng(1).random((4, N), dtype=np.float32)
    want = HostGraph(graph)(items)[0]
    assert np.array_equal(run(executor, "weigh", list(items)), want), "eager"
    executor.prepare("weigh", [1, 3])
    for mask in (1, 3):
        for _ in range(3):
            assert np.array_equal(run(executor, "weigh", list(items), mask), want)


def test_constants_come_back_after_they_were_evicted(executor: SliceExecutor):
    for seed in range(6):  # a page each: more than the cache holds
        load(executor, f"w{seed}", weighing(seed=seed))
    item = np.ones((1, N), np.float32)
    for seed in (0, 5, 0, 3, 1, 0):
        assert np.array_equal(run(executor, f"w{seed}", list(item)), HostGraph(weighing(seed=seed))(item)[0])
    assert executor.models.evictions > 0


def test_source_that_does_not_compile_says_what_the_compiler_said(slicer: GreenSlicer):
    from lamina.gpu.kernel_module import NvrtcLauncher

    kernel = kernels.cuda_kernel('extern "C" __global__ void bad(float *y) { y[0] = nonsense; }', "bad")
    with pytest.raises(LoadFailed, match="nonsense"):
        NvrtcLauncher().compile(kernel)


def test_the_jpeg_decoder_gives_the_pixels_of_libjpeg(slicer: GreenSlicer):
    cv2 = pytest.importorskip("cv2")
    from lamina.gpu.kernel_module import NvrtcLauncher
    from lamina.kernels.graph import Argument, Launch

    source = (Path(__file__).parents[2] / "examples" / "jpeg" / "jpeg.cu").read_text()
    image = np.random.default_rng(2).integers(0, 255, (40, 120), np.uint8)
    file = cv2.imencode(".jpg", cv2.GaussianBlur(image, (9, 9), 0))[1].tobytes()
    bytes_in = torch.frombuffer(bytearray(file.ljust(32_768, b"\0")), dtype=torch.uint8).cuda()
    size = torch.tensor([len(file)], dtype=torch.int32).cuda()
    blocks = torch.zeros(3 * 14 * 66 * 64, dtype=torch.int16).cuda()
    pixels, extents = torch.zeros(96 * 512 * 3, dtype=torch.uint8).cuda(), torch.zeros(2, dtype=torch.int32).cuda()
    launcher, kernel = NvrtcLauncher(), kernels.cuda_kernel(source, "jpeg_decode")
    launch = Launch(name="d", kernel="jpeg_decode", args=(Argument("a"),), block=(256, 1, 1))
    import ctypes

    values = [ctypes.c_void_p(one.data_ptr()) for one in (bytes_in, size, blocks, pixels, extents)]
    launcher.launch(launcher.compile(kernel), launch, 1, int(torch.cuda.current_stream().cuda_stream), values)
    torch.cuda.synchronize()
    assert extents.tolist() == [40, 120]
    found = pixels.cpu().numpy().reshape(96, 512, 3)[:40, :120, 0].astype(int)
    assert np.abs(found - cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_GRAYSCALE)).max() <= 1
