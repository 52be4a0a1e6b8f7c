"""MQTT 5 by paho-mqtt: a session that outlives connections, and acknowledgements of our own.

The library's thread reads the socket; messages come to the loop. The broker sends as many as may be in flight, and sends them
again on the next connection if they were not acknowledged. MQTT has no id of a message: a publisher that wants each to start
one run gives it the user property `message-id`. Messages of QoS 0 are not acknowledged, so nothing holds a publisher of them up:
those that find no room are dropped, as such messages may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from lamina.state.brokers import CONNECT_S, MAX_IN_FLIGHT, BrokerMessage, Consumer, Deliver, MessagesInFlight

log = logging.getLogger("lamina")

MAX_UNHELD, MAX_UNHELD_BYTES = 1_000, 32 * 2**20
"""Messages of QoS 0 that wait for their runs."""

SESSION_S = 7 * 24 * 3_600
"""How long the broker keeps messages for a server that is not there."""

KEEPALIVE_S = 20


def open_consumer(url: str, topic: str, name: str) -> Consumer:
    return MqttConsumer(url, topic, name)


class UnheldMessages:
    """Messages of QoS 0 of one connection that wait for their runs; taken by the library's thread."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._lock = threading.Lock()
        self._count = self._bytes = 0
        self._has_dropped = False

    def take(self, size: int) -> bool:
        with self._lock:
            has_room = self._count < MAX_UNHELD and (self._bytes + size <= MAX_UNHELD_BYTES or not self._count)
            is_first, self._has_dropped = not has_room and not self._has_dropped, self._has_dropped or not has_room
            if has_room:
                self._count += 1
                self._bytes += size
        if is_first:
            log.warning("broker, %s: more messages of QoS 0 than can be taken; some are dropped", self._topic)
        return has_room

    def give(self, size: int) -> None:
        with self._lock:
            self._count -= 1
            self._bytes -= size
            self._has_dropped = self._has_dropped and self._count > 0


class MqttConsumer:
    def __init__(self, url: str, topic: str, name: str) -> None:
        self._url, self._topic, self._name = urlsplit(url), topic, name
        self._is_forgotten = False

    def forget(self) -> None:
        self._is_forgotten = True

    async def run(self, deliver: Deliver, on_connected: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[paho.MQTTMessage] = asyncio.Queue()
        lost: asyncio.Future[None] = loop.create_future()

        def lose(why: str) -> None:
            if not lost.done():
                lost.set_exception(ConnectionError(why))

        def connected(client: paho.Client, data: Any, flags: Any, reason: Any, properties: Any) -> None:
            if reason.is_failure:
                loop.call_soon_threadsafe(lose, f"it refused the connection: {reason}")
            else:  # what is retained comes with the first subscription, and not again with every connection
                client.subscribe(
                    self._topic, options=SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
                )

        def subscribed(client: paho.Client, data: Any, mid: int, reasons: Any, properties: Any) -> None:
            if any(reason.is_failure for reason in reasons):
                loop.call_soon_threadsafe(lose, f"it refused the topic: {reasons[0]}")
            else:
                loop.call_soon_threadsafe(on_connected)

        client = paho.Client(
            CallbackAPIVersion.VERSION2, self._name, protocol=paho.MQTTv5, reconnect_on_failure=False, manual_ack=True
        )
        client.on_connect, client.on_subscribe = connected, subscribed
        wanted = self._topic.split("/", 2)[2] if self._topic.startswith("$share/") else self._topic
        unheld = UnheldMessages(self._topic)

        def received(client: paho.Client, data: Any, message: paho.MQTTMessage) -> None:
            if message.qos or unheld.take(len(message.payload)):
                _to_loop(loop, messages.put_nowait, message)

        client.message_callback_add(wanted, received)
        client.on_disconnect = lambda client, data, flags, reason, properties: _to_loop(loop, lose, f"connection lost: {reason}")
        if self._url.username:
            client.username_pw_set(unquote(self._url.username), unquote(self._url.password or ""))
        if self._url.scheme == "mqtts":
            client.tls_set_context(ssl.create_default_context())
        terms = Properties(PacketTypes.CONNECT)
        terms.SessionExpiryInterval = SESSION_S
        terms.ReceiveMaximum = MAX_IN_FLIGHT
        host, port = self._url.hostname or "", self._url.port or (8883 if self._url.scheme == "mqtts" else 1883)
        client.connect_timeout = CONNECT_S
        in_flight = MessagesInFlight(lose)
        try:
            await asyncio.to_thread(client.connect, host, port, KEEPALIVE_S, "", 0, False, terms)
            client.loop_start()
            while True:
                getting = asyncio.ensure_future(messages.get())
                try:
                    waits: list[asyncio.Future[Any]] = [getting, lost]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    getting.cancel()
                if lost.done():
                    lost.result()
                in_flight.start(_handle(client, getting.result(), deliver, unheld))
        finally:
            in_flight.cancel()
            if not lost.done():
                lost.cancel()
            elif not lost.cancelled():
                lost.exception()
            with contextlib.suppress(Exception):
                self._leave(client)
            await asyncio.shield(asyncio.to_thread(client.loop_stop))

    def _leave(self, client: paho.Client) -> None:
        terms = Properties(PacketTypes.DISCONNECT)
        terms.SessionExpiryInterval = 0 if self._is_forgotten else SESSION_S
        client.on_disconnect = None
        client.disconnect(properties=terms)


def _to_loop(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *arguments: Any) -> None:
    """From the library's thread, which may outlive the loop by a moment."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act, *arguments)


async def _handle(client: paho.Client, message: paho.MQTTMessage, deliver: Deliver, unheld: UnheldMessages) -> None:
    pairs = getattr(message.properties, "UserProperty", None) or []
    id = next((value for key, value in pairs if key == "message-id"), "")
    try:
        await deliver(BrokerMessage(message.topic, bytes(message.payload), id))
    finally:
        if not message.qos:
            unheld.give(len(message.payload))
    client.ack(message.mid, message.qos)
