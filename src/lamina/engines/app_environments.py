"""Environments of apps: the packages that an app's folder asks for, built once and cached by their hash.

`requirements.txt`, `pyproject.toml` or `uv.lock` in the folder of an app names packages. They are installed into a virtual
environment of its own, which versions with the same file share. Behind its packages come those of the server, so that Lamina is
there at the server's version.

What a file asks for is a deployer's word. It names packages and versions and nothing else: no address, no path and no option of
the installer, so the server fetches from the operator's index or wheelhouse alone. Wheels only, unless the operator allows
builds: building a package runs its code. The installer runs in a process of its own, as the user that the app runs as, behind
the same walls, with limits of time and size. Its result is given back to the server's user, so that no version can change what
another one imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

import lamina
from lamina.errors import BadValue, LoadFailed
from lamina.ipc.confinement import Confinement, clean_environment, enter, process_namespace
from lamina.server.process_status import limit_address_space
from lamina.units import show_bytes

REQUIREMENT_FILES = ("uv.lock", "requirements.txt", "pyproject.toml")
"""Files that name the packages of an app; of several the first one counts."""

MAX_FILE_BYTES = 4 * 2**20
MAX_LINES = 2_000
MAX_LINE = 2_000
MAX_KEYS = 4_096
_MARK = "lamina-environment.json"
_FORMAT = 1
_POLL_S = 0.5
_READ_S, _READ_MEMORY = 20.0, 2**30
_TAIL_LINES, _TAIL_BYTES = 12, 16_384
_INSTALLER_MEMORY = 4 * 2**30
_MOST_MARKERS, _MOST_MARKER_CHARS = 8, 900
_FRESH_S = 1_800.0
_PASSED = re.compile(
    r"(PIP|UV)_(INDEX_URL|EXTRA_INDEX_URL|DEFAULT_INDEX|INDEX|CERT|TRUSTED_HOST|PROXY|KEYRING_PROVIDER|NATIVE_TLS)"
)
"""Variables by which the operator names an index; all others of an installer are left out."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
_CLAUSE = r"(?:===|[<>=!~]=|[<>])\s*[A-Za-z0-9.*+!_-]{1,100}"
_REQUIREMENT = re.compile(
    rf"(?P<name>{_NAME})\s*(?:\[[A-Za-z0-9._,\s-]*\])?\s*(?:\(?\s*{_CLAUSE}(?:\s*,\s*{_CLAUSE})*\s*,?\s*\)?)?"
    r"\s*(?:;(?![\s\S]*\s-)[A-Za-z0-9_.,\s'\"<>=!~()*+-]{1,1000})?"
)
"""Its marker has nothing that an installer reads as an option, or in the place of which it puts a variable of its environment."""

_HASH = re.compile(r"\s+--hash[=\s](sha256|sha384|sha512):([0-9a-fA-F]{64,128})(?=\s|$)")


class EnvironmentOptions(Struct, frozen=True, kw_only=True):
    """Options of the operator for environments of apps."""

    wheelhouse: str = ""  #: folder of wheels to install from, without any index; "": the index of the installer
    allow_builds: bool = False  #: source packages are taken too, and building them runs their code
    limit_s: float = 900.0
    limit_bytes: int = 8 * 2**30


class Requirements(Struct, frozen=True):
    """Packages that an app asks for. A locked file names all of them, with hashes, and nothing is resolved."""

    file: str
    lines: tuple[str, ...]
    is_locked: bool = False


# --------------------------------------------------------------------------- requirements


def find_requirements(folder: Path) -> Requirements | None:
    """Packages that the files of an app's folder ask for; None: it has none, and runs with those of the server."""
    for name in REQUIREMENT_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadValue(f"{name}: {path.stat().st_size} bytes", hint=f"at most {MAX_FILE_BYTES}")
        try:
            found = _READERS[name](path.read_text("utf-8"))
        except UnicodeDecodeError:
            raise BadValue(f"{name}: not UTF-8 text") from None
        except (ValueError, RecursionError) as error:  # of TOML, or of a number or a depth that no file needs
            raise BadValue(f"{name}: not TOML: {str(error)[:200]}") from None
        if found is not None:
            kept = tuple(line for line in found.lines if _canonical(line) != "lamina")  # which is the server's own
            if len(kept) > MAX_LINES:
                raise BadValue(f"{name}: {len(kept)} packages", hint=f"at most {MAX_LINES}")
            return structs.replace(found, lines=kept) if kept else None
    return None


def read_apart(folder: Path) -> Requirements | None:
    """`find_requirements` of a folder that a deployer has filled, in a process with limits: TOML of a few kilobytes can take
    hours, and nothing that is under way in this process could be stopped."""
    if not any((folder / name).is_file() for name in REQUIREMENT_FILES):
        return None
    command = [sys.executable, "-P", "-m", "lamina.engines.app_environments", "--read", str(folder)]
    env = clean_environment(os.environ, None)
    try:
        done = subprocess.run(command, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=_READ_S, check=False)
        error, hint, found = msgspec.json.decode(done.stdout, type=tuple[str, str, Requirements | None])
    except (subprocess.TimeoutExpired, msgspec.MsgspecError):
        raise BadValue(
            "the packages that the app asks for cannot be read within the limits", hint="give a requirements.txt"
        ) from None
    if error:
        raise BadValue(error, hint=hint)
    return found


def _read(folder: str) -> int:
    """The process of `read_apart`."""
    limit_address_space(_READ_MEMORY)
    error, hint, found = "", "", None
    try:
        found = find_requirements(Path(folder))
    except BadValue as wrong:
        error, hint = wrong.message, wrong.hint
    sys.stdout.buffer.write(msgspec.json.encode((error, hint, found)))
    return 0


def _digest(folder: Path) -> bytes:
    """Hash of all that the requirements of a folder are read from."""
    said = hashlib.sha256()
    for name in REQUIREMENT_FILES:
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)  # a larger one is refused, whatever follows
            said.update(f"{name} {len(data)}\n".encode())
            said.update(data)
    return said.digest()


def _canonical(line: str) -> str:
    found = re.match(_NAME, line)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _checked(file: str, where: str, text: str) -> str:
    """One requirement: a package by its name, with versions and a marker. Anything that leads elsewhere is refused."""
    text = " ".join(text.split())  # the pattern has many places for spaces, and would try all ways to share a row of them out
    if len(text) <= MAX_LINE and _REQUIREMENT.fullmatch(text):
        return text
    elsewhere = "@" in text or "://" in text or "/" in text or text.startswith(".")
    hint = (
        "packages come from the index or the wheelhouse of the operator: write NAME==VERSION"
        if elsewhere
        else "write NAME, NAME==VERSION or NAME>=VERSION; options belong to the operator (lamina serve --wheelhouse)"
    )
    raise BadValue(f"{file}: {where}: {text[:120]!r} is not taken", hint=hint)


def _read_requirements(text: str) -> Requirements | None:
    lines: list[str] = []
    joined = re.sub(r"\\\r?\n", " ", text)
    for number, line in enumerate(joined.splitlines(), 1):
        line = " ".join(re.sub(r"(^|\s)#.*$", "", line).split())
        if not line:
            continue
        hashes = "".join(f" --hash={kind}:{value.lower()}" for kind, value in _HASH.findall(f" {line}"))
        lines.append(_checked("requirements.txt", f"line {number}", _HASH.sub("", f" {line}").strip()) + hashes)
    return Requirements("requirements.txt", tuple(lines))


def _read_pyproject(text: str) -> Requirements | None:
    """Dependencies of `[project]`. A file without them is the configuration of other tools."""
    project = tomllib.loads(text).get("project")
    asked = project.get("dependencies", []) if isinstance(project, dict) else []
    if not isinstance(asked, list) or not all(isinstance(one, str) for one in asked):
        raise BadValue("pyproject.toml: project.dependencies is no list of texts", hint='dependencies = ["numpy>=2"]')
    lines = tuple(_checked("pyproject.toml", "project.dependencies", one.strip()) for one in asked)
    return Requirements("pyproject.toml", lines) if lines else None


def _read_uv_lock(text: str) -> Requirements | None:
    """Packages of a lock file that its project needs, each with the hashes of its wheels. Groups for development are left out."""
    packages = tomllib.loads(text).get("package", [])
    try:
        known = {(one["name"], str(one.get("version", ""))): one for one in packages}
        roots = [key for key, one in known.items() if {"virtual", "editable"} & one.get("source", {}).keys()]
        by_name: dict[str, list[tuple[str, str]]] = {}
        for key in known:
            by_name.setdefault(key[0], []).append(key)
        markers = _reachable(known, by_name, roots)
        lines = [_locked_line(known[key], markers[key]) for key in sorted(markers) if key not in roots]
    except (KeyError, TypeError, AttributeError, IndexError):
        raise BadValue("uv.lock: it is not read here", hint="`uv lock` makes one; or give a requirements.txt") from None
    return Requirements("uv.lock", tuple(lines), is_locked=True)


Key = tuple[str, str]


def _reachable(known: dict[Key, Any], by_name: dict[str, list[Key]], roots: list[Key]) -> dict[Key, frozenset[str]]:
    """Packages that the roots need, each with the markers under which it is needed; an empty set: always. Where markers are many
    or long none is kept: the package is then installed where it may not be needed, which does no harm. A marker has those of the
    packages above in it: kept at any length they would double with each level."""
    needed: dict[tuple[Key, str], frozenset[str]] = {(root, ""): frozenset() for root in roots}
    todo = list(needed)
    while todo:
        at = todo.pop()
        (key, extra), marks = at, needed[at]
        package = known[key]
        edges = package.get("optional-dependencies", {}).get(extra, []) if extra else package.get("dependencies", [])
        for edge in edges:
            other = (edge["name"], str(edge["version"])) if "version" in edge else by_name[edge["name"]][0]
            own = frozenset([_and(marks, edge.get("marker", ""))]) - {""}
            for to in [(other, ""), *((other, one) for one in edge.get("extra", ()))]:
                before = needed.get(to)
                merged = own if before is None else before | own if before and own else frozenset()
                merged = merged if len(merged) <= _MOST_MARKERS and sum(map(len, merged)) <= _MOST_MARKER_CHARS else frozenset()
                if merged != before:
                    needed[to] = merged
                    todo.append(to)
    return {key: marks for (key, extra), marks in needed.items() if not extra}


def _and(marks: frozenset[str], marker: str) -> str:
    upper = " or ".join(f"({one})" for one in sorted(marks))
    return f"({upper}) and ({marker})" if upper and marker else upper or marker


def _locked_line(package: dict[str, Any], marks: frozenset[str]) -> str:
    name, version = package["name"], package.get("version", "")
    if "registry" not in package.get("source", {}):
        raise BadValue(
            f"uv.lock: {name!r} comes from {', '.join(package.get('source', {})) or 'nowhere'}, not from an index",
            hint="packages come from the index or the wheelhouse of the operator",
        )
    marker = " or ".join(f"({one})" for one in sorted(marks))
    line = _checked("uv.lock", "package", f"{name}=={version}" + (f" ; {marker}" if marker else ""))
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    hashes = sorted(
        {str(file["hash"]) for file in files if re.fullmatch(r"sha(256|384|512):[0-9a-f]{64,128}", str(file["hash"]))}
    )
    return line + "".join(f" --hash={one}" for one in hashes)


_READERS: dict[str, Callable[[str], Requirements | None]] = {
    "uv.lock": _read_uv_lock,
    "requirements.txt": _read_requirements,
    "pyproject.toml": _read_pyproject,
}


# --------------------------------------------------------------------------- cache


class _Recipe(Struct, frozen=True):
    """What an environment is made of; the same recipe gives the same environment."""

    format: int
    lines: tuple[str, ...]
    python: tuple[str, ...]  #: version, its tag, platform, base interpreter
    behind: tuple[str, ...]  #: folders of packages behind its own
    constraints: tuple[str, ...]
    allow_builds: bool
    is_locked: bool

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


class _BuildOrder(Struct, frozen=True):
    """What the installer's process is told."""

    folder: str
    recipe: _Recipe
    wheelhouse: str
    confinement: Confinement


def own_environment() -> Path | None:
    """The environment of an app that this process runs in; None: it runs in the server's own."""
    return Path(sys.prefix) if os.path.exists(os.path.join(sys.prefix, _MARK)) else None


def environment_root(python: str) -> str:
    """Folder of an environment, by its interpreter."""
    return os.path.dirname(os.path.dirname(python))


def packages_behind() -> tuple[str, ...]:
    """Folders of the server's packages, also where the server itself runs in the environment of an app."""
    if (own := own_environment()) is not None:
        return msgspec.json.decode((own / _MARK).read_bytes(), type=_Recipe).behind
    named = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return tuple(dict.fromkeys([*named, *site.getsitepackages(), str(Path(lamina.__file__).parent.parent)]))


def _constraints() -> tuple[str, ...]:
    """Versions that Lamina itself needs: a worker imports it beside the app's packages."""
    try:
        asked = importlib.metadata.requires("lamina") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(sorted(one for one in asked if "extra ==" not in one))


class AppEnvironments:
    """Environments of apps in a folder, which several servers may share."""

    def __init__(self, folder: Path, options: EnvironmentOptions | None = None) -> None:
        self._folder = folder
        self.options = options or EnvironmentOptions()
        self._builds: dict[str, asyncio.Lock] = {}  #: by user: a user's builds take turns, and hold up no other's
        self._keys: dict[bytes, str] = {}  #: of recipes, by what the files say: to read them takes a process each time

    def key_of(self, app_folder: Path, user: int = 0) -> str:
        """Name of the environment of an app; "": it needs none."""
        said = _digest(app_folder)
        key = self._keys.get(said)
        if key is None:
            found = read_apart(app_folder)
            key = self._keep_key(said, self._recipe(found).key if found is not None else "")
        return f"{user}-{key}" if key else ""

    def _keep_key(self, said: bytes, key: str) -> str:
        if len(self._keys) >= MAX_KEYS:
            self._keys.clear()
        self._keys[said] = key
        return key

    def _recipe(self, found: Requirements) -> _Recipe:
        version = ".".join(map(str, sys.version_info[:3]))
        base = str(getattr(sys, "_base_executable", sys.executable))
        python = (version, sys.implementation.cache_tag or "", sysconfig.get_platform(), os.path.realpath(base))
        allows = self.options.allow_builds
        return _Recipe(_FORMAT, found.lines, python, packages_behind(), _constraints(), allows, found.is_locked)

    async def ensure(self, app_folder: Path, user: int = 0, wall: Callable[[tuple[str, ...]], Confinement] | None = None) -> str:
        """Interpreter of the environment that an app's folder asks for, built if it is not there; "": the server's own.

        `wall` makes the confinement of the installer, which must reach the paths it is given. Raises `LoadFailed` with the
        last lines of the installer."""
        found = await asyncio.to_thread(read_apart, app_folder)
        if found is None:
            return ""
        recipe = self._recipe(found)
        self._keep_key(await asyncio.to_thread(_digest, app_folder), recipe.key)
        target = self._folder / f"{user}-{recipe.key}"
        async with self._builds.setdefault(str(user), asyncio.Lock()):
            if not await asyncio.to_thread(_is_ready, target):
                await self._build(target, recipe, found.file, user, wall)
        return str(target / "bin" / "python")

    async def _build(
        self, target: Path, recipe: _Recipe, file: str, user: int, wall: Callable[[tuple[str, ...]], Confinement] | None
    ) -> None:
        await asyncio.to_thread(_make_folder, self._folder)
        lock = await asyncio.to_thread(_take_lock, target, self.options.limit_s)
        try:
            if await asyncio.to_thread(_is_ready, target):
                return  # another server was faster
            await asyncio.to_thread(_fresh_folder, target, user)
            try:
                await self._install(target, recipe, file, wall)
                await asyncio.to_thread(_seal, target, recipe, user)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, target, ignore_errors=True))
                raise
        finally:
            os.close(lock)

    async def _install(
        self, target: Path, recipe: _Recipe, file: str, wall: Callable[[tuple[str, ...]], Confinement] | None
    ) -> None:
        shown = tuple(filter(None, (str(target), self.options.wheelhouse)))
        walls = wall(shown) if wall is not None else Confinement()
        if walls.user:
            walls = structs.replace(walls, memory_bytes=_INSTALLER_MEMORY, folder=str(target))
        order = _BuildOrder(str(target), recipe, self.options.wheelhouse, walls)
        passed = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
        with process_namespace() if walls.hides_processes else contextlib.nullcontext():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lamina.engines.app_environments", msgspec.json.encode(order)],
                env={**clean_environment(os.environ, walls), **passed},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        watch = _InstallWatch(process, target, self.options)
        try:
            tail = await asyncio.to_thread(watch.run)
        except BaseException:
            watch.end()
            raise
        if watch.breach or process.returncode:
            said = "\n".join(f"  {line}" for line in tail)
            why = watch.breach or f"the packages of {file} cannot be installed"
            hint = "the last lines are the installer's; " + (
                f"the wheelhouse is {self.options.wheelhouse}"
                if self.options.wheelhouse
                else "lamina serve --wheelhouse DIR installs without an index"
            )
            raise LoadFailed(f"{why}{chr(10) if said else ''}{said}", hint=hint)

    def collect(self, used: Iterable[str], min_age_s: float = _FRESH_S) -> list[str]:
        """Remove environments that are not among the `used` keys. Those being built stay, and fresh ones: the version that asked
        for one may not be recorded yet."""
        import time

        kept, gone = set(used), []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name in kept or not path.is_dir():
                continue
            with contextlib.suppress(OSError, BadValue):
                if time.time() - path.stat().st_mtime < min_age_s:
                    continue
                lock = _take_lock(path, 0.0)
                try:
                    shutil.rmtree(path, ignore_errors=True)
                    os.unlink(f"{path}.lock")
                    gone.append(path.name)
                finally:
                    os.close(lock)
        return gone


def _is_ready(target: Path) -> bool:
    return (target / _MARK).is_file()


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o711)


def _take_lock(target: Path, wait_s: float) -> int:
    """Lock of an environment: one process builds it or removes it, of all servers that share the folder."""
    import time

    until_s = time.monotonic() + wait_s
    while True:
        lock = os.open(f"{target}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(f"{target}.lock").st_ino == os.fstat(lock).st_ino:  # else it was removed by its last holder
                    return lock
        except BlockingIOError:
            if time.monotonic() >= until_s:
                os.close(lock)
                raise BadValue(f"the environment {target.name} is being built by another server") from None
            time.sleep(_POLL_S / 5)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _fresh_folder(target: Path, user: int) -> None:
    shutil.rmtree(target, ignore_errors=True)  # of a build that was killed
    target.mkdir(mode=0o700)
    if user:
        os.chown(target, user, user)


def _seal(target: Path, recipe: _Recipe, user: int) -> None:
    """Give an environment to the server's user, readable for the one it was built for; then it counts as ready."""
    packages = next(iter(sorted(target.glob("lib/python*/site-packages"))))
    for path in packages.iterdir():
        if path.name.lower() == "lamina" or re.fullmatch(r"lamina-[^-]+\.dist-info", path.name.lower()):
            shutil.rmtree(path, ignore_errors=True)  # what some package brought along; the server's own is the one
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in recipe.behind)
    (packages / "zz-lamina-server.pth").write_text(lines)
    if not user:  # functions of others run in it too, where the server does
        target.chmod(0o755)
    else:
        for place, folders, files in os.walk(target):
            for name in (*folders, *files, "."):
                made = os.path.join(place, name) if name != "." else place
                os.chown(made, os.getuid(), user, follow_symlinks=False)
                if not os.path.islink(made):
                    mode = os.stat(made).st_mode
                    os.chmod(made, 0o750 if os.path.isdir(made) or mode & 0o100 else 0o640)
    mark = target / f"{_MARK}.new"
    mark.write_bytes(msgspec.json.encode(recipe))
    if user:
        os.chown(mark, os.getuid(), user)
        mark.chmod(0o640)
    os.rename(mark, target / _MARK)


class _InstallWatch:
    """Watch over an installer: its last lines, its time, and the size of what it makes."""

    def __init__(self, process: subprocess.Popen[bytes], target: Path, options: EnvironmentOptions) -> None:
        self._process, self._target, self._options = process, target, options
        self.breach = ""

    def run(self) -> list[str]:
        """Wait for its end; the last lines it printed."""
        import selectors
        import time

        until_s = time.monotonic() + self._options.limit_s
        tail = b""
        assert self._process.stdout is not None
        looked_s = time.monotonic()
        with self._process.stdout as pipe, selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while True:
                if ready.select(_POLL_S):
                    data = os.read(pipe.fileno(), 65_536)
                    if not data:
                        break
                    tail = (tail + data)[-_TAIL_BYTES:]
                elif self._process.poll() is not None:
                    break  # what it has started may hold the pipe
                now_s = time.monotonic()
                if now_s > until_s:
                    self.breach = f"its packages were not installed within {self._options.limit_s:g} s"
                elif now_s - looked_s > 2 * _POLL_S:
                    if (size := _folder_bytes(self._target)) > self._options.limit_bytes:
                        self.breach = f"its packages take {show_bytes(size)}; at most {show_bytes(self._options.limit_bytes)}"
                    looked_s = time.monotonic()
                if self.breach:
                    break
        self.end()
        if not self.breach and (size := _folder_bytes(self._target)) > self._options.limit_bytes:
            self.breach = f"its packages take {show_bytes(size)}; at most {show_bytes(self._options.limit_bytes)}"
        text = tail.decode("utf-8", "replace").replace(str(self._target), "ENV")
        return [line.rstrip()[:300] for line in text.splitlines() if line.strip()][-_TAIL_LINES:]

    def end(self) -> None:
        """Wait for it a moment where it has ended, else kill it, with all it has started."""
        if not self.breach:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


# ------------------------------------------------------------------------- installer


def _installers(python: str) -> Iterator[list[str]]:
    """Commands that install into the environment with this interpreter: the first is the one."""
    found = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
    if found is None and importlib.util.find_spec("uv") is not None:
        with contextlib.suppress(Exception):  # a package without its program
            found = importlib.import_module("uv").find_uv_bin()
    if found:
        yield [found, "pip", "install", "--python", python, "--no-config", "--compile-bytecode", "--no-progress"]
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable, "-P", "-m", "pip", "--python", python, "install", "--no-input", "--disable-pip-version-check"]


def main() -> int:
    """The installer's process: behind its walls it makes the environment and runs uv or pip. With `--read`: of `read_apart`."""
    import venv

    if sys.argv[1] == "--read":
        return _read(sys.argv[2])
    order = msgspec.json.decode(sys.argv[1], type=_BuildOrder)
    enter(order.confinement)
    folder, recipe = Path(order.folder), order.recipe
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    python = str(folder / "bin" / "python")
    command = next(_installers(python), None)
    if command is None:
        sys.stdout.write("neither uv nor pip is installed beside Lamina: pip install uv\n")
        return 1
    asked, limits = folder / "requirements.txt", folder / "constraints.txt"
    asked.write_text("\n".join(recipe.lines) + "\n")
    limits.write_text("\n".join(recipe.constraints) + "\n")
    command += ["-r", str(asked)]
    if not recipe.is_locked:
        command += ["-c", str(limits)]
    else:
        command += ["--no-deps"]
    if not recipe.allow_builds:
        command += ["--only-binary", ":all:"]
    if order.wheelhouse:
        command += ["--no-index", "--find-links", order.wheelhouse]
    home = folder / ".installer"
    home.mkdir(mode=0o700)
    environment = {**os.environ, "TMPDIR": str(home), "PIP_CACHE_DIR": str(home / "pip"), "UV_CACHE_DIR": str(home / "uv")}
    if not order.confinement.user:  # the operator's own cache serves all of its apps
        environment = {**os.environ, "TMPDIR": str(home)}
    sys.stdout.flush()
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    shutil.rmtree(home, ignore_errors=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
