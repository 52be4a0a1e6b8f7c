"""The feed: every batch is told once, a viewer goes on where it was, and one that leaves or stalls costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from pathlib import Path

import pytest

from lamina.core.flight_recorder import ArrivalRecord, FlightRecorder, StartRecord
from lamina.gateway.console import feed as feeds
from tests.gateway.console.emulated_fixture import Viewer, ask, console_server, in_loop
from tests.serving import request

pytestmark = pytest.mark.live


async def call(port: int, times: int = 1, name: str = "look") -> None:
    for _ in range(times):
        await ask(port, "POST", f"/v1/functions/{name}", 1)


@in_loop
async def test_a_batch_is_told_when_it_starts_and_when_it_ends(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin), Viewer(admin.port) as viewer:
        assert "200 OK" in viewer.head and "text/event-stream" in viewer.head
        await viewer.until("pulse")
        await call(gateway.port)
        frame = await viewer.until("frame", lambda one: one["started"])
        batch, device, first, units, function, _, predicted, jobs, behind = frame["started"][0]
        assert (device, first, function, jobs, behind) == ("h200-0", 0, "look", 1, 0)
        assert units in (3, 6, 15) and predicted >= 6_000 / units
        if not frame["finished"]:
            frame = await viewer.until("frame", lambda one: one["finished"])
        ended, _, took, error = frame["finished"][0]
        assert ended == batch and took > 100 and not error


@in_loop
async def test_a_pulse_has_devices_counts_and_a_verdict(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin), Viewer(admin.port) as viewer:
        pulse = await viewer.until("pulse")
        assert pulse["verdict"]["state"] == "idle" and pulse["viewers"] == 1
        assert pulse["devices"][0]["memory_by_function"]["look"] == 1024
        await call(gateway.port, 3)
        pulse = await viewer.until("pulse", lambda one: one["targets"])
        (target,) = pulse["targets"]
        assert (target["name"], sum(target["total"])) == ("look", 3)
        assert pulse["verdict"]["in_time"].startswith(("Yes", "No"))


@in_loop
async def test_a_viewer_that_comes_back_is_given_what_it_has_missed(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin):
        async with Viewer(admin.port) as viewer:
            await viewer.until("pulse")
            await call(gateway.port)
            frame = await viewer.until("frame", lambda one: one["finished"])
            seen, last = frame["finished"][-1][0], viewer.last
        await call(gateway.port, 3)
        async with Viewer(admin.port, last) as again:
            name, frame = await again.event()
            missed = {one[0] for one in frame["finished"]}
            while len(missed) < 3:
                name, frame = await again.event()
                missed |= {one[0] for one in frame["finished"]} if name == "frame" else set()
            assert name == "frame" and missed == {seen + 1, seen + 2, seen + 3}


@in_loop
async def test_an_id_of_another_server_begins_anew(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (_, admin):
        for last in ("cafecafe-7", "no id", "x" * 500):
            async with Viewer(admin.port, last) as viewer:
                name, _ = await viewer.event()
                assert name == "gap"


@in_loop
async def test_without_viewers_nothing_is_subscribed_or_kept(tmp_path: Path) -> None:
    async with console_server(tmp_path) as (gateway, admin):
        assert admin._console is not None
        feed, recorder = admin._console.feed, gateway.driver.recorder
        assert not recorder._subscribers and feed._timer is None
        async with Viewer(admin.port) as viewer:
            await viewer.until("pulse")
            await call(gateway.port)
            assert recorder._subscribers and feed.viewers == 1
        while feed.viewers:
            await asyncio.sleep(0.005)
        assert not recorder._subscribers and feed._timer is None and not feed._fresh and not feed._pulse._last


@in_loop
async def test_for_a_viewer_that_stalls_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_UNSENT_BYTES", 2_000)
    async with console_server(tmp_path) as (gateway, admin):
        assert admin._console is not None
        feed = admin._console.feed
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        stalled.connect(("127.0.0.1", admin.port))
        stalled.sendall(request("GET", "/v1/console/feed"))
        async with Viewer(admin.port) as reading:
            await reading.until("pulse")
            viewer = next(one for one in feed._viewers.values() if one.exchange.unsent_bytes is not None)
            (transport,) = (
                {one.exchange._connection.transport for one in feed._viewers.values()}
                - {None}
                - {one.exchange._connection.transport for one in feed._viewers.values() if one is not viewer}
            )
            assert transport is not None
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
            for _ in range(40):
                await call(gateway.port, 5)
                await reading.event()
            held = max(one.exchange.unsent_bytes for one in feed._viewers.values())
            frame = len(feed._last_pulse) + 250 * 120
            assert held < 2_000 + frame  # it was sent at most one frame beyond the limit, and no other since
        stalled.close()


@in_loop
async def test_viewers_that_come_back_at_once_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of fifty were given thousands of records in one turn of the loop: calls waited for a quarter of a second."""
    monkeypatch.setattr(feeds, "CATCH_UP_S", 0.0)
    served: list[int] = []
    made = feeds.EventFeed._missed

    def missed(feed: feeds.EventFeed, viewer: feeds.FeedViewer, until: int) -> bytes:
        served.append(feed._frames)
        return made(feed, viewer, until)

    monkeypatch.setattr(feeds.EventFeed, "_missed", missed)
    async with console_server(tmp_path) as (gateway, admin):
        await call(gateway.port, 3)
        async with contextlib.AsyncExitStack() as stack:
            viewers = [await stack.enter_async_context(Viewer(admin.port)) for _ in range(6)]
            for viewer in viewers:
                await viewer.until("frame", lambda one: one["started"])
            await call(gateway.port)
            for viewer in viewers:
                await viewer.until("frame", lambda one: one["started"])
    assert len(served) >= 6 and max(Counter(served).values()) == 1  # a frame


def test_of_many_starts_the_longest_are_drawn() -> None:
    records = [StartRecord(1, n, "f", "d", 1, [("c", "f")], n, 0, 0, "", "") for n in range(1_000)]
    feed = feeds.EventFeed.__new__(feeds.EventFeed)
    feed._driver = type("Clock", (), {"now_us": lambda self: 0})()  # type: ignore[assignment]
    frame = feed._frame(records)  # type: ignore[arg-type]
    assert len(frame["started"]) == feeds.MAX_STARTS and frame["left_out"] == 1_000 - feeds.MAX_STARTS
    assert min(one[6] for one in frame["started"]) == 1_000 - feeds.MAX_STARTS


def test_the_recorder_tells_and_reads_blocks_by_number() -> None:
    recorder, told = FlightRecorder(max_bytes=200), list[object]()
    stop = recorder.subscribe(told.extend)
    arrivals = [ArrivalRecord(n, f"call-{n}", "f", "", 0, 1) for n in range(9)]
    for one in arrivals:
        recorder.add(one)
        recorder.pack()
    assert told == arrivals and recorder.sequence == 9
    assert [(number, block) for number, block in recorder.blocks_after(6, 10)] == [(n + 1, [arrivals[n]]) for n in (6, 7, 8)]
    assert [number for number, _ in recorder.blocks_after(0, 2)] == [8, 9]
    assert [number for number, _ in recorder.blocks_after(0, 100)][-1] == 9, "older blocks are gone, and that is all"
    stop()
    recorder.add(arrivals[0])
    recorder.pack()
    assert told == arrivals
