"""Model sources: `lamina.fetch_model(SOURCE)` makes a path of a folder, an address or an object store, through a cache on disk.

A download lies beside the cache until it is complete and its checksum is right; then it is renamed. So a process that dies in the
middle leaves nothing that another could take for a model, and servers that share a cache fetch once: the others wait for the
lock. Without a checksum the server of an address is asked whether its file has changed; if it does not answer, the copy of
before is used.

Sources are given by the operator (`--model`) and by code of apps, never by a request.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Struct

from lamina.errors import BadValue, LoadFailed
from lamina.units import show_bytes

log = logging.getLogger("lamina")

MAX_BYTES = 256 * 2**30
MAX_FILES = 1_000
TRIES = 3
TIMEOUT_S = 30.0
_CHUNK = 1 << 20
_SPARE_BYTES = 64 * 2**20
"""Of a disk, to be left free."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ABOUT = ".source.json"
"""What is known of what lies beside it, whose name never begins with a dot."""


class _Cached(Struct, frozen=True):
    """What is known of a cached file."""

    source: str
    name: str
    bytes: int
    sha256: str
    etag: str = ""


def is_address(source: str) -> bool:
    return "://" in source


def cache_folder() -> Path:
    """Folder of fetched models: LAMINA_MODEL_CACHE, or one in the user's cache."""
    named = os.environ.get("LAMINA_MODEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamina" / "models"


def fetch_model(source: str | os.PathLike[str], *, sha256: str = "", cache: str | os.PathLike[str] | None = None) -> Path:
    """Path of a model. `source` is a file or a folder; an address with http, https, or any scheme of fsspec such as `s3://bucket/key`
    (extra `sources`), of which one that ends in `/` is a folder. `sha256` is the checksum the file must have."""
    text, wanted = os.fspath(source), sha256.lower().removeprefix("sha256:")
    if wanted and not _SHA256.fullmatch(wanted):
        raise BadValue(f"sha256: {sha256[:80]!r} is no SHA-256", hint="64 hexadecimal digits: sha256sum FILE")
    if is_address(text):
        return _through_cache(text, wanted, Path(cache) if cache is not None else cache_folder())
    path = Path(text)
    if not path.exists():
        raise BadValue(f"no model at {text!r}", hint="give the path of a file or folder, or an address")
    if wanted:
        if path.is_dir():
            raise BadValue("sha256: a folder has none", hint="give the checksum of a file")
        _check_sum(_sum_of(path), wanted, text)
    return path


def shown(source: str) -> str:
    """An address without its password and its query, where keys may be."""
    parts = urlsplit(source)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


# ------------------------------------------------------------------------------ cache


def _through_cache(source: str, wanted: str, cache: Path) -> Path:
    parts = urlsplit(source)
    is_folder = parts.path.endswith("/")
    if is_folder and (wanted or parts.scheme in ("http", "https")):
        raise BadValue(
            f"{shown(source)}: a folder {'has no checksum' if wanted else 'cannot be listed over HTTP'}",
            hint="name a file in it",
        )
    name = PurePosixPath(parts.path).name or parts.netloc
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", name):
        name = "model" + (
            PurePosixPath(parts.path).suffix if re.fullmatch(r"\.[a-z0-9]{1,12}", PurePosixPath(parts.path).suffix) else ""
        )
    folder = cache / hashlib.sha256(f"{source}\n{wanted}".encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            for left in folder.glob(".part-*"):  # of a process that was killed: the lock is ours
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
            if is_folder:
                return _fetch_folder(source, folder, name)
            return _fetch_file(source, folder, name, wanted)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LoadFailed(f"{shown(source)}: no room in {cache}", hint="free some, or set LAMINA_MODEL_CACHE") from None
        if error.errno in (errno.EACCES, errno.EROFS):
            raise LoadFailed(
                f"{cache}: {error.strerror}", hint="set LAMINA_MODEL_CACHE to a folder that can be written"
            ) from None
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process fetches; others that want the same wait for it."""
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _read_about(folder: Path) -> _Cached | None:
    try:
        about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_Cached)
        return about if (folder / about.name).stat().st_size == about.bytes else None
    except (OSError, msgspec.MsgspecError):
        return None


def _fetch_file(source: str, folder: Path, name: str, wanted: str) -> Path:
    known = _read_about(folder)
    if known is not None and wanted and known.sha256 == wanted:
        return folder / known.name  # its content cannot have changed
    is_http = urlsplit(source).scheme in ("http", "https")
    for attempt in range(1, TRIES + 1):
        part = folder / f".part-{os.urandom(6).hex()}"
        try:
            read = _HttpDownload(source, known.etag if known is not None else "") if is_http else _ObjectDownload(source)
            with contextlib.closing(read):
                if read.is_unchanged and known is not None:
                    return folder / known.name
                if known is not None and not is_http and read.etag and read.etag == known.etag:
                    return folder / known.name
                about = _download(read, part, source, name)
            _check_sum(about.sha256, wanted, shown(source))
            os.replace(part, folder / name)
            (folder / _ABOUT).write_bytes(msgspec.json.encode(about))
            log.info("model %s: %s, sha256 %s", shown(source), show_bytes(about.bytes), about.sha256)
            return folder / name
        except _Transient as error:
            if attempt < TRIES:
                time.sleep(0.2 * 2**attempt)
                continue
            if known is not None:
                log.warning("model %s cannot be looked at (%s): the copy of before is used", shown(source), error)
                return folder / known.name
            raise LoadFailed(f"{shown(source)}: {error}", hint="is the address right, and reached from here?") from None
        finally:
            part.unlink(missing_ok=True)
    raise AssertionError("the last try has returned or raised")


def _download(read: _HttpDownload | _ObjectDownload, part: Path, source: str, name: str) -> _Cached:
    _check_room(read.size, part.parent, source)
    digest, total = hashlib.sha256(), 0
    with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        for chunk in read.chunks():
            total += len(chunk)
            if total > MAX_BYTES:
                raise LoadFailed(f"{shown(source)}: more than {show_bytes(MAX_BYTES)}")
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if read.size is not None and total != read.size:
        raise _Transient(f"it was cut off after {total} of {read.size} bytes")
    return _Cached(shown(source), name, total, digest.hexdigest(), read.etag)


def _check_room(size: int | None, folder: Path, source: str) -> None:
    if size is None:
        return
    if size > MAX_BYTES:
        raise LoadFailed(f"{shown(source)}: {show_bytes(size)}, more than {show_bytes(MAX_BYTES)}")
    free = shutil.disk_usage(folder).free - _SPARE_BYTES
    if size > free:
        raise LoadFailed(
            f"{shown(source)}: {show_bytes(size)}, and {folder.parent} has {show_bytes(max(0, free))}",
            hint="free some, or set LAMINA_MODEL_CACHE",
        )


def _check_sum(found: str, wanted: str, source: str) -> None:
    if wanted and found != wanted:
        raise BadValue(
            f"{source}: its sha256 is {found}, not {wanted}", hint="it was changed, or the checksum is of another file"
        )


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------- protocols


class _Transient(Exception):
    """A download that may succeed if it is tried again."""


class _HttpDownload:
    """A download over HTTP(S). With an `etag`, of a file that may be unchanged."""

    def __init__(self, source: str, etag: str) -> None:
        import http.client  # for downloads only: an app needs neither
        import urllib.error
        import urllib.request

        request = urllib.request.Request(source, headers={"user-agent": "lamina", **({"if-none-match": etag} if etag else {})})
        self.is_unchanged, self.etag = False, ""
        self.size: int | None = None
        self._response: Any = None
        try:
            self._response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 304:
                self.is_unchanged = True
                return
            if error.code in (408, 429) or error.code >= 500:
                raise _Transient(f"it answered {error.code}") from None
            raise LoadFailed(f"{shown(source)}: it answered {error.code}", hint="is the address right?") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise _Transient(str(getattr(error, "reason", error))) from None
        length = self._response.headers.get("content-length")
        self.size = int(length) if length and length.isdecimal() else None
        self.etag = self._response.headers.get("etag", "")

    def chunks(self) -> Iterator[bytes]:
        import http.client

        try:
            while chunk := self._response.read(_CHUNK):
                yield chunk
        except (http.client.HTTPException, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _Transient(f"it was cut off: {error}") from None

    def close(self) -> None:
        if self._response is not None:
            self._response.close()


class _ObjectDownload:
    """A download from an object store, by fsspec."""

    is_unchanged = False

    def __init__(self, source: str) -> None:
        self._files, self._path = _file_system(source)
        about = _asked(lambda: self._files.info(self._path), source)
        if about.get("type") == "directory":
            raise BadValue(f"{shown(source)} is a folder", hint="end it with / to fetch all of it")
        self.size: int | None = about.get("size")
        self.etag = str(about.get("ETag") or about.get("etag") or about.get("mtime") or "")
        self._file: BinaryIO = _asked(lambda: self._files.open(self._path, "rb"), source)
        self._source = source

    def chunks(self) -> Iterator[bytes]:
        while chunk := _asked(lambda: self._file.read(_CHUNK), self._source):
            yield chunk

    def close(self) -> None:
        self._file.close()


def _asked(ask: Callable[[], Any], source: str) -> Any:
    try:
        return ask()
    except FileNotFoundError:
        raise LoadFailed(f"{shown(source)}: it is not there", hint="is the address right?") from None
    except PermissionError:
        raise LoadFailed(f"{shown(source)}: access is denied", hint="give the server credentials for it") from None
    except (OSError, TimeoutError) as error:
        raise _Transient(str(error)[:200]) from None
    except Exception as error:  # the families of errors of its back ends have no common root
        raise LoadFailed(f"{shown(source)}: {type(error).__name__}: {str(error)[:200]}") from None


def _file_system(source: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise BadValue(f"{shown(source)}: fsspec is not installed", hint="pip install 'lamina[sources]'") from None
    try:
        files, path = fsspec.core.url_to_fs(source)
    except (ImportError, ValueError) as error:
        raise BadValue(f"{shown(source)}: {error}", hint="http, https, s3, or another scheme of fsspec") from None
    return files, path


def _fetch_folder(source: str, folder: Path, name: str) -> Path:
    """All files below a prefix, complete or not at all. What has been fetched is fetched again if a file has changed."""
    files, root = _file_system(source)
    try:
        found = _asked(lambda: files.find(root, detail=True), source)
    except _Transient as error:
        known = _read_about(folder) if (folder / name).is_dir() else None
        if known is None and not (folder / name).is_dir():
            raise LoadFailed(f"{shown(source)}: {error}", hint="is the address right, and reached from here?") from None
        log.warning("model %s cannot be looked at (%s): the copy of before is used", shown(source), error)
        return folder / name
    if not found:
        raise LoadFailed(f"{shown(source)}: nothing is there", hint="is the address right?")
    if len(found) > MAX_FILES:
        raise LoadFailed(f"{shown(source)}: {len(found)} files", hint=f"at most {MAX_FILES}")
    stamp = hashlib.sha256(
        repr(
            sorted((path, one.get("size"), str(one.get("ETag") or one.get("mtime") or "")) for path, one in found.items())
        ).encode()
    ).hexdigest()
    mark = folder / _ABOUT
    if (folder / name).is_dir() and mark.is_file() and mark.read_text() == stamp:
        return folder / name
    _check_room(sum(int(one.get("size") or 0) for one in found.values()), folder, source)
    part = folder / f".part-{os.urandom(6).hex()}"
    try:
        for path in sorted(found):
            inner = PurePosixPath(path[len(root.rstrip("/")) :].lstrip("/"))
            if inner.is_absolute() or ".." in inner.parts or not inner.parts:
                raise LoadFailed(f"{shown(source)}: {path[-100:]!r} is no name for a file")
            target = part.joinpath(*inner.parts)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with (
                    contextlib.closing(_asked(partial(files.open, path, "rb"), source)) as read,
                    target.open("xb") as out,
                ):
                    while chunk := _asked(partial(read.read, _CHUNK), source):
                        out.write(chunk)
            except _Transient as error:
                raise LoadFailed(f"{shown(source)}: {error}", hint="try again") from None
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.rename(part, folder / name)
        mark.write_text(stamp)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder / name


# ------------------------------------------------------------------------ model folders


def model_file(folder: Path) -> Path:
    """The model in a folder as MLflow or Hugging Face write it, or the only model file there."""
    if (folder / "MLmodel").is_file():
        return _mlflow_file(folder)
    exports = [folder / "model.onnx", folder / "onnx" / "model.onnx"]
    for found in exports:
        if found.is_file():
            return found
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return folder / "model.safetensors"
    if (folder / "model.safetensors.index.json").is_file():
        raise BadValue(f"{folder}: its weights are in several files", hint="save it in one, or export it to ONNX")
    models = [one for one in sorted(folder.iterdir()) if one.suffix in (".onnx", ".pt2", ".safetensors")]
    if len(models) == 1:
        return models[0]
    pickled = [one.name for one in folder.iterdir() if one.suffix in (".bin", ".pt", ".pth", ".pkl", ".joblib")]
    if pickled and not models:
        raise BadValue(
            f"{folder}: {pickled[0]} is a pickle, which runs code when it is read",
            hint="save it with safetensors (save_pretrained(..., safe_serialization=True)), or export it to ONNX",
        )
    said = f"there is {', '.join(one.name for one in models)}: name one" if models else "an .onnx, .pt2 or .safetensors file"
    raise BadValue(f"{folder}: {len(models)} model files in it", hint=said)


def _mlflow_file(folder: Path) -> Path:
    """The model of an MLflow folder: its `onnx` flavour. The others are pickles."""
    flavours = _flavours((folder / "MLmodel").read_text("utf-8", "replace"))
    if "onnx" in flavours:
        found = (folder / flavours["onnx"].get("data", "model.onnx")).resolve()
        if not found.is_relative_to(folder.resolve()) or not found.is_file():
            raise BadValue(f"{folder}/MLmodel: no file {flavours['onnx'].get('data', '')[:80]!r} in the folder")
        return found
    named = [name for name in flavours if name != "python_function"] or list(flavours) or ["none"]
    ways = {
        "pytorch": "export it: torch.export.save(...) for a .pt2, or mlflow.onnx.log_model",
        "sklearn": "convert it with skl2onnx, and log it with mlflow.onnx.log_model",
    }
    raise BadValue(
        f"{folder}/MLmodel: flavour {named[0]!r} is a pickle, which runs code when it is read",
        hint=ways.get(named[0], "log it with mlflow.onnx.log_model, or write a function that loads it"),
    )


def _flavours(text: str) -> dict[str, dict[str, str]]:
    """Flavours of an MLmodel file, with their plain settings. Of YAML this is the part that such files are written in."""
    found: dict[str, dict[str, str]] = {}
    is_inside, current = False, ""
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        depth = len(line) - len(line.lstrip(" "))
        key, _, value = line.strip().partition(":")
        if depth == 0:
            is_inside = key == "flavors"
        elif is_inside and depth == 2:
            current = key
            found[current] = {}
        elif is_inside and depth == 4 and current:
            found[current][key] = value.strip().strip("'\"")
    return found
