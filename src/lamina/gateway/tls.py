"""TLS by file: a certificate and its key, as any authority hands them out."""

from __future__ import annotations

import ssl
from pathlib import Path

from lamina.errors import BadValue


def context(cert: str | Path, key: str | Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise BadValue(f"--tls-cert, --tls-key: {error}", hint="PEM files that belong together, no password") from None
    return made
