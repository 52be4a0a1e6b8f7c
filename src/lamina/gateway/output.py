"""Function logs: what functions print, kept for a while and streamed to followers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from lamina.errors import BadValue, NotFound
from lamina.gateway import wire
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.live.local import OnPrinted

KEPT_LINES = 10_000
MAX_CHARS = 4_000
KIND = b"application/x-ndjson"


def hear(engine: Any, told: OnPrinted, *, instead: bool = False) -> None:
    """Subscribe to every line that functions print; `instead`: they no longer go to stderr as they are."""
    for part in getattr(engine, "parts", [engine]):
        if hasattr(part, "on_line"):
            part.on_line = _both(part.on_line, told)
            part.echo_lines = part.echo_lines and not instead


def _both(first: OnPrinted | None, second: OnPrinted) -> OnPrinted:
    if first is None:
        return second

    def both(function: str, instance: str, calls: tuple[str, ...], text: str) -> None:
        first(function, instance, calls, text)
        second(function, instance, calls, text)

    return both


class Line(Struct, frozen=True):
    """One printed line, with the calls the function served when it printed it."""

    at: float  #: seconds since 1970
    function: str
    instance: str
    text: str
    calls: tuple[str, ...] = ()  #: that the function served when it printed this


class Output:
    """Ring buffer of the latest lines, and the clients that follow them."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self._followers: dict[Exchange, Callable[[Line], bool]] = {}

    def add(self, function: str, instance: str, calls: tuple[str, ...], text: str) -> None:
        line = Line(time.time(), function, instance, text[:MAX_CHARS], calls)
        self._lines.append(line)
        for exchange, wants in list(self._followers.items()):
            if wants(line):
                exchange.push(_encoded(line))

    def serve(self, request: Request, exchange: Exchange, known: set[str], *, all: bool) -> None:
        """Respond with lines of `known` functions; `all`: of any function.

        `?function=NAME&call=ID&tail=100&follow=1`: the last lines, and with `follow` those to come."""
        asked = wire.query_of(request, ("function", "call", "tail", "follow"))
        tail = asked.get("tail", "100")
        if not tail.isdecimal() or len(tail) > 9 or int(tail) > KEPT_LINES:
            raise BadValue(f"tail: {tail[:40]!r} is not a number up to {KEPT_LINES}", hint="leave it out for the last 100 lines")
        name, call = asked.get("function", ""), asked.get("call", "")
        if name and known.isdisjoint((name, name.rpartition("-")[0])):
            raise NotFound(f"no function or instance {name[:80]!r}", hint="lamina ls shows what there is")

        def wants(line: Line) -> bool:
            mine = all or line.function in known
            return mine and name in ("", line.function, line.instance) and (not call or call in line.calls)

        found = [line for line in self._lines if wants(line)]
        exchange.begin(200, KIND)
        exchange.push(b"".join(_encoded(line) for line in found[max(0, len(found) - int(tail)) :]))
        if asked.get("follow") != "1":
            exchange.end()
            return
        self._followers[exchange] = wants
        exchange.on_gone = lambda: self._followers.pop(exchange, None) and None

    def stop(self) -> None:
        for exchange in list(self._followers):
            exchange.end()
        self._followers.clear()


def _encoded(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"
