"""Set-up of the protocol on a gateway: REST under /v2, and gRPC on a port of its own where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lamina.errors import LaminaError
from lamina.gateway.auth import Authorize
from lamina.gateway.oip.inference import GRPC_HEADERS
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.repository import ModelRepository
from lamina.gateway.oip.rest import OpenInferenceRoutes
from lamina.gateway.routes.codec_pool import CodecPool, is_heavy_message
from lamina.gateway.routes.explain import SampledRefusals
from lamina.server.http1 import HeadCheck
from lamina.server.listener import server_context
from lamina.server.memory_budget import MemoryBudget
from lamina.server.origins import OriginPolicy, OriginSettings

if TYPE_CHECKING:
    from lamina.gateway.oip.grpc_service import GrpcMethods
    from lamina.server.grpc import GrpcServer

PREFIX = b"/v2"


_INFER = ("ModelInfer", "ModelStreamInfer")


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
        self._grpc = GrpcServer(self.grpc_methods(), self._body_limit, GRPC_HEADERS, *guards, self._prepare)
        secured = None
        if tls is not None:
            secured = server_context(*tls)
            secured.set_alpn_protocols(["h2"])
        return await self._grpc.start(host, port, secured)

    def _prepare(self, method: str, message: bytes, then: Callable[[bytes | LaminaError], None]) -> bool:
        """Have a large request of typed tensors made raw by another process."""
        if self._codecs is None or method not in _INFER or not is_heavy_message(message):
            return False
        self._codecs.to_raw_contents(message, lambda found: then(found if isinstance(found, LaminaError) else found["body"]))
        return True

    async def stop(self, grace_s: float) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
