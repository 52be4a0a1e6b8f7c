"""CUDA C on the host: a kernel's source compiled by the C++ compiler of this machine, with blocks and threads as loops.

For kernels that are right with any number of threads, one at a time: no thread may wait for another's work except where a block
has one thread only. That is enough to see that source and twin compute the same, without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_PRELUDE = """
#include <cmath>
#include <cstddef>
struct Axes { int x, y, z; };
extern "C" { Axes blockIdx, threadIdx, blockDim, gridDim; }
#define __global__
#define __device__
#define __shared__ static
static inline void __syncthreads() {}
#line 1
"""


class HostCompiled:
    def __init__(self, source: str, folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler here")
        text, library = folder / "kernels.cpp", folder / "kernels.so"
        text.write_text(_PRELUDE + source)
        flags = ["-O1", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC", "-w"]
        subprocess.run([compiler, *flags, "-o", str(library), str(text)], check=True)
        self._library = ctypes.CDLL(str(library))

    def run(
        self, name: str, batch: int, args: list[Any], grid: tuple[int, int] = (1, 1), block: tuple[int, int] = (1, 1)
    ) -> None:
        """Run a kernel on arrays, in place."""
        kernel = getattr(self._library, name)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in args]
        self._set("blockDim", (*block, 1))
        self._set("gridDim", (*grid, batch))
        for z, y, x in itertools.product(range(batch), range(grid[1]), range(grid[0])):
            self._set("blockIdx", (x, y, z))
            for thread_y, thread_x in itertools.product(range(block[1]), range(block[0])):
                self._set("threadIdx", (thread_x, thread_y, 0))
                kernel(*pointers)

    def _set(self, name: str, axes: tuple[int, ...]) -> None:
        found = (ctypes.c_int * 3).in_dll(self._library, name)
        found[:] = axes
