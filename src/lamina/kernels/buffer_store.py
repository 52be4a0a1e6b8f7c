"""Buffer store: arrays of tenants by key, as files that processes map into their memory. The lowest tier of the data layer.

A key belongs to a tenant, and there is no way to name that of another. A file holds the array as it is in memory, after a short
header, so a process that may read it maps it: it is read from the disk once, and all processes share what the system keeps of it.
A new value is a new file under the old name; what was mapped before stays what it was.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import tempfile
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from lamina.encoding import DTYPES
from lamina.errors import BadValue, LaminaError, NotFound
from lamina.kernels.buffer_cache import BufferCache
from lamina.kernels.graph import WIDTHS
from lamina.kernels.validation import MAX_RANK, checked_key

_BEHIND = chr(ord("/") + 1)  #: sorts behind all keys of a folder
MAX_TENANT_BYTES = 16 * 2**30
MAX_TENANT_KEYS = 100_000
RESERVED_DISK_BYTES, RESERVED_DISK_PART = 2**30, 20
"""What of a disk is not for buffers: so much, or one part in so many of a small one. Others keep their runs there."""

SMALL_BYTES, MAX_MAPPINGS = 2**20, 256
"""Smaller buffers are read instead of mapped; and so many are mapped at most, for each holds a file open."""

_MAGIC = b"lamina buffer 1\n"
_ALIGN = 64
_PIECE_BYTES = 4 * 2**20


class BuffersFull(LaminaError):
    """No room for one more buffer of a tenant."""

    status = 507
    code: ClassVar[str] = "buffers-full"


class StoredBuffer(Struct, frozen=True):
    """Stored buffer: what is in its file, and where that is."""

    tenant: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    path: str = ""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


def check_array(dtype: str, shape: tuple[int, ...], size: int) -> None:
    """Check that so many bytes are an array of this dtype and shape."""
    if dtype not in DTYPES:
        raise BadValue(f"dtype: {dtype[:40]!r} is unknown", hint=f"there is {', '.join(sorted(DTYPES))}")
    if len(shape) > MAX_RANK or any(type(length) is not int or length < 1 for length in shape):
        raise BadValue(f"shape: {list(shape)[:12]}", hint=f"up to {MAX_RANK} lengths, each 1 or more")
    if prod(shape) * WIDTHS[dtype] != size:
        raise BadValue(
            f"body: {size} bytes, {dtype} {list(shape)} has {prod(shape) * WIDTHS[dtype]}", hint="send it whole, C order"
        )


class BufferStore:
    """Buffers below a folder; without one, in a folder that goes with the store. One process has it; others read its files."""

    def __init__(self, folder: Path | None = None, *, tenant_bytes: int = MAX_TENANT_BYTES) -> None:
        self._given = folder
        self._made: Path | None = None
        self._tenant_bytes = tenant_bytes
        self._found: dict[str, dict[str, StoredBuffer]] = {}  #: by tenant and key
        self._keys: dict[str, list[str]] = {}  #: by tenant, in order
        self._used: Counter[str] = Counter()  #: bytes by tenant
        if folder is not None and folder.is_dir():
            for stored in _scan(folder):
                self._add(stored)

    def find(self, tenant: str, key: str) -> StoredBuffer:
        stored = self._found.get(tenant, {}).get(checked_key(key))
        if stored is None:
            raise NotFound(f"no buffer under key {key!r}", hint="GET /v1/buffers lists those of this tenant; PUT makes one")
        return stored

    def list(self, tenant: str, prefix: str = "", after: str = "", limit: int = MAX_TENANT_KEYS) -> list[StoredBuffer]:
        """Buffers in the order of their keys: those that begin with `prefix` and come after `after`, so many at most."""
        keys, found = self._keys.get(tenant, []), self._found.get(tenant, {})
        start = max(bisect_left(keys, prefix), bisect_right(keys, after))
        return [found[key] for key in takewhile(lambda key: key.startswith(prefix), keys[start : start + limit])]

    def folders(self, tenant: str, root: str, after: str = "", limit: int = MAX_TENANT_KEYS) -> dict[str, int]:
        """What lies directly below `root/`, in order, with the number of keys below each. Looks at these, not at all keys."""
        keys = self._keys.get(tenant, [])
        at = bisect_left(keys, f"{root}/{after}{_BEHIND}" if after else f"{root}/")
        found: dict[str, int] = {}
        while at < len(keys) and len(found) < limit and keys[at].startswith(f"{root}/"):
            name = keys[at][len(root) + 1 :].partition("/")[0]
            behind = bisect_left(keys, f"{root}/{name}{_BEHIND}", at)
            found[name] = behind - at
            at = behind
        return found

    def used_bytes(self, tenant: str) -> int:
        return self._used[tenant]

    def _add(self, stored: StoredBuffer) -> None:
        own = self._found.setdefault(stored.tenant, {})
        before = own.get(stored.key)
        if before is None:
            insort(self._keys.setdefault(stored.tenant, []), stored.key)
        self._used[stored.tenant] += stored.nbytes - (before.nbytes if before is not None else 0)
        own[stored.key] = stored

    def check_room(self, tenant: str, key: str, size: int) -> None:
        """Check that a tenant may have one more buffer, or another value of one it has."""
        own = self._found.get(tenant, {})
        has = own[key].nbytes if key in own else 0
        if key not in own and len(own) >= MAX_TENANT_KEYS:
            raise BuffersFull(f"{len(own)} buffers are kept", hint="delete some")
        if self.used_bytes(tenant) - has + size > self._tenant_bytes:
            raise BuffersFull(
                f"{size} bytes more than the {self._tenant_bytes} that a tenant may keep",
                hint="delete buffers that are not needed",
            )

    def write(self, tenant: str, key: str, dtype: str, shape: tuple[int, ...], data: Any) -> StoredBuffer:
        """Write the file of a buffer beside its place, for any thread; `commit` puts it there."""
        view = memoryview(data).cast("B")
        check_array(dtype, shape, len(view))
        digest = hashlib.blake2b(f"{dtype}{list(shape)}".encode(), digest_size=16)
        digest.update(view)
        stored = StoredBuffer(tenant, checked_key(key), dtype, shape, digest.hexdigest())
        folder = self.folder_of(tenant)
        disk = shutil.disk_usage(folder)
        if disk.free - len(view) < min(RESERVED_DISK_BYTES, disk.total // RESERVED_DISK_PART):
            raise BuffersFull(f"the disk of the server has {disk.free >> 20} MiB left", hint="delete buffers that are not needed")
        path = ""
        try:
            handle, path = tempfile.mkstemp(dir=folder, prefix=".new-")
            with open(handle, "wb") as file:
                file.write(_head(stored))
                for at in range(0, len(view), _PIECE_BYTES):  # in pieces: other threads run between them
                    file.write(view[at : at + _PIECE_BYTES])
        except BaseException as error:
            if path:
                os.unlink(path)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise BuffersFull("the disk of the server is full", hint="delete buffers that are not needed") from None
            raise
        return msgspec.structs.replace(stored, path=path)

    def commit(self, written: StoredBuffer) -> StoredBuffer:
        """Put a written buffer in its place; the one that was there is gone for all but those that have it mapped."""
        try:
            self.check_room(written.tenant, written.key, written.nbytes)
        except LaminaError:
            os.unlink(written.path)
            raise
        path = str(self.folder_of(written.tenant) / _file_name(written.key))
        os.replace(written.path, path)
        stored = msgspec.structs.replace(written, path=path)
        self._add(stored)
        return stored

    def remove(self, tenant: str, key: str) -> None:
        stored = self.find(tenant, key)
        del self._found[tenant][key]
        keys = self._keys[tenant]
        del keys[bisect_left(keys, key)]
        self._used[tenant] -= stored.nbytes
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stored.path)

    def folder_of(self, tenant: str, user: int = 0) -> Path:
        """Folder of a tenant, made if it is not there; with `user`, one that this user of the machine may enter."""
        if self._given is None and self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="lamina-buffers-"))
        base = self._given or self._made
        assert base is not None
        folder = base / hashlib.blake2b(tenant.encode(), digest_size=12).hexdigest()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if user:
            os.chmod(base, 0o711)
            os.chown(folder, -1, user)
            os.chmod(folder, 0o710)
        return folder

    def show(self, stored: StoredBuffer, user: int) -> None:
        """Let a user of the machine read a buffer: the one that functions of its tenant run as."""
        os.chown(stored.path, -1, user)
        os.chmod(stored.path, 0o640)

    def close(self) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made = None


# ------------------------------------------------------------------------------ files


def _file_name(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".buffer"


def _head(stored: StoredBuffer) -> bytes:
    said = msgspec.json.encode(stored)
    size = len(_MAGIC) + 4 + len(said)
    return _MAGIC + len(said).to_bytes(4, "little") + said + b"\0" * (-size % _ALIGN)


def _read_head(file: Any, path: str) -> tuple[StoredBuffer, int]:
    """Header of a file, and where its data begins. Raises ValueError for a file that is none, or not whole."""
    start = file.read(len(_MAGIC) + 4)
    if not start.startswith(_MAGIC):
        raise ValueError(f"{path} holds no buffer")
    said = file.read(int.from_bytes(start[-4:], "little"))
    stored = msgspec.structs.replace(msgspec.json.decode(said, type=StoredBuffer), path=path)
    begin = -(-(len(start) + len(said)) // _ALIGN) * _ALIGN
    if stored.dtype not in WIDTHS or os.fstat(file.fileno()).st_size != begin + stored.nbytes:
        raise ValueError(f"{path} is not whole")
    return stored, begin


def _scan(folder: Path) -> Iterator[StoredBuffer]:
    for path in folder.glob("*/*"):
        if path.name.startswith(".new-"):  # a server died while it wrote it
            path.unlink(missing_ok=True)
            continue
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            yield _read_head(file, str(path))[0]


def read_data(stored: StoredBuffer) -> bytes:
    """The bytes of a buffer, for any thread."""
    try:
        with open(stored.path, "rb") as file:
            _, begin = _read_head(file, stored.path)
            file.seek(begin)
            return file.read()
    except FileNotFoundError:
        raise NotFound(f"no buffer under key {stored.key!r} any more", hint="it was deleted meanwhile") from None


class MappedBuffers:
    """Mapped buffers of one process: arrays over files of a store, as many as `capacity` bytes hold, by the cache's rule."""

    def __init__(self, capacity: int) -> None:
        self.cache = BufferCache(capacity)
        self._arrays: dict[str, Any] = {}  #: by digest: equal contents are mapped once

    def open(self, path: str, digest: str) -> Any:
        """The array in a file, read-only. If the file has changed since it was named, what is in it now."""
        if digest in self._arrays:
            self._touch(digest)
            return self._arrays[digest]
        import numpy as np

        with open(path, "rb") as file:
            stored, begin = _read_head(file, path)
            if stored.nbytes < SMALL_BYTES:  # a mapping keeps a file open: for these it is not worth it
                file.seek(begin)
                array = np.frombuffer(file.read(), stored.dtype).reshape(stored.shape)
                room = max(stored.nbytes, 256)
            else:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                array = np.frombuffer(whole, stored.dtype, prod(stored.shape), begin).reshape(stored.shape)
                room = max(stored.nbytes, self.cache.capacity // MAX_MAPPINGS)
        if room <= self.cache.capacity and stored.digest not in self._arrays:
            for gone in self.cache.place(stored.digest, room, 1.0 + stored.nbytes / 1_000):
                del self._arrays[gone]  # what a batch still reads lives as long as it does
            self._arrays[stored.digest] = array
            self._touch(stored.digest)
        return array

    def _touch(self, digest: str) -> None:
        self.cache.pin(digest)
        self.cache.unpin(digest)
