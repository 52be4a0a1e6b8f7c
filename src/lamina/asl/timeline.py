"""Timeline of a durable run, one section per step: a Mermaid gantt chart as text, or a picture by matplotlib.

A section has as many lanes as the step ran side by side, so a fan-out of a hundred that ran eight at a time has eight. Grey is
waiting in the queue, blue is running, red failed, violet is a wait or a pause. Beyond `MAX_LANES` the rest is counted, not drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.units import show_count

MAX_LANES = 24
_KINDS = ("step", "wait", "pause", "timeout")
_COLOURS = {"queued": "#c5d0da", "ran": "#4a86c5", "failed": "#c4513a", "retried": "#e0a89c", "wait": "#b9a9dc"}
_TAGS = {"queued": "done, ", "ran": "active, ", "failed": "crit, ", "retried": "crit, done, ", "wait": ""}
_NOT_IN_LABELS = re.compile(r"[:;#%\n]+")
_FINE_US = 10_000_000
"""Shorter runs have an axis in milliseconds, longer ones in seconds."""


@dataclass(frozen=True, slots=True)
class _Bar:
    queued_us: int
    began_us: int
    ended_us: int
    look: str
    text: str


@dataclass(slots=True)
class _Section:
    name: str
    lanes: list[list[_Bar]] = field(default_factory=list)
    count: int = 0
    undrawn: int = 0

    def add(self, bar: _Bar) -> None:
        self.count += 1
        for lane in self.lanes:
            if lane[-1].ended_us <= bar.queued_us:
                lane.append(bar)
                return
        if len(self.lanes) < MAX_LANES:
            self.lanes.append([bar])
        else:
            self.undrawn += 1

    @property
    def title(self) -> str:
        many = f" x{self.count}" if self.count > 1 else ""
        return self.name + many + (f" ({self.undrawn} not drawn)" if self.undrawn else "")


class Timeline:
    """The history of one run; `events` as `GET /v1/runs/ID/history` gives them."""

    def __init__(self, title: str, events: Iterable[Mapping[str, Any]]) -> None:
        known = list(events)
        times = [event[name] for event in known for name in ("at_us", "queued_us", "began_us", "ended_us") if event.get(name)]
        self._first_us = min(times, default=0)
        self._span_us = max(1, max(times, default=0) - self._first_us)
        self._title = f"{title}: {_summary(known, self._span_us)}"
        self._sections = _sections(known)
        self._unit_us, self._unit = (1_000, "ms") if self._span_us < _FINE_US else (1_000_000, "s")

    def mermaid(self) -> str:
        """A gantt chart. Mermaid counts no less than milliseconds: a second of its axis is a unit of ours."""
        lines = ["---", "displayMode: compact", "---", "gantt", f"    title {_label(self._title)} (axis in {self._unit})"]
        lines += ["    dateFormat x", "    axisFormat %s"]
        for section in self._sections:
            lines.append(f"    section {_label(section.title)}")
            for bar in (bar for lane in section.lanes for bar in lane):
                if bar.began_us > bar.queued_us:
                    lines.append(f"    queued :{_TAGS['queued']}{self._tick(bar.queued_us)}, {self._tick(bar.began_us)}")
                begin = self._tick(bar.began_us)
                end = max(begin + 1, self._tick(bar.ended_us))
                lines.append(f"    {_label(bar.text)} :{_TAGS[bar.look]}{begin}, {end}")
        return "\n".join(lines) + "\n"

    def plot(self, path: Path) -> None:
        """A picture in the format of the file's name, by matplotlib."""
        import matplotlib
        from matplotlib.figure import Figure

        rows = [(section, number) for section in self._sections for number in range(len(section.lanes))]
        figure = Figure(figsize=(10, 1.2 + 0.16 * len(rows) + 0.1 * len(self._sections)), layout="constrained")
        axes = figure.subplots()
        axes.set_title(self._title, loc="left", fontsize=10)
        labels: list[tuple[float, str]] = []
        y = 0.0
        for section in self._sections:
            labels.append((y, section.title))
            for lane in section.lanes:
                for bar in lane:
                    for begin_us, end_us, look in (
                        (bar.queued_us, bar.began_us, "queued"),
                        (bar.began_us, bar.ended_us, bar.look),
                    ):
                        if look != "queued" or end_us > begin_us:
                            left = (begin_us - self._first_us) / self._unit_us
                            width = max(end_us - begin_us, self._span_us / 1_000) / self._unit_us
                            axes.barh(y, width, 0.8, left, color=_COLOURS[look])
                y += 1
            y += 0.5
        axes.set_yticks([at for at, _ in labels], [name for _, name in labels], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(self._unit)
        axes.spines[["top", "right", "left"]].set_visible(False)
        with matplotlib.rc_context({"svg.hashsalt": "lamina"}):  # the same run gives the same file
            figure.savefig(path, dpi=140, metadata={"Date": None} if path.suffix == ".svg" else None)

    def _tick(self, at_us: int) -> int:
        return round((at_us - self._first_us) * 1_000 / self._unit_us)


def _sections(events: list[Mapping[str, Any]]) -> list[_Section]:
    """In the order in which their steps first began."""
    found: dict[str, _Section] = {}
    for name, bar in sorted(_bars(events), key=lambda one: (one[1].queued_us, one[1].ended_us)):
        found.setdefault(name, _Section(name)).add(bar)
    return list(found.values())


def _bars(events: list[Mapping[str, Any]]) -> Iterator[tuple[str, _Bar]]:
    for event in events:
        if event["kind"] not in _KINDS:
            continue
        ended_us = event.get("ended_us") or event["at_us"]
        began_us = event.get("began_us") or ended_us
        queued_us = event.get("queued_us") or began_us
        if event["kind"] == "step":
            look = "ran" if event.get("ok") else "retried" if event.get("undone") else "failed"
        else:
            look = "failed" if event["kind"] == "timeout" else "wait"
        yield event["step"], _Bar(queued_us, began_us, ended_us, look, _text(event, queued_us, began_us, ended_us))


def _text(event: Mapping[str, Any], queued_us: int, began_us: int, ended_us: int) -> str:
    parts = [f"{event['step']} {show_duration(ended_us - began_us)}"]
    if began_us > queued_us:
        parts.append(f"{show_duration(began_us - queued_us)} queued")
    if event.get("slice"):
        parts.append(f"on {event['slice']}, batch {event.get('batch', 1)}")
    if event.get("error"):
        parts.append(str(event["error"]))
    return ", ".join(parts)


def _summary(events: list[Mapping[str, Any]], span_us: int) -> str:
    steps = [event for event in events if event["kind"] == "step"]
    end = next((event["state"] for event in events if event["kind"] == "ended"), "not over")
    failed = sum(not event.get("ok") for event in steps)
    return f"{end} after {show_duration(span_us)}, {show_count(len(steps), 'step')}" + (f", {failed} failed" if failed else "")


def _label(text: str) -> str:
    """Text without the characters that end a label."""
    return _NOT_IN_LABELS.sub(" ", text)


def show_duration(us: int) -> str:
    """A duration, short, and to about three digits."""
    for unit, size in (("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000), ("ms", 1_000)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us} us" if us else "0"
