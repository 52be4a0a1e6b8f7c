"""Packages of apps for agents: the leader's source of them, and an agent's store, both by SHA-256.

What an agent runs is what the leader has: code travels as a package, is checked on arrival, and is unpacked once under its
hash. Two versions never mix, and an agent that comes back needs nothing again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from lamina.errors import LoadFailed
from lamina.sdk.model_bundle import DATA_MARK, is_bundle
from lamina.values.references import ShmRef
from lamina.values.slot_refs import SlotReferences

log = logging.getLogger("lamina")

Pack = Callable[[Path, bool], tuple[bytes, str]]
"""Zip of an app's file with its folder, all of it or Python files alone; and the file's name in it."""
Unpack = Callable[[bytes, Path], Awaitable[None]]

_SHA256 = re.compile(r"[0-9a-f]{64}")
FILES = ".files"
"""Ending of the list of a package's files with their hashes, beside its folder."""

KEPT_PACKAGES = 50
"""Unpacked packages that an agent keeps besides those of what it has loaded: it may live through a thousand deployments."""


class Package(Struct, frozen=True):
    """A package as the leader holds it, in a slot that agents may fetch."""

    sha256: str
    entry: str  #: the app in it, as `FILE.py` or `FILE.py:NAME`
    ref: ShmRef


class PackageSource:
    """Packages of the leader's apps, made when an agent first needs one. `own` is the app that the server was started with."""

    def __init__(self, own: str, references: SlotReferences, pack: Pack) -> None:
        self._own, self._references, self._pack = own, references, pack
        self._made: dict[str, asyncio.Task[Package]] = {}

    async def get(self, path: str) -> Package:
        """The package of an app by its path here; "": of the server's own. Raises `LoadFailed`."""
        target = path or self._own
        if target not in self._made:
            self._made[target] = asyncio.create_task(self._make(target))
        try:
            return await asyncio.shield(self._made[target])
        except Exception:
            self._made.pop(target, None)  # files may be there at the next try
            raise

    def retain(self, paths: Collection[str]) -> None:
        """Forget packages of apps that are not served any more, each of which takes shared memory."""
        kept = {path or self._own for path in paths} | {self._own}
        for target in [one for one, made in self._made.items() if one not in kept and made.done()]:
            made = self._made.pop(target)
            if not made.cancelled() and made.exception() is None:
                self._references.pool.free(made.result().ref.slot)

    async def _make(self, target: str) -> Package:
        file, _, name = target.partition(":") if ".py:" in target else (target, "", "")
        if not is_bundle(target) and not file.endswith(".py"):
            raise LoadFailed(
                f"{Path(target).name[:40]!r} is no app that can be sent to an agent",
                hint="agents take apps that are files and models: serve app.py, or deploy it",
            )
        path = Path(file)
        content, entry = await asyncio.to_thread(self._pack, path, target != self._own)  # a deployed app is all of its package
        ref = self._references.pool.put(content)
        if ref is None:
            raise LoadFailed(f"no room for a package of {len(content)} bytes", hint="give the server a larger --memory-budget")
        return Package(hashlib.sha256(content).hexdigest(), f"{entry}:{name}" if name else entry, ref)


class PackageStore:
    """Unpacked packages of an agent, in a folder."""

    def __init__(self, folder: Path, unpack: Unpack) -> None:
        self._folder, self._unpack = folder, unpack
        self._locks: dict[str, asyncio.Lock] = {}
        self._checked: dict[str, dict[str, tuple[int, int]]] = {}  #: by package: size and time of its files when they were right
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in os.listdir(folder):  # of a life that ended while it unpacked
            if not _SHA256.fullmatch(name) and not _SHA256.fullmatch(name.removesuffix(FILES)):
                shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # the disk is full: it may go on with what it has
            (folder / DATA_MARK).touch()
        self._prune(())

    def stored(self) -> list[str]:
        return sorted(name for name in os.listdir(self._folder) if _SHA256.fullmatch(name))

    def path(self, sha256: str, entry: str) -> str:
        """The app in a package: what a worker is started with."""
        return str(self._folder / sha256 / entry)

    async def ensure(
        self, sha256: str, fetch: Callable[[], Awaitable[bytes]], in_use: Callable[[], Collection[str]] = tuple
    ) -> bool:
        """Have this package unpacked; `fetch` brings its bytes. True: it is new, and of those that are not `in_use` the oldest
        have gone. Raises `LoadFailed` if they are not those."""
        if not _SHA256.fullmatch(sha256):
            raise LoadFailed(f"{sha256[:80]!r} is no SHA-256")
        async with self._locks.setdefault(sha256, asyncio.Lock()):
            if (self._folder / sha256).is_dir():
                if await asyncio.to_thread(self._is_unchanged, sha256):
                    return False
                log.warning("package %s was changed on disk: it is fetched again", sha256[:12])
                self._remove(sha256)
            content = await fetch()
            found = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
            if found != sha256:
                raise LoadFailed(
                    f"the package has another hash than it should: {found[:12]}..., not {sha256[:12]}...",
                    hint="it was changed on its way: look at what lies between leader and agent",
                )
            fresh = self._folder / f"new-{os.urandom(6).hex()}"
            try:
                await self._unpack(content, fresh)
                digests = await asyncio.to_thread(_digests, fresh)
                (self._folder / f"{sha256}{FILES}").write_bytes(msgspec.json.encode(digests))
                os.rename(fresh, self._folder / sha256)
            except BaseException:
                with contextlib.suppress(OSError):
                    shutil.rmtree(fresh, ignore_errors=True)
                raise
            self._prune({*in_use(), sha256})
            return True

    def _prune(self, in_use: Collection[str]) -> None:
        unused = [path for path in self._folder.iterdir() if _SHA256.fullmatch(path.name) and path.name not in in_use]
        for path in sorted(unused, key=lambda path: path.stat().st_mtime)[:-KEPT_PACKAGES]:
            self._remove(path.name)

    def _remove(self, sha256: str) -> None:
        self._checked.pop(sha256, None)
        shutil.rmtree(self._folder / sha256, ignore_errors=True)
        (self._folder / f"{sha256}{FILES}").unlink(missing_ok=True)

    def _is_unchanged(self, sha256: str) -> bool:
        """Whether the files of a package are those that were unpacked: by their hashes once, by size and time after that. What
        was added to its folder, such as compiled modules, is not asked about."""
        folder = self._folder / sha256
        try:
            digests = msgspec.json.decode((self._folder / f"{sha256}{FILES}").read_bytes(), type=dict[str, str])
            stamps = {name: _stamp(folder / name) for name in digests}
            if stamps != self._checked.get(sha256):
                if any(_digest(folder / name) != digest for name, digest in digests.items()):
                    return False
                self._checked[sha256] = stamps
        except (OSError, msgspec.MsgspecError):
            return False
        return True


def _digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
