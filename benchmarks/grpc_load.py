"""A closed loop over gRPC: each connection sends its next request when it has its answer. Only as much of HTTP/2 as that needs,
so that the client is not what is measured. `python -m benchmarks.grpc_load HOST:PORT PATH BODY_HEX CONNECTIONS SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict

from benchmarks.load import Result

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_WIDE = (2**31 - 65_536).to_bytes(4, "big")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is not to be remembered; names and values here are shorter than 127."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class _Client(asyncio.Protocol):
    def __init__(self, block: bytes, message: bytes, until: float, times: list[float]) -> None:
        self.block, self.until, self.times = block, until, times
        self.message = b"\x00" + len(message).to_bytes(4, "big") + message
        self.buffer = b""
        self.stream = -1
        self.sent = 0.0
        self.has_data = False
        self.errors = 0
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        settings = frame(_SETTINGS, 0, 0, b"\x00\x04" + (2**30).to_bytes(4, "big"))
        transport.write(_PREFACE + settings + frame(_WINDOW, 0, 0, _WIDE))  # type: ignore[attr-defined]
        self.ask()

    def ask(self) -> None:
        self.stream += 2
        self.has_data = False
        self.sent = time.perf_counter()
        self.transport.write(  # type: ignore[attr-defined]
            frame(_HEADERS, _END_HEADERS, self.stream, self.block) + frame(_DATA, _END_STREAM, self.stream, self.message)
        )

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data
        at = 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            end = at + 9 + size
            if len(data) < end:
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                self.has_data = self.has_data or size > 5
            if kind == _SETTINGS and not flags & _ACK:
                self.transport.write(frame(_SETTINGS, _ACK, 0))  # type: ignore[attr-defined]
            elif kind == _PING and not flags & _ACK:
                self.transport.write(frame(_PING, _ACK, 0, data[at + 9 : end]))  # type: ignore[attr-defined]
            elif kind == _GOAWAY:
                self.done = True
            elif kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self.answered()
            at = end
        self.buffer = data[at:]

    def answered(self) -> None:
        now = time.perf_counter()
        self.errors += not self.has_data
        self.times.append((now - self.sent) * 1000)
        if now < self.until:
            self.ask()
        else:
            self.done = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.errors += not self.done
        self.done = True


async def _closed(address: str, path: str, message: bytes, connections: int, seconds: float) -> Result:
    host, port = address.rsplit(":", 1)
    block = b"\x83\x86"  # POST, http
    block += _literal(":path", path) + _literal(":authority", address) + _literal("te", "trailers")
    block += _literal("content-type", "application/grpc")
    loop = asyncio.get_running_loop()
    times: list[float] = []
    until = time.perf_counter() + seconds
    made = [
        (await loop.create_connection(lambda: _Client(block, message, until, times), host, int(port)))[1]
        for _ in range(connections)
    ]
    while not all(client.done for client in made) and time.perf_counter() < until + 5:
        await asyncio.sleep(0.01)
    for client in made:
        client.transport.close()
    times.sort()
    errors = sum(client.errors for client in made)
    return Result(len(times) / seconds, times[len(times) // 2], times[int(len(times) * 0.99)], errors)


def closed_grpc(address: str, path: str, message: bytes, connections: int, seconds: float) -> Result:
    command = [sys.executable, "-m", "benchmarks.grpc_load", address, path, message.hex(), str(connections), str(seconds)]
    return Result(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    import uvloop

    address, path, message, connections, seconds = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_closed(address, path, bytes.fromhex(message), int(connections), float(seconds)))
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
