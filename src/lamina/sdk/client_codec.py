"""HTTP codec of both clients: requests of calls, and results and errors of responses. No sockets here.

A mapping is always inputs by their names: a client does not know how many parameters a target has. Anything else is the value
of its only one, which the server knows.
"""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypedDict
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from lamina import encoding, errors
from lamina.errors import BadValue, FunctionFailed, LaminaError, Refused, did_you_mean
from lamina.sdk.resources import checked_objective
from lamina.units import parse_us

VALUE = "application/vnd.lamina.value"
KINDS = ("functions", "workflows")
MAX_DEADLINE_US = 86_400_000_000
MAX_PRIORITY = 10

_RESOURCE_PATH = re.compile(r"/v[12](/(functions|workflows|models|runs|state|status)\b.*)?/?$")

_BY_CODE: dict[str, type[LaminaError]] = {
    kind.code: kind
    for kind in (
        errors.BadValue,
        errors.UnknownTarget,
        errors.DeadlineExceeded,
        errors.WorkerLost,
        errors.LoadFailed,
        errors.Cancelled,
        errors.NotFound,
        errors.Conflict,
        errors.StoreDown,
        errors.NotLeader,
        errors.LeadershipLost,
        errors.Unauthorized,
        errors.Forbidden,
    )
}
_BY_STATUS: dict[int, type[LaminaError]] = {
    400: errors.BadValue,
    404: errors.UnknownTarget,
    413: errors.BadValue,
    422: errors.BadValue,
    504: errors.DeadlineExceeded,
}


Inputs = Any
"""Inputs of a call: a mapping from parameter to value, or just the value where one parameter is enough. None: no inputs."""


class CallKeywords(TypedDict, total=False):
    """Keywords of `call`, `call_detailed`, `stream` and `start` of both clients; `CallOptions` has their defaults."""

    deadline: str | None
    priority: int
    cost_limit: float
    objective: str
    fresh: bool
    kind: str


class TriggerTerms(TypedDict, total=False):
    """Keywords of `add_trigger` of both clients; what is None is not given."""

    every: str | None
    cron: str | None
    zone: str | None
    on_change: str | None
    workflow: str | None
    broker: str | None
    topic: str | None
    input: dict[str, Any] | None
    overlap: str | None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call."""

    deadline: str | None = None  #: such as "50ms", from now to the answer; None: the target's own SLO
    priority: int = 0  #: from -10 to 10
    cost_limit: float = 0.0  #: what it may cost; 0: no limit
    objective: str = ""  #: "deadline", "latency", "cost" or "throughput"; "": that of the function
    fresh: bool = False  #: computed anew, though an earlier result is kept (`cache=` of a function)
    kind: str = ""  #: "functions" or "workflows"; "": either is tried


def call_options(given: Mapping[str, Any]) -> CallOptions:
    """Options from keywords. Inputs are no keywords, so that they never collide with options; one that is given so is named."""
    try:
        return CallOptions(**given)
    except TypeError:
        known = [field.name for field in fields(CallOptions)]
        name = next(name for name in given if name not in known)
        hint = did_you_mean(name, known, f"inputs are a dict: call(NAME, {{{name!r}: ...}})")
        raise BadValue(f"{name}: no option of a call", hint=hint) from None


class RemoteTrace(Exception):
    """Traceback of the worker: the cause of a `FunctionFailed`, so that Python prints it above the error."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]).rstrip()


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of a call with its latency, batch, slice and cost."""

    value: Any
    call_id: str = ""
    latency_ms: float = 0.0
    queue_ms: float = 0.0
    batch: int = 1
    slice: str = ""
    cost: float = 0.0
    cold_start_ms: float = 0.0
    retries: int = 0
    cache: str = ""  #: "hit" or "miss", of a function whose results are kept

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server, and the headers that go with each request."""

    host: str
    port: int
    tls: bool
    base: str
    token: str
    unix: str = ""  #: path of a socket of this machine, in the place of host and port

    @property
    def url(self) -> str:
        if self.unix:
            return f"unix://{self.unix}"
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.base}"

    def headers(self) -> dict[str, str]:
        host = f"[{self.host}]" if ":" in self.host else self.host
        found = {"host": f"{host}:{self.port}", "accept": f"{VALUE}, application/json"}
        if self.token:
            found["authorization"] = f"Bearer {self.token}"
        return found


@dataclass(frozen=True, slots=True)
class ClientRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    def as_http(self) -> list[bytes]:
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{key}: {value}" for key, value in self.headers.items())]
        if self.body or self.method != "GET":
            lines.append(f"content-length: {len(self.body)}")
        return ["\r\n".join([*lines, "", ""]).encode("latin-1"), self.body]


@dataclass(frozen=True, slots=True)
class ClientResponse:
    status: int
    headers: Mapping[str, str]  #: names in lower case
    body: bytes


def parse_url(url: str) -> SplitResult | None:
    """The parts of an HTTP URL; None if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a port that is none
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname else None


DEFAULT_URL = "http://127.0.0.1:8700"


def default_server() -> tuple[str, str]:
    """Default address and token, of the environment as it is now."""
    return os.environ.get("LAMINA_URL") or DEFAULT_URL, os.environ.get("LAMINA_TOKEN", "")


def server_at(url: str | None, token: str | None) -> ServerAddress:
    """The server at an address; without one, the default with the default token."""
    if url is None:
        url, usual_token = default_server()
        token = usual_token if token is None else token
    if url.startswith("unix:///"):
        return ServerAddress("localhost", 80, False, "", token or "", url.removeprefix("unix://"))
    parts = parse_url(url)
    if parts is None or not parts.hostname or parts.query or parts.fragment:
        raise BadValue(f"url: {url!r} is not the address of a server", hint='write it as "http://127.0.0.1:8700"')
    if at := _RESOURCE_PATH.search(url):
        raise BadValue(f"url: {url!r} is that of something at a server", hint=f'give the server alone: "{url[: at.start()]}"')
    if token is not None and not (token.isascii() and token.isprintable()):
        raise BadValue("token: not printable ASCII", hint="give the token as it was issued")
    tls = parts.scheme == "https"
    return ServerAddress(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"), token or "")


def servers_at(urls: str | None, token: str | None) -> list[ServerAddress]:
    """The servers at addresses separated by commas: a leader and its standbys."""
    if urls is None:
        urls, usual_token = default_server()
        token = usual_token if token is None else token
    if not isinstance(urls, str):
        raise BadValue(f"url: {urls!r} is not text", hint='write several addresses as "http://a:8700,http://b:8700"')
    return [server_at(url.strip(), token) for url in urls.split(",")]


class ConnectFailed(errors.Unreachable):
    """No connection: the request was not sent."""


FOLLOW_S = 10.0
"""How long a request that was not taken is sent again: a takeover ends within a few seconds."""

FOLLOW_PAUSE_S = 0.05


class LeaderRoute:
    """Route to the server that leads: the addresses given, and those that servers have named since.

    A request is sent again only if it cannot have had an effect (no connection; a server that does not lead), or if doing it
    again has none (a read, a start with an idempotency key). A server without TLS is not followed to from one with it.
    """

    def __init__(self, servers: Sequence[ServerAddress], timeout: str) -> None:
        self._servers = list(servers)
        self._patience_s = min(FOLLOW_S, parse_us(timeout, "timeout") / 1e6)
        self.current = self._servers[0]

    def begin(self, now_s: float) -> RouteAttempt:
        return RouteAttempt(self, now_s + self._patience_s)

    def adapt(self, request: ClientRequest, server: ServerAddress) -> ClientRequest:
        """The request as it is for that server; it was made for the first one."""
        first = self._servers[0]
        if server is first:
            return request
        path = server.base + request.path[len(first.base) :]
        return replace(request, path=path, headers=request.headers | {"host": server.headers()["host"]})

    def go_on(self, leader: str = "") -> bool:
        """Turn to the leader that was named, or to the next server. False: there is no other."""
        if leader:
            parts = parse_url(leader)
            if parts is not None and (parts.scheme == "https" or not self.current.tls):
                named = server_at(leader, self.current.token)
                known = next((one for one in self._servers if one.url == named.url), None)
                if known is None:
                    self._servers.append(named)
                self.current = known or named
                return True
        at = self._servers.index(self.current)
        self.current = self._servers[(at + 1) % len(self._servers)]
        return len(self._servers) > 1


class RouteAttempt:
    """One request on its way to the leader."""

    def __init__(self, route: LeaderRoute, until_s: float) -> None:
        self._route = route
        self._until_s = until_s

    def repeats_error(self, error: errors.Unreachable, request: ClientRequest, now_s: float) -> bool:
        """Whether to send it again, after it was not answered."""
        is_safe = isinstance(error, ConnectFailed) or request.method == "GET" or "idempotency-key" in request.headers
        return is_safe and now_s < self._until_s and self._route.go_on()

    def repeats_response(self, response: ClientResponse, request: ClientRequest, now_s: float) -> bool:
        """Whether to send it again, after a server said that it does not lead."""
        if response.status != 503 or now_s >= self._until_s:
            return False
        problem = _problem(response)
        code = problem.get("code")
        if code == errors.LeadershipLost.code:
            return (request.method == "GET" or "idempotency-key" in request.headers) and self._go_on(problem)
        return code == errors.NotLeader.code and self._go_on(problem)

    def _go_on(self, problem: Mapping[str, Any]) -> bool:
        self._route.go_on(str(problem.get("leader") or ""))
        return True  # a standby that knows no leader may be the next one


def call_request(server: ServerAddress, kind: str, name: str, inputs: Inputs, options: CallOptions) -> ClientRequest:
    headers = server.headers() | {"content-type": VALUE}
    if options.deadline is not None:
        deadline_us = parse_us(options.deadline, "deadline")
        if not 0 < deadline_us <= MAX_DEADLINE_US:
            wrong = "longer than a day" if deadline_us else "no time at all"
            raise BadValue(f"deadline: {options.deadline!r} is {wrong}", hint="leave it out for the target's own SLO")
        headers["lamina-deadline-ms"] = f"{deadline_us / 1000:g}"
    if options.priority:
        headers["lamina-priority"] = str(_checked_number(options.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY))
    if options.cost_limit:
        headers["lamina-cost-limit"] = repr(float(_checked_number(options.cost_limit, "cost_limit", 0, math.inf)))
    if options.objective:
        headers["lamina-objective"] = checked_objective(options.objective)
    if options.fresh:
        headers["cache-control"] = "no-cache"
    given = dict(inputs or {}) if inputs is None or isinstance(inputs, Mapping) else inputs
    return ClientRequest("POST", f"{server.base}/v1/{kind}/{quote(name, safe='')}", headers, encoding.encode(given))


def _checked_number(value: Any, field: str, least: float, most: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or value != value:
        raise BadValue(f"{field}: {value!r} is not a number from {least:g} to {most:g}", hint="leave it out for the default")
    return value


def read_request(server: ServerAddress, path: str) -> ClientRequest:
    return ClientRequest("GET", f"{server.base}{path}", server.headers())


def buffer_request(server: ServerAddress, method: str, key: str, array: Any = None) -> ClientRequest:
    """A request about the buffer under a key."""
    headers, body = server.headers() | {"accept": VALUE}, b""
    if array is not None:
        headers["content-type"], body = VALUE, encoding.encode(array)
    return ClientRequest(method, f"{server.base}/v1/buffers/{quote(key, safe='/')}", headers, body)


def json_request(server: ServerAddress, method: str, path: str, value: Any = None) -> ClientRequest:
    """A request with a JSON body, or without one."""
    headers, body = server.headers(), b""
    if value is not None:
        headers["content-type"], body = "application/json", encoding.to_json(value)
    return ClientRequest(method, f"{server.base}{path}", headers, body)


def object_request(server: ServerAddress, method: str, bucket: str, key: str, data: bytes | None = None) -> ClientRequest:
    """A request about an object in a bucket; without a key, about the bucket."""
    headers, body = server.headers() | {"accept": "*/*"}, b""
    if data is not None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise BadValue(f"data: {type(data).__name__} given where bytes are needed", hint="encode it first")
        headers["content-type"], body = "application/octet-stream", bytes(data)
    path = f"{server.base}/v1/buckets/{quote(bucket, safe='')}" + (f"/{quote(key, safe='/')}" if key else "")
    return ClientRequest(method, path, headers, body)


def task_request(server: ServerAddress, token: str, verb: str, body: Any) -> ClientRequest:
    """A report about the task of a token."""
    if not isinstance(token, str) or not token:
        raise BadValue(f"token: {token!r} is none", hint="give the token that the step was called with")
    headers = server.headers() | {"content-type": VALUE if verb == "success" else "application/json"}
    sent = encoding.encode(body) if verb == "success" else encoding.to_json(body)
    return ClientRequest("POST", f"{server.base}/v1/tasks/{quote(token, safe='')}/{verb}", headers, sent)


def run_request(
    server: ServerAddress, id: str, verb: str, method: str = "GET", query: Mapping[str, Any] | None = None
) -> ClientRequest:
    """A request about a durable run; without an id, about all of them."""
    path = f"{server.base}/v1/runs" + (f"/{quote(id, safe='')}" if id else "") + (f"/{verb}" if verb else "")
    asked = {name: value for name, value in (query or {}).items() if value}
    return ClientRequest(method, f"{path}?{urlencode(asked)}" if asked else path, server.headers())


def result_of(response: ClientResponse) -> CallResult | LaminaError:
    """The result of a call. An error is returned, not raised: the place that raises it decides which frames it shows."""
    if not 200 <= response.status < 300:
        return error_of(response)
    try:
        value = _value(response)
    except BadValue as error:
        return LaminaError(f"the server's answer cannot be read: {error.message}")
    headers = response.headers
    return CallResult(
        value,
        headers.get("lamina-call-id", ""),
        _number(headers, "lamina-latency-ms"),
        _number(headers, "lamina-queue-ms"),
        int(_number(headers, "lamina-batch") or 1),
        headers.get("lamina-slice", ""),
        _number(headers, "lamina-cost"),
        _number(headers, "lamina-cold-start-ms"),
        int(_number(headers, "lamina-retries")),
        headers.get("lamina-cache", ""),
    )


def error_of(response: ClientResponse) -> LaminaError:
    problem = _problem(response)
    message, hint = str(problem.get("detail") or problem.get("title") or "no answer"), str(problem.get("hint", ""))
    code, step = str(problem.get("code", "")), str(problem.get("step", ""))
    error: LaminaError
    if code == Refused.code or response.status == 429 or problem.get("reason"):
        error = Refused(
            message,
            reason=str(problem.get("reason", "")),
            retry_after_s=_float(problem.get("retry_after_s")) or _number(response.headers, "retry-after"),
            offer_ms=_float(problem.get("offer_ms")) or None,
            price=_float(problem.get("price")) or None,
            hint=hint,
        )
    elif code == FunctionFailed.code:
        trace = str(problem.get("trace", ""))
        error = FunctionFailed(message, error=str(problem.get("error", "")), step=step, remote_trace=trace, hint=hint)
        if trace:
            error.__cause__ = RemoteTrace(trace)
    else:
        kind = _BY_CODE.get(code) or _BY_STATUS.get(response.status)
        error = kind(message, hint=hint) if kind else LaminaError(f"{response.status}: {message}", hint=hint)
    call_id = problem.get("id") or response.headers.get("lamina-call-id")
    if call_id or step:
        error.add_note("  ".join(f"{what}: {which}" for what, which in (("call", call_id), ("step", step)) if which))
    return error


def connect_error(server: ServerAddress, error: OSError) -> ConnectFailed:
    hint = "start it with: lamina serve app.py"
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "name the file of the authority that signed its certificate in SSL_CERT_FILE"
    elif isinstance(error, ssl.SSLError):
        hint = "does it speak TLS? if not, write http://"
    why = error if isinstance(error, ssl.SSLError) else error.strerror or error
    return ConnectFailed(f"no server at {server.url}: {why}", hint=hint)


def no_response(server: ServerAddress) -> errors.Unreachable:
    hint = "see the server's log" + ("" if server.tls else "; if it speaks TLS, write https://")
    return errors.Unreachable(f"{server.url} closed the connection without an answer", hint=hint)


def broken_off(server: ServerAddress, error: Exception | None) -> errors.Unreachable:
    why = str(error or "") or (type(error).__name__ if error is not None else "connection closed")
    return errors.Unreachable(f"the answer of {server.url} broke off: {why}")


def timed_out(server: ServerAddress, timeout: str) -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(f"no answer from {server.url} within {timeout}", hint="give the client a longer timeout=")


def unknown_target(server: ServerAddress, name: str, known: Sequence[str] = ()) -> errors.UnknownTarget:
    """The error of an unknown target. `known`: what the server listed, if it was asked."""
    listed = f"there is {', '.join(known)}" if known else "client.functions() and client.workflows() list what is there"
    return errors.UnknownTarget(
        f"no function or workflow {name!r} at {server.url}",
        hint=errors.did_you_mean(name, known, listed),
    )


def _value(response: ClientResponse) -> Any:
    if response.status == 204:
        return None
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == VALUE:
        return encoding.decode(response.body)
    if kind == "application/json":
        return encoding.from_json(response.body)
    return response.body


def _problem(response: ClientResponse) -> dict[str, Any]:
    try:
        found = encoding.from_json(response.body)
    except BadValue:
        found = None
    return found if isinstance(found, dict) else {"detail": f"the server answered {response.status}"}


def _number(headers: Mapping[str, str], name: str) -> float:
    return _float(headers.get(name))


def _float(text: Any) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0
