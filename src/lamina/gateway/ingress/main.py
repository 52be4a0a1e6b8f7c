"""Ingress process: `python -m lamina.gateway.ingress.main SETUP`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lamina.gateway.ingress.controller_link import ControllerLink
from lamina.gateway.ingress.handlers import IngressGrpcMethods, IngressHttpHandler, KnownRoutes
from lamina.gateway.ingress.messages import IngressReady, IngressSetup
from lamina.gateway.observability import logs
from lamina.gateway.oip.inference import GRPC_HEADERS
from lamina.gateway.routes.codec_pool import CodecPool, prepare_message
from lamina.gateway.routes.problems import parse_error_body
from lamina.gateway.routes.request_options import OWN_HEADERS
from lamina.server.async_stderr import async_stderr
from lamina.server.http_server import HttpServer, event_loop_factory
from lamina.server.listener import server_context
from lamina.server.memory_budget import MemoryBudget
from lamina.server.origins import OriginPolicy
from lamina.server.process_status import ProcessStatus, return_free_memory
from lamina.values.shm import ShmPool, ShmReader

if TYPE_CHECKING:
    from lamina.server.grpc import GrpcServer

GRACE_S = 0.5
TRIM_EVERY_S = 2.0


class IngressProcess:
    """One ingress process: its servers, and its link to the controller."""

    def __init__(self, setup: IngressSetup, routes: KnownRoutes, pool: ShmPool | None, link: ControllerLink) -> None:
        self._setup, self._routes, self._pool, self._link = setup, routes, pool, link
        self._process = ProcessStatus()
        self._codecs = codecs = CodecPool(processes=1)
        sources = {"shared": lambda: pool.file_bytes if pool is not None else 0, "codecs": lambda: codecs.held_bytes}
        self._budget = MemoryBudget(setup.memory_bytes, sources)
        handler = self._handler(self._link, self._routes, self._process, self._codecs)
        guards = (self._budget, self._link.check_head, OriginPolicy(setup.host, setup.origins))
        self._server = HttpServer(handler.handle, parse_error_body, setup.limits, OWN_HEADERS, *guards)
        self._grpc: GrpcServer | None = None

    _handler = IngressHttpHandler

    async def serve(self) -> None:
        """Serve until the link to the controller is closed."""
        setup, link = self._setup, self._link
        self._process.track_lag()
        port = await self._server.start(setup.host, setup.port, reuse_port=True, **self._tls_options())
        grpc_port = await self._start_grpc() if setup.grpc_port >= 0 else 0
        return_free_memory()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)  # requests leave no cycles behind
        self._on_ready(port, grpc_port)
        self._trim_shared_memory()
        await link.closed.wait()
        if self._grpc is not None:
            await self._grpc.stop(GRACE_S)
        await self._server.stop()
        await self._codecs.stop()
        if self._pool is not None:
            self._pool.close()

    def _on_ready(self, port: int, grpc_port: int) -> None:
        self._link.send(IngressReady(port, grpc_port))

    def _trim_shared_memory(self) -> None:
        """Give back slots that were not needed for a while, again and again."""
        if self._pool is not None and not self._link.closed.is_set():
            self._pool.trim()
            asyncio.get_running_loop().call_later(TRIM_EVERY_S, self._trim_shared_memory)

    def _tls_options(self, *protocols: str) -> dict[str, Any]:
        if self._setup.tls is None:
            return {}
        secured = server_context(*self._setup.tls)
        if protocols:
            secured.set_alpn_protocols(list(protocols))
        return {"ssl": secured}

    async def _start_grpc(self) -> int:
        from lamina.server.grpc import GrpcServer

        setup = self._setup
        methods = IngressGrpcMethods(self._link, self._routes, self._process, self._codecs)
        guards = (self._budget, self._link.check_head, OriginPolicy(setup.host, setup.origins))
        prepare = partial(prepare_message, self._codecs)
        self._grpc = GrpcServer(methods, setup.limits.body_bytes, GRPC_HEADERS, *guards, prepare)
        secured = self._tls_options("h2").get("ssl")
        return await self._grpc.start(setup.host, setup.grpc_port, secured, reuse_port=True)

    def stop_accepting(self) -> None:
        """What is open is still answered."""
        asyncio.get_running_loop().create_task(self._server.stop_accepting())
        if self._grpc is not None:
            self._grpc.stop_accepting()


async def _main(setup: IngressSetup) -> None:
    """An ingress process of a server on this machine, which it is connected to by an inherited socket."""
    routes = KnownRoutes()
    pool = ShmPool(setup.folder, setup.owner, setup.pool_bytes) if setup.folder else None
    reader = ShmReader(setup.folder) if setup.folder else None
    link = ControllerLink(pool, reader, routes.update, lambda: process.stop_accepting())
    process = IngressProcess(setup, routes, pool, link)
    sock = socket.socket(fileno=setup.fd)
    sock.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
    await process.serve()


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=IngressSetup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with async_stderr():
        if setup.log_format:
            logs.configure(setup.log_format, calls=False)
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(_main(setup))
    os._exit(0)


if __name__ == "__main__":
    main()
