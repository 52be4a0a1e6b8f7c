"""Codec processes: large bodies and results are decoded and encoded apart, so that no request waits for another's bytes.

To decode thirty megabytes of brackets takes seconds, and no thread helps: the interpreter is held all the while. What is small,
or large in one piece (a text, bytes, a tensor), is handled where it is. The rest is sent to one of a few processes, each with a
limit on memory and a limit of time for each job (`python -m lamina.gateway.routes.codec_pool`).

Bodies travel in pieces, one in a turn of the loop: to copy thirty megabytes takes tens of milliseconds too, most of it for fresh
pages, and a message in one piece is copied three times on its way.
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
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO

import msgspec
from msgspec import Struct

from lamina import encoding
from lamina.errors import BadValue, FunctionFailed, LaminaError, UnknownEncoding, WrongInput
from lamina.gateway.routes import http_codec
from lamina.ipc.child_process import ChildProcess, ProcessSpec
from lamina.ipc.framing import FrameChannel, FrameError, FrameReader, Natural, StopProcess, pack
from lamina.ipc.sliced_copies import Parts, SlicedCopies, own_bytes, size_of
from lamina.sdk.binding import Param
from lamina.server.exchange import HttpRequest
from lamina.server.process_status import limit_address_space

log = logging.getLogger("lamina")

PROCESSES = 2
JOB_LIMIT_S = 60.0
JOB_MEMORY = 3 * 2**30
MAX_WAITING = 64
PIECE_BYTES = 256 * 2**10
MAX_RESULT_BYTES = 64 * 2**20

INLINE_BYTES = 64 * 2**10
"""Up to this much is always handled in place: three milliseconds at worst."""

FLAT_BYTES = 4 * 2**20
"""JSON up to this size is handled in place if it has few parts."""

PIECE_TEXT_BYTES = 384 * 2**10
"""Of a list, dict or array that a function yields: up to this much, text is made of it."""

MAX_PARTS = 20_000
MAX_FIELDS = 1_000
_LENGTH_DELIMITED = 2  #: in protobuf
RAW_INPUT_TAG = 7 << 3 | _LENGTH_DELIMITED  #: of `raw_input_contents` in the protocol's requests
_MULTIPART_BYTES = 2**20
_INFER = ("ModelInfer", "ModelStreamInfer")
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
    """Work for a codec process, whose body follows in pieces: `call` decodes inputs and `result` encodes a result; of the
    inference protocol, `infer` and `grpc` make tensors binary, `split` makes rows of them, `join` makes tensors of results, and
    `text` makes JSON of tensors."""

    operation: str
    headers: dict[str, bytes]
    params: tuple[Param, ...]
    size: Natural


class CodecResult(Struct, frozen=True, array_like=True, tag=2):
    """What came of a job: the sizes of named parts, which follow in pieces, or an error with its code, message and hint."""

    sizes: dict[str, Natural]
    error: tuple[str, str, str] | None = None


class BodyPiece(Struct, frozen=True, array_like=True, tag=4):
    """The next bytes of a job's body, or of the parts of a result; never of two parts."""

    data: bytes


class ReceivedParts:
    """Named parts of known sizes, as their pieces arrive."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._parts = {name: BytesIO() for name in sizes}  #: each where it will stay: whole, it is not copied
        self._missing = [(name, size) for name, size in sizes.items() if size][::-1]  #: the next one last

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def add(self, piece: bytes) -> None:
        if not self._missing or not 0 < len(piece) <= self._missing[-1][1]:
            raise FrameError(f"a piece of {len(piece)} bytes that belongs to no part")
        name, size = self._missing.pop()
        self._parts[name].write(piece)
        if size > len(piece):
            self._missing.append((name, size - len(piece)))

    def joined(self) -> dict[str, bytes]:
        return {name: part.getvalue() for name, part in self._parts.items()}


def packed_pieces(*parts: encoding.Blob) -> Iterator[bytearray]:
    """Frames that carry these parts, one piece each."""
    for part in parts:
        with memoryview(part) as view:
            for at in range(0, len(view), PIECE_BYTES):
                yield pack(BodyPiece(view[at : at + PIECE_BYTES]))  # type: ignore[arg-type]


Then = Callable[[dict[str, bytes] | LaminaError], None]
_ERRORS: dict[str, type[LaminaError]] = {
    kind.code: kind for kind in (BadValue, WrongInput, UnknownEncoding, FunctionFailed, CodecTooLarge, CodecOverloaded)
}


# ------------------------------------------------------------------------------ what is heavy


def is_heavy_request(request: HttpRequest) -> bool:
    """Whether decoding the body of a call would take the loop too long."""
    body = request.body
    if len(body) <= INLINE_BYTES:
        return False
    kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind == http_codec.FORM and body.count(b"%") > MAX_PARTS:  # each is taken apart by itself
        return True
    if kind == http_codec.FORM or http_codec.is_json_type(kind):
        return is_heavy_json(body)
    if kind == http_codec.VALUE:
        return not _is_flat_map(body)
    return kind == b"multipart/form-data" and len(body) > _MULTIPART_BYTES


def check_light(request: HttpRequest) -> None:
    """Raise for a body that would take the loop too long, at a route that decodes in place: none of them needs as much."""
    if is_heavy_request(request):
        raise _too_heavy(request.body)


def check_light_json(body: bytes) -> None:
    """The same of a body that is JSON, whatever it says it is."""
    if is_heavy_json(body):
        raise _too_heavy(body)


def _too_heavy(body: bytes) -> CodecTooLarge:
    return CodecTooLarge(f"body: {len(body)} bytes with many parts", hint="send less; what is large belongs in a call")


def is_heavy_json(body: bytes) -> bool:
    return len(body) > INLINE_BYTES and (len(body) > FLAT_BYTES or _parts(body) > MAX_PARTS)


def is_heavy_result(blob: encoding.Blob, accept: bytes) -> bool:
    """Whether making text of a result would take the loop too long; what is sent as it is does not."""
    if len(blob) <= INLINE_BYTES or http_codec.VALUE in accept or encoding.is_flat_response(blob):
        return False
    return not _is_leaf(blob[0]) or blob[0] in _EXTENSIONS or (len(blob) > FLAT_BYTES and blob[0] in _TEXTS)


def is_heavy_piece(blob: encoding.Blob) -> bool:
    """Whether making text of a piece of a stream would take the loop too long. Pieces go out in their order, at once."""
    return len(blob) > PIECE_TEXT_BYTES and (not _is_leaf(blob[0]) or blob[0] in _EXTENSIONS)


def is_heavy_message(message: bytes) -> bool:
    """Whether a gRPC request has more than its raw tensors: each of many parts would become an object."""
    if len(message) <= INLINE_BYTES:
        return False
    raw_bytes = 0
    for count, (tag, _, at, end, _) in enumerate(message_fields(message)):
        if count == MAX_FIELDS or tag & 7 != _LENGTH_DELIMITED:
            return True
        raw_bytes += end - at if tag == RAW_INPUT_TAG else 0
    return len(message) - raw_bytes > INLINE_BYTES


def message_fields(message: encoding.Blob) -> Iterator[tuple[int, int, int, int, bool]]:
    """Fields of a protobuf message, if each has a length and a tag of one byte: the tag, where the field begins, where its data
    begin and end, and whether their size is cut off. Nothing is checked."""
    start = 0
    while start < len(message):
        size, shift, more, at = 0, 0, True, start + 1
        while more and at < len(message) and shift < 35:
            size |= (message[at] & 0x7F) << shift
            more, shift, at = message[at] >= 0x80, shift + 7, at + 1
        yield message[start], start, at, at + size, more
        start = at + size


def is_heavy_row(blob: encoding.Blob) -> bool:
    """Whether to look into an encoded result would take the loop too long: it is large, and neither one piece nor a few."""
    if len(blob) <= INLINE_BYTES:
        return False
    return not (_is_leaf(blob[0]) or _is_flat_map(blob)) or (len(blob) > FLAT_BYTES and blob[0] in _TEXTS)


def _parts(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}  #: texts and bytes, by their first byte: bytes of the length
_TEXTS = (0xD9, 0xDA, 0xDB)
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}


def _is_leaf(first: int) -> bool:
    return first in _STRINGS or first in _EXTENSIONS or first in _FIXED or first < 0x80 or (first >= 0xA0 and first < 0xC0)


def _is_flat_map(body: encoding.Blob) -> bool:
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


def _skip_leaf(body: encoding.Blob, at: int) -> int:
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


_OF_RESULTS = frozenset(("result", "join", "text"))
"""Operations on results: views of those count as values of a run. Views of a request are of a body that nothing else counts."""


class CodecPool:
    """A few codec processes, started when they are first needed, and one line of jobs for all of them."""

    def __init__(self, processes: int = PROCESSES, job_limit_s: float = JOB_LIMIT_S, copies: SlicedCopies | None = None) -> None:
        self._limit = processes
        self._job_limit_s = job_limit_s
        self._waiting: deque[tuple[CodecJob, Parts, Then]] = deque()
        self._workers: set[_CodecWorker] = set()
        self._is_closed = False
        self.copies = copies or SlicedCopies()  #: of what needs no process
        self._job_bytes = 0  #: of bodies that a process has, or that wait for one

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies that a process has or that wait for one, and of what is being copied."""
        return self._job_bytes + self.copies.held_bytes

    def decode_call(self, request: HttpRequest, params: tuple[Param, ...], then: Then) -> None:
        """The encoded inputs of a call by name."""
        kept = {name.decode("latin-1"): value for name, value in request.headers.items() if name.startswith(b"content-")}
        kept |= {"?": request.query} if request.query else {}
        self.submit("call", kept, request.body, then, params)

    def to_binary(self, body: bytes, header_length: bytes, then: Then) -> None:
        """An inference request with its tensors behind the JSON: `body`, and `length` of the JSON."""
        self.submit("infer", {"length": header_length}, body, then)

    def to_raw_contents(self, message: bytes, then: Then) -> None:
        """A gRPC message with its tensors raw: `body`."""
        self.submit("grpc", {}, message, then)

    def encode_result(self, blob: encoding.Blob, accept: bytes, then: Then) -> None:
        """The `status`, `body`, `kind` and header lines (`extra`) of a result."""
        self.submit("result", {"accept": accept}, blob, then)

    def submit(
        self,
        operation: str,
        headers: dict[str, bytes],
        body: encoding.Blob | Parts,
        then: Then,
        params: tuple[Param, ...] = (),
    ) -> None:
        """Have something done by a codec process; `then` gets the parts of what it made, or why it did not. The body is not put
        together, nor copied before it is sent: views of it must be good until `then` is called."""
        parts = (body,) if isinstance(body, bytes | memoryview) else body
        if self._is_closed or len(self._waiting) >= MAX_WAITING:
            then(CodecOverloaded("too many large bodies at once", hint="send fewer, or smaller or binary ones"))
            return
        held = own_bytes(parts) if operation in _OF_RESULTS else size_of(parts)
        self._job_bytes += held

        def counted(found: dict[str, bytes] | LaminaError) -> None:
            self._job_bytes -= held
            then(found)

        self._waiting.append((CodecJob(operation, headers, params, size_of(parts)), parts, counted))
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
                    _, _, then = self._waiting.popleft()
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
        for _, _, then in waiting:
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
        self._received: ReceivedParts | None = None
        self.process = ChildProcess(loop, CodecSetup(), self._on_frame, self._on_end, _SPEC)

    @property
    def is_free(self) -> bool:
        return self._then is None

    def begin(self, job: CodecJob, parts: Parts, then: Then) -> None:
        self._then = then
        self._timer = self._loop.call_later(self._job_limit_s, self.process.kill)
        self.process.send(pack(job))
        self.process.send_paced(packed_pieces(*parts))

    def _on_frame(self, frame: CodecResult | BodyPiece) -> None:
        if isinstance(frame, BodyPiece):
            if self._received is None:
                raise FrameError("a piece before its result")
            self._received.add(frame.data)
        elif frame.error is not None:
            code, message, hint = frame.error
            self._finish(_ERRORS.get(code, BadValue)(message, hint=hint))
            return
        else:
            if sum(frame.sizes.values()) > MAX_RESULT_BYTES:
                raise FrameError("more than a result may have")
            self._received = ReceivedParts(frame.sizes)
        if self._received.is_complete:
            parts, self._received = self._received.joined(), None
            self._loop.call_soon(self._finish, parts)  # one copy of all of it is enough for a turn

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


def prepare_message(codecs: CodecPool, method: str, message: bytes, then: Callable[[bytes | LaminaError], None]) -> bool:
    """Have a large gRPC request of typed tensors made raw; False: it is as it should be."""
    if method not in _INFER or not is_heavy_message(message):
        return False
    codecs.to_raw_contents(message, lambda found: then(found if isinstance(found, LaminaError) else found["body"]))
    return True


# ------------------------------------------------------------------------------ the process's side


def perform(job: CodecJob, body: bytes) -> dict[str, bytes]:
    match job.operation:
        case "call":
            headers = {name.encode("latin-1"): value for name, value in job.headers.items()}
            request = HttpRequest("POST", b"/", headers.pop(b"?", b""), headers, body, True)
            return http_codec.decode_inputs(request, job.params)
        case "infer":
            from lamina.gateway.oip.json_codec import to_binary

            made, size = to_binary(body, job.headers["length"])
            return {"body": made, "length": b"%d" % size}
        case "text":
            from lamina.gateway.oip.json_codec import to_text

            made, size = to_text(job.headers["job"], body)
            return {"body": made, "length": b"%d" % size}
        case "split":
            from lamina.gateway.oip.row_conversion import perform_split

            return perform_split(job.headers["job"], body)
        case "join":
            from lamina.gateway.oip.row_conversion import perform_join

            return perform_join(job.headers["job"], body)
        case "grpc":
            from lamina.gateway.oip.grpc_methods import to_raw_contents

            return {"body": to_raw_contents(body)}
        case _:
            status, made, kind, extra = http_codec.encode_result(body, job.headers["accept"])
            return {"status": b"%d" % status, "body": made, "kind": kind, "extra": extra}


def _performed(job: CodecJob, body: bytes) -> Iterator[bytearray]:
    """The frames of what came of a job."""
    try:
        parts = perform(job, body)
        if sum(map(len, parts.values())) > MAX_RESULT_BYTES:
            raise CodecTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes", hint=_SEND_LESS)
    except MemoryError:
        found: LaminaError = CodecTooLarge("a body that takes too much memory to decode", hint=_SEND_LESS)
    except LaminaError as error:
        found = error
    else:
        yield pack(CodecResult({name: len(part) for name, part in parts.items()}))
        yield from packed_pieces(*parts.values())
        return
    yield pack(CodecResult({}, (found.code, found.message, found.hint)))


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=CodecSetup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_address_space(JOB_MEMORY)
    gc.disable()  # values have no cycles, and a search for some among millions of lists takes longer than the rest
    sock = socket.socket(fileno=setup.fd)
    channel = FrameChannel(sock, FrameReader(msgspec.msgpack.Decoder(CodecJob | BodyPiece | StopProcess)))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(sock, channel)


def _serve(sock: socket.socket, channel: FrameChannel) -> None:
    job: CodecJob | None = None
    received = ReceivedParts({})
    while True:
        frame = channel.next_buffered()
        if isinstance(frame, StopProcess) or (frame is None and not channel.read()):
            return
        if isinstance(frame, CodecJob):
            job, received = frame, ReceivedParts({"body": frame.size})
        elif isinstance(frame, BodyPiece):
            received.add(frame.data)
        if job is not None and received.is_complete:
            whole, received = received.joined()["body"], ReceivedParts({})
            for wire in _performed(job, whole):
                sock.sendall(wire)
            job = None


_SPEC = ProcessSpec("lamina.gateway.routes.codec_pool", lambda: FrameReader(msgspec.msgpack.Decoder(CodecResult | BodyPiece)))


if __name__ == "__main__":
    main()
