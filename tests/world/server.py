"""A simulated server: the product's gateway on a loop of its own, a SQLite file that outlives it, clients in memory."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httptools

from lamina import policies
from lamina.access.access_control import AccessControl
from lamina.access.admin_service import AdminService
from lamina.bootstrap import ServingRuntime, call_lookup
from lamina.drivers.engine import EngineShared, TargetSource
from lamina.drivers.realtime import RealtimeDriver
from lamina.gateway.auth import Authenticator
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.admin_routes import AdminRoutes
from lamina.gateway.routes.problems import parse_error_body
from lamina.gateway.routes.targets import call_targets
from lamina.policies import new_controller
from lamina.predict import online
from lamina.predict.profile_table import ProfileTable
from lamina.sdk.app_loader import load_app
from lamina.server import http1, http_server
from lamina.state.kv_state import StateTable
from lamina.store import sqlite
from lamina.store.group_commit import GroupCommitStore
from lamina.values.run_values import RunValues
from tests.world.engine import WorldEngine
from tests.world.machine import Loop, Machine

APP = Path(__file__).with_name("app.py")
_app = functools.cache(lambda: load_app(str(APP)))
CHECK_EVERY = 8
TENANTS = ("acme", "evil")
OWNERS = {target: TargetSource(app=f"{tenant}-app", tenant=tenant) for tenant in TENANTS for target in (tenant, f"keep_{tenant}")}
"""Whose the targets of the app are that have an owner."""


@dataclass
class Reply:
    """What a client was answered; status 0: the connection ended without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Pipe(asyncio.Transport):
    """One client's connection: bytes of the server come to its parser, a little later."""

    def __init__(self, server: Server, on_reply: Callable[[Reply], None]) -> None:
        super().__init__()
        self.protocol: Any = None
        self._server, self._on_reply = server, on_reply
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply(0)
        self._is_closing = False

    # the server's side
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._parser.feed_data(bytes(data))

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_reading(self) -> bool:
        return True

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if self._server.loop is not None:
                self._server.loop.call_soon(self.protocol.connection_lost, None)
            self._end(Reply(0))

    abort = close

    # the client's side
    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._reply.body += body

    def on_message_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._end(self._reply)

    def _end(self, reply: Reply) -> None:
        if self in self._server.pipes:
            self._server.pipes.remove(self)
            self._on_reply(reply)

    def lose(self) -> None:
        """The server's process is gone."""
        self._is_closing = True
        self._end(Reply(0))


@dataclass
class _Listener:
    """In the place of listening sockets."""

    port: int

    def close(self) -> None:
        pass


class _Sampled:
    """An observer that checks now and then: what is impossible does not pass by itself, and `core` worlds check every event."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._events = 0

    def __call__(self, *_: object) -> None:
        self._events += 1
        if self._events % CHECK_EVERY == 0:
            self._check()


class _Disk:
    """A connection to the file, on a disk that fails now and then: before a commit, or after it, without saying so."""

    def __init__(self, server: Server, connection: Any) -> None:
        self._server, self._connection = server, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        chance = self._server.machine.rng.random()
        if chance < self._server.disk_faults / 2:
            raise sqlite.sqlite3.OperationalError("disk I/O error")
        self._connection.commit()
        if chance > 1 - self._server.disk_faults / 2:
            raise sqlite.sqlite3.OperationalError("disk I/O error")


class Server:
    """One process of the world. `start` and `kill` it as often as you like: the file stays."""

    def __init__(self, machine: Machine, name: str, file: Path, policy: str, faults: float, disk_faults: float) -> None:
        self.machine, self.name, self.file, self.policy = machine, name, file, policy
        self.faults, self.disk_faults = faults, disk_faults
        self.loop: Loop | None = None
        self.gateway: Gateway | None = None
        self.management: http_server.HttpServer | None = None
        self.engine: WorldEngine | None = None
        self.pipes: list[Pipe] = []
        self.starts = 0
        self.error: BaseException | None = None
        self._backend: sqlite.Sqlite | None = None

    @property
    def is_up(self) -> bool:
        return self.gateway is not None

    def has_started(self) -> bool:
        return self.gateway is not None or self.error is not None

    def start(self) -> None:
        self.starts += 1
        self.loop = Loop(self.machine, self)
        self.machine.loops.append(self.loop)
        task = self.loop.create_task(self._serve())
        task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.error = task.exception()

    async def _serve(self) -> None:
        app = _app()
        controller = new_controller(policies.build(self.policy), online.OnlinePredictor(ProfileTable([])))
        shared = EngineShared()
        shared.set_sources(OWNERS)
        state = StateTable(app.name, call_lookup(controller), shared.source)
        self.engine = WorldEngine(self.machine, app, state, self.faults, shared)
        driver = RealtimeDriver(controller, self.engine, RunValues(None, None))  # type: ignore[arg-type]
        driver.add_observer(_Sampled(controller.state.check))
        self._backend = sqlite.Sqlite(str(self.file))
        opened = self._backend.writer
        self._backend.writer = lambda: _Disk(self, opened())  # type: ignore[method-assign,assignment,return-value]
        store = GroupCommitStore(self._backend)
        access = AccessControl(store)
        runtime = ServingRuntime(app, driver, state)
        gateway = await open_gateway(runtime, ListenConfig(port=80, memory_bytes=2**30), store=store, access=access)
        gateway.targets.replace([replace(one, tenant=shared.source(one.name).tenant) for one in call_targets(app)])
        admin: Any = (access, Authenticator(access), AdminService(access), None, None, gateway.process)  # nothing is deployed
        self.management = http_server.HttpServer(AdminRoutes(*admin).handle, parse_error_body)
        self.gateway = gateway

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int, **options: Any) -> _Listener:
        return _Listener(port)

    def kill(self) -> None:
        """kill -9: nothing is said, nothing is written any more, locks are given back by the system."""
        self.machine.end(self)
        if self._backend is not None:
            self._backend.release()
        self.loop = self.gateway = self.management = self.engine = self._backend = None
        for pipe in tuple(self.pipes):
            pipe.lose()

    def calm(self) -> None:
        self.faults = self.disk_faults = 0.0
        if self.engine is not None:
            self.engine.calm()

    def request(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        on_reply: Callable[[Reply], None],
        *,
        management: bool = False,
    ) -> Pipe | None:
        """Send a request; None (and a reply of status 0) if no server listens."""
        if self.gateway is None or self.loop is None or self.management is None:
            on_reply(Reply(0))
            return None
        pipe = Pipe(self, on_reply)
        self.pipes.append(pipe)
        data = json.dumps(body).encode() if body is not None else b""
        head = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(data)}"]
        if data:
            head.append("content-type: application/json")
        raw = "\r\n".join([*head, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + data
        connection = pipe.protocol = http1.HttpConnection(self.management if management else self.gateway.server)

        def arrive() -> None:
            connection.connection_made(pipe)
            connection.data_received(raw)

        self.loop.call_soon(arrive)
        return pipe
