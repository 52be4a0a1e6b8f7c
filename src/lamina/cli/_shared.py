"""Options, parameter types and output shared by several commands."""

from __future__ import annotations

import errno
import math
import mimetypes
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from lamina.cli import fail_if_unknown_command
from lamina.errors import BadValue, read_user_file, unreadable_file
from lamina.sdk.binding import NOTHING

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_URL = "http://127.0.0.1:8700"
PORT = click.IntRange(0, 65535)


class FiniteFloat(click.FloatRange):
    """A finite number in a range. NaN is in none, though every comparison with it says that it is not outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no number to count with.", param, ctx)
        return number


class InputFile(click.Path):
    """Parameter type of a file to be read; errors have the same words in all commands."""

    def __init__(self, hint: str = "give the path of a file", *, allow_dash: bool = False) -> None:
        super().__init__(readable=False, allow_dash=allow_dash, path_type=Path)
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        if not (self.allow_dash and str(path) == "-"):
            wrong = 0 if path.is_file() else errno.EISDIR if path.is_dir() else 0 if path.exists() else errno.ENOENT
            if not wrong and not os.access(path, os.R_OK):
                wrong = errno.EACCES
            if wrong:
                field = param.opts[0] if isinstance(param, click.Option) else ""
                raise unreadable_file(path, OSError(wrong, ""), self.hint, field=field)
        return super().convert(value, param, ctx)


class CommandGroup(click.Group):
    """Command group. The help of each command is shown in full: click alone cuts it at the width of a line."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        fail_if_unknown_command(ctx, args, self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in found if command is not None])


F = TypeVar("F", bound=Callable[..., Any])


def url_option(command: F) -> F:
    default = lambda: os.environ.get("LAMINA_URL", DEFAULT_URL)  # noqa: E731
    return click.option("--url", default=default, help=f"URL of the server; default {DEFAULT_URL}.")(command)


def write_text(text: str, path: Path) -> None:
    """Write to a file; `-` is standard output."""
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    path.write_text(text)
    click.echo(f"wrote {path}", err=True)


def console(width: int = 120) -> Console:
    """Console for tables: as wide as the terminal, or `width` where there is none."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=width)


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
    """Inputs of a call: a JSON body, a file (also as @FILE, or - for stdin), or name=value pairs. The flag says: by name."""
    given = [body is not None, file is not None, bool(named)]
    if sum(given) > 1:
        raise click.UsageError("give one of: a JSON body, --file, --input")
    if named:
        values: dict[str, Any] = {}
        for pair in named:
            name, equals, text = pair.partition("=")
            if not equals:
                raise click.UsageError(f"--input {pair!r}: write name=JSON or name=@file")
            is_file = text.startswith("@")
            values[name] = _content(text[1:], name) if is_file else _json(text, name, f"{name}={_quoted(text)}")
        return values, True
    if file is not None:
        return _content(str(file), "--file"), False
    if body is not None and body.startswith("@"):
        return _content(body[1:], "body"), False
    if body == "-":
        return _json(sys.stdin.buffer.read(), "stdin", ""), False
    return (_json(body, "body", _suggested_body(body)) if body is not None else NOTHING), False


def _suggested_body(body: str) -> str:
    """Suggestion for a body that is no JSON: it was text, or a name and a value."""
    name, equals, value = body.partition("=")
    if equals and name.isidentifier():
        return f"--input {name}={_quoted(value)}"
    return """'{"x": 1}' or '"text"'""" if body[:1] in "{[" or len(body) > 40 else _quoted(body)


def _quoted(text: str) -> str:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        text = msgspec.json.encode(text).decode()
    return shlex.quote(text)


def _json(text: str | bytes, field: str, example: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not example:
            hint = "one JSON value, in UTF-8; a file that does not end in .json is sent as bytes"
            raise BadValue(f"{field}: not JSON: {error}", hint=hint) from None
        raise BadValue(f"{field}: {text[:60]!r} is not JSON: {error}", hint=f"quote it for the shell: {example}") from None


def _content(path: str, field: str) -> Any:
    """The value in a file: of a JSON file its JSON, of any other its bytes."""
    data = read_user_file(path, "write name=@FILE, or name=JSON", field=field)
    return _json(data, path, "") if mimetypes.guess_type(path)[0] == "application/json" else data


def show_value(value: Any) -> None:
    """A result on stdout: JSON, or raw bytes as they are."""
    from lamina import encoding

    if isinstance(value, bytes):
        sys.stdout.buffer.write(value)
    else:
        text: bytes = msgspec.json.format(encoding.to_json(value), indent=2)
        click.echo(text.decode())
