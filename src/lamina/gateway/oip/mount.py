"""Set-up of the protocol on a gateway: REST under /v2, and gRPC on a port of its own where one is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.gateway.api import Api
from lamina.gateway.metrics import Metrics
from lamina.gateway.oip.models import Catalogue
from lamina.gateway.oip.repository import Repository
from lamina.gateway.oip.rest import Rest
from lamina.gateway.oip.serving import Serving
from lamina.gateway.tls import context
from lamina.live.loop import LiveLoop

if TYPE_CHECKING:
    from lamina.gateway.oip.grpc_server import GrpcServer
    from lamina.gateway.oip.rpc import Rpc

PREFIX = b"/v2"


@dataclass(slots=True)
class Oip:
    """The protocol's parts of one server."""

    serving: Serving
    repository: Repository
    rest: Rest
    api: Api
    body_limit: int
    grpc: GrpcServer | None = None
    grpc_port: int = 0

    def rpc(self) -> Rpc:
        from lamina.gateway.oip.rpc import Rpc

        return Rpc(self.api, self.serving, self.repository)

    async def open_grpc(self, host: str, port: int, tls: tuple[str, str] | None = None) -> None:
        """Listen for gRPC; port 0 lets the system choose. `tls` names the files of certificate and key."""
        from lamina.gateway.oip.grpc_server import GrpcServer

        self.grpc = GrpcServer(self.rpc(), self.body_limit)
        secured = None
        if tls is not None:
            secured = context(*tls)
            secured.set_alpn_protocols(["h2"])
        self.grpc_port = await self.grpc.start(host, port, secured)

    async def stop(self, grace_s: float) -> None:
        if self.grpc is not None:
            await self.grpc.stop(grace_s)


def mount(api: Api, loop: LiveLoop, metrics: Metrics, *, body_limit: int) -> Oip:
    """Build the parts and mount the routes."""
    functions = loop.controller.state.functions
    catalogue = Catalogue(api, lambda name: functions[name].spec if name in functions else None)
    serving = Serving(api, loop, catalogue, metrics)
    repository = Repository(serving)
    rest = Rest(api, serving, repository, body_limit)
    api.sites[PREFIX] = rest.handle
    return Oip(serving, repository, rest, api, body_limit)
