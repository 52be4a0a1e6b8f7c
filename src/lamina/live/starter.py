"""Recovery of durable runs: a run starts for the first time, or its journal is replayed with the workflow it began with.

Workflows are stored beside the runs, by digest, because a run that has begun must go on as it did even if the app has changed
since.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import msgspec

from lamina import values
from lamina.core.actions import Fail, Refuse
from lamina.core.events import Awake, CallResumed
from lamina.core.flow import Flow
from lamina.core.notes import Note
from lamina.errors import LaminaError
from lamina.live.loop import Ending, LiveLoop
from lamina.store import runs as stored
from lamina.store.base import Store
from lamina.store.runs import Fed, RunRow
from lamina.types import NEVER_US, Call


class Starter:
    """Starts and replays runs. `origin_us` is when the controller's time began, since 1970. `tell` applies a journal entry by its
    number; `holds` says whether a run has not ended yet."""

    def __init__(
        self,
        loop: LiveLoop,
        store: Store,
        origin_us: int,
        holds: Callable[[str], bool],
        tell: Callable[[str, int, Note], None],
        ended: Callable[[Ending], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._origin_us = origin_us
        self._holds = holds
        self._tell = tell
        self._ended = ended
        self._known: dict[str, tuple[Flow, str, bytes]] = {}
        self._begun: list[str] = []

    def flow_id(self, target: str) -> tuple[str, bytes]:
        """Digest and encoding of a workflow as it is deployed now."""
        flow = self._loop.controller.state.flows[target]
        known = self._known.get(target)
        if known is None or known[0] is not flow:
            body = values.encode(flow)
            known = self._known[target] = (flow, hashlib.blake2b(body, digest_size=12).hexdigest(), body)
        return known[1], known[2]

    def begin(self, fed: Fed, now_us: int) -> None:
        row = fed.row
        current = self._loop.controller.state.flows.get(row.target)
        if row.deadline_us and row.deadline_us <= now_us:
            self._ended(Fail(row.id, "deadline"))
        elif not row.began_us or row.kind == "function":
            if current is None:
                self._ended(Refuse(row.id, "unknown"))
            else:
                self._start(fed, now_us)
        elif current is not None and self.flow_id(row.target)[0] == row.flow:
            self._resume(fed, current, None)
        else:
            self._store.read(lambda db: stored.flow(db, row.flow), lambda body: self._resume_old(fed, body))

    def _start(self, fed: Fed, now_us: int) -> None:
        self._loop.submit(self._call(fed.row, now_us), _inputs(fed), self._ended, now_us)
        self._note_begun(fed.row.id, now_us)

    def _resume_old(self, fed: Fed, body: bytes | LaminaError | None) -> None:
        if not self._holds(fed.row.id):  # cancelled meanwhile
            return
        try:
            flow = msgspec.convert(values.decode(body), Flow) if isinstance(body, bytes) else None
        except (LaminaError, msgspec.MsgspecError):
            flow = None
        if flow is None:
            self._ended(Refuse(fed.row.id, "unknown"))
        else:
            self._resume(fed, flow, flow)

    def _resume(self, fed: Fed, flow: Flow, old: Flow | None) -> None:
        row, loop = fed.row, self._loop
        again_us = row.again_us - self._origin_us if row.again_us else 0
        loop.resume(CallResumed(self._call(row, row.began_us), old, again_us), flow, _inputs(fed), self._ended, row.began_us)
        for kept in fed.kept:
            if not self._holds(row.id):
                return
            loop.data.recall(row.id, kept.note, kept.value)
            self._tell(row.id, kept.number, shifted(kept.note, -self._origin_us))
        loop.post(Awake(row.id, again_us))
        self._note_begun(row.id, row.began_us)

    def _call(self, row: RunRow, began_us: int) -> Call:
        until_us = row.deadline_us - self._origin_us if row.deadline_us else NEVER_US
        wishes = (row.tenant, row.priority, row.cost_limit, row.size_bytes)
        return Call(row.id, row.target, began_us - self._origin_us, until_us, until_us, *wishes, durable=True)

    def _note_begun(self, id: str, now_us: int) -> None:
        """Record the start of a run that has not ended at once; together with all that start in this turn of the loop."""
        if self._holds(id):
            if not self._begun:
                asyncio.get_running_loop().call_soon(self._write_begun, now_us)
            self._begun.append(id)

    def _write_begun(self, now_us: int) -> None:
        ids, self._begun = self._begun, []
        self._store.write(lambda db: stored.begin(db, ids, now_us), must=True)


def _inputs(fed: Fed) -> dict[str, bytes]:
    return msgspec.msgpack.decode(fed.inputs, type=dict[str, bytes])


def shifted(note: Note, by_us: int) -> Note:
    """A journal entry with its times shifted between wall clock and controller clock."""
    return msgspec.structs.replace(
        note,
        at_us=note.at_us + by_us,
        queued_us=note.queued_us + by_us if note.queued_us else 0,
        began_us=note.began_us + by_us if note.began_us else 0,
    )
