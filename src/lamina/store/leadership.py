"""Leader election with terms: one row that names the server which may write, and a number that every commit is checked against.

A lock (of the file, or an advisory one of the database) makes a takeover fast where the leader's process or connection ended.
Locks alone are not enough: a leader that was frozen, or cut off, wakes up and goes on. So who takes the lead raises the term, and
every transaction begins with an update of the leader row that holds for one term only (`claim_commit`): a write of an older term
changes nothing and is known to have failed. Safety rests on that row alone, and on no clock.

Liveness needs a clock, but only a candidate's own: a leader that has not changed its row, nor given another sign of life, for
`LEASE_S` as the candidate counts is no longer waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from lamina.errors import NotLeader
from lamina.store.base import Session

BEAT_S = 0.3
"""Interval of a leader's signs of life."""

LEASE_S = 1.5
"""How long a candidate waits for a sign of life before it takes the lead from a server that still holds the lock."""

SHARD = ""
"""The one shard there is: a row per set of devices that one server decides for."""


class LeaderRow(Struct, frozen=True):
    """The leader as the store knows it."""

    term: int
    holder: str  #: token of the server's life; "": it has resigned
    address: str  #: where clients reach it
    has_lock: bool  #: it holds the lock as well, so that a free lock means that it has gone
    commits: int  #: of this term: changes with every commit


def read_leader(db: Session) -> LeaderRow | None:
    found = db.rows("SELECT term, holder, address, has_lock, commits FROM leader WHERE shard = ?", SHARD)
    return LeaderRow(found[0][0], found[0][1], found[0][2], bool(found[0][3]), found[0][4]) if found else None


def take_lead(db: Session, seen: LeaderRow | None, holder: str, address: str, has_lock: bool) -> int:
    """Take the lead from the leader that was seen; the new term, or 0 if another candidate was faster."""
    if seen is None:
        columns = "(shard, term, holder, address, has_lock, commits)"
        sql = f"INSERT INTO leader {columns} VALUES (?, 1, ?, ?, ?, 0) ON CONFLICT DO NOTHING"
        return db.run(sql, SHARD, holder, address, int(has_lock))
    sql = "UPDATE leader SET term = ?, holder = ?, address = ?, has_lock = ?, commits = 0 WHERE shard = ? AND term = ?"
    term = seen.term + 1
    return term if db.run(sql, term, holder, address, int(has_lock), SHARD, seen.term) else 0


def claim_commit(db: Session, term: int, number: int) -> bool:
    """Begin a transaction of this term: no other can take the lead until it ends. False: another server leads, or this commit has
    been made already, and its acknowledgement was lost."""
    sql = "UPDATE leader SET commits = ? WHERE shard = ? AND term = ? AND commits = ?"
    return bool(db.run(sql, number, SHARD, term, number - 1))


def is_term(db: Session, term: int) -> bool:
    """Whether this is the term now, for a read that must not be stale."""
    return bool(db.rows("SELECT 1 FROM leader WHERE shard = ? AND term = ?", SHARD, term))


def advertise(db: Session, term: int, address: str) -> None:
    db.run("UPDATE leader SET address = ? WHERE shard = ? AND term = ?", address, SHARD, term)


def note_lock(db: Session, term: int, has_lock: bool) -> None:
    """Write down that the leader has the lock, which the one before it may have held until now, or has lost it."""
    db.run("UPDATE leader SET has_lock = ? WHERE shard = ? AND term = ?", int(has_lock), SHARD, term)


def resign(db: Session, term: int) -> None:
    """Leave the lead to the next candidate, at once."""
    db.run("UPDATE leader SET holder = '', address = '', has_lock = 0 WHERE shard = ? AND term = ?", SHARD, term)


class Election:
    """A server as a candidate: decides when the leader of before is no longer waited for.

    `signs` is all that a leader may change: its row, and what its back end keeps beside it. Time counts only between two looks
    that found the store: a leader that could not reach it either is not late.
    """

    def __init__(self, holder: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.holder = holder
        self._clock_s = clock_s
        self._signs: object = None
        self._since_s = 0.0

    def may_lead(self, row: LeaderRow | None, has_lock: bool, signs: object) -> bool:
        """Whether this server may take the lead now."""
        if row is None or not row.holder or row.holder == self.holder:
            return True
        if has_lock and row.has_lock:
            return True
        now_s = self._clock_s()
        if signs != self._signs:
            self._signs, self._since_s = signs, now_s
        return now_s - self._since_s >= LEASE_S

    def forget(self) -> None:
        """The store was away: what was seen before says nothing about the leader."""
        self._signs = None


def not_leader(store: str, row: LeaderRow | None) -> NotLeader:
    address = row.address if row is not None else ""
    return NotLeader(
        f"store {store}: another server leads{f', at {address}' if address else ''}",
        leader=address,
        hint=f"ask {address}" if address else "ask that one; this one takes over when it has gone",
    )
