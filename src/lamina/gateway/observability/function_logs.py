"""Function logs: what functions print, kept for a while and streamed to followers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from heapq import merge
from operator import attrgetter

import msgspec
from msgspec import Struct

from lamina.access.authorization import Grant
from lamina.errors import NotFound
from lamina.gateway.routes.http_codec import parse_query, query_int
from lamina.server.exchange import Exchange, HttpRequest

KEPT_LINES = 10_000
MAX_CHARS = 4_000
LINE_COST = 350
"""What a line counts for besides its characters."""

TENANT_COST, TOTAL_COST = 4 * 2**20, 8 * 2**20
"""Of the lines that are kept, of one tenant and in all: what one prints pushes out nothing of another, and all of it is told at
once."""

CONTENT_TYPE = b"application/x-ndjson"


class FunctionLogLine(Struct, frozen=True):
    """One printed line, with the calls the function served when it printed it."""

    at: float  #: seconds since 1970
    function: str
    instance: str
    text: str
    calls: tuple[str, ...] = ()  #: that the function served when it printed this


class FunctionLogs:
    """The latest lines of each tenant, and the clients that follow them. `owner_of` tells the tenant of a function: a line
    belongs to the one that printed it, also when another tenant has a function of that name later."""

    def __init__(self, owner_of: Callable[[str], str] = lambda function: "") -> None:
        self._owner_of = owner_of
        self._lines: dict[str, deque[FunctionLogLine]] = {}  #: by tenant
        self._costs: Counter[str] = Counter()
        self._total = 0
        self._followers: dict[Exchange, Callable[[str, FunctionLogLine], bool]] = {}

    def add(self, function: str, instance: str, calls: tuple[str, ...], text: str) -> None:
        line = FunctionLogLine(time.time(), function, instance, text[:MAX_CHARS], calls)
        owner = self._owner_of(function)
        lines = self._lines.setdefault(owner, deque())
        lines.append(line)
        self._costs[owner] += _cost(line)
        self._total += _cost(line)
        while len(lines) > KEPT_LINES or self._costs[owner] > TENANT_COST:
            self._drop(owner)
        while self._total > TOTAL_COST:
            self._drop(max(self._costs, key=self._costs.__getitem__))
        shown = b""
        for exchange, wants in list(self._followers.items()):
            if wants(owner, line):
                shown = shown or _encoded(line)
                exchange.send_chunk(shown)

    def _drop(self, owner: str) -> None:
        cost = _cost(self._lines[owner].popleft())
        self._costs[owner] -= cost
        self._total -= cost
        if not self._lines[owner]:
            del self._lines[owner], self._costs[owner]

    def serve(self, request: HttpRequest, exchange: Exchange, known: set[str], grant: Grant) -> None:
        """Respond with lines the caller may see; `known` are the functions there are for it.

        `?function=NAME&call=ID&tail=100&follow=1`: the last lines, and with `follow` those to come."""
        asked = parse_query(request, ("function", "call", "tail", "follow"))
        tail = query_int(asked, "tail", 100, KEPT_LINES)
        name, call = asked.get("function", ""), asked.get("call", "")
        if name and known.isdisjoint((name, name.rpartition("-")[0])):
            raise NotFound(f"no function or instance {name[:80]!r}", hint="lamina ls shows what there is")

        def wants(owner: str, line: FunctionLogLine) -> bool:
            return grant.sees(owner) and name in ("", line.function, line.instance) and (not call or call in line.calls)

        kept = [[line for line in lines if wants(owner, line)] for owner, lines in self._lines.items() if grant.sees(owner)]
        found = list(merge(*kept, key=attrgetter("at")))
        exchange.start_stream(200, CONTENT_TYPE)
        exchange.send_chunk(b"".join(_encoded(line) for line in found[max(0, len(found) - tail) :]))
        if asked.get("follow") != "1":
            exchange.end_stream()
            return
        self._followers[exchange] = wants
        exchange.when_disconnected(lambda: self._followers.pop(exchange, None) and None)

    def stop(self) -> None:
        for exchange in list(self._followers):
            exchange.end_stream()
        self._followers.clear()


def _cost(line: FunctionLogLine) -> int:
    return len(line.text) + LINE_COST


def _encoded(line: FunctionLogLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
