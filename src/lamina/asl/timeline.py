"""Timeline of one run as SVG: time to the right, one band per step.

A band has as many lanes as the step ran side by side, so a fan-out of a hundred that ran eight at a time has eight. Pale is
waiting in the queue, full is running, red failed; thin is a wait or a pause. Beyond `LANES` the rest is counted, not drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

LANE, GAP, LEFT, WIDTH, TOP = 12.0, 7.0, 190.0, 760.0, 58.0
LANES = 24
NAME_CHARS = 24

_STYLE = """
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733; }
.name { font-weight: 600; } .more { fill: #566473; font-size: 11px; } .axis { stroke: #d5dce3; stroke-width: 1; }
.queued { fill: #dbe3ea; } .ran { fill: #4a86c5; } .bad { fill: #c4513a; } .undone { fill: #e0a89c; } .wait { fill: #b9a9dc; }
"""

_KINDS = ("step", "wait", "pause", "timeout")


@dataclass(slots=True)
class _Bar:
    begin_us: int
    start_us: int
    end_us: int
    look: str
    title: str


@dataclass(slots=True)
class _Band:
    name: str
    lanes: list[list[_Bar]] = field(default_factory=list)
    count: int = 0
    undrawn: int = 0

    def add(self, bar: _Bar) -> None:
        self.count += 1
        for lane in self.lanes:
            if lane[-1].end_us <= bar.begin_us:
                lane.append(bar)
                return
        if len(self.lanes) < LANES:
            self.lanes.append([bar])
        else:
            self.undrawn += 1


def draw_timeline(title: str, events: Iterable[Mapping[str, Any]]) -> str:
    """Draw the timeline of a run; `events` as `GET /v1/runs/ID/history` gives them."""
    known = list(events)
    times = [event[name] for event in known for name in ("at_us", "queued_us", "began_us", "ended_us") if event.get(name)]
    first_us, last_us = min(times, default=0), max(times, default=0)
    span_us = max(1, last_us - first_us)
    bands = _bands(known)

    def x(at_us: int) -> float:
        return LEFT + WIDTH * (at_us - first_us) / span_us

    parts, y = [], TOP
    for band in bands:
        height = len(band.lanes) * LANE
        label = band.name if len(band.name) <= NAME_CHARS else band.name[: NAME_CHARS - 1] + "…"
        many = f" x{band.count}" if band.count > 1 else ""
        parts.append(f'<text x="12" y="{y + LANE - 2:.1f}">{escape(label)}<tspan class="more">{many}</tspan></text>')
        for number, lane in enumerate(band.lanes):
            for bar in lane:
                parts += _drawn(bar, x, y + number * LANE)
        if band.undrawn:
            parts.append(f'<text class="more" x="12" y="{y + 2 * LANE:.1f}">{band.undrawn} more not drawn</text>')
        y += max(height, LANE) + GAP
    height = y + 34
    axis = _axis(span_us, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {LEFT + WIDTH + 40:.0f} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">\n'
        f'<style>{_STYLE}</style>\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text class="name" x="12" y="24">{escape(title)}</text>\n'
        f'<text class="more" x="12" y="42">{escape(_summary(known, span_us))}</text>\n{axis}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bands(events: list[Mapping[str, Any]]) -> list[_Band]:
    """In the order in which their steps first began."""
    bars: list[tuple[str, _Bar]] = []
    for event in events:
        if event["kind"] not in _KINDS:
            continue
        end_us = event.get("ended_us") or event["at_us"]
        start_us = event.get("began_us") or end_us
        begin_us = event.get("queued_us") or start_us
        if event["kind"] == "step":
            look = "ran" if event.get("ok") else "undone" if event.get("undone") else "bad"
        else:
            look = "bad" if event["kind"] == "timeout" else "wait"
        bars.append((event["step"], _Bar(begin_us, start_us, end_us, look, _title(event, begin_us, start_us, end_us))))
    found: dict[str, _Band] = {}
    for name, bar in sorted(bars, key=lambda one: (one[1].begin_us, one[1].end_us)):
        found.setdefault(name, _Band(name)).add(bar)
    return list(found.values())


def _title(event: Mapping[str, Any], begin_us: int, start_us: int, end_us: int) -> str:
    said = [f"{event['step']}: {show_duration(end_us - start_us)}"]
    if start_us > begin_us:
        said.append(f"{show_duration(start_us - begin_us)} queued")
    if event.get("slice"):
        said.append(f"on {event['slice']}, batch {event.get('batch', 1)}")
    if event.get("error"):
        said.append(str(event["error"]))
    return ", ".join(said)


def _drawn(bar: _Bar, x: Any, y: float) -> list[str]:
    begin, start, end = x(bar.begin_us), x(bar.start_us), x(bar.end_us)
    thin = 4.0 if bar.look == "wait" else 0.0
    found = []
    if start - begin >= 0.5:
        found.append(
            f'<rect class="queued" x="{begin:.1f}" y="{y + 1:.1f}" width="{start - begin:.1f}" height="{LANE - 2:.1f}"/>'
        )
    width = max(1.5, end - start)
    found.append(
        f'<rect class="{bar.look}" x="{start:.1f}" y="{y + 1 + thin / 2:.1f}" width="{width:.1f}" height="{LANE - 2 - thin:.1f}">'
        f"<title>{escape(bar.title)}</title></rect>"
    )
    return found


def _axis(span_us: int, bottom: float) -> str:
    step_us = 1
    for step_us in (one * 10**power for power in range(14) for one in (1, 2, 5)):
        if span_us / step_us <= 8:
            break
    parts = []
    for at_us in range(0, span_us + 1, step_us):
        place = LEFT + WIDTH * at_us / span_us
        parts.append(f'<line class="axis" x1="{place:.1f}" y1="{TOP - 6:.0f}" x2="{place:.1f}" y2="{bottom:.1f}"/>')
        parts.append(
            f'<text class="more" x="{place:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{show_duration(at_us)}</text>'
        )
    return "\n".join(parts)


def _summary(events: list[Mapping[str, Any]], span_us: int) -> str:
    steps = [event for event in events if event["kind"] == "step"]
    end = next((event["state"] for event in events if event["kind"] == "ended"), "not over")
    failed = sum(not event.get("ok") for event in steps)
    return f"{end} after {show_duration(span_us)}; {len(steps)} steps" + (f", {failed} failed" if failed else "")


def show_duration(us: int) -> str:
    """A duration, short, and to about three digits."""
    for unit, size in (("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000), ("ms", 1_000)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us} us" if us else "0"
