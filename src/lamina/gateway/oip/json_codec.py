"""JSON codec of inference requests and responses: JSON, or JSON with raw tensors behind it.

Which of the two it is, `Inference-Header-Content-Length` says and nothing else: clients send JSON without a content type.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import msgspec
from msgspec import Raw, Struct

from lamina.encoding import from_json
from lamina.errors import BadValue
from lamina.gateway.oip.json_tensors import to_list, to_raw
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, element_count
from lamina.ipc.sliced_copies import Parts, size_of

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


class _TextOutput(Struct):
    """An output whose bytes are elsewhere. `binary`: they are to be sent as they are; `is_json`: it is a value as JSON text."""

    name: str
    datatype: str
    shape: list[int]
    size: int
    binary: bool = False
    is_json: bool = False


class _TextResponse(Struct):
    """A response to be made. `plain`: of plain values, as those of `generate` are."""

    model_name: str
    model_version: str
    id: Any
    outputs: list[_TextOutput]
    plain: bool = False


def is_binary_output(request: DecodedRequest, name: str) -> bool:
    return request.binary_outputs is None or name in request.binary_outputs


def text_bytes(request: DecodedRequest, outputs: list[OutputTensor]) -> int:
    """Bytes of outputs of which text is to be made."""
    return sum([len(output.data) for output in outputs if not is_binary_output(request, output.name)])


def encode_response(model: ServedModel, request: DecodedRequest, outputs: list[OutputTensor]) -> tuple[Parts, bytes, bytes]:
    """Body, in parts that are not put together yet; content type, and a header line that says where the JSON ends."""
    binary = [is_binary_output(request, output.name) for output in outputs]
    parts, size = _encoded(model.name, model.version, request.id, outputs, binary)
    return parts, *response_kind(size_of(parts), size)


def response_kind(size: int, json_size: int) -> tuple[bytes, bytes]:
    """Content type and header line of a response of so many bytes, of which the first are JSON."""
    if size == json_size:
        return b"application/json", b""
    return b"application/octet-stream", b"inference-header-content-length: %d\r\n" % json_size


def text_job(model: ServedModel, request: DecodedRequest, outputs: list[OutputTensor]) -> tuple[bytes, Parts]:
    """What `to_text` makes the same response of, in another process: what it says, and the bytes of all outputs."""
    described = [
        _TextOutput(one.name, one.dtype, list(one.shape), len(one.data), is_binary_output(request, one.name)) for one in outputs
    ]
    head = msgspec.json.encode(_TextResponse(model.name, model.version, request.id, described))
    return head, [output.data for output in outputs]


def plain_text_job(model: ServedModel, id: Any, outputs: list[OutputTensor]) -> tuple[bytes, Parts]:
    """The same for a response of plain values."""
    texts = _json_outputs(model)
    described = [_TextOutput(one.name, one.dtype, list(one.shape), len(one.data), is_json=one.name in texts) for one in outputs]
    head = msgspec.json.encode(_TextResponse(model.name, model.version, id, described, plain=True))
    return head, [output.data for output in outputs]


def to_text(head: bytes, data: bytes) -> tuple[bytes, int]:
    """The response that `text_job` or `plain_text_job` describes, and the length of its JSON."""
    response = msgspec.json.decode(head, type=_TextResponse)
    outputs, at = [], 0
    for one in response.outputs:
        outputs.append(OutputTensor(one.name, one.datatype, one.shape, memoryview(data)[at : at + one.size]))
        at += one.size
    name, version = response.model_name, response.model_version
    if response.plain:
        body = _plain(name, version, response.id, outputs, {one.name for one in response.outputs if one.is_json})
        return body, len(body)
    parts, size = _encoded(name, version, response.id, outputs, [one.binary for one in response.outputs])
    return b"".join(parts), size


def plain_document(model: ServedModel, id: Any, outputs: list[OutputTensor]) -> bytes:
    """A response of plain values by name: one element as it is, several as a list; JSON text is decoded."""
    return _plain(model.name, model.version, id, outputs, _json_outputs(model))


def _json_outputs(model: ServedModel) -> set[str]:
    return {port.name for port in model.signature.outputs if port.tensor is None and port.plain not in ("text", "bytes")}


def _plain(name: str, version: str, id: Any, outputs: list[OutputTensor], texts: set[str]) -> bytes:
    document: dict[str, Any] = {"model_name": name, "model_version": version}
    if id:
        document["id"] = id
    for output in outputs:
        found = to_list(output.name, output.dtype, output.data, element_count(output.shape))
        if output.name in texts:
            found = [from_json(text.encode()) for text in found]
        document[output.name] = found[0] if len(found) == 1 else found
    return msgspec.json.encode(document)


def _encoded(name: str, version: str, id: str, outputs: list[OutputTensor], binary: list[bool]) -> tuple[Parts, int]:
    tail: list[Any] = []
    described = []
    for output, is_binary in zip(outputs, binary, strict=True):
        shown: dict[str, Any] = {"name": output.name, "datatype": output.dtype, "shape": output.shape}
        if is_binary:
            shown["parameters"] = {"binary_data_size": len(output.data)}
            tail.append(output.data)
        else:
            shown["data"] = to_list(output.name, output.dtype, output.data, element_count(output.shape))
        described.append(shown)
    answer = {"model_name": name, "model_version": version, "outputs": described}
    if id:
        answer["id"] = id
    head = msgspec.json.encode(answer)
    return (head, *tail), len(head)
