"""Triggers in the store: those that were added, the clocks of all, and messages that could start nothing."""

from __future__ import annotations

import hashlib
import os
import time

import msgspec

from lamina import encoding
from lamina.sdk.triggers import Trigger
from lamina.state.kv_state import CHANGES
from lamina.store import kv, outbox
from lamina.store.base import Session
from lamina.types import NEVER_US

CLOCKS = "triggers"
ADDED = "triggers-added"
ASIDE = "triggers-aside"
IDENTITY = "triggers-identity"
MAX_ASIDE, MAX_ASIDE_BYTES = 100, 64 * 2**10
"""Messages of one trigger that are kept when they could start nothing, the newest, and how much of each."""


class SavedClock(msgspec.Struct, frozen=True):
    """Clock of a trigger as it is kept: for what time it last started a run, and which."""

    last_us: int
    setbacks: int = 0
    run: str = ""

    @staticmethod
    def read(value: bytes) -> SavedClock:
        found = encoding.decode(value)
        return SavedClock(found) if isinstance(found, int) else msgspec.convert(found, SavedClock)


class AddedTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that was added to a running server, as it is kept."""

    trigger: Trigger
    app: str
    tenant: str
    by: str
    at_us: int


class AsideMessage(msgspec.Struct, frozen=True):
    """A message that could start nothing, and why."""

    topic: str
    message_id: str
    body: bytes
    why: str
    at_us: int


class KeptTriggers(msgspec.Struct, frozen=True):
    """What an earlier server has left."""

    clocks: list[kv.KvEntry] = []
    changes: list[outbox.OutboxMessage] = []
    added: list[AddedTrigger] = []
    identity: str = ""


def read_kept(db: Session) -> KeptTriggers:
    identity = kv.get(db, IDENTITY, "id")
    return KeptTriggers(
        kv.entries(db, CLOCKS, limit=kv.ALL),
        outbox.due(db, CHANGES, NEVER_US, kv.ALL),
        [msgspec.json.decode(entry.value, type=AddedTrigger) for entry in kv.entries(db, ADDED, limit=kv.ALL)],
        identity.value.decode() if identity is not None else "",
    )


def delete_added(db: Session, id: str) -> bool:
    found = kv.get(db, ADDED, id)
    if found is not None:
        name = msgspec.json.decode(found.value, type=AddedTrigger).trigger.name
        kv.delete(db, CLOCKS, name)  # its clock
        for entry in kv.entries(db, aside_scope(name), limit=2 * MAX_ASIDE):
            kv.delete(db, entry.scope, entry.key)
    return kv.delete(db, ADDED, id)


def keep_aside(db: Session, name: str, message: AsideMessage) -> None:
    scope = aside_scope(name)
    kv.put(db, scope, f"{message.at_us:020d}-{os.urandom(3).hex()}", "message", msgspec.msgpack.encode(message), message.at_us)
    for entry in kv.entries(db, scope, limit=2 * MAX_ASIDE)[:-MAX_ASIDE]:
        kv.delete(db, scope, entry.key)


def save_clock(db: Session, name: str, saved: SavedClock) -> None:
    kv.put(db, CLOCKS, name, "value", encoding.encode(msgspec.to_builtins(saved)), time.time_ns() // 1000)


def read_aside(db: Session, name: str) -> list[AsideMessage]:
    """Newest first."""
    found = kv.entries(db, aside_scope(name), limit=2 * MAX_ASIDE)
    return [msgspec.msgpack.decode(entry.value, type=AsideMessage) for entry in reversed(found)]


def save_identity(db: Session, identity: str) -> None:
    kv.put(db, IDENTITY, "id", "value", identity.encode(), time.time_ns() // 1000)


def put_added(db: Session, record: AddedTrigger) -> int:
    return kv.put(db, ADDED, record.trigger.id, "trigger", msgspec.json.encode(record), time.time_ns() // 1000)


def aside_scope(name: str) -> str:
    return f"{ASIDE}/{trigger_digest(name)}"


def trigger_digest(name: str) -> str:
    """Short name of a trigger, for those that were given none."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
