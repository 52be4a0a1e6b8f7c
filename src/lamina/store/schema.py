"""Schema and migrations. `BLOB` is the one word the back ends do not share."""

from __future__ import annotations

from lamina.errors import StoreDown
from lamina.store.base import Session

VERSION = 3

_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY, kind TEXT NOT NULL, target TEXT NOT NULL, tenant TEXT NOT NULL, state TEXT NOT NULL,
            priority BIGINT NOT NULL, cost_limit DOUBLE PRECISION NOT NULL, size_bytes BIGINT NOT NULL,
            created_us BIGINT NOT NULL, deadline_us BIGINT NOT NULL, began_us BIGINT NOT NULL, ended_us BIGINT NOT NULL,
            flow TEXT NOT NULL, inputs BLOB NOT NULL, result BLOB, problem BLOB, about BLOB,
            idempotency_key TEXT, digest TEXT NOT NULL, retries BIGINT NOT NULL, again_us BIGINT NOT NULL)""",
        "CREATE UNIQUE INDEX runs_by_key ON runs (tenant, idempotency_key)",
        "CREATE INDEX runs_by_state ON runs (state, priority, id)",
        "CREATE INDEX runs_by_end ON runs (ended_us)",
        """CREATE TABLE notes (
            run TEXT NOT NULL, number BIGINT NOT NULL, body BLOB NOT NULL, value BLOB, undone BIGINT NOT NULL,
            PRIMARY KEY (run, number))""",
        "CREATE TABLE flows (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
        """CREATE TABLE state (
            scope TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, value BLOB NOT NULL, version BIGINT NOT NULL,
            changed_us BIGINT NOT NULL, PRIMARY KEY (scope, name))""",
        """CREATE TABLE outbox (
            topic TEXT NOT NULL, name TEXT NOT NULL, due_us BIGINT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (topic, name))""",
        "CREATE INDEX outbox_by_time ON outbox (topic, due_us)",
    ),
    (  # runs are fetched tenant by tenant
        "CREATE INDEX runs_by_turn ON runs (state, priority, tenant, id)",
        "DROP INDEX runs_by_state",
    ),
    (  # every commit is checked against the term of the server that makes it
        """CREATE TABLE leader (
            shard TEXT PRIMARY KEY, term BIGINT NOT NULL, holder TEXT NOT NULL, address TEXT NOT NULL,
            has_lock BIGINT NOT NULL, commits BIGINT NOT NULL)""",
    ),
)


def stored_version(db: Session) -> int:
    """Version of the tables that are there."""
    db.run("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    found = db.rows("SELECT value FROM meta WHERE name = 'version'")
    version = int(found[0][0]) if found else 0
    if version > VERSION:
        raise StoreDown(
            f"store: made by a newer Lamina (version {version} of its tables; this one knows {VERSION})",
            hint="run that Lamina, or give another --store",
        )
    return version


def migrate(db: Session, version: int, blob: str) -> None:
    """Migrate to the current version, inside a transaction. `blob` is what the back end calls bytes."""
    for step in _MIGRATIONS[version:]:
        for statement in step:
            db.run(statement.replace("BLOB", blob))
    if version < VERSION:
        db.run(
            "INSERT INTO meta (name, value) VALUES ('version', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            str(VERSION),
        )
