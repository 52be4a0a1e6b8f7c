"""Sans-IO core of both clients: each operation as an exchange of requests and responses, and a reader of HTTP responses.

An exchange is a generator. It yields a request, is sent the response, and returns the result; a transport drives it: `client.py`
with blocking sockets, `async_client.py` with asyncio. Errors of the server are returned and not raised: the method that the user
called raises them, without the frames in between.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httptools

from lamina.errors import BadValue, LaminaError, UnknownTarget, Unreachable
from lamina.sdk import client_codec
from lamina.sdk.binding import Param, bind
from lamina.sdk.client_codec import CallOptions, CallResult, ClientRequest, ClientResponse, Inputs, ServerAddress
from lamina.sdk.stream_codec import ACCEPT_STREAM, CONTENT_TYPE
from lamina.units import parse_us

T = TypeVar("T")
Exchange = Generator[ClientRequest, ClientResponse, T | LaminaError]

POLL_MS = 20_000
"""How long the server is asked to wait for a result before it says that there is none yet."""

FINAL_STATES = ("succeeded", "failed", "cancelled", "quarantined")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a durable run. Times are seconds since 1970, 0.0 where there is none yet."""

    id: str
    state: str  #: queued, running, succeeded, failed, cancelled or quarantined
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


class RunListing(NamedTuple):
    """Some durable runs, and where the next page begins; "" if there is none."""

    runs: list[RunStatus]
    next: str


def resume(exchange: Exchange[T], response: ClientResponse | None) -> ClientRequest | T | LaminaError:
    """The first or next request of an exchange, or its result."""
    try:
        return next(exchange) if response is None else exchange.send(response)
    except StopIteration as end:
        result: T | LaminaError = end.value
        return result


class ClientProtocol:
    """Exchanges with one server. Remembers whether a name is a function or a workflow, once it has turned out."""

    def __init__(self, server: ServerAddress, timeout: str) -> None:
        self.server = server
        self._poll_ms = max(1, min(POLL_MS, round(parse_us(timeout, "timeout") / 2_000)))  # half of what the client waits
        self._kinds: dict[str, str] = {}

    # ------------------------------------------------------------------ calls

    def call(self, name: str, inputs: Inputs, options: CallOptions, *, stream: bool = False) -> Exchange[CallResult]:
        """Call a function or workflow; with `stream`, items are welcome as they are yielded."""
        for kind in self._kinds_to_try(name, options.kind):
            request = client_codec.call_request(self.server, kind, name, inputs, options)
            if stream:
                request.headers.update(ACCEPT_STREAM)
            answer = client_codec.result_of((yield request))
            if not isinstance(answer, UnknownTarget):
                self._kinds[name] = kind
                return answer
        return self._unknown(name)

    def bind(self, name: str, body: Any) -> Exchange[dict[str, Any]]:
        """Named inputs for a JSON body, by the parameters that `name` has at the server."""
        known: dict[str, Any] = {}
        for kind in client_codec.KINDS:
            answer = yield from self.read(f"/v1/{kind}")
            if isinstance(answer, LaminaError):
                return answer
            known |= {about["name"]: (kind, about["inputs"]) for about in answer}
        if name not in known:
            return client_codec.unknown_target(self.server, name, list(known))
        self._kinds[name], inputs = known[name]
        return bind([Param(one["name"], one["required"]) for one in inputs], body)

    def read(self, path: str) -> Exchange[Any]:
        """What is at a path."""
        return (yield from value_of(client_codec.read_request(self.server, path)))

    def object(self, method: str, bucket: str, key: str, data: bytes | None = None) -> Exchange[Any]:
        """Put, get or delete an object of a bucket."""
        response = yield client_codec.object_request(self.server, method, bucket, key, data)
        if method == "GET" and response.status == 200:
            return response.body
        answer = client_codec.result_of(response)
        return answer if isinstance(answer, LaminaError) else answer.value

    def report(self, token: str, verb: str, body: Any) -> Exchange[Any]:
        """Report about a task that waits."""
        return (yield from value_of(client_codec.task_request(self.server, token, verb, body)))

    def buffer(self, method: str, key: str, array: Any = None) -> Exchange[Any]:
        """Put, get or delete the buffer under a key."""
        return (yield from value_of(client_codec.buffer_request(self.server, method, key, array)))

    def trigger(self, method: str, id: str, terms: Mapping[str, Any] | None = None) -> Exchange[Any]:
        """Put, get or delete a trigger. What is None in its terms is not given."""
        given = None if terms is None else {name: value for name, value in terms.items() if value is not None}
        return (yield from value_of(client_codec.json_request(self.server, method, f"/v1/triggers/{quote(id, safe='')}", given)))

    # ------------------------------------------------------------------- runs

    def start(self, name: str, inputs: Inputs, options: CallOptions, key: str) -> Exchange[str]:
        """Start a durable run: its id. It always goes with an idempotency key, the caller's or a fresh one: a request that has
        to be sent twice, because a connection broke, still starts one run."""
        headers = {"prefer": "respond-async", "idempotency-key": _idempotency_key(key)}
        for kind in self._kinds_to_try(name, options.kind):
            request = client_codec.call_request(self.server, kind, name, inputs, options)
            request.headers.update(headers)
            response = yield request
            answer = client_codec.result_of(response)
            if isinstance(answer, UnknownTarget):
                continue
            if isinstance(answer, LaminaError):
                return answer
            if response.status != 202 or not isinstance(answer.value, dict):
                return LaminaError(
                    f"{self.server.url} answered {name!r} at once: it keeps no runs", hint="is it an older Lamina?"
                )
            self._kinds[name] = kind
            return str(answer.value["id"])
        return self._unknown(name)

    def runs_page(self, target: str, state: str, before: str) -> Exchange[RunListing]:
        query = {"target": target, "state": state, "before": before}
        page = yield from value_of(client_codec.run_request(self.server, "", "", query=query))
        if isinstance(page, LaminaError):
            return page
        return RunListing([_run_status(shown) for shown in page["runs"]], page["next"] or "")

    def run_status(self, id: str, verb: str = "") -> Exchange[RunStatus]:
        """Status of a run, after `cancel` or `retry` if one of these is asked for."""
        method = "POST" if verb else "GET"
        shown = yield from value_of(client_codec.run_request(self.server, id, verb, method))
        return shown if isinstance(shown, LaminaError) else _run_status(shown)

    def run_result(self, id: str, timeout: str | None) -> Exchange[Any]:
        """Poll for the result of a run. `TimeoutError` after `timeout`."""
        until_s = None if timeout is None else time.monotonic() + parse_us(timeout, "timeout") / 1e6
        while True:
            left_ms = self._poll_ms if until_s is None else round((until_s - time.monotonic()) * 1000)
            query = {"wait_ms": max(1, min(self._poll_ms, left_ms))}
            response = yield client_codec.run_request(self.server, id, "result", query=query)
            if response.status != 202:
                answer = client_codec.result_of(response)
                return answer if isinstance(answer, LaminaError) else answer.value
            if until_s is not None and time.monotonic() >= until_s:
                raise TimeoutError(f"not done within {timeout}")

    def run_history(self, id: str) -> Exchange[list[dict[str, Any]]]:
        shown = yield from value_of(client_codec.run_request(self.server, id, "history"))
        return shown if isinstance(shown, LaminaError) else shown["events"]

    # ------------------------------------------------------------------ names

    def _kinds_to_try(self, name: str, kind: str) -> tuple[str, ...]:
        kinds = client_codec.KINDS
        if not isinstance(name, str) or not name:
            raise BadValue(f"name: {name!r} is none", hint="give the name of a function or workflow as text")
        if kind and kind not in kinds:
            raise BadValue(f"kind: {kind!r} is none", hint=f"leave it out, or give one of {', '.join(kinds)}")
        kind = kind or self._kinds.get(name, "")
        return (kind,) if kind else kinds

    def _unknown(self, name: str) -> UnknownTarget:
        self._kinds.pop(name, None)
        return client_codec.unknown_target(self.server, name)


def value_of(request: ClientRequest) -> Exchange[Any]:
    """One request: the value of its response."""
    answer = client_codec.result_of((yield request))
    return answer if isinstance(answer, LaminaError) else answer.value


def checked_run_id(id: str) -> str:
    if not id or not isinstance(id, str):
        raise BadValue(f"id: {id!r} is that of no run", hint="client.runs() lists them")
    return id


def _idempotency_key(given: str) -> str:
    if not given:
        return uuid.uuid4().hex
    if len(given) > 255 or not (given.isascii() and given.isprintable()):
        raise BadValue(f"idempotency_key: {given[:40]!r} cannot be used", hint="up to 255 printable ASCII characters")
    return given


def _run_status(shown: Mapping[str, Any]) -> RunStatus:
    problem = shown.get("problem") or {}
    created_s, began_s, ended_s = (shown.get(f"{what}_us", 0) / 1e6 for what in ("created", "began", "ended"))
    place = (shown["id"], shown["state"], shown["kind"], shown["target"])
    said = str(problem.get("detail") or problem.get("code") or "")
    return RunStatus(*place, created_s, began_s, ended_s, shown.get("retries", 0), shown.get("cost", 0.0), said)


class ResponseReader:
    """Incremental reader of one HTTP/1.1 response. A transport feeds it bytes as they come."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self.has_begun = False  #: a byte of it is here
        self.has_head = False
        self.is_complete = False
        self.keep_alive = False

    @property
    def is_streamed(self) -> bool:
        """Whether its body is a stream of items."""
        return self._headers.get("content-type", "").partition(";")[0] == CONTENT_TYPE

    def feed(self, data: bytes) -> None:
        """Bytes of the response; none: the connection has ended, which ends a response without a length."""
        self.has_begun = self.has_begun or bool(data)
        if not data:
            self.is_complete = self.has_head and not self._headers.keys() & {"content-length", "transfer-encoding"}
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self.is_complete:  # what follows the response is not ours: it was answered, and the connection is out of step
                self.keep_alive = False
                return
            hint = "is the address that of a Lamina server?"
            raise Unreachable(f"the answer of {self._server.url} is not HTTP: {error}", hint=hint) from None

    def response(self) -> ClientResponse:
        """The response, with the body so far; that of a stream is left to be taken."""
        return ClientResponse(self._parser.get_status_code(), self._headers, b"" if self.is_streamed else self.take_body())

    def take_body(self) -> bytes:
        """What has come of the body since it was last taken."""
        data, self._body = b"".join(self._body), []
        return data

    # ---------------------------------------------------------- called by llhttp

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second response, to nothing that was asked
            raise ValueError("more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_head = self._parser.get_status_code() >= 200  # 100 Continue and its kin announce the response
        if not self.has_head:
            self._headers = {}

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete, self.keep_alive = True, self._parser.should_keep_alive()
