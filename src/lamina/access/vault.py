"""Encryption of secrets at rest: AES-256-GCM under a key that is not in the store, each bound to its tenant and name.

The key is in the environment (`LAMINA_SECRETS_KEY`, 32 bytes in base64), or else in a file beside the store that is made with
the first secret, readable by its owner alone. A copy of the store gives no secrets; only store and key together do.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.errors import BadValue

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_VARIABLE = "LAMINA_SECRETS_KEY"
KEY_FILE = "secrets.key"
_SEALED = "aesgcm1:"
_KEY_BYTES, _NONCE_BYTES = 32, 12


class Vault:
    """Seals and opens secrets. `folder` has the key file, or will; None: the key must be in the environment."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / KEY_FILE if folder is not None else None

    def seal(self, owner: str, value: str) -> str:
        """Encrypt a secret. `owner` names it: sealed for one, it opens for no other."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher(make=True).encrypt(nonce, value.encode(), owner.encode())
        return _SEALED + base64.b64encode(nonce + sealed).decode()

    def open(self, owner: str, sealed: str) -> str:
        if not sealed.startswith(_SEALED):
            raise BadValue(f"secret {owner!r}: it is not sealed", hint="set it again")
        from cryptography.exceptions import InvalidTag

        try:
            blob = base64.b64decode(sealed[len(_SEALED) :], validate=True)
            plain: bytes = self._cipher().decrypt(blob[:_NONCE_BYTES], blob[_NONCE_BYTES:], owner.encode())
            return plain.decode()
        except (InvalidTag, ValueError):
            hint = f"set it again, or see to {KEY_VARIABLE}"
            raise BadValue(f"secret {owner!r}: it was sealed with another key", hint=hint) from None

    def _cipher(self, *, make: bool = False) -> AESGCM:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            hint = "pip install 'lamina[access]'"
            raise BadValue("secrets are kept sealed, and 'cryptography' is not installed", hint=hint) from None
        return AESGCM(self._key(make))

    def _key(self, make: bool) -> bytes:
        if text := os.environ.get(KEY_VARIABLE):
            return _decoded(text, KEY_VARIABLE)
        if self._file is None:
            raise BadValue(f"{KEY_VARIABLE}: not set, and this store has no folder for a key", hint=f"set it: {_example()}")
        if make:
            self._create_key(self._file)
        try:
            return _decoded(self._file.read_text(), str(self._file))
        except OSError as error:
            raise BadValue(f"secrets: their key {str(self._file)!r} cannot be read: {error.strerror}") from None

    @staticmethod
    def _create_key(file: Path) -> None:
        """Create the key file, once: a second process finds it."""
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)) + b"\n")


def _decoded(text: str, place: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise BadValue(f"{place}: not {_KEY_BYTES} bytes in base64", hint=_example())
    return key


def _example() -> str:
    return "openssl rand -base64 32 makes one"
