"""Brokers: messages that nothing holds back are taken within a bound."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("paho.mqtt.client")
from lamina.state.brokers import BrokerMessage
from lamina.state.brokers.mqtt import MAX_UNHELD, open_consumer

TOPIC = b"yard/gate"
FLOOD = 3 * MAX_UNHELD


async def packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Type and content of a packet of less than 16 KiB."""
    kind, size = (await reader.readexactly(1))[0], 0
    for shift in (0, 7):
        (byte,) = await reader.readexactly(1)
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return kind >> 4, await reader.readexactly(size)


def published(body: bytes, qos: int = 0) -> bytes:
    content = len(TOPIC).to_bytes(2, "big") + TOPIC + (b"\0\1" if qos else b"") + b"\0" + body
    return bytes([0x30 | qos << 1, len(content)]) + content


def test_messages_of_qos_0_do_not_pile_up() -> None:
    """No acknowledgement is due, so a broker sends all there are; each waited in memory for its run to be on disk."""

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await packet(reader)
        writer.write(b"\x20\x03\0\0\0")
        while (found := await packet(reader))[0] != 8:
            pass
        writer.write(b"\x90\x04" + found[1][:2] + b"\0\1")
        for number in range(FLOOD):
            writer.write(published(b"%d" % number))
        writer.write(published(b"last", qos=1))
        await reader.read()
        writer.close()

    async def work() -> list[bytes]:
        taken: list[bytes] = []
        has_all, goes_on = asyncio.Event(), asyncio.Event()

        async def deliver(message: BrokerMessage) -> None:
            taken.append(message.body)
            if message.body == b"last":
                has_all.set()
            await goes_on.wait()

        async with await asyncio.start_server(broker, "127.0.0.1", 0) as server, asyncio.timeout(60):
            port = server.sockets[0].getsockname()[1]
            consumer = open_consumer(f"mqtt://127.0.0.1:{port}", TOPIC.decode(), "test")
            running = asyncio.create_task(consumer.run(deliver, lambda: None))
            await has_all.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return taken

    taken = asyncio.run(work())
    assert taken == [b"%d" % number for number in range(MAX_UNHELD)] + [b"last"]
