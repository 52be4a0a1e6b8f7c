"""`lamina dev FILE`: `lamina serve` while an app is being written: it starts again whenever a file changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lamina.cli import EXIT_STOPPED, option_name, serve

POLL_S = 0.3
STOP_S = 10.0
WATCHED = {".py", ".toml", ".json", ".yaml", ".yml", ".onnx", ".pt2", ".safetensors"}
SKIPPED = {"__pycache__", "node_modules", "venv", "site-packages"}
MAX_FILES = 5_000

Stamps = dict[str, tuple[int, int]]
"""Time of change and size of every file."""


def _params() -> Iterator[click.Parameter]:
    """Those of `lamina serve`, and a few of its own."""
    yield from serve.command.params
    yield click.Option(["--no-open"], is_flag=True, help="Do not open the console in a browser.")
    path = click.Path(path_type=Path)
    yield click.Option(["--watch", "watched"], multiple=True, type=path, help="Watch this folder too; repeatable.")


def _develop(no_open: bool, watched: tuple[Path, ...], **options: Any) -> int:
    """Serve an app while it is being written.

    Starts again when a file beside the app changes, logs one line per call with its times, and opens the console of the server in
    a browser. Takes all options of `lamina serve`.

    \b
    Examples:
      lamina dev app.py
      lamina dev app.py --no-open --port 0
    """
    options["log_calls"] = True
    has_store = options["place"] != "none"  # management needs one, and the console with it
    options["console"] = options["console"] or has_store
    if has_store and options["admin_port"] is None and options["port"] == 0:
        options["admin_port"] = 0
    opens, options["opens_page"] = options["opens_page"] or (not no_open and sys.stdout.isatty()), False
    file = str(options["file"] or "").partition(":")[0]
    beside = Path(file).resolve().parent if file.endswith(".py") else Path.cwd()
    words = serve_words(serve.command.params, options)
    return Supervisor(words, sorted({beside, *(path.resolve() for path in watched)}), opens=opens).run()


command = click.Command("dev", params=list(_params()), callback=_develop, help=_develop.__doc__)


def serve_words(params: Sequence[click.Parameter], options: Mapping[str, Any]) -> list[str]:
    """Command line of `lamina serve` with these values of its parameters."""
    words: list[str] = []
    arguments: list[str] = []
    for param in params:
        value = options[str(param.name)]
        if value is None or value is False or value == ():
            continue
        if isinstance(param, click.Argument):
            arguments.append(str(value))
            continue
        name = f"--{option_name(param)}"
        if value is True:
            words.append(name)
        else:
            words += [f"{name}={one}" for one in (value if param.multiple else [value])]
    return [*words, *arguments]


class Supervisor:
    """Supervisor of a development server: one child at a time, another one after every change. A child that ends by itself, most
    often for a mistake in the app, is started again after the next change."""

    def __init__(self, words: list[str], folders: list[Path], *, opens: bool) -> None:
        self._words = words
        self._folders = folders
        self._opens = opens
        self._is_stopping = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        click.echo(f"watching {', '.join(map(str, self._folders))}   (Ctrl-C stops)", err=True)
        seen = stamps(self._folders)
        child = self._start()
        while not self._is_stopping:
            time.sleep(POLL_S)
            now = stamps(self._folders)
            if now == seen:
                continue
            while not self._is_stopping and now != seen:  # an editor writes several files, or one in several steps
                changed, seen = _first_change(seen, now), now
                time.sleep(POLL_S / 3)
                now = stamps(self._folders)
            if not self._is_stopping:
                click.echo(f"{changed} has changed: starting again", err=True)
                _stop(child)
                child = self._start()
        code = _stop(child)
        return code if code > 0 else EXIT_STOPPED if code < 0 else 0

    def _on_signal(self, *_: object) -> None:
        self._is_stopping = True

    def _start(self) -> subprocess.Popen[bytes]:
        words = [*(["--open"] if self._opens else []), *self._words]
        self._opens = False
        # A compiled module counts as fresh while the second and the size of its source are the same: a change of one letter right
        # after a start would not be seen. So the app's own are not kept; those of installed packages are read as ever.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen([sys.executable, "-m", "lamina", "serve", *words], env=environment)


def _stop(child: subprocess.Popen[bytes]) -> int:
    if child.poll() is None:
        child.terminate()
        try:
            return child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.wait()


def _first_change(before: Stamps, after: Stamps) -> str:
    name = next(name for name in sorted({*before, *after}) if before.get(name) != after.get(name))
    return os.path.relpath(name)


def stamps(folders: Sequence[Path]) -> Stamps:
    """Stamps of the files that are watched: code, options and models; nothing hidden, and no environment."""
    found: Stamps = {}
    for folder in folders:
        for place, names, files in os.walk(folder):
            names[:] = sorted(name for name in names if name not in SKIPPED and not name.startswith("."))
            for name in sorted(files):
                if os.path.splitext(name)[1] in WATCHED and not name.startswith(".") and len(found) < MAX_FILES:
                    path = os.path.join(place, name)
                    try:
                        stat = os.stat(path)
                    except OSError:  # gone meanwhile, which is a change as well
                        continue
                    found[path] = (stat.st_mtime_ns, stat.st_size)
    return found
