"""Graph segments: a captured graph cut at kernel borders, so that its slice can be taken back between two of them.

A graph that runs cannot be stopped. Launched as pieces it can: the next one is launched when the one before the last has ended
(one ahead, so that the device never waits for the host), and not at all while the run is paused. The pieces are the nodes of the
graph in an order in which they may run, so the results are bit for bit those of the whole. Measured on an H200: a fifth of a
per cent for ResNet-50, ConvNeXt, BERT and decoder blocks, and milliseconds to make.

How long a piece takes is not known before it has run. So a graph is first cut evenly, somewhat finer than wanted; its first
replay, which uploads it anyway, times every piece; and neighbours are then launched together up to the wanted length.
"""

from __future__ import annotations

from collections.abc import Sequence

SEGMENT_US = 1_000
"""What a batch that preempts another one should wait for at most."""

LAUNCH_US = SEGMENT_US // 2
"""Wanted length of what is launched together: one runs and one is ahead of it, so two are waited for."""

LEAST_SEGMENTS = 2
"""Shorter graphs stay whole."""

PIECES_PER_SEGMENT = 3
"""Cut finer than wanted, for kernels are not of one length; each piece costs the device a microsecond or two."""

MAX_PIECES = 2_000


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
