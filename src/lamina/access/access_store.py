"""Stored access records: works for `Store.write` and `Store.read`, over the key-value table.

A work may be run again, so random values are drawn before and handed in.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from lamina.access.records import AuditEntry, Person, Secret, Token
from lamina.errors import Conflict, NoCapacity, NotFound
from lamina.store import kv
from lamina.store.base import Session
from lamina.types import Tenant

T = TypeVar("T", bound=Struct)

_SCOPES: dict[type[Struct], str] = {
    Person: "access/people",
    Token: "access/tokens",
    Tenant: "access/tenants",
    Secret: "access/secrets",
    AuditEntry: "access/deeds",
}
_PAGE = 500
_USERS = "access/users"


def put(db: Session, record: Struct, key: str, now_us: int) -> None:
    kv.put(db, _SCOPES[type(record)], key, "record", msgspec.json.encode(record), now_us)


def add(db: Session, record: Struct, key: str, now_us: int) -> None:
    if kv.get(db, _SCOPES[type(record)], key) is not None:
        raise Conflict(f"{key!r} is there already", hint="choose another name, or remove it first")
    put(db, record, key, now_us)


def get(db: Session, kind: type[T], key: str) -> T | None:
    entry = kv.get(db, _SCOPES[kind], key)
    return None if entry is None else msgspec.json.decode(entry.value, type=kind)


def remove(db: Session, kind: type[Struct], key: str) -> None:
    if not kv.delete(db, _SCOPES[kind], key):
        raise NotFound(f"no {kind.__name__.lower()} {key!r}", hint="list them to see what is there")


def read_all(db: Session, kind: type[T]) -> dict[str, T]:
    """All records of a kind, by key. There are few: only audit entries are many, and those are read in pages."""
    found: dict[str, T] = {}
    after = ""
    while True:
        page = kv.entries(db, _SCOPES[kind], after=after, limit=_PAGE)
        found |= {entry.key: msgspec.json.decode(entry.value, type=kind) for entry in page}
        if len(page) < _PAGE:
            return found
        after = page[-1].key


def tenant_user(db: Session, tenant: str, users: tuple[int, int], now_us: int) -> int:
    """User of the machine that a tenant's functions run as: the first free one of a range, and the same ever after."""
    known = {entry.key: int(entry.value) for entry in kv.entries(db, _USERS, limit=100_000)}
    if users[0] <= known.get(tenant, -1) <= users[1]:
        return known[tenant]
    taken = set(known.values())
    free = next((user for user in range(users[0], users[1]) if user not in taken), None)  # the last one is for trying walls
    if free is None:
        raise NoCapacity(f"no user is left for tenant {tenant!r}", hint="give a larger range: --tenant-users FIRST-LAST")
    kv.put(db, _USERS, tenant, "user", str(free).encode(), now_us)
    return free


def append_audit(db: Session, entry: AuditEntry, nonce: str) -> None:
    """Append to the audit log, in the transaction of the change. `nonce` tells entries of one microsecond apart."""
    put(db, entry, f"{entry.at_us:020d}-{nonce}", entry.at_us)


def save_usage(db: Session, tenant: str, unit_us: float, now_us: int) -> None:
    kv.put(db, "access/spent", tenant, "unit_us", str(round(unit_us)).encode(), now_us)


def read_usage(db: Session, since_us: int) -> dict[str, float]:
    """Usage in units x microseconds by tenant, as last saved, if that is not too long ago."""
    return {one.key: float(one.value) for one in kv.entries(db, "access/spent", limit=100_000) if one.changed_us >= since_us}


def read_audit(db: Session, after: str = "", limit: int = 100) -> list[tuple[str, AuditEntry]]:
    page = kv.entries(db, _SCOPES[AuditEntry], after=after, limit=limit)
    return [(entry.key, msgspec.json.decode(entry.value, type=AuditEntry)) for entry in page]
