"""Kernel graphs in CUDA C as an app: what `bad_graphs.py` and `clients.py` serve over HTTP."""

from __future__ import annotations

from typing import Any

import lamina
from lamina import kernels

app = lamina.App("graphs")

SOURCE = """
extern "C" __global__ void add(const float* a, const float* b, float* total) {
  int at = blockIdx.z * 4 + threadIdx.x;
  total[at] = a[at] + b[threadIdx.x];
}
extern "C" __global__ void scale(const float* a, float by, float* scaled) {
  int at = blockIdx.z * 4 + threadIdx.x;
  scaled[at] = a[at] * by;
}
extern "C" __global__ void triple(const int* a, int by, int* scaled) {
  int at = blockIdx.z * 4 + threadIdx.x;
  scaled[at] = a[at] * by;
}
extern "C" __global__ void step(float* state, const float* weights, int width) {
  // one step of a dense recurrence: every thread has a row
  extern __shared__ float held[];
  float* own = state + blockIdx.z * width;
  held[threadIdx.x] = own[threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
  for (int at = 0; at < width; ++at) sum += held[at] * weights[at * width + threadIdx.x];
  own[threadIdx.x] = tanhf(sum);
}
"""
WIDTH, STEPS = 256, 40

add, scale, triple = (kernels.cuda_kernel(SOURCE, name) for name in ("add", "scale", "triple"))
step = kernels.cuda_kernel(SOURCE, "step")


def ones() -> Any:
    import numpy as np

    return np.ones(4, np.float32)


def weights() -> Any:
    import numpy as np

    return (np.random.default_rng(1).standard_normal((WIDTH, WIDTH)) / 16).astype(np.float32)


@app.kernel_graph(gpu=lamina.GPU(1 / 15, required=True), slo="2s", batch=8, scale=lamina.Scale(min=1, max=1))
def mutated(g: Any) -> None:
    x, c = g.input("x", "float32", (4,)), g.constant("c", "float32", (4,), value=ones)
    n, t = g.input("n", "int32", (2, 2)), g.temporary("t", "float32", (4,))
    y, m = g.output("y", "float32", (4,)), g.output("m", "int32", (2, 2))
    g.launch(add, x, c, kernels.out(t), block=(4, 1, 1))
    g.launch(scale, t, 2.0, kernels.out(y), block=(4, 1, 1))
    g.launch(triple, n, 3, kernels.out(m), block=(4, 1, 1))


@app.kernel_graph(gpu=lamina.GPU(1 / 15, required=True), slo="2s", batch=8, scale=lamina.Scale(min=1, max=1))
def bystander(g: Any) -> None:
    y = g.output("y", "float32", (4,))
    g.launch(scale, g.input("x", "float32", (4,)), 2.0, kernels.out(y), block=(4, 1, 1))


@app.kernel_graph(
    gpu=lamina.GPU(3 / 15, required=True), slo="250ms", batch=64, iterations=STEPS, scale=lamina.Scale(min=1, max=1)
)
def recur(g: Any) -> None:
    """Forty steps of a recurrence, 256 wide: some 0.3 ms on three units."""
    x = g.input("x", "float32", (WIDTH,))
    state = g.output("state", "float32", (WIDTH,), start=x)
    w = g.constant("w", "float32", (WIDTH, WIDTH), value=weights)
    g.launch(step, kernels.inout(state), w, WIDTH, block=(WIDTH, 1, 1), shared_bytes=4 * WIDTH)
