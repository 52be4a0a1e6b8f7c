"""Step options: retries, time limit and heartbeat of one call, as in `tag.retry([OSError], attempts=3).timeout(30)(image)`.

The words are the builder's. In process the tries are made at once, without pauses, and time limits are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from lamina.core.workflow.error_policy import ALL, TIMEOUT, ErrorPolicy, Retrier, matches
from lamina.errors import BadFlow
from lamina.sdk.symbols import UnawaitedCall
from lamina.sdk.user_errors import user_place
from lamina.sdk.workflow_tracing import WorkflowTracer, call_mode
from lamina.units import parse_us

if TYPE_CHECKING:
    from lamina.sdk.function import Function

Errors = Sequence[str | type[BaseException]]


class StepOptions:
    """A function with step options. Each method returns a new one, so that they can be kept and combined."""

    def __init__(self, function: Function[..., Any], guard: ErrorPolicy | None = None) -> None:
        self._function = function
        self._policy = guard or ErrorPolicy()

    def __repr__(self) -> str:
        return f"<{self._function.name!r} with {self._policy}>"

    def retry(
        self,
        on: Errors = (ALL,),
        *,
        attempts: int = 3,
        interval_s: float = 1,
        backoff: float = 2.0,
        max_delay_s: float | None = None,
        jitter: bool = False,
    ) -> StepOptions:
        """Retry after these errors, with exponential backoff. The first retrier that names an error counts."""
        if attempts < 0 or interval_s < 0 or backoff < 1:
            raise BadFlow(
                f"{user_place()}: retry with attempts={attempts}, interval_s={interval_s}, backoff={backoff}",
                hint="attempts and interval_s from 0 on, backoff from 1 on",
            )
        pause = (round(interval_s * 1e6), attempts, backoff, round((max_delay_s or 0) * 1e6), jitter)
        return StepOptions(self._function, replace(self._policy, retry=(*self._policy.retry, Retrier(error_names(on), *pause))))

    def timeout(self, duration: str | float) -> StepOptions:
        """Time limit of one attempt, queueing included: "30s", or seconds."""
        return StepOptions(self._function, replace(self._policy, timeout_us=_us(duration, "timeout")))

    def heartbeat(self, duration: str | float) -> StepOptions:
        """Longest time between heartbeats while it runs; `context().heartbeat()` sends one."""
        return StepOptions(self._function, replace(self._policy, heartbeat_us=_us(duration, "heartbeat")))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = call_mode.get()
        if isinstance(where, WorkflowTracer):
            return where.call(self._function, args, kwargs, self._policy)
        if where is not None and where.is_async:
            return UnawaitedCall(f"{self._function.name}(...)", lambda: self._call_with_retries(args, kwargs))
        return self._call_with_retries(args, kwargs)

    def _call_with_retries(self, args: Any, kwargs: Any) -> Any:
        used = [0] * len(self._policy.retry)
        while True:
            try:
                return self._function.call_once(*args, **kwargs)
            except Exception as error:
                index = next((i for i, r in enumerate(self._policy.retry) if matches(r.errors, type(error).__name__)), -1)
                if index < 0 or used[index] >= self._policy.retry[index].attempts:
                    raise
                used[index] += 1


def error_names(on: Errors) -> tuple[str, ...]:
    """Error names to retry on: of a class, its own name; `TimeoutError` also stands for a time limit that was exceeded."""
    if isinstance(on, str) or not isinstance(on, Sequence):
        raise BadFlow(f"{user_place()}: on={on!r}", hint='give a list: on=["States.Timeout", ValueError]')
    found: list[str] = []
    for error in on:
        found.append(error if isinstance(error, str) else error.__name__)
        if error is TimeoutError:
            found.append(TIMEOUT)
    return tuple(found)


def _us(duration: str | float, field: str) -> int:
    return parse_us(duration, field) if isinstance(duration, str) else round(duration * 1_000_000)
