"""Front door: an ingress process on any machine, in front of whichever server leads. `lamina ingress` is this and nothing more.

It survives the leader: its clients stay connected, and what may be repeated is asked of the next one (`leader_link.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from msgspec import Struct

from lamina.cluster.credentials import JoinToken, TlsFiles
from lamina.cluster.data_port import DataPort, announced
from lamina.cluster.ingress_connection import IngressConnection, IngressTerms, LeaderConnection
from lamina.cluster.value_fetcher import ValueFetcher
from lamina.errors import BadValue
from lamina.gateway.ingress.handlers import IngressHttpHandler, KnownRoutes
from lamina.gateway.ingress.leader_link import LeaderLink
from lamina.gateway.ingress.main import IngressProcess
from lamina.gateway.ingress.messages import IngressSetup, RouteTable
from lamina.gateway.ingress.supervisor import POOL_BYTES
from lamina.gateway.routes.problems import PROBLEM, make_problem
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpLimits
from lamina.server.origins import OriginSettings, is_loopback
from lamina.server.process_status import default_memory_budget
from lamina.values.shm import ShmPool
from lamina.values.shm_directory import ShmDirectory

log = logging.getLogger("lamina")

OWNER = "front"


class FrontDoorConfig(Struct, frozen=True, kw_only=True):
    """Where a front door listens, the servers it may join, and how other machines reach its values."""

    name: str
    joins: tuple[str, ...]
    token: JoinToken = JoinToken()
    tls_between: TlsFiles = TlsFiles()
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int = -1
    tls: tuple[str, str] | None = None
    limits: HttpLimits = HttpLimits()
    origins: OriginSettings = OriginSettings()
    memory_bytes: int = 0
    data_host: str = "127.0.0.1"
    data_port: int = 0
    advertise: str = ""  #: HOST:PORT that other machines reach its values by; "": where they are
    hold_us: int = 10_000_000
    no_auth: bool = False


class FrontRoutes(KnownRoutes):
    """Routes that a leader has announced. One that asks for no token is not served where others can reach it."""

    def __init__(self, config: FrontDoorConfig, on_refused: Callable[[], None]) -> None:
        super().__init__()
        self._may_be_open = config.no_auth or is_loopback(config.host)
        self._on_refused = on_refused

    def update(self, routes: RouteTable) -> None:
        if not routes.requires_token and not self._may_be_open:
            log.error(
                "the server asks for no token, and this address can be reached by others: nothing is served. Let it listen on an "
                "address that requires tokens, or start this front door with --no-auth"
            )
            self._on_refused()
            return
        super().update(routes)


class _FrontHandler(IngressHttpHandler):
    """Handler that answers for this process itself, without a leader: a probe must not wait for one."""

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        link = self._link
        assert isinstance(link, LeaderLink)
        if request.path == b"/healthz" and request.method in ("GET", "HEAD"):
            exchange.respond(200, msgspec.json.encode({"status": "ok", "role": "ingress", "joined": link.has_leader}))
        elif request.path == b"/readyz" and not link.has_leader:
            problem = make_problem(503, "no server leads", code="not-leader", hint="try again in a moment")
            exchange.respond(503, problem.body(), PROBLEM, b"retry-after: 1\r\n")
        else:
            super().handle(request, exchange)


class FrontDoor(IngressProcess):
    """A front door. Built complete; `run` is its life."""

    _handler = _FrontHandler

    def __init__(self, config: FrontDoorConfig) -> None:
        memory_bytes = config.memory_bytes or default_memory_budget()
        self._directory = ShmDirectory()
        pool = ShmPool(self._directory.path, OWNER, min(POOL_BYTES, memory_bytes // 2))
        between = config.tls_between
        self._port = DataPort(
            *(self._directory.path, config.data_host, config.data_port, between.for_server()),
            lambda owner, slot, serial: pool.serial(slot) == serial,
            only_own=not config.token,
        )
        self._fetcher = ValueFetcher(between.for_client())
        routes = FrontRoutes(config, self._on_open_server)
        self._leader_link = LeaderLink(pool, self._port, self._fetcher, routes, config.hold_us)
        terms = IngressTerms(
            name=config.name,
            joins=config.joins,
            token=config.token,
            tls=between,
            data_address=config.advertise or announced(config.data_host, self._port.port),
            owner=OWNER,
            speaks_grpc=config.grpc_port >= 0,
        )
        self._connection = IngressConnection(terms, self._leader_link)
        setup = IngressSetup(
            host=config.host,
            port=config.port,
            grpc_port=config.grpc_port,
            folder=self._directory.path,
            owner=OWNER,
            pool_bytes=min(POOL_BYTES, memory_bytes // 2),
            memory_bytes=memory_bytes,
            limits=config.limits,
            tls=config.tls,
            origins=config.origins,
        )
        super().__init__(setup, routes, pool, self._leader_link)
        self._on_listening: Callable[[int, int], None] = lambda port, grpc_port: None
        self.refusal: BadValue | None = None  #: why it does not serve

    @property
    def leader(self) -> LeaderConnection | None:
        return self._connection.leader

    async def run(self, stop: asyncio.Event, on_listening: Callable[[int, int], None]) -> None:
        """Listen, join and serve until `stop`."""
        self._on_listening = on_listening
        joined = asyncio.create_task(self._connection.run())
        waiting = asyncio.create_task(stop.wait())
        serving = asyncio.create_task(self.serve())
        try:
            await asyncio.wait([joined, waiting, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving  # raises what it failed with
            self.stop_accepting()
        finally:
            self._leader_link.stop()
            for task in (joined, waiting):
                task.cancel()
            await asyncio.gather(joined, waiting, serving, return_exceptions=True)
            self._port.close()
            await self._fetcher.close()
            self._directory.close()
        if self.refusal is not None:
            raise self.refusal

    def _on_ready(self, port: int, grpc_port: int) -> None:
        self._on_listening(port, grpc_port)

    def _on_open_server(self) -> None:
        self.refusal = BadValue(
            "the server asks for no token, and this front door listens where others can reach it",
            hint="let the server require tokens, or give --no-auth",
        )
        self._leader_link.stop()
