"""Sessions: what one tenant opens keeps no other out, and what is sent to a function that takes nothing finds room first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lamina.errors import Refused
from lamina.gateway.bootstrap import Gateway
from lamina.gateway.routes import sessions
from lamina.gateway.routes.sessions import CallSession
from lamina.server.memory_budget import MemoryBudget, MemoryExhausted
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
