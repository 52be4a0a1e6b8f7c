"""Bad kernel graphs: mutated graphs and mutated requests, each of which must end in a clear error, or be right after all.

`python -m benchmarks.bad_graphs` writes results/bad-graphs.json: 10,000 graphs checked in process, and 10,000 requests sent to a
server of kernel graphs over HTTP while another caller sends good ones at a fixed rate. Clear: a 4xx that names something and says
what to do. Nothing leaked: memory, open files and kept buffers of server and worker as before. Not late: the other caller's
times, beside those it has alone.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lamina import kernels
from lamina.errors import BadValue
from lamina.kernels.graph import KernelGraph, parse_spec
from lamina.kernels.host_run import HostGraph
from lamina.kernels.validation import check_graph

RESULT = Path(__file__).parents[1] / "results" / "bad-graphs.json"
RATE_HZ, LATE_MS = 50, 250.0

SOURCE = """
import lamina
from lamina import kernels

app = lamina.App("graphs")


@kernels.numpy_kernel
def add(a, b, total):
    total[...] = a + b


@kernels.numpy_kernel
def scale(a, by, scaled):
    scaled[...] = a * by


def ones():
    import numpy as np

    return np.ones(4, np.float32)


@app.kernel_graph(slo="2s", batch=8, scale=lamina.Scale(min=1, max=1))
def mutated(g):
    x, c = g.input("x", "float32", (4,)), g.constant("c", "float32", (4,), value=ones)
    n, t = g.input("n", "int32", (2, 2)), g.temporary("t", "float32", (4,))
    y, m = g.output("y", "float32", (4,)), g.output("m", "int32", (2, 2))
    g.launch(add, x, c, kernels.out(t))
    g.launch(scale, t, 2.0, kernels.out(y))
    g.launch(scale, n, 3, kernels.out(m))


@app.kernel_graph(slo="2s", batch=8, scale=lamina.Scale(min=1, max=1))
def bystander(g):
    g.launch(scale, g.input("x", "float32", (4,)), 2.0, kernels.out(g.output("y", "float32", (4,))))
"""


@kernels.numpy_kernel
def add(a: Any, b: Any, total: Any) -> None:
    total[...] = a + b


@kernels.numpy_kernel
def scale(a: Any, by: Any, scaled: Any) -> None:
    scaled[...] = a * by


KERNELS = {"add": add, "scale": scale}
_ARRAY = {"dtype": "float32", "shape": [4]}
GRAPH: dict[str, Any] = {
    "buffers": [
        {"name": "x", "kind": "input", **_ARRAY},
        {"name": "b", "kind": "input", **_ARRAY},
        {"name": "t", "kind": "temporary", **_ARRAY},
        {"name": "y", "kind": "output", "start": "x", **_ARRAY},
    ],
    "launches": [
        {
            "name": "first",
            "kernel": "add",
            "args": [{"buffer": "x", "role": "in"}, {"buffer": "b", "role": "in"}, {"buffer": "t", "role": "out"}],
            "grid": [1, 1],
            "block": [32, 1, 1],
        },
        {
            "name": "second",
            "kernel": "scale",
            "args": [{"buffer": "t", "role": "in"}, 2.0, {"buffer": "y", "role": "out"}],
            "shared_bytes": 16,
        },
    ],
    "iterations": 2,
}
REQUEST: dict[str, Any] = {"x": [1.0, 2.0, 3.0, 4.0], "n": [[1, 2], [3, 4]], "y": {"key": "kept"}}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3, 2**31, 2**63, 2**64, -(2**70), 0.5, 1e308, "", "x", "y", "t", "b", "n", "out", "in", "inout"),
    *("input", "output", "constant", "temporary", "float32", "float31", "complex64", "\x00", "\ud83d", "a" * 300, "../k", "key"),
    *([], [[]], [1, 2], [1, [2]], ["a"], {}, {"key": "none"}, {"key": "../x"}, {"key": 3}, {"key": "a", "b": 1}),
    *([{}], [0], [1] * 70),
)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (*way, name)
        yield from places(part, (*way, name))


def mutate(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """One to three changes: a value replaced by another or an odd one, removed, doubled, or a new name."""
    made = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice(list(places(made)) or [("x",)])
        holder: Any = made
        for part in way:
            holder = holder[part]
        what = rng.random()
        if what < 0.5 or (isinstance(holder, dict) and last not in holder):
            holder[last] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.65:
            del holder[last]
        elif what < 0.8 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[last]))
        elif what < 0.9 and isinstance(holder, list):
            rng.shuffle(holder)
        else:
            other = rng.choice(list(places(document)))
            found: Any = document
            for part in other:
                found = found[part]
            holder[last] = copy.deepcopy(found)
    return made


def try_graph(document: dict[str, Any]) -> str:
    """ "right", or the error of a graph: which must be a `BadValue` with a hint."""
    try:
        graph = KernelGraph(parse_spec(msgspec.json.encode(document)), KERNELS, {})
        plan = check_graph(graph)
    except BadValue as error:
        if not error.message or not error.hint:
            raise AssertionError(f"no hint: {error.message}") from error
        return error.message
    loaded = HostGraph(graph, plan)
    if sum(one.nbytes for one in graph.spec.buffers) < 2**20 and loaded.launches < 1_000:
        inputs = [np.ones((2, *one.shape), one.dtype) for one in graph.of_kind("input")]
        try:
            outputs = loaded(*inputs)
        except (ValueError, TypeError, OverflowError):  # of the kernel: shapes or dtypes that do not fit each other, say
            return "its kernel said no"
        assert all(len(output) == 2 for output in outputs)
    return "right"


def graphs(count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    found = {"refused": 0, "right": 0, "its kernel said no": 0}
    for _ in range(count):
        try:
            said = try_graph(mutate(rng, GRAPH))
        except UnicodeEncodeError:  # half a surrogate pair: no JSON to begin with
            said = "refused"
        found[said if said in found else "refused"] += 1
    return found


# --------------------------------------------------------------------------------- over HTTP


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, body: bytes) -> tuple[int, bytes]:
    writer.write(f"POST /v1/functions/{name} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    size = int(head.partition("content-length: ")[2].partition("\r")[0] or 0)
    return int(head[9:12]), await reader.readexactly(size)


async def bystand(port: int, stop: asyncio.Event) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took_ms: list[float] = []
    while not stop.is_set():
        begin_s = time.perf_counter()
        status, body = await ask(reader, writer, "bystander", b'{"x": [1, 2, 3, 4]}')
        assert status == 200 and json.loads(body) == [2, 4, 6, 8], (status, body)
        took_ms.append((time.perf_counter() - begin_s) * 1_000)
        await asyncio.sleep(max(0.0, 1 / RATE_HZ - (time.perf_counter() - begin_s)))
    writer.close()
    return took_ms


def usage(pids: list[int]) -> dict[str, int]:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return {"rss_kib": pages * 4, "files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)}


async def attack(port: int, count: int, seed: int, request: dict[str, Any] = REQUEST) -> dict[str, int]:
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: dict[str, int] = {}
    for _ in range(count):
        try:
            body = json.dumps(mutate(rng, request)).encode()
        except ValueError:
            continue
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body))]
        status, answer = await ask(reader, writer, "mutated", body)
        if status == 200:
            kind = "right"
        else:
            problem = json.loads(answer)
            assert 400 <= status < 500 and problem["detail"] and problem.get("hint"), (status, answer, body)
            kind = f"{status} {problem['code']}"
        found[kind] = found.get(kind, 0) + 1
    writer.close()
    return found


async def requests(count: int, seed: int) -> dict[str, Any]:
    from lamina.bootstrap import open_local
    from lamina.gateway.bootstrap import open_gateway

    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "graphs.py"
        app.write_text(SOURCE)
        gateway = await open_gateway(open_local(str(app), buffers=Path(folder)))
        try:
            while not gateway.is_ready():
                await asyncio.sleep(0.01)
            await attack(gateway.port, 200, seed + 1)  # what is made once is made now
            alone_stop = asyncio.Event()
            alone_task = asyncio.create_task(bystand(gateway.port, alone_stop))
            await asyncio.sleep(min(5.0, count / 500))
            alone_stop.set()
            alone = await alone_task
            engine: Any = gateway.driver.engine
            pids = [os.getpid(), *engine.cpu.pids.values()]
            before, stop = usage(pids), asyncio.Event()
            beside_task = asyncio.create_task(bystand(gateway.port, stop))
            found = await attack(gateway.port, count, seed)
            stop.set()
            beside = await beside_task
            after = usage(pids)
            kept = len(list(Path(folder).glob("graphs.buffers/*/*")))
            same = pids == [os.getpid(), *engine.cpu.pids.values()]
        finally:
            await gateway.stop()
    return {
        "answers": dict(sorted(found.items())),
        "bystander": {"alone": _times(alone), "beside": _times(beside), "late": sum(one > LATE_MS for one in beside)},
        "before": before,
        "after": after,
        "buffers_kept": kept,
        "same_processes": same,
    }


def _times(took_ms: list[float]) -> dict[str, float]:
    ranked = sorted(took_ms)
    return {
        "calls": len(ranked),
        **{f"p{part}_ms": round(ranked[min(len(ranked) - 1, len(ranked) * part // 100)], 2) for part in (50, 99, 100)},
    }


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    found = {"seed": 1, "count": count, "graphs": graphs(count, 1), "requests": asyncio.run(requests(count, 1))}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
