"""Package of an app for upload: a zip of plain files. Every name and every size is checked before a byte is written.

Names are not paths: each part has letters, digits and `._-` alone and none begins with a dot, so there is no way up or out.
Links and special files are refused; what is unpacked may not be larger than was declared, nor more than the limits.

A server unpacks in a process of its own with limits on time and memory (`python -m lamina.gateway.deploy.app_package FOLDER`, the
zip as its input): a table of a million names is not read where calls are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import io
import os
import re
import stat
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import Struct

from lamina.engines.app_environments import REQUIREMENT_FILES, own_environment
from lamina.errors import BadValue, read_user_file
from lamina.sdk.model_bundle import DATA_MARK, PACKED, PACKED_FILE, is_bundle, packed_bundle
from lamina.server.process_status import limit_address_space

NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
UNPACK_LIMIT_S = 60.0
LEADER_LIMIT_S = 600.0
UNPACK_MEMORY = 2**30
WEIGHTS_BYTES = 8 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SKIPPED = {"__pycache__", "node_modules"}
_MARKS = ("pyvenv.cfg", DATA_MARK)
"""Files of folders that are no part of an app, wherever they lie: virtual environments, and what Lamina itself keeps."""


class PackageLimits(Struct, frozen=True):
    """Limits on an upload."""

    files: int = 500
    total_bytes: int = 256 * 2**20
    file_bytes: int = 128 * 2**20
    depth: int = 8
    ratio: int = 200  #: unpacked against packed, of one file above a mebibyte


FROM_LEADER = PackageLimits(files=5_000, total_bytes=2 * 2**30, file_bytes=2 * 2**30 - 1)
"""Limits on what a leader sends its agents: models among them."""


async def unpack_from_leader(body: bytes, into: Path) -> None:
    """Unpack what the leader has sent: by its hash it is what the leader has, and models may be large."""
    await unpack_apart(body, into, LEADER_LIMIT_S, FROM_LEADER)


def pack(path: Path) -> tuple[bytes, str]:
    """Zip a file, or a folder with all below it; returns zip and entry file's name. The same files give the same bytes."""
    files = _files_below(path, "*") if path.is_dir() else {path.name: path}
    entry = path.name if not path.is_dir() else "app.py"
    if entry not in files:
        raise BadValue(f"no app.py in {str(path)!r}", hint="name the file: lamina deploy FILE")
    return _zip(files), entry


def pack_around(entry: Path, whole: bool) -> tuple[bytes, str]:
    """Zip an app's file with its folder: all of it, or Python files alone; returns zip and the file's name in it. Models without
    code are a package of their files."""
    if is_bundle(str(entry)):
        return _pack_models(str(entry))
    files = _files_below(entry.parent, "*" if whole else "*.py")
    if not whole and own_environment() is not None:  # it runs in the environment of its folder, and will elsewhere
        files |= {name: entry.parent / name for name in REQUIREMENT_FILES if (entry.parent / name).is_file()}
    return _zip({**files, entry.name: entry}), entry.name


def _pack_models(target: str) -> tuple[bytes, str]:
    text, files, app = packed_bundle(target)
    if app:
        path = Path(app.partition(".py:")[0] + ".py" if ".py:" in app else app)
        files = {**_files_below(path.parent, "*.py"), path.name: path, **files}
    return _zip(files, {PACKED_FILE: text}), PACKED


def _files_below(folder: Path, pattern: str) -> dict[str, Path]:
    """Files of a folder by their names in a package, in order; nothing that is hidden, made from others, or no part of an app."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".") and one not in _SKIPPED and not _is_marked(place, one)]
        found += [Path(place, one) for one in fnmatch.filter(names, pattern) if not one.startswith(".")]
    return {str(one.relative_to(folder)): one for one in sorted(found) if one.is_file()}


def _is_marked(*folder: str) -> bool:
    return any(os.path.isfile(os.path.join(*folder, mark)) for mark in _MARKS)


def _zip(files: dict[str, Path], texts: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            content = read_user_file(file, "name the file that holds the app, or the folder of its app.py")
            is_weights = len(content) > WEIGHTS_BYTES  # of models: they cannot be made smaller, and it takes long to find out
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_STORED if is_weights else zipfile.ZIP_DEFLATED)
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def sha256_hex(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def unpack(body: bytes, into: Path, limits: PackageLimits | None = None) -> int:
    """Unpack into a folder that does not exist yet; returns how many bytes that took."""
    limits = limits or PackageLimits()
    try:
        archive = zipfile.ZipFile(io.BytesIO(body))
        entries = archive.infolist()
    except Exception as error:  # the reader has many ways to be surprised; to the sender they are all one
        raise BadValue(f"package: not a zip file: {str(error)[:80]}", hint="lamina deploy makes one") from None
    with archive:
        _check(entries, limits)
        _make_private(into)
        total = 0
        for entry in entries:
            if entry.is_dir():
                continue
            total += _write(archive, entry, into)
        return total


async def unpack_apart(body: bytes, into: Path, limit_s: float = UNPACK_LIMIT_S, limits: PackageLimits | None = None) -> None:
    """Unpack in a process of its own."""
    limits = limits or PackageLimits()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "lamina.gateway.deploy.app_package", str(into)),
        msgspec.json.encode(limits).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(body), limit_s)
    except TimeoutError:
        raise BadValue(f"package: unpacking it took longer than {limit_s:g} s", hint="send fewer or smaller files") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        raise BadValue("package: it cannot be unpacked within the limits", hint="send fewer or smaller files")
    error, hint = msgspec.json.decode(said, type=tuple[str, str])
    if error:
        raise BadValue(error, hint=hint)


def main() -> None:
    """The process of `unpack_apart`: says what is wrong with the package, and what to do about it."""
    limits = msgspec.json.decode(sys.argv[2], type=PackageLimits)
    limit_address_space(UNPACK_MEMORY + 3 * max(0, limits.file_bytes - PackageLimits().file_bytes))
    error = ("", "")
    try:
        unpack(sys.stdin.buffer.read(), Path(sys.argv[1]), limits)
    except BadValue as found:
        error = (found.message, found.hint)
    sys.stdout.buffer.write(msgspec.json.encode(error))


def _check(entries: list[zipfile.ZipInfo], limits: PackageLimits) -> None:
    if not entries:
        raise BadValue("package: nothing in it")
    if len(entries) > limits.files:
        raise BadValue(f"package: {len(entries)} files", hint=f"at most {limits.files}")
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename
        parts = name.rstrip("/").split("/")
        if entry.orig_filename != name or not all(NAME_PART.fullmatch(part) for part in parts) or len(parts) > limits.depth:
            raise BadValue(
                f"package: {name[:100]!r} is no name for a file", hint="letters, digits, . _ - and at most 8 folders deep"
            )
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise BadValue(f"package: {name[:100]!r} is not a plain file", hint="links are not followed: pack what they point at")
        if name.lower() in seen:
            raise BadValue(f"package: {name[:100]!r} is there twice")
        seen.add(name.lower())
        if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadValue(
                f"package: {name[:100]!r} is packed in a way that is not read here", hint="deflate, without a password"
            )
        if entry.file_size > limits.file_bytes:
            raise BadValue(f"package: {name[:100]!r} has {entry.file_size} bytes", hint=f"at most {limits.file_bytes}")
        if entry.file_size > 2**20 and entry.file_size > limits.ratio * max(1, entry.compress_size):
            raise BadValue(f"package: {name[:100]!r} grows more than {limits.ratio} times when it is unpacked")
    files = {entry.filename.lower() for entry in entries if not entry.is_dir()}
    for entry in entries:
        parts = entry.filename.lower().rstrip("/").split("/")
        above = next((one for one in ("/".join(parts[:depth]) for depth in range(1, len(parts))) if one in files), "")
        if above or (entry.is_dir() and "/".join(parts) in files):
            raise BadValue(f"package: {entry.filename[:100]!r} is below {above[:100]!r}, which is a file")
    total = sum(entry.file_size for entry in entries)
    if total > limits.total_bytes:
        raise BadValue(f"package: {total} bytes in all", hint=f"at most {limits.total_bytes}")


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, into: Path) -> int:
    target = into.joinpath(*entry.filename.split("/"))
    assert target.resolve().is_relative_to(into.resolve()), "a checked name leads out of its folder"
    _make_private(target.parent, exist_ok=True)
    try:
        with archive.open(entry) as source:
            data = source.read(entry.file_size + 1)
    except Exception as error:  # as above
        raise BadValue(f"package: {entry.filename[:100]!r} cannot be read: {str(error)[:80]}", hint="send it again") from None
    if len(data) != entry.file_size:
        raise BadValue(f"package: {entry.filename[:100]!r} is not as long as it says")
    with target.open("xb") as file:
        file.write(data)
    target.chmod(0o600)
    return len(data)


def _make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder for this user alone, and those above it too: `mkdir` gives its mode to the last one only."""
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=exist_ok)


if __name__ == "__main__":
    main()
