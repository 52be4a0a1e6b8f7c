"""Message brokers: subscriptions that start runs, one back end by file name for each protocol.

A broker is the operator's: triggers name it, and never an address, so that no client makes the server connect anywhere.
Delivery is at least once: a message is acknowledged when the run that it starts is on disk, or when it was set aside because it
can start none. A connection that is lost is made again after a pause that grows; what was not acknowledged comes again.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from lamina.errors import BadValue

log = logging.getLogger("lamina")

SCHEMES = {
    "mqtt": "mqtt",
    "mqtts": "mqtt",
    "nats": "nats",
    "tls": "nats",
    "amqp": "amqp",
    "amqps": "amqp",
}
"""Back ends by the scheme of an address."""

MAX_IN_FLIGHT = 20
"""Messages of one subscription that may wait for their runs to be on disk."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
CONNECT_S = 10.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Broker(Struct, frozen=True):
    """A broker as the operator names it. One with a `tenant` is for triggers of that tenant, and for the operator's."""

    name: str
    url: str
    tenant: str = ""

    def serves(self, tenant: str) -> bool:
        return not tenant or tenant == self.tenant


class BrokerMessage(Struct, frozen=True):
    """A message. `id` is the same if it comes again; "": the broker does not say."""

    topic: str
    body: bytes
    id: str = ""


Deliver = Callable[[BrokerMessage], Awaitable[None]]
"""Returns when the message may be acknowledged; raises if it is to come again."""


class MessagesInFlight:
    """Messages of one connection whose runs are not on disk yet. If one cannot be handled, `lose` ends the connection: what was
    not acknowledged comes again with the next."""

    def __init__(self, lose: Callable[[str], None]) -> None:
        self._lose = lose
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, handling: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(handling)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(f"a message was not taken: {error}")

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


class Consumer(Protocol):
    """Consumer of one topic, in the module of its protocol. `name` is the same after a restart."""

    async def run(self, deliver: Deliver, on_connected: Callable[[], None]) -> None:
        """Consume until the connection is lost, and raise. If `is_forgotten` when it is cancelled, leave nothing at the
        broker."""
        ...

    def forget(self) -> None:
        """What the broker keeps for this consumer is not needed any more."""
        ...


def parse_broker(text: str) -> Broker:
    """Broker of an option, `NAME=URL[,tenant=T]`."""
    name, _, rest = text.partition("=")
    url, _, tenant = rest.partition(",tenant=")
    if not _NAME.fullmatch(name) or urlsplit(url).scheme not in SCHEMES or not urlsplit(url).hostname:
        shown = f"{name}={without_password(url)}"
        raise BadValue(
            f"--broker: {shown[:120]!r} is no broker", hint=f"NAME=URL[,tenant=T], with one of {', '.join(SCHEMES)}://HOST:PORT"
        )
    return Broker(name, url, tenant)


def without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)


def open_consumer(broker: Broker, topic: str, name: str) -> Consumer:
    """Consumer by the scheme of the broker's address. Raises `BadValue` where its package is not installed."""
    module = SCHEMES[urlsplit(broker.url).scheme]
    try:
        found = importlib.import_module(f"lamina.state.brokers.{module}")
    except ModuleNotFoundError as error:
        raise BadValue(f"broker {broker.name}: {error.name!r} is not installed", hint="pip install 'lamina[brokers]'") from None
    made: Consumer = found.open_consumer(broker.url, topic, name)
    return made


class BrokerSubscription:
    """Subscription of a trigger: consumes, and connects again for as long as it is open."""

    def __init__(self, broker: Broker, topic: str, name: str, deliver: Deliver) -> None:
        self.broker, self._topic, self._name, self._deliver = broker, topic, name, deliver
        self.state = "connecting"
        self.received = 0
        self._pause_s = FIRST_PAUSE_S
        self._consumer = open_consumer(broker, topic, name)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self, *, forget: bool = False) -> None:
        """End it; with `forget` for good: the broker keeps no more messages for it."""
        if forget:
            self._consumer.forget()
        self._task.cancel()

    @property
    def is_closed(self) -> bool:
        return self._task.done()

    async def closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._consumer.run(self._receive, self._on_connected)
                why = "the broker closed the connection"
            except Exception as error:
                said = without_password(str(error)) or type(error).__name__
                why = f"{said[:200]}"
            if self.state != f"waiting: {why}":
                log.warning("broker %s, %s: %s; it is tried again", self.broker.name, self._topic, why)
            self.state = f"waiting: {why}"
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))  # so that servers do not all come at once
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _on_connected(self) -> None:
        if self.state != "connected":
            log.info("broker %s, %s: connected", self.broker.name, self._topic)
        self.state, self._pause_s = "connected", FIRST_PAUSE_S

    async def _receive(self, message: BrokerMessage) -> None:
        self.received += 1
        await self._deliver(message)
