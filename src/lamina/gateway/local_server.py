"""Local server: an app behind HTTP from within a Python program: `app.serve()`, and `lamina.testing.Server`.

It is the gateway of `lamina serve` on an event loop in a thread of its own, so that the program goes on. An app in a file is
served by worker processes, which import that file; one that lies in none, as in a notebook, by threads of this process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from lamina import policies
from lamina.bootstrap import ServingRuntime, open_in_process, open_local
from lamina.errors import BadValue, LaminaError
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.observability import logs
from lamina.plugins import DEFAULT_POLICY
from lamina.sdk.app import App
from lamina.sdk.app_loader import source_of
from lamina.sdk.client import Client
from lamina.server.http_server import event_loop_factory
from lamina.store.base import Store

T = TypeVar("T")
GRACE_S = 5.0


class LocalServer:
    """Server of an app in this process. `with` starts and stops it; `port=0` takes a free one.

    `in_process` runs functions in threads here; None: if other processes could not import them. `mocks` stand in for functions,
    and need that. `units` is how many batches run at once there; 0: one for each core.
    """

    def __init__(
        self,
        app: App,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grpc_port: int | None = None,
        policy: str | None = None,
        in_process: bool | None = None,
        mocks: Mapping[str, Callable[..., Any]] | None = None,
        units: int = 0,
        store: Store | None = None,
        full_errors: bool = True,
    ) -> None:
        for name in mocks or {}:
            if name not in app.functions:
                raise BadValue(f"mocks: {name!r} is no function of this app", hint=f"there are {', '.join(app.functions)}")
        self.app = app
        self._source = source_of(app)
        self.in_process = bool(mocks) or not self._source if in_process is None else in_process
        if not self.in_process and not self._source:
            raise BadValue("in_process: the app lies in no file that a worker could import", hint="leave it out, or write a file")
        self._listen = ListenConfig(host=host, port=port, grpc_port=grpc_port)
        self._policy = policy or DEFAULT_POLICY
        self._mocks = mocks
        self._units = units
        self._store = store
        self._full_errors = full_errors
        self._gateway: Gateway | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Client | None = None
        self._stopped = threading.Event()

    def __repr__(self) -> str:
        return f"<server of app {self.app.name!r}: {self.url if self._gateway is not None else 'stopped'}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def gateway(self) -> Gateway:
        if self._gateway is None:
            raise BadValue("this server does not run", hint="start it: with Server(app) as server, or server.start()")
        return self._gateway

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def port(self) -> int:
        return self.gateway.port

    @property
    def grpc_port(self) -> int:
        return self.gateway.grpc_port

    @property
    def client(self) -> Client:
        """A client of this server."""
        if self._client is None:
            self._client = Client(self.url)
        return self._client

    def start(self, *, announce: bool = False) -> Self:
        """Start the server; it is ready when this returns. `announce`: say where it listens, and log to stderr."""
        if self._gateway is not None:
            return self
        if announce and not logging.getLogger("lamina").handlers:
            logs.configure("text", calls=False)
        self._stopped.clear()
        self._loop = (event_loop_factory() or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name=f"lamina-{self.app.name}", daemon=True)
        self._thread.start()
        try:
            self._gateway = self._call(self._open())
            self._call(self._until_ready())
        except BaseException:
            self.stop(0.0)
            raise
        self.app.connect(self.url)
        if announce:
            where = "threads of this process" if self.in_process else "worker processes"
            sys.stdout.write(f"app {self.app.name} on {self.url}   (functions run in {where})\n")
            sys.stdout.flush()
        return self

    async def _open(self) -> Gateway:
        try:
            return await open_gateway(self._runtime(), self._listen, store=self._store, full_errors=self._full_errors)
        except OSError as error:
            hint = "a server of an earlier cell? server.stop(); or port=0 for a free one"
            raise BadValue(f"port: {self._listen.port} cannot be used: {error.strerror}", hint=hint) from None

    def _runtime(self) -> ServingRuntime:
        policy = policies.build(self._policy)
        if self.in_process:
            return open_in_process(self.app, policy=policy, mocks=self._mocks, units=self._units)
        host = self._listen.host
        port = self._listen.port or _free_port(host)  # workers must know it before they start
        self._listen = ListenConfig(host=host, port=port, grpc_port=self._listen.grpc_port)
        return open_local(
            self._source, app=self.app, policy=policy, probe=True, gpu="auto", environment={"LAMINA_URL": f"http://{host}:{port}"}
        )

    async def _until_ready(self) -> None:
        """Until every function has its minimum of instances, or one of them cannot be loaded."""
        gateway = self.gateway
        while not gateway.is_ready():
            for name, error in gateway.driver.engine.load_errors.items():
                raise LaminaError(f"{name} cannot be loaded: {error.type}: {error.message}", hint=error.hint)
            await asyncio.sleep(0.005)

    def wait(self) -> None:
        """Wait until Ctrl-C or SIGTERM, then stop."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        try:
            self._stopped.wait()
        except KeyboardInterrupt:
            pass
        finally:
            self.stop()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Finish the calls in flight, then stop."""
        self._stopped.set()
        self.app.connect("")
        if self._client is not None:
            self._client.close()
            self._client = None
        gateway, self._gateway = self._gateway, None
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if gateway is not None:
            asyncio.run_coroutine_threadsafe(gateway.stop(grace_s), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_served: dict[str, LocalServer] = {}
"""Servers of a notebook, by app. A cell that runs again makes another app of the same name, and knows nothing of them."""


def replace_earlier(server: LocalServer) -> None:
    """Stop the server that a notebook has started before for an app of this name: this one takes its place, and its port."""
    earlier = _served.pop(server.app.name, None)
    if earlier is not None:
        earlier.stop(0.0)
    _served[server.app.name] = server


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Thread of a server: its loop until that is stopped."""
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
