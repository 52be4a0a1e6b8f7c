"""Names of headers, as they are written and as they are read.

A header nobody knows means nothing, and most may. One that begins as ours do was meant for us: to pass it over would serve a
call without the deadline its caller thinks it has. So it is told. That costs other requests nothing: what a name means is
looked up where it was put into lower case before.
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
    """By how it is written, how it is read; empty for one that would be ours and is not. Those met before, so many at most."""

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
    """What is wrong with a header of that name, and what to do about it."""
    shown = name[:LONGEST].decode("latin-1").lower()
    wrong = f"{shown!r} is no header of a request"
    import difflib  # for mistakes only

    bare = [known.removeprefix("lamina-") for known in WISHES]  # what all begin with makes none alike
    close = difflib.get_close_matches(shown.removeprefix("lamina-"), bare, n=1, cutoff=0.5)
    hint = f"did you mean 'lamina-{close[0]}'?" if close else f"there are {', '.join(WISHES)}"
    return wrong, f"it is one of answers; {hint}" if shown in _ANSWERED else hint
