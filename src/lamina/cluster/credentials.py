"""Credentials of a cluster: the join token, proofs of it, tickets for values, and TLS on both sides.

The token itself never travels. Each side sends a number, and the other answers with a keyed hash of it: an agent that does not
know the token is not taken, and neither does an agent take a leader that does not. Tickets are made with a key that both derive
from the token, the cell and the epoch: one for each value, as long as that is there, and of no more use when another server
leads. No clock is asked: those of machines differ.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
from pathlib import Path

from msgspec import Struct

from lamina.errors import BadValue, LaminaError, read_user_file
from lamina.server.listener import server_context

MIN_TOKEN_BYTES = 16
TOKEN_VARIABLE = "LAMINA_JOIN_TOKEN"
TICKET_BYTES = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class JoinDenied(LaminaError):
    """An agent or a leader that does not know the join token."""

    status = 401
    code = "join-denied"


class TlsFiles(Struct, frozen=True):
    """Files of TLS between machines: a certificate with its key, and the authority that has signed those of all."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def is_given(self) -> bool:
        return bool(self.ca or self.cert or self.key)

    def check(self, option: str = "--tls") -> None:
        if self.is_given and not (self.ca and self.cert and self.key):
            raise BadValue(
                "TLS between machines takes an authority, a certificate and its key",
                hint=f"give all of {option}-ca, {option}-cert and {option}-key",
            )

    def for_server(self) -> ssl.SSLContext | None:
        """Context of a listener: peers must have a certificate of the same authority."""
        if not self.is_given:
            return None
        made = server_context(self.cert, self.key)
        _trust(made, self.ca)
        made.verify_mode = ssl.CERT_REQUIRED
        return made

    def for_client(self) -> ssl.SSLContext | None:
        """Context of a connection: the authority counts, not the name, since machines are named by addresses."""
        if not self.is_given:
            return None
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.check_hostname = False
        _trust(made, self.ca)
        try:
            made.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise BadValue(
                f"{self.cert}, {self.key}: they cannot be used: {error}", hint="PEM files that belong together"
            ) from None
        return made


def _trust(context: ssl.SSLContext, ca: str) -> None:
    read_user_file(ca, "a PEM file of the authority", field="--tls-ca")
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise BadValue(f"--tls-ca {ca}: it cannot be used: {error}", hint="a PEM file with one certificate or more") from None


class JoinToken:
    """The join token, which both sides prove to know. One in a file is read again when the file has changed, so that it can be
    rotated while machines stay joined. A file may have several, one a line: the first is this machine's own, and a leader takes
    machines that know any of them."""

    def __init__(self, *tokens: bytes, file: Path | None = None) -> None:
        self._tokens = tuple(token for token in tokens if token)
        self._file = file
        self._stamp = _stamp(file)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    @property
    def own(self) -> bytes:
        return self.accepted[0] if self._tokens else b""

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """All that count now. A file that cannot be read, or has a token in it that is too short, changes nothing."""
        if self._file is not None and (stamp := _stamp(self._file)) != self._stamp:
            try:
                found = _lines(self._file.read_bytes())
            except OSError:
                found = ()
            if found and min(map(len, found)) >= MIN_TOKEN_BYTES:
                self._tokens, self._stamp = found, stamp
        return self._tokens


def _lines(text: bytes) -> tuple[bytes, ...]:
    return tuple(line for each in text.splitlines() if (line := each.strip()))


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None


def read_token(file: Path | None, option: str, host: str = "") -> JoinToken:
    """The join token, from a file or the environment. Only on loopback there may be none."""
    if file is not None:
        text = read_user_file(file, "a file with the token, made by `openssl rand -hex 32`", field=option)
        tokens = _lines(text if isinstance(text, bytes) else text.encode())
    else:
        tokens = _lines(os.environ.get(TOKEN_VARIABLE, "").encode())
    if not tokens and host not in LOOPBACK:
        raise BadValue(
            f"{option}: agents of other machines need a join token",
            hint=f"give {option} FILE, or set {TOKEN_VARIABLE}; `openssl rand -hex 32` makes one",
        )
    for token in tokens:
        if len(token) < MIN_TOKEN_BYTES:
            raise BadValue(
                f"{option}: the join token has {len(token)} bytes", hint=f"at least {MIN_TOKEN_BYTES}: `openssl rand -hex 32`"
            )
    return JoinToken(*tokens, file=file)


def proof(token: bytes, role: str, *parts: bytes | str | int) -> bytes:
    """Proof of the token for one handshake. Every part has its length before it, so no two lists of parts look alike."""
    text = b"".join(len(data).to_bytes(4, "big") + data for data in (_bytes(part) for part in (role, *parts)))
    return hmac.digest(token, b"lamina-join" + text, hashlib.sha256)


def proves(given: bytes, token: bytes, role: str, *parts: bytes | str | int) -> bool:
    return hmac.compare_digest(given, proof(token, role, *parts))


def _bytes(part: bytes | str | int) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()


class TicketKey:
    """Key of the tickets of one epoch."""

    def __init__(self, token: bytes, cell: str, epoch: int) -> None:
        self._key = proof(token, "data", cell, epoch)

    def sign(self, request: bytes) -> bytes:
        """Ticket for a request of the data port: what is asked for, and until when."""
        return hmac.digest(self._key, request, hashlib.sha256)[:TICKET_BYTES]

    def allows(self, request: bytes, ticket: bytes) -> bool:
        return hmac.compare_digest(self.sign(request), ticket)
