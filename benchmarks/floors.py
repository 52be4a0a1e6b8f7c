"""The floor: the same work in plain Starlette and uvicorn, with a hand-written batcher.

Run one with `python -m benchmarks.floors NAME PORT`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def answer(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def echo(request: Request) -> Response:
    return answer(msgspec.json.decode(await request.body()))


class Batcher:
    """Up to 16 at once, waiting 5 ms for company: what a careful engineer writes in an afternoon."""

    batch_s = 0.0  #: how long the last ones took

    def __init__(self, most: int = 16, wait_s: float = 0.005) -> None:
        sys.path.insert(0, str(Path(__file__).parent / "apps"))
        from model import Net  # type: ignore[import-not-found]

        self.net = Net()
        for size in (1, 2, 4, 8, 16):
            self.net([0.5] * size)
        self.most, self.wait_s = most, wait_s
        self.queue: asyncio.Queue[tuple[float, asyncio.Future[float]]] = asyncio.Queue()
        self.pool = ThreadPoolExecutor(1)
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, value: float) -> float:
        if self.task is None:
            self.task = asyncio.create_task(self.run())
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((value, done))
        return await done

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self.queue.get()]
            end = loop.time() + self.wait_s
            while len(batch) < self.most:
                try:
                    batch.append(await asyncio.wait_for(self.queue.get(), end - loop.time()))
                except TimeoutError:
                    break
            begin = loop.time()
            results = await loop.run_in_executor(self.pool, self.net, [value for value, _ in batch])
            self.batch_s += 0.2 * (loop.time() - begin - self.batch_s)
            for (_, done), result in zip(batch, results, strict=True):
                done.set_result(result)


def mlp_app(most: int, slo_s: float) -> Starlette:
    """With an SLO, who could not be in time is refused: the batch under way, those before it in line, and its own."""
    batcher = Batcher(most)
    waiting = 0

    async def mlp(request: Request) -> Response:
        nonlocal waiting
        if slo_s and waiting and (2 + waiting // most) * batcher.batch_s > slo_s:
            return Response(status_code=429)
        waiting += 1
        try:
            return answer(await batcher(msgspec.json.decode(await request.body())))
        finally:
            waiting -= 1

    return Starlette(routes=[Route("/mlp", mlp, methods=["POST"])])


def main() -> None:
    import uvicorn

    name, port = sys.argv[1], int(sys.argv[2])
    most, slo_ms = int(os.environ.get("BENCH_BATCH", "16")), float(os.environ.get("BENCH_SLO", "0ms").removesuffix("ms"))
    app = mlp_app(most, slo_ms / 1000) if name == "mlp" else Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    patient = {"timeout_keep_alive": 75}  # an idle connection is closed after 5 s otherwise, and the open loop has many
    uvicorn.run(app, port=port, log_level="warning", access_log=False, loop="uvloop", http="httptools", **patient)


if __name__ == "__main__":
    main()
