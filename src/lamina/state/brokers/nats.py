"""NATS JetStream by nats-py: a durable pull consumer of a subject, acknowledged message by message.

The stream of the subject must exist. The place of a message in its stream is its id, so one that comes again starts nothing new.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import nats
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from lamina.state.brokers import CONNECT_S, MAX_IN_FLIGHT, BrokerMessage, Consumer, Deliver, MessagesInFlight

ACK_WAIT_S = 15.0
_FETCH_S = 2.0


def open_consumer(url: str, topic: str, name: str) -> Consumer:
    return NatsConsumer(url, topic, name)


class NatsConsumer:
    def __init__(self, url: str, topic: str, name: str) -> None:
        self._url, self._topic, self._name = url, topic, name
        self._is_forgotten = False

    def forget(self) -> None:
        self._is_forgotten = True

    async def run(self, deliver: Deliver, on_connected: Callable[[], None]) -> None:
        link = await nats.connect(self._url, allow_reconnect=False, connect_timeout=int(CONNECT_S), error_cb=_ignore)
        lost: list[str] = []
        in_flight = MessagesInFlight(lost.append)
        room = asyncio.Semaphore(MAX_IN_FLIGHT)
        stream, js = "", link.jetstream()
        try:
            try:
                stream = await js.find_stream_name_by_subject(self._topic)
            except NotFoundError:
                raise ConnectionError(f"no stream has the subject {self._topic!r}: nats stream add") from None
            terms = ConsumerConfig(
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_S,
                max_ack_pending=MAX_IN_FLIGHT,
                deliver_policy=DeliverPolicy.NEW,
            )
            source = await js.pull_subscribe(self._topic, self._name, stream=stream, config=terms)
            on_connected()
            while True:
                await room.acquire()
                try:
                    (message,) = await source.fetch(1, _FETCH_S)
                except NatsTimeout:
                    room.release()
                    if link.is_closed or lost:
                        raise ConnectionError(lost[0] if lost else "connection lost") from None
                    continue
                task = in_flight.start(_handle(message, stream, deliver))
                task.add_done_callback(lambda _: room.release())
        finally:
            in_flight.cancel()
            with contextlib.suppress(Exception):
                if self._is_forgotten and stream:
                    await asyncio.wait_for(js.delete_consumer(stream, self._name), _FETCH_S)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(link.close(), _FETCH_S)


async def _handle(message: Any, stream: str, deliver: Deliver) -> None:
    place = message.metadata
    id = f"{stream}/{place.sequence.stream}/{place.timestamp.timestamp():.6f}"  # a stream that is made again counts from one
    working = asyncio.get_running_loop().create_task(_keep_working(message))
    try:
        await deliver(BrokerMessage(message.subject, message.data, id))
    finally:
        working.cancel()
    await message.ack()


async def _keep_working(message: Any) -> None:
    """A message whose run cannot be written yet does not come again meanwhile."""
    while True:
        await asyncio.sleep(ACK_WAIT_S / 3)
        await message.in_progress()


async def _ignore(error: Exception) -> None:
    """What goes wrong is noticed where it is waited for."""
