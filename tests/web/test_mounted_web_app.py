"""FastAPI beside functions: `app.mount`, on one port, in a process of its own, with lifespan, WebSockets and function calls."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import policies
from lamina.access.admin_service import AdminService
from lamina.bootstrap import open_local
from lamina.errors import BadValue, LoadFailed
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.admin_server import open_access
from lamina.server.http1 import HttpLimits
from lamina.server.origins import OriginSettings
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import ROOT, managed
from tests.serving import hang_up, run, write_app

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("wsproto")
connect = pytest.importorskip("websockets.asyncio.client").connect

pytestmark = pytest.mark.live

APP = """
import asyncio
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import HTMLResponse, StreamingResponse

import lamina

app = lamina.App("shop")
HERE = Path(__file__).parent


@app.function(scale=lamina.Scale(max=1))
def price(item: str) -> int:
    return len(item)


@app.function(scale=lamina.Scale(max=1))
def words(count: int):
    for number in range(count):
        yield f"word {number}"


@asynccontextmanager
async def lifespan(web):
    (HERE / "started").write_text(str(os.getpid()))
    yield {"greeting": "hello"}
    (HERE / "stopped").write_text("yes")


web = FastAPI(lifespan=lifespan, docs_url="/api-docs", openapi_url="/api.json")


@web.get("/")
async def home(request: Request):
    return HTMLResponse(f"<script>1</script>{request.state.greeting}")


@web.get("/items/{item}")
async def show(item: str, q: str = ""):
    return {"item": item, "price": await price.aio(item), "q": q, "pid": os.getpid()}


@web.get("/blocking/{item}")
def show_blocking(item: str):
    return {"price": price.remote(item)}


@web.get("/story")
async def story():
    async def lines():
        async for word in app.async_client().stream("words", {"count": 3}):
            yield word + "\\n"
    return StreamingResponse(lines(), media_type="text/plain")


@web.post("/size")
async def size(request: Request):
    return {"size": len(await request.body()), "token": request.headers.get("authorization")}


@web.get("/large")
async def large(count: int):
    async def pieces():
        for number in range(count):
            (HERE / "sent").write_text(str(number + 1))
            yield bytes(65_536)
    return StreamingResponse(pieces(), media_type="application/octet-stream")


@web.get("/waits")
async def waits(request: Request):
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)
    (HERE / "left").write_text("yes")


@web.get("/fails")
async def fails():
    raise RuntimeError("no")


@web.get("/split")
async def split():
    return HTMLResponse("x", headers={"x-bad": "a\\r\\nset-cookie: b"})


@web.get("/blocks")
async def blocks():
    while not (HERE / "go").exists():
        time.sleep(0.01)  # and nothing else is done in this process


@web.get("/dies")
async def dies():
    os._exit(3)


@web.websocket("/pours")
async def pours(socket: WebSocket, count: int):
    await socket.accept()
    for number in range(count):
        (HERE / "poured").write_text(str(number + 1))
        await socket.send_bytes(bytes(65_536))


@web.websocket("/talk")
async def talk(socket: WebSocket):
    if socket.query_params.get("no"):
        await socket.close()
        return
    await socket.accept(subprotocol="chat" if socket.scope["subprotocols"] else None)
    try:
        while True:
            text = await socket.receive_text()
            if text == "end":
                await socket.close(4001, "enough")
                return
            await socket.send_json({"text": text, "price": await price.aio(text)})
    finally:
        (HERE / "talked").write_text("yes")


app.mount("/", web)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("shop"), APP)


@asynccontextmanager
async def serving(app: Path, *, ingress: int = 0, cors: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Gateway]:
    live = open_local(str(app), policy=policies.build("edf"))
    listen = ListenConfig(ingress=ingress, limits=HttpLimits(body_bytes=4_000_000), origins=OriginSettings(cors=cors))
    gateway = await open_gateway(live, listen, **options)
    try:
        yield gateway
    finally:
        await gateway.stop(1)


@pytest.fixture(scope="module", params=[0, 1], ids=["one-process", "ingress"])
def server(app: Path, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    import threading

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    opened = serving(app, ingress=request.param)
    try:
        yield do(opened.__aenter__())
    finally:
        do(opened.__aexit__(None, None, None))
        do(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def client(server: Gateway) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


async def until(done: Any) -> None:
    while not done():
        await asyncio.sleep(0.01)


def test_the_web_app_answers_where_the_server_has_no_route_of_its_own(client: Any) -> None:
    home = client.get("/")
    assert home.text == "<script>1</script>hello"  # with the state of its lifespan
    assert "content-security-policy" not in home.headers
    shown = client.get("/items/cat", params={"q": "ü"}).json()
    assert (shown["item"], shown["price"], shown["q"]) == ("cat", 3, "ü")
    assert shown["pid"] != os.getpid()
    assert client.get("/nowhere").json() == {"detail": "Not Found"}
    assert client.get("/api.json").json()["paths"]["/items/{item}"]


def test_routes_of_the_server_go_first(client: Any) -> None:
    assert client.post("/v1/functions/price", json="abc").json() == 3
    assert client.get("/healthz").json()["status"] == "ok"
    assert "/v1/functions/price" in client.get("/openapi.json").json()["paths"]
    assert client.get("/v1/functions/price/nothing").status_code == 404


def test_functions_are_called_from_coroutines_threads_and_streams_of_it(client: Any) -> None:
    assert client.get("/items/elephant").json()["price"] == 8
    assert client.get("/blocking/mouse").json() == {"price": 5}
    assert client.get("/story").text == "word 0\nword 1\nword 2\n"


def test_bodies_reach_it_up_to_the_limit(client: Any) -> None:
    answer = client.post("/size", content=bytes(3_000_000), headers={"authorization": "Bearer of-the-web-app"})
    assert answer.json() == {"size": 3_000_000, "token": "Bearer of-the-web-app"}
    assert client.post("/size", content=bytes(5_000_000)).status_code == 413


def test_what_fails_in_it_is_an_error_of_one_request(client: Any) -> None:
    assert client.get("/fails").status_code == 500
    assert client.get("/split").status_code == 500
    assert client.get("/items/cat").status_code == 200


def test_websockets_reach_it(server: Gateway, app: Path) -> None:
    async def work() -> tuple[Any, int | None, str | None]:
        async with connect(f"{server.url.replace('http', 'ws')}/talk", subprotocols=["chat"]) as socket:
            assert socket.subprotocol == "chat"
            await socket.send("cat")
            told = json.loads(await socket.recv())
            await socket.send("end")
            with pytest.raises(Exception, match="4001"):
                await socket.recv()
            return told, socket.close_code, socket.close_reason

    assert run(work) == ({"text": "cat", "price": 3}, 4001, "enough")


def test_a_websocket_that_it_refuses_is_not_opened(server: Gateway) -> None:
    async def work() -> None:
        with pytest.raises(Exception, match="403"):
            await connect(f"{server.url.replace('http', 'ws')}/talk?no=1")

    run(work)


def test_a_client_that_leaves_is_told_to_the_application(server: Gateway, app: Path) -> None:
    async def work() -> None:
        for name in ("left", "talked"):
            (app.parent / name).unlink(missing_ok=True)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /waits HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with connect(f"{server.url.replace('http', 'ws')}/talk") as socket:
            await socket.send("x")
            await socket.recv()
        await hang_up(writer)
        await until(lambda: (app.parent / "left").exists() and (app.parent / "talked").exists())

    run(work)


def test_a_reader_that_takes_nothing_holds_the_application_up_and_not_the_server(app: Path) -> None:
    async def work() -> int:
        async with serving(app) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=65_536)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /large?count=10000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            sent = app.parent / "sent"
            before = -1
            while (now := int(sent.read_text() or 0) if sent.exists() else 0) == 0 or now != before:
                before = now
                await asyncio.sleep(0.3)  # it makes no more of them for a while
            held = gateway.budget.layers()
            writer.transport.abort()
            assert sum(held.values()) < 4_000_000
            return before

    assert run(work) < 1_000  # of 10,000 pieces


@pytest.mark.parametrize("ingress", [0, 1])
def test_a_reader_that_pauses_gets_all_of_a_stream(app: Path, ingress: int) -> None:
    """Behind an ingress process it was cut off: all that the application sent was sent on."""
    count = 1_000

    async def work() -> int:
        async with serving(app, ingress=ingress) as gateway, asyncio.timeout(60):
            (app.parent / "sent").unlink(missing_ok=True)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=65_536)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /large?count=%d HTTP/1.0\r\nHost: localhost\r\n\r\n" % count)
            sent, before = app.parent / "sent", -1
            while (now := int(sent.read_text() or 0) if sent.exists() else 0) == 0 or now != before:
                before = now
                await asyncio.sleep(0.3)
            assert before < count // 2
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            await reader.readuntil(b"\r\n\r\n")
            came = 0
            while piece := await reader.read(65_536):
                came += len(piece)
            await hang_up(writer)
            return came

    assert run(work) == count * 65_536


@pytest.mark.parametrize("ingress", [0, 1])
def test_a_websocket_that_is_not_read_for_a_while_gets_all_messages(app: Path, ingress: int) -> None:
    count, frame_bytes = 1_000, 65_536 + 10

    async def work() -> int:
        async with serving(app, ingress=ingress) as gateway, asyncio.timeout(60):
            (app.parent / "poured").unlink(missing_ok=True)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=65_536)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            head = f"GET /pours?count={count} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
            writer.write((head + key).encode())
            sent, before = app.parent / "poured", -1
            while (now := int(sent.read_text() or 0) if sent.exists() else 0) == 0 or now != before:
                before = now
                await asyncio.sleep(0.3)
            assert before < count // 2
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            await reader.readuntil(b"\r\n\r\n")
            came = 0
            while came < count * frame_bytes and (piece := await reader.read(65_536)):
                came += len(piece)
            await hang_up(writer)
            return came

    assert run(work) >= count * frame_bytes


def test_one_that_blocks_or_dies_does_so_alone(app: Path) -> None:
    async def work() -> None:
        async with serving(app) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            assert (await client.post("/v1/functions/price", json="abc")).json() == 3
            blocked = asyncio.create_task(client.get("/blocks"))
            waiting = asyncio.create_task(client.get("/items/cat"))
            for _ in range(20):
                assert (await client.post("/v1/functions/price", json="abc")).json() == 3
            assert not blocked.done() and not waiting.done()
            (app.parent / "go").write_text("yes")
            assert (await waiting).status_code == 200
            first = (await client.get("/items/cat")).json()["pid"]
            assert (await client.get("/dies")).status_code == 502
            assert (await client.post("/v1/functions/price", json="abc")).json() == 3
            again = await client.get("/items/cat")
            while again.status_code == 503:
                await asyncio.sleep(0.05)
                again = await client.get("/items/cat")
            assert again.json()["pid"] != first

    run(work)


def test_its_lifespan_begins_before_the_port_opens_and_ends_with_the_server(app: Path) -> None:
    async def work() -> None:
        for name in ("started", "stopped"):
            (app.parent / name).unlink(missing_ok=True)
        async with serving(app):
            assert (app.parent / "started").exists()
        assert (app.parent / "stopped").exists()

    run(work)


def test_users_of_the_web_app_need_no_token_of_the_server_and_its_calls_none_either(app: Path, tmp_path: Path) -> None:
    async def work() -> list[int]:
        store = open_store(str(tmp_path / "store.db"))
        access = await open_access(store)
        await AdminService(access).perform(ROOT, "token/create", {"name": "t"})
        live = open_local(str(app), policy=policies.build("edf"))
        gateway = await open_gateway(live, ListenConfig(host="0.0.0.0"), access=access)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60) as client:
                asked = [
                    await client.get("/items/cat"),
                    await client.post("/size", content=bytes(300_000), headers={"authorization": "Bearer of-the-web-app"}),
                    await client.post("/v1/functions/price", json="abc"),
                    await client.get("/v1/functions"),
                ]
                return [one.status_code for one in asked]
        finally:
            await gateway.stop(1)
            await store.close()

    assert run(work) == [200, 200, 401, 401]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('async def web(scope, receive, send):\n    raise SystemExit(3)\napp.mount("/", web)\n', "process"),
        (
            "async def web(scope, receive, send):\n    await receive()\n"
            '    await send({"type": "lifespan.startup.failed", "message": "no database"})\napp.mount("/x", web)\n',
            "/x did not start: no database",
        ),
    ],
)
def test_a_server_whose_web_app_does_not_start_does_not_start_either(tmp_path: Path, lines: str, says: str) -> None:
    async def work() -> None:
        source = write_app(tmp_path, f'import lamina\n\napp = lamina.App("bad")\n\n\n{lines}')
        with pytest.raises(LoadFailed) as failed:
            await open_gateway(open_local(str(source), policy=policies.build("edf")))
        assert says in failed.value.message

    run(work)


def test_deployed_apps_bring_no_web_app(tmp_path: Path) -> None:
    async def work() -> Any:
        own = write_app(tmp_path, 'import lamina\n\napp = lamina.App("own")\n')
        async with managed(own, tmp_path) as server:
            lines = "async def web(scope, receive, send): ...\napp.mount('/', web)\n"
            return await server.deploy("other", f'import lamina\napp = lamina.App("other")\n{lines}')

    answer = run(work)
    assert answer.status >= 400 and "mount" in answer.json["detail"]


def test_an_application_without_a_lifespan_is_served_below_its_path(tmp_path: Path) -> None:
    async def work() -> tuple[int, Any, int]:
        lines = (
            "async def web(scope, receive, send):\n    assert scope['type'] == 'http'\n"
            "    body = (scope['root_path'] + ' ' + scope['path']).encode()\n"
            "    await send({'type': 'http.response.start', 'status': 201, 'headers': [(b'content-type', b'text/plain')]})\n"
            "    await send({'type': 'http.response.body', 'body': body})\n\n\napp.mount('/web', web)\n"
        )
        source = write_app(tmp_path, f'import lamina\n\napp = lamina.App("plain")\n\n\n{lines}')
        async with serving(source) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            inside, outside = await client.get("/web/a%20b"), await client.get("/webbing")
            return inside.status_code, inside.text, outside.status_code

    assert run(work) == (201, "/web /web/a b", 404)


@pytest.mark.parametrize("path", ["", "shop", "/v1", "/v2/x", "/docs", "//x", 3])
def test_paths_that_cannot_be_mounted_are_refused(path: Any) -> None:
    app = lamina.App("a")

    async def web(scope: Any, receive: Any, send: Any) -> None: ...

    with pytest.raises(BadValue, match="mount"):
        app.mount(path, web)


def test_one_answer_about_its_origin_is_enough(app: Path) -> None:
    async def work() -> Any:
        async with serving(app, cors=("https://shop.example",)) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            allowed = await client.get("/items/cat", headers={"origin": "https://shop.example"})
            foreign = await client.get("/items/cat", headers={"origin": "https://other.example"})
            return allowed.headers.get_list("access-control-allow-origin"), foreign.status_code

    assert run(work) == (["https://shop.example"], 403)
