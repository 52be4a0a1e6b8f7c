"""Inference requests and responses, whatever transport carries them and whatever backend answers them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lamina.access.records import Identity
from lamina.core.actions import Reply
from lamina.encoding import Blob
from lamina.errors import BadValue, LaminaError
from lamina.gateway.auth import LOCAL
from lamina.gateway.observability import logs
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.row_conversion import (
    InvalidOutput,
    is_heavy_join,
    is_heavy_split,
    join_apart,
    join_rows,
    split_apart,
    split_in_parts,
    split_rows,
)
from lamina.gateway.oip.tensors import InputTensor, OutputTensor
from lamina.gateway.routes.codec_pool import FLAT_BYTES, CodecOverloaded, CodecPool, CodecTooLarge
from lamina.gateway.routes.http_codec import JSON
from lamina.gateway.routes.problems import HttpProblem, defect_problem, error_problem, make_problem
from lamina.gateway.routes.request_options import OPTION_NAMES, OWN_PREFIX
from lamina.ipc.sliced_copies import Parts, SlicedCopies
from lamina.server.exchange import Exchange
from lamina.server.request_parser import MAX_NAME_BYTES, OwnHeaders

log = logging.getLogger("lamina")

MAX_TIMEOUT_US = 86_400_000_000
MAX_PRIORITY = 10
"""The protocol counts priorities from 1, the most urgent, with 0 for the default; ours go from 10 down to -10."""


@dataclass(slots=True)
class InferenceRequest:
    """One inference request."""

    model: ServedModel
    inputs: Sequence[InputTensor]
    requested_outputs: Sequence[str] = ()  #: outputs by name; empty: all
    timeout_us: int = 0
    priority: int = 0
    caller: Identity = LOCAL
    traceparent: bytes = b""  #: the caller's own, as in W3C's traceparent


@dataclass(slots=True)
class InferenceResponse:
    """The outputs of an inference request, and the reply of its last call."""

    outputs: list[OutputTensor]
    reply: Reply


OnResponse = Callable[[InferenceResponse | HttpProblem], None]
OnChunk = Callable[[list[OutputTensor]], None]


class InferenceBackend(Protocol):
    """Backend of inference: the controller's own service, or an ingress that asks it."""

    def infer(self, request: InferenceRequest, on_response: OnResponse, on_chunk: OnChunk | None = None) -> Callable[[], None]:
        """Start a request; returns how to cancel it. Errors of the request itself are raised."""
        ...


Cancel = Callable[[], None]


StoreRows = Callable[[Sequence[Mapping[str, Parts]], Callable[[list[dict[str, Any]]], None]], None]
"""Puts the rows of a large request where its calls have them, a slice in a turn of the loop."""


def begin_request(
    codecs: CodecPool | None,
    request: InferenceRequest,
    rows: int,
    begin: Callable[[list[dict[str, Any]]], Cancel],
    on_response: OnResponse,
    store: StoreRows | None = None,
    discard: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> Cancel:
    """Begin a request with the rows of its tensors; returns how to cancel it. Texts are taken apart by a codec process; what is
    large and passes through is copied once, by `store`; what that has stored is for `discard` if the request was cancelled."""
    model, inputs = request.model, request.inputs
    is_heavy = is_heavy_split(inputs)
    if codecs is None or (not is_heavy and sum([len(one.data) for one in inputs]) <= FLAT_BYTES):
        return begin(split_rows(model, inputs, rows))
    begun: list[Cancel] = []
    is_cancelled = False

    def then(calls: list[dict[str, Any]] | LaminaError) -> None:
        if is_cancelled:
            for row in calls if isinstance(calls, list) else ():
                discard(row)
            return
        try:
            if isinstance(calls, LaminaError):
                raise calls
            begun.append(begin(calls))
        except LaminaError as error:
            on_response(error_problem(error))
        except Exception as error:
            on_response(defect_problem("a large inference request failed", error))

    def stored(parts: Sequence[Mapping[str, Parts]]) -> None:
        if store is not None:
            store(parts, then)
        else:
            call_soon(then, [{name: b"".join(one) for name, one in row.items()} for row in parts])

    def split() -> None:
        try:
            parts = split_in_parts(model, inputs, rows)
        except LaminaError as error:
            then(error)
        else:
            stored(parts)

    def split_by_process(calls: list[dict[str, bytes]] | LaminaError) -> None:
        if isinstance(calls, LaminaError):
            then(calls)
        else:
            stored([{name: (blob,) for name, blob in row.items()} for row in calls])

    def cancel() -> None:
        nonlocal is_cancelled
        is_cancelled = True
        for one in begun:
            one()

    call_soon = asyncio.get_running_loop().call_soon
    if is_heavy:
        split_apart(codecs, model, inputs, rows, split_by_process)
    else:
        call_soon(split)
    return cancel


def respond_joined(
    codecs: CodecPool | None,
    request: InferenceRequest,
    blobs: Sequence[Blob],
    reply: Reply,
    on_response: OnResponse,
    copies: SlicedCopies | None = None,
    release: Callable[[], None] = lambda: None,
) -> None:
    """Respond with the tensors that are the results of all rows; what is large and has many parts is taken apart elsewhere. With
    `copies`, the results are there until `release` is called, and what is large is copied in several turns of the loop."""

    def fail(error: LaminaError | InvalidOutput) -> None:
        if isinstance(error, CodecOverloaded | CodecTooLarge):
            on_response(error_problem(error, reply.call_id))
        else:
            on_response(invalid_output_problem(request.model, error, reply.call_id))

    def then(outputs: list[OutputTensor] | LaminaError) -> None:
        release()
        if isinstance(outputs, LaminaError):
            fail(outputs)
        else:
            on_response(InferenceResponse(outputs, reply))

    if codecs is not None and is_heavy_join(blobs):
        kept = blobs if copies is not None else [bytes(blob) for blob in blobs]
        join_apart(codecs, request.model, kept, request.requested_outputs, then)
        return
    try:
        outputs = join_rows(request.model, blobs, request.requested_outputs, in_place=copies is not None) if blobs else []
    except (InvalidOutput, LaminaError) as error:
        release()
        fail(error)
        return
    if copies is None or not any(isinstance(one.data, memoryview) for one in outputs):
        then(outputs)
        return
    (output,) = outputs  # one that passes through

    def copied(data: bytes) -> None:
        then([msgspec.structs.replace(output, data=data)])

    copies.join([output.data], copied)


def timeout_and_priority(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Timeout in microseconds, and priority as we count it, from the parameters of a request; 0 where there is none."""
    timeout_us = _parse_int(parameters, "timeout")
    level = _parse_int(parameters, "priority")
    return min(timeout_us, MAX_TIMEOUT_US), max(-MAX_PRIORITY, MAX_PRIORITY + 1 - level) if level else 0


_ELSEWHERE = frozenset(name.encode() for name in OPTION_NAMES)
_INSTEAD = "of this protocol's requests, 'timeout' (in microseconds) and 'priority' are parameters"


def reject_option_headers(headers: Mapping[bytes, bytes]) -> None:
    """Reject option headers of /v1, which are parameters here: ignored, a deadline would be none."""
    if not headers.keys().isdisjoint(_ELSEWHERE):
        name = next(name for name in headers if name in _ELSEWHERE)
        raise BadValue(f"{name.decode()!r} is no header of /v2", hint=_INSTEAD)


def _explain_metadata(name: bytes) -> tuple[str, str]:
    shown = name[:MAX_NAME_BYTES].decode("latin-1")
    return f"{shown!r} is not read over gRPC ({_INSTEAD}; the call's own time limit does as well)", ""


GRPC_HEADERS = OwnHeaders(OWN_PREFIX, frozenset(), _explain_metadata)
"""Over gRPC all metadata that begins with `lamina-` is rejected."""


def _parse_int(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is str and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**64:
        raise BadValue(f"parameters.{name}: {str(value)[:40]!r} is not a whole number from 0")
    return value


def invalid_output_problem(model: ServedModel, error: Exception, call_id: str) -> HttpProblem:
    """The problem of a result that does not fit the model's signature."""
    log.warning("call %s: %s gave what it does not promise: %s", call_id, model.target_name, error)
    return make_problem(500, f"the result is not what the model promises: {error}", code="function-failed", id=call_id)


def error_text(problem: HttpProblem) -> str:
    """A problem as one line of text."""
    offer = f"; in {problem.offer_ms:g} ms it could" if problem.offer_ms else ""
    return f"{problem.detail or problem.title}{offer}{f' ({problem.hint})' if problem.hint else ''}"


def respond_error(exchange: Exchange, problem: HttpProblem) -> None:
    """Respond with an error."""
    logs.log_rejection(problem)
    exchange.respond(problem.status, msgspec.json.encode({"error": error_text(problem)}), JSON, problem.headers())
