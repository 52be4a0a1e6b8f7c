"""Large bodies in one piece: put together where they stay, and copied a slice in a turn of the loop; others get between."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.attacks.loop_lag import HTTP
from benchmarks.servers import APPS

from lamina import encoding, policies
from lamina.bootstrap import open_local
from lamina.durable.recovery import pack_inputs
from lamina.gateway.bootstrap import ListenConfig, open_gateway
from lamina.gateway.oip.grpc_methods import LargeInferRequest, decode_tensors, parse_infer
from lamina.gateway.oip.schema import load_schema
from lamina.gateway.routes.codec_pool import CodecPool, ReceivedParts
from lamina.gateway.routes.http_codec import VALUE, decode_inputs, decode_parts
from lamina.ipc.sliced_copies import PIECE_BYTES, SLICE_BYTES, SlicedCopies
from lamina.sdk.binding import Param
from lamina.server.exchange import HttpRequest
from lamina.server.grpc import GrpcMethod, GrpcServer
from lamina.server.http1 import HttpConnection
from lamina.server.http_server import HttpServer
from lamina.server.process_status import return_free_memory
from lamina.store.open import open_store
from lamina.values.run_values import RunValues
from lamina.values.shm import ShmPool, ShmReader
from tests.attacks.gateways import emulated
from tests.serving import Browser, run

SIZE = 8 * 2**20
PIECES = [bytes((number,)) * 2**18 for number in range(SIZE // 2**18)]
WHOLE = b"".join(PIECES)


def most_memory(work: Callable[[], Any]) -> int:
    """Bytes that were allocated at once."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------ put together once


def test_a_large_body_is_not_copied_when_it_is_whole() -> None:
    found: list[bytes] = []

    async def work() -> int:
        server = HttpServer(lambda request, exchange: found.append(request.body), lambda *about: (b"", b""))
        connection = HttpConnection(server)
        connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % SIZE)
        return most_memory(lambda: [connection.data_received(piece) for piece in PIECES])

    most = asyncio.run(work())
    assert found == [WHOLE] and most < 1.5 * SIZE


def test_parts_that_a_codec_process_sends_are_not_copied_when_they_are_whole() -> None:
    found: list[dict[str, bytes]] = []

    def work() -> None:
        parts = ReceivedParts({"a": SIZE})
        for piece in PIECES:
            parts.add(bytes(bytearray(piece)))  # a frame of its own
        found.append(parts.joined())

    assert most_memory(work) < 1.5 * SIZE and found == [{"a": WHOLE}]


class Receiver:
    """Stream of HTTP/2 that a call is made of."""

    def __init__(self) -> None:
        self.is_closed = self.is_of_tenant = self.may_have_own_headers = self.has_started = False
        self.has_time, self.address, self.ended = True, "", []  # type: ignore[var-annotated]

    def count_message(self, size: int) -> None: ...
    def restart_timer(self) -> None: ...
    def credit(self, size: int) -> None: ...
    def end(self, *sent: Any) -> None:
        self.ended.append(sent)


def test_a_large_grpc_message_is_not_copied_when_it_is_whole_whatever_its_pieces() -> None:
    found: list[Any] = []

    class Service:
        methods = {b"/a": GrpcMethod("a", lambda data: data, False)}

        def unary(self, name: str, message: Any, context: Any, then: Any) -> None:
            found.append(message)

    async def work(pieces: list[bytes]) -> int:
        server = GrpcServer(Service(), 2 * SIZE)  # type: ignore[arg-type]
        headers = {b":path": b"/a", b":method": b"POST", b"content-type": b"application/grpc"}
        call = server._open(Receiver(), headers)  # type: ignore[arg-type]
        most = most_memory(lambda: [call.on_data(piece) for piece in pieces])
        call.on_end()
        await asyncio.sleep(0)
        return most

    prefix = b"\0" + SIZE.to_bytes(4, "big")
    assert asyncio.run(work([prefix, *PIECES])) < 1.5 * SIZE
    odd = prefix + WHOLE
    asyncio.run(work([odd[:3], odd[3:700_001], odd[700_001:]]))
    assert found == [WHOLE, WHOLE]


# ------------------------------------------------------------------------------ one slice in a turn


def test_copies_stand_in_one_line_and_a_turn_has_one_slice_of_them() -> None:
    turns, copied, done = [0], [], []  # type: ignore[var-annotated]

    def steps() -> Iterator[int]:
        for _ in range(8):
            copied.append(turns[0])
            yield PIECE_BYTES

    async def work() -> None:
        loop, copies = asyncio.get_running_loop(), SlicedCopies()

        def next_turn() -> None:
            turns[0] += 1
            if len(done) < 3:
                loop.call_soon(next_turn)

        next_turn()
        copies.run(steps(), 8 * PIECE_BYTES, lambda: done.append("first"))
        copies.run(steps(), 8 * PIECE_BYTES, lambda: done.append("second"))
        copies.join([b"a", bytes(3 * PIECE_BYTES), memoryview(b"b")], done.append, 3 * PIECE_BYTES + 2)
        assert copies.held_bytes == 19 * PIECE_BYTES + 2
        while len(done) < 3:
            await asyncio.sleep(0)
        assert not copies.held_bytes

    asyncio.run(work())
    assert done == ["first", "second", b"a" + bytes(3 * PIECE_BYTES) + b"b"]
    assert max(copied.count(turn) for turn in copied) * PIECE_BYTES <= SLICE_BYTES


def test_a_copy_that_fails_does_not_hold_up_those_behind_it() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise ValueError("gone")

    async def work() -> list[bytes]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: None)
        copies, done = SlicedCopies(), list[bytes]()
        copies.run(fails(), 10, lambda: done.append(b"never"))
        copies.join([b"a", b"b"], done.append)
        while not done:
            await asyncio.sleep(0)
        assert not copies.held_bytes
        return done

    assert asyncio.run(work()) == [b"ab"]


def test_a_slot_is_filled_in_steps_and_its_space_reserved_step_by_step(tmp_path: Path) -> None:
    pool, reader = ShmPool(str(tmp_path), "gateway", 64 * 2**20), ShmReader(str(tmp_path))
    steps = pool.fill([b"head", WHOLE])
    next(steps)
    next(steps)
    assert (tmp_path / "gateway-0").stat().st_blocks * 512 < 2 * PIECE_BYTES
    ref = finished(steps)
    assert reader.view(ref) == b"head" + WHOLE
    pool.free(ref.slot)
    again = pool.put(bytes(2 * SIZE))  # the same slot, and more of it
    assert again is not None and again.slot == ref.slot
    assert (tmp_path / "gateway-0").stat().st_blocks * 512 >= 2 * SIZE
    pool.close()


def test_a_slot_without_space_is_given_up_and_the_value_goes_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ShmPool(str(tmp_path), "gateway", 64 * 2**20)
    values = RunValues(pool, ShmReader(str(tmp_path)))
    monkeypatch.setattr("os.posix_fallocate", full)
    assert finished(pool.fill([WHOLE])) is None and pool.used_bytes == pool.file_bytes == 0

    async def work() -> Any:
        stored: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        values.store_inputs([{"x": (b"a", WHOLE), "y": (b"small",)}], stored.set_result)
        return await stored

    assert asyncio.run(work()) == [{"x": b"a" + WHOLE, "y": b"small"}]


def full(file: int, start: int, size: int) -> None:
    raise OSError(28, "no space left")


def finished(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_c1_bodies_that_wait_to_be_copied_are_counted() -> None:
    seen: list[int] = []

    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            store = gateway.driver.data.store_inputs

            def watched(*arguments: Any) -> None:
                store(*arguments)
                seen.append(gateway.budget.layers()["codecs"])

            gateway.driver.data.store_inputs = watched  # type: ignore[method-assign]
            answer = await browser.ask("POST", "/v1/functions/echo", WHOLE, "application/octet-stream")
            assert answer.status == 200
            assert gateway.budget.layers()["codecs"] == 0

    run(work)
    assert seen and seen[0] >= SIZE


@pytest.mark.parametrize(("operation", "counted"), [("split", SIZE), ("infer", SIZE), ("join", 0), ("result", 0)])
def test_c1_views_of_requests_that_wait_for_a_codec_process_are_counted_and_those_of_results_are_already(
    operation: str, counted: int
) -> None:
    codecs = CodecPool(processes=0)
    codecs.submit(operation, {}, [memoryview(WHOLE)], lambda found: None)
    assert codecs.held_bytes == counted


# ------------------------------------------------------------------------------ the same values


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"application/octet-stream", WHOLE),
        (VALUE, encoding.encode({"x": WHOLE})),
        (VALUE, encoding.encode({"x": [1, b"a"]})),
        (VALUE, encoding.encode(WHOLE)),
    ],
)
def test_inputs_in_parts_are_the_inputs_they_would_be(kind: bytes, body: bytes) -> None:
    request = HttpRequest("POST", b"/", b"", {b"content-type": kind}, body, True)
    parts = decode_parts(request, (Param("x", True),))
    whole = {name: b"".join(one) for name, one in parts.items()}
    assert whole == decode_inputs(request, (Param("x", True),))
    assert msgspec.msgpack.decode(b"".join(pack_inputs(parts)), type=dict[str, bytes]) == whole


def test_a_response_that_a_client_makes_is_no_input_in_place_either() -> None:
    body = encoding.encode({"x": encoding.Response(b"a")})
    request = HttpRequest("POST", b"/", b"", {b"content-type": VALUE}, body, True)
    with pytest.raises(encoding.BadValue):
        decode_parts(request, (Param("x", True),))


def test_raw_tensors_of_a_large_grpc_message_are_not_parsed_and_mean_the_same() -> None:
    kind = load_schema()["ModelInferRequest"]
    message = kind(model_name="m", id="7", raw_input_contents=[WHOLE, b"ab"])
    message.inputs.add(name="x", datatype="UINT8", shape=[SIZE])
    message.inputs.add(name="y", datatype="UINT8", shape=[2])
    data = message.SerializeToString()
    found = parse_infer(data)
    assert isinstance(found, LargeInferRequest) and most_memory(lambda: parse_infer(data)) < SIZE / 2
    assert (found.model_name, found.id) == ("m", "7") and kind.FromString(found.SerializeToString()) == message
    assert [bytes(one.data) for one in decode_tensors(found)] == [WHOLE, b"ab"]


@pytest.mark.parametrize("damage", [b"\x3a", b"\x3a\xff\xff\xff\xff\xff\xff", b"\x3a\x05abc", b"\xff"])
def test_a_damaged_grpc_message_is_refused_as_before(damage: bytes) -> None:
    data = load_schema()["ModelInferRequest"](raw_input_contents=[WHOLE]).SerializeToString() + damage
    with pytest.raises(Exception, match=r"[Pp]ars"):
        parse_infer(data)


# ------------------------------------------------------------------------------ values that are kept


def test_what_a_run_holds_stays_until_its_result_has_been_copied(tmp_path: Path) -> None:
    pool = ShmPool(str(tmp_path), "gateway", 64 * 2**20)
    values = RunValues(pool, ShmReader(str(tmp_path)))
    values.provide("c1", WHOLE)
    release = values.keep("c1")
    values.close("c1")
    assert values.result("c1") == WHOLE
    release()
    with pytest.raises(KeyError):
        values.result("c1")
    values.provide("c2", WHOLE)
    values.keep("c2")()  # before its end
    assert values.result("c2") == WHOLE
    values.close("c2")
    assert not values._kept and not values._provided


@pytest.mark.live
@pytest.mark.parametrize("path", ["/v1/functions/echo", "/v2/models/echo/infer"])
def test_a_client_that_leaves_while_its_body_is_copied_leaves_nothing_behind(path: str) -> None:
    async def work() -> None:
        async with emulated() as gateway:
            pool = gateway.driver.data._storage._pool
            body = encoding.encode({"x": WHOLE})
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % (path.encode(), VALUE, len(body)) + body)
                await writer.drain()
                writer.transport.abort()
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            assert not gateway.driver.calls_in_flight
            assert pool is None or not pool.used_bytes
            async with Browser(gateway.port) as browser:
                assert (await browser.ask("POST", "/v1/functions/echo", b"1")).status == 200

    run(work)


def test_large_runs_are_kept_and_may_be_cancelled_while_they_are_copied(tmp_path: Path) -> None:
    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            for is_cancelled in (True, False, True, False):
                started = await browser.ask(
                    "POST", "/v1/functions/echo", WHOLE, "application/octet-stream", Prefer="respond-async"
                )
                assert started.status == 202
                if is_cancelled:
                    await browser.ask("POST", f"/v1/runs/{started.json['id']}/cancel")
                answer = await browser.ask("GET", f"/v1/runs/{started.json['id']}/result?wait_ms=20000")
                assert answer.status in ((200, 409, 499, 504, 503) if is_cancelled else (200,)), answer
            data = gateway.driver.data
            assert not data._kept and not data.held_bytes and not data.copies.held_bytes
            assert gateway.durable is not None and not gateway.durable._ending and not gateway.durable._recovery._storing

    run(work)


# ------------------------------------------------------------------------------ a whole server

BODIES = ("bytes", "encoded value, bytes", "durable run, bytes", "V2 binary, binary answer")


@pytest.mark.live
@pytest.mark.slow
def test_no_turn_of_the_loop_has_all_of_a_large_body_to_copy(tmp_path: Path) -> None:
    """Longest turn in processor time, beside what one copy of the body takes in the same process."""
    uvloop = pytest.importorskip("uvloop")  # the loop of the library copies what it sends

    async def work() -> dict[str, float]:
        return_free_memory()  # as `lamina serve` does: then what grows is moved by its pages
        runtime = open_local(str(APPS / "two.py"), policy=policies.build("frontier"))
        gateway = await open_gateway(runtime, ListenConfig(grpc_port=0), store=open_store(str(tmp_path / "runs.db")))
        found = {}
        try:
            for name in BODIES:
                _, path, make, headers = HTTP[name]
                body = make()
                await longest_turn(post(gateway.port, path, body, headers))  # slots are made
                found[name] = min([await longest_turn(post(gateway.port, path, body, headers)) for _ in range(3)])
                found[name] /= copy_s(body)
        finally:
            await gateway.stop(5.0)
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(work())
    assert max(found.values()) < 0.8, found


async def post(port: int, path: str, body: bytes, headers: dict[str, str]) -> None:
    """Send it from another thread; a durable run is waited for."""

    def ask() -> None:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (200, 202)
        if answer.status == 202:
            connection.request("GET", f"{answer.headers['location']}?wait_ms=20000")
            connection.getresponse().read()
            time.sleep(0.3)
        connection.close()

    await asyncio.get_running_loop().run_in_executor(None, ask)


async def longest_turn(work: Any) -> float:
    """Processor time of the longest turn of the loop while this is done."""
    loop, longest = asyncio.get_running_loop(), [0.0]
    began = [time.thread_time()]
    going = [True]

    def next_turn() -> None:
        now = time.thread_time()
        longest[0] = max(longest[0], now - began[0])
        began[0] = now
        if going[0]:
            loop.call_soon(next_turn)

    next_turn()
    await work
    going[0] = False
    return longest[0]


def copy_s(body: bytes) -> float:
    """Processor time of one copy into fresh pages."""
    kept, took = [], []
    for _ in range(5):
        began_s = time.thread_time()
        kept.append(bytes(memoryview(body)))
        took.append(time.thread_time() - began_s)
    return sorted(took)[len(took) // 2]
