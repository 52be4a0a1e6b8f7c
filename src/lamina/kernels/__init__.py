"""Kernel graphs: kernels over declared buffers, run on a device on behalf of clients that hold nothing of it.

from lamina import kernels

@kernels.numpy_kernel
def scale(image, out): out[:] = image * (1 / 255)

@app.kernel_graph(slo="20ms", batch=8)
def normalise(g):
    image = g.input("image", "uint8", (224, 224, 3))
    g.launch(scale, image, kernels.out(g.output("scaled", "float32", (224, 224, 3))))
"""

from __future__ import annotations

from lamina.kernels.graph import Buffer, GraphBuilder, KernelGraph, inout, out
from lamina.kernels.sources import Kernel, cuda_kernel, numpy_kernel, onnx_kernel, torch_kernel, triton_kernel

__all__ = [
    "Buffer",
    "GraphBuilder",
    "Kernel",
    "KernelGraph",
    "cuda_kernel",
    "inout",
    "numpy_kernel",
    "onnx_kernel",
    "out",
    "torch_kernel",
    "triton_kernel",
]
