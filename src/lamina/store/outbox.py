"""Transactional outbox: messages written in the same transaction as the change they follow from. All are works for the store.

`topic` names the receiver, `key` is unique within it: sending the same twice is sending it once.
"""

from __future__ import annotations

from msgspec import Struct

from lamina.store.base import Session


class OutboxMessage(Struct, frozen=True):
    topic: str
    key: str
    due_us: int  #: since 1970
    body: bytes


def send(db: Session, letter: OutboxMessage) -> bool:
    """Add a message. False: it is there already."""
    return bool(
        db.run(
            "INSERT INTO outbox (topic, name, due_us, body) VALUES (?, ?, ?, ?) ON CONFLICT (topic, name) DO NOTHING",
            *(letter.topic, letter.key, letter.due_us, letter.body),
        )
    )


def due(db: Session, topic: str, now_us: int, limit: int = 100) -> list[OutboxMessage]:
    """Messages that are due, the oldest first."""
    return [
        OutboxMessage(*row)
        for row in db.rows(
            "SELECT topic, name, due_us, body FROM outbox WHERE topic = ? AND due_us <= ? ORDER BY due_us, name LIMIT ?",
            *(topic, now_us, limit),
        )
    ]


def next_us(db: Session, topic: str) -> int | None:
    """Due time of the first message of a topic."""
    found: int | None = db.rows("SELECT min(due_us) FROM outbox WHERE topic = ?", topic)[0][0]
    return found


def delete(db: Session, topic: str, key: str) -> bool:
    """Delete a message that has been handled."""
    return bool(db.run("DELETE FROM outbox WHERE topic = ? AND name = ?", topic, key))
