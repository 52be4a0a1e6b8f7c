"""Isolation of function processes on this machine: users, homes, control groups, and which walls hold.

The operator's own functions run as the server's user, with the limits they declare. Functions of a tenant run as a user of its
own, in a process namespace, in a private folder. Whether this machine keeps them apart is not assumed: a process is confined and
tries.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import site
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

import lamina
from lamina.drivers.engine import TargetSource
from lamina.engines.app_environments import environment_root, packages_behind
from lamina.errors import BadValue
from lamina.ipc.confinement import (
    MIB,
    Confinement,
    ProbeResult,
    clean_environment,
    end_cgroup,
    memory_kills,
    process_namespace,
)
from lamina.types import FunctionSpec

TENANT_USERS = (200_000, 265_535)
"""Users for tenants, unless others are configured: above those of a machine, below those of most containers."""

TENANT_PROCESSES = 512
"""Processes and threads of one instance of a tenant's."""

RUNTIME_BYTES = 96 * MIB
"""Memory of a worker itself, beside what its function declares."""

UNCOUNTED_BYTES = 1024 * MIB
"""The same where no control group counts memory: the limit is on what is mapped, and libraries map more than they use."""

PROBE_S = 30.0
_HOMES = "lamina-homes-"
_LOCK = ".lock"


class Walls(Struct, frozen=True, kw_only=True):
    """Walls between tenants on this machine, found by trying. Each is "" if it holds, else why it does not."""

    users: str = "not tried"
    processes: str = "not tried"
    files: str = "not tried"
    limits: str = "not tried"  #: of memory, processes and cores together; without it memory has a looser one

    @property
    def hold(self) -> bool:
        """Whether code of tenants is kept from that of others. Limits are missed, and no secret is lost by that."""
        return not (self.users or self.processes or self.files)

    def lines(self) -> list[str]:
        """One line for each, for people."""
        said = {
            "users": "one for each tenant",
            "processes": "those of others are hidden",
            "files": "a private folder for each tenant",
            "limits": "memory, processes and cores by control groups",
        }
        return [f"{name}: {(getattr(self, name) and 'none: ' + getattr(self, name)) or said[name]}" for name in said]


class Homes:
    """Folder of the private folders of users, locked for as long as its server lives.

    A folder without a lock was left by a server that was killed, whatever the process table says, and goes at the next start.
    """

    def __init__(self, base: str | None = None) -> None:
        base = base or ("/var/tmp" if os.access("/var/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir())
        _remove_stale_homes(base)
        fresh = tempfile.mkdtemp(prefix=f".{_HOMES}", dir=base)  # not found by others before it is locked
        self._lock = os.open(f"{fresh}/{_LOCK}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.chmod(fresh, 0o711)
        self.path = f"{base}/{os.path.basename(fresh)[1:]}"
        os.rename(fresh, self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_stale_homes(base: str) -> None:
    """Remove folders of servers that were killed: those of this user, with a lock file in them that no process holds. What is
    there for another reason stays."""
    for name in os.listdir(base):
        path = f"{base}/{name}"
        if not name.startswith(_HOMES):
            continue
        with contextlib.suppress(OSError):  # another server was faster, or lives
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for inner in os.listdir(path):  # the lock last: until then it can be found again
                    if inner != _LOCK:
                        shutil.rmtree(f"{path}/{inner}", ignore_errors=True)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


class ProcessIsolation:
    """Confinements of function processes, with what they need on disk; removed by `close`."""

    def __init__(self, users: tuple[int, int] = TENANT_USERS) -> None:
        self.users = users
        self.walls = Walls()
        self._cgroup_base: str | None = None  #: "": none can be made
        self._homes: Homes | None = None
        self._ending: set[str] = set()  #: control groups that could not be removed yet

    @property
    def _cgroups(self) -> str:
        """Control group of all functions; made when it is first asked for. "": none can be made here."""
        if self._cgroup_base is None:
            self._cgroup_base = _make_cgroup_base()
        return self._cgroup_base

    def confinement(self, source: TargetSource, spec: FunctionSpec | None, instance: str, shows: tuple[str, ...]) -> Confinement:
        """Confinement of one instance. `shows` is what it must reach besides the interpreter and its app."""
        memory_bytes, cores = self._limits(spec, bool(source.user))
        cgroup = f"{self._cgroups}/{instance}" if self._cgroups else ""
        if not source.user:
            return Confinement(cgroup=cgroup, memory_bytes=memory_bytes)
        app: tuple[str, ...] = (str(Path(source.path).parent),) if source.path else ()
        app += (environment_root(source.python),) if source.python else ()
        return Confinement(
            user=source.user,
            folder=self.home(source.user),
            hides_processes=True,
            shows=(*_interpreter_paths(), *app, *shows, self.home(source.user)),
            cgroup=cgroup,
            memory_bytes=memory_bytes,
            processes=TENANT_PROCESSES,
            cores=cores,
        )

    def _limits(self, spec: FunctionSpec | None, is_foreign: bool) -> tuple[int, float]:
        """Memory and cores of an instance; 0: no limit. Where memory is not counted, that of the operator's is not limited: a
        limit on what is mapped could end a function that uses less than it declares."""
        if spec is None or spec.gpu != "no":  # memory on a device is not the host's
            return 0, 0.0
        is_counted = self._counts("memory")
        spare = RUNTIME_BYTES if is_counted else UNCOUNTED_BYTES
        has_limit = spec.memory_mib and (is_counted or is_foreign)
        return spec.memory_mib * MIB + spare if has_limit else 0, spec.cores + 1.0 if is_foreign else 0.0

    def _counts(self, controller: str) -> bool:
        return bool(self._cgroups) and controller in _read_words(f"{self._cgroups}/cgroup.controllers")

    def home(self, user: int) -> str:
        """Private folder of a user; made when it is first asked for."""
        if self._homes is None:
            self._homes = Homes()
        folder = f"{self._homes.path}/{user}"
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
            os.chown(folder, user, user)
        return folder

    def end(self, confinement: Confinement) -> str:
        """Sweep up after a process; returns what is known of why it ended."""
        if not confinement.cgroup:
            return ""
        kills = memory_kills(confinement.cgroup)
        self._ending = {folder for folder in (*self._ending, confinement.cgroup) if not end_cgroup(folder)}
        return f"it used more than its {confinement.memory_bytes >> 20} MiB of memory" if kills else ""

    def close(self) -> None:
        for folder in self._ending:
            end_cgroup(folder)
        if self._cgroup_base:
            with contextlib.suppress(OSError):
                os.rmdir(self._cgroup_base)
        self._cgroup_base = ""
        if self._homes is not None:
            self._homes.close()
            self._homes = None

    # ------------------------------------------------------------------------- walls

    async def try_walls(self) -> Walls:
        """Confine a process as one of a tenant, and let it try what it must not be able to do."""
        if os.geteuid() != 0:
            why = "the server is not root"
            self.walls = Walls(users=why, processes=why, files=why, limits=self._missing_limits())
            return self.walls
        found = await asyncio.to_thread(_probe, self.users[1])
        why, users = found.error, ""
        if found.user != self.users[1] or found.groups:
            users = "it keeps the server's user"
        elif found.gains_privileges:
            users = "it gets that of a setuid program"
        self.walls = Walls(
            users=why or users,
            processes=why or ("" if found.processes == (1,) and not found.reaches_server else "it sees others"),
            files=why or ("" if found.writes_home and found.reads else "it cannot reach what it needs"),
            limits=self._missing_limits(),
        )
        return self.walls

    def _missing_limits(self) -> str:
        missing = [name for name in ("memory", "pids", "cpu") if not self._counts(name)]
        return f"no control group for {', '.join(missing)}" if missing else ""


@cache
def _probe(user: int) -> ProbeResult:
    """Try the walls as this user. Once in a process: the kernel does not change its mind."""
    home = tempfile.mkdtemp(prefix="lamina-probe-")
    try:
        os.chown(home, user, user)
        shows = (*_interpreter_paths(), home)
        walls = Confinement(user=user, folder=home, hides_processes=True, shows=shows, processes=TENANT_PROCESSES)
        argument = msgspec.json.encode(walls).decode()
        with process_namespace():
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "lamina.ipc.confinement", argument, str(os.getpid())],
                env=clean_environment(os.environ, walls),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        with child:
            try:
                said, _ = child.communicate(timeout=PROBE_S)
            finally:
                child.kill()
        return msgspec.json.decode(said, type=ProbeResult)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: the process that tried them ended"
        return ProbeResult(-1, (), (), True, True, False, False, why)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def parse_users(text: str) -> tuple[int, int]:
    """Range of users, as in `200000-265535`."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not last.isdecimal() or not 1_000 <= int(first) < int(last) < 2**31:
        raise BadValue(f"--tenant-users: {text[:40]!r} is no range of users", hint="such as 200000-265535, from 1000 on")
    return int(first), int(last)


def _interpreter_paths() -> tuple[str, ...]:
    """What Python and its packages are read from. Not all of `sys.path`: the folder of the operator's app is there too."""
    own = (sys.prefix, sys.base_prefix, str(Path(lamina.__file__).parent.parent))
    return tuple(dict.fromkeys([*own, *site.getsitepackages(), *packages_behind()]))


def _make_cgroup_base() -> str:
    """A control group for all functions of this server; "": none can be made here."""
    try:
        base = _own_cgroup()
        if base is None:
            return ""
        _remove_stale(base)
        folder = f"{base}/lamina-{os.getpid()}-{os.urandom(3).hex()}"
        with contextlib.suppress(OSError):
            _move_into_leaf(base)
            _enable(base)
        os.mkdir(folder)
        with contextlib.suppress(OSError):
            _enable(folder)
        if not os.access(f"{folder}/cgroup.procs", os.W_OK):
            os.rmdir(folder)
            return ""
        return folder
    except OSError:
        return ""


def _remove_stale(base: str) -> None:
    """Remove groups of servers that were killed. A group with processes in it cannot be removed."""
    for name in os.listdir(base):
        parts = name.split("-")
        if len(parts) == 3 and parts[0] == "lamina" and not os.path.exists(f"/proc/{parts[1]}"):
            with contextlib.suppress(OSError):
                for inner in os.scandir(f"{base}/{name}"):
                    if inner.is_dir():
                        end_cgroup(inner.path)
                os.rmdir(f"{base}/{name}")


def _move_into_leaf(base: str) -> None:
    """Move this server into a group of its own below one that is delegated to it: a group that has processes cannot limit its
    children. Where others are in it too, it is not ours to divide."""
    if _read_words(f"{base}/cgroup.procs") == [str(os.getpid())] and _own_cgroup() == base:
        leaf = f"{base}/lamina-server"
        os.makedirs(leaf, exist_ok=True)
        Path(f"{leaf}/cgroup.procs").write_text("0")


def _enable(folder: str) -> None:
    wanted = [f"+{name}" for name in ("memory", "pids", "cpu") if name in _read_words(f"{folder}/cgroup.controllers")]
    if wanted:
        Path(f"{folder}/cgroup.subtree_control").write_text(" ".join(wanted))


def _own_cgroup() -> str | None:
    """Folder of this process's control group, of the second version."""
    own = next((line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split(" ")
        if kind == "cgroup2" and own is not None:
            return place + own.rstrip("/")
    return None


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []
