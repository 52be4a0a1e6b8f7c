"""Shared memory for large values between processes: slots, each a file in a private directory, written by its owner alone.

A slot's size is a power of two; it is created once and used again and again, because the first touch of fresh pages costs
more than the copy itself. Its number never means another file, so a process that has mapped it may keep the mapping.

Rules: space is reserved before it is written (a full /dev/shm is then an error here, not a crash at the first write); a
slot that is being read by a batch is not written again before that batch ends, even if it is freed meanwhile; a slot that
user code still looks into afterwards is never written again at all: its file goes, the mapping lives on.

What finds no room in memory any more goes to disk, up to a bound of its own: slots like the others, in a folder the first one
points to, but removed as soon as they are free.

Not `multiprocessing.shared_memory`: its tracker removes segments it believes forgotten, at moments of its own choice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from lamina.ipc.sliced_copies import Parts, pieces_of, size_of
from lamina.values.references import MAX_SLOT, ReleaseSlots, ShmRef
from lamina.values.shm_directory import BadSlot, has_spill, is_foreign, slot_path, spill_path

INLINE_BYTES = 64 * 1024
"""Up to here a value travels inside the frame; also the size of the smallest slot."""

TRIMMED_BYTES = 2**20
"""Larger mappings are not kept while nothing happens."""

_PAGE = 4096
_READ, _WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10


def _map(file: int, size: int, protection: int) -> mmap.mmap:
    """A mapping without a file descriptor. Before Python 3.13 each keeps one open, and a thousand slots would use them all
    up: there the file is laid over a mapping of nothing."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, size, mmap.MAP_SHARED, protection, trackfd=False)
    import ctypes

    room = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    place = ctypes.CDLL(None, use_errno=True).mmap
    place.restype = ctypes.c_void_p
    place.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    if place(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap")
    return room


def _read(file: int, size: int, start: int) -> bytes:
    """So many bytes of a file, or fewer if it ends before."""
    pieces: list[bytes] = []
    while size > 0 and (piece := os.pread(file, size, start)):
        pieces.append(piece)
        size, start = size - len(piece), start + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class RefCountedSlots(ABC):
    """Reference counts of one owner's slots: freeing waits for the last reader."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._readers: dict[int, int] = {}
        self._freed: set[int] = set()  #: freed while being read
        self._retired: set[int] = set()  #: never to be written again

    @property
    def is_read(self) -> bool:
        """Whether any of them is being read."""
        return bool(self._readers)

    def pin(self, slot: int) -> None:
        self._readers[slot] = self._readers.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._freed:
                self._freed.remove(slot)
                self.free(slot)

    def retire(self, slot: int) -> None:
        """Mark a slot that user code still looks into: it is never written again."""
        self._retired.add(slot)

    def free(self, slot: int) -> None:
        if slot in self._readers:
            self._freed.add(slot)
        elif slot in self._retired:
            self._retired.remove(slot)
            self._recycle(slot, again=False)
        else:
            self._recycle(slot, again=True)

    def release(self, frame: ReleaseSlots) -> None:
        """What the reader of these has told."""
        for slot in frame.retired:
            self.retire(slot)
        for slot in (*frame.slots, *frame.retired):
            self.free(slot)

    @abstractmethod
    def _recycle(self, slot: int, again: bool) -> None: ...


class ShmPool(RefCountedSlots):
    """Pool of one owner's slots, at most `limit_bytes` in memory and `spill_bytes` more on disk."""

    def __init__(self, folder: str, owner: str, limit_bytes: int, spill_bytes: int = 0) -> None:
        super().__init__(owner)
        self.spilled_bytes = 0
        self._spill_limit_bytes = spill_bytes if has_spill(folder) else 0
        self._spilled: set[int] = set()
        self.used_bytes = 0  #: in slots that hold a value
        self.file_bytes = 0  #: in all slots, the idle ones included
        self._directory = folder
        self._limit_bytes = limit_bytes
        self._maps: dict[int, mmap.mmap] = {}
        self._idle: dict[int, list[int]] = {}  #: size of a slot -> numbers, the last used last
        self._spare: dict[int, int] = {}  #: size of a slot -> the least that were idle since the last trim
        self._busy: set[int] = set()
        self._reserved: dict[int, int] = {}  #: of each slot: bytes that surely have a place
        self._serials: dict[int, int] = {}  #: of the value in each slot that has one
        self._values_made = 0
        self._next = 0

    def put(self, data: bytes | bytearray | memoryview) -> ShmRef | None:
        """A copy of `data` in a slot; None if there is no room, and then it must travel another way."""
        return self.put_parts([data])

    def put_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> ShmRef | None:
        """The same for data in several pieces, which then need not be put together before."""
        ref = self._take(sum(map(len, parts)))
        if ref is None:
            return None
        at, mapped = 0, self._maps[ref.slot]
        for part in parts:
            mapped[at : at + len(part)] = part
            at += len(part)
        return ref

    def fill(self, parts: Parts) -> Generator[int, None, ShmRef | None]:
        """The same in steps, each of which yields how many bytes it has copied."""
        ref = self._take(size_of(parts), in_steps=True)
        if ref is None:
            return None
        at, mapped = 0, self._maps[ref.slot]
        for piece in pieces_of(parts):
            if not self._reserve(ref.slot, at + len(piece)):
                self._recycle(ref.slot, again=False)
                return None
            mapped[at : at + len(piece)] = piece
            at += len(piece)
            yield len(piece)
        return ref

    def reserve(self, size: int) -> tuple[ShmRef, memoryview] | None:
        """A slot for so many bytes that are yet to come, and the memory to write them to; None if there is no room."""
        ref = self._take(size)
        return None if ref is None else (ref, memoryview(self._maps[ref.slot])[:size])

    def _reserve(self, slot: int, size: int) -> bool:
        """Reserve space for the first bytes of a slot, if they have none; False: there is none."""
        start = self._reserved[slot]
        if size <= start:
            return True
        try:
            file = os.open(self._path(slot), os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(file, start, size - start)
            finally:
                os.close(file)
        except OSError:  # out of memory, disk or files: the value goes another way
            return False
        self._reserved[slot] = size
        return True

    def _path(self, slot: int) -> str:
        return (spill_path if slot in self._spilled else slot_path)(self._directory, self.owner, slot)

    def _take(self, size: int, in_steps: bool = False) -> ShmRef | None:
        """Take a slot. `in_steps`: its space is reserved as it is written."""
        room = max(INLINE_BYTES, 1 << (size - 1).bit_length()) if size else INLINE_BYTES
        idle = self._idle.get(room)
        slot = idle.pop() if idle else self._make_in_memory(room, 0 if in_steps else room)
        if idle is not None and len(idle) < self._spare.get(room, 0):
            self._spare[room] = len(idle)
        if slot is not None:
            self.used_bytes += room
        else:
            slot = self._make_on_disk(-(-size // _PAGE) * _PAGE, 0 if in_steps else size)
            if slot is None:
                return None
        self._busy.add(slot)
        self._values_made += 1
        self._serials[slot] = self._values_made
        if not in_steps and not self._reserve(slot, size):  # it was written in steps before, and less of it
            self._recycle(slot, again=False)
            return None
        return ShmRef(self.owner, slot, size)

    def serial(self, slot: int) -> int:
        """Serial of the value in a slot; 0: there is none. No two values of a pool have the same."""
        return self._serials.get(slot, 0)

    def _make_on_disk(self, room: int, reserved: int) -> int | None:
        if self.spilled_bytes + room > self._spill_limit_bytes:
            return None
        slot = self._create(spill_path(self._directory, self.owner, self._next), room, reserved)
        if slot is not None:
            self._spilled.add(slot)
            self.spilled_bytes += room
        return slot

    def _make_in_memory(self, room: int, reserved: int) -> int | None:
        if self.used_bytes + room > self._limit_bytes:
            return None
        for size in sorted(self._idle, reverse=True):  # sizes that were in demand once give way, the largest first
            while self._idle[size] and self.file_bytes + room > self._limit_bytes:
                self._drop(self._idle[size].pop())
        slot = self._create(slot_path(self._directory, self.owner, self._next), room, reserved)
        self.file_bytes += room if slot is not None else 0
        return slot

    def _create(self, path: str, room: int, reserved: int) -> int | None:
        slot = self._next
        if slot >= MAX_SLOT - 1:
            return None
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, room)
                if reserved:
                    os.posix_fallocate(file, 0, reserved)
                self._maps[slot] = _map(file, room, _WRITE)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(file)
        except OSError:  # out of memory, disk or files: the value goes another way
            return None
        self._next += 1
        self._reserved[slot] = reserved
        return slot

    def _drop(self, slot: int) -> None:
        on_disk = slot in self._spilled
        os.unlink(self._path(slot))
        del self._reserved[slot]
        room = self._maps.pop(slot)
        if on_disk:
            self._spilled.remove(slot)
            self.spilled_bytes -= len(room)
        else:
            self.file_bytes -= len(room)
        room.close()

    def _recycle(self, slot: int, again: bool) -> None:
        self._serials.pop(slot, None)
        if slot not in self._busy:
            raise BadSlot(f"slot {slot} of {self.owner} holds nothing")
        self._busy.remove(slot)
        if slot in self._spilled:
            self._drop(slot)
            return
        room = len(self._maps[slot])
        self.used_bytes -= room
        if again:
            self._idle.setdefault(room, []).append(slot)
        else:
            self._drop(slot)

    def trim(self) -> None:
        """Remove slots that no value has needed since the last call: a burst of large values must not hold memory for ever."""
        for room, idle in self._idle.items():
            spare = min(self._spare.get(room, 0), len(idle))
            for slot in idle[:spare]:
                self._drop(slot)
            del idle[:spare]
            self._spare[room] = len(idle)

    def close(self) -> None:
        """Remove all files; what others have mapped stays theirs."""
        for slot in list(self._maps):
            with contextlib.suppress(BufferError):  # a thread still looks into it: the mapping lives on, the file is gone
                self._drop(slot)
        self._idle.clear()
        self._busy.clear()
        self.used_bytes = 0


class ShmReader:
    """Looks into other owners' slots. Mappings are kept, the latest `keep` of them."""

    def __init__(self, folder: str, keep: int = 256) -> None:
        self._directory = folder
        self._max_mappings = keep
        self._maps: dict[tuple[str, int], mmap.mmap] = {("", 0): mmap.mmap(-1, 1)}  #: least recently used first
        self._idle_references = self._references(("", 0))  #: of a mapping without views; interpreters count differently
        self._maps.clear()

    def view(self, ref: ShmRef) -> memoryview:
        """Read-only, and without a copy: valid until the slot is freed. Of an owner that runs as another user it is a copy: a
        mapped file that is cut short ends the process that reads it."""
        if is_foreign(ref.owner):
            return memoryview(self._copy(ref))
        key = (ref.owner, ref.slot)
        room = self._maps.pop(key, None)
        if room is None:
            room = self._open(ref)
            if len(self._maps) >= self._max_mappings:
                del self._maps[next(iter(self._maps))]  # unmapped when the last view of it goes
        self._maps[key] = room
        end = ref.start + ref.size
        if not 0 <= ref.start <= end <= len(room):
            raise BadSlot(f"slot {ref.slot} of {ref.owner} has {len(room)} bytes, not {end}")
        return memoryview(room).toreadonly()[ref.start : end]

    def _copy(self, ref: ShmRef) -> bytes:
        try:
            file = os.open(
                slot_path(self._directory, ref.owner, ref.slot), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            try:
                data = _read(file, ref.size, ref.start) if stat.S_ISREG(os.fstat(file).st_mode) else b""
            finally:
                os.close(file)
        except OSError as error:
            raise BadSlot(f"slot {ref.slot} of {ref.owner} cannot be read: {error}") from None
        if len(data) != ref.size:
            raise BadSlot(f"slot {ref.slot} of {ref.owner} has {len(data)} bytes, not {ref.size}")
        return data

    def _open(self, ref: ShmRef) -> mmap.mmap:
        path = slot_path(self._directory, ref.owner, ref.slot)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # what an owner puts there may be a pipe
        try:
            try:
                file = os.open(path, flags)
            except FileNotFoundError:
                file = os.open(spill_path(self._directory, ref.owner, ref.slot), flags)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise ValueError("not a plain file")
                return _map(file, found.st_size, _READ)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise BadSlot(f"slot {ref.slot} of {ref.owner} cannot be read: {error}") from None

    def is_viewed(self, ref: ShmRef) -> bool:
        """Whether any view of it, or anything made from one without a copy, is still alive.

        Every view holds a reference to its mapping, so counting those is enough. A mapping that has been let go cannot
        be asked, and counts as viewed.
        """
        key = (ref.owner, ref.slot)
        if is_foreign(ref.owner):
            return False
        return key not in self._maps or self._references(key) > self._idle_references

    def _references(self, key: tuple[str, int]) -> int:
        return sys.getrefcount(self._maps[key])

    def trim(self) -> None:
        """Unmap large slots: a mapping keeps the memory of a slot that its owner has removed."""
        for key in [key for key, room in self._maps.items() if len(room) > TRIMMED_BYTES]:
            del self._maps[key]

    def drop_owner(self, owner: str) -> None:
        """Unmap the slots of an owner that is gone."""
        for key in [key for key in self._maps if key[0] == owner]:
            del self._maps[key]

    def close(self) -> None:
        self._maps.clear()
