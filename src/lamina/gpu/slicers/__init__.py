"""Slicers, one file per way to partition a device; the file name is the registration.

A new back end is a file here, or anywhere if it is named by its path: a class as `gpu/slicer.py` describes, under the name
`BACK_END`.
"""

from __future__ import annotations

from lamina import plugins
from lamina.gpu.slicer import Slicer

PACKAGE = "gpu.slicers"


def back_end(name: str) -> type[Slicer]:
    """The slicer class of this name, or in the file of this path."""
    found: type[Slicer] = plugins.load(PACKAGE, name).BACK_END
    return found


def open_slicer(name: str, ordinal: int = 0, *, soft: bool = False) -> Slicer:
    """Open a slicer inside this process. Imports CUDA only where the back end needs it."""
    return back_end(name).open(ordinal, soft=soft)
