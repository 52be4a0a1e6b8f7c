"""Names of request headers.

An unknown header means nothing, and most may. One that begins with `lamina-` was meant for us: to ignore it would serve a call
without the deadline its client thinks it has. So it is rejected. That costs other requests nothing: the check is made where a
name is put into lower case for the first time.
"""

from __future__ import annotations

OWN_PREFIX = b"lamina-"
OPTION_NAMES = ("lamina-deadline-ms", "lamina-priority", "lamina-cost-limit")
PACKAGE_NAMES = ("lamina-sha256", "lamina-entry")  #: what comes with one that is deployed
_REQUEST_NAMES = frozenset(name.encode() for name in OPTION_NAMES + PACKAGE_NAMES)
_RESPONSE_NAMES = frozenset(
    f"lamina-{what}"
    for what in ("call-id", "run-id", "latency-ms", "queue-ms", "batch", "slice", "cost", "cold-start-ms", "retries")
)

MAX_NAMES = 512
MAX_NAME_BYTES = 64


class HeaderNames(dict[bytes, bytes]):
    """Cache of header names in lower case; empty for an unknown `lamina-` name. Bounded."""

    def __missing__(self, name: bytes) -> bytes:
        read = name.lower()
        if read.startswith(OWN_PREFIX) and read not in _REQUEST_NAMES:
            return b""
        if len(name) <= MAX_NAME_BYTES:
            if len(self) >= MAX_NAMES:
                self.clear()
            self[name] = read
        return read


def unknown_header(name: bytes) -> tuple[str, str]:
    """Error text and hint for an unknown `lamina-` header."""
    shown = name[:MAX_NAME_BYTES].decode("latin-1").lower()
    wrong = f"{shown!r} is no header of a request"
    import difflib  # for mistakes only

    bare = [known.removeprefix("lamina-") for known in OPTION_NAMES]  # what all begin with makes none alike
    close = difflib.get_close_matches(shown.removeprefix("lamina-"), bare, n=1, cutoff=0.5)
    hint = f"did you mean 'lamina-{close[0]}'?" if close else f"there are {', '.join(OPTION_NAMES)}"
    return wrong, f"it is one of answers; {hint}" if shown in _RESPONSE_NAMES else hint
