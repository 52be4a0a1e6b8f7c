"""Memory over gRPC and through ingress processes: the same budget, the same token on the head (C1, C2, M5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lamina.access.access_control import AccessControl
from lamina.gateway.bootstrap import ListenConfig, open_gateway
from lamina.server import grpc
from lamina.server.grpc import GrpcMethod, GrpcServer, OnMessage, RpcContext, _Call
from lamina.server.http2.connection import Http2Connection
from lamina.server.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from lamina.server.http2.hpack import HpackDecoder, encode
from lamina.server.http2.stream import Http2Stream
from lamina.server.memory_budget import MemoryBudget
from lamina.store.open import open_store
from tests.attacks.test_memory import Client, living, no_garbage_collector, refuse_head, until
from tests.serving import APP, write_app

MIB = 2**20


class Bytes:
    """A message that is its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class EchoService:
    """Answers with the length of the message, at once or when it is told."""

    methods = {b"/s/Echo": GrpcMethod("Echo", Bytes, False), b"/s/Hold": GrpcMethod("Hold", Bytes, False)}

    def __init__(self) -> None:
        self.held: list[OnMessage] = []

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        if name == "Hold":
            self.held.append(then)
            return lambda: self.held.remove(then)
        then(Bytes(b"%d" % len(message.SerializeToString())))
        return None

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: Callable[[], None]) -> None:
        raise NotImplementedError


def serve(script: Callable[[int, GrpcServer, EchoService], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> Any:
        service = EchoService()
        server = GrpcServer(service, 32 * MIB, **more)  # type: ignore[arg-type]
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(script(port, server, service), 30)
        finally:
            await server.stop(0)

    return asyncio.run(main())


class Call(Client):
    """One call on a connection of its own."""

    async def begin(self, size: int, sent: int, path: bytes = b"/s/Echo", **metadata: bytes) -> None:
        """Announce a message of `size` bytes and send the first `sent`."""
        headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"content-type", b"application/grpc")]
        headers += [(name.encode(), value) for name, value in metadata.items()]
        await self.send(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, encode(headers)))
        await self.more(b"\0" + size.to_bytes(4, "big") + bytes(sent), is_last=sent == size)

    async def more(self, data: bytes, is_last: bool) -> None:
        for at in range(0, len(data), 2**17):
            piece = data[at : at + 2**17]
            await self.send(frame(DATA, END_STREAM if is_last and at + 2**17 >= len(data) else 0, 1, piece))

    async def status(self) -> int:
        """The gRPC status of the answer."""
        decoder = HpackDecoder(8_192, 100)
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == HEADERS:
                found = dict(decoder.decode(payload) or [])
                if b"grpc-status" in found:
                    return int(found[b"grpc-status"])


def test_messages_over_grpc_count_in_the_share_of_their_tenant() -> None:
    """As bodies over HTTP do: connections from many addresses do not make it larger."""

    def check_head(headers: Any, then: Callable[[str], None]) -> None:
        then(headers[b"authorization"].decode())

    budget = MemoryBudget(10 * MIB, address_share=1.0, tenant_share=0.3)

    async def script(port: int, server: GrpcServer, service: EchoService) -> list[int]:
        async with Call(port) as first, Call(port) as second, Call(port) as other:
            await first.begin(2 * MIB, MIB, authorization=b"acme")
            await until(lambda: budget.layers().get("bodies", 0) > 2 * MIB)
            await second.begin(2 * MIB, MIB, authorization=b"acme")
            refused = await second.status()
            await other.begin(2 * MIB, 2 * MIB, authorization=b"evil")
            return [refused, await other.status()]

    assert serve(script, budget=budget, check_head=check_head) == [8, 0]
    budget.check()
    assert budget.refusals["tenant"] == 1 and not budget.layers()["bodies"]


def test_c1_grpc_clients_that_leave_give_back_everything_at_once() -> None:
    async def script(port: int, server: GrpcServer, service: EchoService) -> int:
        async def leave(number: int) -> None:
            async with Call(port) as call:
                if number % 3:
                    await call.begin(2 * MIB, number * 2**15)
                else:
                    await call.begin(2 * MIB, 2 * MIB)
                    await call.status()

        with no_garbage_collector():
            await asyncio.gather(*(leave(number) for number in range(30)))
            await until(lambda: living(Http2Connection, Http2Stream, _Call) == 0)
            server.budget.check()
            return server.budget.used_bytes

    assert serve(script) == 0


def test_c2_a_grpc_token_is_checked_before_a_message_is_read() -> None:
    async def script(port: int, server: GrpcServer, service: EchoService) -> tuple[int, int, int]:
        async with Call(port) as wrong, Call(port) as right:
            await wrong.begin(31 * MIB, 1000)
            refused = await wrong.status()
            held = server.budget.layers()["bodies"]
            await right.begin(MIB, 1000, authorization=b"Bearer right")
            await right.more(bytes(MIB - 1000), is_last=True)
            return refused, held, await right.status()

    assert serve(script, check_head=refuse_head) == (16, 0, 0)


def test_c2_grpc_messages_take_room_in_the_budget_until_they_are_answered() -> None:
    async def script(port: int, server: GrpcServer, service: EchoService) -> tuple[int, int, int, int]:
        async with contextlib.AsyncExitStack() as stack:
            first, second, third = [await stack.enter_async_context(Call(port)) for _ in range(3)]
            await first.begin(8 * MIB, 8 * MIB, b"/s/Hold")
            await until(lambda: len(service.held) == 1)
            await second.begin(8 * MIB, 1000)
            refused = await second.status()
            share = server.budget.address_bytes("127.0.0.1") // MIB
            service.held.pop()(Bytes(b""))
            answered = await first.status()
            await third.begin(8 * MIB, 8 * MIB)
            return refused, share, answered, await third.status()

    assert serve(script, budget=MemoryBudget(24 * MIB)) == (8, 8, 0, 0)


def test_m5_idle_grpc_connections_make_room_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "CONNECTIONS", 4)

    async def script(port: int, server: GrpcServer, service: EchoService) -> list[int]:
        async with contextlib.AsyncExitStack() as stack:
            busy = await stack.enter_async_context(Call(port))
            await busy.begin(10, 10, b"/s/Hold")
            await until(lambda: len(service.held) == 1)
            found = []
            for _ in range(12):
                call = await stack.enter_async_context(Call(port))
                await call.begin(10, 10)
                found.append(await call.status())
            service.held.pop()(Bytes(b""))
            return [*found, await busy.status()]

    assert serve(script) == [0] * 13


@pytest.mark.live
def test_c2_ingress_processes_check_the_token_on_the_head_too(tmp_path: Path) -> None:
    """The controller knows the tokens; the process that reads the body asks it, and reads no further until it is told."""
    from lamina.bootstrap import open_local

    async def main() -> tuple[int, int]:
        store = open_store(str(tmp_path / "t.db"))
        access = AccessControl(store)
        await access.load()
        runtime = open_local(str(write_app(tmp_path, APP)))
        gateway = await open_gateway(runtime, ListenConfig(ingress=1, memory_bytes=512 * MIB), store=store, access=access)
        head = b"POST /v1/functions/echo HTTP/1.1\r\nHost: 127.0.0.1\r\n%sContent-Length: %d\r\n\r\n"
        try:
            async with Client(gateway.port) as wrong, Client(gateway.port) as right:
                refused = await wrong.ask(head % (b"Authorization: Bearer wrong\r\n", 31 * MIB) + b'"x')
                await right.send(head % (b"", 2 * MIB) + b'"')
                return refused, await right.ask(b"x" * (2 * MIB - 2) + b'"')
        finally:
            await gateway.stop(2)

    assert asyncio.run(main()) == (401, 200)
