"""Routes of kernel graphs, `/v1/kernels`: graphs by content hash, called without knowing which app registered them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lamina.access.authorization import Grant
from lamina.errors import NotFound
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.sdk.tensors import Port
from lamina.server.exchange import Exchange, HttpRequest


class KernelRoutes:
    """Routes of graphs. Where several functions have the same graph, that of the caller's tenant answers, else the first."""

    def __init__(self, targets: TargetRegistry, call_handler: CallHandler) -> None:
        self._targets, self._call_handler = targets, call_handler
        self.routes: dict[str, Callable[..., None]] = {
            "GET /v1/kernels": self._list,
            "GET /v1/kernels/{graph}": self._get,
            "POST /v1/kernels/{graph}": self._call,
        }

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        seen = [_describe(one) for one in self._targets.all if _graph(one) and grant.sees(one.tenant)]
        exchange.respond(200, msgspec.json.encode(seen))

    def _get(self, request: HttpRequest, exchange: Exchange, grant: Grant, graph: str) -> None:
        exchange.respond(200, msgspec.json.encode(_describe(self._find(graph, grant))))

    def _call(self, request: HttpRequest, exchange: Exchange, grant: Grant, graph: str) -> None:
        self._call_handler.handle(self._find(graph, grant), request, exchange, grant.caller)

    def _find(self, graph: str, grant: Grant) -> CallTarget:
        found = [one for one in self._targets.all if _graph(one) == graph and grant.sees(one.tenant)]
        if not found or not graph:
            raise NotFound(f"no kernel graph {graph[:80]!r}", hint="GET /v1/kernels lists those that are registered")
        return max(found, key=lambda one: one.tenant == grant.tenant)


def _graph(target: CallTarget) -> str:
    return target.signature.graph if target.signature is not None else ""


def _describe(target: CallTarget) -> dict[str, Any]:
    assert target.signature is not None
    taken = {port.name for port in target.signature.inputs}
    return {
        "graph": target.signature.graph,
        "function": target.name,
        "inputs": [_port(port) for port in target.signature.inputs],
        "outputs": [_port(port) for port in target.signature.outputs],
        "keys": [param.name for param in target.params if param.name not in taken],
        "slo_ms": target.slo.latency_us / 1000 or None,
        "doc": target.doc,
    }


def _port(port: Port) -> dict[str, Any]:
    assert port.tensor is not None
    return {"name": port.name, "dtype": port.tensor.dtype, "shape": list(port.tensor.shape)}
