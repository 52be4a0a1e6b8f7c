"""Volumes: named folders that the functions of an app share, kept over versions and restarts.

A worker is told where the volumes of its app lie (`LAMINA_VOLUMES`); those of a tenant belong to the tenant's user. The size is
a limit that the volume itself keeps: file systems have none for a folder. `path` is refused while more is in it than that.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from lamina.errors import BadValue, NoCapacity
from lamina.units import show_bytes

VARIABLE = "LAMINA_VOLUMES"
_CHECK_S = 1.0


class Volume:
    """A folder of an app. `size_bytes` is how much may be in it; 0: no limit."""

    def __init__(self, app: str, name: str, size_bytes: int = 0) -> None:
        self.app, self.name, self.size_bytes = app, name, size_bytes
        self._checked_s = -_CHECK_S

    def __repr__(self) -> str:
        return f"<volume {self.name!r} of app {self.app!r}>"

    @property
    def folder(self) -> Path:
        """The folder, however full it is: to remove what is in it."""
        base = os.environ.get(VARIABLE)
        if base == "":
            raise BadValue(
                f"volume {self.name!r}: there are none where this function runs", hint="they are on the server's machine"
            )
        found = Path(base) / self.name if base else _local_base() / self.app / self.name
        found.mkdir(parents=True, exist_ok=True, mode=0o700)
        return found

    @property
    def path(self) -> Path:
        """The folder, to read and to write; an error while it has more in it than its size."""
        folder = self.folder
        if self.size_bytes and time.monotonic() - self._checked_s >= _CHECK_S:
            if (used := self.used_bytes) > self.size_bytes:
                raise NoCapacity(
                    f"volume {self.name!r} has {show_bytes(used)} in it, of {show_bytes(self.size_bytes)}",
                    hint="remove something: volume.folder is its path",
                )
            self._checked_s = time.monotonic()
        return folder

    @property
    def used_bytes(self) -> int:
        total = 0
        for place, _, files in os.walk(self.folder):
            for name in files:
                with contextlib.suppress(OSError):  # removed meanwhile
                    total += os.lstat(os.path.join(place, name)).st_blocks * 512
        return total


def _local_base() -> Path:
    """Where volumes lie outside of a server."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "lamina" / "volumes"
