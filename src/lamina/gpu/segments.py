"""Graph segments: a captured graph cut at kernel borders, so that its slice can be taken back between two of them.

A graph that runs cannot be stopped. Launched as pieces it can: the next one is launched a little ahead (`can_launch`), so that
the device does not wait for the host, and not at all while the run is paused. The pieces are the nodes of the graph in an order
in which they may run, so the results are bit for bit those of the whole.

How long a graph takes is known from its first replay, whole: an eager run is bound by the host and says nothing. One that is
long is captured again, into memory that no other graph of its slice writes to, and cut evenly, somewhat finer than wanted; the
first replay of the pieces times each of them, and neighbours are then launched together up to the wanted length. The whole is
kept beside its pieces, and is what runs where nothing could preempt it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

SEGMENT_US = 1_000
"""What a batch that preempts another one should wait for at most."""

LAUNCH_US = SEGMENT_US // 2
"""Wanted length of what is launched together: one runs and one is ahead of it, so two are waited for."""

AHEAD_US = SEGMENT_US + SEGMENT_US // 5
"""Of work in flight, the most that is added to: behind a kernel that is longer than a segment, the next waits for its end."""

LEAST_SEGMENTS = 2
"""Shorter graphs stay whole."""

PIECES_PER_SEGMENT = 4
"""Cut finer than wanted, for kernels are not of one length; each piece costs the device a microsecond or two."""

MAX_PIECES = 2_000


PATIENT_US = 20_000
"""Graphs of functions with an SLO are cut from here on: shorter ones keep nobody waiting for long, and take memory twice."""

PATIENCE = 4
"""And where the SLO is so many times as long: with less there is hardly time for pauses."""


def gives_way_with(slo_us: int, took_us: int) -> bool:
    """Whether a function with that SLO (0: none) gives way to others with graphs that take so long."""
    return not slo_us or (took_us >= PATIENT_US and slo_us >= PATIENCE * took_us)


def is_long(expected_us: int, segment_us: int = SEGMENT_US) -> bool:
    """Whether a graph that is expected to take so long is worth cutting."""
    return 0 < LEAST_SEGMENTS * segment_us <= expected_us


def piece_bounds(nodes: int, expected_us: int, segment_us: int = SEGMENT_US) -> list[int]:
    """Where to cut a graph of so many nodes, which is expected to take so long: borders of the pieces, from 0 to `nodes`.

    One piece if it is too short to be worth it."""
    if not is_long(expected_us, segment_us):
        return [0, nodes]
    pieces = max(1, min(nodes, MAX_PIECES, PIECES_PER_SEGMENT * expected_us // segment_us))
    return [place * nodes // pieces for place in range(pieces + 1)]


def group_pieces(times_us: Sequence[float], segment_us: int = LAUNCH_US) -> list[range]:
    """Group neighbouring pieces into segments of at most the wanted length, or of one piece that is longer."""
    groups: list[range] = []
    first, total_us = 0, 0.0
    for place, took_us in enumerate(times_us):
        if place > first and total_us + took_us > segment_us:
            groups.append(range(first, place))
            first, total_us = place, 0.0
        total_us += took_us
    groups.append(range(first, len(times_us)))
    return groups


def can_launch(in_flight_us: Sequence[float], ran_us: float, next_us: float) -> bool:
    """Whether the next segment may be launched, behind those in flight, the first of which has run for so long.

    At once if there are none; behind one of them if all of it is soon over; and two are enough for the device to be busy."""
    if len(in_flight_us) >= 2:
        return False
    return not in_flight_us or max(0.0, in_flight_us[0] - ran_us) + next_us <= AHEAD_US


class GraphEditor(Protocol):
    """Calls of a driver that cutting takes. Graphs and nodes are handles of its own."""

    def clone_graph(self, graph: Any) -> Any: ...

    def find_in_clone(self, node: Any, clone: Any) -> Any: ...

    def remove_node(self, node: Any) -> None: ...

    def instantiate(self, graph: Any) -> int: ...

    def destroy_graph_source(self, graph: Any) -> None: ...


def cut_graph(editor: GraphEditor, graph: Any, nodes: Sequence[Any], bounds: Sequence[int]) -> list[int]:
    """Launchable pieces of a graph, whose nodes are given in an order in which they may run: one between each two bounds.

    By halves: a clone keeps the first half of the pieces and another the second, and so on with each. All of it removes about
    nodes x log2(pieces) nodes; a clone of the whole for each piece would remove nodes x pieces. If it fails, nothing is left."""
    made: list[int] = []

    def halve(own: Any, held: Sequence[Any], ends: Sequence[int]) -> None:
        """Cut `own`, which holds just these nodes, and destroy it."""
        try:
            if len(ends) == 2:
                made.append(editor.instantiate(own))
                return
            middle = len(ends) // 2
            at = ends[middle] - ends[0]
            for begin, end, kept_ends in ((0, at, ends[: middle + 1]), (at, len(held), ends[middle:])):
                clone = editor.clone_graph(own)
                inside = [editor.find_in_clone(node, clone) for node in held]
                for node in (*inside[:begin], *inside[end:]):
                    editor.remove_node(node)
                halve(clone, inside[begin:end], kept_ends)
        finally:
            if own is not graph:
                editor.destroy_graph_source(own)

    halve(graph, nodes, bounds)
    return made
