"""Recovery of durable runs: a run starts for the first time, or its journal is replayed with the workflow it began with.

Workflows are stored beside the runs, by digest, because a run that has begun must go on as it did even if the app has changed
since.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping

import msgspec

from lamina import encoding
from lamina.core.actions import FailCall, Reject
from lamina.core.events import CallRecovered, ReplayDone
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import LaminaError
from lamina.ipc.sliced_copies import SLICE_BYTES, Parts, size_of
from lamina.store import runs as stored
from lamina.store.base import Store
from lamina.store.runs import LoadedRun, RunRow
from lamina.types import NEVER_US, Call
from lamina.values.references import Stored


class RunRecovery:
    """Starts and replays runs. `origin_us` is when the controller's time began, since 1970. `apply` applies a journal entry by
    its number; `is_resident` says whether a run has not ended yet; `set_aside` takes those that cannot be replayed."""

    def __init__(
        self,
        driver: RealtimeDriver,
        store: Store,
        origin_us: int,
        is_resident: Callable[[str], bool],
        apply: Callable[[str, int, JournalEntry], None],
        on_ended: Callable[[Ending], None],
        set_aside: Callable[[str, Exception], None],
    ) -> None:
        self._driver = driver
        self._store = store
        self._origin_us = origin_us
        self._is_resident = is_resident
        self._apply = apply
        self._on_ended = on_ended
        self._set_aside = set_aside
        self._digests: dict[str, tuple[Flow, str, bytes]] = {}
        self._started: list[str] = []
        self._storing: dict[str, LoadedRun] = {}  #: runs that begin when their inputs have been put where calls have them

    def flow_digest(self, target: str) -> tuple[str, bytes]:
        """Digest and encoding of a workflow as it is deployed now."""
        flow = self._driver.controller.flows[target]
        known = self._digests.get(target)
        if known is None or known[0] is not flow:
            body = encoding.encode(flow)
            known = self._digests[target] = (flow, hashlib.blake2b(body, digest_size=12).hexdigest(), body)
        return known[1], known[2]

    def start(self, loaded: LoadedRun, now_us: int) -> None:
        row = loaded.row
        current = self._driver.controller.flows.get(row.target)
        if row.deadline_us and row.deadline_us <= now_us:
            self._on_ended(FailCall(row.id, "deadline"))
        elif not row.began_us or row.kind == "function":
            if current is None:
                self._on_ended(Reject(row.id, "unknown"))
            else:
                self._start_new(loaded, now_us)
        elif current is not None and self.flow_digest(row.target)[0] == row.flow:
            self._replay(loaded, current, None)
        else:
            self._store.read(lambda db: stored.read_flow(db, row.flow), lambda body: self._replay_stored_flow(loaded, body))

    def close(self) -> None:
        """Begin no more runs."""
        self._storing.clear()

    def _start_new(self, loaded: LoadedRun, now_us: int) -> None:
        if len(loaded.inputs) <= SLICE_BYTES:
            self._submit(loaded, now_us, _decode_inputs(loaded))
            return
        inputs = msgspec.msgpack.decode(loaded.inputs, type=dict[str, memoryview])
        parts = {name: (blob,) for name, blob in inputs.items()}
        self._storing[loaded.row.id] = loaded
        self._driver.data.store_inputs([parts], lambda calls: self._submit_stored(loaded, now_us, calls[0]))

    def _submit_stored(self, loaded: LoadedRun, now_us: int, inputs: dict[str, Stored]) -> None:
        id = loaded.row.id
        is_wanted = self._storing.get(id) is loaded  # else it has ended meanwhile, and come again
        if is_wanted:
            del self._storing[id]
        if not is_wanted or not self._is_resident(id):
            self._driver.data.free_inputs(inputs)
            return
        try:
            self._submit(loaded, now_us, inputs)
        except Exception as error:
            self._set_aside(id, error)

    def _submit(self, loaded: LoadedRun, now_us: int, inputs: Mapping[str, Stored]) -> None:
        self._driver.submit(self._call(loaded.row, now_us), inputs, self._on_ended, now_us)
        self._mark_started(loaded.row.id, now_us)

    def _replay_stored_flow(self, loaded: LoadedRun, body: bytes | LaminaError | None) -> None:
        if not self._is_resident(loaded.row.id):  # cancelled meanwhile
            return
        try:
            flow = msgspec.convert(encoding.decode(body), Flow) if isinstance(body, bytes) else None
        except (LaminaError, msgspec.MsgspecError):
            flow = None
        if flow is None:
            self._on_ended(Reject(loaded.row.id, "unknown"))
            return
        try:
            self._replay(loaded, flow, flow)
        except Exception as error:
            self._set_aside(loaded.row.id, error)

    def _replay(self, loaded: LoadedRun, flow: Flow, stored_flow: Flow | None) -> None:
        row, driver = loaded.row, self._driver
        again_us = row.again_us - self._origin_us if row.again_us else 0
        driver.recover(
            CallRecovered(self._call(row, row.began_us), stored_flow, again_us),
            flow,
            _decode_inputs(loaded),
            self._on_ended,
            row.began_us,
        )
        for journaled in loaded.journal:
            if not self._is_resident(row.id):
                return
            driver.data.replay_outcome(row.id, journaled.entry, journaled.value)
            self._apply(row.id, journaled.number, shift_times(journaled.entry, -self._origin_us))
        driver.post(ReplayDone(row.id, again_us))
        self._mark_started(row.id, row.began_us)

    def _call(self, row: RunRow, began_us: int) -> Call:
        until_us = row.deadline_us - self._origin_us if row.deadline_us else NEVER_US
        options = (row.tenant, row.priority, row.cost_limit, row.size_bytes)
        return Call(row.id, row.target, began_us - self._origin_us, until_us, until_us, *options, durable=True)

    def _mark_started(self, id: str, now_us: int) -> None:
        """Record the start of a run that has not ended at once; together with all that start in this turn of the loop."""
        if self._is_resident(id):
            if not self._started:
                asyncio.get_running_loop().call_soon(self._write_started, now_us)
            self._started.append(id)

    def _write_started(self, now_us: int) -> None:
        ids, self._started = self._started, []
        self._store.write(lambda db: stored.mark_running(db, ids, now_us), required=True)


def pack_inputs(inputs: Mapping[str, Parts]) -> list[bytes | memoryview]:
    """Inputs as they are stored, in parts that need not be put together yet: what `msgspec.msgpack.encode` makes of them."""
    packed: list[bytes | memoryview] = [b"\xdf" + len(inputs).to_bytes(4, "big")]
    for name, parts in inputs.items():
        packed += (msgspec.msgpack.encode(name), b"\xc6" + size_of(parts).to_bytes(4, "big"), *parts)
    return packed


def _decode_inputs(loaded: LoadedRun) -> dict[str, bytes]:
    return msgspec.msgpack.decode(loaded.inputs, type=dict[str, bytes])


def shift_times(entry: JournalEntry, by_us: int) -> JournalEntry:
    """A journal entry with its times shifted between wall clock and controller clock."""
    return msgspec.structs.replace(
        entry,
        at_us=entry.at_us + by_us,
        queued_us=entry.queued_us + by_us if entry.queued_us else 0,
        began_us=entry.began_us + by_us if entry.began_us else 0,
    )
