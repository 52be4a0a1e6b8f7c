"""Agent: the engines of one machine, behind a socket. `lamina agent` is this and nothing more.

It joins the server that leads, runs what it is told on its devices, and says what came of it. It decides nothing but when not
to: it obeys the highest epoch it has seen, keeps nothing of an incarnation that has ended but what is loaded, and starts
nothing when it has not heard from its leader for too long. Whatever happens to the leader, instances stay: the next one adopts
them.

    leader_search.py    which server leads, and the handshake with it
    leader_session.py   its connection to one leader
    node_batches.py     batches, each from its frame to its result
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lamina.cluster.credentials import proof
from lamina.cluster.data_port import DataPort, announced
from lamina.cluster.leader_search import LeaderSearch, Refusal
from lamina.cluster.leader_session import AgentConfig, LeaderSession
from lamina.cluster.messages import (
    AdoptOnNode,
    CommitAnswer,
    DrainBegun,
    DrainNode,
    DropOnNode,
    Goodbye,
    Hello,
    InputOnNode,
    JoinRefused,
    KillOnNode,
    LoadedInstance,
    LoadOnNode,
    LostOnNode,
    MachineLost,
    OutputOnNode,
    PackageStored,
    ReadyOnNode,
    ReleaseValues,
    ReportOnNode,
    ResizeOnNode,
    RunOnNode,
    SegmentedOnNode,
    StateAnswer,
    UnloadOnNode,
    WantsToLeave,
    WatchOnNode,
)
from lamina.cluster.node_batches import NodeBatches
from lamina.cluster.node_values import LeaderState
from lamina.cluster.packages import PackageStore
from lamina.cluster.value_fetcher import ValueFetcher
from lamina.core.actions import Kill, Load, Resize, Unload
from lamina.core.events import (
    BatchFailed,
    BatchFinished,
    BatchPaused,
    Event,
    Heartbeat,
    InstanceLost,
    InstanceReady,
    InstanceSegmented,
)
from lamina.drivers.engine import Engine, EngineShared, TargetSource
from lamina.engines.app_environments import AppEnvironments
from lamina.engines.composite import CompositeEngine
from lamina.errors import BadValue, LaminaError, LoadFailed
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError, read_mask, wire_mask
from lamina.sdk.model_bundle import PACKED
from lamina.types import FunctionSpec
from lamina.values.references import ErrorInfo, NodeRef
from lamina.values.slot_refs import SlotReferences

log = logging.getLogger("lamina")

LAG_EVERY_S = 0.05
REPORT_EVERY_S = 1.0
_ENTRY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.py(:[A-Za-z_][A-Za-z0-9_]*)?")


class NodeShared(EngineShared):
    """What the engines of a node share. Every function brings its own environment and spec from the leader."""

    def __init__(self) -> None:
        self._specs: dict[str, FunctionSpec] = {}
        self._environments: dict[str, dict[str, str]] = {}
        super().__init__(spec_of=self._specs.get)

    def describe(self, spec: FunctionSpec, source: TargetSource, environment: dict[str, str]) -> None:
        self._specs[spec.name] = spec
        self._environments[spec.name] = environment
        self.set_sources({**self.sources, spec.name: source})

    def environment(self, function: str) -> dict[str, str]:
        return self._environments.get(function, {})


@dataclass(slots=True, eq=False)
class _Instance:
    local: str
    name: str  #: that the leader has for it; "": none of the leader there is
    function: str
    device: str
    version: str
    sha256: str
    mask: int
    quota: float
    is_ready: bool = False
    segment_us: int = 0  #: its batches can be paused after so long


class Agent:
    """One agent. Built complete; `run` is its life."""

    def __init__(
        self,
        config: AgentConfig,
        engine: Engine,
        shared: NodeShared,
        state: LeaderState,
        packages: PackageStore,
        environments: AppEnvironments,
    ) -> None:
        self.config = config
        self.client_tls = config.tls.for_client()
        self.boot_us = time.time_ns() // 1000
        self.session: LeaderSession | None = None
        references = engine.references
        assert references is not None, "an agent without shared memory"
        self._references: SlotReferences = references
        self._engine, self._shared, self._state, self._packages = engine, shared, state, packages
        self._environments = environments
        self._instances: dict[str, _Instance] = {}  #: by this agent's own name
        self._instance_numbers = itertools.count(1)
        self._fetcher = ValueFetcher(self.client_tls, references.pool)
        self._batches = NodeBatches(engine, references, self._fetcher)
        self._data_port: DataPort | None = None
        self._turn_us = clock_us()  #: when the event loop last had a turn
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._epochs_file = config.folder / "epochs.json"
        self._epochs = _read_epochs(self._epochs_file)
        self._is_leaving = False  #: it is to be drained, whichever server leads
        self._search = LeaderSearch(config.joins, lambda address: LeaderSession(self, address), lambda: self._has_leader)

    # ---------------------------------------------------------------------- life

    async def run(
        self, stop: asyncio.Event, *, on_joined: Callable[[LeaderSession], None] | None = None, grace_s: float = 30.0
    ) -> None:
        """Serve until `stop`, or until the leader has drained this node; then finish what runs and end."""
        config = self.config
        self._shared.subscribe_output(self._on_output)
        batches = self._batches
        self._shared.trace(lambda job, batch_id: batches.values.origin(job), batches.on_spans)
        await self._engine.start(self._on_event, batches.values, batches.deadline_us)
        tls = config.tls.for_server()
        self._data_port = DataPort(
            *(self._references.directory.path, config.host, config.port, tls), batches.is_held, only_own=not config.token
        )
        lag, reports = asyncio.create_task(self._track_lag()), asyncio.create_task(self._report_executors())
        seek = asyncio.create_task(self._stay_joined(on_joined))
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._done)]
        try:
            await asyncio.wait([*waits, seek], return_when=asyncio.FIRST_COMPLETED)
            if seek.done():
                await seek  # raises what it failed with
            if not self._done.is_set():
                await self._leave(grace_s)
        finally:
            for task in (lag, reports, seek, *waits, *self._tasks):
                task.cancel()
            await asyncio.gather(lag, reports, seek, *waits, *self._tasks, return_exceptions=True)
            session, self.session = self.session, None
            if session is not None:
                with contextlib.suppress(LaminaError):
                    session.send(Goodbye())
                session.close()
            self._data_port.close()
            await self._fetcher.close()
            await self._engine.stop(min(5.0, grace_s))

    async def _leave(self, grace_s: float) -> None:
        """Ask to be drained, and wait for it."""
        self._is_leaving = True
        if self.session is not None and self.session.is_live:
            self.session.send(WantsToLeave())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), grace_s)

    async def _track_lag(self) -> None:
        while True:
            self._turn_us = clock_us()
            await asyncio.sleep(LAG_EVERY_S)
            session = self.session
            if session is not None and session.beats is not None and session.beats.is_fenced:
                log.warning("no word from the leader for too long: nothing more is started")
                session.close()
            elif session is not None and session.is_silent:
                self._wake.set()

    async def _report_executors(self) -> None:
        """Tell the leader now and then how the processes are that own this node's GPUs."""
        while isinstance(self._engine, CompositeEngine):
            await asyncio.sleep(REPORT_EVERY_S)
            reports = self._engine.executor_reports()
            if reports and self.session is not None:
                self.session.send(*(ReportOnNode(device, report) for device, report in reports.items()))

    def lag_us(self) -> int:
        """How late the event loop is; asked by the beats' thread."""
        return clock_us() - self._turn_us - int(LAG_EVERY_S * 1e6)

    @property
    def _has_leader(self) -> bool:
        return self.session is not None and self.session.is_live and not self.session.is_silent

    async def _stay_joined(self, on_joined: Callable[[LeaderSession], None] | None) -> None:
        """Join, and join again, as long as this lives. While its leader is silent, others are asked: one may lead by now."""
        while True:
            found = await self._search.find()
            if found is not None:
                log.info("joined the server at %s: epoch %d, incarnation %d", found.address, found.epoch, found.incarnation)
                if on_joined is not None:
                    on_joined(found)
            self._wake.clear()
            if self._has_leader:
                await self._wake.wait()

    # ------------------------------------------------------------------ handshake

    def check_epoch(self, cell: str, epoch: int) -> None:
        """Obey no leader that is older than one seen before, nor another while there is one."""
        current = self.session
        if epoch < self._epochs.get(cell, 0):
            raise Refusal(
                f"the server leads in epoch {epoch}; this agent has seen {self._epochs[cell]}",
                hint=f"it is a leader of before. If its store is a new one, remove {self._epochs_file}",
                code="old-epoch",
            )
        if current is not None and current.is_live:
            if cell == current.cell and epoch <= current.epoch and not current.is_silent:
                raise Refusal("this agent has a leader", code="has-leader")
            if cell == current.cell and epoch == current.epoch:
                raise Refusal("this agent has a session with that leader", code="has-leader")
            if cell != current.cell and not current.is_silent:
                raise Refusal("this agent has another leader", code="has-leader")

    def hello(self, token: bytes, challenge: bytes, nonce: bytes) -> Hello:
        config = self.config
        loaded = [
            LoadedInstance(
                *(one.local, one.function, one.device, one.version, one.sha256, wire_mask(one.mask), one.quota),
                *(self._batches.work_left(one.local), one.segment_us),
            )
            for one in self._instances.values()
            if one.is_ready
        ]
        said = proof(token, "agent", challenge, nonce, config.name, self.boot_us)
        devices = list(self._engine.devices)
        return Hello(config.name, self.boot_us, nonce, said, self.data_address, devices, loaded, self._packages.stored())

    @property
    def data_address(self) -> str:
        assert self._data_port is not None
        return self.config.advertise or announced(self.config.host, self._data_port.port)

    def adopt_session(self, session: LeaderSession) -> None:
        """Follow this leader from now on."""
        before, self.session = self.session, session
        if before is not None:
            self._end_session(before)
            before.close()
        if self._epochs.get(session.cell) != session.epoch:
            self._epochs = {session.cell: session.epoch} if session.cell else {**self._epochs, session.cell: session.epoch}
            try:
                _write_epochs(self._epochs_file, {cell: epoch for cell, epoch in self._epochs.items() if not cell})
            except OSError as error:  # better to serve: this process knows the epoch, and the store refuses a leader of before
                log.error("the epoch %d cannot be kept in %s: %s", session.epoch, self._epochs_file, error)
        self._batches.follow(session)
        self._state.connect(session.send, self._batches.commit)
        assert self._data_port is not None and session.key is not None
        self._data_port.set_keys(session.key)
        for instance in self._instances.values():
            instance.name = ""
        if self._is_leaving:  # the leader of before knew
            session.send(WantsToLeave())

    def on_session_closed(self, session: LeaderSession, why: str) -> None:
        if session is not self.session:
            return
        log.warning("the link to the leader at %s has ended: %s", session.address, why)
        self.session = None
        self._end_session(session)
        session.close()
        self._wake.set()

    def _end_session(self, session: LeaderSession) -> None:
        """What a leader has asked for is of no more use when it is gone; what is loaded stays for the next."""
        self._batches.end_session(session)
        self._state.disconnect()  # its batches are void by now
        for instance in list(self._instances.values()):
            instance.name = ""
            if not instance.is_ready:
                del self._instances[instance.local]
                self._engine.perform(Unload(instance.local))

    # --------------------------------------------------------------------- frames

    def on_frame(self, session: LeaderSession, frame: Any) -> None:
        if session is not self.session:
            return
        match frame:
            case RunOnNode():
                instance = self._named(session, frame.instance)
                is_fenced = session.beats is not None and session.beats.is_fenced  # this machine is not the leader's any more
                if instance is not None and not is_fenced:  # else it is lost, and the leader is about to hear of it
                    self._batches.run(session, frame, instance.local)
            case WatchOnNode():
                instance = self._named(session, frame.instance)
                if instance is not None:
                    self._batches.watch(session, frame, instance.local)
            case LoadOnNode():
                self._spawn(self._load(session, frame, self._add_instance(session, frame)))
            case AdoptOnNode():
                instance = self._instances.get(frame.loaded)
                if instance is None:  # lost since the hello
                    session.send(LostOnNode(frame.instance, "worker-lost"))
                else:
                    instance.name = frame.instance
                    session.instances[frame.instance] = instance.local
            case UnloadOnNode():
                instance = self._named(session, frame.instance) or self._instances.get(frame.instance)
                if instance is not None:
                    del self._instances[instance.local]
                    session.instances.pop(instance.name, None)
                    self._engine.perform(Unload(instance.local))
            case KillOnNode():
                instance = self._named(session, frame.instance)
                if instance is not None:
                    self._engine.perform(Kill(instance.local, frame.reason))
            case ResizeOnNode():
                instance = self._named(session, frame.instance)
                if instance is not None:
                    instance.mask, instance.quota = read_mask(frame.mask), frame.quota
                    self._engine.perform(Resize(instance.local, instance.mask, frame.quota))
            case DropOnNode():
                self._batches.drop_job(session, frame.job_id)
            case InputOnNode():
                self._batches.put_input(frame.call_id, frame.value)
            case ReleaseValues():
                self._batches.release(session, frame.slots)
            case MachineLost():
                self._fetcher.drop_machine(frame.address)
            case StateAnswer():
                self._state.on_answer(frame.question, frame.cell)
            case CommitAnswer():
                self._state.on_answer(frame.question, {})
            case DrainBegun():
                self._is_leaving = True
            case DrainNode():
                self._done.set()
            case JoinRefused():
                log.warning("the leader ends the link: %s", frame.message)
            case _:
                raise FrameError(f"{type(frame).__name__} out of turn")

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _named(self, session: LeaderSession, name: str) -> _Instance | None:
        return self._instances.get(session.instances.get(name, ""))

    # ------------------------------------------------------------------ instances

    def _add_instance(self, session: LeaderSession, frame: LoadOnNode) -> _Instance:
        """An instance that is to be loaded. It is known before another frame is read, which may take it back."""
        made = _Instance(
            *(f"{frame.instance}-n{next(self._instance_numbers)}", frame.instance, frame.spec.name, frame.device),
            *(frame.spec.version, frame.source.sha256, read_mask(frame.mask), frame.quota),
        )
        self._instances[made.local] = made
        session.instances[frame.instance] = made.local
        return made

    async def _load(self, session: LeaderSession, frame: LoadOnNode, made: _Instance) -> None:
        """Load a function, once its package is here."""
        spec, code = frame.spec, frame.source
        if self._instances.get(made.local) is not made:
            return  # taken back in the same breath
        try:
            if code.tenant and not self.config.trusts_deployers:
                raise LoadFailed(
                    f"node {self.config.name} takes no code of tenants",
                    hint="start its agent with --trust-deployers if tenants are trusted",
                )
            if not _ENTRY.fullmatch(code.entry) and code.entry != PACKED:
                raise LoadFailed(f"{code.entry[:80]!r} is no Python file of a package")
            if await self._packages.ensure(
                code.sha256, partial(self._fetch_package, session, code.package), self._packages_in_use
            ):
                session.send(PackageStored(code.sha256))
            path = self._packages.path(code.sha256, code.entry)
            python = await self._environments.ensure(Path(path.partition(":")[0]).parent)
            if python and isinstance(self._engine, CompositeEngine):
                self._engine.check_packages(spec, frame.device)
        except (LaminaError, OSError) as error:
            hint = error.hint if isinstance(error, LaminaError) else ""
            if self._instances.pop(made.local, None) is not None and session is self.session:
                said = ErrorInfo(type(error).__name__, getattr(error, "message", str(error)), "", hint)
                session.send(LostOnNode(frame.instance, "load-failed", said))
            return
        if self._instances.get(made.local) is not made:
            return  # unloaded meanwhile
        source = TargetSource(code.app, code.tenant, path, python=python, name=code.name)
        self._shared.describe(spec, source, frame.environment)
        self._engine.perform(Load(made.local, spec.name, frame.device, read_mask(frame.mask), frame.quota))

    def _packages_in_use(self) -> set[str]:
        return {one.sha256 for one in self._instances.values()}

    async def _fetch_package(self, session: LeaderSession, ref: NodeRef | None) -> bytes:
        if ref is None:
            raise LoadFailed("the package is not here, and the leader believed that it was")
        return await self._fetcher.read(session.locate(ref))

    # --------------------------------------------------------------------- events

    def _on_event(self, event: Event) -> None:
        """What the engines report, told to the leader that has asked for it."""
        match event:
            case BatchFinished():
                self._batches.on_finished(event)
            case BatchFailed():
                self._batches.on_failed(event)
            case InstanceReady():
                instance = self._instances.get(event.instance)
                if instance is not None:
                    instance.is_ready = True
                    if instance.name and self.session is not None:
                        self.session.send(ReadyOnNode(instance.name, event.load_us, list(event.probes)))
            case InstanceSegmented():
                instance = self._instances.get(event.instance)
                if instance is not None:
                    instance.segment_us = event.segment_us
                    if instance.name and self.session is not None:
                        self.session.send(SegmentedOnNode(instance.name, event.segment_us))
            case BatchPaused():
                self._batches.on_paused(event)
            case InstanceLost():
                self._on_lost(event)
            case Heartbeat():
                self._batches.on_heartbeat(event)
            case _:
                pass

    def _on_lost(self, event: InstanceLost) -> None:
        instance = self._instances.pop(event.instance, None)
        self._batches.on_instance_lost(event.instance)
        if instance is not None and instance.name and self.session is not None:
            self.session.instances.pop(instance.name, None)
            error = None if instance.is_ready else self._engine.load_errors.get(instance.function)
            self.session.send(LostOnNode(instance.name, event.reason, error))

    def _on_output(self, function: str, local: str, calls: tuple[str, ...], line: str) -> None:
        if self.session is not None:
            instance = self._instances.get(local)
            self.session.send(OutputOnNode(function, instance.name if instance is not None else local, calls, line))


def _read_epochs(file: Path) -> dict[str, int]:
    """Highest epoch seen, by cell; kept over restarts, so that no leader of before is obeyed after one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise BadValue(f"{file}: cannot be read: {error}", hint="remove it if no old leader can be alive") from None


def _write_epochs(file: Path, epochs: dict[str, int]) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(epochs))
    os.replace(fresh, file)
