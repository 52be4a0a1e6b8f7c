"""PostgreSQL back end (psycopg 3). Several servers may share a database if each has a schema of its own (`search_path`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from lamina.errors import BadValue, StoreDown
from lamina.store import leadership
from lamina.store.base import Row, Value

CONNECT_S = 3
IDLE_MS = 1_000
"""How long a transaction may stand idle before the database ends it: that of a leader that was frozen holds the leader row."""

WAIT_MS = 1_000
"""How long to wait for a lock of the database, such as that on the leader row."""

ALIVE = {"keepalives": 1, "keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 5_000}
"""A connection whose other end has silently gone ends within seconds, instead of hours."""

_DOWN = ("25006", "42501", "3F000", "42P01")
"""Of a statement: read-only; not allowed; no such schema; no such table, where there was one."""

LOCK = 0x1A_311A  #: with the schema, the number of the advisory lock of the writing server


@cache
def _with_percent_s(sql: str) -> str:
    return sql.replace("?", "%s")


class PostgresConnection:
    def __init__(self, url: str, *, read_only: bool = False) -> None:
        psycopg = _psycopg()
        self._db: Any = psycopg.connect(url, autocommit=True, connect_timeout=CONNECT_S, application_name="lamina", **ALIVE)
        if read_only:
            self._db.execute("SET default_transaction_read_only = on")
        else:  # whatever the server's default is: a 202 promises this much
            self._db.execute("SET synchronous_commit = on")

    def rows(self, sql: str, *values: Value) -> list[Row]:
        found: list[Row] = self._db.execute(_with_percent_s(sql), values).fetchall()
        return found

    def run(self, sql: str, *values: Value) -> int:
        changed: int = self._db.execute(_with_percent_s(sql), values or None).rowcount
        return changed

    def many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(_with_percent_s(sql), rows)

    def begin(self) -> None:
        self._db.execute("BEGIN")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.info.transaction_status:
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        self._db.close()


class PostgresWriter(PostgresConnection):
    """Connection of a server that leads, or would. The lock is one of its session."""

    blob = "BYTEA"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._has_lock = False
        self._db.execute(f"SET idle_in_transaction_session_timeout = {IDLE_MS}")
        self._db.execute(f"SET lock_timeout = {WAIT_MS}")

    def try_lock(self) -> bool:
        if not self._has_lock:
            self._has_lock = self.rows("SELECT pg_try_advisory_lock(?, hashtext(current_schema()))", LOCK)[0][0]
        return self._has_lock

    def unlock(self) -> None:
        if self._has_lock:
            self._has_lock = False
            self._db.execute("SELECT pg_advisory_unlock_all()")

    def look(self) -> tuple[leadership.LeaderRow, object] | None:
        if self.rows("SELECT to_regclass('leader')")[0][0] is None:
            return None
        row = leadership.read_leader(self)
        return None if row is None else (row, row)

    def touch(self) -> bool:
        return False

    def evict_leader(self, *, is_blocked: bool) -> None:
        """End sessions that hold the leader row. The database ends those that stand idle, but not one whose client went silent in
        the middle of a message."""
        with contextlib.suppress(_psycopg().Error):  # another user's: it is waited for
            self.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = to_regclass('leader')"
                " AND mode = 'RowExclusiveLock' AND granted AND pid <> pg_backend_pid()"
            )

    def close(self) -> None:
        """Unlock before closing: the server would keep the lock for a moment, and the next writer find the store in use."""
        with contextlib.suppress(Exception):
            self.unlock()
        super().close()


class Postgres:
    def __init__(self, url: str) -> None:
        _psycopg()
        self._url = url

    @property
    def name(self) -> str:
        parts = urlsplit(self._url)
        place = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, place, parts.path, "", ""))

    @property
    def folder(self) -> None:
        return None

    @property
    def exists(self) -> bool:
        return True

    def writer(self) -> PostgresWriter:
        return PostgresWriter(self._url)

    def reader(self) -> PostgresConnection:
        return PostgresConnection(self._url, read_only=True)

    def spare_bytes(self) -> int:
        return 2**62  # the server has its own ways to keep a disk from being filled

    def release(self) -> None:
        """The lock is one of the session, and ends with it."""

    def classify_error(self, error: Exception) -> StoreDown | None:
        psycopg = _psycopg()
        if isinstance(error, StoreDown):
            return error
        errors = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
        if isinstance(error, errors) or getattr(error, "sqlstate", None) in _DOWN:
            said = str(error).strip().split("\n")[0]
            return StoreDown(f"store {self.name}: {said}", hint="see to the database")
        return None


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError:
        raise BadValue("store: PostgreSQL needs psycopg", hint="pip install 'lamina[postgres]'") from None
    return psycopg
