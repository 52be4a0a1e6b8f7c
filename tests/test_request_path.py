"""Length of the request path: Python calls and files that one warm HTTP call to one function takes, in one process.

A count, unlike a time, is the same on every machine. The connection, router, driver, controller and policy are the real ones; a
fake transport stands for the socket and the emulated engine for workers. The bounds are what the path takes today: lower them
when it gets shorter.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import policies
from lamina.bootstrap import open_emulated
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.predict.profile import Point, Profile
from lamina.server.http1 import HttpConnection

SRC = f"{Path(lamina.__file__).parent}/"
POINTS = [Point(batch=batch, units=units, p50_us=1_000 + 50 * batch) for batch in (1, 2, 4, 8) for units in (1, 2, 4, 8)]
BODY = b'{"x": 1}'
REQUEST = (
    b"POST /v1/functions/f HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n"
    % len(BODY)
    + BODY
)
WARM, TRACED, TRIES = 60, 40, 10
NOT_THE_PATH = ("sim/", "server/process_status.py")
"""The emulated device, which stands for a worker, and a timer that runs beside the calls."""

Calls = Counter[tuple[str, str]]


NOT_SERVED: Calls = Counter({("", "a call that was refused"): 10**9})


class Transport:
    """Stands for a socket: keeps what is written, and says so."""

    def __init__(self) -> None:
        self.written = b""
        self.has_answered = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += bytes(data)
        self.has_answered.set()

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None: ...


async def call(connection: HttpConnection, transport: Transport) -> bytes:
    transport.written = b""
    transport.has_answered.clear()
    connection.data_received(REQUEST)
    await transport.has_answered.wait()
    await asyncio.sleep(0.003)  # what follows the answer belongs to the call
    return transport.written


async def traced(policy: str, enough: int = 10**6) -> Calls:
    """The shortest of forty calls; on a busy machine timers fall into most, so it goes on until one has `enough` or less."""
    app = lamina.App("traced")

    @app.function(scale=lamina.Scale(min=1, max=1), batch=8, slo=lamina.SLO("200ms"), gpu=lamina.GPU(0.25))
    def f(x: Any) -> Any:
        return x

    profile = Profile(function="f", device="h200", points=POINTS, load_us=1_000)
    gateway: Gateway = await open_gateway(open_emulated(app, "h200", [profile], policy=policies.build(policy)))
    connection, transport = HttpConnection(gateway.server), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    try:
        answers = [await call(connection, transport) for _ in range(WARM)]
        assert any(answer.startswith(b"HTTP/1.1 200 OK\r\n") for answer in answers), answers[-1]
        found: list[Calls] = []
        while len(found) < TRACED or (len(found) < TRIES * TRACED and min(calls.total() for calls in found) > enough):
            found.append(await _trace(connection, transport))
    finally:
        await gateway.stop(1.0)
    return min(found, key=lambda calls: calls.total())  # timers and forecasts of other moments are not the call's


async def _trace(connection: HttpConnection, transport: Transport) -> Calls:
    calls: Calls = Counter()

    def on_profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SRC):
            file = code.co_filename.removeprefix(SRC)
            if not file.startswith(NOT_THE_PATH):
                calls[file, code.co_qualname] += 1

    await asyncio.sleep(0.002)
    sys.setprofile(on_profile)
    try:
        answer = await call(connection, transport)
    finally:
        sys.setprofile(None)
    return calls if answer.startswith(b"HTTP/1.1 200 OK\r\n") else NOT_SERVED


def table(calls: Calls) -> str:
    packages: Counter[str] = Counter()
    for (file, _), count in calls.items():
        packages[file.rpartition("/")[0] or file] += count
    files = {file for file, _ in calls}
    lines = [f"{count:5} {package}" for package, count in packages.most_common()]
    return "\n".join((f"{calls.total()} calls in {len(files)} files", *lines))


@pytest.mark.parametrize(("policy", "most_calls", "most_files"), [("fifo", 160, 31), ("frontier", 195, 35)])
def test_one_http_call_takes_no_more_python_calls_than_it_did(policy: str, most_calls: int, most_files: int) -> None:
    calls = asyncio.run(traced(policy, most_calls))
    files = {file for file, _ in calls}
    assert calls.total() <= most_calls and len(files) <= most_files, table(calls)


def test_transport_and_routes_are_a_small_part_of_it() -> None:
    calls = asyncio.run(traced("fifo"))
    ours = {key: count for key, count in calls.items() if key[0].startswith(("server/", "gateway/"))}
    assert sum(ours.values()) <= 35, "\n".join(f"{count:3} {file} {name}" for (file, name), count in ours.items())
