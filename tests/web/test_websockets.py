"""WebSockets of functions, with a client that others wrote: messages both ways, how they end, and what no client may cost."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lamina.access.admin_service import AdminService
from lamina.core.events import Event, Heartbeat
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.admin_server import open_access
from lamina.gateway.routes.problems import make_problem
from lamina.gateway.routes.sockets import reason_of
from lamina.server.http1 import HttpLimits
from lamina.server.origins import OriginSettings
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import ROOT, managed
from tests.serving import Answer, Browser, hang_up, raw, read_answer, request, run, write_app

pytest.importorskip("wsproto")
pytest.importorskip("websockets")
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lamina import policies
from lamina.bootstrap import open_local

pytestmark = pytest.mark.live

APP = """
import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import lamina

app = lamina.App("socket")
ONE = lamina.Scale(max=1)


@dataclass
class Point:
    x: int


@app.function(scale=ONE)
async def echoes(messages: AsyncIterator[str], prefix: str = ""):
    async for message in messages:
        yield prefix + message
    yield "bye"


@app.function(scale=ONE)
async def doubles(data: AsyncIterator[bytes]):
    async for piece in data:
        yield piece * 2


@app.function(scale=ONE)
async def adds(points: AsyncIterator[Point]) -> int:
    return sum([point.x async for point in points])


@app.function(scale=ONE)
def counts(to: int, by: int = 1):
    for number in range(0, to, by):
        yield {"n": number}


@app.function(scale=ONE)
def plain(x: int) -> int:
    return x + 1


@app.function(scale=ONE)
def fails(after: int):
    yield from range(after)
    raise ValueError("no more")


@app.function(scale=ONE)
def pages(text: str, kind: str = "text/plain"):
    return lamina.Response(text, content_type=kind)


@app.function(scale=ONE)
def gives_up(text: str):
    yield 1
    raise lamina.Response(text, status=404)


@app.function(scale=ONE, concurrency=16)
async def waits(file: str, messages: AsyncIterator[int]):
    yield "begun"
    try:
        async for _ in messages:
            pass
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        Path(file).write_text("cancelled")
        raise


@app.function(scale=ONE, concurrency=2)
async def deaf(messages: AsyncIterator[bytes]):
    yield "begun"
    await asyncio.Event().wait()


@app.function(scale=ONE)
def floods(count: int):
    for _ in range(count):
        yield "x" * 100_000
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("socket"), APP)


@asynccontextmanager
async def serving(app: Path, *, ingress: int = 0, cors: tuple[str, ...] = (), **limits: Any) -> AsyncIterator[Gateway]:
    live = open_local(str(app), policy=policies.build("edf"))
    listen = ListenConfig(ingress=ingress, limits=HttpLimits(**limits), origins=OriginSettings(cors=cors))
    gateway = await open_gateway(live, listen)
    try:
        yield gateway
    finally:
        await gateway.stop(0.5)


class Shared:
    """One server for many tests, on the loop of each: started in a thread of its own."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.url = f"ws://127.0.0.1:{gateway.port}/v1/functions"


@pytest.fixture(scope="module", params=[0, 1], ids=["one-process", "ingress"])
def server(app: Path, request: pytest.FixtureRequest) -> Iterator[Shared]:
    import threading

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    opened = serving(app, ingress=request.param)
    try:
        yield Shared(do(opened.__aenter__()))
    finally:
        do(opened.__aexit__(None, None, None))
        do(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def received(socket: ClientConnection) -> list[Any]:
    """All messages until the socket is closed."""
    found: list[Any] = []
    try:
        while True:
            message = await socket.recv()
            found.append(json.loads(message) if isinstance(message, str) else message)
    except ConnectionClosed:
        return found


def test_each_value_that_is_yielded_is_a_message(server: Shared) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/counts/ws?to=6&by=2") as socket:
            assert await received(socket) == [{"n": 0}, {"n": 2}, {"n": 4}]
            assert (socket.close_code, socket.close_reason) == (1000, "")

    run(work)


def test_messages_go_both_ways_while_the_call_runs(server: Shared) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/echoes/ws?prefix=-") as socket:
            for word in ("one", "two"):
                await socket.send(json.dumps(word))
                assert json.loads(await socket.recv()) == f"-{word}"
            await socket.send("")
            assert await received(socket) == ["bye"]
            assert socket.close_code == 1000

    run(work)


def test_a_client_that_sends_faster_than_messages_are_taken_is_held_up_and_loses_none(server: Shared) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/echoes/ws") as socket:

            async def send() -> None:
                for number in range(2_000):
                    await socket.send(f'"{number}"')
                await socket.send("")

            sending = asyncio.create_task(send())
            assert await received(socket) == [*map(str, range(2_000)), "bye"]
            await sending

    run(work)


def test_bytes_are_binary_both_ways(server: Shared) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/doubles/ws") as socket:
            await socket.send(bytes(range(256)))
            assert await socket.recv() == bytes(range(256)) * 2
            large = bytes(500_000)
            await socket.send([large[:1_000], large[1_000:]])  # in fragments
            assert await socket.recv() == large * 2

    run(work)


def test_messages_have_the_type_of_the_annotation(server: Shared) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/adds/ws") as socket:
            for x in (3, 4):
                await socket.send(json.dumps({"x": x}))
            await socket.send("")
            assert await received(socket) == [7]
        async with connect(f"{server.url}/adds/ws") as socket:
            await socket.send('{"x": "three"}')
            assert await received(socket) == []
            assert socket.close_code == 4422 and "points.x: 'three' is text" in socket.close_reason

    run(work)


def test_without_a_query_the_first_message_has_the_inputs(server: Shared) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/counts/ws") as socket:
            await socket.send('{"to": 2}')
            assert await received(socket) == [{"n": 0}, {"n": 1}]
        async with connect(f"{server.url}/plain/ws") as socket:
            await socket.send("41")
            assert await received(socket) == [42]

    run(work)


@pytest.mark.parametrize(
    ("path", "sent", "code", "says"),
    [
        ("counts/ws?to=many", None, 4400, "many"),
        ("counts/ws?too=3", None, 4400, "too"),
        ("counts/ws", "not JSON", 4400, "JSON"),
        ("counts/ws?to=1000000", "1", 1003, "takes no messages"),
        ("echoes/ws", "not JSON", 1007, "JSON"),
        ("fails/ws?after=2", None, 4500, "function-failed"),
        ("plain/ws?x=1", None, 1000, ""),
    ],
)
def test_the_close_code_says_how_it_ended(server: Shared, path: str, sent: str | None, code: int, says: str) -> None:
    async def work() -> None:
        async with connect(f"{server.url}/{path}") as socket:
            if sent is not None:
                await socket.send(sent)
            await received(socket)
            assert (socket.close_code, says in (socket.close_reason or "")) == (code, True), socket.close_reason

    run(work)


def test_a_refusal_says_its_reason_and_what_could_be_had(server: Shared) -> None:
    async def work() -> dict[str, Any]:
        async with connect(f"{server.url}/plain/ws?x=1", additional_headers={"Lamina-Deadline-Ms": "0.001"}) as socket:
            await received(socket)
            assert socket.close_code == 4429
            told: dict[str, Any] = json.loads(socket.close_reason or "")
            return told

    told = run(work)
    assert told["code"] == "refused" and told["reason"] == "deadline" and told.get("offer_ms", 1) > 0.001


def test_a_reason_is_json_that_fits_into_a_close_frame() -> None:
    long = make_problem(422, "x: 'ä\"\\" * 50, code="unprocessable")
    long.offer_ms, long.retry_after_s, long.reason = 12.34, 0.5, "deadline"
    reason = reason_of(long)
    told = json.loads(reason)
    assert len(reason.encode()) <= 123
    assert (told["code"], told["reason"], told["offer_ms"], told["retry_after_s"]) == ("unprocessable", "deadline", 12.3, 0.5)


def test_a_client_that_leaves_cancels_its_coroutine_and_no_other(server: Shared, tmp_path: Path) -> None:
    async def work() -> None:
        leaves, stays = tmp_path / "leaves", tmp_path / "stays"
        async with connect(f"{server.url}/waits/ws?file={stays}") as other:
            assert json.loads(await other.recv()) == "begun"
            async with connect(f"{server.url}/waits/ws?file={leaves}") as socket:
                assert json.loads(await socket.recv()) == "begun"
                socket.transport.abort()
            while not (leaves.exists() and leaves.read_text()):
                await asyncio.sleep(0.01)
            assert not stays.exists()
            await other.send("1")  # it is still there

    run(work)


def test_a_client_that_closes_cancels_its_coroutine(server: Shared, tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "closed"
        async with connect(f"{server.url}/waits/ws?file={file}") as socket:
            assert json.loads(await socket.recv()) == "begun"
        while not (file.exists() and file.read_text()):
            await asyncio.sleep(0.01)

    run(work)


def test_a_call_that_waits_on_a_loop_that_lives_does_not_hang(app: Path) -> None:
    async def work() -> None:
        beats: asyncio.Queue[Heartbeat] = asyncio.Queue()

        def observe(now_us: int, event: Event, actions: Any) -> None:
            if isinstance(event, Heartbeat):
                beats.put_nowait(event)

        async with serving(app) as gateway:
            gateway.driver.add_observer(observe)
            async with connect(f"ws://127.0.0.1:{gateway.port}/v1/functions/deaf/ws") as socket:
                assert json.loads(await socket.recv()) == "begun"
                while not (await beats.get()).alive_only:
                    pass

    run(work)


# ------------------------------------------------------------------------ what no client may cost


def upgrade(path: str, **headers: str) -> bytes:
    given = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **headers,
    }
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in given.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def frame(opcode: int, payload: bytes, *, final: bool = True) -> bytes:
    size = len(payload)
    head = bytes([(0x80 if final else 0) | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    else:  # the shortest form, as the protocol wants it
        head += struct.pack(">BH", 0x80 | 126, size) if size < 65_536 else struct.pack(">BQ", 0x80 | 127, size)
    return head + b"\0\0\0\0" + payload


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("GET", "/v1/functions/counts/ws?to=1"), 426),
        (upgrade("/v1/functions/counts/ws", **{"Sec-WebSocket-Version": "8"}), 426),
        (upgrade("/v1/functions/counts/ws", **{"Sec-WebSocket-Key": "short"}), 400),
        (upgrade("/v1/functions/counts/ws", Upgrade="h2c"), 426),
        (upgrade("/v1/functions/counts/ws", Upgrade="other"), 400),
        (upgrade("/v1/functions/counts/ws", **{"Content-Length": "5"}) + b"hello", 400),
        (upgrade("/v1/functions/counts/ws", **{"Sec-WebSocket-Protocol": "chat"}), 400),
        (upgrade("/v1/functions/nowhere/ws"), 404),
        (upgrade("/v1/functions/counts"), 426),  # the right path is in the answer
        (upgrade("/v1/functions/counts/ws", Origin="https://elsewhere.example"), 403),
        (upgrade("/v1/functions/counts/ws", Prefer="respond-async"), 400),
    ],
)
def test_what_is_no_handshake_is_answered_and_upgraded_to_nothing(server: Shared, data: bytes, status: int) -> None:
    answer = run(lambda: raw(server.gateway.port, data))
    assert answer is not None and answer.status == status


def test_an_upgrade_behind_a_request_that_waits_is_refused(app: Path) -> None:
    async def work() -> tuple[Answer, Answer]:
        async with serving(app) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(request("POST", "/v1/functions/plain", b"1") + upgrade("/v1/functions/counts/ws?to=1"))
            answers = await read_answer(reader), await read_answer(reader)
            await hang_up(writer)
            return answers

    first, second = run(work)
    assert (first.status, second.status) == (200, 400)


async def opened(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(upgrade(path))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 "), head
    return reader, writer


async def close_code(reader: asyncio.StreamReader) -> int:
    """The code of the close frame; 1006: there was none."""
    try:
        while True:
            opcode, size = await reader.readexactly(2)
            if size >= 126:
                size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
            payload = await reader.readexactly(size)
            if opcode & 15 == 8:
                return int.from_bytes(payload[:2], "big")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 1006


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(2, bytes(70_000)), 1009),
        (frame(2, bytes(40_000), final=False) + frame(0, bytes(40_000)), 1009),
        (frame(1, b"", final=False) + 200 * frame(0, b"", final=False), 1008),
        (frame(1, b"\xff\xfe"), 1007),
        (frame(3, b"reserved"), 1002),
        (b"\x81\x05hello", 1002),  # not masked
        (frame(9, bytes(126)), 1002),  # a control frame that is too long
        (frame(8, struct.pack(">H", 1000)), 1000),
        (500 * frame(9, b"ping") + frame(8, b""), 1000),
    ],
)
def test_frames_that_are_too_much_or_none_at_all_end_their_socket_alone(app: Path, frames: bytes, code: int) -> None:
    async def work() -> None:
        async with serving(app, message_bytes=65_536) as gateway:
            reader, writer = await opened(gateway.port, "/v1/functions/deaf/ws")
            writer.write(frames)
            assert await close_code(reader) == code
            await hang_up(writer)
            async with Browser(gateway.port) as browser:
                assert (await browser.post("/v1/functions/plain", 1)).json == 2

    run(work)


def test_messages_that_are_not_taken_are_not_read_either(app: Path) -> None:
    async def work() -> None:
        async with serving(app, unread_bytes=200_000) as gateway:
            _, writer = await opened(gateway.port, "/v1/functions/deaf/ws")
            for _ in range(400):
                writer.write(frame(2, bytes(100_000)))
            while gateway.budget.layers().get("bodies", 0) < 200_000:
                await asyncio.sleep(0.005)
            async with Browser(gateway.port) as browser:
                for _ in range(20):
                    assert (await browser.post("/v1/functions/plain", 1)).json == 2
            assert gateway.budget.layers()["bodies"] <= 300_000  # the window, and one message more
            assert writer.transport.get_write_buffer_size() > 10_000_000  # all else waits on the client's side
            writer.transport.abort()
            while gateway.budget.layers().get("bodies", 0):
                await asyncio.sleep(0.005)

    run(work)


def test_a_client_that_does_not_read_is_cut_off(app: Path) -> None:
    async def work() -> None:
        async with serving(app, body_bytes=1_000_000) as gateway:
            _, writer = await opened(gateway.port, "/v1/functions/floods/ws?count=100000")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            state = gateway.driver.controller.state
            while not state.functions["floods"].arrivals.last_us:
                await asyncio.sleep(0.005)
            while state.runs:  # its function was closed at a yield
                await asyncio.sleep(0.005)
            assert gateway.budget.used_bytes < 5_000_000
            writer.transport.abort()

    run(work)


def test_a_client_that_answers_no_ping_is_gone(app: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(app, ping_s=0.5, pong_s=1) as gateway:
            file = tmp_path / "silent"
            async with connect(f"ws://127.0.0.1:{gateway.port}/v1/functions/deaf/ws") as answering:
                assert json.loads(await answering.recv()) == "begun"
                reader, writer = await opened(gateway.port, f"/v1/functions/waits/ws?file={file}")
                assert await close_code(reader) == 1006
                writer.close()
                while not file.exists():
                    await asyncio.sleep(0.01)
                assert answering.close_code is None  # it has answered as many pings

    run(work)


def test_a_server_that_stops_ends_what_waits_for_messages(app: Path) -> None:
    async def work() -> tuple[list[Any], int | None]:
        async with serving(app) as gateway, connect(f"ws://127.0.0.1:{gateway.port}/v1/functions/echoes/ws") as socket:
            await socket.send('"hello"')
            assert json.loads(await socket.recv()) == "hello"
            stopping = asyncio.create_task(gateway.stop(30))
            found = await received(socket)
            await stopping
            return found, socket.close_code

    assert run(work) == (["bye"], 1001)


# ------------------------------------------------------------------------------- tokens and tenants


def test_a_page_sends_its_token_as_a_subprotocol(app: Path, tmp_path: Path) -> None:
    async def work() -> None:
        store = open_store(str(tmp_path / "store.db"))
        first = await AdminService(await open_access(store)).perform(ROOT, "token/create", {"name": "t", "scopes": ["invoke"]})
        await store.close()
        async with managed(app, tmp_path, host="0.0.0.0") as server:
            url = f"ws://127.0.0.1:{server.gateway.port}/v1/functions/counts/ws?to=1"
            token, weak = first["token"], await server.token("read")
            for offered, status in (
                (None, 401),
                (["lamina", "lamina.bearer.lmt_wrong"], 401),
                (["lamina", f"lamina.bearer.{weak}"], 403),
                ([f"lamina.bearer.{token}"], 400),
                (["lamina", f"lamina.bearer.{token}", f"lamina.bearer.{weak}"], 401),
            ):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url, subprotocols=offered)
                assert refused.value.response.status_code == status, offered
            async with connect(url, subprotocols=["lamina", f"lamina.bearer.{token}"]) as socket:
                assert socket.subprotocol == "lamina"
                assert await received(socket) == [{"n": 0}]
            async with connect(url, additional_headers={"Authorization": f"Bearer {token}"}) as socket:
                assert await received(socket) == [{"n": 0}]

    run(work)


def test_functions_of_another_tenant_are_not_there(app: Path, tmp_path: Path) -> None:
    async def work() -> tuple[int, list[Any]]:
        async with managed(app, tmp_path) as server:
            owner = await server.token("deploy", "invoke", "read", tenant="one")
            other = await server.token("invoke", tenant="two")
            source = 'import lamina\napp = lamina.App("own")\n@app.function()\ndef mine(n: int):\n    yield from range(n)\n'
            assert (await server.deploy("own", source, owner)).status in (200, 201)
            url = f"ws://127.0.0.1:{server.gateway.port}/v1/functions/mine/ws?n=2"
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers={"Authorization": f"Bearer {other}"})
            async with connect(url, additional_headers={"Authorization": f"Bearer {owner}"}) as socket:
                return refused.value.response.status_code, await received(socket)

    assert run(work) == (404, [0, 1])


# ----------------------------------------------------------------------------------- EventSource


def test_an_event_source_gets_numbered_events_and_is_told_to_stop_when_it_connects_again(server: Shared) -> None:
    async def work() -> tuple[str, Answer, Answer]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.gateway.port)
        writer.write(request("GET", "/v1/functions/counts/events?to=2", accept="text/event-stream", connection="close"))
        first = (await reader.read()).decode()
        await hang_up(writer)
        async with Browser(server.gateway.port) as browser:
            again = await browser.ask("GET", "/v1/functions/counts/events?to=2", last_event_id="3")
            wrong = await browser.ask("GET", "/v1/functions/counts/events?to=two")
        return first, again, wrong

    first, again, wrong = run(work)
    assert "content-type: text/event-stream" in first
    assert 'id: 1\ndata: {"n":0}\n\n' in first and 'id: 2\ndata: {"n":1}\n\n' in first and "id: 3\nevent: end\n" in first
    assert (again.status, wrong.status) == (204, 400)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_reads_streams_and_their_errors(server: Shared) -> None:
    def curl(*arguments: str) -> str:
        done = subprocess.run(["curl", "-sN", *arguments], capture_output=True, check=True, timeout=60, text=True)
        return done.stdout

    url = f"http://127.0.0.1:{server.gateway.port}/v1/functions"
    stream = ("-H", "accept: text/event-stream")
    assert curl(*stream, f"{url}/counts", "-d", '{"to": 2}') == 'data: {"n":0}\n\ndata: {"n":1}\n\nevent: end\ndata: {}\n\n'
    assert curl(f"{url}/counts/events?to=1").startswith('id: 1\ndata: {"n":0}\n\n')
    failed = curl(*stream, f"{url}/fails", "--json", '{"after": 1}')
    assert failed.startswith("data: 0\n\nevent: error\ndata: ") and '"code":"function-failed"' in failed
    assert json.loads(curl(*stream, f"{url}/counts", "--json", '{"to": "many"}'))["status"] == 422
    forged = json.dumps("a\n\nevent: end\ndata: {}\n\nb")
    end = "event: end\ndata: {}\n\n"
    assert curl(*stream, f"{url}/pages", "--json", forged) == f"data: {forged}\n\n{end}"
    spaced = json.dumps({"text": '{"a":\n1}', "kind": "application/json"})
    assert curl(*stream, f"{url}/pages", "--json", spaced) == f'data: {{"a":\ndata: 1}}\n\n{end}'
    value, problem, last, _ = curl(*stream, f"{url}/gives_up", "--json", forged).split("\n\n")
    assert (value, last) == ("data: 1", "event: end\ndata: {}")
    told = json.loads(problem.removeprefix("event: error\ndata: "))
    assert (told["status"], told["code"], told["detail"]) == (404, "not-found", json.loads(forged))
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{url}/counts/ws") == "426"
