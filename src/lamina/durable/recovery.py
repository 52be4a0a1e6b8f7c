"""Recovery of durable runs: a run starts for the first time, or its journal is replayed with the workflow it began with.

Workflows are stored beside the runs, by digest, because a run that has begun must go on as it did even if the app has changed
since.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import msgspec

from lamina import encoding
from lamina.core.actions import FailCall, Reject
from lamina.core.events import CallRecovered, ReplayDone
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.drivers.realtime import Ending, RealtimeDriver
from lamina.errors import LaminaError
from lamina.store import runs as stored
from lamina.store.base import Store
from lamina.store.runs import LoadedRun, RunRow
from lamina.types import NEVER_US, Call


class RunStarter:
    """Starts and replays runs. `origin_us` is when the controller's time began, since 1970. `tell` applies a journal entry by its
    number; `holds` says whether a run has not ended yet."""

    def __init__(
        self,
        loop: RealtimeDriver,
        store: Store,
        origin_us: int,
        holds: Callable[[str], bool],
        tell: Callable[[str, int, JournalEntry], None],
        ended: Callable[[Ending], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._origin_us = origin_us
        self._is_resident = holds
        self._apply = tell
        self._on_ended = ended
        self._digests: dict[str, tuple[Flow, str, bytes]] = {}
        self._started: list[str] = []

    def flow_digest(self, target: str) -> tuple[str, bytes]:
        """Digest and encoding of a workflow as it is deployed now."""
        flow = self._loop.controller.state.flows[target]
        known = self._digests.get(target)
        if known is None or known[0] is not flow:
            body = encoding.encode(flow)
            known = self._digests[target] = (flow, hashlib.blake2b(body, digest_size=12).hexdigest(), body)
        return known[1], known[2]

    def start(self, fed: LoadedRun, now_us: int) -> None:
        row = fed.row
        current = self._loop.controller.state.flows.get(row.target)
        if row.deadline_us and row.deadline_us <= now_us:
            self._on_ended(FailCall(row.id, "deadline"))
        elif not row.began_us or row.kind == "function":
            if current is None:
                self._on_ended(Reject(row.id, "unknown"))
            else:
                self._start_new(fed, now_us)
        elif current is not None and self.flow_digest(row.target)[0] == row.flow:
            self._replay(fed, current, None)
        else:
            self._store.read(lambda db: stored.read_flow(db, row.flow), lambda body: self._replay_stored_flow(fed, body))

    def _start_new(self, fed: LoadedRun, now_us: int) -> None:
        self._loop.submit(self._call(fed.row, now_us), _decode_inputs(fed), self._on_ended, now_us)
        self._mark_started(fed.row.id, now_us)

    def _replay_stored_flow(self, fed: LoadedRun, body: bytes | LaminaError | None) -> None:
        if not self._is_resident(fed.row.id):  # cancelled meanwhile
            return
        try:
            flow = msgspec.convert(encoding.decode(body), Flow) if isinstance(body, bytes) else None
        except (LaminaError, msgspec.MsgspecError):
            flow = None
        if flow is None:
            self._on_ended(Reject(fed.row.id, "unknown"))
        else:
            self._replay(fed, flow, flow)

    def _replay(self, fed: LoadedRun, flow: Flow, old: Flow | None) -> None:
        row, loop = fed.row, self._loop
        again_us = row.again_us - self._origin_us if row.again_us else 0
        loop.recover(
            CallRecovered(self._call(row, row.began_us), old, again_us), flow, _decode_inputs(fed), self._on_ended, row.began_us
        )
        for kept in fed.journal:
            if not self._is_resident(row.id):
                return
            loop.data.replay_outcome(row.id, kept.entry, kept.value)
            self._apply(row.id, kept.number, shift_times(kept.entry, -self._origin_us))
        loop.post(ReplayDone(row.id, again_us))
        self._mark_started(row.id, row.began_us)

    def _call(self, row: RunRow, began_us: int) -> Call:
        until_us = row.deadline_us - self._origin_us if row.deadline_us else NEVER_US
        wishes = (row.tenant, row.priority, row.cost_limit, row.size_bytes)
        return Call(row.id, row.target, began_us - self._origin_us, until_us, until_us, *wishes, durable=True)

    def _mark_started(self, id: str, now_us: int) -> None:
        """Record the start of a run that has not ended at once; together with all that start in this turn of the loop."""
        if self._is_resident(id):
            if not self._started:
                asyncio.get_running_loop().call_soon(self._write_started, now_us)
            self._started.append(id)

    def _write_started(self, now_us: int) -> None:
        ids, self._started = self._started, []
        self._store.write(lambda db: stored.mark_running(db, ids, now_us), must=True)


def _decode_inputs(fed: LoadedRun) -> dict[str, bytes]:
    return msgspec.msgpack.decode(fed.inputs, type=dict[str, bytes])


def shift_times(note: JournalEntry, by_us: int) -> JournalEntry:
    """A journal entry with its times shifted between wall clock and controller clock."""
    return msgspec.structs.replace(
        note,
        at_us=note.at_us + by_us,
        queued_us=note.queued_us + by_us if note.queued_us else 0,
        began_us=note.began_us + by_us if note.began_us else 0,
    )
