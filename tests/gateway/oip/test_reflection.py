"""gRPC reflection, asked by the client of the reference implementation, and the messages it describes used as they are told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import ListenConfig, open_gateway
from tests.serving import APP, run, write_app

pytestmark = pytest.mark.live
grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_reflection")


def ask(port: int, version: str) -> tuple[list[str], Any, Any, str]:
    """Services, the descriptors of two of them, and what is said of one that is not there."""
    import grpc_reflection.v1alpha.reflection_pb2 as messages
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        if version == "v1":  # the same messages under the other name
            method = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                messages.ServerReflectionRequest.SerializeToString,
                messages.ServerReflectionResponse.FromString,
            )
            wanted = [
                messages.ServerReflectionRequest(list_services=""),
                messages.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
                messages.ServerReflectionRequest(file_containing_symbol="no.such.Thing"),
            ]
            listed, file, missing = list(method(iter(wanted), timeout=30))
            services = [one.name for one in listed.list_services_response.service]
            return services, file.file_descriptor_response.file_descriptor_proto[0], None, missing.error_response.error_message
        known = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(known)
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        live = service.methods_by_name["ServerLive"]
        asks, answers = GetMessageClass(live.input_type), GetMessageClass(live.output_type)
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive", asks.SerializeToString, answers.FromString)
        health = pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            GetMessageClass(health.input_type).SerializeToString,
            GetMessageClass(health.output_type).FromString,
        )
        return (
            list(known.get_services()),
            call(asks(), timeout=30).live,
            check(GetMessageClass(health.input_type)(), timeout=30).status,
            "",
        )


@pytest.mark.parametrize("ingress", [0, 1])
def test_a_client_learns_services_and_messages_from_the_server(tmp_path: Path, ingress: int) -> None:
    async def work() -> tuple[Any, Any]:
        gateway = await open_gateway(open_local(str(write_app(tmp_path, APP))), ListenConfig(grpc_port=0, ingress=ingress))
        try:
            while not gateway.is_ready():
                await asyncio.sleep(0.02)
            return await asyncio.to_thread(ask, gateway.grpc_port, "v1alpha"), await asyncio.to_thread(
                ask, gateway.grpc_port, "v1"
            )
        finally:
            await gateway.stop(5)

    (services, is_live, status, _), (same, file, _, missing) = run(work)
    assert (
        services
        == same
        == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
        ]
    )
    assert (is_live, status) == (True, 1)
    assert b"ModelInferRequest" in file and "no.such.Thing" in missing
