"""Problem details of failed requests (RFC 9457): one type, made from errors, rejections and failures, with titles and hints."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec

from lamina import encoding
from lamina.access.authorization import sees_internals
from lamina.access.records import Identity
from lamina.core.actions import FailCall, Reject
from lamina.drivers.driver import INTERNAL
from lamina.drivers.realtime import RealtimeDriver
from lamina.encoding import Response
from lamina.errors import REFUSALS, TOO_MANY_ITEMS, LaminaError, LeadershipLost, NotLeader, Refused, StoreDown, alone_hint
from lamina.gateway.observability import logs
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.server.exchange import Exchange, HttpRequest
from lamina.values.references import ErrorInfo, unpack_fields

log = logging.getLogger("lamina")

PROBLEM = b"application/problem+json"

T = TypeVar("T")

_defect_limiter = RateLimiter()
_failure_limiter = RateLimiter()


class InvalidField(msgspec.Struct, frozen=True):
    """A field of an input that is not as it should be."""

    field: str
    message: str


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
    price: float = 0.0
    retry_after_s: float = 0.0
    step: str = ""
    error: str = ""
    trace: str = ""
    leader: str = ""  #: address of the server that leads
    errors: list[InvalidField] = []  #: of an input, field by field

    def body(self) -> bytes:
        return msgspec.json.encode(self)

    def headers(self) -> bytes:
        lines = b"lamina-call-id: %s\r\n" % self.id.encode()
        if self.retry_after_s:
            lines += b"retry-after: %d\r\n" % max(1, round(self.retry_after_s))
        if self.leader:
            lines += b"lamina-leader: %s\r\n" % self.leader.encode()
        if self.status == 415:
            lines += b"accept-encoding: identity\r\n"
        if self.status == 401:
            lines += b"www-authenticate: Bearer\r\n"
        return lines


def new_id() -> str:
    return secrets.token_hex(8)


_TITLES = {
    400: ("bad request", "bad-request"),
    401: ("unauthorized", "unauthorized"),
    403: ("forbidden", "not-allowed"),
    404: ("not found", "not-found"),
    405: ("method not allowed", "method-not-allowed"),
    408: ("request timeout", "too-slow"),
    409: ("conflict", "conflict"),
    413: ("content too large", "too-large"),
    414: ("URI too long", "address-too-long"),
    415: ("unsupported media type", "unsupported"),
    422: ("unprocessable", "unprocessable"),
    429: ("too many requests", "refused"),
    431: ("header fields too large", "header-too-large"),
    500: ("failed", "failed"),
    503: ("service unavailable", "unavailable"),
    504: ("deadline exceeded", "deadline-exceeded"),
    505: ("HTTP version not supported", "http-version"),
    507: ("insufficient storage", "full"),
}
"""By status: the title for people, and the code for programs where an error has none of its own."""


def make_problem(status: int, detail: str, *, code: str = "", hint: str = "", id: str = "") -> HttpProblem:
    title, default = _TITLES.get(status, ("error", "error"))
    return HttpProblem(title=title, status=status, detail=detail, code=code or default, id=id or new_id(), hint=hint)


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
    problem = make_problem(error.status, error.message, code=error.code, hint=error.hint, id=id)
    if isinstance(error, NotLeader):
        problem.leader, problem.retry_after_s = error.leader, 1.0
    elif isinstance(error, StoreDown):
        problem.retry_after_s = 1.0
    elif isinstance(error, Refused):
        problem.reason, problem.retry_after_s = error.reason, error.retry_after_s
    return problem


def rejection_problem(refusal: Reject, id: str = "") -> HttpProblem:
    status, detail, hint = REFUSALS.get(refusal.reason, (429, "refused", ""))
    problem = make_problem(status, detail, code="refused" if status == 429 else "", hint=hint, id=id or refusal.call_id)
    problem.reason = refusal.reason
    if refusal.reason == "quota":
        problem.detail = f"{detail}: {refusal.why}"
    if refusal.offer_us:  # what is not known is left out
        problem.offer_ms = refusal.offer_us / 1000
    if refusal.price:
        problem.price = refusal.price
    if refusal.alone_us:
        problem.hint = alone_hint(refusal.alone_us)
    elif refusal.retry_after_us:
        problem.retry_after_s = refusal.retry_after_us / 1e6
    return problem


_LOG = "the server's log says more, under this id"
_FAILURES = {
    "deadline": (
        *(504, "deadline-exceeded", "accepted, and not done by its deadline"),
        "allow more time (its SLO or timeout, lamina-deadline-ms), or start it as a run: prefer: respond-async",
    ),
    "cancelled": (503, "cancelled", "cancelled before it was done", ""),
    "worker-lost": (503, "worker-lost", "its worker died; what may be repeated was, once more", _LOG),
    "device-lost": (503, "worker-lost", "its device was lost", "try again"),
    "hung": (503, "worker-lost", "its worker hung and was replaced", _LOG),
    "value-lost": (503, "value-lost", "a result that a step needs was lost with its machine", "look before repeating it"),
    "fetch-failed": (
        *(503, "fetch-failed", "a value could not be fetched from the machine that has it"),
        "try again; machines must reach each other's data ports",
    ),
    "load-failed": (503, "load-failed", "the function cannot be loaded", _LOG),
    "cost": (429, "refused", *REFUSALS["cost"][1:]),  # seen when its batch was about to start
    "store-down": (503, "store-down", "what it changed could not be kept", "look before repeating it"),
    "not-leader": (503, "leadership-lost", "another server leads", "ask that one, before it is repeated"),
    "leadership-lost": (
        *(503, "leadership-lost", "another server has taken the lead; it is not known whether what it changed was kept"),
        "ask the server that leads now, before it is repeated",
    ),
    "memory-exhausted": (
        *(503, "memory-exhausted", "the memory for the values of runs is used up"),
        "try again in a moment; the operator sets --memory-budget",
    ),
    "too-many-items": (422, "unprocessable", *TOO_MANY_ITEMS),
    "bad-value": (422, "unprocessable", "a step cannot use what it was given", ""),
    "function-failed": (500, "function-failed", "the function raised an error", _LOG),
    INTERNAL: (500, "internal", "a defect of the server ended it", _LOG),
    "quarantined": (
        *(500, "quarantined", "a defect keeps this run from going on; it is set aside"),
        "POST /v1/runs/ID/retry has it tried again, /cancel gives it up",
    ),
}


_STORE_ERRORS = {kind.__name__: kind.code for kind in (StoreDown, NotLeader, LeadershipLost)}
"""What a step of ours fails with if its state cannot be read or kept: no fault of the function."""


def failure_problem(failure: FailCall, info: ErrorInfo | None, *, full: bool) -> HttpProblem:
    """The problem of a failed call. `full` includes what the user's code said; else that is in the log, under the same id."""
    by_name = (500, "function-failed", f"failed with {failure.error}", "")  # what a workflow fails with by itself has a name
    other = (500, failure.error, "failed", _LOG) if failure.error.islower() else by_name
    what = _STORE_ERRORS.get(info.type, failure.error) if info is not None else failure.error
    status, code, detail, hint = _FAILURES.get(what, other)
    problem = make_problem(status, detail, code=code, id=failure.call_id, hint=hint)
    problem.step = failure.step if failure.error != INTERNAL else ""
    problem.reason = failure.error if status == 429 else ""
    if info is not None and 200 <= info.status <= 599:  # a response of its own, where one has no place
        problem.status, problem.code, problem.detail, problem.hint = max(400, info.status), "response", info.message, ""
    elif info is not None and failure.error == "bad-value":  # said to the caller on purpose
        problem.detail, problem.hint = info.message, info.hint
        problem.errors = [InvalidField(*one) for one in unpack_fields(info)]
    elif info is not None and full:
        problem.detail = f"{info.type}: {info.message}" if info.message else info.type
        problem.error, problem.trace, problem.hint = info.type, info.trace, info.hint
    return problem


_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.@+~-]+){2,}")


def without_internals(problem: HttpProblem) -> HttpProblem:
    """A problem for callers that may not deploy the code it is of: no trace, and of paths on the server the last name alone."""
    problem.trace = ""
    problem.detail, problem.hint = (
        _PATH.sub(lambda found: found[0].rpartition("/")[2], one) for one in (problem.detail, problem.hint)
    )
    return problem


def stored_problem(body: bytes, caller: Identity, owner: str) -> bytes:
    """A problem as it was kept with a run, for this caller; `owner` is the tenant of the run's target."""
    if sees_internals(caller, owner):
        return body
    return without_internals(msgspec.json.decode(body, type=HttpProblem)).body()


def caller_problem(
    driver: RealtimeDriver, ending: FailCall | Reject, target: str, caller: Identity, *, full: bool
) -> HttpProblem:
    """The problem for a call that ended without a result, as its caller is told it."""
    problem = ending_problem(driver, ending, full=full)
    if problem.status < 500 or sees_internals(caller, driver.engine.shared.source(target).tenant):
        return problem
    return without_internals(problem)


def raised_response(driver: RealtimeDriver, ending: FailCall | Reject) -> Response | None:
    """The response that a function has raised, which is the answer to its call; None if it ended otherwise."""
    info = driver.error_info(ending) if isinstance(ending, FailCall) and ending.error in _RAISED else None
    if info is None or not info.response:
        return None
    try:
        encoding.looked_into(info.response)
        found = encoding.decode(info.response)
    except LaminaError:  # a worker that does not keep to the protocol
        return None
    return found if isinstance(found, Response) else None


_RAISED = ("bad-value", "function-failed")


def ending_problem(
    driver: RealtimeDriver, ending: FailCall | Reject, info: ErrorInfo | None = None, *, full: bool
) -> HttpProblem:
    """The problem for a call that ended without a result; what its own code said is in the log in any case. `info` is given for
    errors that are not those of a step."""
    if isinstance(ending, Reject):
        return rejection_problem(ending)
    info = info or driver.error_info(ending)
    if ending.error not in ("cancelled", "bad-value", "cost") and (  # the client's doing, and `respond_problem` logs it
        info is not None or _failure_limiter.try_acquire()  # late calls come in crowds
    ):
        said = f": {info.type}: {info.message}\n{info.trace}" if info else ""
        if info is None and (suppressed := _failure_limiter.take_suppressed()):
            said = f" ({suppressed} more since the last line)"
        log.warning("call %s failed at %s: %s%s", ending.call_id, ending.step or "?", ending.error, said)
    return failure_problem(ending, info, full=full)


def defect_problem(what: str, error: Exception, id: str = "") -> HttpProblem:
    """The problem for an exception that is not the client's. A client that can cause it must not be able to fill a disk."""
    problem = make_problem(500, "a defect of the server; its log says more, under this id", code="internal", id=id)
    if _defect_limiter.try_acquire():
        log.error("%s: %s", problem.id, what, exc_info=error)
    return problem


def answered(exchange: Exchange, done: Callable[[T], None]) -> Callable[[T], None]:
    """A callback that ends in an answer whatever it raises: it is called by a loop that serves others, and a client waits."""

    def call(found: T) -> None:
        try:
            done(found)
        except LaminaError as error:
            respond_problem(exchange, error_problem(error))
            error.__traceback__ = None  # of an error that was found: its frames hold it, and a body, until the collector comes
        except Exception as error:
            respond_problem(exchange, defect_problem("an answer could not be made", error))

    return call


def respond_problem(exchange: Exchange, problem: HttpProblem) -> None:
    logs.log_rejection(problem)
    exchange.respond(problem.status, problem.body(), PROBLEM, problem.headers())


def reject_method(request: HttpRequest, exchange: Exchange, allowed: str) -> None:
    problem = method_problem(request, allowed)
    logs.log_rejection(problem)
    exchange.respond(405, problem.body(), PROBLEM, problem.headers() + b"allow: %s\r\n" % allowed.encode())
