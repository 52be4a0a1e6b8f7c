"""HTTP codec: bodies to named inputs, results and problems to bodies. The client never chooses a decoder: the list is fixed."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from lamina import encoding as values
from lamina.core.actions import FailCall, Reject, Reply
from lamina.errors import REFUSALS, BadValue, LaminaError, UnknownEncoding
from lamina.gateway.observability import logs
from lamina.gateway.routes.multipart import parse_multipart
from lamina.ipc.protocol import ErrorInfo
from lamina.sdk.binding import NOTHING, Param, bind, bind_named
from lamina.server.request import HttpRequest

JSON = b"application/json"
VALUE = b"application/vnd.lamina.value"
BYTES = b"application/octet-stream"
PROBLEM = b"application/problem+json"
FORM = b"application/x-www-form-urlencoded"
"""What curl says of whatever it is given with -d: taken as JSON if it is some or several inputs are needed, else as bytes."""


def check_encoding(request: HttpRequest) -> None:
    """Reject compressed bodies: they would be read as what they are not."""
    if b"content-encoding" in request.headers and request.body:
        encoding = request.header(b"content-encoding")
        if encoding.strip().lower() not in (b"", b"identity"):
            said = encoding[:40].decode("latin-1")
            raise UnknownEncoding(f"content-encoding: {said!r} is not taken here", hint="send the body as it is; /v2 takes gzip")


def decode_inputs(request: HttpRequest, params: tuple[Param, ...]) -> dict[str, bytes]:
    """The named inputs of a call, each encoded."""
    try:
        return _decode_inputs(request, params)
    except BadValue as error:
        if request.query:
            error.hint += "; inputs are taken from the body, not from behind the ? of the address"
        raise


def _decode_inputs(request: HttpRequest, params: tuple[Param, ...]) -> dict[str, bytes]:
    check_encoding(request)
    kind, _, options = request.header(b"content-type").partition(b";")
    kind = kind.strip().lower()
    from_curl = kind == FORM and (len(params) != 1 or _is_json(request.body))  # bytes are for one parameter alone
    if kind == JSON or not kind or from_curl:
        return _encode_values(bind(params, values.from_json(request.body) if request.body else NOTHING))
    if kind == VALUE:
        named = values.decode(request.body)
        if not isinstance(named, dict):
            raise BadValue("body: not a dict of named inputs", hint="encode {parameter: value}")
        return _encode_values(bind_named(params, named))
    if kind == b"multipart/form-data":
        return _encode_values(bind_named(params, parse_multipart(options, request.body)))
    if len(params) != 1:
        raise BadValue(
            f"content-type: {kind.decode('latin-1')[:80]!r} carries one input; this takes {len(params)}",
            hint="send content-type: application/json with an object, or multipart with one part per input",
        )
    return {params[0].name: values.encode(request.body)}


def _is_json(body: bytes) -> bool:
    try:
        return not body or bool(msgspec.json.decode(body, type=msgspec.Raw))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    except RecursionError:
        return True


def _encode_values(named: dict[str, Any]) -> dict[str, bytes]:
    return {name: values.encode(value) for name, value in named.items()}


def parse_query(request: HttpRequest, known: tuple[str, ...]) -> dict[str, str]:
    """Parse the query string; an unknown name is an error, not to be ignored."""
    try:
        pairs = parse_qsl(request.query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise BadValue("query: it cannot be read", hint="NAME=VALUE&NAME=VALUE, percent-encoded") from None
    found = dict(pairs)
    for name in found:
        if name not in known:
            raise BadValue(f"query: {name[:40]!r} means nothing here", hint=f"known: {', '.join(known)}")
    return found


def encode_result(blob: values.Blob, accept: bytes) -> tuple[bytes, bytes]:
    """Body and content type of a result."""
    if VALUE in accept:
        return bytes(blob), VALUE
    value = values.decode(blob)
    if isinstance(value, bytes):
        return value, BYTES
    return values.to_json(value), JSON


def reply_headers(reply: Reply) -> bytes:
    return (
        f"lamina-call-id: {reply.call_id}\r\nlamina-latency-ms: {reply.latency_us / 1000:.3f}\r\n"
        f"lamina-queue-ms: {reply.queue_us / 1000:.3f}\r\nlamina-batch: {reply.batch}\r\nlamina-slice: {reply.slice}\r\n"
        f"lamina-cost: {reply.cost:.9f}\r\nlamina-cold-start-ms: {reply.cold_us / 1000:.1f}\r\n"
        f"lamina-retries: {reply.retries}\r\n"
    ).encode()


class HttpProblem(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Problem details (RFC 9457), with our own members where they apply."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str
    id: str
    hint: str = ""
    reason: str = ""
    offer_ms: float = 0.0
    retry_after_s: float = 0.0
    step: str = ""
    error: str = ""
    trace: str = ""

    def body(self) -> bytes:
        return msgspec.json.encode(self)

    def headers(self) -> bytes:
        lines = b"lamina-call-id: %s\r\n" % self.id.encode()
        if self.retry_after_s:
            lines += b"retry-after: %d\r\n" % max(1, round(self.retry_after_s))
        if self.status == 415:
            lines += b"accept-encoding: identity\r\n"
        if self.status == 401:
            lines += b"www-authenticate: Bearer\r\n"
        return lines


def new_id() -> str:
    return secrets.token_hex(8)


_TITLES = {
    400: "bad request",
    401: "who are you?",
    403: "not allowed",
    404: "not found",
    405: "method not allowed",
    408: "too slow",
    409: "conflict",
    413: "too large",
    414: "address too long",
    415: "unsupported",
    422: "unprocessable",
    429: "refused",
    431: "header too large",
    500: "failed",
    503: "unavailable",
    504: "deadline exceeded",
}


def make_problem(status: int, detail: str, *, code: str = "", hint: str = "", id: str = "") -> HttpProblem:
    title = _TITLES.get(status, "error")
    return HttpProblem(
        title=title, status=status, detail=detail, code=code or title.replace(" ", "-"), id=id or new_id(), hint=hint
    )


_PARSE_HINTS = {
    408: "send it faster, or in smaller requests",
    413: "send less at a time; a file can lie where the function reads it",
    414: "put it into the body",
    431: "send fewer or shorter headers",
}


def parse_error_body(status: int, what: str, hint: str = "") -> tuple[bytes, bytes]:
    """Body and content type for a request that could not be parsed."""
    problem = make_problem(status, what, hint=hint or _PARSE_HINTS.get(status, ""))
    logs.log_rejection(problem)
    return problem.body(), PROBLEM


def method_problem(request: HttpRequest, allowed: str) -> HttpProblem:
    where = request.path[:80].decode("latin-1")
    return make_problem(405, f"{request.method} is not for {where}", hint=f"allowed: {allowed}")


def error_problem(error: LaminaError, id: str = "") -> HttpProblem:
    return make_problem(error.status, error.message, code=error.code, hint=error.hint, id=id)


def rejection_problem(refusal: Reject) -> HttpProblem:
    status, detail, hint = REFUSALS.get(refusal.reason, (429, "refused", ""))
    problem = make_problem(status, detail, code="refused" if status == 429 else "", hint=hint, id=refusal.call_id)
    problem.reason = refusal.reason
    if refusal.reason == "quota":
        problem.detail = f"{detail}: {refusal.why}"
    problem.offer_ms = refusal.offer_us / 1000
    problem.retry_after_s = refusal.retry_after_us / 1e6
    return problem


_LOG = "the server's log says more, under this id"
_FAILURES = {
    "deadline": (
        *(504, "deadline-exceeded", "accepted, and not done by its deadline"),
        "allow more time (its SLO or timeout, lamina-deadline-ms), or start it as a run: prefer: respond-async",
    ),
    "cancelled": (503, "cancelled", "cancelled before it was done", ""),
    "worker-lost": (503, "worker-lost", "its worker died, and so did the next one", _LOG),
    "device-lost": (503, "worker-lost", "its device was lost", "try again"),
    "hung": (503, "worker-lost", "its worker hung and was replaced", _LOG),
    "load-failed": (503, "load-failed", "the function cannot be loaded", _LOG),
    "cost": (429, "refused", *REFUSALS["cost"][1:]),  # seen when its batch was about to start
    "bad-value": (422, "unprocessable", "a step cannot use what it was given", ""),
    "function-failed": (500, "function-failed", "the function raised an error", _LOG),
}


def failure_problem(failure: FailCall, info: ErrorInfo | None, *, full: bool) -> HttpProblem:
    """The problem of a failed call. `full` includes what the user's code said; else that is in the log, under the same id."""
    by_name = (500, "function-failed", f"failed with {failure.error}", "")  # what a workflow fails with by itself has a name
    other = (500, failure.error, "failed", _LOG) if failure.error.islower() else by_name
    status, code, detail, hint = _FAILURES.get(failure.error, other)
    problem = make_problem(status, detail, code=code, id=failure.call_id, hint=hint)
    problem.step = failure.step
    problem.reason = failure.error if status == 429 else ""
    if info is not None and failure.error == "bad-value":  # said to the caller on purpose
        problem.detail, problem.hint = info.message, info.hint
    elif info is not None and full:
        problem.detail = f"{info.type}: {info.message}" if info.message else info.type
        problem.error, problem.trace, problem.hint = info.type, info.trace, info.hint
    return problem
