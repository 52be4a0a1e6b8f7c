"""Servers and raw HTTP for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina import policies
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.server.http1 import HttpLimits

APP = """
import lamina

app = lamina.App("tested")


@app.function(scale=lamina.Scale(min=1, max=1), batch=8)
def echo(x):
    "Gives back what it gets."
    return x


@app.function(scale=lamina.Scale(max=1))
def add(a, b=10):
    return a + b


@app.function(scale=lamina.Scale(max=1))
def fail(x):
    raise ValueError(f"cannot take {x} from /secret/place")


@app.function(scale=lamina.Scale(max=1))
def picky(x):
    raise lamina.errors.BadValue(f"x: {x} is too small", hint="send more")


@app.function(scale=lamina.Scale(max=1))
def nothing():
    return "done"


@app.workflow(slo=lamina.SLO("5s"))
def twice(x):
    return add(echo(x), echo(x))
"""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    headers = {name.lower(): value for name, value in pairs}
    status = int(first.split(" ")[1])
    return Answer(status, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def raw(port: int, data: bytes, patience_s: float = 30.0) -> Answer | None:
    """One request on a connection of its own. If no answer comes, the client says that it has no more to send; then the
    server must hang up (None), in ten seconds at the latest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        try:
            await writer.drain()
            try:
                return await asyncio.wait_for(read_answer(reader), patience_s)
            except TimeoutError:
                with contextlib.suppress(OSError):  # cut off an instant ago
                    writer.write_eof()
                return await asyncio.wait_for(read_answer(reader), 10.0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
    finally:
        await hang_up(writer)


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    if kind:
        lines.append(f"Content-Type: {kind}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Browser:
    """A keep-alive connection that says what it gets."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Browser:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await hang_up(self.writer)

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json", **headers: str) -> Answer:
        self.writer.write(request(method, path, body, kind, **headers))
        return await read_answer(self.reader)

    async def post(self, path: str, value: Any, **headers: str) -> Answer:
        return await self.ask("POST", path, json.dumps(value).encode(), **headers)


@contextlib.asynccontextmanager
async def served(
    app: Path, *, policy: str = "edf", limits: HttpLimits | None = None, full_errors: bool = True, ingress: int = 0
) -> AsyncIterator[Gateway]:
    live = open_local(str(app), policy=policies.build(policy))
    gateway = await open_gateway(live, ListenConfig(limits=limits or HttpLimits(), ingress=ingress), full_errors=full_errors)
    try:
        yield gateway
    finally:
        await gateway.stop(5)


@contextlib.contextmanager
def shared(app: Path) -> Iterator[Gateway]:
    """A server on a thread of its own, for tests that leave it as they found it: to start one takes longer than to ask it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    try:
        gateway: Gateway = do(open_gateway(open_local(str(app), policy=policies.build("edf"))))
        try:
            yield gateway
        finally:
            do(gateway.stop(5))
    finally:
        do(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(work: Callable[[], Coroutine[Any, Any, Any]], limit_s: float = 100.0) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), limit_s)

    return asyncio.run(bounded())


def write_app(folder: Path, text: str = APP) -> Path:
    path = folder / "app.py"
    path.write_text(text)
    return path
