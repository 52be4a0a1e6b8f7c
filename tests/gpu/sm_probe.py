"""SM probe: on which SMs does work on a stream run? A kernel asks the hardware; tests and the doctor believe nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

from lamina.gpu.driver import CudaError

_KERNEL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry sm_of_block(.param .u64 ids, .param .u64 spin)
{
  .reg .pred %again;
  .reg .b32 %sm, %block;
  .reg .b64 %at, %ids, %offset, %begin, %now, %passed, %spin;
  ld.param.u64 %ids, [ids];
  ld.param.u64 %spin, [spin];
  cvta.to.global.u64 %ids, %ids;
  mov.u32 %sm, %smid;
  mov.u32 %block, %ctaid.x;
  mul.wide.u32 %offset, %block, 4;
  add.u64 %at, %ids, %offset;
  st.global.u32 [%at], %sm;
  mov.u64 %begin, %clock64;
WAIT:
  mov.u64 %now, %clock64;
  sub.u64 %passed, %now, %begin;
  setp.lt.u64 %again, %passed, %spin;
  @%again bra WAIT;
  ret;
}
\0"""

_BLOCKS = 4096
_SPIN_CYCLES = 20_000
"""Blocks stay long enough that the next ones must go to other SMs."""


class SmProbe:
    """Loads the kernel once. `launch` only puts it on the stream, so it may be captured into a graph."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._lib = ctypes.CDLL("libcuda.so.1")
        library, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        none, zero = None, ctypes.c_uint(0)
        self._check(
            "cuLibraryLoadData",
            self._lib.cuLibraryLoadData(ctypes.byref(library), _KERNEL, none, none, zero, none, none, zero),
        )
        self._check("cuLibraryGetKernel", self._lib.cuLibraryGetKernel(ctypes.byref(self._kernel), library, b"sm_of_block"))
        self.ids = torch.full((_BLOCKS,), -1, device="cuda", dtype=torch.int32)
        torch.cuda.current_stream().synchronize()

    def launch(self, stream: int) -> None:
        values = (ctypes.c_uint64(self.ids.data_ptr()), ctypes.c_uint64(_SPIN_CYCLES))
        pointers = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values))
        one, threads = ctypes.c_uint(1), ctypes.c_uint(1024)
        self._check(
            "cuLaunchKernel",
            self._lib.cuLaunchKernel(
                self._kernel,
                ctypes.c_uint(_BLOCKS),
                one,
                one,
                threads,
                one,
                one,
                ctypes.c_uint(0),
                ctypes.c_void_p(stream),
                pointers,
                None,
            ),
        )

    def read(self, torch_stream: Any) -> frozenset[int]:
        """The ids the last launch on this stream wrote."""
        torch_stream.synchronize()
        return frozenset(self.ids.tolist()) - {-1}

    def run(self, stream: int) -> frozenset[int]:
        torch_stream = self._torch.cuda.ExternalStream(stream)
        with self._torch.cuda.stream(torch_stream):
            self.ids.fill_(-1)
            self.launch(stream)
        return self.read(torch_stream)

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise CudaError(call, f"CUDA_ERROR_{status}")
