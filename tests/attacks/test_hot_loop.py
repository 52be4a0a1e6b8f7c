"""The loop of the gateway: no client waits for the bytes of another. Large bodies are decoded by other processes, or refused."""

from __future__ import annotations

import asyncio
import json
import traceback
from typing import Any

import msgspec
import pytest

from lamina import encoding
from lamina.core.actions import Reply
from lamina.errors import BadValue, LaminaError
from lamina.gateway.auth import LOCAL
from lamina.gateway.ingress import handlers
from lamina.gateway.ingress.messages import ResultValue, RouteTable
from lamina.gateway.ingress.throttle import CallPacer
from lamina.gateway.oip import inference, json_codec, rest_infer
from lamina.gateway.oip.grpc_methods import InferenceMethods, decode_tensors, to_raw_contents
from lamina.gateway.oip.inference import InferenceRequest, InferenceResponse, begin_request
from lamina.gateway.oip.model_catalog import ServedModel
from lamina.gateway.oip.row_conversion import is_heavy_join, is_heavy_split, join_apart, join_rows, split_apart, split_rows
from lamina.gateway.oip.schema import load_schema
from lamina.gateway.oip.tensors import InputTensor, OutputTensor, join_bytes
from lamina.gateway.routes import calls, codec_pool, http_codec
from lamina.gateway.routes.codec_pool import (
    CodecOverloaded,
    CodecPool,
    ReceivedParts,
    is_heavy_json,
    is_heavy_message,
    is_heavy_request,
    is_heavy_result,
)
from lamina.ipc.event_loop import ImmediateWriter
from lamina.ipc.framing import FrameError
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Port, Signature, Tensor
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.grpc import RpcContext, SerializedMessage
from lamina.server.http1 import HttpConnection
from lamina.server.http2.frames import DATA, SETTINGS, WINDOW_UPDATE, frame
from lamina.server.http_server import HttpServer
from lamina.server.process_status import ProcessStatus
from tests.attacks.gateways import emulated
from tests.server.http2.test_connection import HEAD, TAIL, Talk
from tests.serving import Browser, run

X = (Param("x", True),)
LISTS = b"[" + b"[]," * 50_000 + b"[]]"
TEXT = b'"' + b"a" * 3_000_000 + b'"'


def post(body: bytes, kind: bytes = b"application/json") -> HttpRequest:
    return HttpRequest("POST", b"/v1/functions/echo", b"", {b"content-type": kind}, body, True)


@pytest.mark.parametrize(
    ("what", "request_", "heavy"),
    [
        ("a small list", post(b"[1,2,3]"), False),
        ("a long text", post(TEXT), False),
        ("many lists", post(LISTS), True),
        ("many lists as a form", post(LISTS, http_codec.FORM), True),
        ("a very long text", post(b'"' + b"a" * 5_000_000 + b'"'), True),
        ("bytes", post(bytes(5_000_000), b"application/octet-stream"), False),
        ("a value with large bytes", post(encoding.encode({"x": bytes(500_000), "n": 5, "s": "a"}), http_codec.VALUE), False),
        ("a value with many lists", post(encoding.encode({"x": [[]] * 90_000}), http_codec.VALUE), True),
        ("a value that is cut short", post(encoding.encode({"x": bytes(500_000)})[:-1], http_codec.VALUE), True),
        ("a large form", post(bytes(2_000_000), b"multipart/form-data; boundary=b"), True),
    ],
)
def test_what_takes_long_to_decode_is_known_before(what: str, request_: HttpRequest, heavy: bool) -> None:
    assert is_heavy_request(request_) is heavy


def test_what_takes_long_to_encode_is_known_before() -> None:
    assert not is_heavy_result(encoding.encode("a" * 100_000), b"")
    assert not is_heavy_result(encoding.encode(bytes(5_000_000)), b"")
    assert not is_heavy_result(encoding.encode([1] * 100), b"")
    assert is_heavy_result(encoding.encode([1] * 100_000), b"application/json")
    assert not is_heavy_result(encoding.encode([1] * 100_000), http_codec.VALUE)


def outcome(work: Any) -> Any:
    """What a job came to."""

    async def all_of_it() -> Any:
        pool = CodecPool()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        work(pool, done.set_result)
        try:
            return await asyncio.wait_for(done, 60)
        finally:
            await pool.stop()

    return asyncio.run(all_of_it())


@pytest.mark.live
def test_a_call_decoded_apart_is_as_if_decoded_here() -> None:
    found = outcome(lambda pool, then: pool.decode_call(post(LISTS), X, then))
    assert found == http_codec.decode_inputs(post(LISTS), X)


@pytest.mark.live
def test_an_error_from_there_is_the_error_it_would_be_here() -> None:
    broken = post(LISTS[:-1])
    found = outcome(lambda pool, then: pool.decode_call(broken, X, then))
    with pytest.raises(BadValue) as here:
        http_codec.decode_inputs(broken, X)
    assert type(found) is BadValue and found.message == here.value.message


@pytest.mark.live
def test_a_result_encoded_apart_is_as_if_encoded_here() -> None:
    blob = encoding.encode([1.5] * 50_000)
    found = outcome(lambda pool, then: pool.encode_result(blob, b"", then))
    made = (int(found["status"]), found["body"], found["kind"], found["extra"])
    assert made == http_codec.encode_result(blob, b"")


def test_json_tensors_made_binary_mean_the_same() -> None:
    body = json.dumps(
        {
            "id": "7",
            "inputs": [
                {"name": "x", "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
                {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "bc"]},
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    ).encode()
    binary, size = json_codec.to_binary(body, b"")
    before, after = json_codec.decode_request(body, b""), json_codec.decode_request(binary, b"%d" % size)
    assert [(one.name, one.dtype, one.shape, bytes(one.data)) for one in after.inputs] == [
        (one.name, one.dtype, one.shape, bytes(one.data)) for one in before.inputs
    ]
    assert (after.id, after.requested_outputs, after.binary_outputs) == ("7", ["y"], frozenset({"y"}))


def test_typed_grpc_tensors_made_raw_mean_the_same() -> None:
    kind = load_schema()["ModelInferRequest"]
    message = kind(model_name="m", id="7")
    message.inputs.add(name="x", datatype="INT64", shape=[50_000]).contents.int64_contents.extend(range(50_000))
    raw = kind(model_name="m", raw_input_contents=[bytes(500_000)])
    raw.inputs.add(name="x", datatype="UINT8", shape=[500_000])
    assert is_heavy_message(message.SerializeToString()) and not is_heavy_message(raw.SerializeToString())
    again = kind.FromString(to_raw_contents(message.SerializeToString()))
    assert [bytes(one.data) for one in decode_tensors(again)] == [bytes(one.data) for one in decode_tensors(message)]
    assert (again.model_name, again.id) == ("m", "7") and not is_heavy_message(again.SerializeToString())


@pytest.mark.live
def test_a_job_that_takes_too_long_is_ended_and_the_next_one_is_done() -> None:
    async def work() -> None:
        pool = CodecPool(processes=1, job_limit_s=0.05)
        found: list[Any] = []
        both = asyncio.Event()

        def then(result: Any) -> None:
            found.append(result)
            if len(found) == 2:
                both.set()

        pool.encode_result(encoding.encode([[]] * 3_000_000), b"", then)
        pool.encode_result(encoding.encode([[]] * 3_000_000), b"", then)
        await asyncio.wait_for(both.wait(), 60)
        assert all(isinstance(one, LaminaError) and one.status == 413 for one in found)
        await pool.stop()

    asyncio.run(work())


def test_more_large_bodies_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_pool, "MAX_WAITING", 2)

    async def work() -> list[Any]:
        pool, found = CodecPool(processes=0), []
        for _ in range(3):
            pool.decode_call(post(LISTS), X, found.append)
        await pool.stop()
        return found

    assert [one.status for one in asyncio.run(work())] == [503, 503, 503]


@pytest.mark.live
def test_a_large_call_and_a_large_run_are_served(tmp_path: Any) -> None:
    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            assert (await browser.ask("POST", "/v1/functions/echo", LISTS)).status == 200
            assert (await browser.ask("POST", "/v1/functions/echo", LISTS[:-1])).status == 400
            started = await browser.ask("POST", "/v1/functions/echo", LISTS, Prefer="respond-async")
            assert started.status == 202
            answer = await browser.ask("GET", f"/v1/runs/{started.json['id']}/result?wait_ms=20000")
            assert answer.status == 200

    run(work)


def test_a_large_body_in_one_piece_is_taken_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            handler, driver = gateway.router.call_handler, gateway.driver
            real = driver.submit
            monkeypatch.setattr(driver, "submit", lambda *arguments: (turns.append(_turn()), real(*arguments)))
            decode = calls.decode_parts
            monkeypatch.setattr(calls, "decode_parts", lambda *arguments: (turns.append(_turn()), decode(*arguments))[1])
            assert handler is not None
            answer = await browser.ask("POST", "/v1/functions/echo", bytes(5_000_000), "application/octet-stream")
            assert answer.status == 200
            assert len(turns) == 2 and "call_soon" not in turns[0]

    def _turn() -> str:
        """The function at the bottom of this turn of the loop."""
        frames = traceback.extract_stack()
        names = [frame.name for frame in frames]
        assert "data_received" not in names, "it was read in this turn"
        return ",".join(names)

    run(work)


def test_a_value_of_state_that_cannot_fit_is_not_decoded() -> None:
    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            assert (await browser.ask("PUT", "/v1/state/k?app=attacked", LISTS * 10)).status == 400

    run(work)


@pytest.mark.live
def test_json_is_heavy_by_its_parts_and_not_by_its_size_alone() -> None:
    assert is_heavy_json(LISTS) and not is_heavy_json(TEXT) and not is_heavy_json(LISTS[:60_000])
    assert msgspec.json.decode(LISTS)[0] == []


# ------------------------------------------------------------------ copies: one piece in a turn, and no body twice


@pytest.mark.live
def test_a_large_body_goes_to_its_process_in_pieces_one_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    turns: list[int] = []
    turn = [0]
    write = ImmediateWriter.write

    def record(self: ImmediateWriter, data: Any) -> None:
        sizes.append(len(data))
        turns.append(turn[0])
        write(self, data)

    def next_turn(loop: asyncio.AbstractEventLoop) -> None:
        turn[0] += 1
        loop.call_soon(next_turn, loop)

    monkeypatch.setattr(ImmediateWriter, "write", record)
    body = b'"' + b"a" * 5_000_000 + b'"'

    def work(pool: CodecPool, then: Any) -> None:
        next_turn(asyncio.get_running_loop())
        pool.decode_call(post(body), X, then)

    found = outcome(work)
    assert found == {"x": encoding.encode("a" * 5_000_000)}
    assert sum(sizes) > 5_000_000 and max(sizes) < codec_pool.PIECE_BYTES + 100
    assert max(turns.count(one) for one in set(turns)) <= 2  # the first has the job before it


def test_pieces_that_are_not_those_of_the_parts_are_refused() -> None:
    parts = ReceivedParts({"a": 3, "nothing": 0, "b": 2})
    parts.add(b"12")
    with pytest.raises(FrameError, match="belongs to no part"):
        parts.add(b"34")  # of two parts
    parts.add(b"3")
    parts.add(b"45")
    assert parts.is_complete and parts.joined() == {"a": b"123", "nothing": b"", "b": b"45"}
    with pytest.raises(FrameError):
        parts.add(b"6")


@pytest.mark.live
def test_a_result_larger_than_any_may_be_is_refused() -> None:
    found = outcome(lambda pool, then: pool.encode_result(encoding.encode(["a" * 34_000_000] * 2), b"", then))
    assert isinstance(found, LaminaError) and found.status == 413


def test_a_large_response_is_sent_without_being_copied() -> None:
    async def work() -> None:
        server = HttpServer(lambda request, exchange: None, lambda *about: (b"", b""))
        written: list[Any] = []
        connection = HttpConnection(server)
        connection.connection_made(Recorder(written))
        body = bytes(2_000_000)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        connection._exchanges[0].respond(200, body)
        assert written[-1] is body and b"content-length: 2000000" in written[-2]

    asyncio.run(work())


class Recorder:
    """Transport that keeps what is written."""

    def __init__(self, written: list[Any]) -> None:
        self.write = written.append

    def is_closing(self) -> bool:
        return False


# ----------------------------------------------------------- the inference protocol: text in tensors, and text of them


class Texts:
    """A batched model of texts with two outputs."""

    signature = Signature((Port("x"),), (Port("y", Tensor("FP32", (-1,))), Port("z")))
    is_batched = True


TEXTS = Texts()


class Reached(Exception):
    """Something was done on the loop that should not have been."""


def reached(*arguments: Any, **more: Any) -> Any:
    raise Reached


def reply() -> Reply:
    return Reply("c1", 1, False)


def model() -> ServedModel:
    target: Any = type("Target", (), {"name": "m"})()
    return ServedModel("m", "1", target, TEXTS.signature, None, True, {"x": Port("x")})


class Backend:
    """Inference backend that gives these outputs."""

    def __init__(self, outputs: list[OutputTensor]) -> None:
        self._outputs = outputs

    def infer(self, request: InferenceRequest, on_response: Any, on_chunk: Any = None) -> Any:
        on_response(InferenceResponse(self._outputs, reply()))
        return lambda: None


class Answered(Exchange):
    """Exchange that keeps its response."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[tuple[int, bytes, bytes, bytes]] = asyncio.get_running_loop().create_future()
        self.response = None
        self.is_streaming = False

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"", extra: bytes = b"") -> None:
        self.response = b""
        self.answer.set_result((status, body, content_type, extra))


FLOATS = [OutputTensor("y", "FP32", [1, 50_000], bytes(200_000)), OutputTensor("z", "BYTES", [1, 1], join_bytes([b'{"a":1}']))]


@pytest.mark.live
@pytest.mark.parametrize("outputs", [b"", b',"outputs":[{"name":"y","parameters":{"binary_data":true}},{"name":"z"}]'])
def test_json_of_large_tensors_is_made_apart_and_is_the_same(outputs: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,1],"data":["1"]}]%s}' % outputs

    async def answer(codecs: CodecPool | None) -> tuple[int, bytes, bytes, bytes]:
        exchange = Answered()
        rest_infer.handle_infer(Backend(FLOATS), model(), LOCAL, post(body), exchange, codecs)
        return await asyncio.wait_for(exchange.answer, 60)

    async def work() -> None:
        here = await answer(None)
        pool = CodecPool()
        if not outputs:
            monkeypatch.setattr(rest_infer, "encode_response", reached)
        assert await answer(pool) == here
        await pool.stop()

    asyncio.run(work())


@pytest.mark.live
def test_plain_values_of_large_tensors_are_made_apart_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(codecs: CodecPool | None) -> tuple[int, bytes, bytes, bytes]:
        exchange = Answered()
        rest_infer.handle_generate(Backend(FLOATS), model(), post(b'{"x":1,"id":"7"}'), exchange, LOCAL, codecs, in_pieces=False)
        return await asyncio.wait_for(exchange.answer, 60)

    async def work() -> None:
        here = await answer(None)
        pool = CodecPool()
        monkeypatch.setattr(rest_infer, "plain_document", reached)
        assert await answer(pool) == here and b'"z":{"a":1}' in here[1]
        await pool.stop()

    asyncio.run(work())


@pytest.mark.live
def test_rows_of_large_texts_are_made_apart_and_are_the_same() -> None:
    texts = join_bytes([b"[" + b"[]," * 40_000 + b"[]]", b'"short"'])
    inputs = [InputTensor("x", "BYTES", [2, 1], texts)]
    assert is_heavy_split(inputs)
    assert outcome(lambda pool, then: split_apart(pool, TEXTS, inputs, 2, then)) == split_rows(TEXTS, inputs, 2)
    wrong = [InputTensor("x", "BYTES", [2, 1], texts[:-1])]
    assert isinstance(outcome(lambda pool, then: split_apart(pool, TEXTS, wrong, 2, then)), BadValue)


@pytest.mark.live
def test_tensors_of_large_results_are_made_apart_and_are_the_same() -> None:
    blobs = [encoding.encode({"y": [1.5] * 50_000, "z": [[]] * 3}) for _ in range(2)]
    assert is_heavy_join(blobs)
    assert outcome(lambda pool, then: join_apart(pool, TEXTS, blobs, (), then)) == join_rows(TEXTS, blobs)
    assert isinstance(outcome(lambda pool, then: join_apart(pool, TEXTS, [encoding.encode([1] * 90_000)], (), then)), BadValue)


def test_tensors_and_bytes_pass_through_whatever_their_size() -> None:
    import numpy

    assert not is_heavy_join([encoding.encode(numpy.zeros(100_000))])
    assert not is_heavy_join([encoding.encode({"y": numpy.zeros(100_000), "z": "text"})])
    assert not is_heavy_split([InputTensor("x", "FP32", [100_000], bytes(400_000))])
    assert is_heavy_join([encoding.encode({"y": [0.0] * 100_000})])


@pytest.mark.live
def test_a_hostile_tensor_of_texts_is_taken_apart_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "split_rows", reached)
    texts = b"[" + b"[]," * 40_000 + b"[]]"
    head = json.dumps(
        {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(texts) + 4}}]}
    ).encode()

    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            length = {"Inference-Header-Content-Length": str(len(head))}
            answer = await browser.ask("POST", "/v2/models/echo/infer", head + join_bytes([texts]), **length)
            assert answer.status == 200
            answer = await browser.ask("POST", "/v2/models/echo/infer", head + join_bytes([texts[:-1] + b" "]), **length)
            assert answer.status == 400

    run(work)


# --------------------------------------------------------------------------------- ingress processes


class Link:
    """Link to a controller that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.on_message: Any = None

    def store_payload(self, blob: bytes) -> bytes:
        return blob

    def view(self, value: bytes) -> bytes:
        return value

    def register(self, on_message: Any) -> int:
        self.on_message = on_message
        return 1

    pacer = CallPacer()

    def canceller(self, number: int) -> Any:
        return lambda: None

    def call_head(self, path: bytes, headers: dict[bytes, bytes]) -> int:
        return 0

    full_head = call_head

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.live
def test_an_ingress_decodes_and_encodes_what_is_heavy_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = http_codec.decode_inputs(post(LISTS), X), http_codec.encode_result(encoding.encode([[]] * 90_000), b"")
    monkeypatch.setattr(handlers, "decode_inputs", reached)
    monkeypatch.setattr(handlers, "encode_result", reached)

    async def work() -> None:
        pool, link, routes, exchange = CodecPool(), Link(), handlers.KnownRoutes(), Answered()
        routes.update(RouteTable({b"/v1/functions/echo": list(X)}, [], False))
        handler = handlers.IngressHttpHandler(link, routes, ProcessStatus(), pool)  # type: ignore[arg-type]
        handler.handle(post(LISTS), exchange)
        while not link.sent:
            await asyncio.sleep(0.001)
        (call,) = link.sent
        assert call.inputs == here[0] and call.size == len(LISTS)
        assert link.on_message(ResultValue(1, 0, encoding.encode([[]] * 90_000), reply()))
        status, body, kind, _ = await asyncio.wait_for(exchange.answer, 60)
        assert (status, body, kind) == here[1][:3]
        await pool.stop()

    asyncio.run(work())


@pytest.mark.live
def test_a_heavy_body_that_is_wrong_is_forwarded_by_an_ingress_and_one_too_many_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_pool, "MAX_WAITING", 0)

    async def work() -> None:
        link, routes = Link(), handlers.KnownRoutes()
        link.full_head = lambda request: 0  # type: ignore[method-assign,assignment]
        routes.update(RouteTable({b"/v1/functions/echo": list(X)}, [], False))
        pool = CodecPool()
        handler = handlers.IngressHttpHandler(link, routes, ProcessStatus(), pool)  # type: ignore[arg-type]
        exchange = Answered()
        handler.handle(post(LISTS), exchange)
        assert (await exchange.answer)[0] == 503 and not link.sent
        monkeypatch.setattr(codec_pool, "MAX_WAITING", 8)
        handler.handle(post(LISTS[:-1]), Answered())
        while not link.sent:
            await asyncio.sleep(0.001)
        assert type(link.sent[0]).__name__ == "ForwardedRequest"
        await pool.stop()

    asyncio.run(work())


# ------------------------------------------------------------------------------------ gRPC and HTTP/2


def test_a_large_response_waits_for_the_socket_in_parts_that_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk()
    talk.say(frame(SETTINGS, 0, 0, b"\x00\x04\x7f\xff\xff\xff") + frame(WINDOW_UPDATE, 0, 0, (2**24).to_bytes(4, "big")))
    request = talk.ask(1)
    sizes: list[int] = []
    write = talk.pipe.write

    def full_after_one(data: bytes) -> None:
        sizes.append(len(data))
        write(data)
        talk.connection.pause_writing()

    monkeypatch.setattr(talk.pipe, "write", full_after_one)
    request.stream.begin(HEAD)
    request.stream.end(b"head", TAIL, [bytes(3_000_000)])
    assert len(sizes) == 1 and sizes[0] < 300_000
    for _ in range(100):
        talk.connection.resume_writing()
    assert max(sizes) < 300_000 and not talk.connection.streams
    assert sum(len(payload) for kind, *_, payload in talk.pipe.frames() if kind == DATA) == 3_000_004


def test_a_large_grpc_response_is_the_message_it_would_be() -> None:
    class Methods(InferenceMethods):
        def backend(self, context: RpcContext) -> Any:
            return Backend([OutputTensor("y", "FP32", [1, 2_000_000], memoryview(bytes(8_000_000)))])

        def find(self, name: str, version: str, context: RpcContext) -> Any:
            return model(), LOCAL

    methods = Methods()
    asked = methods.schema["ModelInferRequest"](model_name="m", id="7")
    found: list[Any] = []
    methods.infer(asked, RpcContext({}), found.append)
    assert isinstance(found[0], SerializedMessage) and found[0].size == len(found[0].SerializeToString())
    answer = methods.schema["ModelInferResponse"].FromString(found[0].SerializeToString())
    assert (answer.id, answer.model_name, answer.outputs[0].name) == ("7", "m", "y")
    assert list(answer.raw_output_contents) == [bytes(8_000_000)]


def test_copies_of_a_large_tensor_have_a_turn_each() -> None:
    async def work() -> None:
        pool, done = CodecPool(), asyncio.Event()
        request = InferenceRequest(tensors, [InputTensor("x", "UINT8", [5_000_000], bytes(5_000_000))])
        begun: list[int] = []

        def begin(calls: list[dict[str, bytes]]) -> Any:
            begun.append(len(calls[0]["x"]))
            done.set()
            return lambda: begun.append(-1)

        cancel = begin_request(pool, request, 0, begin, lambda response: None)
        assert not begun
        await done.wait()
        cancel()
        assert begun[0] > 5_000_000 and begun[1] == -1
        cancel = begin_request(pool, request, 0, begin, lambda response: None)
        cancel()  # before it began
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(begun) == 2
        await pool.stop()

    port = Port("x", Tensor("UINT8", (-1,)))
    target: Any = type("Target", (), {"name": "m"})()
    tensors = ServedModel("m", "1", target, Signature((port,), (port,)), None, False, {"x": port})
    asyncio.run(work())


def test_c1_bodies_that_wait_for_a_process_are_counted_although_their_clients_have_left():
    async def work() -> None:
        pool, said = CodecPool(processes=0), list[Any]()
        pool.submit("call", {}, bytes(1_000), said.append)
        assert pool.held_bytes == 1_000
        await pool.stop()
        assert pool.held_bytes == 0 and isinstance(said[0], CodecOverloaded)

    run(work)
