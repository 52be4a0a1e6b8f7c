"""Routes of durable runs, `/v1/runs`: accepted with 202, read, awaited, cancelled and retried; and their history.

The history of a run is its journal as events in the order of time, for people and plots. An event has a `kind` ("accepted",
"began", "step", "waits" for a report, "wait", "pause", "timeout", "tried-again", "ended"), and microseconds since 1970. Steps
have `queued_us`, `began_us`, `ended_us`, their slice and batch size; `undone` ones failed the run and were tried again. With
`?values=1` they have their `value` as well, as text.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from lamina import encoding
from lamina.access.authorization import Grant
from lamina.access.records import Identity
from lamina.core.actions import Reply
from lamina.durable.recovery import pack_inputs
from lamina.durable.runs import DurableRuns
from lamina.errors import BadValue, LaminaError, checked_text
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.codec_pool import FLAT_BYTES, CodecPool, is_heavy_result
from lamina.gateway.routes.problems import PROBLEM, answered, error_problem, respond_problem, stored_problem
from lamina.gateway.routes.request_options import RequestOptions
from lamina.gateway.routes.targets import CallTarget
from lamina.ipc.sliced_copies import Parts, size_of
from lamina.server.exchange import Exchange, HttpRequest
from lamina.state.trigger_starts import KEY_PREFIX
from lamina.store import runs as stored
from lamina.store.base import Done, Session, Work
from lamina.store.runs import OVER, QUARANTINED, SETTLED, STATES, JournalRow, RunRow

MAX_KEY = 255
MAX_PAGE = 500
MAX_WAIT_MS = 60_000
MAX_VALUE_BYTES, MAX_VALUE_CHARS = 65_536, 1_000
"""Of the value of a step in a history."""

T = TypeVar("T")

RunAction = Callable[[RunRow, HttpRequest, Exchange, Grant], None]

_ID = re.compile(r"[0-9a-f]{24}")
_OF_TRIGGERS = re.compile(rf"{KEY_PREFIX}[0-9a-f]+")
"""Idempotency keys that triggers start runs with."""


def prefers_async(request: HttpRequest) -> bool:
    """`Prefer: respond-async` (RFC 7240). No other preference means anything here."""
    prefer = request.headers.get(b"prefer")
    return prefer is not None and b"respond-async" in [one.split(b";")[0].strip().lower() for one in prefer.split(b",")]


class RunRoutes:
    """Routes of durable runs."""

    def __init__(
        self,
        durable: DurableRuns,
        owner_of: Callable[[str], str] = lambda target: "",
        codecs: CodecPool | None = None,
    ) -> None:
        """`owner_of` tells the tenant of a target: what its code said is for that tenant's deployers."""
        self._durable = durable
        self._owner_of = owner_of
        self._codecs = codecs
        self.routes: dict[str, Callable[..., None]] = {
            "GET /v1/runs": self._list,
            "GET /v1/runs/{run}": partial(self._on_run, self._show),
            "GET /v1/runs/{run}/result": partial(self._on_run, self._result),
            "GET /v1/runs/{run}/history": partial(self._on_run, self._history),
            "POST /v1/runs/{run}/cancel": partial(self._on_run, self._cancel),
            "POST /v1/runs/{run}/retry": partial(self._on_run, self._retry),
        }

    # --------------------------------------------------------------------- accepting

    def wall_us(self) -> int:
        """Time since 1970 by the clock that deadlines of runs are kept by: it does not jump with that of the machine."""
        return self._durable.wall_us()

    def accept(
        self,
        target: CallTarget,
        request: HttpRequest,
        exchange: Exchange,
        caller: Identity,
        wishes: RequestOptions,
        decoded: http_codec.DecodedBody | None = None,
    ) -> None:
        given = http_codec.decode_inputs(request, target.params) if decoded is None else decoded.claim()
        inputs: dict[str, Parts] = {name: (one,) if isinstance(one, bytes) else one for name, one in given.items()}
        size = len(request.body) if decoded is None else decoded.size
        key = request.header(b"idempotency-key").decode("latin-1")
        if len(key) > MAX_KEY or not key.isprintable():
            raise BadValue(f"idempotency-key: {key[:40]!r} cannot be used", hint=f"up to {MAX_KEY} printable characters")
        if _OF_TRIGGERS.fullmatch(key):  # with it, who may only call could keep a trigger from starting anything
            raise BadValue(f"idempotency-key: {key!r} is one that triggers use", hint="choose another")
        deadline_us, priority, cost_limit, objective = wishes
        if objective:
            raise BadValue("lamina-objective: for calls only", hint="a run has the objectives of its functions: leave it out")
        row = RunRow(
            "", target.kind, target.name, caller.tenant, "", priority, cost_limit, size, 0, deadline_us, 0, 0, ""
        )  # fmt: skip

        def done(accepted: RunRow | LaminaError) -> None:
            if isinstance(accepted, LaminaError):
                self._problem(exchange, accepted)
                return
            extra = b"location: /v1/runs/%s\r\npreference-applied: respond-async\r\n" % accepted.id.encode()
            exchange.respond(202, msgspec.json.encode(run_summary(accepted)), http_codec.JSON, extra)

        def accept(digest: str, packed: bytes) -> None:
            self._durable.accept(row, packed, key, digest, answered(exchange, done))

        def pack(digest: str) -> None:
            parts = pack_inputs(inputs)
            self._durable.copies.join(parts, answered(exchange, partial(accept, digest)), size_of(parts))

        label = f"{target.kind}/{target.name}\n".encode()
        if size <= FLAT_BYTES:
            accept(_digest(label, inputs), b"".join(pack_inputs(inputs)))
            return
        work = asyncio.get_running_loop().run_in_executor(None, _digest, label, inputs)
        work.add_done_callback(answered(exchange, lambda made: pack(made.result())))

    # ----------------------------------------------------------------------- looking

    def _on_run(self, act: RunAction, request: HttpRequest, exchange: Exchange, grant: Grant, id: str) -> None:
        if not _ID.fullmatch(id):
            raise stored.run_not_found(id)

        def found(row: RunRow | LaminaError) -> None:
            if isinstance(row, LaminaError):
                self._problem(exchange, row)
            else:
                grant.check_owner(row.tenant, stored.run_not_found(row.id))
                act(row, request, exchange, grant)

        self._durable.start()
        self._read(exchange, lambda db: stored.get(db, id), found)

    def _read(self, exchange: Exchange, work: Work[T], done: Done[T]) -> None:
        """Read from the store, and answer whatever is found there."""
        self._durable.store.read(work, answered(exchange, done))

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        query = http_codec.parse_query(request, ("target", "state", "before", "limit"))
        checked_text("target", query.get("target", ""))
        if query.get("before") and not _ID.fullmatch(query["before"]):
            raise BadValue(f"before: {query['before'][:40]!r} is no run", hint="give the `next` of the page before")
        if query.get("state", "failed") not in STATES:
            raise BadValue(f"state: {query['state'][:40]!r} is no state of a run", hint=f"one of {', '.join(STATES)}")
        limit = http_codec.query_int(query, "limit", 50, MAX_PAGE, least=1)

        def work(db: Session) -> list[tuple[RunRow, bytes | None]]:
            target, state, before = query.get("target", ""), query.get("state", ""), query.get("before", "")
            rows = stored.list_runs(db, grant.tenant, target=target, state=state, before=before, limit=limit + 1)
            return [(row, stored.read_outcome(db, row.id)[1].problem if row.state == QUARANTINED else None) for row in rows]

        def done(rows: list[tuple[RunRow, bytes | None]] | LaminaError) -> None:
            if isinstance(rows, LaminaError):
                self._problem(exchange, rows)
                return
            last = rows[limit - 1][0].id if len(rows) > limit else None  # one more was asked for than is shown
            rows = rows[:limit]
            shown = [
                run_summary(row) | ({"problem": msgspec.Raw(self._shown_problem(row, problem, grant))} if problem else {})
                for row, problem in rows
            ]
            exchange.respond(200, msgspec.json.encode({"runs": shown, "next": last}))

        self._durable.start()
        self._read(exchange, work, done)

    def _show(self, row: RunRow, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        def done(found: tuple[RunRow, stored.StoredOutcome] | LaminaError) -> None:
            if isinstance(found, LaminaError):
                self._problem(exchange, found)
                return
            row, ending = found
            shown = run_summary(row)
            if ending.problem is not None:
                shown["problem"] = msgspec.Raw(self._shown_problem(row, ending.problem, grant))
            if ending.about is not None:
                reply = msgspec.json.decode(ending.about, type=Reply)
                shown |= {"cost": reply.cost, "step_retries": reply.retries}
            exchange.respond(200, msgspec.json.encode(shown))

        self._read(exchange, lambda db: stored.read_outcome(db, row.id), done)

    def _result(self, row: RunRow, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        """The result now, or within `wait_ms`; 202 if it is not there by then."""
        wait_ms = http_codec.query_int(http_codec.parse_query(request, ("wait_ms",)), "wait_ms", 0, MAX_WAIT_MS)
        waiting = _Waiting()

        def look() -> None:
            self._read(exchange, lambda db: stored.read_outcome(db, row.id), done)

        def done(found: tuple[RunRow, stored.StoredOutcome] | LaminaError) -> None:
            if isinstance(found, LaminaError):
                waiting.stop()
                self._problem(exchange, found)
            elif found[0].state in SETTLED or not waiting.on:
                waiting.stop()
                self._answer(*found, request, exchange, grant)

        if wait_ms:
            waiting.begin(wait_ms / 1000, look, lambda woken: self._durable.on_completed(row.id, woken))
            exchange.when_disconnected(waiting.stop)
        look()

    def _answer(self, row: RunRow, ending: stored.StoredOutcome, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        extra = b"lamina-run-id: %s\r\n" % row.id.encode()
        if ending.result is not None:
            if ending.about is not None:
                extra += http_codec.reply_headers(msgspec.json.decode(ending.about, type=Reply))
            if self._codecs is not None and is_heavy_result(ending.result, request.header(b"accept")):
                then = partial(self._on_encoded, exchange, extra)
                self._codecs.encode_result(ending.result, request.header(b"accept"), answered(exchange, then))
                return
            try:
                status, body, kind, own = http_codec.encode_result(ending.result, request.header(b"accept"))
            except LaminaError as error:
                self._problem(exchange, error)
                return
            exchange.respond(status, body, kind, extra + own)
        elif ending.problem is not None:
            status = msgspec.json.decode(ending.problem)["status"]
            exchange.respond(status, self._shown_problem(row, ending.problem, grant), PROBLEM, extra)
        else:
            exchange.respond(202, msgspec.json.encode(run_summary(row)), http_codec.JSON, extra + b"retry-after: 1\r\n")

    def _on_encoded(self, exchange: Exchange, extra: bytes, found: dict[str, bytes] | LaminaError) -> None:
        if isinstance(found, LaminaError):
            self._problem(exchange, found)
        else:
            exchange.respond(int(found["status"]), found["body"], found["kind"], extra + found["extra"])

    def _history(self, row: RunRow, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        with_values = b"values=1" in request.query.split(b"&")

        def work(db: Session) -> bytes:
            now, ending = stored.read_outcome(db, row.id)
            reply = None if ending.about is None else msgspec.json.decode(ending.about, type=Reply)
            events = run_events(now, stored.read_journal(db, row.id, all=True, values=with_values), reply)
            return msgspec.json.encode(run_summary(now) | {"events": events})

        self._read(exchange, work, lambda body: self._body(exchange, 200, body))

    # ------------------------------------------------------------------------ acting

    def _cancel(self, row: RunRow, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        def done(error: LaminaError | None) -> None:
            if error is not None:
                self._problem(exchange, error)
            else:
                self._show(row, request, exchange, grant)

        self._durable.cancel(row.id, answered(exchange, done))

    def _retry(self, row: RunRow, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        def done(again: RunRow | LaminaError) -> None:
            self._body(exchange, 202, again if isinstance(again, LaminaError) else msgspec.json.encode(run_summary(again)))

        self._durable.retry(row.id, answered(exchange, done))

    def _body(self, exchange: Exchange, status: int, body: bytes | LaminaError) -> None:
        if isinstance(body, LaminaError):
            self._problem(exchange, body)
        else:
            exchange.respond(status, body)

    def _shown_problem(self, row: RunRow, problem: bytes, grant: Grant) -> bytes:
        return stored_problem(problem, grant.caller, self._owner_of(row.target))

    def _problem(self, exchange: Exchange, error: LaminaError) -> None:
        respond_problem(exchange, error_problem(error))


class _Waiting:
    """A long poll: ends with the run, or at its timeout."""

    def __init__(self) -> None:
        self.on = False
        self._undo: list[Callable[[], None]] = []

    def begin(self, wait_s: float, look: Callable[[], None], listen: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        self.on = True

        def late() -> None:
            self.on = False
            look()

        self._undo = [asyncio.get_running_loop().call_later(wait_s, late).cancel, listen(look)]

    def stop(self) -> None:
        self.on = False
        for undo in self._undo:
            undo()
        self._undo = []


def run_summary(row: RunRow) -> dict[str, Any]:
    """A run as clients see it. Times are microseconds since 1970."""
    shown: dict[str, Any] = {"id": row.id, "state": row.state, "kind": row.kind, "target": row.target}
    if row.tenant:
        shown["tenant"] = row.tenant
    for field in ("created_us", "began_us", "ended_us", "deadline_us", "priority", "retries"):
        if value := getattr(row, field):
            shown[field] = value
    return shown


def _digest(label: bytes, inputs: Mapping[str, Parts]) -> str:
    """Tells runs of one idempotency key apart. Of large inputs it is made by a thread: the interpreter is not held meanwhile."""
    digest = hashlib.blake2b(label, digest_size=16)
    for name, parts in sorted(inputs.items()):
        digest.update(b"%d %s %d " % (len(name), name.encode(), size_of(parts)))
        for part in parts:
            digest.update(part)
    return digest.hexdigest()


# ------------------------------------------------------------------------- history


def run_events(row: RunRow, journal: list[JournalRow], reply: Reply | None = None) -> list[dict[str, Any]]:
    """The events of a run. `reply` is the outcome of a successful one; a run of one step has no journal beside it."""
    events: list[dict[str, Any]] = [{"kind": "accepted", "at_us": row.created_us}]
    if row.began_us:
        events.append({"kind": "began", "at_us": row.began_us})
    events += [_event(kept) for kept in journal]
    if reply is not None and reply.slice and not journal:
        times = {"queued_us": row.began_us, "began_us": row.began_us + reply.queue_us, "ended_us": row.ended_us}
        place = {"function": row.target, "ok": True, "slice": reply.slice, "batch": reply.batch}
        events.append({"kind": "step", "at_us": row.ended_us, "step": row.target, "scope": 0, **place, **times})
    if row.again_us:
        events.append({"kind": "tried-again", "at_us": row.again_us, "times": row.retries})
    if row.state in OVER:
        events.append({"kind": "ended", "at_us": row.ended_us, "state": row.state})
    return sorted(events, key=lambda event: event.get("ended_us") or event["at_us"])


def _event(kept: JournalRow) -> dict[str, Any]:
    note = kept.entry
    event: dict[str, Any] = {"kind": "step", "at_us": note.at_us, "step": note.node, "scope": note.scope}
    if note.attempt:
        event["attempt"] = note.attempt
    if note.kind == "due":
        event["kind"] = "timeout" if note.purpose != "resume" else "pause" if note.attempt else "wait"
        event |= {"began_us": note.queued_us, "ended_us": note.at_us}
        return event
    if note.kind == "waits":
        event["kind"] = "waits"
        event |= {"function": note.function, "queued_us": note.queued_us, "ended_us": note.at_us}
        return event
    event |= {"function": note.function, "ok": note.kind == "done", "queued_us": note.queued_us, "ended_us": note.at_us}
    if note.began_us:
        event |= {"began_us": note.began_us, "slice": note.slice, "batch": note.batch}
    if note.error:
        event["error"] = note.name or note.error
    if kept.undone:
        event["undone"] = True
    if kept.value is not None:
        event["value"] = _shown_value(kept.value)
    return event


def _shown_value(blob: bytes) -> str:
    """The value of a step as text, as far as it is short: a history is to be read."""
    if len(blob) > MAX_VALUE_BYTES:
        return f"{len(blob)} bytes"
    try:
        return encoding.to_json(encoding.decode(blob)).decode()[:MAX_VALUE_CHARS]
    except LaminaError:
        return f"{len(blob)} bytes"
