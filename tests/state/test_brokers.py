"""Messages of real brokers start runs: at least once, again after a connection or the server is lost, poison set aside."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.servers import free_port

import lamina
from lamina.bootstrap import open_local
from lamina.errors import BadValue, FunctionFailed
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.state.brokers import Broker, parse_broker
from lamina.store.open import open_store
from tests.serving import run, write_app

pytestmark = [pytest.mark.live, pytest.mark.slow]

APP = """
import lamina

app = lamina.App("plant")


@app.function(scale=lamina.Scale(max=1))
def note(topic, message):
    app.state.counter("notes").add(1)
    app.state.map("seen")[str(message)] = topic


@app.on_message("yard", "{topic}")
@app.workflow()
async def arrived(topic, message):
    await note(topic, message)


@app.function(scale=lamina.Scale(max=1))
def look():
    return {{"notes": app.state.counter("notes").value, "seen": app.state.map("seen").entries}}
"""
PROGRAMS = {"mqtt": "mosquitto", "nats": "nats-server", "amqp": "rabbitmq-server"}
MODULES = {"mqtt": "paho.mqtt.client", "nats": "nats", "amqp": "aio_pika"}
PLACES = f"/usr/lib/rabbitmq/bin:{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
"""The server of RabbitMQ itself first: the script on the usual path becomes another user."""

TOPICS = {"mqtt": "yard/gate", "nats": "yard.gate", "amqp": "yard-gate"}


@dataclass
class BrokerProcess:
    """A broker from the system's packages, on a port of loopback, with its data in a folder."""

    kind: str
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    names_port: int = 0  #: of the daemon that Erlang starts

    @property
    def url(self) -> str:
        return f"{self.kind}://127.0.0.1:{self.port}"

    def start(self) -> None:
        found = shutil.which(PROGRAMS[self.kind], path=PLACES)
        assert found is not None
        command, env = [found], dict(os.environ)
        if self.kind == "mqtt":
            config = self.folder / "mosquitto.conf"
            config.write_text(
                f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\nautosave_interval 1\n"
                f"autosave_on_changes true\npersistence_location {self.folder}/\n" + ("user root\n" if os.geteuid() == 0 else "")
            )
            command += ["-c", str(config)]
        elif self.kind == "nats":
            command += ["-js", "-sd", str(self.folder), "-p", str(self.port), "-a", "127.0.0.1"]
        else:
            (self.folder / "enabled").write_text("[].\n")
            self.names_port = self.names_port or free_port()
            env |= {
                "ERL_EPMD_PORT": str(self.names_port),
                "ERL_EPMD_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODENAME": f"lamina{self.port}@localhost",
                "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODE_PORT": str(self.port),
                "RABBITMQ_DIST_PORT": str(free_port()),
                "RABBITMQ_MNESIA_BASE": str(self.folder),
                "RABBITMQ_LOG_BASE": str(self.folder),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled"),
                "RABBITMQ_PID_FILE": str(self.folder / "pid"),
                "HOME": str(self.folder),
            }
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder, start_new_session=True
        )
        until_s = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None:
                pytest.skip(f"{PROGRAMS[self.kind]} cannot be started here")
            assert time.monotonic() < until_s, "the broker does not listen"
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 15)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
        if self.names_port:
            env = {**os.environ, "ERL_EPMD_PORT": str(self.names_port), "ERL_EPMD_ADDRESS": "127.0.0.1"}
            subprocess.run(["epmd", "-kill"], env=env, capture_output=True, check=False)

    async def prepare(self) -> None:
        """What must be there before a subscription."""
        if self.kind == "nats":
            import nats

            link = await nats.connect(self.url)
            await link.jetstream().add_stream(name="YARD", subjects=["yard.>"])
            await link.close()

    async def publish(self, *bodies: bytes, ids: tuple[str, ...] = ()) -> None:
        topic = TOPICS[self.kind]
        if self.kind == "mqtt":
            await asyncio.to_thread(self._publish_mqtt, topic, bodies, ids)
        elif self.kind == "nats":
            import nats

            link = await nats.connect(self.url)
            for body in bodies:
                await link.jetstream().publish(topic, body)
            await link.close()
        else:
            import aio_pika

            amqp = await aio_pika.connect(self.url)
            channel = await amqp.channel()
            for at, body in enumerate(bodies):
                message = aio_pika.Message(body, message_id=ids[at] if ids else None)
                await channel.default_exchange.publish(message, topic)
            await amqp.close()

    def _publish_mqtt(self, topic: str, bodies: tuple[bytes, ...], ids: tuple[str, ...]) -> None:
        import paho.mqtt.client as paho
        from paho.mqtt.enums import CallbackAPIVersion
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        for at, body in enumerate(bodies):
            terms = Properties(PacketTypes.PUBLISH)
            if ids:
                terms.UserProperty = [("message-id", ids[at])]
            client.publish(topic, body, qos=1, properties=terms).wait_for_publish(30)
        client.disconnect()
        client.loop_stop()


@pytest.fixture(params=["mqtt", "nats", "amqp"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess]:
    kind = str(request.param)
    if shutil.which(PROGRAMS[kind], path=PLACES) is None:
        pytest.skip(f"no {PROGRAMS[kind]} here")
    try:
        importlib.import_module(MODULES[kind])
    except ImportError:
        pytest.skip(f"no {MODULES[kind]} here")
    folder = tmp_path / "broker"
    folder.mkdir()
    made = BrokerProcess(kind, folder, free_port())
    made.start()
    try:
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def serving(folder: Path, broker: BrokerProcess, source: str = APP) -> AsyncIterator[tuple[Gateway, lamina.AsyncClient]]:
    path = write_app(folder, source.format(topic=TOPICS[broker.kind]))
    named = [Broker("yard", broker.url)]
    gateway = await open_gateway(open_local(str(path)), store=open_store(str(folder / "runs.db")), brokers=named)
    try:
        async with lamina.AsyncClient(gateway.url) as client:
            yield gateway, client
    finally:
        await gateway.stop(10)


async def until(look: Callable[[], Awaitable[Any]], is_so: Callable[[Any], bool], limit_s: float = 90) -> Any:
    until_s = time.monotonic() + limit_s
    while not is_so(found := await look()):
        assert time.monotonic() < until_s, found
        await asyncio.sleep(0.02)
    return found


async def noted(client: lamina.AsyncClient) -> dict[str, Any]:
    """What the runs have noted so far. While they are at it, a reader meets their changes again and again: it looks later."""
    try:
        return dict(await client.call("look", {}))
    except FunctionFailed as error:
        if "Conflict" not in str(error):
            raise
        return {"notes": -1, "seen": []}


async def connected(client: lamina.AsyncClient) -> None:
    async def state() -> Any:
        return [one["state"] for one in await client.triggers()]

    await until(state, lambda states: "connected" in states)


def test_each_message_starts_a_run_and_a_broker_that_was_away_is_found_again(tmp_path: Path, broker: BrokerProcess) -> None:
    async def work() -> dict[str, Any]:
        await broker.prepare()
        async with serving(tmp_path, broker) as (_, client):
            await connected(client)
            await broker.publish(b'"one"', b"two")  # JSON, and text that is none
            await until(partial(noted, client), lambda seen: seen["notes"] == 2)
            await asyncio.to_thread(broker.stop)

            async def state() -> str:
                return str((await client.triggers())[0]["state"])

            await until(state, lambda text: text.startswith("waiting"))
            await asyncio.to_thread(broker.start)
            await connected(client)
            await broker.publish(b"3")
            return dict(await until(partial(noted, client), lambda seen: seen["notes"] >= 3))

    seen = run(work, 240)
    assert seen == {"notes": 3, "seen": dict.fromkeys(["one", "two", "3"], TOPICS[broker.kind])}


def test_messages_sent_while_no_server_runs_are_taken_by_the_next(tmp_path: Path, broker: BrokerProcess) -> None:
    async def first() -> None:
        await broker.prepare()
        async with serving(tmp_path, broker) as (_, client):
            await connected(client)

    async def second() -> Any:
        await broker.publish(*(b"%d" % n for n in range(50)))
        async with serving(tmp_path, broker) as (_, client):
            return await until(partial(noted, client), lambda seen: seen["notes"] >= 50)

    run(first, 120)
    seen = run(second, 120)
    assert seen["notes"] == 50 and set(seen["seen"]) == {str(n) for n in range(50)}


def test_a_message_with_an_id_that_comes_twice_starts_one_run(tmp_path: Path, broker: BrokerProcess) -> None:
    if broker.kind == "nats":
        pytest.skip("the place in a stream is the id: see the test of a killed server")

    async def work() -> Any:
        async with serving(tmp_path, broker) as (_, client):
            await connected(client)
            await broker.publish(b"1", b"1", b"2", ids=("a", "a", "b"))

            async def count() -> int:
                return int((await client.triggers())[0]["started"])

            await until(count, lambda n: n >= 3)
            return await until(partial(noted, client), lambda seen: len(seen["seen"]) == 2)

    assert run(work, 120)["notes"] == 2


def test_a_message_that_can_start_nothing_is_set_aside_and_the_next_are_taken(
    tmp_path: Path, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.state.triggers.MAX_MESSAGE_BYTES", 1_000)

    async def work() -> tuple[Any, Any]:
        await broker.prepare()
        async with serving(tmp_path, broker) as (_, client):
            await connected(client)
            await broker.publish(b"x" * 2_000, b"7")
            await until(partial(noted, client), lambda seen: seen["notes"] == 1)
            (about,) = await client.triggers()
            return about, await client.trigger(about["id"])

    about, shown = run(work, 120)
    assert about["set_aside"] == 1 and "2000 bytes" in shown["aside"][0]["why"]


SERVER = """
import asyncio, sys
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import open_gateway
from lamina.state.brokers import Broker
from lamina.store.open import open_store

async def main():
    gateway = await open_gateway(
        open_local(sys.argv[1]), store=open_store(sys.argv[2]), brokers=[Broker("yard", sys.argv[3])]
    )
    print(gateway.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_message_is_lost_when_the_server_is_killed_in_the_middle(tmp_path: Path, broker: BrokerProcess) -> None:
    """Of 200 messages each starts a run at least once; where the broker numbers them, exactly once."""
    path = write_app(tmp_path, APP.format(topic=TOPICS[broker.kind]))
    command = [sys.executable, "-c", SERVER, str(path), str(tmp_path / "runs.db"), broker.url]

    async def kill_in_the_middle() -> None:
        await broker.prepare()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                async with lamina.AsyncClient(server.stdout.readline().strip()) as client:
                    await connected(client)
                    publishing = asyncio.create_task(broker.publish(*(b"%d" % n for n in range(200))))

                    async def started() -> int:
                        return int((await client.triggers())[0]["started"])

                    await until(started, lambda n: n >= 20)
            finally:
                server.kill()
        await publishing

    async def go_on() -> Any:
        async with serving(tmp_path, broker) as (_, client):
            return await until(partial(noted, client), lambda seen: len(seen["seen"]) == 200)

    run(kill_in_the_middle, 120)
    seen = run(go_on, 180)
    assert seen["notes"] == 200 if broker.kind == "nats" else 200 <= seen["notes"] <= 400  # delivered again: once at most


def test_brokers_are_named_with_a_scheme_and_their_passwords_are_not_shown() -> None:
    assert parse_broker("yard=mqtt://u:secret@host:1883,tenant=acme") == Broker("yard", "mqtt://u:secret@host:1883", "acme")
    with pytest.raises(BadValue) as caught:
        parse_broker("yard=http://u:secret@host")
    assert "secret" not in str(caught.value) and "mqtt" in caught.value.hint


def test_a_broker_of_one_tenant_is_none_for_another() -> None:
    broker = Broker("yard", "mqtt://host", "acme")
    assert (broker.serves("acme"), broker.serves(""), broker.serves("evil")) == (True, True, False)
    assert not Broker("yard", "mqtt://host").serves("acme")
