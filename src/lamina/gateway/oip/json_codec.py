"""JSON codec of inference requests and responses: JSON, or JSON with raw tensors behind it.

Which of the two it is, `Inference-Header-Content-Length` says and nothing else: clients send JSON without a content type.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import msgspec
from msgspec import Raw, Struct

from lamina.errors import BadValue
from lamina.gateway.oip.json_tensors import to_list, to_raw
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, element_count

LENGTH = b"inference-header-content-length"
MAX_INPUTS = 1_024
MAX_OUTPUT_BYTES = 256 * 2**10
"""Size limit of the `outputs` field: counts are bounded before anything is allocated for each."""
SCANNED_BYTES = 2**20
"""Scanned of a body before it is decoded: too many inputs show within it, or each of them is large."""
_INPUT = re.compile(rb'"datatype"\s*:')

Parameters = dict[str, Any]


class _Input(Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = {}
    data: Raw = Raw()


class _RequestedOutput(Struct):
    name: str
    parameters: Parameters = {}


class _Request(Struct):
    inputs: list[Raw] = []
    id: str = ""
    parameters: Parameters = {}
    outputs: Raw = Raw()


class DecodedRequest(Struct):
    """A decoded request. `binary` are the outputs to be sent raw; None: all."""

    id: str
    parameters: Parameters
    inputs: list[InputTensor]
    requested_outputs: list[str]
    binary_outputs: frozenset[str] | None


_request = msgspec.json.Decoder(_Request)
_input = msgspec.json.Decoder(_Input)
_requested_outputs = msgspec.json.Decoder(list[_RequestedOutput])


def decode_request(body: bytes, header_length: bytes) -> DecodedRequest:
    """Decode a body; `header_length` is where its JSON ends."""
    raw = memoryview(body)
    head = body
    if header_length:
        size = int(header_length) if header_length.isdigit() and len(header_length) < 16 else -1
        if not 0 <= size <= len(body):
            raise BadValue(f"{LENGTH.decode()}: {header_length[:20].decode('latin-1')!r} is no length in {len(body)} bytes")
        head, raw = body[:size], raw[size:]
    else:
        raw = raw[:0]
    request, given, wanted = _parts(head)
    inputs = []
    at = 0
    for one in given:
        size = one.parameters.get("binary_data_size", -1)
        if size == -1:
            if not len(bytes(one.data)):
                raise BadValue(f"{one.name[:80]}: no data", hint="give data, or binary_data_size and the bytes behind the JSON")
            inputs.append(InputTensor(one.name, one.datatype, one.shape, to_raw(one.name[:80], one.datatype, one.data)))
            continue
        if type(size) is not int or size < 0 or at + size > len(raw):
            raise BadValue(f"{one.name[:80]}: binary_data_size {str(size)[:20]!r}; {len(raw) - at} bytes are left")
        inputs.append(InputTensor(one.name, one.datatype, one.shape, raw[at : at + size]))
        at += size
    if at != len(raw):
        raise BadValue(f"body: {len(raw) - at} bytes that belong to no input")
    return DecodedRequest(
        request.id, request.parameters, inputs, [one.name for one in wanted], _binary(request.parameters, wanted)
    )


def to_binary(body: bytes, header_length: bytes) -> tuple[bytes, int]:
    """The same request with all tensors behind its JSON, where they need no decoding; and the length of the JSON."""
    decoded = decode_request(body, header_length)
    head = body[: int(header_length)] if header_length else body
    request, given, _ = _parts(head)
    inputs: list[dict[str, Any]] = [
        {
            "name": tensor.name,
            "datatype": tensor.dtype,
            "shape": tensor.shape,
            "parameters": one.parameters | {"binary_data_size": len(tensor.data)},
        }
        for one, tensor in zip(given, decoded.inputs, strict=True)
    ]
    made: dict[str, Any] = {"id": request.id, "parameters": request.parameters, "inputs": inputs}
    if bytes(request.outputs):
        made["outputs"] = request.outputs
    text = msgspec.json.encode(made)
    return b"".join((text, *(tensor.data for tensor in decoded.inputs))), len(text)


def _parts(head: bytes) -> tuple[_Request, list[_Input], list[_RequestedOutput]]:
    seem_many = head.count(b'"datatype"', 0, SCANNED_BYTES) > MAX_INPUTS  # but it may be among the texts of a tensor
    if seem_many and next(islice(_INPUT.finditer(head, 0, SCANNED_BYTES), MAX_INPUTS, None), None) is not None:
        raise BadValue(f"inputs: more than {MAX_INPUTS} of them", hint="give each once")
    try:
        request = _request.decode(head)
        if len(request.inputs) > MAX_INPUTS:
            raise BadValue(f"inputs: more than {MAX_INPUTS} of them", hint="give each once")
        outputs = bytes(request.outputs)
        if len(outputs) > MAX_OUTPUT_BYTES:
            raise BadValue(f"outputs: {len(outputs)} bytes about them", hint="ask for each once")
        return request, [_input.decode(one) for one in request.inputs], _requested_outputs.decode(outputs) if outputs else []
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadValue(f"body: not an inference request: {error}") from None


def _binary(parameters: Parameters, wanted: list[_RequestedOutput]) -> frozenset[str] | None:
    by_default = parameters.get("binary_data_output") is True
    if not wanted:
        return None if by_default else frozenset()
    if any("classification" in one.parameters for one in wanted):
        raise BadValue("outputs: classification is not served", hint="ask for the scores, and sort them")
    return frozenset(one.name for one in wanted if one.parameters.get("binary_data", by_default) is True)


def encode_response(model: ServedModel, request: DecodedRequest, outputs: list[OutputTensor]) -> tuple[bytes, bytes, bytes]:
    """Body, content type, and a header line that says where the JSON ends."""
    tail: list[Any] = []
    described = []
    for output in outputs:
        shown: dict[str, Any] = {"name": output.name, "datatype": output.dtype, "shape": output.shape}
        if request.binary_outputs is None or output.name in request.binary_outputs:
            shown["parameters"] = {"binary_data_size": len(output.data)}
            tail.append(output.data)
        else:
            shown["data"] = to_list(output.name, output.dtype, output.data, element_count(output.shape))
        described.append(shown)
    answer = {"model_name": model.name, "model_version": model.version, "outputs": described}
    if request.id:
        answer["id"] = request.id
    head = msgspec.json.encode(answer)
    if not tail:
        return head, b"application/json", b""
    return b"".join((head, *tail)), b"application/octet-stream", b"inference-header-content-length: %d\r\n" % len(head)
