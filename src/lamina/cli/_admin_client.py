"""Client of a server's management API, or, on its machine, of its store."""

from __future__ import annotations

import http.client
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click
import msgspec

from lamina import errors
from lamina.errors import BadValue, LaminaError, StoreDown, Unreachable
from lamina.sdk.client_codec import parse_url

DEFAULT_ADMIN_URL = "http://127.0.0.1:8701"
F = TypeVar("F", bound=Callable[..., Any])


def admin_url() -> str:
    return os.environ.get("LAMINA_ADMIN_URL") or DEFAULT_ADMIN_URL


def url_option(command: F) -> F:
    return click.option("--admin-url", default=admin_url, help=f"Management URL; default {DEFAULT_ADMIN_URL}.")(command)


def store_option(command: F) -> F:
    return click.option("--store", "place", metavar="PATH|URL", help="Open this store directly, without a server.")(command)


def scope_option(command: F) -> F:
    default = ("invoke", "read")
    said = "invoke, read, deploy or admin; repeatable."
    return click.option("--scope", "scopes", multiple=True, default=default, show_default=True, help=said)(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Output JSON.")(command)


def administer(what: str, given: Mapping[str, Any], url: str, place: str | None) -> Any:
    """Perform an administrator's action, through a server or directly on its store (write access to that allows everything)."""
    if place is None:
        try:
            return ask("POST", f"/v1/admin/{what}", url, msgspec.json.encode(given))
        except Unreachable as error:
            raise Unreachable(error.message, hint=f"{error.hint}; without a server: --store .lamina/APP.db") from None
    if place == "none":
        raise BadValue("--store: 'none' keeps nothing", hint="give the server's: .lamina/APP.db beside the app")
    if what.endswith("/list") and "://" not in place and not Path(place).exists():
        raise BadValue(f"--store: no file {place!r}", hint="a server keeps its store in .lamina/APP.db beside the app")
    import asyncio

    from lamina.access.access_control import AccessControl
    from lamina.access.admin_service import AdminService
    from lamina.access.records import Identity
    from lamina.store.open import open_store

    logging.getLogger("lamina").addHandler(logging.NullHandler())  # what is wrong with the store is said once, as an error

    async def work() -> Any:
        store = open_store(place)
        try:
            access = AccessControl(store)
            await access.load()
            return await AdminService(access).perform(Identity(), what, given)
        except StoreDown as error:
            hint = "of a server that runs, leave --store out: its management does it (lamina serve --admin-port)"
            raise StoreDown(error.message, hint=f"{error.hint}; {hint}") from None
        finally:
            await store.close()

    return asyncio.run(work())


def ask(method: str, path: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Any:
    answer = _answer(method, path, url, body, headers or {})
    with answer:
        return msgspec.json.decode(answer.read())


LOAD_S = 600.0
"""How long a command waits for a version to be loaded."""

POLL_S = 0.1


def until_served(about: dict[str, Any], url: str, within_s: float = LOAD_S) -> dict[str, Any]:
    """Wait until the requested version has taken over; the app's status then."""
    name, version = about["app"], about["version"]
    until_s = time.monotonic() + within_s
    while about["state"] == "rolling" and about["version"] == version:
        _wait(until_s, within_s, f"version {version} of {name!r}", "lamina apps")
        about = next(one for one in ask("GET", "/v1/apps", url) if one["app"] == name)
    if about["state"] == "halted" or about["version"] != version:
        raise errors.LoadFailed(about["failed"] or f"version {version} of {name!r} cannot be loaded", hint="lamina logs")
    return about


def until_divided(app: str, url: str, within_s: float = LOAD_S, *, is_patient: bool = True) -> dict[str, Any]:
    """Wait until the versions that are to share the calls of an app are loaded, or not at all; its traffic then."""
    path, until_s = f"/v1/apps/{quote(app, safe='')}/traffic", time.monotonic() + within_s
    found, is_told = ask("GET", path, url), False
    while is_patient and found["state"] == "loading" and not found["rolled_back"]:
        candidates = ", ".join(version for version in found["weights"] if version != found["stable"])
        if not is_told:
            is_told = True
            click.echo(f"loading version {candidates}; until then all calls go to version {found['stable']}", err=True)
        _wait(until_s, within_s, f"version {candidates} of {app!r}", f"it goes on; lamina traffic {app} shows when it is divided")
        found = ask("GET", path, url)
    for version, why in found["rolled_back"].items():
        raise errors.LoadFailed(f"version {version} of {app!r} gets no calls: {why}", hint="lamina logs")
    return dict(found)


def _wait(until_s: float, within_s: float, what: str, hint: str) -> None:
    if time.monotonic() >= until_s:
        raise errors.DeadlineExceeded(f"{what} is not loaded after {within_s:g} s", hint=hint)
    time.sleep(POLL_S)


def follow(path: str, url: str) -> Iterator[Any]:
    """Lines of JSON, as they come."""
    with _answer("GET", path, url, b"", {}) as answer:
        while line := answer.readline():
            yield msgspec.json.decode(line)


def _answer(method: str, path: str, url: str, body: bytes, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    parts = parse_url(url)
    if parts is None or parts.port == 0:
        raise BadValue(f"--admin-url: {url!r} is no address", hint=f"such as {DEFAULT_ADMIN_URL}")
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
    token = os.environ.get("LAMINA_TOKEN") or _remembered().get(url, "")
    shown = {"authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, path, body, {"content-type": "application/json", "connection": "close", **shown, **headers})
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        why = getattr(error, "strerror", None) or error
        raise Unreachable(
            f"no management at {url}: {why}", hint="start the server with --admin-port, or name it with --admin-url"
        ) from None
    if answer.status != 200:
        with answer:
            raise _problem(answer.status, answer.read())
    return answer


def _problem(status: int, body: bytes) -> LaminaError:
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        said = {}
    detail, hint = str(said.get("detail") or f"status {status}"), str(said.get("hint", ""))
    for kind in (errors.Unauthorized, errors.Forbidden, errors.NotFound, errors.Conflict, errors.NoCapacity, errors.LoadFailed):
        if kind.code == said.get("code"):
            return kind(detail, hint=hint)
    if status == 429:
        return errors.Refused(detail, reason=str(said.get("reason", "")), hint=hint)
    return BadValue(detail, hint=hint) if 400 <= status < 500 else LaminaError(detail, hint=hint)


# ---------------------------------------------------------------------- sessions


def _file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "lamina" / "sessions.json"


def _remembered() -> dict[str, str]:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def remember(url: str, token: str) -> None:
    """Save a session token, readable by this user alone. An empty token deletes it."""
    known = {**_remembered(), url: token}
    if not token:
        del known[url]
    path = _file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(known))


# ------------------------------------------------------------------------ showing


def show(rows: list[dict[str, Any]], columns: Mapping[str, str], as_json: bool, nothing: str) -> None:
    """A table: `columns` are the keys of a row and what stands above them."""
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    if not rows:
        click.echo(nothing)
        return
    cells = [[str(_cell(row.get(key, ""))) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns.values()), *cells]) for i in range(len(columns))]
    for line in [list(columns.values()), *cells]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else value


def when(us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
