"""Protobuf schema: the messages of `open_inference.proto` as classes, from its serialized descriptor (`open_inference.binpb`).

In a descriptor pool of their own: other packages bring the same messages, and protobuf refuses to know one twice. So there is no
generated module, which would enter them into the pool that all share. A test compares the descriptor with what protoc makes:

    python -m grpc_tools.protoc -I . --descriptor_set_out=open_inference.binpb open_inference.proto
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, resources
from typing import Any

from lamina.errors import LoadFailed

DESCRIPTOR = "open_inference.binpb"


class Schema:
    """Message classes by name (`schema["ModelInferRequest"]`).

    `methods` are (name, request, response, is the request a stream, is the response a stream).
    """

    def __init__(self, descriptor: bytes) -> None:
        factory = import_grpc_extra("google.protobuf.message_factory")
        (file,) = import_grpc_extra("google.protobuf.descriptor_pb2").FileDescriptorSet.FromString(descriptor).file
        pool = import_grpc_extra("google.protobuf.descriptor_pool").DescriptorPool()
        pool.Add(file)
        found = pool.FindFileByName(file.name)
        self.package: str = found.package
        self._classes = {name: factory.GetMessageClass(message) for name, message in found.message_types_by_name.items()}
        (service,) = file.service
        self.service = f"{file.package}.{service.name}"
        self.methods: list[tuple[str, str, str, bool, bool]] = [
            (one.name, _bare(one.input_type), _bare(one.output_type), one.client_streaming, one.server_streaming)
            for one in service.method
        ]

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def import_grpc_extra(module: str) -> Any:
    """Import a module of the `grpc` extra."""
    try:
        return import_module(module)
    except ImportError:
        raise LoadFailed(f"{module.partition('.')[0]} is not installed", hint="pip install 'lamina[grpc]'") from None


@cache
def load_schema() -> Schema:
    return Schema(resources.files(__package__).joinpath(DESCRIPTOR).read_bytes())


HEALTH_SERVICE = "grpc.health.v1.Health"
HEALTH_CHECK = "Check"


@cache
def load_health_schema() -> dict[str, Any]:
    """Messages of gRPC's own health service, which probes of Kubernetes and load balancers speak: a name in, a status out."""
    kinds = import_grpc_extra("google.protobuf.descriptor_pb2")
    factory = import_grpc_extra("google.protobuf.message_factory")
    file = kinds.FileDescriptorProto(name="lamina/health.proto", package="grpc.health.v1", syntax="proto3")
    types = kinds.FieldDescriptorProto
    fields = {"HealthCheckRequest": ("service", types.TYPE_STRING), "HealthCheckResponse": ("status", types.TYPE_INT32)}
    for message, (field, kind) in fields.items():
        file.message_type.add(name=message).field.add(name=field, number=1, type=kind, label=types.LABEL_OPTIONAL)
    pool = import_grpc_extra("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    return {name: factory.GetMessageClass(message) for name, message in found.message_types_by_name.items()}
