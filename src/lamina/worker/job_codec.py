"""Job codec inside a process that runs functions: arguments out of a frame, results into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamina.errors import BadValue, LaminaError
from lamina.expr import Absent, Leaf, evaluate
from lamina.ipc.protocol import MAX_FRAME_BYTES, DeviceRef, ErrorInfo, JobFrame, ShmRef, Stored
from lamina.sdk.user_errors import user_trace
from lamina.values.shm import INLINE_BYTES, ShmPool
from lamina.worker.zero_copy import encode_chunks

_INLINE_BUDGET_BYTES = MAX_FRAME_BYTES // 2
"""Results in one frame, when shared memory is full; the other half is room for error texts."""

_MESSAGE_CHARS = 4_000


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


def encode_results(pool: ShmPool, outputs: list[Any]) -> list[bytes | ShmRef | DeviceRef | ErrorInfo]:
    """Encode one result per output. An output that cannot be encoded fails alone."""
    budget = _INLINE_BUDGET_BYTES
    results: list[bytes | ShmRef | DeviceRef | ErrorInfo] = []
    for output in outputs:
        result: bytes | ShmRef | DeviceRef | ErrorInfo | None
        if isinstance(output, ErrorInfo | DeviceRef):
            result = output
        elif isinstance(output, BaseException):
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
    try:
        message, hint = (error.message, error.hint) if isinstance(error, LaminaError) else (str(error), "")
    except Exception:  # the user's class, the user's __str__
        message, hint = "(its text could not be read)", ""
    said = (type(error).__name__, message[:_MESSAGE_CHARS], user_trace(error), hint[:_MESSAGE_CHARS])
    return ErrorInfo(*(_clean(text) for text in said))


def _clean(text: str) -> str:
    """Replace lone surrogates, say from an undecodable file name: they cannot be sent."""
    return text.encode(errors="replace").decode()
