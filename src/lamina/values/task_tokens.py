"""Task tokens: what a step that waits for a report gives out, and what the report names it by.

A token says which execution of which run it is of, and carries a MAC over that with a key of the server: it cannot be guessed or
made for another step, and needs no table. The key is kept with the state, so a token outlives restarts and a change of the
leader. Where there is no store it ends with the process, as the run does.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Callable

import msgspec

from lamina.errors import BadValue

MAC_BYTES = 16
MAX_TOKEN_CHARS = 512


class TaskTokens:
    """Maker and reader of tokens. `find_key` returns the key of the server, made if there is none."""

    def __init__(self, find_key: Callable[[], bytes] | None = None) -> None:
        own = secrets.token_bytes(32)
        self._find_key = find_key or (lambda: own)

    def make(self, call_id: str, execution_id: int) -> str:
        place = msgspec.msgpack.encode((call_id, execution_id))
        return base64.urlsafe_b64encode(self._mac(place) + place).decode().rstrip("=")

    def read(self, token: str) -> tuple[str, int]:
        """Call and execution that a token is of; raises `BadValue` for anything that was not made here."""
        try:
            raw = base64.b64decode(token[:MAX_TOKEN_CHARS] + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            if hmac.compare_digest(self._mac(raw[MAC_BYTES:]), raw[:MAC_BYTES]):
                return msgspec.msgpack.decode(raw[MAC_BYTES:], type=tuple[str, int])
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            pass
        raise BadValue("token: it is of no task", hint="use it as the step was given it")

    def _mac(self, place: bytes) -> bytes:
        return hmac.digest(self._find_key(), b"task-token:" + place, "sha256")[:MAC_BYTES]
