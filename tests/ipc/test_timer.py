"""Timer callbacks are never early and never forgotten."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from lamina.ipc.event_loop import Timer, clock_us

pytestmark = pytest.mark.live


def test_all_fire_in_order_and_none_before_its_time() -> None:
    fired: list[tuple[int, int]] = []

    async def main() -> None:
        timer = Timer(asyncio.get_running_loop())
        done = asyncio.Event()
        begin = clock_us()
        times = [begin + random.Random(1).randrange(20_000) for _ in range(200)]
        for at_us in times:
            timer.call_at(at_us, lambda at_us=at_us: fired.append((at_us, clock_us())))
        timer.call_at(begin + 20_000, done.set)
        await asyncio.wait_for(done.wait(), 60)
        timer.close()
        assert [at for at, _ in fired] == sorted(times)

    asyncio.run(main())
    assert all(at_us <= now_us for at_us, now_us in fired)


def test_what_a_callback_asks_for_does_not_hide_what_is_due_sooner() -> None:
    """The first thing asked for from inside a callback is late; something earlier already waits."""
    order: list[str] = []

    async def main() -> None:
        timer = Timer(asyncio.get_running_loop())
        done = asyncio.Event()
        begin = clock_us()

        def first() -> None:
            timer.call_at(begin + 300_000_000, lambda: order.append("far"))
            order.append("first")

        timer.call_at(begin + 1_000, first)
        timer.call_at(begin + 2_000, lambda: (order.append("second"), done.set()))
        await asyncio.wait_for(done.wait(), 60)
        timer.close()

    asyncio.run(main())
    assert order == ["first", "second"]


def test_a_callback_that_fails_is_not_the_last() -> None:
    told: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(type(context["exception"]).__name__))
        timer, done = Timer(loop), asyncio.Event()
        now_us = clock_us()
        timer.call_at(now_us, lambda: [][0])
        timer.call_at(now_us, done.set)
        await asyncio.wait_for(done.wait(), 60)
        timer.close()

    asyncio.run(main())
    assert told == ["IndexError"]


def test_what_has_come_in_by_then_is_read_first() -> None:
    """Whoever is called back decides about what is here: a byte that was there before it must have been seen."""
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timer = Timer(loop)
        done = asyncio.Event()
        ours, theirs = socket.socketpair()
        loop.add_reader(ours, lambda: (order.append("byte"), loop.remove_reader(ours)))
        at_us = clock_us() + 1_000
        timer.call_at(at_us, lambda: (order.append("timer"), done.set()))
        while clock_us() <= at_us + 1_000:
            pass
        theirs.send(b"x")  # both are due when the loop looks next, and the timer was first
        await asyncio.wait_for(done.wait(), 60)
        timer.close()
        ours.close()
        theirs.close()

    asyncio.run(main())
    assert order == ["byte", "timer"]
