"""TLS from certificate files."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from lamina.bootstrap import open_local
from lamina.errors import BadValue
from lamina.gateway.bootstrap import ListenConfig, open_gateway
from lamina.server.listener import server_context
from tests.serving import read_answer, request, run, write_app

pytestmark = [pytest.mark.live, pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, *subject]
    subprocess.run(made, check=True, capture_output=True)
    return cert, key


def test_a_call_comes_and_goes_over_tls_and_plain_http_does_not(pair: tuple[str, str], tmp_path: Path) -> None:
    async def work() -> tuple[str, int, bytes]:
        gateway = await open_gateway(open_local(str(write_app(tmp_path))), ListenConfig(tls=pair))
        try:
            trusted = ssl.create_default_context(cafile=pair[0])
            reader, writer = await asyncio.open_connection("localhost", gateway.port, ssl=trusted)
            writer.write(request("POST", "/v1/functions/echo", b"[1]"))
            answer = await read_answer(reader)
            writer.close()
            plain_reader, plain = await asyncio.open_connection("127.0.0.1", gateway.port)
            plain.write(request("GET", "/healthz"))
            said = await plain_reader.read(100)
            plain.close()
            return gateway.url, answer.json[0], said
        finally:
            await gateway.stop(5)

    url, value, plain = run(work)
    assert url.startswith("https://") and value == 1
    assert not plain.startswith(b"HTTP")


def test_files_that_do_not_fit_are_refused_before_anything_is_served(pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "broken.pem").write_text("no key")
    for cert, key in ((pair[0], str(tmp_path / "missing.pem")), (pair[0], str(tmp_path / "broken.pem")), (pair[1], pair[0])):
        with pytest.raises(BadValue, match="tls"):
            server_context(cert, key)
