"""TLS from files: a certificate and its key, as any authority hands them out."""

from __future__ import annotations

import ssl
from pathlib import Path

from lamina.errors import BadValue, read_user_file


def server_context(cert: str | Path, key: str | Path) -> ssl.SSLContext:
    """Server context for a certificate and its key; raises `BadValue` if they cannot be used."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    for field, file in (("--tls-cert", cert), ("--tls-key", key)):
        read_user_file(file, "a PEM file", field=field)
    try:
        made.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error
        hint = "PEM files that belong together, no password"
        raise BadValue(f"--tls-cert {cert}, --tls-key {key}: they cannot be used: {why}", hint=hint) from None
    return made
