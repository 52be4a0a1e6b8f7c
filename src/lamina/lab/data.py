"""Data files that experiments read: in `$LAMINA_DATA`, else in the folder `data` of the repository."""

from __future__ import annotations

import os
from pathlib import Path

from lamina.errors import BadValue


def path(name: str) -> Path:
    """`path("has-gpu/standard.json")`: that file, or an error that says where it was looked for."""
    given = os.environ.get("LAMINA_DATA")
    home = Path(given) if given else repository() / "data"
    found = home / name
    if not found.exists():
        hint = "point LAMINA_DATA at the folder data of the repository; an installed package does not carry it"
        raise BadValue(f"data {name!r}: not in {home}", hint=hint)
    return found


def repository() -> Path:
    """Four folders up from here, which is right in a checkout and harmless elsewhere."""
    return Path(__file__).resolve().parents[3]
