"""HTTP/2 frames (RFC 9113): their numbers, and how one is written."""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 5, 6, 7, 8, 9
ENHANCE_YOUR_CALM = 11
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535


class ProtocolViolation(Exception):
    """A violated rule of the connection, or of a stream."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return b"%s%c%c%s%s" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def strip_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolViolation(PROTOCOL_ERROR, "bad padding")
    return payload[1 : len(payload) - payload[0]]
