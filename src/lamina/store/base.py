"""Store interface: transactions, works and callbacks, as the rest of the platform sees them; and what a back end gives.

Work is a plain function of a `Session`, run on the store's own thread: `store.write(lambda db: kv.put(db, ...), done)`. Works
that arrive while the disk is busy become one transaction (group commit): all of them or none. `done` is called on the loop's
thread, and only when the work is on disk. A work may therefore be run more than once, and must have no effect but through its
session.

When nothing can be written (disk full, locked, read-only, server away) the store is down: works that may be refused fail at
once with `StoreDown`, those that must not be lost are kept, in their order, and done when it is up again. It comes up by itself.

One server writes a store at a time: the one that leads (see `leadership`). A store leads once in its life. Until then it is down
with `NotLeader`; when another server has taken the lead it is over, and everything that was not written gets `LeadershipLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lamina.errors import LaminaError, StoreDown

if TYPE_CHECKING:
    from lamina.store.leadership import LeaderRow

T = TypeVar("T")

Row = Sequence[Any]
Value = str | bytes | int | float | None


class Session(Protocol):
    """One transaction. SQL is the subset both back ends speak, with `?` for values; blobs are bytes."""

    def rows(self, sql: str, *values: Value) -> list[Row]: ...

    def run(self, sql: str, *values: Value) -> int:
        """Run a statement; the number of rows it changed."""
        ...

    def many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None: ...


class Statement:
    """A work that is one SQL statement without a result. Those with the same text, between two works of other kinds, are given to
    the database together; so they must not depend on each other's order."""

    __slots__ = ("sql", "values")

    def __init__(self, sql: str, *values: Value) -> None:
        self.sql = sql
        self.values = values

    def __call__(self, db: Session) -> None:
        db.run(self.sql, *self.values)


Work = Callable[[Session], T]
Done = Callable[[T | LaminaError], None]
"""Callback with what the work returned, or why it could not be done. An error is given, not raised."""


class Store(Protocol):
    @property
    def name(self) -> str:
        """Location for people: a path, or a URL without its password."""
        ...

    @property
    def folder(self) -> Path | None:
        """Folder for what belongs beside the store; None if it is on no local disk."""
        ...

    @property
    def exists(self) -> bool:
        """Whether anything has been written here before. If not, it is made when it is first used, and not sooner."""
        ...

    @property
    def down(self) -> StoreDown | None:
        """Why the store cannot be written now; None: it can."""
        ...

    @property
    def term(self) -> int:
        """Term in which this server leads; 0: it does not."""
        ...

    @property
    def spare_bytes(self) -> int:
        """Room for what is new, as of a moment ago: the last of a disk is for what was accepted before."""
        ...

    @property
    def holds_lease(self) -> bool:
        """Whether this server leads and has shown it so lately that no other can have taken the lead, short of a lost lock."""
        ...

    @property
    def was_stopped(self) -> bool:
        """Whether its lease has run out while nothing but the process itself kept it from being renewed: a process that was
        stopped and goes on does not know yet whether it still leads."""
        ...

    @property
    def leader(self) -> str:
        """Address of another server that leads, as far as it is known."""
        ...

    @property
    def succeeds(self) -> bool:
        """Whether the lead was taken over from another term, so that what was read before it is out of date."""
        ...

    def expect_none(self) -> None:
        """This server begins without a store: it may make one, but not take the lead over from a server that has."""
        ...

    def watch(self, on_change: Callable[[Any], None]) -> None:
        """Be called on the loop's thread with the term when this server leads, and with 0 when another is found to."""
        ...

    def advertise(self, address: str) -> None:
        """Tell the others where clients reach this server, when it leads."""
        ...

    def confirm(self, done: Done[None], *, after_writes: bool) -> None:
        """Ask whether this server still leads: `done` gets None if it did after this was called. With `after_writes` also all
        that was written before is on disk by then."""
        ...

    async def opened(self) -> None:
        """Wait until it is known whether the store can be used. At once, if it has not been used yet."""
        ...

    def start(self) -> None:
        """Start its threads, from the loop that `done` is to be called on. A store that cannot be opened is down, for now."""
        ...

    def write(self, work: Work[T], done: Done[T] | None = None, *, required: bool = False) -> None:
        """Write. `required`: not refused when the store is down, but kept until it is up again, unless another server leads."""
        ...

    def read(self, work: Work[T], done: Done[T]) -> None:
        """Read what was written before; does not wait for writers."""
        ...

    async def close(self) -> None:
        """Close after everything written so far; gives up what cannot be written now."""
        ...


# ------------------------------------------------------------------------ back ends


class StoreConnection(Session, Protocol):
    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class WriterConnection(StoreConnection, Protocol):
    """Connection of a server that leads, or would."""

    @property
    def blob(self) -> str:
        """The word for bytes in a schema."""
        ...

    def try_lock(self) -> bool:
        """Whether this server has the lock. It is kept as long as the server, or this connection, lives."""
        ...

    def unlock(self) -> None: ...

    def look(self) -> tuple[LeaderRow, object] | None:
        """The leader and its signs of life, outside of a transaction; None: there has been none."""
        ...

    def touch(self) -> bool:
        """Give a sign of life. False: only a commit is one."""
        ...

    def evict_leader(self, *, is_blocked: bool) -> None:
        """Make room where a leader that is no longer waited for is in a transaction, and will not end it. `is_blocked`: the lead
        could not be taken."""
        ...


class Backend(Protocol):
    """Back end that opens connections. Each is used by the thread that opened it."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path | None: ...

    @property
    def exists(self) -> bool: ...

    def writer(self) -> WriterConnection: ...

    def reader(self) -> StoreConnection: ...

    def spare_bytes(self) -> int:
        """Room for what is new; what is left beyond it is for what is under way. As far as it is known."""
        ...

    def release(self) -> None:
        """Give back a lock that outlives connections."""
        ...

    def classify_error(self, error: Exception) -> StoreDown | None:
        """Classify an error: why the store is down; None if it is the fault of the work."""
        ...
