"""A PostgreSQL server of one's own, in a temporary folder, on a UNIX socket: nothing else on the machine is touched."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def binaries() -> Path | None:
    """Where the server's programs are: on the path, or where Debian's packages put them."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)


def restart(url: str) -> None:
    """Restart such a server, as after a crash: all connections end at once."""
    place, folder = binaries(), Path(url.partition("host=")[2].partition("&")[0])
    assert place is not None
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
    as_user: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    command = [str(place / "pg_ctl"), "-D", str(folder / "data"), "-m", "immediate", "-w", "-l", str(folder / "log"), "restart"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, cwd=folder, env={"LC_ALL": "C", "PATH": os.environ["PATH"]}, **quiet, **as_user)


@contextlib.contextmanager
def private_server() -> Iterator[str]:
    """Its URL; empty if the server is not installed. PostgreSQL refuses to run as root: then it runs as nobody."""
    place = binaries()
    if place is None:
        yield ""
        return
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg-"))

    def call(*command: str) -> None:
        as_user: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, check=True, cwd=folder, env={"LC_ALL": "C", "PATH": os.environ["PATH"]}, **quiet, **as_user)

    try:
        if user:
            os.chown(folder, user.pw_uid, user.pw_gid)
        call(str(place / "initdb"), "-D", str(folder / "data"), "-U", "owner", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c max_connections=20"
        call(str(place / "pg_ctl"), "-D", str(folder / "data"), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://owner@/postgres?host={folder}"
        finally:
            call(str(place / "pg_ctl"), "-D", str(folder / "data"), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
