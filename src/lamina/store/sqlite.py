"""SQLite back end: one file, write-ahead log, synced at every commit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lamina.errors import StoreDown
from lamina.store.base import Row, Value
from lamina.store.schema import migrate

LOCK_TIMEOUT_S = 0.2
"""How long another process may keep the file locked before that is an error."""

_HINTS = {
    "locked": "another program writes to it; close that",
    "full": "make room on its disk",
    "readonly": "make it and its folder writable",
    "unable to open": "make its folder, and make both writable",
    "not a database": "it is something else; give another --store",
    "malformed": "it is damaged; give another --store, and restore this one from a copy",
}


class SqliteConnection:
    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        mode = "ro" if read_only else "rwc"
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None
        )
        self._lock_fd = -1
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
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def acquire_lock(self, path: Path) -> None:
        """Lock the store for as long as this connection lives, however it ends.

        A file of its own: SQLite's locks do not survive that another handle on the same file is closed.
        """
        self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Sqlite:
    """SQLite file. `max_pages` bounds it, for tests of a full disk."""

    def __init__(self, path: str | Path, *, max_pages: int = 0) -> None:
        self.path = Path(path)
        self.max_pages = max_pages

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> Path:
        return self.path.resolve().parent

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def writer(self) -> SqliteConnection:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True)
            if self.path.parent.name == ".lamina":  # ours, and no source code
                (self.path.parent / ".gitignore").write_text("*\n")
        if not self.path.exists():  # what users sent is private
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = SqliteConnection(self.path)
        try:
            connection.acquire_lock(self.path.with_name(self.path.name + ".lock"))
            connection.rows("PRAGMA journal_mode = WAL")
            if self.max_pages:
                connection.rows(f"PRAGMA max_page_count = {self.max_pages}")
            connection.begin()
            migrate(connection, "BLOB")
            connection.commit()
        except BaseException:
            connection.rollback()
            connection.close()
            raise
        return connection

    def reader(self) -> SqliteConnection:
        return SqliteConnection(self.path, read_only=True)

    def classify_error(self, error: Exception) -> StoreDown | None:
        if isinstance(error, StoreDown):
            return error
        if isinstance(error, BlockingIOError):
            return StoreDown(f"store {self.name}: another server uses it", hint="stop that one, or give this one another --store")
        if self.path.is_dir():
            return StoreDown(f"store {self.name}: it is a folder", hint="name a file in it")
        if isinstance(error, OSError):
            return StoreDown(f"store {self.name}: {error.strerror}", hint=_HINTS["readonly"])
        if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
            said: Any = str(error)
            hint = next((hint for word, hint in _HINTS.items() if word in said), "see the server's log")
            return StoreDown(f"store {self.name}: {said}", hint=hint)
        return None
