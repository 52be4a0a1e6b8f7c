"""Protobuf schema: the messages of `open_inference.proto` as classes, made when the server starts.

In a descriptor pool of their own: other packages bring the same messages, and protobuf refuses to know one twice. So what
protoc would generate is worked out here from the text, as far as this one file needs it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module, resources
from typing import Any

from lamina.errors import LoadFailed

_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}=;<>,()]')
_COMMENT = re.compile(r"//.*")
_SCALARS = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE, _ENUM = 11, 14
_REPEATED = 3


class Schema:
    """Message classes by name (`schema["ModelInferRequest"]`).

    `methods` are (name, request, response, is the request a stream, is the response a stream).
    """

    def __init__(self, text: str) -> None:
        factory = import_grpc_extra("google.protobuf.message_factory")
        file = import_grpc_extra("google.protobuf.descriptor_pb2").FileDescriptorProto(
            name="lamina/open_inference.proto", syntax="proto3"
        )
        self.methods: list[tuple[str, str, str, bool, bool]] = []
        _Reader(text, file, self.methods).read()
        self.package = file.package
        pool = import_grpc_extra("google.protobuf.descriptor_pool").DescriptorPool()
        pool.Add(file)
        self._classes = {
            message.name: factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
            for message in file.message_type
        }

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]


def import_grpc_extra(module: str) -> Any:
    """Import a module of the `grpc` extra."""
    try:
        return import_module(module)
    except ImportError:
        raise LoadFailed(f"{module.partition('.')[0]} is not installed", hint="pip install 'lamina[grpc]'") from None


@cache
def load_schema() -> Schema:
    return Schema(resources.files(__package__).joinpath("open_inference.proto").read_text())


class _Reader:
    def __init__(self, text: str, file: Any, methods: list[tuple[str, str, str, bool, bool]]) -> None:
        self._tokens = iter(_TOKEN.findall(_COMMENT.sub("", text)))
        self._file = file
        self._methods = methods
        self._enums = set(re.findall(r"\benum (\w+)", text))

    def read(self) -> None:
        for word in self._tokens:
            match word:
                case "package":
                    self._file.package = next(self._tokens)
                case "message":
                    self._message(self._file.message_type.add())
                case "enum":
                    self._enum(self._file.enum_type.add())
                case "service":
                    self._service()

    def _until(self, end: str) -> list[str]:
        found = []
        for word in self._tokens:
            if word == end:
                break
            found.append(word)
        return found

    def _message(self, message: Any) -> None:
        message.name, _ = next(self._tokens), next(self._tokens)
        for word in self._tokens:
            match word:
                case "}":
                    return
                case "message":
                    self._message(message.nested_type.add())
                case "enum":
                    self._enum(message.enum_type.add())
                case "oneof":
                    self._oneof(message)
                case _:
                    self._field(message, [word, *self._until(";")])

    def _oneof(self, message: Any) -> None:
        message.oneof_decl.add(name=next(self._tokens))
        next(self._tokens)
        for word in self._tokens:
            if word == "}":
                return
            self._field(message, [word, *self._until(";")]).oneof_index = len(message.oneof_decl) - 1

    def _field(self, message: Any, words: list[str]) -> Any:
        *kind, name, _, number = words
        field = message.field.add(name=name, number=int(number), label=1)
        if kind[0] == "repeated":
            field.label = _REPEATED
            kind = kind[1:]
        if kind[0] == "map":  # a list of pairs, on the wire and in the descriptor
            field.label = _REPEATED
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            self._type(entry.field.add(name="key", number=1, label=1), kind[2])
            self._type(entry.field.add(name="value", number=2, label=1), kind[4])
            self._type(field, entry.name)
        else:
            self._type(field, kind[0])
        return field

    def _type(self, field: Any, name: str) -> None:
        if name in _SCALARS:
            field.type = _SCALARS[name]
        else:
            field.type = _ENUM if name in self._enums else _MESSAGE
            field.type_name = name

    def _enum(self, enum: Any) -> None:
        enum.name, _ = next(self._tokens), next(self._tokens)
        for word in self._tokens:
            if word == "}":
                return
            _, number, _ = next(self._tokens), next(self._tokens), next(self._tokens)
            enum.value.add(name=word, number=int(number))

    def _service(self) -> None:
        next(self._tokens), next(self._tokens)
        for word in self._tokens:
            if word == "}":
                return
            name, *words = self._until(";")
            kinds = [one for one in words if one not in "()"]
            asks, answers = kinds[: kinds.index("returns")], kinds[kinds.index("returns") + 1 :]
            self._methods.append((name, asks[-1], answers[-1], len(asks) > 1, len(answers) > 1))
