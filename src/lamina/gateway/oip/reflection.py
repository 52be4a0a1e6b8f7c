"""gRPC server reflection (v1 and v1alpha): tools such as grpcurl learn services and messages from the server itself.

Both versions have the same messages on the wire, so one set of classes reads and writes them. What is told is the protocol,
which is public; which models there are is asked with its own methods, and a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from lamina.errors import BadValue
from lamina.gateway.oip.schema import DESCRIPTOR, HEALTH_SERVICE, import_grpc_extra, load_schema
from lamina.server.grpc import GrpcMethod, OnDone, OnMessage

METHOD = "ServerReflectionInfo"
VERSIONS = ("v1", "v1alpha")
_NOT_FOUND, _UNIMPLEMENTED = 5, 12
MAX_REQUEST_BYTES = 4_096
"""Of names. A request is part of its response, and anyone may send one."""


def service_of(version: str) -> str:
    return f"grpc.reflection.{version}.ServerReflection"


class Reflection:
    """Answers of server reflection."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._file_of: dict[str, str] = {}  #: by symbol
        for file in _served_files():
            self._files[file.name] = file.SerializeToString()
            self._file_of |= dict.fromkeys(_symbols(file), file.name)
        self._kinds = _messages()
        self.services = sorted([load_schema().service, HEALTH_SERVICE, *(service_of(version) for version in VERSIONS)])

    @property
    def methods(self) -> dict[bytes, GrpcMethod]:
        return {f"/{service_of(version)}/{METHOD}".encode(): GrpcMethod(METHOD, self._parse, True) for version in VERSIONS}

    @property
    def request_type(self) -> Any:
        return self._kinds["ServerReflectionRequest"]

    def _parse(self, message: bytes) -> Any:
        if len(message) > MAX_REQUEST_BYTES:
            raise BadValue(f"a request of {len(message)} bytes", hint=f"at most {MAX_REQUEST_BYTES} are taken")
        return self.request_type.FromString(message)

    def is_request(self, message: Any) -> bool:
        return isinstance(message, self.request_type)

    def answer(self, message: Any, then: OnMessage, done: OnDone) -> Callable[[], None] | None:
        """One answer for one question of a stream."""
        response = self._kinds["ServerReflectionResponse"](valid_host=message.host)
        response.original_request.CopyFrom(message)
        asked = message.WhichOneof("message_request")
        if asked == "list_services":
            for name in self.services:
                response.list_services_response.service.add(name=name)
        elif asked == "file_by_filename":
            self._tell_file(response, message.file_by_filename, message.file_by_filename)
        elif asked == "file_containing_symbol":
            symbol = message.file_containing_symbol
            self._tell_file(response, self._file_of.get(symbol, ""), symbol)
        elif asked == "all_extension_numbers_of_type" and message.all_extension_numbers_of_type in self._file_of:
            response.all_extension_numbers_response.base_type_name = message.all_extension_numbers_of_type
        else:
            code = _UNIMPLEMENTED if asked is None else _NOT_FOUND
            response.error_response.error_code, response.error_response.error_message = code, "there is no such thing here"
        then(response)
        done()
        return None

    def _tell_file(self, response: Any, file: str, asked: str) -> None:
        if file in self._files:
            response.file_descriptor_response.file_descriptor_proto.append(self._files[file])
        else:
            response.error_response.error_code = _NOT_FOUND
            response.error_response.error_message = f"no {asked[:80]!r} here"


# ------------------------------------------------------------------------- descriptors

_STRING, _INT32, _BYTES, _MESSAGE, _ENUM = "TYPE_STRING", "TYPE_INT32", "TYPE_BYTES", "TYPE_MESSAGE", "TYPE_ENUM"
Field = tuple[str, int, str, str, bool]
"""Name, number, type, the message or enum it is of, whether it is repeated."""

_ONE_OF = "message_request", "message_response"
_REFLECTION: dict[str, list[Field]] = {
    "ServerReflectionRequest": [
        ("host", 1, _STRING, "", False),
        ("file_by_filename", 3, _STRING, "", False),
        ("file_containing_symbol", 4, _STRING, "", False),
        ("file_containing_extension", 5, _MESSAGE, "ExtensionRequest", False),
        ("all_extension_numbers_of_type", 6, _STRING, "", False),
        ("list_services", 7, _STRING, "", False),
    ],
    "ExtensionRequest": [("containing_type", 1, _STRING, "", False), ("extension_number", 2, _INT32, "", False)],
    "ServerReflectionResponse": [
        ("valid_host", 1, _STRING, "", False),
        ("original_request", 2, _MESSAGE, "ServerReflectionRequest", False),
        ("file_descriptor_response", 4, _MESSAGE, "FileDescriptorResponse", False),
        ("all_extension_numbers_response", 5, _MESSAGE, "ExtensionNumberResponse", False),
        ("list_services_response", 6, _MESSAGE, "ListServiceResponse", False),
        ("error_response", 7, _MESSAGE, "ErrorResponse", False),
    ],
    "FileDescriptorResponse": [("file_descriptor_proto", 1, _BYTES, "", True)],
    "ExtensionNumberResponse": [("base_type_name", 1, _STRING, "", False), ("extension_number", 2, _INT32, "", True)],
    "ListServiceResponse": [("service", 1, _MESSAGE, "ServiceResponse", True)],
    "ServiceResponse": [("name", 1, _STRING, "", False)],
    "ErrorResponse": [("error_code", 1, _INT32, "", False), ("error_message", 2, _STRING, "", False)],
}
_HEALTH: dict[str, list[Field]] = {
    "HealthCheckRequest": [("service", 1, _STRING, "", False)],
    "HealthCheckResponse": [("status", 1, _ENUM, "HealthCheckResponse.ServingStatus", False)],
}
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def _file(name: str, package: str, messages: dict[str, list[Field]]) -> Any:
    kinds = import_grpc_extra("google.protobuf.descriptor_pb2")
    file = kinds.FileDescriptorProto(name=name, package=package, syntax="proto3")
    types = kinds.FieldDescriptorProto
    for message, fields in messages.items():
        made = file.message_type.add(name=message)
        for field, number, kind, of, is_repeated in fields:
            label = types.LABEL_REPEATED if is_repeated else types.LABEL_OPTIONAL
            added = made.field.add(name=field, number=number, type=getattr(types, kind), label=label)
            if of:
                added.type_name = f".{package}.{of}"
            if message.startswith("ServerReflection") and number > 2:  # one of them is given
                if not made.oneof_decl:
                    made.oneof_decl.add(name=_ONE_OF[message.endswith("Response")])
                added.oneof_index = 0
    return file


def _reflection_file(version: str) -> Any:
    package = f"grpc.reflection.{version}"
    file = _file(f"grpc/reflection/{version}/reflection.proto", package, _REFLECTION)
    file.service.add(name="ServerReflection").method.add(
        name=METHOD,
        input_type=f".{package}.ServerReflectionRequest",
        output_type=f".{package}.ServerReflectionResponse",
        client_streaming=True,
        server_streaming=True,
    )
    return file


def _health_file() -> Any:
    package = HEALTH_SERVICE.rpartition(".")[0]
    file = _file("grpc/health/v1/health.proto", package, _HEALTH)
    statuses = next(one for one in file.message_type if one.name == "HealthCheckResponse").enum_type.add(name="ServingStatus")
    for number, name in enumerate(_STATUSES):
        statuses.value.add(name=name, number=number)
    asks, answers = f".{package}.HealthCheckRequest", f".{package}.HealthCheckResponse"
    file.service.add(name="Health").method.add(name="Check", input_type=asks, output_type=answers)
    return file


def _served_files() -> list[Any]:
    read = import_grpc_extra("google.protobuf.descriptor_pb2").FileDescriptorSet.FromString
    own = read(resources.files(__package__).joinpath(DESCRIPTOR).read_bytes()).file
    return [*own, _health_file(), *(_reflection_file(version) for version in VERSIONS)]


@cache
def _messages() -> dict[str, Any]:
    factory = import_grpc_extra("google.protobuf.message_factory")
    pool = import_grpc_extra("google.protobuf.descriptor_pool").DescriptorPool()
    file = _reflection_file("v1")
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: factory.GetMessageClass(message) for name, message in found.items()}


def _symbols(file: Any) -> list[str]:
    """Full names of the messages, enums, services and methods of a file."""
    found = []

    def add(parent: str, message: Any) -> None:
        name = f"{parent}.{message.name}"
        found.append(name)
        for inner in message.nested_type:
            add(name, inner)
        found.extend(f"{name}.{one.name}" for one in message.enum_type)

    for message in file.message_type:
        add(file.package, message)
    found += [f"{file.package}.{one.name}" for one in file.enum_type]
    for service in file.service:
        found.append(f"{file.package}.{service.name}")
        found += [f"{file.package}.{service.name}.{method.name}" for method in service.method]
    return found
