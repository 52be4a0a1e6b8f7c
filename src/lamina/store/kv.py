"""Key-value table: small typed values by scope and key, for state that outlives runs.

All are works for `Store.write` and `Store.read`.

A scope is a text such as "app/NAME" or "workflow/NAME"; a key belongs to one scope. `kind` says what the value is to its users
("value", "counter", "set", "map"); the store only compares it. `version` counts changes.
"""

from __future__ import annotations

from msgspec import Struct

from lamina.errors import BadValue, Conflict, checked_text
from lamina.store.base import Session

MAX_KEY = 512


class KvEntry(Struct, frozen=True):
    scope: str
    key: str
    kind: str
    value: bytes
    version: int
    changed_us: int  #: since 1970


def get(db: Session, scope: str, key: str) -> KvEntry | None:
    found = db.rows("SELECT scope, name, kind, value, version, changed_us FROM state WHERE scope = ? AND name = ?", scope, key)
    return KvEntry(*found[0]) if found else None


def put(db: Session, scope: str, key: str, kind: str, value: bytes, now_us: int, version: int = 0) -> int:
    """Write a value; the version it has now: the next one, unless it is given. A key keeps its kind until it is deleted."""
    if not 1 <= len(key) <= MAX_KEY:
        raise BadValue(f"key: {key[:60]!r} has {len(key)} characters", hint=f"1 to {MAX_KEY}")
    checked_text("key", key)
    checked_text("scope", scope)
    known = db.rows("SELECT kind, version FROM state WHERE scope = ? AND name = ?", scope, key)
    if known and known[0][0] != kind:
        raise Conflict(f"{key!r} is a {known[0][0]}, not a {kind}", hint="delete it first, or use another key")
    version = version or (known[0][1] + 1 if known else 1)
    db.run(
        "INSERT INTO state (scope, name, kind, value, version, changed_us) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (scope, name) DO UPDATE SET value = excluded.value, version = excluded.version,"
        " changed_us = excluded.changed_us",
        *(scope, key, kind, value, version, now_us),
    )
    return version


def delete(db: Session, scope: str, key: str) -> bool:
    return bool(db.run("DELETE FROM state WHERE scope = ? AND name = ?", scope, key))


ALL = 2**31 - 1
"""Limit of what a server reads when it begins to lead: what it leaves out is not there until it starts again."""


def entries(db: Session, scope: str, *, after: str = "", limit: int = 100) -> list[KvEntry]:
    """Entries of a scope, in the order of their keys."""
    return [
        KvEntry(*row)
        for row in db.rows(
            "SELECT scope, name, kind, value, version, changed_us FROM state WHERE scope = ? AND name > ? ORDER BY name LIMIT ?",
            *(scope, after, limit),
        )
    ]
