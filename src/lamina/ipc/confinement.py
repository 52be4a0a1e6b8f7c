"""Confinement of a child process: its environment, user, processes it can see, files it can reach, and limits.

A child is started by the server's own user and confines itself, before it loads any code but ours (`enter`): that costs neither a
second process nor a fork of the server. A process namespace is the one thing a process cannot enter by itself; the server makes
the child in it (`process_namespace`). What of all this a machine allows is found by trying it: `python -m lamina.ipc.confinement`
confines itself as it is told and says what it can still do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import Struct

MIB = 2**20

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS = 4, 38, 39


class Confinement(Struct, frozen=True, kw_only=True):
    """Walls around one process. The defaults confine nothing but its privileges."""

    user: int = 0  #: user and group it becomes; 0: it stays the server's
    folder: str = ""  #: private, its working and home folder; "": none
    hides_processes: bool = False  #: it is made in a process namespace, and sees no others
    shows: tuple[str, ...] = ()  #: files and folders its user must reach, wherever they are
    cgroup: str = ""  #: folder of the control group to make and join; "": none
    memory_bytes: int = 0  #: 0: no limit
    processes: int = 0  #: threads count too; 0: no limit
    cores: float = 0.0  #: processor time per time; 0: no limit


# ------------------------------------------------------------------------ environment

_NAMES = frozenset(
    [
        "PATH",
        "LANG",
        "LANGUAGE",
        "TZ",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONHASHSEED",
        "PYTHONUNBUFFERED",
        "PYTHONWARNINGS",
        "PYTHONUTF8",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "PYTHONFAULTHANDLER",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "LAMINA_URL",
        "LAMINA_DATA",
        "LAMINA_MODEL_CACHE",
        "LAMINA_TORCH_DEVICE",
    ]
)
_PREFIXES = (
    *("LC_", "OMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "KMP_", "MALLOC_", "GRPC_"),
    *(
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "CUBLAS_",
        "CUDNN_",
        "TORCH_",
        "TORCHINDUCTOR_",
        "TRITON_",
        "PYTORCH_",
        "ORT_",
        "ONNX",
        "TF_",
        "XLA_",
        "JAX_",
        "NUMBA_",
    ),
)
_OWN_NAMES = frozenset(
    [
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TMPDIR",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_CACHE",
        "TRANSFORMERS_OFFLINE",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    ]
)
"""Variables a process inherits. Everything else stays with the server: its keys, database addresses, tokens."""


def clean_environment(inherited: Mapping[str, str], confinement: Confinement | None = None) -> dict[str, str]:
    """The part of the server's environment that a child gets; for another user, with its own home."""
    is_own = confinement is None or not confinement.user
    names = _NAMES | _OWN_NAMES if is_own else _NAMES
    found = {name: value for name, value in inherited.items() if name in names or name.startswith(_PREFIXES)}
    if confinement is not None and confinement.folder:
        home = confinement.folder
        found |= {"HOME": home, "TMPDIR": home, "XDG_CACHE_HOME": f"{home}/.cache", "USER": f"u{confinement.user}"}
    return found


# ------------------------------------------------------------------------- namespaces


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def process_namespace() -> Iterator[None]:
    """What this thread starts meanwhile is the first process of a namespace: it sees none but its own, and they end with it."""
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().unshare(_CLONE_NEWPID), "unshare")
        try:
            yield
        finally:
            _check(_libc().setns(own, _CLONE_NEWPID), "setns")
    finally:
        os.close(own)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    given = [text.encode() if text else None for text in (source, target, kind)]
    _check(_libc().mount(*given, ctypes.c_ulong(flags), options.encode() if options else None), f"mount {target}")


def _private_view(confinement: Confinement) -> None:
    """A view of the file system for this process alone: its own /proc, and a way to what it must reach."""
    _check(_libc().unshare(_CLONE_NEWNS), "unshare")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    blocked: dict[str, list[str]] = {}
    for path in _outermost(confinement.shows):
        if (ancestor := _closed_ancestor(path, confinement.user)) is not None:
            blocked.setdefault(ancestor, []).append(path)
    for ancestor, paths in blocked.items():
        _show_only(ancestor, paths)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _show_only(folder: str, paths: list[str]) -> None:
    """Replace a folder that others may not enter by one that has these paths and nothing else."""
    opened = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in paths]
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for path, file in opened:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            os.makedirs(path, 0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        _mount(f"/proc/self/fd/{file}", path, "", _MS_BIND | _MS_REC)
        os.close(file)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths that are inside of no other one, as they really are."""
    real = sorted({os.path.realpath(path) for path in paths if path and os.path.exists(path)})
    kept: list[str] = []
    for path in real:
        if not kept or not path.startswith(kept[-1].rstrip("/") + "/"):
            kept.append(path)
    return kept


def _closed_ancestor(path: str, user: int) -> str | None:
    """The first folder on the way to a path that a user cannot enter."""
    at = "/"
    for part in path.strip("/").split("/")[:-1]:
        at = os.path.join(at, part)
        found = os.stat(at)
        is_of_group = found.st_gid == user and found.st_mode & 0o010
        if not found.st_mode & 0o001 and found.st_uid != user and not is_of_group:
            return at
    return None


# ------------------------------------------------------------------------------ limits


def _join_cgroup(confinement: Confinement) -> None:
    """Make a control group with the limits and join it. What this kernel does not count is not limited."""
    folder = confinement.cgroup
    os.makedirs(folder, 0o755, exist_ok=True)
    limits = {
        "memory.max": confinement.memory_bytes and str(confinement.memory_bytes),
        "memory.swap.max": confinement.memory_bytes and "0",
        "memory.oom.group": confinement.memory_bytes and "1",
        "pids.max": confinement.processes and str(confinement.processes),
        "cpu.max": confinement.cores and f"{max(1_000, int(confinement.cores * 100_000))} 100000",
    }
    for name, value in limits.items():
        path = os.path.join(folder, name)
        if value and os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(value))
    with open(os.path.join(folder, "cgroup.procs"), "w") as file:
        file.write("0")


def _limit_resources(confinement: Confinement) -> None:
    """Limits of the process itself: no core files, and memory where no control group counts it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counted = os.path.join(confinement.cgroup, "memory.max") if confinement.cgroup else ""
    if confinement.memory_bytes and not (counted and os.path.exists(counted)):
        # data, not address space: libraries reserve far more of that than they use
        resource.setrlimit(resource.RLIMIT_DATA, (confinement.memory_bytes, confinement.memory_bytes))
    if confinement.user and confinement.processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (confinement.processes, confinement.processes))


def enter(confinement: Confinement) -> None:
    """Confine this process, for good. Raises OSError where the machine does not allow it; then nothing may be loaded."""
    if confinement.cgroup:
        try:
            _join_cgroup(confinement)
        except OSError:
            if confinement.user:  # the operator's own functions can do without
                raise
    if confinement.hides_processes:
        _private_view(confinement)
    _limit_resources(confinement)
    if confinement.user:
        os.umask(0o077)
        os.setgroups([])
        os.setresgid(*[confinement.user] * 3)
        os.setresuid(*[confinement.user] * 3)
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if confinement.user:
        _libc().prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # it may look at itself again; those of other users still cannot
    if confinement.folder:
        os.chdir(confinement.folder)


def end_cgroup(folder: str) -> bool:
    """Kill what is left in a control group, also what has left its process group, and remove it; False: it is not empty yet."""
    with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.kill"), "w") as file:
        file.write("1")
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(folder)
        except OSError:
            return False
    return True


def memory_kills(folder: str) -> int:
    """How often the kernel has killed in a control group because its memory was used up."""
    try:
        with open(os.path.join(folder, "memory.events")) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0


# ------------------------------------------------------------------------------- probe


class ProbeResult(Struct, frozen=True):
    """What a confined process could still do."""

    user: int
    groups: tuple[int, ...]
    processes: tuple[int, ...]  #: it sees
    reaches_server: bool  #: it may signal the process that started it, or read its environment
    gains_privileges: bool  #: by a setuid program
    writes_home: bool
    reads: bool  #: all it must, the interpreter's modules among it
    error: str = ""


def probe(confinement: Confinement, server: int) -> ProbeResult:
    """Confine this process and try the walls. `server` is the process to get at."""
    try:
        enter(confinement)
    except OSError as error:
        return ProbeResult(-1, (), (), True, True, False, False, error.strerror or str(error))
    seen = tuple(int(name) for name in os.listdir("/proc") if name.isdecimal())
    reaches = False
    with contextlib.suppress(OSError):
        os.kill(server, 0)
        reaches = not confinement.hides_processes
    with contextlib.suppress(OSError), open(f"/proc/{server}/environ", "rb") as file:
        reaches = reaches or bool(file.read(1))
    gains = _libc().prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1
    writes = False
    with contextlib.suppress(OSError), open(os.path.join(confinement.folder or ".", ".probe"), "wb") as file:
        writes = True
        os.unlink(file.name)
    reads = all(os.access(path, os.R_OK) for path in confinement.shows if os.path.exists(path))
    try:
        import wsgiref.util  # noqa: F401  of the standard library, and nothing else has it

        import lamina.sdk.app_loader  # noqa: F401
    except ImportError:
        reads = False
    return ProbeResult(os.geteuid(), tuple(os.getgroups()), seen, reaches, gains, writes, reads)


def main() -> None:
    confinement = msgspec.json.decode(sys.argv[1], type=Confinement)
    signal.alarm(30)
    sys.stdout.write(msgspec.json.encode(probe(confinement, int(sys.argv[2]))).decode())


if __name__ == "__main__":
    main()
