"""Measurement log: the runs of a function, appended beside its profile; an interrupted session resumes from it.

One JSON line per visit. They are kept only for the same code on the same kind of machine: the first line says which.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.profiler.bench import GridPoint


class LogHeader(Struct, frozen=True, kw_only=True, tag="head", tag_field="line"):
    """Identity of the measured function; runs under another header are of something else."""

    function: str
    device: str
    machine: str
    code: str  #: digest of the app's file
    max_batch: int
    inputs: str  #: digest of the samples


class VisitRecord(Struct, frozen=True, kw_only=True, tag="visit", tag_field="line"):
    batch: int
    units: int
    us: list[float]
    at_s: int = 0  #: of the clock on the wall


class LoadRecord(Struct, frozen=True, kw_only=True, tag="loaded", tag_field="line"):
    us: int


class SessionRecord(Struct, frozen=True, kw_only=True, tag="ended", tag_field="line"):
    """Totals of one session."""

    spent_s: float
    memory_mib: int
    disturbed: int


_line = msgspec.json.Decoder(LogHeader | VisitRecord | LoadRecord | SessionRecord)


class MeasurementLog:
    """Append-only log file, opened or begun. `runs`, `visits`, `loads_us` and `sessions` are what was there."""

    def __init__(self, path: Path, head: LogHeader, *, fresh: bool = False) -> None:
        self.path = path
        self.runs: dict[GridPoint, list[float]] = {}
        self.visits: list[VisitRecord] = []
        self.loads_us: list[int] = []
        self.sessions: list[SessionRecord] = []
        self.dropped = ""  #: why an earlier record was not used
        kept = not fresh and path.exists() and self._read(head)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if kept else "wb")
        except OSError as error:
            raise BadValue(f"{path}: {error.strerror}", hint="give a folder that can be written to") from None
        if not kept:
            self._write(head)

    def add(self, place: GridPoint, runs_us: list[float]) -> None:
        visit = VisitRecord(batch=place[0], units=place[1], us=[round(us, 1) for us in runs_us], at_s=round(time.time()))
        self.visits.append(visit)
        self._write(visit)

    def add_load(self, load_us: int) -> None:
        self.loads_us.append(load_us)
        self._write(LoadRecord(us=load_us))

    def add_end(self, ended: SessionRecord) -> None:
        self.sessions.append(ended)
        self._write(ended)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: LogHeader | VisitRecord | LoadRecord | SessionRecord) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _read(self, head: LogHeader) -> bool:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a line that was being written when it ended says nothing
        try:
            lines = [_line.decode(line) for line in whole.splitlines()]
        except msgspec.MsgspecError:
            lines = []
        if not lines or not isinstance(lines[0], LogHeader):
            self.dropped = "it cannot be read"
            return False
        changed = [name for name in LogHeader.__struct_fields__ if getattr(lines[0], name) != getattr(head, name)]
        if changed:
            self.dropped = f"{' and '.join(changed)} changed"
            return False
        if len(whole) < len(text):
            os.truncate(self.path, len(whole))
        for line in lines:
            match line:
                case VisitRecord():
                    self.runs.setdefault((line.batch, line.units), []).extend(line.us)
                    self.visits.append(line)
                case LoadRecord():
                    self.loads_us.append(line.us)
                case SessionRecord():
                    self.sessions.append(line)
        return True
