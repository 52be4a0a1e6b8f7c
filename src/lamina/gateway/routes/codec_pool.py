"""Codec processes: large bodies and results are decoded and encoded apart, so that no request waits for another's bytes.

To decode thirty megabytes of brackets takes seconds, and no thread helps: the interpreter is held all the while. What is small,
or large in one piece (a text, bytes, a tensor), is handled where it is. The rest is sent to one of a few processes, each with a
limit on memory and a limit of time for each job (`python -m lamina.gateway.routes.codec_pool`). What comes back is in one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import Struct

from lamina import encoding
from lamina.errors import BadValue, FunctionFailed, LaminaError, UnknownEncoding
from lamina.gateway.routes import http_codec
from lamina.ipc.child_process import ChildProcess, ProcessSpec
from lamina.ipc.framing import FrameChannel, FrameReader, StopProcess, pack
from lamina.sdk.binding import Param
from lamina.server.exchange import HttpRequest
from lamina.server.process_status import limit_address_space

log = logging.getLogger("lamina")

PROCESSES = 2
JOB_LIMIT_S = 60.0
JOB_MEMORY = 3 * 2**30
MAX_WAITING = 64

INLINE_BYTES = 64 * 2**10
"""Up to this much is always handled in place: three milliseconds at worst."""

FLAT_BYTES = 4 * 2**20
"""JSON up to this size is handled in place if it has few parts."""

MAX_PARTS = 20_000
MAX_FIELDS = 1_000
_LENGTH_DELIMITED, _RAW_INPUT_CONTENTS = 2, 7  #: in protobuf, and in the protocol's requests
_MULTIPART_BYTES = 2**20
_SEND_LESS = "send less at a time, or binary"


class CodecOverloaded(LaminaError):
    """No codec process has time for another large body, or this one took too long."""

    status = 503
    code = "codec-overloaded"


class CodecTooLarge(LaminaError):
    """A body that takes more memory to decode than one may have."""

    status = 413
    code = "too-large"


class CodecSetup(Struct, frozen=True):
    fd: int = -1


class CodecJob(Struct, frozen=True, array_like=True, tag=1):
    """Work for a codec process: `call` decodes inputs, `infer` and `grpc` make tensors binary, `result` encodes a result."""

    operation: str
    headers: dict[str, bytes]
    params: tuple[Param, ...]
    body: bytes


class CodecResult(Struct, frozen=True, array_like=True, tag=2):
    """What came of a job: named parts, or an error with its code, message and hint."""

    parts: dict[str, bytes]
    error: tuple[str, str, str] | None = None


Then = Callable[[dict[str, bytes] | LaminaError], None]
_ERRORS: dict[str, type[LaminaError]] = {
    kind.code: kind for kind in (BadValue, UnknownEncoding, FunctionFailed, CodecTooLarge, CodecOverloaded)
}


# ------------------------------------------------------------------------------ what is heavy


def is_heavy_request(request: HttpRequest) -> bool:
    """Whether decoding the body of a call would take the loop too long."""
    body = request.body
    if len(body) <= INLINE_BYTES:
        return False
    kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind in (http_codec.JSON, b"", http_codec.FORM):
        return is_heavy_json(body)
    if kind == http_codec.VALUE:
        return not _is_flat_map(body)
    return kind == b"multipart/form-data" and len(body) > _MULTIPART_BYTES


def is_heavy_json(body: bytes) -> bool:
    return len(body) > INLINE_BYTES and (len(body) > FLAT_BYTES or _parts(body) > MAX_PARTS)


def is_heavy_result(blob: encoding.Blob, accept: bytes) -> bool:
    """Whether making text of a result would take the loop too long; what is sent as it is does not."""
    if len(blob) <= INLINE_BYTES or http_codec.VALUE in accept or encoding.is_flat_response(blob):
        return False
    return not _is_leaf(blob[0]) or blob[0] in _EXTENSIONS or (len(blob) > FLAT_BYTES and blob[0] in _TEXTS)


def is_heavy_message(message: bytes) -> bool:
    """Whether a gRPC request has more than its raw tensors: each of many parts would become an object."""
    if len(message) <= INLINE_BYTES:
        return False
    at = fields = raw_bytes = 0
    while at < len(message) and fields <= MAX_FIELDS:
        tag, size, shift, more, at = message[at], 0, 0, True, at + 1
        while more and at < len(message) and shift < 35:
            size |= (message[at] & 0x7F) << shift
            more, shift, at = message[at] >= 0x80, shift + 7, at + 1
        if tag & 7 != _LENGTH_DELIMITED:
            return True
        raw_bytes += size if tag >> 3 == _RAW_INPUT_CONTENTS else 0
        fields, at = fields + 1, at + size
    return fields > MAX_FIELDS or len(message) - raw_bytes > INLINE_BYTES


def _parts(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}  #: texts and bytes, by their first byte: bytes of the length
_TEXTS = (0xD9, 0xDA, 0xDB)
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}


def _is_leaf(first: int) -> bool:
    return first in _STRINGS or first in _EXTENSIONS or first in _FIXED or first < 0x80 or (first >= 0xA0 and first < 0xC0)


def _is_flat_map(body: bytes) -> bool:
    """Whether an encoded dict has few entries, and no list or dict among its values: then its size does not matter."""
    try:
        first = body[0]
        if first & 0xF0 != 0x80:
            return False
        at = 1
        for index in range(2 * (first & 0x0F)):
            at = _skip_leaf(body, at)
            if not at:
                return False
            if index % 2 and at > len(body):
                return False
        return at == len(body)
    except IndexError:
        return True  # it ends too soon, which is found at once


def _skip_leaf(body: bytes, at: int) -> int:
    """Where the value at `at` ends; 0 if it is a list or a dict."""
    first = body[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return at
    if 0xA0 <= first < 0xC0:
        return at + (first & 0x1F)
    if first in _FIXED:
        return at + _FIXED[first]
    width = _STRINGS.get(first) or _EXTENSIONS.get(first)
    if width is None:
        return 0
    size = int.from_bytes(body[at : at + width], "big")
    return at + width + size + (first in _EXTENSIONS)


# ------------------------------------------------------------------------------- the server's side


class CodecPool:
    """A few codec processes, started when they are first needed, and one line of jobs for all of them."""

    def __init__(self, processes: int = PROCESSES, job_limit_s: float = JOB_LIMIT_S) -> None:
        self._limit = processes
        self._job_limit_s = job_limit_s
        self._waiting: deque[tuple[CodecJob, Then]] = deque()
        self._workers: set[_CodecWorker] = set()
        self._is_closed = False

    def decode_call(self, request: HttpRequest, params: tuple[Param, ...], then: Then) -> None:
        """The encoded inputs of a call by name."""
        kept = {name.decode("latin-1"): value for name, value in request.headers.items() if name.startswith(b"content-")}
        kept |= {"?": request.query} if request.query else {}
        self._submit(CodecJob("call", kept, params, request.body), then)

    def to_binary(self, body: bytes, header_length: bytes, then: Then) -> None:
        """An inference request with its tensors behind the JSON: `body`, and `length` of the JSON."""
        self._submit(CodecJob("infer", {"length": header_length}, (), body), then)

    def to_raw_contents(self, message: bytes, then: Then) -> None:
        """A gRPC message with its tensors raw: `body`."""
        self._submit(CodecJob("grpc", {}, (), message), then)

    def encode_result(self, blob: bytes, accept: bytes, then: Then) -> None:
        """The `status`, `body`, `kind` and header lines (`extra`) of a result."""
        self._submit(CodecJob("result", {"accept": accept}, (), blob), then)

    def _submit(self, job: CodecJob, then: Then) -> None:
        if self._is_closed or len(self._waiting) >= MAX_WAITING:
            then(CodecOverloaded("too many large bodies at once", hint="send fewer, or smaller or binary ones"))
            return
        self._waiting.append((job, then))
        self.next_job()

    def next_job(self) -> None:
        """Give the first job to a process that is free."""
        while self._waiting:
            worker = next((one for one in self._workers if one.is_free), None)
            if worker is None:
                if len(self._workers) >= self._limit:
                    return
                try:
                    worker = _CodecWorker(self, self._job_limit_s)
                except OSError as error:
                    _, then = self._waiting.popleft()
                    then(CodecOverloaded(f"no process for a large body: {error.strerror}", hint="try again"))
                    continue
                self._workers.add(worker)
            worker.begin(*self._waiting.popleft())

    def on_worker_lost(self, worker: _CodecWorker) -> None:
        self._workers.discard(worker)
        if not self._is_closed:
            self.next_job()

    async def stop(self) -> None:
        self._is_closed = True
        waiting, self._waiting = self._waiting, deque()
        for _, then in waiting:
            then(CodecOverloaded("the server is stopping", hint="try another server"))
        processes = [worker.process for worker in self._workers]
        for process in processes:
            process.stop(1.0)
        if processes:
            await asyncio.wait([process.finished for process in processes])


class _CodecWorker:
    """One process, and the job it has."""

    def __init__(self, pool: CodecPool, job_limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._pool = pool
        self._loop = loop
        self._job_limit_s = job_limit_s
        self._then: Then | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.process = ChildProcess(loop, CodecSetup(), self._on_result, self._on_end, _SPEC)

    @property
    def is_free(self) -> bool:
        return self._then is None

    def begin(self, job: CodecJob, then: Then) -> None:
        self._then = then
        self._timer = self._loop.call_later(self._job_limit_s, self.process.kill)
        self._loop.call_soon(self._send, job)  # a copy of a large body is enough for one turn

    def _send(self, job: CodecJob) -> None:
        self.process.send(pack(job))

    def _on_result(self, result: CodecResult) -> None:
        if result.error is None:
            self._loop.call_soon(self._finish, result.parts)  # as above
        else:
            code, message, hint = result.error
            self._finish(_ERRORS.get(code, BadValue)(message, hint=hint))

    def _on_end(self) -> None:
        self._pool.on_worker_lost(self)
        self._finish(CodecTooLarge("a body that takes too long or too much memory to decode", hint=_SEND_LESS))

    def _finish(self, found: dict[str, bytes] | LaminaError) -> None:
        if self._timer is not None:
            self._timer.cancel()
        then, self._then = self._then, None
        try:
            if then is not None:
                then(found)
        finally:
            self._pool.next_job()


# ------------------------------------------------------------------------------ the process's side


def perform(job: CodecJob) -> dict[str, bytes]:
    match job.operation:
        case "call":
            headers = {name.encode("latin-1"): value for name, value in job.headers.items()}
            request = HttpRequest("POST", b"/", headers.pop(b"?", b""), headers, job.body, True)
            return http_codec.decode_inputs(request, job.params)
        case "infer":
            from lamina.gateway.oip.json_codec import to_binary

            body, size = to_binary(job.body, job.headers["length"])
            return {"body": body, "length": b"%d" % size}
        case "grpc":
            from lamina.gateway.oip.grpc_methods import to_raw_contents

            return {"body": to_raw_contents(job.body)}
        case _:
            status, body, kind, extra = http_codec.encode_result(job.body, job.headers["accept"])
            return {"status": b"%d" % status, "body": body, "kind": kind, "extra": extra}


def _performed(job: CodecJob) -> bytearray:
    try:
        return pack(CodecResult(perform(job)))
    except MemoryError:
        found: LaminaError = CodecTooLarge("a body that takes too much memory to decode", hint=_SEND_LESS)
    except LaminaError as error:
        found = error
    return pack(CodecResult({}, (found.code, found.message, found.hint)))


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=CodecSetup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_address_space(JOB_MEMORY)
    gc.disable()  # values have no cycles, and a search for some among millions of lists takes longer than the rest
    sock = socket.socket(fileno=setup.fd)
    channel = FrameChannel(sock, FrameReader(msgspec.msgpack.Decoder(CodecJob | StopProcess)))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            job = channel.next_buffered()
            if isinstance(job, StopProcess) or (job is None and not channel.read()):
                return
            if isinstance(job, CodecJob):
                sock.sendall(_performed(job))


_SPEC = ProcessSpec("lamina.gateway.routes.codec_pool", lambda: FrameReader(msgspec.msgpack.Decoder(CodecResult)))


if __name__ == "__main__":
    main()
