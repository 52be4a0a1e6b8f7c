"""Supervisor of ingress processes: starts them, announces routes, restarts them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

from lamina.gateway import logs
from lamina.gateway.api import Api
from lamina.gateway.http import Limits
from lamina.gateway.ingress.desk import Desk
from lamina.gateway.ingress.frames import Closing, ModelIs, Routes, Setup, Up, ingress_reader
from lamina.gateway.oip.mount import Oip
from lamina.gateway.oip.rpc import Rpc
from lamina.live.engines import local_of
from lamina.live.ledger import Ledger
from lamina.live.process import Kind, WorkerProcess

log = logging.getLogger("lamina")

POOL_BYTES = 512 * 2**20
AGAIN_S = 0.05  #: between the end of one and the start of the next; longer and longer while they do not come up
MOST_AGAIN_S = 5.0
UP_S = 120.0  #: from its start until it listens
KIND = Kind("lamina.gateway.ingress.child", ingress_reader)


class Hub:
    """All ingress processes of a server."""

    def __init__(
        self,
        api: Api,
        oip: Oip,
        ledger: Ledger | None,
        limits: Limits,
        tls: tuple[str, str] | None = None,
        *,
        guarded: bool = False,
    ) -> None:
        self.api = api
        self.serving = oip.serving
        self.rpc: Rpc | None = None
        self.loop = asyncio.get_running_loop()
        self._oip = oip
        self._ledger = ledger
        self._limits = limits
        self._tls = tls
        self._guarded = guarded
        self._address = ("", 0, -1)
        self._has_started = self._is_stopping = False
        self._again_s = AGAIN_S
        self.desks: list[Desk] = []
        api.on_targets = self._tell_routes

    async def start(self, count: int, host: str, port: int, grpc_port: int | None = None) -> Up:
        """Start all; returns the ports, which the first one chooses where 0 is asked for."""
        if grpc_port is not None:
            self.rpc = self._oip.rpc()
        for wanted in {port, grpc_port or 0} - {0}:
            _check_free(host, wanted)
        self._address = (host, port, grpc_port if grpc_port is not None else -1)
        bound = await self._listening(self._spawn())
        self._address = (host, bound.port, bound.grpc_port if grpc_port is not None else -1)
        for desk in [self._spawn() for _ in range(count - 1)]:
            await self._listening(desk)
        self._has_started = True
        return bound

    async def _listening(self, desk: Desk) -> Up:
        assert desk.process is not None
        ends: list[asyncio.Future[Any]] = [desk.up, desk.process.exited]
        await asyncio.wait(ends, timeout=UP_S, return_when=asyncio.FIRST_COMPLETED)
        if not desk.up.done():
            raise OSError(errno.EADDRNOTAVAIL, "an ingress process did not start")
        return desk.up.result()

    def _spawn(self) -> Desk:
        desk = Desk(self, self._ledger)
        host, port, grpc_port = self._address
        setup = Setup(
            host=host,
            port=port,
            grpc_port=grpc_port,
            folder=self._ledger.folder.path if self._ledger is not None else "",
            owner=desk.slots.owner if desk.slots is not None else "none",
            pool_bytes=POOL_BYTES,
            limits=self._limits,
            tls=self._tls,
            log_form=logs.form(),
        )
        desk.process = WorkerProcess(self.loop, setup, desk.hear, lambda: self._lost(desk), kind=KIND)
        self.desks.append(desk)
        return desk

    def _lost(self, desk: Desk) -> None:
        self.desks.remove(desk)
        desk.lost()
        if self._is_stopping or not self._has_started:
            return
        log.warning("an ingress process is gone; its clients are disconnected, another one is started")
        self._again_s = AGAIN_S if desk.up.done() else min(2 * self._again_s, MOST_AGAIN_S)
        self.loop.call_later(self._again_s, self._again)

    def _again(self) -> None:
        if not self._is_stopping:
            try:
                self._spawn()
            except OSError:
                self.loop.call_later(MOST_AGAIN_S, self._again)

    def routes(self) -> Routes:
        params = {path: list(target.params) for path, target in self.api.routes().items()}
        models = [
            ModelIs(model.name, model.version, model.target, model.batched, model.signature)
            for versions in self.serving.catalogue.models.values()
            for model in versions.values()
        ]
        return Routes(params, models, self._guarded)

    def _tell_routes(self) -> None:
        routes = self.routes()
        for desk in self.desks:
            desk.say(routes)

    async def stop_accepting(self) -> None:
        for desk in self.desks:
            desk.say(Closing())

    async def stop(self) -> None:
        self._is_stopping = True
        processes = [desk.process for desk in self.desks if desk.process is not None]
        for process in processes:
            process.stop(2.0)
        if processes:
            await asyncio.wait([process.finished for process in processes])


def _check_free(host: str, port: int) -> None:
    """Fail if the port is in use: ingress processes share it with any process that is willing to share it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def ledger_of(engine: object) -> Ledger | None:
    """The shared memory of an engine; emulated engines move no bytes and have none."""
    local = local_of(engine)
    return local.ledger if local is not None else None
