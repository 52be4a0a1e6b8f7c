"""Connections that do nothing, from many addresses: making room for each of them takes no search through all of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.server.connection_set import EVICTION_BATCH, ConnectionSet, crowded_last, sweep_some
from lamina.server.grpc import GrpcServer
from lamina.server.http1 import HttpLimits
from lamina.server.http_server import HttpServer

MOST = 200


@dataclass(eq=False)
class IdleConnection:
    """What a server looks at when it makes room."""

    address: str
    phase_since: float
    phase: str = "idle"
    is_evictable: bool = True
    gone: bool = False

    streams: tuple[str, ...] = ()

    @property
    def last_frame_s(self) -> float:
        return self.phase_since

    def evict(self) -> None:
        self.gone = True

    abort = evict


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=60), st.integers(0, 2**32))
def test_the_idlest_of_the_address_with_the_most_by_then_goes_first(drawn: list[tuple[int, bool]], seed: int) -> None:
    rng = random.Random(seed)
    all_of_them = [IdleConnection(f"a{number}", rng.random(), is_evictable=may_go) for number, may_go in drawn]
    left, counts = [one for one in all_of_them if one.is_evictable], Counter(one.address for one in all_of_them)
    order = crowded_last(left, Counter(counts), lambda one: one.phase_since)
    while left:
        most = max(counts[one.address] for one in left)
        goes = order.pop()
        assert counts[goes.address] == most
        assert goes.phase_since == min(one.phase_since for one in left if counts[one.address] == most)
        left.remove(goes)
        counts[goes.address] -= 1
    assert not order


class Searched(ConnectionSet):
    searches = 0

    def __iter__(self):
        self.searches += 1
        return super().__iter__()


def test_room_for_newcomers_of_many_addresses_is_found_many_at_a_time() -> None:
    server = HttpServer(lambda *_: None, lambda *_: (b"", b""), HttpLimits(connections=MOST))
    server.connections = connections = Searched()
    first = [IdleConnection(f"a{number}", float(number)) for number in range(MOST)]
    for one in first:
        server.add(one)  # type: ignore[arg-type]
    for number in range(EVICTION_BATCH):
        assert server.has_room(f"b{number}")
        server.remove(first[number])  # type: ignore[arg-type]
        server.add(IdleConnection(f"b{number}", float(MOST + number)))  # type: ignore[arg-type]
    assert [one.gone for one in first] == [True] * EVICTION_BATCH + [False] * (MOST - EVICTION_BATCH), "the idlest"
    assert connections.searches <= 4


def test_so_is_that_of_grpc() -> None:
    server = GrpcServer(type("Service", (), {"methods": {}})(), 1_000)  # type: ignore[arg-type]
    server._connections = connections = Searched()
    first = [IdleConnection(f"a{number}", float(number)) for number in range(MOST)]
    for one in first:
        connections.add(one)
    for number in range(EVICTION_BATCH):
        assert server._evict_idlest()
        connections.add(IdleConnection(f"b{number}", float(MOST + number)))
    assert [one.gone for one in first] == [True] * EVICTION_BATCH + [False] * (MOST - EVICTION_BATCH), "the idlest"
    assert connections.searches <= 4
    for one in connections:
        one.streams = ("a call",)
    assert not server._evict_idlest()


def test_an_address_that_has_come_to_far_more_than_others_gives_way_before_them() -> None:
    server = HttpServer(lambda *_: None, lambda *_: (b"", b""), HttpLimits(connections=MOST))
    quiet = [IdleConnection(f"a{number}", float(number)) for number in range(MOST)]
    for one in quiet:
        server.add(one)  # type: ignore[arg-type]
    flood: list[IdleConnection] = []
    for number in range(2 * EVICTION_BATCH):
        assert server.has_room("b")
        for gone in [one for one in (*quiet, *flood) if one.gone]:
            server.remove(gone)  # type: ignore[arg-type]
        flood.append(IdleConnection("b", float(MOST + number)))
        server.add(flood[-1])  # type: ignore[arg-type]
    assert sum(one.gone for one in quiet) <= 3


def test_thousands_that_are_too_slow_at_once_are_told_so_in_many_turns() -> None:
    told: list[int] = []

    class Slow:
        def check_timeouts(self, now_s: float) -> None:
            until_s = time.perf_counter() + 0.0001  # a response, and the end of its connection
            while time.perf_counter() < until_s:
                pass
            told.append(1)

    unswept: list[Any] = [Slow() for _ in range(1_000)]
    sweep_some(unswept, 0.0)
    assert 1 <= len(told) <= 30 and len(unswept) == 1_000 - len(told)
    while unswept:
        sweep_some(unswept, 0.0)
    assert len(told) == 1_000
