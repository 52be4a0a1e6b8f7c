"""Protobuf schema: the public numbers, in a pool of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="pip install 'lamina[grpc]'")

from lamina.errors import BadValue
from lamina.gateway.oip.grpc_methods import decode_tensors
from lamina.gateway.oip.schema import DESCRIPTOR, load_schema
from tests.gateway.oip.test_foreign_clients import needs

COMPARE = """
from tritonclient.grpc import model_config_pb2, service_pb2
from lamina.gateway.oip.schema import load_schema

public = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}


def same(ours, theirs):
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), field.full_name
        if field.enum_type:
            assert {v.name: v.number for v in field.enum_type.values} == {v.name: v.number for v in other.enum_type.values}
        if field.message_type:
            same(field.message_type, other.message_type)


for name, kind in load_schema()._classes.items():
    same(kind.DESCRIPTOR, public[name])
methods = {m.name: m for m in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
for name, asks, answers, *_ in load_schema().methods:
    assert (methods[name].input_type.name, methods[name].output_type.name) == (asks, answers)
"""


@pytest.mark.live
@needs("tritonclient", "grpc")
def test_names_numbers_and_types_are_the_public_ones_and_both_fit_into_one_process() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPARE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_descriptor_is_what_protoc_makes_of_the_schema(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="pip install grpcio-tools")
    folder = Path(str(resources.files("lamina.gateway.oip")))
    made = tmp_path / DESCRIPTOR
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={made}", "open_inference.proto"]) == 0
    kind = pytest.importorskip("google.protobuf.descriptor_pb2").FileDescriptorSet
    assert kind.FromString(made.read_bytes()) == kind.FromString((folder / DESCRIPTOR).read_bytes())


TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 2**16 - 1]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, float("inf")]),
    "FP64": ("fp64_contents", [0.1, float("-inf")]),
}


def request(dtype: str, field: str, elements: list[Any]) -> Any:
    message = load_schema()["ModelInferRequest"](model_name="m")
    one = message.inputs.add(name="x", datatype=dtype, shape=[len(elements)])
    getattr(one.contents, field).extend(elements)
    return message


@pytest.mark.parametrize("dtype", TYPED)
def test_typed_contents_become_raw_exactly(dtype: str) -> None:
    field, elements = TYPED[dtype]
    name = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}.get(dtype, dtype.lower())
    assert decode_tensors(request(dtype, field, elements))[0].data == np.array(elements, name).tobytes()


def test_typed_bytes_get_their_lengths() -> None:
    assert decode_tensors(request("BYTES", "bytes_contents", [b"", b"ab"]))[0].data == b"\x00\x00\x00\x00\x02\x00\x00\x00ab"


WRONG = [("INT8", "int_contents", [128]), ("UINT8", "uint_contents", [256]), ("FP16", "fp32_contents", [1.0])]
WRONG += [("INT32", "fp32_contents", [1.0]), ("FP32", "fp64_contents", [1.0])]


@pytest.mark.parametrize(("dtype", "field", "elements"), WRONG)
def test_contents_that_do_not_fit_their_dtype_are_refused(dtype: str, field: str, elements: list[Any]) -> None:
    with pytest.raises(BadValue):
        decode_tensors(request(dtype, field, elements))


def test_raw_and_typed_contents_do_not_mix() -> None:
    message = request("INT32", "int_contents", [1])
    message.raw_input_contents.append(b"\x01\x00\x00\x00")
    with pytest.raises(BadValue, match="beside"):
        decode_tensors(message)
    message.raw_input_contents.append(b"")
    with pytest.raises(BadValue, match="2 where there are 1"):
        decode_tensors(message)


@pytest.mark.live
def test_importing_lamina_does_not_bring_protobuf() -> None:
    check = "import lamina.gateway.bootstrap, sys; sys.exit('google.protobuf' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
