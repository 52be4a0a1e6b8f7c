"""AMQP 0-9-1 (RabbitMQ) by aio-pika: a durable queue, acknowledged message by message.

A queue that is not there is made. The `message_id` of a message, if its publisher gave one, lets it start one run even if it
comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import ChannelNotFoundEntity

from lamina.state.brokers import CONNECT_S, MAX_IN_FLIGHT, BrokerMessage, Consumer, Deliver, MessagesInFlight


def open_consumer(url: str, topic: str, name: str) -> Consumer:
    return AmqpConsumer(url, topic, name)


class AmqpConsumer:
    def __init__(self, url: str, topic: str, name: str) -> None:
        self._url, self._topic, self._name = url, topic, name

    def forget(self) -> None:
        """A queue is not ours alone: it stays."""

    async def run(self, deliver: Deliver, on_connected: Callable[[], None]) -> None:
        link = await aio_pika.connect(self._url, timeout=CONNECT_S)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def lose(sender: object, error: BaseException | None = None) -> None:
            if not lost.done():
                lost.set_exception(ConnectionError(f"connection lost: {error}" if error else "connection lost"))

        in_flight = MessagesInFlight(lambda why: lose(None, ConnectionError(why)))

        async def received(message: AbstractIncomingMessage) -> None:
            in_flight.start(_handle(message, self._topic, deliver))

        try:
            link.close_callbacks.add(lose)
            channel, queue = await self._queue(link)
            channel.close_callbacks.add(lose)
            await channel.set_qos(prefetch_count=MAX_IN_FLIGHT)
            await queue.consume(received)
            on_connected()
            await lost
        finally:
            in_flight.cancel()
            if not lost.cancel() and not lost.cancelled():
                lost.exception()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(link.close(), CONNECT_S)

    async def _queue(self, link: aio_pika.abc.AbstractConnection) -> tuple[AbstractChannel, AbstractQueue]:
        """The queue as it is, whatever its arguments; a durable one if there is none."""
        try:
            channel = await link.channel()
            return channel, await channel.declare_queue(self._topic, passive=True)
        except ChannelNotFoundEntity:  # which has closed the channel
            channel = await link.channel()
            return channel, await channel.declare_queue(self._topic, durable=True)


async def _handle(message: AbstractIncomingMessage, topic: str, deliver: Deliver) -> None:
    await deliver(BrokerMessage(message.routing_key or topic, message.body, message.message_id or ""))
    with contextlib.suppress(aio_pika.exceptions.ChannelInvalidStateError):  # lost meanwhile: it comes again
        await message.ack()
