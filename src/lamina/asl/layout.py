"""Layered graph layout: layers, an order with few crossings, and straight edges.

The usual four steps, each in its plainest form: edges that close a loop are set aside, every node goes below all that lead
to it, a few sweeps move nodes next to their neighbours, and positions are those nearest to the neighbours' that keep the
order and the gaps (isotonic regression, so no sweep can tangle what is sorted). Long edges get a place in every layer
they cross, and so run round the boxes instead of through them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

GAP_X, GAP_Y = 36.0, 54.0
LANE = 14.0  #: width a long edge takes in the layers it crosses
SWEEPS = 12


@dataclass(slots=True)
class GraphLayout:
    """Centre of each node, and the points each edge runs through; edges that run upwards are drawn apart."""

    width: float
    height: float
    centre: dict[str, tuple[float, float]]
    ways: list[list[tuple[float, float]]]  #: per edge, in order; empty for those that close a loop


@dataclass(slots=True)
class _Item:
    width: float
    height: float
    x: float = 0.0
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)


def place(
    sizes: dict[str, tuple[float, float]], edges: list[tuple[str, str]], starts: tuple[str, ...], words: list[float]
) -> GraphLayout:
    """`words` is how wide the label of each edge is."""
    closing = _closing(sizes, edges, starts)
    rank = _ranks(sizes, edges, closing)
    names = list(sizes)
    items = [_Item(*sizes[name]) for name in names]
    number = {name: index for index, name in enumerate(names)}
    layers: list[list[int]] = [[] for _ in range(max(rank.values(), default=0) + 1)]
    for name in names:
        layers[rank[name]].append(number[name])
    chains: list[list[int]] = []
    for index, (a, b) in enumerate(edges):
        chain = [number[a]]
        if index not in closing:
            for layer in range(rank[a] + 1, rank[b]):
                wide = words[index] if layer == rank[a] + 1 else 0.0
                items.append(_Item(max(LANE, wide), 0.0))
                layers[layer].append(len(items) - 1)
                chain.append(len(items) - 1)
            chain.append(number[b])
            for upper, lower in itertools.pairwise(chain):
                items[upper].down.append(lower)
                items[lower].up.append(upper)
        chains.append(chain)
    _order(layers, items)
    _spread(layers, items)
    return _finish(names, edges, closing, layers, items, chains)


def _closing(sizes: dict[str, tuple[float, float]], edges: list[tuple[str, str]], starts: tuple[str, ...]) -> set[int]:
    """Edges back to a node on the way here."""
    out: dict[str, list[tuple[int, str]]] = {name: [] for name in sizes}
    for index, (a, b) in enumerate(edges):
        out[a].append((index, b))
    closing: set[int] = set()
    state: dict[str, int] = {}
    for root in (*starts, *sizes):
        if root in state:
            continue
        state[root] = 1
        stack = [(root, iter(out[root]))]
        while stack:
            name, rest = stack[-1]
            for index, after in rest:
                if state.get(after) == 1:
                    closing.add(index)
                elif after not in state:
                    state[after] = 1
                    stack.append((after, iter(out[after])))
                    break
            else:
                state[name] = 2
                stack.pop()
    return closing


def _ranks(sizes: dict[str, tuple[float, float]], edges: list[tuple[str, str]], closing: set[int]) -> dict[str, int]:
    kept = [edge for index, edge in enumerate(edges) if index not in closing]
    before = dict.fromkeys(sizes, 0)
    for _, b in kept:
        before[b] += 1
    rank = dict.fromkeys(sizes, 0)
    todo = [name for name, count in before.items() if count == 0]
    while todo:
        name = todo.pop()
        for a, b in kept:
            if a == name:
                rank[b] = max(rank[b], rank[a] + 1)
                before[b] -= 1
                if before[b] == 0:
                    todo.append(b)
    return rank


def _order(layers: list[list[int]], items: list[_Item]) -> None:
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for at in range(1, len(layers)) if downwards else range(len(layers) - 2, -1, -1):
            beside = layers[at - 1 if downwards else at + 1]
            place = {item: index for index, item in enumerate(beside)}

            def middle(item: int, own: int, place: dict[int, int] = place, downwards: bool = downwards) -> float:
                near = items[item].up if downwards else items[item].down
                return sum(place[other] for other in near) / len(near) if near else float(own)

            now = {item: index for index, item in enumerate(layers[at])}
            layers[at].sort(key=lambda item: middle(item, now[item]))


def _spread(layers: list[list[int]], items: list[_Item]) -> None:
    for layer in layers:
        x = 0.0
        for item in layer:
            x += items[item].width / 2
            items[item].x = x
            x += items[item].width / 2 + GAP_X
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wished = []
            for item in layer:
                near = [*items[item].up, *items[item].down]
                wished.append(sum(items[other].x for other in near) / len(near) if near else items[item].x)
            for item, x in zip(layer, _nearest(wished, [items[i].width for i in layer]), strict=True):
                items[item].x = x


def _nearest(wished: list[float], widths: list[float]) -> list[float]:
    """Positions closest to those wished for that keep order and gaps: pool neighbours that want past each other."""
    offsets = [0.0]
    for left, right in itertools.pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + GAP_X)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(wished, offsets, strict=True):
        value, count = wish - offset, 1
        while pools and pools[-1][0] > value:
            other, more = pools.pop()
            value, count = (value * count + other * more) / (count + more), count + more
        pools.append((value, count))
    flat = [value for value, count in pools for _ in range(count)]
    return [value + offset for value, offset in zip(flat, offsets, strict=True)]


def _finish(
    names: list[str],
    edges: list[tuple[str, str]],
    closing: set[int],
    layers: list[list[int]],
    items: list[_Item],
    chains: list[list[int]],
) -> GraphLayout:
    left = min((item.x - item.width / 2 for item in items), default=0.0)
    right = max((item.x + item.width / 2 for item in items), default=0.0)
    tops: list[tuple[float, float]] = []
    y = 0.0
    for layer in layers:
        tall = max((items[item].height for item in layer), default=0.0)
        tops.append((y, tall))
        y += tall + GAP_Y
    level = {item: index for index, layer in enumerate(layers) for item in layer}
    centre = {name: (items[i].x - left, tops[level[i]][0] + items[i].height / 2) for i, name in enumerate(names)}
    ways: list[list[tuple[float, float]]] = []
    for index, chain in enumerate(chains):
        way: list[tuple[float, float]] = []
        if index not in closing:
            first, last = chain[0], chain[-1]
            top, tall = tops[level[first]]
            way.append((items[first].x - left, top + items[first].height))
            if items[first].height < tall:  # past whatever taller box stands beside it
                way.append((items[first].x - left, top + tall))
            for lane in chain[1:-1]:
                top, tall = tops[level[lane]]
                way += [(items[lane].x - left, top), (items[lane].x - left, top + tall)]
            way.append((items[last].x - left, tops[level[last]][0]))
        ways.append(way)
    return GraphLayout(right - left, max(0.0, y - GAP_Y), centre, ways)
