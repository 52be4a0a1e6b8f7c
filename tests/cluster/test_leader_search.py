"""The search for the server that leads: which connection is kept of several, and what becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lamina.cluster.frame_link import FrameLink
from lamina.cluster.leader_search import LeaderMembership, LeaderSearch, Refusal
from lamina.cluster.messages import Goodbye, Welcome

Open = Callable[["Membership"], Awaitable[None]]


class Membership(LeaderMembership):
    """A connection that opens as it is told, without a socket."""

    role = "test"
    is_silent = False

    def __init__(self, address: str, opens: Open) -> None:
        super().__init__(address, b"", None)
        self.opens, self.closed = opens, False

    async def open(self) -> None:
        await self.opens(self)

    def close(self, why: str = "") -> None:
        self.closed = True

    def check_epoch(self, cell: str, epoch: int) -> None: ...

    def hello(self, challenge: bytes) -> Goodbye:
        return Goodbye()

    def on_welcome(self, link: FrameLink, frame: Welcome) -> None: ...

    def on_frame(self, frame: object) -> None: ...

    def on_end(self, why: str) -> None: ...


def led_in(epoch: int) -> Open:
    async def opens(one: Membership) -> None:
        one.epoch = epoch

    return opens


async def hangs(one: Membership) -> None:
    await asyncio.Event().wait()


async def searched(**opens: Open) -> tuple[Membership | None, list[Membership]]:
    made: list[Membership] = []

    def make(address: str) -> Membership:
        made.append(Membership(address, opens[address]))
        return made[-1]

    found = await LeaderSearch(tuple(opens), make, lambda: False).find()
    return found, made


def test_a_server_that_does_not_answer_keeps_no_other_waiting() -> None:
    async def work() -> None:
        found, made = await searched(silent=hangs, leads=led_in(3))
        assert found is not None and found.address == "leads" and not found.closed
        assert [one.closed for one in made if one is not found] == [True]

    asyncio.run(work())


def test_of_two_that_lead_at_once_the_later_one_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.cluster.leader_search.APART_S", 0.0)

    async def work() -> None:
        found, made = await searched(later=led_in(4), before=led_in(3))
        assert found is not None and found.epoch == 4 and not found.closed
        assert all(one.closed for one in made if one is not found)

    asyncio.run(work())


def test_what_is_followed_already_is_not_closed_with_the_search() -> None:
    """An agent follows a leader from its welcome on; its try may be given up before it says so."""

    async def work() -> None:
        began = asyncio.Event()

        async def adopted(one: Membership) -> None:
            one.is_adopted = True
            began.set()
            await hangs(one)

        made: list[Membership] = []

        def make(address: str) -> Membership:
            made.append(Membership(address, adopted))
            return made[-1]

        search = asyncio.create_task(LeaderSearch(("one",), make, lambda: False).find())
        await began.wait()
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)
        assert [one.closed for one in made] == [False]

    asyncio.run(work())


def test_a_refusal_is_asked_about_again_and_a_defect_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.cluster.leader_search.RETRY_S", 0.0)
    asked = 0

    async def refuses_once(one: Membership) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Refusal("it does not lead")

    async def breaks(one: Membership) -> None:
        raise ZeroDivisionError

    async def work() -> None:
        found, _ = await searched(one=refuses_once)
        assert found is not None and asked == 2
        with pytest.raises(ZeroDivisionError):
            await searched(one=breaks)

    asyncio.run(work())
