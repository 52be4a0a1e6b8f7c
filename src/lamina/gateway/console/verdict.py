"""Verdict of the console: is everything in time, what is the bottleneck, what would help; a rule for each, over figures it shows.

Pure: figures in, sentences out. A call that a limit of its tenant refused, whose input did not fit, or that named a price that is
too low, says nothing of the server: it is counted apart. Causes are tried from the surest to the vaguest.
"""

from __future__ import annotations

from msgspec import Struct

from lamina.core.refusal_explanation import milliseconds

SATURATED = 0.85
"""Of the unit-time of a device that is leased: from here on there is little room for one more batch."""

FAR = 0.25
"""Of the time a call has: a longer lag of the server, or a longer way to a device and back, is what it is short of."""

CLIENTS_OWN = frozenset({"bad-value", "cost", "duplicate", "unknown"})
LIMITS = frozenset({"quota"})


class Verdict(Struct, frozen=True):
    """Answers to the first three questions. `state`: idle, good, late, refusing or failing."""

    state: str
    in_time: str
    bottleneck: str
    help: str
    target: str = ""  #: the worst one
    device: str = ""  #: the bottleneck, where it is one
    more_of: str = ""  #: the kind of device that would help


class DeviceLoad(Struct, frozen=True):
    id: str
    kind: str
    leased: float  #: part of its unit-time in the last ten seconds


class ShortTarget(Struct, frozen=True, kw_only=True):
    """The target that falls shortest of its goal."""

    name: str
    attainment: float
    late: int
    failed: int
    refused: int
    slo_us: int = 0
    alone_us: int = 0  #: predicted time with nothing before it, on the slice it gets by default; 0: not known
    loading: str = ""  #: a function of it without an instance that is ready
    busiest: DeviceLoad | None = None  #: of the devices it is on
    way_us: int = 0  #: the longest to one of them and back
    stale: tuple[str, float] | None = None  #: a function of it whose profile is wrong, and how many times as long it takes


class ServerFigures(Struct, frozen=True, kw_only=True):
    """What a verdict is made from: calls of the last `span_s` seconds by how they ended, and the state of the devices."""

    span_s: float
    met: int = 0
    offered: int = 0  #: without those that limits or clients themselves are the reason for
    limited: int = 0  #: refused by limits of tenants
    limited_tenant: str = ""  #: the one with most of them
    short: int = 0  #: targets below their goals
    worst: ShortTarget | None = None
    busiest: DeviceLoad | None = None
    lag_us: int = 0  #: the longest time that requests lay unread


def judge(figures: ServerFigures) -> Verdict:
    """The three answers."""
    worst = figures.worst
    bottleneck, help, device, more_of = _healthy(figures) if worst is None else _cause(figures, worst)
    if not figures.offered and not figures.limited:
        return Verdict(
            "idle",
            f"No calls came in the last {_span(figures)}.",
            bottleneck,
            "Call a function: the Playground has a form for each.",
        )
    state = "good" if worst is None else _state(worst)
    return Verdict(state, _in_time(figures), bottleneck, help, worst.name if worst is not None else "", device, more_of)


def _span(figures: ServerFigures) -> str:
    return "minute" if figures.span_s >= 59 else f"{max(1.0, figures.span_s):.0f} s"


def _state(worst: ShortTarget) -> str:
    return "failing" if worst.failed > worst.refused + worst.late else "refusing" if worst.refused >= worst.late else "late"


def _in_time(figures: ServerFigures) -> str:
    share = f"{100 * figures.met / max(1, figures.offered):.1f} % of {figures.offered:,} calls"
    limited = f" {figures.limited:,} more were refused by limits of {_tenant(figures)}." if figures.limited else ""
    if figures.worst is None:
        return f"Yes: {share} in the last {_span(figures)}.{limited}"
    worst = figures.worst
    what = {"failing": "fail", "refusing": "are refused", "late": "are late"}[_state(worst)]
    others = figures.short - 1
    text = f"No: {100 * (1 - worst.attainment):.1f} % of the calls of {worst.name} {what}."
    more = f" {others} other {'target falls' if others == 1 else 'targets fall'} short too." if others else ""
    return f"{text}{more} In all, {share} were in time in the last {_span(figures)}.{limited}"


def _tenant(figures: ServerFigures) -> str:
    return f"tenant {figures.limited_tenant}" if figures.limited_tenant else "tenants"


def _leased(load: DeviceLoad) -> str:
    return f"{100 * load.leased:.0f} % of the units of {load.id}"


def _healthy(figures: ServerFigures) -> tuple[str, str, str, str]:
    """Bottleneck, help, device and kind of device while everything is in time."""
    busiest = figures.busiest
    help = "Nothing is needed."
    if figures.limited:
        help = f"Nothing, unless {_tenant(figures)} should have more: limits are under Access."
    if busiest is None:
        return "None: no batch ran in the last ten seconds.", help, "", ""
    if busiest.leased >= SATURATED:
        help = f"Nothing now. For more load, one more {busiest.kind}: the Plan says what it would bring."
        return (
            f"{busiest.id} is nearly full: {100 * busiest.leased:.0f} % of its units were leased.",
            help,
            busiest.id,
            busiest.kind,
        )
    return f"None. The busiest is {busiest.id}: {100 * busiest.leased:.0f} % of its units were leased.", help, busiest.id, ""


def _cause(figures: ServerFigures, worst: ShortTarget) -> tuple[str, str, str, str]:
    """Bottleneck, help, device and kind of device for the target that falls shortest."""
    name, busiest, slo_us = worst.name, worst.busiest, worst.slo_us
    if _state(worst) == "failing":
        return f"The code: calls of {name} fail in it.", "Read the errors of its failed calls, and its logs under Apps.", "", ""
    if worst.loading:
        text = f"Loading: {worst.loading} has no instance that is ready."
        return text, f"Keep one loaded: Scale(min=1) for {worst.loading}.", "", ""
    if slo_us and worst.alone_us > slo_us:
        alone, goal = milliseconds(worst.alone_us / 1000), milliseconds(slo_us / 1000)
        return (
            f"The SLO of {name}: one call alone takes {alone}, and has {goal}.",
            "A longer SLO, a larger slice, or a faster device.",
            "",
            "",
        )
    if busiest is not None and busiest.leased >= SATURATED:
        text = f"{busiest.id}: {100 * busiest.leased:.0f} % of its units were leased in the last ten seconds."
        return text, f"One more {busiest.kind}, or a longer SLO for {name}. The Plan simulates both.", busiest.id, busiest.kind
    if slo_us and figures.lag_us > FAR * slo_us:
        unread, goal = milliseconds(figures.lag_us / 1000), milliseconds(slo_us / 1000)
        text = f"The server's own process: requests lay unread for up to {unread}, of {goal} that {name} has."
        return text, "More cores for the server, less other work on its machine, or ingress processes.", "", ""
    if slo_us and worst.way_us > FAR * slo_us:
        way, goal = milliseconds(worst.way_us / 1000), milliseconds(slo_us / 1000)
        text = f"The way to a device and back: {way}, of {goal} that {name} has."
        return text, "A nearer machine, or one with less other work.", "", ""
    if worst.stale is not None:
        function, ratio = worst.stale
        text = f"Predictions: {function} takes {ratio:.2g} times what its profile says."
        return text, f"Measure it again: lamina profile {function}.", "", ""
    if busiest is None:
        return (
            f"It is not known: nothing of {name} ran in the last ten seconds.",
            f"Open a refusal of {name}: it says what was weighed.",
            "",
            "",
        )
    text = f"Bursts: on average {_leased(busiest)} were leased, but not when these calls came."
    return (
        text,
        f"A longer SLO for {name}, or one more {busiest.kind}. A refusal of it says what was weighed.",
        busiest.id,
        busiest.kind,
    )
