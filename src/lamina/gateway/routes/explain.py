"""`GET /v1/explain/ID`: history of one call, from the flight recorder; and a sample of requests refused before the controller.

A tenant sees its own calls, the operator all. The search is done in small pieces between other requests, one search at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from lamina.access.authorization import Grant
from lamina.core.flight_recorder import ArrivalRecord, DecisionRecord, EndRecord, call_history
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import BadValue, LaminaError, NotFound
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.gateway.routes.problems import HttpProblem, defect_problem, error_problem, respond_problem
from lamina.server.exchange import Exchange, HttpRequest
from lamina.types import NEVER_US

MAX_ID = 64
SAMPLED_PER_S, SAMPLED_BURST = 50, 500
"""Refusals recorded that the controller has not seen: enough to find one, too few to push everything else out."""

MAX_TEXT = 300


class SampledRefusals:
    """Sample of requests that were refused before the controller saw them: cached rejections, bad inputs, wrong tokens."""

    def __init__(self, driver: RealtimeDriver) -> None:
        self._driver = driver
        self._limiter = RateLimiter(SAMPLED_PER_S, SAMPLED_BURST)

    def record(self, call_id: str, target: str, tenant: str, reason: str, why: str, offer_us: int = 0) -> None:
        if self._limiter.try_acquire():
            now_us = self._driver.now_us()
            self._driver.recorder.add(
                ArrivalRecord(now_us, call_id, target, tenant, now_us, NEVER_US),
                EndRecord(now_us, call_id, "refused", reason, why[:MAX_TEXT], offer_us=offer_us),
            )

    def record_problem(self, problem: HttpProblem, target: str, tenant: str = "") -> None:
        self.record(problem.id, target[:MAX_ID], tenant, problem.code, f"before the controller: {problem.detail}")


class CallHistory:
    """Histories of calls, from the flight recorder. The search is done in small pieces, one search at a time."""

    def __init__(self, driver: RealtimeDriver) -> None:
        self._driver = driver
        self._turn = asyncio.Lock()

    async def find(self, call_id: str, grant: Grant) -> tuple[dict[str, Any], list[DecisionRecord]]:
        """The history of a call that the caller may see, and the records it was made from, with others among them."""
        check_call_id(call_id)
        found: list[DecisionRecord] = []
        async with self._turn:
            for records in self._driver.recorder.search(call_id):
                found += records
                await asyncio.sleep(0)
        told = call_history(call_id, found)
        missing = NotFound(
            f"no call {call_id!r} among the last decisions",
            hint="the last 16 MiB of decisions are kept; of requests refused before the controller, 50 a second. "
            "serve --log FILE keeps all that the controller decides",
        )
        if "target" not in told:
            raise missing
        grant.check_owner(told["tenant"], missing)
        told["age_ms"] = self._driver.now_us() / 1000 - told["arrived_ms"]
        if "end" not in told:
            told["waiting"] = self._waiting(call_id)
        return told, found

    def _waiting(self, call_id: str) -> list[dict[str, Any]]:
        """Steps of a call in flight that wait for a batch, and why."""
        state = self._driver.controller.state
        run = state.runs.get(call_id)
        queued = [job for job in run.jobs.values() if job.is_queued] if run is not None else []
        return [
            {
                "step": job.node,
                "function": job.function,
                "queue": len(state.functions[job.function].queue),
                "delay": state.deferred[job.function].why if job.function in state.deferred else "",
            }
            for job in queued
        ]


def check_call_id(call_id: str) -> None:
    if len(call_id) > MAX_ID or not call_id.isascii() or not call_id.isprintable():
        raise BadValue(f"call: {call_id[:MAX_ID]!r} is no id of a call", hint="GET /v1/explain/ID, as in Lamina-Call-Id")


class ExplainRoutes:
    """Explanations of calls."""

    def __init__(self, driver: RealtimeDriver) -> None:
        self.routes: dict[str, Callable[..., None]] = {"GET /v1/explain/{call}": self._explain}
        self._history = CallHistory(driver)
        self._tasks: set[asyncio.Task[None]] = set()

    def _explain(self, request: HttpRequest, exchange: Exchange, grant: Grant, call_id: str) -> None:
        check_call_id(call_id)
        task = asyncio.create_task(self._answer(call_id, grant, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call_id: str, grant: Grant, exchange: Exchange) -> None:
        try:
            told, _ = await self._history.find(call_id, grant)
        except LaminaError as error:
            respond_problem(exchange, error_problem(error))
        except Exception as error:
            respond_problem(exchange, defect_problem(f"the explanation of {call_id} failed", error))
        else:
            exchange.respond(200, msgspec.json.encode(told))
