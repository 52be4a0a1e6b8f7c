"""Set-up of the protocol on a gateway: REST under /v2, and gRPC on a port of its own where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lamina.gateway.auth import Authorize
from lamina.gateway.oip.inference import GRPC_HEADERS
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.repository import ModelRepository
from lamina.gateway.oip.rest import OpenInferenceRoutes
from lamina.gateway.routes.codec_pool import CodecPool, prepare_message
from lamina.gateway.routes.explain import SampledRefusals
from lamina.server.http_server import HeadCheck
from lamina.server.listener import server_context
from lamina.server.memory_budget import MemoryBudget
from lamina.server.origins import OriginPolicy, OriginSettings

if TYPE_CHECKING:
    from lamina.gateway.oip.grpc_service import GrpcMethods
    from lamina.server.grpc import GrpcServer

PREFIX = b"/v2"


class OpenInference:
    """The protocol's parts of one server."""

    def __init__(
        self,
        inference: InferenceService,
        authorize: Authorize,
        is_ready: Callable[[], bool],
        refusals: SampledRefusals,
        *,
        body_limit: int,
        budget: MemoryBudget,
        check_head: HeadCheck,
        codecs: CodecPool | None = None,
    ) -> None:
        self.inference = inference
        self.repository = ModelRepository(inference)
        self.rest = OpenInferenceRoutes(authorize, inference, self.repository, is_ready, refusals, body_limit, codecs)
        self._authorize = authorize
        self._is_ready = is_ready
        self._body_limit = body_limit
        self._codecs = codecs
        self._budget = budget
        self._check_head = check_head
        self._grpc: GrpcServer | None = None

    def grpc_methods(self) -> GrpcMethods:
        from lamina.gateway.oip.grpc_service import GrpcMethods

        return GrpcMethods(self._authorize, self.inference, self.repository, self._is_ready)

    async def open_grpc(
        self, host: str, port: int, tls: tuple[str, str] | None = None, origins: OriginSettings | None = None
    ) -> int:
        """Listen for gRPC; returns the port, which the system chooses if 0 is asked for. `tls` names certificate and key."""
        from lamina.server.grpc import GrpcServer

        guards = (self._budget, self._check_head, OriginPolicy(host, origins))
        prepare = partial(prepare_message, self._codecs) if self._codecs is not None else None
        self._grpc = GrpcServer(self.grpc_methods(), self._body_limit, GRPC_HEADERS, *guards, prepare)
        secured = None
        if tls is not None:
            secured = server_context(*tls)
            secured.set_alpn_protocols(["h2"])
        return await self._grpc.start(host, port, secured)

    async def stop(self, grace_s: float) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
