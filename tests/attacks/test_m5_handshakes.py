"""M5 over TLS: connections that never complete their handshake. No limit of the server counts them: their number has its own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl

import pytest

from lamina.server import listener
from lamina.server.listener import listen, server_context
from tests.server.test_tls import pair as pair
from tests.serving import run

pytestmark = [pytest.mark.live, pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")]


class Hello(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")


def test_m5_silent_clients_of_tls_give_way_to_newcomers(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "MAX_HANDSHAKES", 8)

    async def work() -> tuple[bytes, int]:
        opened = await listen(Hello, "127.0.0.1", 0, ssl=server_context(*pair))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(opened.close)
            silent = [await asyncio.open_connection("127.0.0.1", opened.port) for _ in range(40)]
            for _, writer in silent:
                stack.callback(writer.transport.abort)
            trusted = ssl.create_default_context(cafile=pair[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port, ssl=trusted, server_hostname="localhost")
            stack.callback(writer.transport.abort)
            said = await reader.readexactly(5)
            ended = [asyncio.create_task(reader.read(1)) for reader, _ in silent]
            done, _ = await asyncio.wait(ended, timeout=1.0)
            for one in ended:
                one.cancel()
            return said, len(silent) - len(done)

    said, held = run(work)
    assert said == b"hello" and held <= 8
