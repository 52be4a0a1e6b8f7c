"""Errors, with one root for everything Lamina raises on purpose.

An error says which side is at fault (`status`, as HTTP counts it), what was wrong (the message names field and value) and
what to do next (`hint`). `code` is the stable word clients may match on.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Final


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Hint for an unknown name: the nearest known one, or else `otherwise`."""
    import difflib  # for mistakes only

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


class LaminaError(Exception):
    """Root of all errors of the platform."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def add_hint(self, more: str) -> None:
        self.hint = f"{self.hint}; {more}" if self.hint else more

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class BadValue(LaminaError):
    """A value the caller gave cannot be used. `fields`: which parts of it, and why, where there are several."""

    status = 400
    code = "bad-value"

    def __init__(self, message: str, *, hint: str = "", fields: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message, hint=hint)
        self.fields = fields


class WrongInput(BadValue):
    """An input that a workflow takes no values like: what a function says of its own."""

    status = 422
    code = "unprocessable"


class UnknownEncoding(LaminaError):
    """Content encoding of a body that is not accepted where it was sent."""

    status = 415
    code = "unknown-encoding"


def checked_text(field: str, text: str) -> str:
    """A text that every store can hold: no NUL, which PostgreSQL has no place for, and no half of a surrogate pair, which is no
    Unicode. The same for all stores: what one takes must not be lost when it is moved to another."""
    if "\0" in text or (not text.isascii() and any("\ud800" <= one <= "\udfff" for one in text)):
        raise BadValue(f"{field}: {text[:60]!r} has a NUL or half a surrogate pair", hint="leave such characters out")
    return text


_READ_ERRORS: Final = {
    errno.ENOENT: "no file {!r}",
    errno.ENOTDIR: "no file {!r}",
    errno.EISDIR: "{!r} is a folder",
    errno.EACCES: "{!r} may not be read by this user",
    errno.EPERM: "{!r} may not be read by this user",
}


def unreadable_file(path: str | Path, error: OSError | ValueError, hint: str, *, field: str = "") -> BadValue:
    """Error for a file of the user that cannot be read. One that is not there may be misspelt."""
    if isinstance(error, UnicodeError):
        why = f"{str(path)!r} is not text in UTF-8"
    elif isinstance(error, OSError):
        why = _READ_ERRORS.get(error.errno or 0, f"{{!r}} cannot be read: {error.strerror or error}").format(str(path))
        if error.errno == errno.ENOENT:
            hint = _similar_file(Path(path)) or hint
        elif error.errno in (errno.EACCES, errno.EPERM):
            hint = "ls -l tells whose it is"
    else:
        why = f"{str(path)!r} cannot be read: {error}"
    return BadValue(f"{field}: {why}" if field else why, hint=hint)


def read_user_file(path: str | Path, hint: str, *, field: str = "") -> bytes:
    """Content of a file that the user named, or an error that says what is wrong with it."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise unreadable_file(path, error, hint, field=field) from None


def _similar_file(path: Path) -> str:
    """Hint with the most similar file name in the same folder; the suffix, which all have, does not count."""
    try:
        stems = [one.stem for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    except OSError:
        return ""
    import difflib  # for mistakes only

    close = difflib.get_close_matches(path.stem, stems, n=1)
    return f"did you mean {str(path.with_stem(close[0]))!r}?" if close else ""


class BadScenario(BadValue):
    """A scenario file that cannot be run; the message starts with file and line."""

    code = "bad-scenario"


class BadFlow(BadValue):
    """A workflow with an invalid graph."""

    code = "bad-flow"


class UnknownPlugin(LaminaError):
    """No plugin of that name: the file name is the registration."""

    status = 404
    code = "unknown-plugin"


class UnknownTarget(LaminaError):
    """No function or workflow of that name."""

    status = 404
    code = "unknown-target"


class Refused(LaminaError):
    """Rejected at admission: it would be late, or too dear. `offer_ms` is the latency that could be promised instead,
    `price` what it would cost at least; None where that is not known."""

    status = 429
    code = "refused"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float = 0.0,
        offer_ms: float | None = None,
        price: float | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.offer_ms = offer_ms
        self.price = price

    def __str__(self) -> str:
        offer = f"\n  offer: {self.offer_ms:.4g} ms could be met now" if self.offer_ms else ""
        return super().__str__() + offer + (f"\n  price: {self.price:.3g}" if self.price else "")


OVERLOADED: Final = "overloaded"

TOO_MANY_ITEMS: Final = (
    "the `each` of this run have too many items at a time",
    "go over the inner lists in fewer pieces at once",
)
"""What a run is told whose fan-outs inside fan-outs are too many, and what to do."""

REFUSALS: Final = {
    "deadline": (429, "it could not be done in time", "allow more time, or try again later"),
    "cost": (429, "it would cost more than its limit", "raise lamina-cost-limit"),
    "queue-full": (429, "the queue is full", "try again later"),
    "quota": (429, "the tenant's quota is used up", "try again later, or ask for a larger quota"),
    "share": (429, "others had to wait for calls of this tenant", "try again in a moment"),
    OVERLOADED: (429, "more calls come than this server's processes can handle", "try again in a moment, or ask another server"),
    "no-capacity": (503, "no device here can run it", "add a device that fits, or lower what it asks for"),
    "unknown": (404, "no such function or workflow", "GET /v1/functions and /v1/workflows list them"),
    "duplicate": (409, "a call of that id is under way", "use a new id"),
}
"""Rejections by reason: status, what it means, what to do."""


def alone_hint(alone_us: int) -> str:
    """What to do where a call asks for less than it takes on idle devices: not to try again."""
    return f"allow more: it takes {alone_us / 1000:.3g} ms on an idle server, so trying again does not help"


class DeadlineExceeded(LaminaError):
    """Accepted, and not done by its deadline."""

    status = 504
    code = "deadline-exceeded"


class FunctionFailed(LaminaError):
    """Exception in user code; `error` is its type."""

    status = 500
    code = "function-failed"

    def __init__(self, message: str, *, error: str = "", step: str = "", remote_trace: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.error = error
        self.step = step
        self.remote_trace = remote_trace


class WorkerLost(LaminaError):
    """Crash of the worker under a job, and of its replacement."""

    status = 503
    code = "worker-lost"


class LoadFailed(LaminaError):
    """The function cannot be loaded."""

    status = 503
    code = "load-failed"


class Cancelled(LaminaError):
    """Cancelled by its caller, or by the server shutting down."""

    status = 503
    code = "cancelled"


class Unreachable(LaminaError):
    """No answer came from the server: it is not there, or the connection broke."""

    status = 503
    code = "unreachable"


class NoCapacity(LaminaError):
    """A deployment that asks for more than there is. The hint says what would fit."""

    status = 409
    code = "no-capacity"


class Unauthorized(LaminaError):
    """Missing or invalid credentials."""

    status = 401
    code = "unauthorized"


class Forbidden(LaminaError):
    """Missing permission of an authenticated caller."""

    status = 403
    code = "forbidden"


class NotFound(LaminaError):
    """Nothing of that name or number."""

    status = 404
    code = "not-found"


class Conflict(LaminaError):
    """Conflict with the current state."""

    status = 409
    code = "conflict"


class StoreDown(LaminaError):
    """The store cannot be written now."""

    status = 503
    code = "store-down"


class NotLeader(StoreDown):
    """Another server leads: nothing was done here. `leader` is its address, "" if that is not known."""

    code = "not-leader"

    def __init__(self, message: str, *, leader: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.leader = leader


class LeadershipLost(StoreDown):
    """Another server has taken the lead while this was under way: whether it was done must be looked up there."""

    code = "leadership-lost"


class PolicyError(LaminaError):
    """A policy decided something impossible: a defect of the policy, never of the call."""

    code = "policy-error"
