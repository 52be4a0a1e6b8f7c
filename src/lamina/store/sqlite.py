"""SQLite back end: one file, write-ahead log, synced at every commit.

The lock of the leader is a lock on a file beside it: SQLite's own locks do not survive that another handle on the same file is
closed. That file also has the leader's signs of life, because a commit twice a second would wear out a disk for nothing.

A process that is stopped (SIGSTOP) in a transaction keeps the whole database locked, and no one can take that lock away. Such a
leader is ended by the server that takes over: both are on one machine, and a stopped process can be told from a slow one.

A file that is removed or replaced under a running server still takes writes, which are lost with its last handle. So before and
after every commit, and with every sign of life, the names are checked to be those of the files that were opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lamina.errors import StoreDown
from lamina.store import leadership
from lamina.store.base import Row, Value

log = logging.getLogger("lamina")

LOCK_TIMEOUT_S = 0.2
"""How long another process may keep the file locked before that is an error."""

RESERVED_DISK_BYTES, RESERVED_DISK_PART = 2**30, 20
"""What of a disk is not for new runs: so much, or one part in so many of a small one. Journals and ends of those that were
accepted need it, and state."""

_HINTS = {
    "locked": "another program writes to it; close that",
    "full": "make room on its disk",
    "readonly": "make it and its folder writable",
    "unable to open": "make its folder, and make both writable",
    "not a database": "it is something else; give another --store",
    "malformed": "it is damaged; give another --store, and restore this one from a copy",
}


_GONE = "put it back, or start the server again: it goes on with what is there then"

FileId = tuple[int, int]
"""Device and inode."""


def _file_id(path: Path) -> FileId | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class SqliteConnection:
    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        mode = "ro" if read_only else "rwc"
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None
        )
        self._db.execute("PRAGMA query_only = ON" if read_only else "PRAGMA synchronous = FULL")

    def rows(self, sql: str, *values: Value) -> list[Row]:
        return self._db.execute(sql, values).fetchall()

    def run(self, sql: str, *values: Value) -> int:
        return self._db.execute(sql, values).rowcount

    def many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None:
        self._db.executemany(sql, rows)

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        self._db.close()


class SqliteWriter(SqliteConnection):
    """Connection of a server that leads, or would."""

    blob = "BLOB"

    def __init__(self, file: Sqlite) -> None:
        super().__init__(file.path)
        self._file = file
        self.rows("PRAGMA journal_mode = WAL")
        if file.max_pages:
            self.rows(f"PRAGMA max_page_count = {file.max_pages}")
        self.rows("SELECT 1 FROM sqlite_master LIMIT 1")  # makes the log, which must be there to be known again
        self._log_id = _file_id(file.log_path)

    def begin(self) -> None:
        self._check_files()
        super().begin()

    def commit(self) -> None:
        super().commit()
        self._check_files()  # in the meantime: whether the commit counts is open until they are back

    def try_lock(self) -> bool:
        return self._file.lock.try_acquire()

    def unlock(self) -> None:
        self._file.lock.release()

    def look(self) -> tuple[leadership.LeaderRow, object] | None:
        try:
            row = leadership.read_leader(self)
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            row = None
        return None if row is None else (row, (row, self._file.lock.read_beat()))

    def touch(self) -> bool:
        self._check_files()
        self._file.lock.write_beat()
        return True

    def evict_leader(self, *, is_blocked: bool) -> None:
        if is_blocked:
            self._file.lock.end_stopped_holder()

    def _check_files(self) -> None:
        self._file.check_identity()
        if _file_id(self._file.log_path) != self._log_id:
            raise StoreDown(f"store {self._file.name}: its log (-wal) was removed", hint=_GONE)


BEAT_BYTES = 64


class LockFile:
    """Lock of a store, with a counter in it that its leader raises. Kept for as long as the process lives, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._has_lock = False
        self._beats = 0

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd

    def try_acquire(self) -> bool:
        if not self._has_lock:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._open(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._has_lock = True
        return self._has_lock

    def release(self) -> None:
        """Give it back, if it is held."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._has_lock = -1, False

    def read_beat(self) -> bytes:
        return os.pread(self._open(), BEAT_BYTES, 0)

    def write_beat(self) -> None:
        self._beats += 1
        text = f"{os.getpid()} {_process_state(os.getpid())[1]} {self._beats}"
        os.pwrite(self._open(), text.encode().ljust(BEAT_BYTES), 0)

    def end_stopped_holder(self) -> None:
        """End the process that gave the last sign of life, if it is stopped. It is known by its number and the time it began."""
        try:
            pid, began, _ = self.read_beat().split()
            state, since = _process_state(int(pid))
            if state == "T" and since == began.decode():
                log.warning("store: process %d leads, and is stopped in a transaction: it is ended", int(pid))
                os.kill(int(pid), signal.SIGKILL)
        except (ValueError, OSError):
            return  # not of this machine, or gone


def _process_state(pid: int) -> tuple[str, str]:
    """State of a process, "T" if it is stopped, and when it began, in the kernel's ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class Sqlite:
    """SQLite file. `max_pages` bounds it, for tests of a full disk."""

    def __init__(self, path: str | Path, *, max_pages: int = 0) -> None:
        self.path = Path(path)
        self.log_path = self.path.with_name(self.path.name + "-wal")
        self.max_pages = max_pages
        self.lock = LockFile(self.path.with_name(self.path.name + ".lock"))
        self._id: FileId | None = None  #: of the file that this server has used

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> Path:
        return self.path.resolve().parent

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def writer(self) -> SqliteWriter:
        if self._id is None:
            self._make()
        self.check_identity()
        connection = SqliteWriter(self)
        self._id = self._id or _file_id(self.path)
        return connection

    def _make(self) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True)
            if self.path.parent.name == ".lamina":  # ours, and no source code
                (self.path.parent / ".gitignore").write_text("*\n")
        if not self.path.exists():  # what users sent is private
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def check_identity(self) -> None:
        """Raise if the file was removed or replaced since it was first used."""
        if self._id is not None and (found := _file_id(self.path)) != self._id:
            what = "removed" if found is None else "replaced"
            raise StoreDown(f"store {self.name}: its file was {what} while the server ran", hint=_GONE)

    def reader(self) -> SqliteConnection:
        return SqliteConnection(self.path, read_only=True)

    def spare_bytes(self) -> int:
        disk = shutil.disk_usage(self.folder)
        return disk.free - min(RESERVED_DISK_BYTES, disk.total // RESERVED_DISK_PART)

    def release(self) -> None:
        self.lock.release()

    def classify_error(self, error: Exception) -> StoreDown | None:
        if isinstance(error, StoreDown):
            return error
        if self.path.is_dir():
            return StoreDown(f"store {self.name}: it is a folder", hint="name a file in it")
        if isinstance(error, OSError):
            return StoreDown(f"store {self.name}: {error.strerror}", hint=_HINTS["readonly"])
        if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
            said: Any = str(error)
            hint = next((hint for word, hint in _HINTS.items() if word in said), "see the server's log")
            return StoreDown(f"store {self.name}: {said}", hint=hint)
        return None
