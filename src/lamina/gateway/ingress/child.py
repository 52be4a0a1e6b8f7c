"""Ingress process: `python -m lamina.gateway.ingress.main SETUP`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from lamina.gateway import logs, wire
from lamina.gateway.http import Server, loop_factory
from lamina.gateway.ingress.frames import Setup, Up
from lamina.gateway.ingress.front import HttpFront, Known, RpcFront
from lamina.gateway.ingress.line import Line
from lamina.gateway.lag import Lag, watch_lag
from lamina.gateway.tls import context
from lamina.gateway.unhurried import unhurried
from lamina.live.shm import Pool, Reader

if TYPE_CHECKING:
    from lamina.gateway.oip.grpc_server import GrpcServer

GOODBYE_S = 0.5


class Ingress:
    """One ingress process: its servers and its link to the controller."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pool = Pool(setup.folder, setup.owner, setup.pool_bytes) if setup.folder else None
        self._line = line = Line(self._pool, Reader(setup.folder) if setup.folder else None)
        self._known = Known()
        self._lag = Lag()
        self._server = Server(HttpFront(line, self._known, self._lag).handle, wire.parse_problem, setup.limits)
        self._grpc: GrpcServer | None = None
        line.on_routes = self._known.learn
        line.on_closing = self._close

    async def serve(self) -> None:
        setup, line = self._setup, self._line
        loop = asyncio.get_running_loop()
        sock = socket.socket(fileno=setup.fd)
        sock.setblocking(False)
        await loop.create_unix_connection(lambda: line, sock=sock)
        watch_lag(self._lag)
        port = await self._server.start(setup.host, setup.port, reuse_port=True, **self._secured())
        grpc_port = await self._start_grpc() if setup.grpc_port >= 0 else 0
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)  # requests leave no cycles behind
        line.say(Up(port, grpc_port))
        await line.ended.wait()
        if self._grpc is not None:
            await self._grpc.stop(GOODBYE_S)
        await self._server.stop()
        if self._pool is not None:
            self._pool.close()

    def _secured(self, *protocols: str) -> dict[str, Any]:
        if self._setup.tls is None:
            return {}
        secured = context(*self._setup.tls)
        if protocols:
            secured.set_alpn_protocols(list(protocols))
        return {"ssl": secured}

    async def _start_grpc(self) -> int:
        from lamina.gateway.oip.grpc_server import GrpcServer

        setup = self._setup
        self._grpc = GrpcServer(RpcFront(self._line, self._known, self._lag), setup.limits.body_bytes)
        secured = self._secured("h2").get("ssl")
        return await self._grpc.start(setup.host, setup.grpc_port, secured, reuse_port=True)

    def _close(self) -> None:
        """Stop accepting; what is open is still answered."""
        asyncio.get_running_loop().create_task(self._server.stop_accepting())
        if self._grpc is not None:
            self._grpc.stop_accepting()


async def _main(setup: Setup) -> None:
    await Ingress(setup).serve()


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with unhurried():
        if setup.log_form:
            logs.set_up(setup.log_form, calls=False)
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_main(setup))
    os._exit(0)


if __name__ == "__main__":
    main()
