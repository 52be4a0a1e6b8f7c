"""Weight cache: which weights stay on the device when not all of them fit, by the one rule of `kernels/buffer_cache.py`.

Constants of kernel graphs are weights too: a module holds them as buffers, in one block with its parameters."""

from __future__ import annotations

from typing import ClassVar

from lamina.kernels.buffer_cache import BufferCache, NoBufferRoom


class NoDeviceMemory(NoBufferRoom):
    """No room on the device: everything that could make room is in use, or it is larger than the device."""


class WeightCache(BufferCache):
    """Cached sets of weights of one device, by key; `evict_next` makes room where there seemed to be some."""

    __slots__ = ()

    full_error: ClassVar[type[NoBufferRoom]] = NoDeviceMemory
    full_hint: ClassVar[str] = "use a larger device, or fewer functions at once"
