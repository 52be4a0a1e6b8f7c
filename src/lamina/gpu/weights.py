"""Weights of a torch module as one block: pinned in host memory, on the device when needed, always at the same address.

A CUDA graph has addresses baked in, so weights that come back must come back to where they were. A range of addresses is
reserved for each set of weights and kept; pages are put under it on loading and taken away on eviction. Modules with equal
weights share one block, found by a hash of its contents.

The host's copy is a file in memory, so that an executor and its standby have one between them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lamina.gpu.driver import OUT_OF_MEMORY, CudaDriver, CudaError
from lamina.gpu.weight_cache import NoDeviceMemory, WeightCache
from lamina.kernels.buffer_cache import copy_time_us

_ALIGN = 512
LEAST_PIECE_BYTES, MOST_PIECES = 4 << 20, 16
"""A copy goes in pieces, so that the first layers need not wait for the last; smaller ones than this would slow the link."""

MOST_COPIED_BYTES = 64 << 20
"""Of tensors a module has beside its weights, for a second thread."""


class _AtAddress:
    """Device memory that is ours, shown to torch without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class HostWeights:
    """Pinned memory of the host for one set of weights. With a `folder` it is a file there, which others find by its contents."""

    def __init__(self, torch: Any, size: int, folder: str = "") -> None:
        self._torch, self._folder, self._path = torch, folder, ""
        self._is_registered = False
        self.tensor: Any = None
        try:
            self._map(*self._new_file(size), size)
        except OSError:  # no folder, or no room there
            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True).zero_()

    def _new_file(self, size: int) -> tuple[int, str]:
        if not self._folder:
            raise FileNotFoundError
        handle, path = tempfile.mkstemp(dir=self._folder, prefix=_NEW)
        try:
            os.posix_fallocate(handle, 0, size)  # else a full file system shows when the memory is written to, and ends us
        except OSError:
            os.close(handle)
            os.unlink(path)
            raise
        return handle, path

    def _map(self, handle: int, path: str, size: int) -> None:
        try:
            self.tensor = self._torch.frombuffer(mmap.mmap(handle, size), dtype=self._torch.uint8)
        finally:
            os.close(handle)
        self._path = path

    def publish(self, key: str) -> None:
        """Its contents are complete: pin it, under its name; or the one that is there under this name already."""
        if not self._path:
            return
        path = os.path.join(self._folder, _WEIGHTS + hashlib.blake2b(key.encode(), digest_size=16).hexdigest())
        size = int(self.tensor.numel())
        try:
            os.link(self._path, path)
        except FileExistsError:
            with contextlib.suppress(OSError):  # it is just being removed: then ours stays ours
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(handle).st_size == size:
                    os.unlink(self._path)
                    self._map(handle, "", size)
                else:
                    os.close(handle)
        except OSError:
            path = ""
        if self._path:
            os.unlink(self._path)
        self._path = path
        code = self._torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size, 1)
        if int(code):
            raise MemoryError(f"{size} bytes of the host's memory cannot be pinned: CUDA error {int(code)}")
        self._is_registered = True

    def remove(self) -> None:
        """It is not needed here any more, nor to be found by others; a process that has it keeps it."""
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def __del__(self) -> None:
        if self._is_registered:
            with contextlib.suppress(Exception):  # the interpreter, or the device, may be on its way out
                self._torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


_NEW, _WEIGHTS = ".new-weights-", ".weights-"


@dataclass(slots=True)
class WeightBlock:
    """One set of weights. `place` tells for every tensor where it lies."""

    key: str
    host: HostWeights
    size: int
    address: int
    room: int  #: of the range: whole pages
    pages: int = 0  #: handle of what is mapped; 0: not on the device
    device: Any = None
    arrived: Any = None  #: event: the copy is complete
    pieces: list[Any] = field(default_factory=list)  #: events: so much of the copy is complete
    is_copied: bool = False  #: the copy is known to be complete
    owners: set[str] = field(default_factory=set)

    @property
    def piece_bytes(self) -> int:
        return max(LEAST_PIECE_BYTES, -(-self.size // MOST_PIECES))

    def pending_event(self) -> Any:
        """The event a user has to wait for; None once it has happened."""
        if not self.is_copied:
            self.is_copied = bool(self.arrived.query())
        return None if self.is_copied else self.arrived


@dataclass(frozen=True, slots=True)
class _Spot:
    offset: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights of a module in pinned memory, on their way into a block."""

    spots: list[tuple[Any, _Spot]]
    host: HostWeights
    size: int
    key: str


class WeightStore:
    """Store of all weight blocks of one device. In `folder`, which is in memory, other processes find the host's copies."""

    def __init__(self, driver: CudaDriver, capacity_bytes: int, folder: str = "") -> None:
        import torch

        self._torch: Any = torch
        self._driver, self._folder = driver, folder
        self._page = driver.page_bytes()
        self._copy = self._torch.cuda.Stream()
        self.cache = WeightCache(capacity_bytes)
        self.blocks: dict[str, WeightBlock] = {}

    def stage(self, module: Any, digest: str = "") -> StagedWeights:
        """Copy parameters and buffers into pinned memory, and hash them. Slow, and touches nothing of ours: any thread may.

        `digest` stands for the contents if they are known by one already; hashing them takes a second for each GB.
        """
        spots, size = _layout(module)
        host = HostWeights(self._torch, size, self._folder)
        for tensor, spot in spots:
            _at(self._torch, host.tensor, spot).copy_(tensor.detach())
        self._torch.cuda.current_stream().synchronize()
        key = digest or _digest(spots, host.tensor)
        host.publish(key)
        return StagedWeights(spots, host, size, key)

    def add(self, owner: str, staged: StagedWeights) -> WeightBlock:
        """Move a module's parameters and buffers into a block; one for all modules with equal weights."""
        block = self.blocks.get(staged.key)
        if block is None:
            room = -(-staged.size // self._page) * self._page
            block = self.blocks[staged.key] = WeightBlock(staged.key, staged.host, staged.size, self._driver.reserve(room), room)
        block.owners.add(owner)
        try:
            self.ensure_resident(block)
        except BaseException:
            self.remove(owner, block)
            raise
        for tensor, spot in staged.spots:
            tensor.data = _at(self._torch, block.device, spot)
        return block

    def ensure_resident(self, block: WeightBlock) -> None:
        """Bring a block to the device, if it is not there. Returns at once; its users wait for `arrived`."""
        if block.pages:
            return
        for key in self.cache.place(block.key, block.room, copy_time_us(block.size)):
            self._unmap(self.blocks[key])
        try:
            block.pages = self._pages(block)
        except BaseException:
            self.cache.remove(block.key)
            raise
        torch = self._torch
        if block.device is None:
            block.device = torch.as_tensor(_AtAddress(block.address, block.size), device="cuda")
            block.arrived = torch.cuda.Event()
            block.pieces = [torch.cuda.Event(external=True) for _ in range(0, block.size, block.piece_bytes)]
        block.is_copied = False
        host, stream = block.host.tensor.data_ptr(), self._copy.cuda_stream
        for start, piece in zip(range(0, block.size, block.piece_bytes), block.pieces, strict=True):
            size = min(block.piece_bytes, block.size - start)
            self._driver.copy_in(block.address + start, host + start, size, stream)  # a fifth of what torch takes to say it
            piece.record(self._copy)
        block.arrived.record(self._copy)

    def _pages(self, block: WeightBlock) -> int:
        """Map pages under a block, evicting where the device is full all the same.

        The cache knows neither what batches take nor what other processes have. What torch holds in case it is needed again
        goes first, which waits for the device; then unused weights."""
        is_trimmed = False
        while True:
            try:
                return self._driver.map(block.address, block.room)
            except CudaError as error:
                if error.name != OUT_OF_MEMORY:
                    raise
            if not is_trimmed:
                self._torch.cuda.empty_cache()
                is_trimmed = True
            elif (key := self.cache.evict_next(block.key)) is not None:
                self._unmap(self.blocks[key])
            else:
                raise NoDeviceMemory(
                    f"no room for {block.room >> 20} MiB: the device is full", hint="is another process using it?"
                )

    def evict(self, block: WeightBlock) -> None:
        """Evict a block; the host copy stays. Nothing that uses it may be running."""
        if block.pages:
            self.cache.remove(block.key)
            self._unmap(block)

    def remove(self, owner: str, block: WeightBlock) -> None:
        block.owners.discard(owner)
        if not block.owners:
            self.evict(block)
            block.host.remove()
            del self.blocks[block.key]  # its range of addresses is not used again: there are 2**47 of them

    def _unmap(self, block: WeightBlock) -> None:
        block.arrived.synchronize()
        self._driver.unmap(block.address, block.room, block.pages)
        block.pages = 0


@dataclass(slots=True)
class LayerwiseWait:
    """Have all layers of a module waited for their weights?"""

    is_complete: bool = False


@contextmanager
def layerwise_wait(module: Any, block: WeightBlock | None, stream: Any) -> Iterator[LayerwiseWait]:
    """Layer-wise wait: inside, each layer waits for the chunk of the copy its weights are in, if there is more than one.

    Afterwards it says if all did. A layer that was not called may have been used all the same: attention takes the weights of its
    last layer as they are. Then the run as a whole must wait for everything.

    Captured into a graph this lets the first layers run while the last are still on their way. When all is there, it costs
    nothing worth naming: an event that has happened holds nothing up. The module is this thread's alone meanwhile.
    """
    waiting = LayerwiseWait()
    if block is None or len(block.pieces) < 2:
        yield waiting
        return
    waited, uncalled = -1, {layer for layer in module.modules() if _own(layer)}

    def before(layer: Any, _: Any) -> None:
        nonlocal waited
        uncalled.discard(layer)
        for tensor in _own(layer):
            last = (tensor.data_ptr() - block.address + tensor.numel() * tensor.element_size() - 1) // block.piece_bytes
            if waited < last < len(block.pieces):
                stream.wait_event(block.pieces[last])
                waited = last

    hooks = [layer.register_forward_pre_hook(before) for layer in module.modules()]
    try:
        yield waiting
        waiting.is_complete = not uncalled
    finally:
        for hook in hooks:
            hook.remove()


class _Copied(dict[Any, Any]):
    """Memo of a deep copy, limited to so many bytes of tensors."""

    def __init__(self, shared: Iterable[tuple[int, Any]]) -> None:
        super().__init__(shared)
        self._bytes = 0

    def __setitem__(self, key: Any, made: Any) -> None:
        self._bytes += made.nbytes if hasattr(made, "untyped_storage") else 0
        if self._bytes > MOST_COPIED_BYTES:
            raise MemoryError
        super().__setitem__(key, made)


def clone_module(module: Any) -> Any:
    """Clone a module for another thread: layers and attributes of its own, the same weights. None if it cannot be cloned.

    A module may keep what it is at in its attributes, and so do our hooks: two threads in one of them mix it up.
    """
    if not hasattr(module, "parameters"):
        return None
    tensors = _tensors(module)
    try:
        made = copy.deepcopy(module, _Copied((id(tensor), tensor) for tensor in tensors))
    except Exception:  # it holds what cannot be copied: a lock, a file; or too much that is neither parameter nor buffer
        return None
    theirs = _tensors(made)
    shared = len(theirs) == len(tensors) and all(one is other for one, other in zip(tensors, theirs, strict=True))
    return made if shared else None


def _own(layer: Any) -> list[Any]:
    return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]


def _tensors(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _digest(spots: list[tuple[Any, _Spot]], host: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for _, spot in spots:
        found.update(f"{spot.offset},{spot.dtype},{spot.shape},{spot.stride};".encode())
    found.update(memoryview(host.numpy()))
    return found.hexdigest()


def _layout(module: Any) -> tuple[list[tuple[Any, _Spot]], int]:
    """A place for every tensor; those that are one and the same object get one place."""
    found: list[tuple[Any, _Spot]] = []
    places: dict[tuple[int, Any, tuple[int, ...]], _Spot] = {}
    size = 0
    tensors = [
        tensor
        for layer in module.modules()  # in the order in which they are most likely used: they arrive in it
        for tensor in _own(layer)
    ]
    for tensor in tensors:
        dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.permute(0, 2, 3, 1).is_contiguous())
        stride = tuple(tensor.stride()) if dense else tuple(tensor.contiguous().stride())
        known = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        spot = places.get(known) if tensor.numel() else None
        if spot is None:
            spot = places[known] = _Spot(size, tensor.dtype, tuple(tensor.shape), stride)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        found.append((tensor, spot))
    return found, max(size, _ALIGN)


def _at(torch: Any, flat: Any, spot: _Spot) -> Any:
    count = 1
    for length in spot.shape:
        count *= length
    width = torch.empty(0, dtype=spot.dtype).element_size()
    return flat[spot.offset : spot.offset + count * width].view(spot.dtype).as_strided(spot.shape, spot.stride)
