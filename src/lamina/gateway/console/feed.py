"""Event feed of the console, `GET /v1/console/feed`: batches as server-sent events, sampled here, resumed by `Last-Event-ID`.

The records of the flight recorder are made anyway, so the feed costs what it takes to look through them, and only while it has a
viewer: with none it has no subscription, no timer and no memory. Ten times a second what happened becomes one frame, encoded once
for all viewers; once a second comes a pulse (`pulse.py`).

    event: frame   {"now", "started": [[batch, device, first unit, units, function, began, predicted, jobs, behind]],
                    "finished": [[batch, ended, on the device, failed]], "left_out": starts that found no room}
    event: pulse   devices, functions, counts and the verdict
    event: gap     what happened before is not known here any more: forget what was drawn

Times are microseconds of the server's clock. The id of an event is the block of the recorder that it ends with, so a viewer that
comes back is given what it has missed from the recorder itself. A viewer that reads too slowly gets nothing until it has read
what it has, and then what it has missed: nothing is kept for it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from secrets import token_hex
from time import perf_counter
from typing import Any

import msgspec

from lamina.access.authorization import Grant
from lamina.core.flight_recorder import DecisionRecord, FinishRecord, StartRecord
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import Refused
from lamina.gateway.console.pulse import Pulse
from lamina.server.exchange import Exchange, HttpRequest

log = logging.getLogger("lamina")

FRAME_S = 0.1
FRAMES_PER_PULSE = 10
MAX_STARTS = 250
"""Batches of one frame that are drawn: of more, those that are predicted to take longest."""

MAX_FINISHES = 2_000
MAX_VIEWERS = 50
MAX_UNSENT_BYTES = 256 * 2**10
"""A viewer with more than this to read gets no more for now."""

MAX_BLOCKS = 400
"""Of the recorder, that a viewer is given of the past: a few seconds under full load, minutes otherwise."""

MAX_CAUGHT_UP = 1_000
"""Records of the past in one frame: what is left follows in the next."""

CATCH_UP_S = 0.004
"""Of a frame's turn, for viewers that are given what they have missed: the others have theirs in the next. Fifty that came back
at once would keep calls waiting."""

STREAM = b"text/event-stream"


@dataclass(slots=True, eq=False)
class FeedViewer:
    """One viewer: `sequence` is the last block it was sent."""

    exchange: Exchange
    sequence: int


class EventFeed:
    """The feed and its viewers."""

    def __init__(self, driver: RealtimeDriver, pulse: Pulse) -> None:
        self._driver = driver
        self._recorder = driver.recorder
        self._pulse = pulse
        self._boot = token_hex(4)  #: blocks are counted from the start of a server: ids of an earlier one mean nothing
        self._viewers: dict[Exchange, FeedViewer] = {}
        self._fresh: list[DecisionRecord] = []
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._frames = 0
        self._sequence = 0  #: of the last block in the last frame
        self._last_pulse = b""

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def serve(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        """Begin a stream. With `Last-Event-ID` it goes on there, else with the last seconds."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Refused(f"{MAX_VIEWERS} viewers are the most", hint="close a page of the console", reason="viewers")
        exchange.start_stream(200, STREAM, b"cache-control: no-store\r\nx-accel-buffering: no\r\n")
        if exchange.head_only:
            exchange.end_stream()
            return
        boot, _, number = request.header(b"last-event-id").decode("latin-1").partition("-")
        is_known = boot == self._boot and number.isdecimal() and len(number) < 18
        sequence = min(int(number), self._recorder.sequence) if is_known else self._recorder.sequence - MAX_BLOCKS
        if not is_known or self._recorder.sequence - sequence > MAX_BLOCKS:
            exchange.send_chunk(self._encode("gap", {"now": self._driver.now_us()}, max(0, sequence)))
        self._viewers[exchange] = FeedViewer(exchange, max(0, sequence))
        exchange.when_disconnected(lambda: self._leave(exchange))
        if self._unsubscribe is None:
            self._recorder.pack()
            self._unsubscribe = self._recorder.subscribe(self._fresh.extend)
            self._sequence = self._recorder.sequence
            self._frames = 0
            self._pulse.begin()
            self._timer = asyncio.get_running_loop().call_later(0, self._on_timer)
        else:
            exchange.send_chunk(self._last_pulse)

    def _leave(self, exchange: Exchange) -> None:
        self._viewers.pop(exchange, None)
        if not self._viewers:
            self._rest()

    def _rest(self) -> None:
        """Without viewers nothing is computed, and nothing is kept."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fresh.clear()
        self._pulse.end()

    def stop(self) -> None:
        for exchange in list(self._viewers):
            exchange.end_stream()
        self._viewers.clear()
        self._rest()

    # ------------------------------------------------------------------------ frames

    def _on_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FRAME_S, self._on_timer)  # first: it goes on, whatever comes
        try:
            self._recorder.pack()
            before, self._sequence = self._sequence, self._recorder.sequence
            fresh = list(self._fresh)
            self._fresh.clear()
            chunk = self._encode("frame", self._frame(fresh), self._sequence) if fresh else b""
            if self._frames % FRAMES_PER_PULSE == 0:
                self._last_pulse = self._encode("pulse", self._pulse.take(), self._sequence)
                chunk += self._last_pulse
            self._frames += 1
            lagging = [viewer for viewer in self._viewers.values() if viewer.sequence < before]
            for viewer in [one for one in self._viewers.values() if one.sequence >= before]:
                self._serve_viewer(viewer, chunk)
            until_s = perf_counter() + CATCH_UP_S
            for viewer in lagging:
                if self._catch_up(viewer, before, chunk) and perf_counter() >= until_s:
                    break
        except Exception:
            log.exception("a frame of the console could not be made")

    def _serve_viewer(self, viewer: FeedViewer, chunk: bytes) -> None:
        """Send the frame to a viewer that has had all before it."""
        if viewer.exchange.unsent_bytes <= MAX_UNSENT_BYTES:  # else nothing is kept for it: it is read from the recorder again
            viewer.sequence = self._sequence
            viewer.exchange.send_chunk(chunk)

    def _catch_up(self, viewer: FeedViewer, until: int, chunk: bytes) -> bool:
        """Send the next piece of what a viewer has missed up to that block, then the frame; and put it behind the others. False:
        it has yet to read what it was sent."""
        exchange = viewer.exchange
        if exchange not in self._viewers or exchange.unsent_bytes > MAX_UNSENT_BYTES:
            return False
        self._viewers[exchange] = self._viewers.pop(exchange)
        exchange.send_chunk(self._missed(viewer, until))
        if viewer.sequence >= until and exchange in self._viewers:
            self._serve_viewer(viewer, chunk)
        return True

    def _missed(self, viewer: FeedViewer, until: int) -> bytes:
        """The next piece of what a viewer has missed, up to that block."""
        oldest, chunk = until - MAX_BLOCKS, b""
        if viewer.sequence < oldest:
            viewer.sequence = oldest
            chunk = self._encode("gap", {"now": self._driver.now_us()}, oldest)
        records: list[DecisionRecord] = []
        for number, block in self._recorder.blocks_after(viewer.sequence, self._sequence - viewer.sequence):
            if number > until or len(records) > MAX_CAUGHT_UP:
                break
            records += block
            viewer.sequence = number
        else:
            viewer.sequence = until
        if viewer.sequence < until and not records:  # those blocks are gone
            viewer.sequence = until
        return chunk + (self._encode("frame", self._frame(records, MAX_CAUGHT_UP), viewer.sequence) if records else b"")

    def _frame(self, records: list[DecisionRecord], most: int = MAX_STARTS) -> dict[str, Any]:
        starts = [record for record in records if type(record) is StartRecord]
        finishes = [record for record in records if type(record) is FinishRecord]
        drawn = starts if len(starts) <= most else nlargest(most, starts, key=_predicted_us)
        return {
            "now": self._driver.now_us(),
            "started": [_started(record) for record in drawn],
            "finished": [(one.batch_id, one.at_us, one.device_us, one.error[:80]) for one in finishes[:MAX_FINISHES]],
            "left_out": len(starts) - len(drawn),
        }

    def _encode(self, event: str, content: Any, sequence: int) -> bytes:
        head = f"id: {self._boot}-{sequence}\nevent: {event}\ndata: ".encode()
        return head + msgspec.json.encode(content) + b"\n\n"


def _predicted_us(record: StartRecord) -> int:
    return record.predicted_us


def _started(record: StartRecord) -> tuple[Any, ...]:
    mask = record.mask
    first = (mask & -mask).bit_length() - 1
    return (
        record.batch_id,
        record.device,
        first,
        mask.bit_length() - first,
        record.function,
        record.at_us,
        record.predicted_us,
        len(record.jobs),
        record.behind,
    )
