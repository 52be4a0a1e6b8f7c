"""Channel between running code and the gateway: heartbeats, and the transaction on the keyed state."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lamina.ipc.protocol import (
    BatchDone,
    BatchHeartbeat,
    CommitResult,
    ErrorInfo,
    FrameChannel,
    RunBatch,
    StateChanges,
    StateRead,
    StateValue,
)
from lamina.sdk.app_state import RefusedTransaction, StateCell, StateKey, Transaction

HEARTBEAT_EVERY_S = 0.05
"""More often nobody needs to know, however often code says so."""

MAX_TRIES = 16
"""Of a step that finds what it has read out of date. Each time somebody else got on, so it ends."""


class BatchChannel:
    """The channel of one batch. It may be used by threads of the batch's own."""

    def __init__(self, channel: FrameChannel, batch: RunBatch, has_state: bool) -> None:
        self._channel = channel
        self._batch_id = batch.batch_id
        self._lock = threading.Lock()
        self._beaten_s = 0.0
        self.transaction = (
            Transaction(self)
            if has_state
            else RefusedTransaction("state: a batched function has none", "give it batch=1: a transaction belongs to one request")
        )

    def heartbeat(self) -> None:
        now_s = time.monotonic()
        if now_s - self._beaten_s >= HEARTBEAT_EVERY_S:
            self._beaten_s = now_s
            self._channel.send(BatchHeartbeat(self._batch_id))

    def read(self, place: StateKey) -> StateCell:
        with self._lock:
            self._channel.send(StateRead(self._batch_id, *place))
            answer: StateValue = self._channel.wait_for(StateValue)
            return answer.cell

    def changes(self, results: Sequence[object], may: bool) -> StateChanges | None:
        """State changes to apply with the result; none if there is nothing, or if the step failed."""
        made = self.transaction
        if not (made.reads or made.ops) or any(isinstance(result, ErrorInfo) for result in results):
            return None
        return StateChanges([(*place, version) for place, version in made.reads.items()], made.ops, may)


def must_rerun(channel: FrameChannel, done: BatchDone) -> bool:
    """Has the gateway found a read out of date? It is asked only where that can be."""
    if done.state is None or not done.state.reads:
        return False
    settled: CommitResult = channel.wait_for(CommitResult)
    return settled.must_rerun
