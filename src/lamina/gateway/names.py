"""Names of request headers.

An unknown header means nothing, and most may. One that begins with `lamina-` was meant for us: to ignore it would serve a call
without the deadline its client thinks it has. So it is rejected. That costs other requests nothing: the check is made where a
name is put into lower case for the first time.
"""

from __future__ import annotations

OURS = b"lamina-"
WISHES = ("lamina-deadline-ms", "lamina-priority", "lamina-cost-limit")
PACKAGES = ("lamina-sha256", "lamina-entry")  #: what comes with one that is deployed
_ASKED = frozenset(name.encode() for name in WISHES + PACKAGES)
_ANSWERED = frozenset(
    f"lamina-{what}"
    for what in ("call-id", "run-id", "latency-ms", "queue-ms", "batch", "slice", "cost", "cold-start-ms", "retries")
)

MOST = 512
LONGEST = 64


class Names(dict[bytes, bytes]):
    """Cache of header names in lower case; empty for an unknown `lamina-` name. Bounded."""

    def __missing__(self, name: bytes) -> bytes:
        read = name.lower()
        if read.startswith(OURS) and read not in _ASKED:
            return b""
        if len(name) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[name] = read
        return read


def advice(name: bytes) -> tuple[str, str]:
    """Error text and hint for an unknown `lamina-` header."""
    shown = name[:LONGEST].decode("latin-1").lower()
    wrong = f"{shown!r} is no header of a request"
    import difflib  # for mistakes only

    bare = [known.removeprefix("lamina-") for known in WISHES]  # what all begin with makes none alike
    close = difflib.get_close_matches(shown.removeprefix("lamina-"), bare, n=1, cutoff=0.5)
    hint = f"did you mean 'lamina-{close[0]}'?" if close else f"there are {', '.join(WISHES)}"
    return wrong, f"it is one of answers; {hint}" if shown in _ANSWERED else hint
