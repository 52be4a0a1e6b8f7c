"""Streaming: what a function yields, as it comes, with both clients."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy
import pytest

import lamina
from lamina import encoding
from lamina.errors import DeadlineExceeded, FunctionFailed, UnknownTarget, Unreachable
from lamina.sdk.stream_codec import CONTENT_TYPE, END, ERROR, VALUE, encode_frame
from tests.serving import served, write_app

from .scripted_server import Scripted, Seen, http, ok, problem, serving, silent

pytestmark = pytest.mark.live

Reader = Callable[..., list[Any]]


def with_threads(url: str, *words: Any, first: int | None = None, timeout: str = "60s") -> list[Any]:
    with lamina.Client(url, timeout=timeout) as client:
        return list(itertools.islice(client.stream(*words), first))


def with_asyncio(url: str, *words: Any, first: int | None = None, timeout: str = "60s") -> list[Any]:
    async def main() -> list[Any]:
        found: list[Any] = []
        async with lamina.AsyncClient(url, timeout=timeout) as client, aclosing(client.stream(*words)) as pieces:
            async for piece in pieces:
                found.append(piece)
                if len(found) == first:
                    break
        return found

    return asyncio.run(main())


@pytest.fixture(params=[with_threads, with_asyncio])
def read(request: pytest.FixtureRequest) -> Reader:
    reader: Reader = request.param
    return reader


@pytest.fixture
def server() -> Iterator[Scripted]:
    with serving(silent) as script:
        yield script


def piece(value: Any) -> bytes:
    return encode_frame(VALUE, encoding.encode(value))


def in_chunks(*parts: bytes, last: bytes = b"0\r\n\r\n") -> Callable[[Seen], bytes]:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return lambda seen: head + body + last


# ------------------------------------------------------------------ what the bytes mean


def test_values_stay_what_they_are(server: Scripted, read: Reader) -> None:
    server.answer = in_chunks(piece(b"\x00\xff"), piece(numpy.arange(3, dtype=numpy.int16)), encode_frame(END, b""))
    raw, array = read(server.url, "f")
    assert raw == b"\x00\xff" and array.dtype == numpy.int16 and array.tolist() == [0, 1, 2]


def test_it_does_not_matter_how_the_bytes_are_cut(server: Scripted, read: Reader) -> None:
    whole = piece("one") + piece("two") + encode_frame(END, b"{}")
    server.answer = in_chunks(*(whole[at : at + 1] for at in range(len(whole))))
    assert read(server.url, "f") == ["one", "two"]


def test_a_stream_that_breaks_off_is_no_end(server: Scripted, read: Reader) -> None:
    server.answer = in_chunks(piece(1))
    with pytest.raises(Unreachable, match="broke off"):
        read(server.url, "f")


def test_an_answer_as_a_whole_is_the_only_piece(server: Scripted, read: Reader) -> None:
    server.answer = lambda seen: ok([1, 2])
    assert read(server.url, "f") == [[1, 2]]


def test_a_name_that_is_no_function_is_looked_for_among_the_workflows(server: Scripted, read: Reader) -> None:
    server.answer = lambda seen: ok(7) if "/workflows/" in seen.path else problem(404, "unknown-target")
    assert read(server.url, "w") == [7]


def test_a_name_that_is_neither_is_unknown(server: Scripted, read: Reader) -> None:
    server.answer = lambda seen: problem(404, "unknown-target")
    with pytest.raises(UnknownTarget, match="no function or workflow 'f'"):
        read(server.url, "f")


def test_what_fails_after_some_pieces_is_raised_after_them(server: Scripted, read: Reader) -> None:
    said = encoding.to_json({"code": "function-failed", "detail": "ValueError: no", "error": "ValueError"})
    server.answer = in_chunks(piece(1) + encode_frame(ERROR, said) + encode_frame(END, b""))
    assert read(server.url, "f", first=1) == [1]
    with pytest.raises(FunctionFailed, match="ValueError: no"):
        read(server.url, "f")


def test_a_server_that_says_nothing_runs_into_the_timeout(server: Scripted, read: Reader) -> None:
    with pytest.raises(DeadlineExceeded, match="within 50ms"):
        read(server.url, "f", timeout="50ms")


def test_a_server_that_falls_silent_between_pieces_runs_into_the_timeout(read: Reader) -> None:
    with (
        serving(lambda seen: in_chunks(piece(1), last=b"")(seen)) as server,
        pytest.raises(DeadlineExceeded, match="within 50ms"),
    ):
        read(server.url, "f", timeout="50ms")


def test_a_missing_server_is_said_plainly(read: Reader) -> None:
    with pytest.raises(Unreachable, match="no server at"):
        read("http://127.0.0.1:1", "f")


def test_what_is_not_http_is_said_plainly(server: Scripted, read: Reader) -> None:
    server.answer = lambda seen: b"SSH-2.0-OpenSSH_9.6\r\n"
    with pytest.raises(Unreachable):
        read(server.url, "f")


def test_options_go_along(server: Scripted) -> None:
    server.answer = lambda seen: http(200, b"1", "application/json")
    with lamina.Client(server.url) as client:
        list(client.stream("f", {"x": 1}, deadline="20ms", priority=2, cost_limit=0.5))
    headers = server.seen[0].headers
    assert (headers["lamina-deadline-ms"], headers["lamina-priority"], headers["lamina-cost-limit"]) == ("20", "2", "0.5")


# -------------------------------------------------------------------- with a real server

APP = """
import pathlib
import time

import numpy

import lamina

app = lamina.App("yielding")
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE)
def rows(wait_for):
    "The second only when the first was received."
    try:
        yield numpy.ones(2, numpy.float32)
        while not pathlib.Path(wait_for).exists():
            time.sleep(0.005)
        yield b"last"
    finally:
        pathlib.Path(wait_for + ".closed").touch()
"""


@pytest.mark.parametrize("ingress", [0, 1])
def test_pieces_arrive_before_the_next_is_made(tmp_path: Path, ingress: int) -> None:
    async def main() -> tuple[Any, Any]:
        async with served(write_app(tmp_path, APP), ingress=ingress) as gateway, lamina.AsyncClient(gateway.url) as client:
            pieces = client.stream("rows", {"wait_for": str(tmp_path / "had")})
            first = await anext(pieces)
            (tmp_path / "had").touch()
            return first, [piece async for piece in pieces]

    first, others = asyncio.run(main())
    assert first.dtype == numpy.float32 and others == [b"last"]


def test_leaving_early_ends_the_function(tmp_path: Path) -> None:
    def first_of(url: str) -> Any:
        with lamina.Client(url) as client:
            return next(client.stream("rows", {"wait_for": str(tmp_path / "had")}))

    async def main() -> None:
        async with served(write_app(tmp_path, APP)) as gateway:
            await asyncio.to_thread(first_of, gateway.url)
            while gateway.driver.controller.state.runs:  # until the server knows that the client is gone
                await asyncio.sleep(0.005)
            (tmp_path / "had").touch()
            while not (tmp_path / "had.closed").exists():
                await asyncio.sleep(0.005)

    asyncio.run(main())
