"""A real HTTP server on loopback that answers as the test says, one thread per connection."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lamina import encoding
from lamina.sdk.client_codec import VALUE

DROP = b""
"""Close the connection instead of answering."""


@dataclass
class Seen:
    """One request as it came."""

    connection: int
    number: int  #: among those of its connection
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    gone: Callable[[], bool] = lambda: False  #: waits until the client has hung up

    @property
    def inputs(self) -> Any:
        return encoding.decode(self.body)


@dataclass
class Scripted:
    url: str
    answer: Callable[[Seen], bytes]
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0


def http(status: int, body: bytes, kind: str, *, close: bool = False, **headers: Any) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}", f"content-type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines += ["connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def ok(value: Any, **headers: Any) -> bytes:
    return http(200, encoding.encode(value), VALUE, **headers)


def problem(status: int, code: str, **fields: Any) -> bytes:
    return http(status, msgspec.json.encode({"status": status, "code": code, **fields}), "application/problem+json")


def silent(seen: Seen) -> bytes:
    """Says nothing until the client has had enough."""
    seen.gone()
    return DROP


@contextmanager
def serving(answer: Callable[[Seen], bytes]) -> Iterator[Scripted]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            script.connections += 1
            connection, number = script.connections, 0
            while line := self.rfile.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (field_line := self.rfile.readline().decode().strip()) != "":
                    key, _, value = field_line.partition(":")
                    headers[key.lower()] = value.strip()
                body = self.rfile.read(int(headers.get("content-length", 0)))
                number += 1
                seen = Seen(connection, number, method, path, headers, body, self.hung_up)
                script.seen.append(seen)
                said = script.answer(seen)
                if said == DROP:
                    return
                self.wfile.write(said)
                if b"connection: close" in said:
                    return

        def hung_up(self) -> bool:
            try:
                return self.rfile.read(1) == b""
            except ConnectionError:
                return True

        def finish(self) -> None:
            with suppress(OSError):  # the client has gone first
                super().finish()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hangs up is part of the script."""

    with Server(("127.0.0.1", 0), Handler) as server:
        script = Scripted(f"http://127.0.0.1:{server.server_address[1]}", answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
