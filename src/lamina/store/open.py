"""Store factory: from a path or URL to a store."""

from __future__ import annotations

from pathlib import Path

from lamina.errors import BadValue
from lamina.store.base import Store
from lamina.store.group_commit import GroupCommitStore


def default_location(app_path: str, app_name: str) -> str:
    """Default location: beside the app, so that it is found again; made with the first durable run, and not before."""
    file = app_path.rpartition(":")[0] if ".py:" in app_path else app_path
    return str(Path(file).resolve().parent / ".lamina" / f"{app_name}.db")


def open_store(place: str) -> Store:
    """Make a store. Opens nothing yet: see `Store.start`."""
    scheme, separator, _ = place.partition("://")
    if not place:
        raise BadValue("store: no place given", hint="a path, a postgresql:// URL, or none")
    if not separator:
        from lamina.store.sqlite import Sqlite

        return GroupCommitStore(Sqlite(place))
    if scheme in ("postgresql", "postgres"):
        from lamina.store.postgres import Postgres

        return GroupCommitStore(Postgres(place))
    raise BadValue(f"store: {scheme!r} is no kind of store", hint="a path for SQLite, or postgresql://user@host/database")
