"""Small things several commands need."""

from __future__ import annotations

import mimetypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from lamina.errors import BadValue
from lamina.sdk.binding import NOTHING

DEFAULT_URL = "http://127.0.0.1:8700"
F = TypeVar("F", bound=Callable[..., Any])


def url_option(command: F) -> F:
    default = lambda: os.environ.get("LAMINA_URL", DEFAULT_URL)  # noqa: E731
    return click.option("--url", default=default, help=f"Server; default {DEFAULT_URL}.")(command)


def write_picture(picture: str, output: Path | None, name: str) -> None:
    """To a file, `name`.svg unless told otherwise; `-` is standard output."""
    if str(output) == "-":
        click.echo(picture, nl=False)
        return
    path = output or Path(f"{name}.svg")
    path.write_text(picture)
    click.echo(f"wrote {path}", err=True)


def policy_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`--policy-option lead_us=200` as {"lead_us": 200}: values are JSON where they parse as such, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise BadValue(f"--policy-option {pair!r}: no name and value", hint="write name=value")
        try:
            options[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            options[name] = text
    return options


def parse_inputs(body: str | None, file: Path | None, named: tuple[str, ...]) -> tuple[Any, bool]:
    """What the user typed: a JSON body, the bytes of a file, or name=value pairs. The flag says: by name."""
    given = [body is not None, file is not None, bool(named)]
    if sum(given) > 1:
        raise click.UsageError("give one of: a JSON body, --file, --input")
    if named:
        values: dict[str, Any] = {}
        for pair in named:
            name, equals, text = pair.partition("=")
            if not equals:
                raise click.UsageError(f"--input {pair!r}: write name=JSON or name=@file")
            values[name] = Path(text[1:]).read_bytes() if text.startswith("@") else _json(text, name)
        return values, True
    if file is not None:
        kind = mimetypes.guess_type(file.name)[0] or ""
        data = file.read_bytes()
        return (_json(data.decode(), str(file)) if kind == "application/json" else data), False
    return (_json(body, "body") if body is not None else NOTHING), False


def _json(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadValue(f"{field}: {text[:60]!r} is not JSON: {error}", hint="""quote it for the shell: '{"x": 1}'""") from None


def show_value(value: Any) -> None:
    """A result on stdout: JSON, or raw bytes as they are."""
    from lamina import values

    if isinstance(value, bytes):
        sys.stdout.buffer.write(value)
    else:
        text: bytes = msgspec.json.format(values.to_json(value), indent=2)
        click.echo(text.decode())
