"""One call through a driver of its own: start, call, stop."""

from __future__ import annotations

import asyncio
from typing import Any

from lamina import encoding
from lamina.bootstrap import ServingRuntime
from lamina.core.actions import FailCall, Reject, Reply
from lamina.drivers.realtime import Ending
from lamina.errors import (
    REFUSALS,
    BadValue,
    Cancelled,
    DeadlineExceeded,
    FunctionFailed,
    LaminaError,
    LoadFailed,
    Refused,
    WorkerLost,
)
from lamina.ipc.protocol import ErrorInfo
from lamina.types import Slo, call_for


async def call_once(live: ServingRuntime, name: str, inputs: dict[str, Any]) -> Any:
    """Return the value, or raise the error. The SLO is not enforced: no other call waits behind it."""
    loop = live.loop
    await live.start()
    try:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_end(ending: Ending) -> None:
            if isinstance(ending, Reply):
                done.set_result(encoding.decode(bytes(loop.data.result(ending.call_id))))
            else:
                info = loop.error_info(ending) if isinstance(ending, FailCall) else None
                done.set_exception(exception_for(ending, info))

        call = call_for("run", name, loop.now_us(), Slo(timeout_us=24 * 3_600_000_000))
        loop.submit(call, {key: encoding.encode(value) for key, value in inputs.items()}, on_end)
        return await done
    finally:
        await loop.stop()


def exception_for(ending: FailCall | Reject, info: ErrorInfo | None) -> LaminaError:
    """The exception that a Python client gets for an ending that is no answer."""
    if isinstance(ending, Reject):
        _, detail, hint = REFUSALS.get(ending.reason, (429, f"refused: {ending.reason}", ""))
        return Refused(
            detail,
            hint=hint,
            reason=ending.reason,
            retry_after_s=ending.retry_after_us / 1e6,
            offer_ms=ending.offer_us / 1000 or None,
        )
    said = f"{info.type}: {info.message}" if info is not None else ending.error
    if ending.error == "deadline":
        return DeadlineExceeded("accepted, and not done by its deadline")
    if ending.error == "load-failed":
        return LoadFailed(f"the function cannot be loaded: {said}")
    if ending.error in ("worker-lost", "device-lost", "hung"):
        return WorkerLost(f"step {ending.step!r}: its worker was lost twice")
    if ending.error == "cancelled":
        return Cancelled("cancelled before it was done")
    if ending.error == "cost":
        _, detail, hint = REFUSALS["cost"]
        return Refused(detail, hint=hint, reason="cost")
    if ending.error == "bad-value":
        return BadValue("a step cannot use what it was given") if info is None else BadValue(info.message, hint=info.hint)
    trace = info.trace if info is not None else ""
    return FunctionFailed(said, error=info.type if info is not None else ending.error, step=ending.step, remote_trace=trace)
