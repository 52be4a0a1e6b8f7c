"""Function logs: what functions print, kept for a while and streamed to followers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import Struct

from lamina.access.authorization import Grant
from lamina.errors import BadValue, NotFound
from lamina.gateway.routes.http_codec import parse_query
from lamina.server.exchange import Exchange, HttpRequest

KEPT_LINES = 10_000
MAX_CHARS = 4_000
CONTENT_TYPE = b"application/x-ndjson"


class FunctionLogLine(Struct, frozen=True):
    """One printed line, with the calls the function served when it printed it."""

    at: float  #: seconds since 1970
    function: str
    instance: str
    text: str
    calls: tuple[str, ...] = ()  #: that the function served when it printed this


class FunctionLogs:
    """Ring buffer of the latest lines, and the clients that follow them. `owner_of` tells the tenant of a function: a line
    belongs to the one that printed it, also when another tenant has a function of that name later."""

    def __init__(self, owner_of: Callable[[str], str] = lambda function: "") -> None:
        self._owner_of = owner_of
        self._lines: deque[tuple[str, FunctionLogLine]] = deque(maxlen=KEPT_LINES)  #: with their tenants
        self._followers: dict[Exchange, Callable[[str, FunctionLogLine], bool]] = {}

    def add(self, function: str, instance: str, calls: tuple[str, ...], text: str) -> None:
        line = FunctionLogLine(time.time(), function, instance, text[:MAX_CHARS], calls)
        owner = self._owner_of(function)
        self._lines.append((owner, line))
        for exchange, wants in list(self._followers.items()):
            if wants(owner, line):
                exchange.send_chunk(_encoded(line))

    def serve(self, request: HttpRequest, exchange: Exchange, known: set[str], grant: Grant) -> None:
        """Respond with lines the caller may see; `known` are the functions there are for it.

        `?function=NAME&call=ID&tail=100&follow=1`: the last lines, and with `follow` those to come."""
        asked = parse_query(request, ("function", "call", "tail", "follow"))
        tail = asked.get("tail", "100")
        if not tail.isdecimal() or len(tail) > 9 or int(tail) > KEPT_LINES:
            raise BadValue(f"tail: {tail[:40]!r} is not a number up to {KEPT_LINES}", hint="leave it out for the last 100 lines")
        name, call = asked.get("function", ""), asked.get("call", "")
        if name and known.isdisjoint((name, name.rpartition("-")[0])):
            raise NotFound(f"no function or instance {name[:80]!r}", hint="lamina ls shows what there is")

        def wants(owner: str, line: FunctionLogLine) -> bool:
            return grant.sees(owner) and name in ("", line.function, line.instance) and (not call or call in line.calls)

        found = [line for owner, line in self._lines if wants(owner, line)]
        exchange.start_stream(200, CONTENT_TYPE)
        exchange.send_chunk(b"".join(_encoded(line) for line in found[max(0, len(found) - int(tail)) :]))
        if asked.get("follow") != "1":
            exchange.end_stream()
            return
        self._followers[exchange] = wants
        exchange.when_disconnected(lambda: self._followers.pop(exchange, None) and None)

    def stop(self) -> None:
        for exchange in list(self._followers):
            exchange.end_stream()
        self._followers.clear()


def _encoded(line: FunctionLogLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
