"""Threats T3, T9, T10, T11: code in disguise, addresses as bait, slow clients, disconnects. Numbers as in the threat list."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.core.actions import StartBatch
from lamina.gateway.bootstrap import GatewayObservers, open_gateway
from lamina.server.http1 import HttpLimits
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import Browser, raw, request, run, served, write_app

pytestmark = pytest.mark.live

SEED = 20261115
URLS = [
    "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/",
    "http://127.0.0.1:1/",
    "file:///etc/passwd",
    "//10.0.0.1/x",
    "gopher://10.0.0.1:70/_x",
    "http://10.0.0.1@10.0.0.2/",
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


def bombs(mark: Path) -> list[bytes]:
    """What would make `mark` if it were run: a pickle by hand, in several wrappings, marshalled code, YAML, a torch file."""
    pickle = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    yaml = f"!!python/object/apply:os.system ['touch {mark}']".encode()
    marshal = bytes([0xE3]) + bytes(40)
    torch = b"PK\x03\x04archive/data.pkl" + pickle
    joblib = b"\x80\x04\x95" + pickle
    return [pickle, base64.b64encode(pickle), yaml, marshal, torch, joblib]


def test_nothing_that_looks_like_code_is_ever_run(app: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    kinds = [
        "application/json", "application/octet-stream", "application/python-pickle", "application/x-pickle", "text/yaml",
        "application/vnd.lamina.value", "application/vnd.bentoml+pickle", "multipart/form-data; boundary=B", "image/png",
    ]  # fmt: skip

    async def work() -> set[int]:
        async with managed(app, tmp_path / "kept") as server, Browser(server.gateway.port) as browser:
            statuses = set()
            for bomb in bombs(mark):
                for kind in kinds:
                    statuses.add((await browser.ask("POST", "/v1/functions/echo", bomb, kind)).status)
                text = bomb.hex()
                answer = await browser.post("/v1/functions/echo", {"x": text}, Payload_Container="pickle", X_Decoder="pickle")
                statuses.add(answer.status)
                answer = await server.ask("PUT", "/v1/apps/tested", bomb, lamina_sha256="0" * 64, lamina_entry="app.py")
                statuses.add(answer.status)
            return statuses

    assert run(work) <= {200, 400}
    assert not mark.exists()


def test_no_address_a_client_sends_is_ever_visited(app: Path, tmp_path: Path) -> None:
    asked: list[Any] = []
    watching = True

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if watching and event in ("socket.connect", "socket.getaddrinfo", "urllib.Request", "http.client.connect"):
            asked.append((event, args[1:] if event == "socket.connect" else args))

    sys.addaudithook(audit)

    async def work() -> tuple[int, int]:
        async with managed(app, tmp_path / "kept") as server:
            ports = (server.gateway.port, server.admin.port)
            for url in URLS:
                async with Browser(server.gateway.port) as browser:
                    for value in (url, {"url": url, "image": url, "x": [url]}, {"$ref": url}):
                        await browser.post("/v1/functions/echo", value, Referer=url, X_Forwarded_Host=url, Traceparent=url)
                    await browser.ask("GET", "/v1/functions", X_Original_Url=url, Forwarded=f"for={url}")
                body = json.dumps({"name": url, "value": url, "tenant": url, "url": url}).encode()
                for path in ("token/create", "tenant/set", "user/invite", "secret/set"):
                    await server.ask("POST", f"/v1/admin/{path}", body)
                await server.ask("PUT", "/v1/apps/tested", url.encode(), lamina_sha256=url, lamina_entry=url)
            return ports

    try:
        ports = run(work)
    finally:
        watching = False
    strangers = [one for one in asked if not any(str(port) in str(one) for port in ports)]
    assert not strangers


async def _p90_ms(port: int, count: int = 150) -> float:
    """Not of the worst, which are the machine's: it is shared with the clients."""
    times = []
    async with Browser(port) as browser:
        for number in range(count):
            begun = time.perf_counter()
            assert (await browser.post("/v1/functions/echo", number)).status == 200
            times.append(1e3 * (time.perf_counter() - begun))
    return sorted(times)[int(0.9 * count)]


def test_five_hundred_slow_senders_and_a_hundred_that_never_read_harm_no_client_and_are_cut_off(app: Path) -> None:
    """A tenth of a second stands for ten here, and 600 for 1,200: the same code, in less of a build's time."""
    limits = HttpLimits(head_s=1.0, body_idle_s=1.0, write_s=1.0)

    async def drip(port: int, start: bytes) -> bool:
        """True: it was cut off."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(start)
            for _ in range(40):
                await asyncio.sleep(0.3)
                writer.write(b"a")
                if reader.at_eof() or writer.is_closing():
                    return True
                with contextlib.suppress(TimeoutError):
                    if (await asyncio.wait_for(reader.read(1000), 0.001)) == b"":
                        return True
        except ConnectionError:
            return True
        finally:
            writer.close()
        return False

    async def deaf(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        body = b'"' + b"x" * 200_000 + b'"'
        for _ in range(5):
            writer.write(request("POST", "/v1/functions/echo", body))
        await asyncio.sleep(3)
        writer.close()

    async def work() -> tuple[float, float, list[bool]]:
        async with served(app, limits=limits) as gateway:
            before = await _p90_ms(gateway.port)
            head = b"POST /v1/functions/echo HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
            slow = [asyncio.create_task(drip(gateway.port, head)) for _ in range(500)]
            mute = [asyncio.create_task(deaf(gateway.port)) for _ in range(100)]
            await asyncio.sleep(0.5)
            during = min([await _p90_ms(gateway.port) for _ in range(3)])
            cut = await asyncio.gather(*slow)
            await asyncio.gather(*mute)
            while gateway.server.connections:
                await asyncio.sleep(0.01)
            return before, during, cut

    before, during, cut = run(work)
    assert all(cut), f"{cut.count(False)} were not cut off"
    assert during <= max(10 * before, 100.0), f"p90 {before:.1f} ms, then {during:.1f} ms"


def test_a_client_that_leaves_before_the_answer_is_not_worked_for_and_leaves_nothing_behind(app: Path) -> None:
    rng = random.Random(SEED)
    leavers = 1_000

    async def work() -> tuple[int, dict[str, Any]]:
        async with served(app) as gateway:
            state = gateway.driver.controller.state

            async def leave() -> None:
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                data = request("POST", "/v1/functions/echo", b'"some words to be sent"')
                writer.write(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
                await asyncio.sleep(rng.random() * 0.002)
                writer.transport.abort()

            for _ in range(leavers // 100):
                await asyncio.gather(*(leave() for _ in range(100)))
            async with Browser(gateway.port) as browser:
                assert (await browser.post("/v1/functions/echo", 1)).status == 200
            while state.runs or gateway.server.connections:
                await asyncio.sleep(0.01)
            queued = sum(len(function.queue) for function in state.functions.values())
            return queued, dict(gateway.driver.data._runs)

    assert run(work) == (0, {})


def test_what_waits_for_a_client_that_has_left_is_never_begun(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        'import os, time, lamina\napp = lamina.App("naps")\n'
        "@app.function(scale=lamina.Scale(min=1, max=1))\ndef nap(until):\n"
        "    while until and not os.path.exists(until):\n        time.sleep(0.01)\n        lamina.context().heartbeat()\n"
    )
    all_left = tmp_path / "all_left"
    begun: list[str] = []

    def watch(now_us: int, event: Any, actions: list[Any]) -> None:
        begun.extend(job.call_id for action in actions if isinstance(action, StartBatch) for job in action.jobs)

    async def work() -> None:
        gateway = await open_gateway(open_local(str(app)), observers=GatewayObservers(on_event=watch))
        try:
            async with Browser(gateway.port) as browser:
                await browser.post("/v1/functions/nap", "")
                busy = asyncio.create_task(browser.post("/v1/functions/nap", str(all_left)))
                while len(begun) < 2:
                    await asyncio.sleep(0.01)
                leavers = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(300)]
                for _, writer in leavers:
                    writer.write(request("POST", "/v1/functions/nap", b'""'))
                state = gateway.driver.controller.state
                while len(state.runs) < 301:
                    await asyncio.sleep(0.01)
                for _, writer in leavers:
                    writer.transport.abort()
                while len(state.runs) > 1:
                    await asyncio.sleep(0.01)
                all_left.touch()
                assert (await busy).status == 200
        finally:
            await gateway.stop(5)

    run(work)
    assert len(begun) - 2 <= 3, "of 300 that left, at most 1 % were worked for"


def test_a_thousand_mutated_requests_to_management_change_nothing_and_crash_nothing(app: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    allowed = {200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 503, 504, 505}
    paths = ["/v1/admin/token/list", "/v1/admin/user/list", "/v1/apps", "/v1/whoami", "/v1/logs?tail=5", "/v1/auth/log-out"]

    def mutated() -> bytes:
        body = json.dumps({"name": "x", "limit": 5, "after": "k", "deep": [[1]]}).encode()
        plain = request(rng.choice(["POST", "GET", "PUT", "DELETE"]), rng.choice(paths), body)
        data = bytearray(plain)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    del data[at : at + rng.randint(1, 30)]
                case 2:
                    data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 20)))
                case _:
                    data[at:at] = data[at : at + 40] * rng.randint(1, 20)
            data = data or bytearray(b"x")
        return bytes(data)

    async def work() -> tuple[set[int], int]:
        async with managed(app, tmp_path / "kept") as server:
            statuses: set[int] = set()
            for _ in range(12):
                answers = await asyncio.gather(*(raw(server.admin.port, mutated(), 0.05) for _ in range(84)))
                statuses |= {answer.status for answer in answers if answer is not None}
                assert (await server.ask("GET", "/v1/whoami")).status == 200
            access = server.admin.access
            return statuses, len(access.tokens) + len(access.people) + len(access.tenants) + len(access.secrets)

    statuses, made = run(work)
    assert statuses <= allowed, f"seed {SEED}: {statuses - allowed}"
    assert made == 0
