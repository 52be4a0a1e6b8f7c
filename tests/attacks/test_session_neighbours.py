"""Sessions: what one tenant opens keeps no other out, and what is sent to a function that takes nothing finds room first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from lamina.errors import FunctionFailed, Refused
from lamina.gateway.bootstrap import Gateway
from lamina.gateway.routes import sessions, sockets
from lamina.gateway.routes.sessions import CallSession
from lamina.server.memory_budget import MemoryBudget, MemoryExhausted
from lamina.server.websocket import MAX_REASON_BYTES
from tests.gateway.routes.test_sessions import APP, ask, opened
from tests.serving import shared, write_app


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("chat"), APP)) as gateway:
        yield gateway


@pytest.mark.live
def test_sessions_that_have_ended_keep_no_new_one_out(server: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept for a minute: a thousand that were opened and ended at once kept all tenants out for as long."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    places = []
    for _ in range(9):
        places.append(opened(server))
        for _ in range(2):  # no more messages; then its call is cancelled
            ask(server, "DELETE", places[-1])
    assert [ask(server, "GET", place)[0] for place in places] == [404] * 6 + [200] * 3  # the oldest have gone
    kept = [opened(server) for _ in range(3)]
    assert ask(server, "POST", "/v1/functions/chat/sessions", {})[0] == Refused.status
    assert [ask(server, "GET", place)[0] for place in kept] == [200] * 3


def test_messages_that_are_not_taken_find_room_in_the_memory_budget() -> None:
    async def work() -> list[int]:
        budget, taken = MemoryBudget(1_000_000), []
        several = [CallSession("chat", "evil", 1_000_000, budget) for _ in range(10)]
        for session in several:
            try:
                session.put(bytes(200_000))
                taken.append(session)
            except MemoryExhausted:
                assert not session.is_closing
        held = budget.layers()["sessions"]
        for session in several:
            session.forget()
        return [len(taken), held, budget.layers()["sessions"]]

    assert asyncio.run(work()) == [2, 400_000, 0]  # half of it is the most for one tenant


def test_what_a_session_has_failed_with_is_short_whatever_its_function_answered() -> None:
    """A function may make a response of its own: of tens of megabytes, which were decoded on the loop and kept for a minute in
    each of a thousand sessions, and told again to whoever listed them."""

    async def work() -> list[int]:
        sizes = []
        for body, kind in [(b"[" + b"[]," * 5_000_000 + b"1]", b"application/json"), (b"\xff" * 20_000_000, b"text/plain")]:
            session = CallSession("chat", "evil", 1_000_000, MemoryBudget())
            session.respond(500, body, kind)
            sizes.append(len(msgspec.json.encode(session.about())))
        return sizes

    assert max(asyncio.run(work())) < 64 * 1_024


@pytest.mark.parametrize("body", [b"{no json", b"\xff\xfe", b'"\xff"', b"[" * 100_000, b"1 2"])
def test_what_a_function_calls_json_and_is_none_is_an_error_of_its_session_alone(body: bytes) -> None:
    async def work() -> list[object]:
        returned, failed = (CallSession("chat", "evil", 1_000_000, MemoryBudget()) for _ in range(2))
        returned.respond(200, body)
        failed.respond(404, body)
        assert failed.ended is not None and failed.ended["status"] == 404
        return [returned.ended and returned.ended["status"], list(returned.values)]

    assert asyncio.run(work()) == [FunctionFailed.status, []]


def test_a_websocket_whose_call_fails_with_a_large_response_reads_none_of_it() -> None:
    large = b'{"detail":' + b"[" + b"[]," * 5_000_000 + b"1]}"
    assert len(sockets._reason_of_body(large)) <= MAX_REASON_BYTES and "[]" in sockets._reason_of_body(large)
    assert sockets._text_of(b"\xff\xfe") == b"\xff\xfe" and sockets._text_of(b"[1]") == "[1]"
