"""Job codec inside a process that runs functions: arguments out of a frame, results into one.

A large result is encoded without copies, in chunks that stay where they are until they are copied once, to their reader:
`encoding.encode` makes one buffer of a value, which copies an array several times on the way. The chunks put together are the
same bytes; a test keeps it so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lamina import encoding
from lamina.errors import BadValue, LaminaError
from lamina.expr import Absent, Leaf, evaluate
from lamina.ipc.framing import MAX_FRAME_BYTES
from lamina.sdk.app_state import BatchState, StateChanges
from lamina.sdk.spans import InnerSpan
from lamina.sdk.user_errors import user_trace
from lamina.values.references import DeviceRef, ErrorInfo, ShmRef, Stored, pack_fields
from lamina.values.shm import INLINE_BYTES, ShmPool
from lamina.worker.protocol import MAX_SPAN_BYTES, JobFrame, PackedChanges

_INLINE_BUDGET_BYTES = MAX_FRAME_BYTES // 2
"""Results in one frame, when shared memory is full; the other half is room for error texts."""

_MESSAGE_CHARS = 4_000

MAX_RAISED_BYTES = 256 * 1024
"""Of a response that is raised instead of returned."""

LARGE_BYTES = 32 * 1024
"""Copying less costs less than taking it apart."""

Chunk = bytes | memoryview


def decode_arguments(job: JobFrame, open_value: Callable[[Stored], Any]) -> dict[str, Any]:
    """Decode the arguments of a job. Each value is opened at most once, and only if an expression reads it."""
    stored = dict(job.leaves)
    opened: dict[Leaf, Any] = {}

    def look_up(leaf: Leaf) -> Any:
        if leaf not in opened:
            if leaf not in stored:
                raise Absent(f"no {' '.join(leaf).strip()}")
            opened[leaf] = open_value(stored[leaf])
        return opened[leaf]

    if job.args is None:
        return {name: open_value(value) for (_, name), value in job.leaves}
    return {name: evaluate(expr, look_up) for name, expr in job.args.items()}


def changes_of(state: BatchState, results: Sequence[object]) -> list[StateChanges]:
    """What the jobs of a batch have read and changed of the state; of one that failed, nothing."""
    return state.changes(lambda place: not isinstance(results[place], ErrorInfo))


def packed_changes(state: BatchState, results: Sequence[object]) -> list[PackedChanges]:
    """The same for a frame: each by itself, to be looked at one by one."""
    return [(one.place, msgspec.msgpack.encode(one)) for one in changes_of(state, results)]


def packed_spans(spans: list[InnerSpan]) -> bytes:
    """Spans for a frame: as many as are taken."""
    while spans:
        packed = msgspec.msgpack.encode(spans)
        if len(packed) <= MAX_SPAN_BYTES:
            return packed
        spans = spans[: len(spans) // 2]
    return b""


def encode_results(pool: ShmPool, outputs: list[Any]) -> list[bytes | ShmRef | DeviceRef | ErrorInfo]:
    """Encode one result per output. An output that cannot be encoded fails alone."""
    budget = _INLINE_BUDGET_BYTES
    results: list[bytes | ShmRef | DeviceRef | ErrorInfo] = []
    for output in outputs:
        result: bytes | ShmRef | DeviceRef | ErrorInfo | None
        if isinstance(output, ErrorInfo | DeviceRef):
            result = output
        elif isinstance(output, BaseException) and not isinstance(output, encoding.Response):
            result = error_info(output)
        else:
            try:
                parts = encode_chunks(output)
            except BadValue as error:  # the function's fault, not the caller's
                result = ErrorInfo("TypeError", f"its result: {error.message}; {error.hint}")
            except Exception as error:
                result = error_info(error)
            else:
                size = sum(map(len, parts))
                result = pool.put_parts(parts) if size > INLINE_BYTES else None
                if result is None and size <= budget:
                    result = b"".join(parts)
                    budget -= size
                if result is None:
                    result = ErrorInfo("ResultTooBig", f"a result of {size} bytes finds no room to travel")
        results.append(result)
    return results


def error_info(error: BaseException) -> ErrorInfo:
    if isinstance(error, encoding.RaisedResponse):
        return _response_info(error.response)
    try:
        message, hint = (error.message, error.hint) if isinstance(error, LaminaError) else (str(error), "")
    except Exception:  # the user's class, the user's __str__
        message, hint = "(its text could not be read)", ""
    trace = _clean(user_trace(error))
    fields = [(_clean(name), _clean(why)) for name, why in error.fields] if isinstance(error, BadValue) else []
    said = (_clean(message[:_MESSAGE_CHARS]), trace, _clean(hint[:_MESSAGE_CHARS]))
    return ErrorInfo(type(error).__name__[:_MESSAGE_CHARS], *said, fields=pack_fields(fields))


def _response_info(response: encoding.Response) -> ErrorInfo:
    """A response that was raised. It travels inside of a frame, so it is small."""
    try:
        blob = encoding.encode(response)
    except BadValue as error:
        return ErrorInfo("TypeError", f"its response: {error.message}", hint=error.hint)
    if len(blob) > MAX_RAISED_BYTES:
        return ErrorInfo("ResultTooBig", f"a response of {len(blob)} bytes is raised; return one that is so large")
    return ErrorInfo("Response", _clean(str(response)[:_MESSAGE_CHARS]), status=response.status, response=blob)


def _clean(text: str) -> str:
    """Replace lone surrogates, say from an undecodable file name: they cannot be sent."""
    return text.encode(errors="replace").decode()


# ------------------------------------------------------------------ without copies


def encode_chunks(value: Any) -> list[Chunk]:
    """Encode a value as chunks. Raises `BadValue` for what cannot be encoded, like `encoding.encode`."""
    parts: list[Chunk] = []
    _add(value, parts, 0)
    return parts if len(parts) > 1 else [bytes(parts[0])]


def _add(value: Any, parts: list[Chunk], depth: int) -> None:
    kind = type(value)
    if kind is bytes and len(value) >= LARGE_BYTES:
        parts += [_head(len(value), (0xC4, 0xC5, 0xC6)), memoryview(value)]
    elif kind is dict and depth < 2 and len(value) < 16 and all(type(key) is str for key in value):
        parts.append(bytes([0x80 | len(value)]))
        for key, inner in value.items():
            parts.append(encoding.encode(key))
            _add(inner, parts, depth + 1)
    elif kind in (list, tuple) and depth < 2 and len(value) < 16:
        parts.append(bytes([0x90 | len(value)]))
        for inner in value:
            _add(inner, parts, depth + 1)
    elif _is_large_array(value):
        head = msgspec.msgpack.encode((value.dtype.name, list(value.shape)))
        head = len(head).to_bytes(2, "little") + head
        size = len(head) + value.nbytes
        parts += [_head(size, (0xC7, 0xC8, 0xC9)) + bytes([encoding.TENSOR]) + head, memoryview(value.reshape(-1).view("u1"))]
    else:
        parts.append(encoding.encode(value))


def _head(size: int, kinds: tuple[int, int, int]) -> bytes:
    """The msgpack header of an object of this length."""
    width = 0 if size < 2**8 else 1 if size < 2**16 else 2
    return bytes([kinds[width]]) + size.to_bytes(1 << width, "big")


def _is_large_array(value: Any) -> bool:
    if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray" or value.nbytes < LARGE_BYTES:
        return False
    return bool(value.flags.c_contiguous and value.dtype.isnative and value.dtype.name in encoding.DTYPES)
