"""Password and token hashes: slow ones (argon2id) for passwords, a plain SHA-256 for random tokens, which cannot be guessed."""

from __future__ import annotations

import hashlib
import secrets
from functools import cache
from typing import TYPE_CHECKING

from lamina.errors import BadValue

if TYPE_CHECKING:
    from argon2 import PasswordHasher

MIN_CHARS, MAX_CHARS = 10, 256


@cache
def _hasher() -> PasswordHasher:
    try:
        from argon2 import PasswordHasher
    except ImportError:
        raise BadValue("people need argon2 to log in, and it is not installed", hint="pip install 'lamina[access]'") from None
    return PasswordHasher()


def hash_password(password: str) -> str:
    """Hash a password. Takes tens of milliseconds, on purpose."""
    if not MIN_CHARS <= len(password) <= MAX_CHARS:
        raise BadValue(f"password: {len(password)} characters", hint=f"{MIN_CHARS} to {MAX_CHARS}")
    return str(_hasher().hash(password))


@cache
def _dummy_hash() -> str:
    return str(_hasher().hash(secrets.token_hex(16)))


def verify(password: str, known: str) -> bool:
    """Verify a password. Against no hash it takes as long, and fails: response time must not tell which users exist."""
    from argon2.exceptions import VerificationError

    if len(password) > MAX_CHARS:
        return False
    try:
        return bool(_hasher().verify(known or _dummy_hash(), password) and known)
    except VerificationError:
        return False


def random_token(prefix: str) -> str:
    """A random token of 256 bits."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
