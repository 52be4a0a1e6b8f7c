"""Private directory of shared-memory slots: file names of slots, and removal of directories left by dead processes.

It is locked for as long as its process lives, so a directory without a lock is stale, whatever the process table says.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Collection

from lamina.errors import LaminaError
from lamina.values.references import MAX_SLOT, ShmRef

_OWNER = re.compile(r"[a-z0-9]{1,32}")
_PREFIX = "lamina-"
_FRESH = ".lamina-"
_LOCK = "lock"
FOREIGN = "u"
"""First letter of owners that run as another user."""
_SPILL = "spill"


class BadSlot(LaminaError):
    """A reference to shared memory that is not there, or not that large."""

    code = "bad-slot"


def slot_path(folder: str, owner: str, slot: int) -> str:
    """File name of a slot, made here alone. Neither part can leave the directory."""
    if not _OWNER.fullmatch(owner) or not 0 <= slot < MAX_SLOT:
        raise BadSlot(f"no slot {slot!r} of {owner!r}")
    return os.path.join(folder, owner, f"{owner}-{slot}") if is_foreign(owner) else os.path.join(folder, f"{owner}-{slot}")


def is_foreign(owner: str) -> bool:
    """Whether an owner runs as another user: its slots are in a folder of its own, and may change or vanish at any time."""
    return owner.startswith(FOREIGN)


def spill_path(folder: str, owner: str, slot: int) -> str:
    return slot_path(os.path.join(folder, _SPILL), owner, slot)


def has_spill(folder: str) -> bool:
    """Whether a directory has another one on disk to spill to."""
    return os.path.isdir(os.path.join(folder, _SPILL))


class ShmDirectory:
    """Locked directory in memory, and with `spill_base` another one on disk that it points to."""

    def __init__(self, base: str | None = None, spill_base: str | None = None) -> None:
        base = base or shm_base()
        self._spill = ShmDirectory(spill_base) if spill_base is not None else None
        remove_stale(base)
        token = os.urandom(8).hex()
        fresh, self.path = os.path.join(base, _FRESH + token), os.path.join(base, _PREFIX + token)
        os.mkdir(fresh, 0o700)
        self._lock = os.open(os.path.join(fresh, _LOCK), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if self._spill is not None:
            os.symlink(self._spill.path, os.path.join(fresh, _SPILL))
        os.rename(fresh, self.path)  # only now can a cleaner see it, and it finds it locked

    def add_foreign(self, owner: str, user: int) -> None:
        """Make the folder of an owner that runs as another user. Such users may pass through here, and list nothing."""
        for path in (self.path, self._spill.path if self._spill is not None else self.path):
            os.chmod(path, 0o711)
        folder = os.path.join(self.path, owner)
        os.mkdir(folder, 0o700)
        os.chown(folder, user, user)

    def show(self, ref: ShmRef, user: int) -> None:
        """Let another user read a slot. It must not be written for another one after that: the user may have kept it open."""
        for path in (slot_path(self.path, ref.owner, ref.slot), spill_path(self.path, ref.owner, ref.slot)):
            with contextlib.suppress(FileNotFoundError):
                os.chown(path, -1, user, follow_symlinks=False)
                os.chmod(path, 0o640)
                return

    def unlink_all(self, owner: str, but: Collection[int] = ()) -> None:
        """Remove the slots of an owner that is gone, except those still read. What cannot be removed now, because not even
        a folder can be opened, goes with the folder."""
        if is_foreign(owner) and not but:
            shutil.rmtree(os.path.join(self.path, owner), ignore_errors=True)
            return
        kept = {f"{owner}-{slot}" for slot in but}
        with contextlib.suppress(OSError):
            folder = os.path.join(self.path, owner) if is_foreign(owner) else self.path
            for name in os.listdir(folder):
                if name.startswith(f"{owner}-") and name not in kept:
                    os.unlink(os.path.join(folder, name))
        if self._spill is not None:
            self._spill.unlink_all(owner, but)

    def unlink(self, owner: str, slot: int) -> None:
        """Remove a slot, unless its owner has done so: a process that ends in order takes its files with it."""
        for path in (slot_path(self.path, owner, slot), spill_path(self.path, owner, slot)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                return

    def has_slot(self, ref: ShmRef) -> bool:
        """Whether there is such a slot, and one that large: without opening it."""
        try:
            found = os.lstat(slot_path(self.path, ref.owner, ref.slot))
        except (OSError, BadSlot):
            return self._spill is not None and self._spill.has_slot(ref)
        return stat.S_ISREG(found.st_mode) and 0 <= ref.start <= ref.start + ref.size <= found.st_size

    def close(self) -> None:
        _remove(self.path)
        os.close(self._lock)
        if self._spill is not None:
            self._spill.close()


def shm_base() -> str:
    if os.access("/dev/shm", os.W_OK | os.X_OK):
        return "/dev/shm"
    import tempfile

    return tempfile.gettempdir()


def spill_base() -> str:
    """Base of spill directories, on disk; /tmp is memory on many machines."""
    import tempfile

    return "/var/tmp" if os.access("/var/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir()


def remove_stale(base: str) -> int:
    """Remove folders of processes that are gone; returns how many. Asks the lock, not the process table: a number there
    may have found a new bearer, or belong to another container that shares this memory."""
    removed = 0
    for name in os.listdir(base):
        if name.startswith(_PREFIX) and _remove_if_stale(os.path.join(base, name)):
            removed += 1
    return removed


def _remove_if_stale(path: str) -> bool:
    try:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another process was faster, or it is none of ours
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(path), key=lambda name: name == _LOCK)  # the lock last: until then it can be found again
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.unlink(os.path.join(path, name))
                except IsADirectoryError:  # of an owner that ran as another user
                    shutil.rmtree(os.path.join(path, name), ignore_errors=True)
        os.rmdir(path)
