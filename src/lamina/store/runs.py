"""Tables of durable runs and their journals. All are works for `Store.write` and `Store.read`.

A run is queued, running (in some server's memory), over, or quarantined: a defect keeps it from going on, until it is retried or
cancelled. It is written when it is accepted, journaled at every step, and ended once: a terminal state stays, unless a failed run
is retried. Identifiers sort by age.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from lamina.core.workflow.journal_entry import JournalEntry
from lamina.errors import Conflict, NotFound
from lamina.store.base import Session, Statement, Value

OPEN = ("queued", "running")
OVER = ("succeeded", "failed", "cancelled")
QUARANTINED = "quarantined"
STATES = (*OPEN, *OVER, QUARANTINED)
SETTLED = (*OVER, QUARANTINED)
"""States that do not change by themselves."""

DELETED_AT_ONCE = 500
"""Runs deleted in one transaction: other works must not wait for all of them."""


class RunRow(Struct, frozen=True):
    """Row of a run. Times are microseconds since 1970; 0: not yet, or none."""

    id: str
    kind: str  #: "function" or "workflow"
    target: str
    tenant: str
    state: str
    priority: int
    cost_limit: float
    size_bytes: int
    created_us: int
    deadline_us: int
    began_us: int
    ended_us: int
    flow: str  #: of a workflow: which one, of those it may have been since
    retries: int = 0  #: by hand
    again_us: int = 0  #: when that last was


_COLUMNS = ", ".join(RunRow.__struct_fields__)
_OPEN = "state IN ('queued', 'running')"
_NOT_OVER = "state IN ('queued', 'running', 'quarantined')"
_encode = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(JournalEntry).decode


class JournalRow(Struct, frozen=True):
    """Row of a journal: an entry, and the value that came with it."""

    number: int
    entry: JournalEntry
    value: bytes | None
    undone: bool = False  #: the run failed by it, and was retried


class StoredOutcome(Struct, frozen=True):
    state: str
    ended_us: int
    result: bytes | None = None
    problem: bytes | None = None  #: as it is told to clients, JSON
    about: bytes | None = None  #: latency, cost and so on, JSON


# -------------------------------------------------------------------------- accepting


def accept(db: Session, row: RunRow, inputs: bytes, key: str, digest: str) -> RunRow:
    """Accept a run; returns it, or the one this idempotency key was used for before."""
    known = _by_key(db, row.tenant, key) if key else None
    if known is None:
        values = [getattr(row, field) for field in RunRow.__struct_fields__]
        marks = ", ".join("?" * (len(values) + 3))
        db.run(
            f"INSERT INTO runs ({_COLUMNS}, inputs, idempotency_key, digest) VALUES ({marks})",
            *(*values, inputs, key or None, digest),
        )
        return row
    if known[1] != digest:
        raise Conflict(f"idempotency-key: {key[:80]!r} was used for another call", hint="use a new key for a new call")
    return get(db, known[0])


def _by_key(db: Session, tenant: str, key: str) -> tuple[str, str] | None:
    found = db.rows("SELECT id, digest FROM runs WHERE tenant = ? AND idempotency_key = ?", tenant, key)
    return (found[0][0], found[0][1]) if found else None


def add_flow(db: Session, id: str, body: bytes) -> None:
    db.run("INSERT INTO flows (id, body) VALUES (?, ?) ON CONFLICT (id) DO NOTHING", id, body)


def read_flow(db: Session, id: str) -> bytes | None:
    found = db.rows("SELECT body FROM flows WHERE id = ?", id)
    return found[0][0] if found else None


# ---------------------------------------------------------------------------- feeding


Lane = tuple[int, str]
"""Priority and tenant: runs of one lane start in the order they were accepted in."""


def recover(db: Session) -> tuple[dict[Lane, int], str]:
    """Recovery at the start of a server: running ones are queued again. Counts by lane, and the newest id of all."""
    db.run("UPDATE runs SET state = 'queued' WHERE state = 'running'")
    found = db.rows("SELECT priority, tenant, count(*) FROM runs WHERE state = 'queued' GROUP BY priority, tenant")
    return {(row[0], row[1]): row[2] for row in found}, db.rows("SELECT max(id) FROM runs")[0][0] or ""


class LoadedRun(Struct, frozen=True):
    row: RunRow
    inputs: bytes
    journal: list[JournalRow]  #: entries to replay
    last_entry: int = 0  #: number of the last entry, undone ones included
    damage: str = ""  #: why the rest of it cannot be read


class RunPage(Struct, frozen=True):
    runs: list[LoadedRun]
    is_last: bool  #: there are no more behind them


def load_page(db: Session, lane: Lane, after: str, limit: int, limit_bytes: int) -> RunPage:
    """A page of the oldest queued runs behind `after`: as many as are asked for, or as fit, but at least one."""
    queued = "FROM runs WHERE state = 'queued' AND priority = ? AND tenant = ? AND id > ?"
    sizes = db.rows(f"SELECT id, size_bytes {queued} ORDER BY id LIMIT ?", *(*lane, after, limit))
    total, count = 0, 0
    for _, size in sizes:
        total += size
        if count and total > limit_bytes:
            break
        count += 1
    if not count:
        return RunPage([], True)
    until = sizes[count - 1][0]
    found = db.rows(f"SELECT {_COLUMNS}, inputs {queued} AND id <= ? ORDER BY id", *(*lane, after, until))
    return RunPage([_loaded(db, row) for row in found], count == len(sizes) < limit)


def load_run(db: Session, id: str) -> LoadedRun | None:
    found = db.rows(f"SELECT {_COLUMNS}, inputs FROM runs WHERE state = 'queued' AND id = ?", id)
    return _loaded(db, found[0]) if found else None


def _loaded(db: Session, found: Sequence[Value]) -> LoadedRun:
    row = RunRow(*found[:-1])  # type: ignore[arg-type]
    inputs = found[-1]
    if not isinstance(inputs, bytes):
        return LoadedRun(row, b"", [], damage="its inputs are not bytes")
    if not row.began_us:
        return LoadedRun(row, inputs, [])
    last = db.rows("SELECT max(number) FROM notes WHERE run = ?", row.id)[0][0] or 0
    try:
        return LoadedRun(row, inputs, read_journal(db, row.id), last)
    except (msgspec.MsgspecError, TypeError) as error:  # the page has other runs
        return LoadedRun(row, inputs, [], last, damage=f"its journal cannot be read: {error}")


def mark_running(db: Session, ids: Sequence[str], now_us: int) -> None:
    db.many(
        "UPDATE runs SET state = 'running', began_us = CASE WHEN began_us = 0 THEN ? ELSE began_us END"
        " WHERE id = ? AND state = 'queued'",
        [(now_us, id) for id in ids],
    )


# ------------------------------------------------------------------------ on the way


def append_journal(id: str, number: int, entry: JournalEntry, value: bytes | None) -> Statement:
    return Statement(
        "INSERT INTO notes (run, number, body, value, undone) VALUES (?, ?, ?, ?, 0) ON CONFLICT (run, number) DO NOTHING",
        *(id, number, _encode(entry), value),
    )


def read_journal(db: Session, id: str, *, all: bool = False, values: bool = True) -> list[JournalRow]:
    """Journal of a run, in order; with `all` also what was undone."""
    value = "value" if values else "NULL"
    undone = "" if all else " AND undone = 0"
    found = db.rows(f"SELECT number, body, {value}, undone FROM notes WHERE run = ?{undone} ORDER BY number", id)
    return [JournalRow(row[0], _decode_entry(row[1]), row[2], row[3] > 0) for row in found]


def quarantine(id: str, problem: bytes) -> Statement:
    """Set a run aside. It has not ended: it is not deleted with those that have, however old it gets."""
    return Statement(f"UPDATE runs SET state = '{QUARANTINED}', problem = ? WHERE id = ? AND {_OPEN}", problem, id)


_END = f"UPDATE runs SET state = ?, ended_us = ?, result = ?, problem = ?, about = ? WHERE id = ? AND {_NOT_OVER}"


def end(db: Session, id: str, ending: StoredOutcome, fatal: int = 0) -> bool:
    """End a run, once. `fatal` is the number of the entry it failed by, which a retry will undo; 0: none."""
    changed = db.run(_END, *_end_values(id, ending))
    if changed and fatal:
        db.run("UPDATE notes SET undone = -1 WHERE run = ? AND number = ?", id, fatal)
    return bool(changed)


def end_statement(id: str, ending: StoredOutcome) -> Statement:
    """End of a run as one statement, for the many that leave nothing else to be done."""
    return Statement(_END, *_end_values(id, ending))


def _end_values(id: str, ending: StoredOutcome) -> tuple[Value, ...]:
    return ending.state, ending.ended_us, ending.result, ending.problem, ending.about, id


def retry(db: Session, id: str, now_us: int) -> RunRow:
    """Retry: a run that did not succeed is queued again, less the journal entry it failed by."""
    row = get(db, id)
    if row.state not in ("failed", "cancelled", QUARANTINED):
        hint = "only runs that failed, were cancelled or are quarantined are tried again"
        raise Conflict(f"run {id!r} is {row.state}", hint=hint)
    deadline_us = row.deadline_us if row.deadline_us > now_us else 0
    db.run("UPDATE notes SET undone = 1 WHERE run = ? AND undone = -1", id)
    db.run(
        "UPDATE runs SET state = 'queued', ended_us = 0, result = NULL, problem = NULL, about = NULL, deadline_us = ?,"
        " retries = retries + 1, again_us = ? WHERE id = ?",
        *(deadline_us, now_us, id),
    )
    return get(db, id)


# ---------------------------------------------------------------------------- looking


def get(db: Session, id: str) -> RunRow:
    found = db.rows(f"SELECT {_COLUMNS} FROM runs WHERE id = ?", id)
    if not found:
        raise run_not_found(id)
    return RunRow(*found[0])


def read_outcome(db: Session, id: str) -> tuple[RunRow, StoredOutcome]:
    found = db.rows(f"SELECT {_COLUMNS}, result, problem, about FROM runs WHERE id = ?", id)
    if not found:
        raise run_not_found(id)
    row = RunRow(*found[0][:-3])
    return row, StoredOutcome(row.state, row.ended_us, *found[0][-3:])


def list_runs(db: Session, tenant: str, *, target: str = "", state: str = "", before: str = "", limit: int = 50) -> list[RunRow]:
    """Runs of one tenant or of all, the newest first; `before` is the last id of the page before."""
    wanted: list[tuple[str, Value]] = [("1 = ?", 1)]
    if tenant:
        wanted.append(("tenant = ?", tenant))
    if target:
        wanted.append(("target = ?", target))
    if state:
        wanted.append(("state = ?", state))
    if before:
        wanted.append(("id < ?", before))
    where = " AND ".join(condition for condition, _ in wanted)
    found = db.rows(f"SELECT {_COLUMNS} FROM runs WHERE {where} ORDER BY id DESC LIMIT ?", *(value for _, value in wanted), limit)
    return [RunRow(*row) for row in found]


def delete_ended(db: Session, before_us: int) -> int:
    """Delete some of the runs that ended before then; returns how many."""
    found = db.rows("SELECT id FROM runs WHERE ended_us > 0 AND ended_us < ? LIMIT ?", before_us, DELETED_AT_ONCE)
    old = [row[0] for row in found]
    db.many("DELETE FROM notes WHERE run = ?", [(id,) for id in old])
    db.many("DELETE FROM runs WHERE id = ?", [(id,) for id in old])
    return len(old)


def run_not_found(id: str) -> NotFound:
    return NotFound(f"no run {id[:80]!r}", hint="GET /v1/runs lists them; those that ended long ago are forgotten")
