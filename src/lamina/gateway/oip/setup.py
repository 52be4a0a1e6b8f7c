"""Set-up of the protocol on a gateway: REST under /v2, and gRPC on a port of its own where one is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.drivers.realtime import RealtimeDriver
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ModelCatalog
from lamina.gateway.oip.repository import ModelRepository
from lamina.gateway.oip.rest import OpenInferenceRoutes
from lamina.gateway.routes.router import Router
from lamina.server.tls import server_context

if TYPE_CHECKING:
    from lamina.gateway.oip.controller_methods import GrpcMethods
    from lamina.gateway.oip.grpc_server import GrpcServer

PREFIX = b"/v2"


@dataclass(slots=True)
class OpenInference:
    """The protocol's parts of one server."""

    inference: InferenceService
    repository: ModelRepository
    rest: OpenInferenceRoutes
    router: Router
    body_limit: int
    grpc: GrpcServer | None = None
    grpc_port: int = 0

    def grpc_methods(self) -> GrpcMethods:
        from lamina.gateway.oip.controller_methods import GrpcMethods

        return GrpcMethods(self.router, self.inference, self.repository)

    async def open_grpc(self, host: str, port: int, tls: tuple[str, str] | None = None) -> None:
        """Listen for gRPC; port 0 lets the system choose. `tls` names the files of certificate and key."""
        from lamina.gateway.oip.grpc_server import GrpcServer

        self.grpc = GrpcServer(self.grpc_methods(), self.body_limit)
        secured = None
        if tls is not None:
            secured = server_context(*tls)
            secured.set_alpn_protocols(["h2"])
        self.grpc_port = await self.grpc.start(host, port, secured)

    async def stop(self, grace_s: float) -> None:
        if self.grpc is not None:
            await self.grpc.stop(grace_s)


def mount_open_inference(api: Router, loop: RealtimeDriver, metrics: Metrics, *, body_limit: int) -> OpenInference:
    """Build the parts and mount the routes."""
    functions = loop.controller.state.functions
    catalogue = ModelCatalog(api, lambda name: functions[name].spec if name in functions else None)
    serving = InferenceService(api, loop, catalogue, metrics)
    repository = ModelRepository(serving)
    rest = OpenInferenceRoutes(api, serving, repository, body_limit)
    api.mounts[PREFIX] = rest.handle
    return OpenInference(serving, repository, rest, api, body_limit)
