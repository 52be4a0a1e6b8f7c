"""Series-parallel decomposition of a precedence order.

An order is a list of sets: `below[i]` holds everything that must have ended before i starts, as the bits of an int.
Only this relation matters for time; which edges express it does not.

    series       one part lies below the other as a whole
    parallel     two parts have nothing to do with each other
    irreducible  neither; it contains an N (a below c and d, b below d alone). A Pareto front for it takes one of two tricks:
                 duplicate  with the time of a node fixed, that node can be copied: once per follower or once per predecessor.
                            The longest path stays the same and the order may fall apart. Exact, one pass per combination.
                 serialise  add waits until it falls apart. Every plan for the stricter order is a plan for the real one, so
                            this is safe, and dearer or slower than need be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb, prod

MAX_DUPLICATED = 3
"""Parts fixed together at most."""
MAX_TRIES = 2_000
"""Ways to fix that are looked at; past this a tangle is chained."""
MAX_WEIGHED = 16
"""Parts of a tangle up to which every added wait is weighed; larger ones are cut by depth."""


@dataclass(frozen=True, slots=True)
class SeriesBlock:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Irreducible:
    """Irreducible part: neither series nor parallel; `below` is the order among its parts."""

    parts: tuple[Tree, ...]
    below: tuple[int, ...]


Tree = int | SeriesBlock | ParallelBlock | Irreducible


@dataclass(frozen=True, slots=True)
class Duplication:
    """Duplication of the parts in `fixed`: `tree` is over copies, and copy i stands for part `origin[i]`."""

    fixed: tuple[int, ...]
    origin: tuple[int, ...]
    tree: Tree


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def series_parts(below: Sequence[int], nodes: int) -> list[int]:
    """`nodes` cut into series: pieces each entirely below the next, as many as there are."""
    line = sorted(bits(nodes), key=lambda node: (below[node] & nodes).bit_count())
    common = nodes  # what lies below everything from here on
    cuts = []
    left = nodes
    for node in reversed(line):
        left &= ~(1 << node)
        common &= below[node]
        if left & ~common == 0:
            cuts.append(left)
    pieces = []
    above = nodes
    for cut in cuts:
        pieces.append(above & ~cut)
        above = cut
    return pieces[::-1]


def parallel_parts(below: Sequence[int], nodes: int) -> list[int]:
    """`nodes` cut into parallel pieces, with no order between them."""
    pieces: list[int] = []
    for node in bits(nodes):
        piece = 1 << node | below[node] & nodes
        apart = []
        for other in pieces:
            if other & piece:
                piece |= other
            else:
                apart.append(other)
        pieces = [*apart, piece]
    return sorted(pieces, key=lambda piece: piece & -piece)


def decompose(below: Sequence[int], nodes: int) -> Tree:
    """The tree of series and parallel blocks, irreducible where there is neither. `nodes` is not empty."""
    if nodes & (nodes - 1) == 0:
        return nodes.bit_length() - 1
    pieces = series_parts(below, nodes)
    if len(pieces) > 1:
        return SeriesBlock(tuple(decompose(below, piece) for piece in pieces))
    pieces = parallel_parts(below, nodes)
    if len(pieces) > 1:
        return ParallelBlock(tuple(decompose(below, piece) for piece in pieces))
    return _irreducible(below, nodes)


def _irreducible(below: Sequence[int], nodes: int) -> Irreducible:
    """Twins are joined until none are left, so that a long chain inside an irreducible part counts as one."""
    parts: dict[int, Tree] = {node: node for node in bits(nodes)}
    under = {node: below[node] & nodes for node in parts}
    over = {node: sum(1 << other for other in parts if under[other] >> node & 1) for node in parts}
    while pair := _twins(under, over):
        first, then = pair
        kind = SeriesBlock if under[then] >> first & 1 else ParallelBlock
        parts[first] = kind((*_inner(parts[first], kind), *_inner(parts.pop(then), kind)))
        for table in (under, over):
            del table[then]
            for node in table:
                table[node] &= ~(1 << then)
    place = {node: index for index, node in enumerate(parts)}
    return Irreducible(tuple(parts.values()), tuple(sum(1 << place[low] for low in bits(under[node])) for node in parts))


def _twins(under: dict[int, int], over: dict[int, int]) -> tuple[int, int] | None:
    """Two that look the same to all others: side by side, or one right behind the other."""
    for a, b in combinations(under, 2):
        if under[a] == under[b] and over[a] == over[b]:
            return a, b
        for first, then in ((a, b), (b, a)):
            if under[then] == under[first] | 1 << first and over[first] == over[then] | 1 << then:
                return first, then
    return None


def _inner(tree: Tree, kind: type[SeriesBlock | ParallelBlock]) -> tuple[Tree, ...]:
    return tree.parts if isinstance(tree, kind) else (tree,)


def is_series_parallel(tree: Tree) -> bool:
    """Free of irreducible parts."""
    return isinstance(tree, int) or (not isinstance(tree, Irreducible) and all(is_series_parallel(part) for part in tree.parts))


def find_duplication(tangle: Irreducible, sizes: Sequence[int], limit: int) -> Duplication | None:
    """The cheapest duplication of few parts after which the rest falls apart; None if it takes over `limit` combinations."""
    count = len(tangle.parts)
    for together in range(1, MAX_DUPLICATED + 1):
        if comb(count, together) << together > MAX_TRIES:
            return None
        ways = sorted((prod(sizes[part] for part in parts), parts) for parts in combinations(range(count), together))
        for options, parts in ways:
            if options > limit:
                break
            for copies in product((copied_upward, copied_downward), repeat=together):
                below, origin = list(tangle.below), list(range(count))
                for part, copied in zip(parts, copies, strict=True):
                    below = copied(below, part)
                    origin += [part] * (len(below) - len(origin))
                tree = decompose(below, (1 << len(below)) - 1)
                if is_series_parallel(tree):
                    return Duplication(parts, tuple(origin), tree)
    return None


def copied_upward(below: Sequence[int], node: int) -> list[int]:
    """One copy of `node` for each that directly follows it, with everything behind that one."""
    above = [other for other, under in enumerate(below) if under >> node & 1]
    direct = [other for other in above if not any(below[other] >> middle & 1 for middle in above)]
    copied = [under & ~(1 << node) for under in below]
    for place, follower in enumerate(direct):
        copy = 1 << (len(copied) if place else node)
        for other in above:
            if other == follower or below[other] >> follower & 1:
                copied[other] |= copy
        if place:
            copied.append(below[node])
    return copied


def copied_downward(below: Sequence[int], node: int) -> list[int]:
    """One copy of `node` for each that it directly waits for, with everything before that one."""
    waits = list(bits(below[node]))
    direct = [low for low in waits if not any(below[middle] >> low & 1 for middle in waits)]
    copied = list(below)
    for place, low in enumerate(direct):
        own = below[low] | 1 << low
        if place == 0:
            copied[node] = own
        else:
            copy = 1 << len(copied)
            copied = [under | copy if under >> node & 1 else under for under in copied]
            copied.append(own)
    return copied


def serialised(tangle: Irreducible, times_us: Sequence[int]) -> Tree:
    """The part with waits added until it falls apart, each time the one that lengthens the longest path least."""
    below = list(tangle.below)
    every = (1 << len(below)) - 1
    if len(below) > MAX_WEIGHED:
        depth = completion_times_us(below, [1] * len(below))
        ranks = [sum(1 << low for low in range(len(below)) if depth[low] < rank) for rank in range(len(below) + 1)]
        return decompose([ranks[depth[node]] for node in range(len(below))], every)
    while waits := list(_missing_waits(below)):
        below = min((_with_wait(below, *wait) for wait in waits), key=lambda tried: max(completion_times_us(tried, times_us)))
    return decompose(below, every)


def _missing_waits(below: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For every N (a below c and d, b below d alone) the wait that closes it: b before c."""
    count = len(below)
    every = (1 << count) - 1
    above = [sum(1 << other for other in range(count) if below[other] >> node & 1) for node in range(count)]
    apart = [every & ~(below[node] | above[node] | 1 << node) for node in range(count)]
    for b in range(count):
        for c in bits(apart[b]):
            tops = above[b] & apart[c]
            if any(above[a] & tops for a in bits(below[c] & apart[b])):
                yield b, c


def _with_wait(below: Sequence[int], first: int, then: int) -> list[int]:
    """The order with one more wait, and everything that follows from it."""
    added = below[first] | 1 << first
    return [under | added if node == then or under >> then & 1 else under for node, under in enumerate(below)]


def completion_times_us(below: Sequence[int], times_us: Sequence[int]) -> list[int]:
    """When each could end, with these times and nothing else in the way."""
    ends = [0] * len(below)
    for node in sorted(range(len(below)), key=lambda one: below[one].bit_count()):
        ends[node] = times_us[node] + max((ends[low] for low in bits(below[node])), default=0)
    return ends
