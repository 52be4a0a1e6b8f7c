"""Handles of durable runs: `client.start(...)` gives one, `client.run(id)` finds one again, from anywhere.

Starting always goes with an idempotency key, the caller's or a fresh one: a request that has to be sent twice, because a
connection broke, still starts one run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.sdk import client_codec
from lamina.sdk.client_codec import ClientRequest, ClientResponse, ServerAddress
from lamina.units import parse_us

if TYPE_CHECKING:
    from lamina.sdk.async_client import AsyncClient
    from lamina.sdk.client import Client

POLL_MS = 20_000
"""How long the server is asked to wait for a result before it says that there is none yet."""

FINAL_STATES = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a durable run. Times are seconds since 1970, 0.0 where there is none yet."""

    id: str
    state: str  #: queued, running, succeeded, failed or cancelled
    kind: str
    target: str
    created_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    retries: int = 0
    cost: float = 0.0
    error: str = ""  #: what it failed with

    @property
    def is_over(self) -> bool:
        return self.state in FINAL_STATES


def status_of(shown: Mapping[str, Any]) -> RunStatus:
    problem = shown.get("problem") or {}
    created_s, began_s, ended_s = (shown.get(f"{what}_us", 0) / 1e6 for what in ("created", "began", "ended"))
    place = (shown["id"], shown["state"], shown["kind"], shown["target"])
    said = str(problem.get("detail") or problem.get("code") or "")
    return RunStatus(*place, created_s, began_s, ended_s, shown.get("retries", 0), shown.get("cost", 0.0), said)


class RunHandle:
    """Blocking handle of a durable run. The server keeps the run whatever becomes of this object."""

    def __init__(self, client: Client, id: str) -> None:
        self._client = client
        self.id = _checked(id)

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    def status(self) -> RunStatus:
        return status_of(self._client.ask(self._request("")))

    def result(self, timeout: str | None = None) -> Any:
        """Wait for the result, or raise what the run failed with. `TimeoutError` after `timeout`, such as "5s"."""
        patience = _PollTimer(timeout, self._client.poll_ms)
        while True:
            answer = self._client.send(self._request("result", wait_ms=patience.next_ms()))
            if answer.status != 202:
                return _settled(answer)
            patience.check()

    def history(self) -> list[dict[str, Any]]:
        """Events of the run so far; times are microseconds since 1970."""
        events: list[dict[str, Any]] = self._client.ask(self._request("history"))["events"]
        return events

    def cancel(self) -> RunStatus:
        return status_of(self._client.ask(self._request("cancel", "POST")))

    def retry(self) -> RunStatus:
        """Resume a run that failed or was cancelled; steps that are done are not repeated."""
        return status_of(self._client.ask(self._request("retry", "POST")))

    def _request(self, verb: str, method: str = "GET", **query: int) -> ClientRequest:
        return run_request(self._client.server, self.id, verb, method, query)


class AsyncRunHandle:
    """Asyncio handle of a durable run."""

    def __init__(self, client: AsyncClient, id: str) -> None:
        self._client = client
        self.id = _checked(id)

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    async def status(self) -> RunStatus:
        return status_of(await self._client.ask(self._request("")))

    async def result(self, timeout: str | None = None) -> Any:
        """Wait for the result, or raise what the run failed with. `TimeoutError` after `timeout`, such as "5s"."""
        patience = _PollTimer(timeout, self._client.poll_ms)
        while True:
            answer = await self._client.send(self._request("result", wait_ms=patience.next_ms()))
            if answer.status != 202:
                return _settled(answer)
            patience.check()

    async def history(self) -> list[dict[str, Any]]:
        """Events of the run so far; times are microseconds since 1970."""
        events: list[dict[str, Any]] = (await self._client.ask(self._request("history")))["events"]
        return events

    async def cancel(self) -> RunStatus:
        return status_of(await self._client.ask(self._request("cancel", "POST")))

    async def retry(self) -> RunStatus:
        """Resume a run that failed or was cancelled; steps that are done are not repeated."""
        return status_of(await self._client.ask(self._request("retry", "POST")))

    def _request(self, verb: str, method: str = "GET", **query: int) -> ClientRequest:
        return run_request(self._client.server, self.id, verb, method, query)


def longest_poll_ms(timeout: str) -> int:
    """Longest poll of a client with that `timeout`."""
    return min(POLL_MS, round(parse_us(timeout, "timeout") / 2_000))


class _PollTimer:
    def __init__(self, timeout: str | None, poll_ms: int) -> None:
        self._timeout = timeout
        self._poll_ms = max(1, poll_ms)
        self._until_s = None if timeout is None else time.monotonic() + parse_us(timeout, "timeout") / 1e6

    def next_ms(self) -> int:
        if self._until_s is None:
            return self._poll_ms
        return max(1, min(self._poll_ms, round((self._until_s - time.monotonic()) * 1000)))

    def check(self) -> None:
        if self._until_s is not None and time.monotonic() >= self._until_s:
            raise TimeoutError(f"not done within {self._timeout}")


def start_request(
    server: ServerAddress,
    kind: str,
    name: str,
    inputs: Mapping[str, Any] | None,
    deadline: str | None,
    priority: int,
    cost_limit: float,
    key: str,
) -> ClientRequest:
    request = client_codec.call_request(server, kind, name, inputs, deadline, priority, cost_limit)
    request.headers["prefer"] = "respond-async"
    request.headers["idempotency-key"] = key
    return request


def _checked(id: str) -> str:
    if not id or not isinstance(id, str):
        raise BadValue(f"id: {id!r} is that of no run", hint="client.runs() lists them")
    return id


def idempotency_key(given: str) -> str:
    if not given:
        return uuid.uuid4().hex
    if len(given) > 255 or not (given.isascii() and given.isprintable()):
        raise BadValue(f"idempotency_key: {given[:40]!r} cannot be used", hint="up to 255 printable ASCII characters")
    return given


def run_request(
    server: ServerAddress, id: str, verb: str, method: str = "GET", query: Mapping[str, Any] | None = None
) -> ClientRequest:
    path = f"{server.base}/v1/runs" + (f"/{quote(id, safe='')}" if id else "") + (f"/{verb}" if verb else "")
    asked = {name: value for name, value in (query or {}).items() if value}
    return ClientRequest(method, f"{path}?{urlencode(asked)}" if asked else path, server.headers())


def started_run(server: ServerAddress, name: str, response: ClientResponse) -> str | LaminaError | None:
    """The id of the run; None if there is nothing of that name and kind."""
    answer = client_codec.result_of(response)
    if isinstance(answer, UnknownTarget):
        return None
    if isinstance(answer, LaminaError):
        return answer
    if response.status != 202 or not isinstance(answer.value, dict):
        return LaminaError(f"{server.url} answered {name!r} at once: it keeps no runs", hint="is it an older Lamina?")
    return str(answer.value["id"])


def _settled(response: ClientResponse) -> Any:
    answer = client_codec.result_of(response)
    if isinstance(answer, LaminaError):
        raise answer
    return answer.value
