"""Validation of kernel graphs, before anything is launched: names, shapes, sizes, aliasing, cycles, limits of a launch.

A graph that passes reads nothing that was not written for this request: no buffer is read before it is written, none that is
shared is written, and no launch has a buffer twice if it writes it. So kernels that do what their launch declares can leak
nothing from one request to the next.

The order of launches follows from their buffers. A buffer with one writer may be read by launches listed before it; one that is
written again is read in the order of the list. What waits for itself is a cycle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import isfinite, prod

from lamina.encoding import DTYPES
from lamina.errors import BadValue, did_you_mean
from lamina.kernels.graph import Argument, Buffer, GraphSpec, KernelGraph, Launch

MAX_BUFFERS, MAX_LAUNCHES, MAX_ARGS, MAX_RANK = 256, 4_096, 64, 8
MAX_ITERATIONS, MAX_RUNS = 10_000, 100_000
"""Of one request: repetitions, and launches times repetitions."""
MAX_BYTES = 2**36
"""Of the buffers of one request together."""
MAX_GRID = (2**31 - 1, 65_535)
MAX_BLOCK, MAX_THREADS = (1_024, 1_024, 64), 1_024
MAX_SHARED_BYTES = 227 * 1_024
"""Limits of CUDA for one launch, compute capability 9.0. A smaller device says so when the graph is loaded."""

ALIGN = 512
"""Bytes; a buffer begins at a multiple of it."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What is known of a sound graph: the order of its launches, and where its temporaries lie in one piece of memory."""

    order: tuple[int, ...]  #: indices of launches
    offsets: dict[str, int]  #: of temporaries, in bytes of one request
    temporary_bytes: int  #: of one request

    def __repr__(self) -> str:
        return f"<graph of {len(self.order)} launches, {self.temporary_bytes} bytes of temporaries>"


def checked_key(key: object, field: str = "key") -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key) or ".." in key or "//" in key:
        raise BadValue(f"{field}: {str(key)[:80]!r} is no key", hint="up to 255 of A-Z a-z 0-9 . _ - and / between parts")
    return key


def check_graph(graph: KernelGraph) -> KernelPlan:
    """Check a graph; raises `BadValue`, which names the field, its value and what to do."""
    spec = graph.spec
    buffers = _check_buffers(spec, graph)
    for launch in spec.launches:
        _check_launch(launch, buffers, graph)
    _check_iterations(spec)
    order = _ordered(spec, buffers)
    _check_written(spec, buffers, order)
    offsets, size = _place_temporaries(spec, buffers, order)
    return KernelPlan(tuple(order), offsets, size)


# ------------------------------------------------------------------------------ parts


def _check_buffers(spec: GraphSpec, graph: KernelGraph) -> dict[str, Buffer]:
    if not 1 <= len(spec.buffers) <= MAX_BUFFERS:
        raise BadValue(f"buffers: {len(spec.buffers)} of them", hint=f"1 to {MAX_BUFFERS}")
    found: dict[str, Buffer] = {}
    for buffer in spec.buffers:
        where = f"buffer {buffer.name[:80]!r}"
        if not _NAME.fullmatch(buffer.name):
            raise BadValue(f"{where}: no name", hint="a-z first, then up to 62 of a-z 0-9 _")
        if buffer.name in found:
            raise BadValue(f"{where}: declared twice", hint="each buffer has a name of its own")
        if buffer.dtype not in DTYPES:
            hint = did_you_mean(buffer.dtype, DTYPES, f"there is {', '.join(sorted(DTYPES))}")
            raise BadValue(f"{where}: dtype {buffer.dtype[:40]!r} is unknown", hint=hint)
        if len(buffer.shape) > MAX_RANK or any(size < 1 or size > MAX_BYTES for size in buffer.shape):
            raise BadValue(f"{where}: shape {list(buffer.shape)[:12]}", hint=f"up to {MAX_RANK} lengths, each 1 or more")
        if buffer.nbytes > MAX_BYTES:
            raise BadValue(f"{where}: {buffer.nbytes} bytes", hint=f"at most {MAX_BYTES} for all buffers together")
        if buffer.key and buffer.kind != "constant":
            raise BadValue(
                f"{where}: key {buffer.key[:80]!r} on an {buffer.kind}", hint="constants have keys; requests name others"
            )
        if buffer.kind == "constant":
            if buffer.key:
                checked_key(buffer.key, f"{where}: key")
            elif buffer.name not in graph.constants:
                raise BadValue(f"{where}: a constant without contents", hint="give it key= or value=")
        found[buffer.name] = buffer
    total = sum(buffer.nbytes for buffer in spec.buffers)
    if total > MAX_BYTES:
        raise BadValue(f"buffers: {total} bytes together", hint=f"at most {MAX_BYTES}")
    for buffer in spec.buffers:
        if buffer.start:
            _check_start(buffer, found)
    unknown = next((name for name in graph.constants if name not in found or found[name].kind != "constant"), None)
    if unknown is not None:
        raise BadValue(f"constant {unknown[:80]!r}: contents for a buffer that is no constant", hint="declare it as one")
    if not any(buffer.kind == "input" for buffer in spec.buffers):
        raise BadValue("buffers: no input", hint="declare what a request brings: g.input(name, dtype, shape)")
    if not any(buffer.kind == "output" for buffer in spec.buffers):
        raise BadValue("buffers: no output", hint="declare what a request gets back: g.output(name, dtype, shape)")
    return found


def _check_start(buffer: Buffer, buffers: dict[str, Buffer]) -> None:
    where = f"buffer {buffer.name!r}: start {buffer.start[:80]!r}"
    source = buffers.get(buffer.start)
    if buffer.kind not in ("output", "temporary"):
        raise BadValue(f"{where} on an {buffer.kind}", hint="outputs and temporaries begin as a copy of another buffer")
    if source is None or source.kind not in ("input", "constant"):
        raise BadValue(f"{where} is no input or constant", hint="name one of those")
    if (source.dtype, source.shape) != (buffer.dtype, buffer.shape):
        raise BadValue(
            f"{where} is {source.dtype} {list(source.shape)}, the buffer {buffer.dtype} {list(buffer.shape)}",
            hint="give both the same dtype and shape",
        )


def _check_launch(launch: Launch, buffers: dict[str, Buffer], graph: KernelGraph) -> None:
    where = f"launch {launch.name[:80]!r}"
    kernel = graph.kernels.get(launch.kernel)
    if kernel is None:
        hint = did_you_mean(launch.kernel, graph.kernels, f"there is {', '.join(graph.kernels) or 'none'}")
        raise BadValue(f"{where}: kernel {launch.kernel[:80]!r} is unknown", hint=hint)
    if not 1 <= len(launch.args) <= MAX_ARGS:
        raise BadValue(f"{where}: {len(launch.args)} arguments", hint=f"1 to {MAX_ARGS}")
    uses: dict[str, list[str]] = {}
    for place, arg in enumerate(launch.args):
        if not isinstance(arg, Argument):
            if (isinstance(arg, float) and not isfinite(arg)) or (isinstance(arg, int) and not -(2**63) <= arg < 2**64):
                raise BadValue(f"{where}: argument {place} is {str(arg)[:40]}", hint="a number of 64 bits")
            continue
        buffer = buffers.get(arg.buffer)
        if buffer is None:
            hint = did_you_mean(arg.buffer, buffers, f"declared are {', '.join(list(buffers)[:20])}")
            raise BadValue(f"{where}: argument {place} is buffer {arg.buffer[:80]!r}, which is not declared", hint=hint)
        if arg.role != "in" and buffer.kind in ("input", "constant"):
            raise BadValue(
                f"{where}: argument {place} writes {buffer.kind} {arg.buffer!r}",
                hint="write to a temporary or an output; one with start= begins as a copy",
            )
        uses.setdefault(arg.buffer, []).append(arg.role)
    for name, roles in uses.items():
        if len(roles) > 1 and any(role != "in" for role in roles):
            raise BadValue(
                f"{where}: buffer {name!r} is argument {len(roles)} times and written", hint="pass it once, as inout, or use two"
            )
    if not any(role != "in" for roles in uses.values() for role in roles):
        raise BadValue(f"{where}: writes no buffer", hint="mark what it writes: kernels.out(buffer)")
    _check_extent(launch, where)


def _check_extent(launch: Launch, where: str) -> None:
    for field, given, most in (("grid", launch.grid, MAX_GRID), ("block", launch.block, MAX_BLOCK)):
        for axis, size, limit in zip("xyz", given, most, strict=False):
            if not 1 <= size <= limit:
                raise BadValue(f"{where}: {field}.{axis} is {size}", hint=f"1 to {limit}")
    if prod(launch.block) > MAX_THREADS:
        raise BadValue(f"{where}: block {list(launch.block)} has {prod(launch.block)} threads", hint=f"at most {MAX_THREADS}")
    if not 0 <= launch.shared_bytes <= MAX_SHARED_BYTES:
        raise BadValue(f"{where}: shared_bytes {launch.shared_bytes}", hint=f"0 to {MAX_SHARED_BYTES}")


def _check_iterations(spec: GraphSpec) -> None:
    if not 1 <= len(spec.launches) <= MAX_LAUNCHES:
        raise BadValue(f"launches: {len(spec.launches)} of them", hint=f"1 to {MAX_LAUNCHES}")
    if not 1 <= spec.iterations <= MAX_ITERATIONS:
        raise BadValue(f"iterations: {spec.iterations}", hint=f"1 to {MAX_ITERATIONS}")
    if spec.iterations * len(spec.launches) > MAX_RUNS:
        raise BadValue(
            f"iterations: {spec.iterations} times {len(spec.launches)} launches", hint=f"at most {MAX_RUNS} launches a request"
        )
    names = [launch.name for launch in spec.launches]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise BadValue(f"launch {twice[:80]!r}: two have this name", hint="give one another name=")


def _edges(spec: GraphSpec, buffers: dict[str, Buffer]) -> Iterator[tuple[int, int, str]]:
    """Which launch waits for which, and over which buffer."""
    writers: dict[str, list[int]] = {name: [] for name in buffers}
    for place, launch in enumerate(spec.launches):
        for name in launch.writes:
            writers[name].append(place)
    for place, launch in enumerate(spec.launches):
        for name in launch.reads:
            before = [one for one in writers[name] if one < place]
            if before:
                yield before[-1], place, name
            elif not buffers[name].start:
                after = [one for one in writers[name] if one > place]
                if len(after) > 1:
                    raise BadValue(
                        f"launch {launch.name[:80]!r}: reads {name!r}, which is written twice after it",
                        hint="list the launch behind the write that it needs",
                    )
                yield from ((one, place, name) for one in after)
            yield from ((place, one, name) for one in writers[name] if one > place and (before or buffers[name].start))
        for name in launch.writes:
            yield from ((one, place, name) for one in writers[name] if one < place)


def _ordered(spec: GraphSpec, buffers: dict[str, Buffer]) -> list[int]:
    followers: dict[int, set[int]] = {}
    waits_for: list[set[int]] = [set() for _ in spec.launches]
    over: dict[tuple[int, int], str] = {}
    for first, then, name in _edges(spec, buffers):
        if first != then:
            followers.setdefault(first, set()).add(then)
            waits_for[then].add(first)
            over[first, then] = name
    left = [len(before) for before in waits_for]
    free = [place for place, count in enumerate(left) if not count]
    heapify(free)  # of those that may run, the first of the list: the same order every time
    order = []
    while free:
        place = heappop(free)
        order.append(place)
        for after in followers.get(place, ()):
            left[after] -= 1
            if not left[after]:
                heappush(free, after)
    if len(order) < len(spec.launches):
        raise _cycle(spec, waits_for, over, [bool(count) for count in left])
    return order


def _cycle(
    spec: GraphSpec, waits_for: Sequence[set[int]], over: dict[tuple[int, int], str], is_stuck: Sequence[bool]
) -> BadValue:
    """The error that names a cycle: what cannot run waits for something that cannot run, and so on, back to itself."""
    path = [is_stuck.index(True)]
    while path[-1] not in path[:-1]:
        path.append(min(before for before in waits_for[path[-1]] if is_stuck[before]))
    ring = path[path.index(path[-1]) :]
    said = [f"{spec.launches[then].name[:40]!r} waits for {over[first, then]!r}" for then, first in pairwise(ring)]
    return BadValue(f"launches: a cycle: {', '.join(said)}", hint="let one of them write to another buffer")


def _check_written(spec: GraphSpec, buffers: dict[str, Buffer], order: Sequence[int]) -> None:
    written = {name for name, buffer in buffers.items() if buffer.kind in ("input", "constant") or buffer.start}
    used = {name for launch in spec.launches for name in (*launch.reads, *launch.writes)}
    for place in order:
        launch = spec.launches[place]
        for name in launch.reads:
            if name not in written:
                raise BadValue(
                    f"launch {launch.name[:80]!r}: reads {name!r} before anything has written it",
                    hint="let a launch write it first, or give it start=",
                )
        written |= set(launch.writes)
    for name, buffer in buffers.items():
        if buffer.kind == "output" and name not in written:
            raise BadValue(f"buffer {name!r}: an output that no launch writes", hint="write it, or leave it out")
        if name not in used and not any(other.start == name for other in buffers.values()) and not buffer.start:
            raise BadValue(f"buffer {name!r}: used by no launch", hint="leave it out")


def _place_temporaries(spec: GraphSpec, buffers: dict[str, Buffer], order: Sequence[int]) -> tuple[dict[str, int], int]:
    """Places of temporaries: those whose lives do not overlap may lie in the same memory; largest first, each as low as it fits.

    With several iterations a temporary that is read before it is written anew lives throughout."""
    lives: dict[str, tuple[int, int]] = {}
    for turn, place in enumerate(order):
        launch = spec.launches[place]
        for name in (*launch.reads, *launch.writes):
            if buffers[name].kind == "temporary":
                lives[name] = (lives.get(name, (turn, turn))[0], turn)
    first_roles: dict[str, bool] = {}
    for place in order:
        for name in spec.launches[place].reads:
            first_roles.setdefault(name, True)
        for name in spec.launches[place].writes:
            first_roles.setdefault(name, False)
    for name in lives:
        if buffers[name].start or (spec.iterations > 1 and first_roles[name]):
            lives[name] = (-1, len(order))
    offsets: dict[str, int] = {}
    size = 0
    for name in sorted(lives, key=lambda one: (-buffers[one].nbytes, one)):
        need = -(-buffers[name].nbytes // ALIGN) * ALIGN
        first, last = lives[name]
        taken = sorted(
            (offsets[other], offsets[other] + -(-buffers[other].nbytes // ALIGN) * ALIGN)
            for other in offsets
            if lives[other][0] <= last and first <= lives[other][1]
        )
        at = 0
        for begin, end in taken:
            if at + need <= begin:
                break
            at = max(at, end)
        offsets[name] = at
        size = max(size, at + need)
    return offsets, size
