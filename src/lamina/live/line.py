"""Channel between running code and the gateway: heartbeats, and the transaction on the keyed state."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lamina.live.frames import Beat, Changes, Channel, Done, ErrorInfo, RunBatch, Settled, StateIs, StateRead
from lamina.sdk.state import Cell, Place, Refusal, Transaction

BEAT_EVERY_S = 0.05
"""More often nobody needs to know, however often code says so."""

MAX_TRIES = 16
"""Of a step that finds what it has read out of date. Each time somebody else got on, so it ends."""


class Line:
    """The channel of one batch. It may be used by threads of the batch's own."""

    def __init__(self, channel: Channel, batch: RunBatch, has_state: bool) -> None:
        self._channel = channel
        self._batch_id = batch.batch_id
        self._lock = threading.Lock()
        self._beaten_s = 0.0
        self.transaction = (
            Transaction(self)
            if has_state
            else Refusal("state: a batched function has none", "give it batch=1: a transaction belongs to one request")
        )

    def beat(self) -> None:
        now_s = time.monotonic()
        if now_s - self._beaten_s >= BEAT_EVERY_S:
            self._beaten_s = now_s
            self._channel.send(Beat(self._batch_id))

    def read(self, place: Place) -> Cell:
        with self._lock:
            self._channel.send(StateRead(self._batch_id, *place))
            answer: StateIs = self._channel.answer(StateIs)
            return answer.cell

    def changes(self, results: Sequence[object], may: bool) -> Changes | None:
        """State changes to apply with the result; none if there is nothing, or if the step failed."""
        made = self.transaction
        if not (made.reads or made.ops) or any(isinstance(result, ErrorInfo) for result in results):
            return None
        return Changes([(*place, version) for place, version in made.reads.items()], made.ops, may)


def must_repeat(channel: Channel, done: Done) -> bool:
    """Has the gateway found a read out of date? It is asked only where that can be."""
    if done.state is None or not done.state.reads:
        return False
    settled: Settled = channel.answer(Settled)
    return settled.again
