"""Event log: one JSON line per event with its actions, enough to replay every decision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from lamina.core.actions import Action
from lamina.core.controller import Controller
from lamina.core.events import Event
from lamina.errors import BadValue


class LogEntry(Struct, frozen=True):
    now_us: int
    event: Event
    actions: list[Action]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LogEntry)


class EventLogWriter:
    """Writer of an event log; `write` fits where drivers take a watcher."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("wb", buffering=1 << 16)  # noqa: SIM115 - closed by close()

    def write(self, now_us: int, event: Event, actions: list[Action]) -> None:
        self._file.write(_encoder.encode(LogEntry(now_us, event, actions)) + b"\n")

    def flush(self) -> None:
        """Hand what was written to the system: after it, not even `kill -9` loses it."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log(path: str | Path) -> Iterator[LogEntry]:
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                hint = "a log is written with `lamina sim --log FILE` or `lamina serve --log FILE`"
                raise BadValue(f"{path}:{number}: not an entry of an event log: {error}", hint=hint) from None


def replay_log(path: str | Path, controller: Controller) -> int:
    """Feed a log to a fresh controller; returns how many events gave the same actions before one did not."""
    same = 0
    for entry in read_log(path):
        if controller.handle(entry.now_us, entry.event) != entry.actions:
            return same
        same += 1
    return same
