"""Memory: clients cannot make a server hold more than its budget, nor keep what they have left (C1, C2, M5)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina.cli._server_config import ListenOptions
from lamina.core.actions import JobRef
from lamina.engines.inflight import deliver_results
from lamina.errors import LaminaError, Unauthorized
from lamina.sdk.states_workflow import from_asl
from lamina.server import process_status
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpConnection, HttpLimits
from lamina.server.http_server import HttpServer, OnHeadChecked
from lamina.server.memory_budget import CONNECTION_BYTES, MemoryBudget, MemoryExhausted, MemoryShareExceeded, address_key
from lamina.server.request_parser import RequestParser
from lamina.values.references import ShmRef
from lamina.values.run_values import RunValues

MIB = 2**20
HEAD = b"POST /v1/functions/f HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST /v1/functions/f HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
SMALL = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"

Script = Callable[[int, HttpServer], Awaitable[Any]]


def problem(status: int, what: str, hint: str = "") -> tuple[bytes, bytes]:
    return json.dumps({"status": status, "title": what, "hint": hint}).encode(), b"application/problem+json"


def echo(request: HttpRequest, exchange: Exchange) -> None:
    exchange.respond(200, request.body[:100], b"text/plain")


def serve(script: Script, handler: Any = echo, limits: HttpLimits | None = None, **more: Any) -> Any:
    async def main() -> Any:
        server = HttpServer(handler, problem, limits, **more)
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(script(port, server), 30)
        finally:
            await server.stop()

    return asyncio.run(main())


class Client:
    """A raw connection."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._where = (port, address)

    async def __aenter__(self) -> Client:
        port, address = self._where
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and head of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await self.reader.readexactly(length)
        return int(head.split(b" ")[1]), head.lower()

    async def ask(self, data: bytes) -> int:
        await self.send(data)
        return (await self.answer())[0]

    async def is_open(self) -> bool:
        try:
            return await self.ask(SMALL) == 200
        except (asyncio.IncompleteReadError, ConnectionError):
            return False


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def living(*kinds: type) -> int:
    return sum(type(one) in kinds for one in gc.get_objects())


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


# ----------------------------------------------------------------------------------------------- C1: leavers


class FakeTransport:
    """Stands for a socket: the server must not wait for one in ten thousand cases."""

    def __init__(self) -> None:
        self.is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def test_c1_ten_thousand_leavers_in_the_middle_of_a_body_leave_nothing() -> None:
    """31 MiB announced and 128 KiB sent by each: 1.2 GiB if they stayed. By reference counts alone: the collector comes late."""

    async def main() -> None:
        server = HttpServer(echo, problem, budget=MemoryBudget(64 * MIB))
        piece = bytes(64 * 2**10)
        with no_garbage_collector():
            before = resident_mib()
            for _ in range(10_000):
                connection = HttpConnection(server)
                connection.connection_made(FakeTransport())  # type: ignore[arg-type]
                connection.data_received(HEAD % (31 * MIB) + piece)
                connection.data_received(piece)
                assert server.budget.used_bytes == 31 * MIB + CONNECTION_BYTES
                connection.connection_lost(None)
            del connection
            assert living(HttpConnection, RequestParser) == 0
            assert resident_mib() - before < 20
        assert server.budget.used_bytes == 0
        assert not server.connections
        server.budget.check()

    asyncio.run(main())


def test_c1_leavers_on_real_sockets_leave_nothing() -> None:
    async def script(port: int, server: HttpServer) -> int:
        async def leave(share: float) -> None:
            async with Client(port) as client:
                message = HEAD % (2 * MIB) + bytes(2 * MIB)
                await client.send(message[: int(len(message) * share)])

        with no_garbage_collector():
            await asyncio.gather(*(leave(number / 40) for number in range(40)))
            await until(lambda: living(HttpConnection, RequestParser) == 0)
            return server.budget.used_bytes

    assert serve(script) == 0


def test_c1_a_client_that_leaves_before_its_answer_gives_back_its_body() -> None:
    held: list[Exchange] = []

    async def script(port: int, server: HttpServer) -> list[int]:
        async with Client(port) as client:
            await client.send(HEAD % (3 * MIB) + bytes(3 * MIB))
            await until(lambda: bool(held))
            waiting = server.budget.address_bytes("127.0.0.1")
        await until(lambda: not server.connections)
        return [waiting // MIB, server.budget.address_bytes("127.0.0.1")]

    assert serve(script, lambda request, exchange: held.append(exchange)) == [3, 0]


# ----------------------------------------------------------------------------- C2: bodies that never end


def refuse_head(headers: dict[bytes, bytes], then: OnHeadChecked) -> None:
    then("acme" if headers.get(b"authorization") == b"Bearer right" else Unauthorized("unknown token", hint="log in"))


@pytest.mark.parametrize("head", [HEAD % (31 * MIB), CHUNKED + b"1000000\r\n"])
def test_c2_a_token_is_checked_before_a_body_is_read(head: bytes) -> None:
    async def script(port: int, server: HttpServer) -> tuple[int, bool, int]:
        async with Client(port) as client:
            await client.send(head + bytes(1000))
            status, said = await client.answer()
            return status, b"www-authenticate: bearer" in said, server.budget.layers().get("bodies", 0)

    assert serve(script, check_head=refuse_head) == (401, True, 0)


def test_c2_a_client_that_expects_100_continue_is_told_before_it_sends_anything() -> None:
    async def script(port: int, _server: HttpServer) -> int:
        async with Client(port) as client:
            return await client.ask((HEAD % (31 * MIB)).replace(b"Host", b"Expect: 100-continue\r\nHost"))

    assert serve(script, check_head=refuse_head) == 401


def test_c2_a_head_that_is_checked_elsewhere_holds_up_its_body_alone() -> None:
    asked: list[OnHeadChecked] = []

    async def script(port: int, server: HttpServer) -> tuple[int, int, int]:
        async with Client(port) as client, Client(port) as wrong, Client(port) as other:
            await client.send(HEAD % MIB + bytes(1000))
            await wrong.send(HEAD % MIB + bytes(1000))
            await until(lambda: len(asked) == 2)
            beside = await other.ask(SMALL)
            asked[0]("acme")
            asked[1](Unauthorized("unknown token"))
            await client.send(bytes(MIB - 1000))
            return beside, (await client.answer())[0], (await wrong.answer())[0]

    assert serve(script, check_head=lambda headers, then: asked.append(then)) == (200, 200, 401)


def test_c2_endless_bodies_take_their_share_and_the_others_are_served() -> None:
    """Twenty clients of one address announce 28 MiB each and send no more; the budget is 256 MiB, half of it for an address, and
    an eighth of that for small requests, which a client of the same address sends."""

    async def script(port: int, server: HttpServer) -> tuple[list[int], int, int, bytes]:
        async with contextlib.AsyncExitStack() as stack:
            endless = [await stack.enter_async_context(Client(port)) for _ in range(20)]
            for client in endless:
                await client.send(HEAD % (28 * MIB) + b"x")
            answers = [asyncio.create_task(client.answer()) for client in endless]
            await until(lambda: sum(answer.done() for answer in answers) == 17)
            refused = [answer.result() for answer in answers if answer.done()]
            other = await stack.enter_async_context(Client(port, "127.0.0.2"))
            served = await other.ask(HEAD % (31 * MIB) + bytes(31 * MIB))
            same = await stack.enter_async_context(Client(port))
            for answer in answers:
                answer.cancel()
            return [status for status, _ in refused], served, await same.ask(SMALL), refused[0][1]

    statuses, served, small, said = serve(script, budget=MemoryBudget(256 * MIB))
    assert statuses == [503] * 17
    assert (served, small) == (200, 200)
    assert b"retry-after: 1" in said


def test_c2_the_last_eighth_of_a_share_is_for_small_requests() -> None:
    budget = MemoryBudget(2**24, address_share=0.5)
    large = [budget.charge("bodies", 2**20, "one") for _ in range(7)]
    with pytest.raises(MemoryExhausted):
        budget.charge("bodies", 2**20, "one")
    small = [budget.charge("connections", CONNECTION_BYTES, "one") for _ in range(32)]
    with pytest.raises(MemoryExhausted):
        budget.charge("connections", CONNECTION_BYTES, "one")
    for charge in (*large, *small):
        charge.release()
    assert budget.used_bytes == 0


def test_c2_a_body_larger_than_its_share_will_never_fit_and_is_told_so() -> None:
    async def script(port: int, _server: HttpServer) -> int:
        async with Client(port) as client:
            return await client.ask(HEAD % (31 * MIB) + b"x")

    assert serve(script, budget=MemoryBudget(40 * MIB)) == 413


def test_c2_a_body_in_chunks_is_charged_as_it_comes() -> None:
    chunk = b"100000\r\n" + bytes(MIB) + b"\r\n"

    async def script(port: int, server: HttpServer) -> tuple[int, int]:
        async with Client(port) as client, Client(port) as other:
            with contextlib.suppress(ConnectionError):
                await client.send(CHUNKED + chunk * 12)
            return (await client.answer())[0], await other.ask(SMALL)

    assert serve(script, budget=MemoryBudget(16 * MIB)) == (503, 200)


def test_c2_the_memory_of_a_body_is_given_back_with_its_answer() -> None:
    async def script(port: int, server: HttpServer) -> list[int]:
        async with Client(port) as client:
            found = []
            for _ in range(5):
                assert await client.ask(HEAD % (3 * MIB) + bytes(3 * MIB)) == 200
                found.append(server.budget.used_bytes)
            return found

    assert serve(script, budget=MemoryBudget(10 * MIB)) == [CONNECTION_BYTES] * 5


def test_c2_a_full_budget_refuses_what_is_not_small() -> None:
    """Values of runs are counted by their own layer: when they use up the memory, calls that would add to it wait outside."""
    held = 0

    async def script(port: int, server: HttpServer) -> list[int]:
        nonlocal held
        async with Client(port) as client:
            first = await client.ask(HEAD % 20_000 + bytes(20_000))
            held = 64 * MIB
            await until(lambda: server.is_memory_full)
            return [first, await client.ask(HEAD % 20_000 + bytes(20_000)), await client.ask(SMALL)]

    assert serve(script, budget=MemoryBudget(64 * MIB, {"values": lambda: held})) == [200, 503, 200]


def test_c2_results_that_are_not_read_are_counted_and_refused_when_they_use_up_the_share() -> None:
    def large(request: HttpRequest, exchange: Exchange) -> None:
        exchange.respond(200, bytes(16 * MIB))

    async def script(port: int, server: HttpServer) -> int:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                client = await stack.enter_async_context(Client(port))
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await client.send(SMALL)
            await until(lambda: server.budget.layers().get("responses", 0) > 20 * MIB)
            other = await stack.enter_async_context(Client(port))
            return await other.ask(SMALL)

    assert serve(script, large, budget=MemoryBudget(80 * MIB)) == 503


# ----------------------------------------------------------------------------------- M5: idle connections


def test_m5_idle_connections_make_room_for_newcomers() -> None:
    async def script(port: int, server: HttpServer) -> tuple[list[bool], bool]:
        async with contextlib.AsyncExitStack() as stack:
            old = [await stack.enter_async_context(Client(port)) for _ in range(8)]
            await until(lambda: len(server.connections) == 8)
            new = [await stack.enter_async_context(Client(port)) for _ in range(5)]
            served = [await client.is_open() for client in new]
            return served, len(server.connections) <= 8 and bool(old)

    assert serve(script, limits=HttpLimits(connections=8)) == ([True] * 5, True)


def test_m5_the_address_with_the_most_connections_gives_way() -> None:
    """A few clients of another address keep theirs, however idle, while one address brings more and more."""

    async def script(port: int, server: HttpServer) -> list[bool]:
        async with contextlib.AsyncExitStack() as stack:
            quiet = [await stack.enter_async_context(Client(port, "127.0.0.2")) for _ in range(3)]
            await until(lambda: len(server.connections) == 3)
            for _ in range(40):
                flood = await stack.enter_async_context(Client(port))
                assert await flood.is_open()
            return [await client.is_open() for client in quiet]

    assert serve(script, limits=HttpLimits(connections=10)) == [True] * 3


def test_m5_connections_that_were_turned_away_go_first() -> None:
    """They have their answer, and stay for a moment so that it is not lost; under a flood nobody idle goes before them."""

    async def script(port: int, server: HttpServer) -> tuple[list[int], bool]:
        async with contextlib.AsyncExitStack() as stack:
            idle = await stack.enter_async_context(Client(port))
            await until(lambda: len(server.connections) == 1)
            statuses = []
            for _ in range(12):
                refused = await stack.enter_async_context(Client(port))
                statuses.append(await refused.ask(HEAD % MIB + b"x"))
            return statuses, await idle.is_open()

    found = serve(script, limits=HttpLimits(connections=4), check_head=refuse_head)
    assert found == ([401] * 12, True)


def test_m5_connections_with_a_call_under_way_are_never_evicted() -> None:
    held: list[Exchange] = []

    def handler(request: HttpRequest, exchange: Exchange) -> None:
        held.append(exchange)

    async def script(port: int, server: HttpServer) -> tuple[int, list[int]]:
        async with contextlib.AsyncExitStack() as stack:
            busy = [await stack.enter_async_context(Client(port)) for _ in range(4)]
            for client in busy:
                await client.send(SMALL)
            await until(lambda: len(held) == 4)
            newcomer = await stack.enter_async_context(Client(port, "127.0.0.2"))
            refused, _ = await newcomer.answer()
            for exchange in held:
                exchange.respond(200)
            return refused, [(await client.answer())[0] for client in busy]

    assert serve(script, handler, HttpLimits(connections=4)) == (503, [200] * 4)


# ---------------------------------------------------------------------------------------- the account itself

STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x", "y"]), st.integers(0, 60), st.booleans()), max_size=40
)


@given(STEPS)
def test_the_budget_agrees_with_a_count_of_everything_charged(steps: list[tuple[str, str, int, bool]]) -> None:
    budget = MemoryBudget(100)
    charges: list[tuple[Any, str, str, int]] = []
    for address, tenant, size, is_released in steps:
        if is_released and charges:
            charges.pop(size % len(charges))[0].release()
            continue
        of_address = sum(one[3] for one in charges if one[1] == address)
        of_tenant = sum(one[3] for one in charges if tenant and one[2] == tenant)
        total = sum(one[3] for one in charges)
        try:
            charges.append((budget.charge("bodies", size, address, tenant), address, tenant, size))
            assert of_address + size <= 50 and of_tenant + size <= 50 and total + size <= 100
        except MemoryShareExceeded:
            assert size > 50
        except MemoryExhausted:
            assert of_address + size > 50 or of_tenant + size > 50 or total + size > 100
        budget.check()
        assert budget.used_bytes == sum(one[3] for one in charges)


def test_a_charge_that_was_handed_over_counts_for_its_client_alone() -> None:
    budget = MemoryBudget(100)
    charge = budget.charge("bodies", 40, "a")
    charge.hand_over()
    assert (budget.used_bytes, budget.address_bytes("a")) == (0, 40)
    with pytest.raises(LaminaError):
        budget.charge("bodies", 20, "a")
    charge.release()
    charge.release()
    assert (budget.used_bytes, budget.address_bytes("a")) == (0, 0)
    budget.check()


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:0db8:0001:0002"),
        ("", ""),
        (None, ""),
    ],
)
def test_an_address_is_one_client_and_an_ipv6_network_too(peer: Any, key: str) -> None:
    assert address_key(peer) == key


# ------------------------------------------------------------------------------------------- values of runs


def test_c2_a_result_without_room_fails_its_call_and_is_given_back() -> None:
    """Steps of runs in flight must not hold more than the budget either. What was accepted for good is kept."""
    app = lamina.App("values")
    flow = from_asl({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": True}}}, app=app, name="w").flow
    values, freed = RunValues(None, None, limit_bytes=1_000), []
    for call_id, began_us in (("call", 0), ("run", 1)):
        values.open(call_id, flow, {}, began_us)
    jobs = [JobRef(number, call_id, 0, "A") for number, call_id in enumerate(("call", "call", "run"))]
    slot = ShmRef("w1", 1, 900)
    outcomes = deliver_results(values, jobs, [True] * 3, [b"x" * 800, slot, slot], freed.append)
    assert [outcome.error for outcome in outcomes] == ["", "memory-exhausted", ""]
    assert freed == [slot]
    assert values.held_bytes == 1_700
    values.close("call")
    values.close("run")
    assert values.held_bytes == 0


@pytest.mark.parametrize(("text", "found"), [("64MiB", 64 * MIB), (None, 0)])
def test_the_budget_is_an_option_of_the_server(text: str | None, found: int) -> None:
    assert listen_options(text).memory_bytes == found


@pytest.mark.parametrize("text", ["1MiB", "much", "-4GiB"])
def test_a_budget_that_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(LaminaError, match="--memory-budget"):
        _ = listen_options(text).memory_bytes


def listen_options(memory_budget: str | None) -> ListenOptions:
    unused = dict.fromkeys(ListenOptions.__dataclass_fields__)
    return ListenOptions(**{**unused, "memory_budget": memory_budget})  # type: ignore[arg-type]


@pytest.mark.live
def test_the_default_budget_is_a_part_of_what_the_process_may_use() -> None:
    here = process_status.memory_limit_bytes()
    command = "import lamina.server.process_status as status; print(status.memory_limit_bytes(), status.default_memory_budget())"
    told = subprocess.run(["prlimit", f"--as={2**30}", sys.executable, "-c", command], capture_output=True, check=True).stdout
    assert told.split() == [b"%d" % 2**30, b"%d" % 2**28]
    assert here > 2**30


@pytest.mark.live
def test_a_process_that_was_started_with_less_memory_keeps_to_it() -> None:
    """Decoders and unpackers have limits of their own; under a lower one of the server they must start all the same."""
    command = "import resource, lamina.server.process_status as s; s.limit_address_space(2**32); print(*resource.getrlimit(9))"
    told = subprocess.run(["prlimit", f"--as={2**30}", sys.executable, "-c", command], capture_output=True, check=True).stdout
    assert told.split() == [b"%d" % 2**30] * 2


# ------------------------------------------------------------------------------ many large bodies at once


@pytest.mark.parametrize("refused", [False, True], ids=["admitted", "refused"])
def test_c2_of_many_large_bodies_a_few_are_read_in_one_turn_of_the_loop(refused: bool) -> None:
    """Each of ten clients has a piece of its body there at once: four are read on, and in each turn four others, in order. Those
    that were refused and send on have no more than that."""

    async def main() -> list[list[int]]:
        budget = MemoryBudget(40 * MIB if refused else 2**40)
        server = HttpServer(lambda request, exchange: None, lambda *said: (b"", b""), budget=budget)
        pairs = [(HttpConnection(server), FakeTransport()) for _ in range(10)]
        for connection, transport in pairs:
            connection.connection_made(transport)  # type: ignore[arg-type]
            connection.data_received(HEAD % (30 * MIB))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for connection, _ in pairs:
            connection.data_received(bytes(MIB + 1))
        found = []
        for _ in range(4):
            found.append([index for index, (_, transport) in enumerate(pairs) if transport.is_reading])
            for index in found[-1]:
                pairs[index][1].is_reading = False  # it has had its turn, and nothing more has come
            await asyncio.sleep(0)
        return found

    assert asyncio.run(main()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
