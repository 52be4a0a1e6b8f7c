"""Leadership: of the servers on one store one leads and the others stand by; what changes with the lead.

A server leads when its store says so (`store.term`). Only then does it read what the store has: users, deployed apps, state,
durable runs and triggers; nothing that it knew before counts. One that has lost the lead is of no more use: it takes nothing
more, leaves all runs to its successor, and is to be started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from lamina.access.access_control import AccessControl
from lamina.bootstrap import ServingRuntime
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import DurableRuns
from lamina.errors import LaminaError, NotLeader, StoreDown
from lamina.gateway.auth import sync_tenant_limits
from lamina.gateway.routes.targets import TargetRegistry
from lamina.sdk.app import App
from lamina.server.process_status import ProcessStatus
from lamina.state.brokers import Broker
from lamina.state.triggers import Triggers, open_triggers
from lamina.store.base import Store

log = logging.getLogger("lamina")

TRIGGERS_S = 2.0
"""How long a server that begins to lead waits for the triggers in its store."""

USERS_S = 2.0
"""How often a standby reads users and tokens."""

Prepare = Callable[[App, RealtimeDriver, TargetRegistry], Awaitable[Callable[[Triggers], None]]]
"""Deploys what an earlier server had deployed, before any call comes, new or left over; returns what is to get the triggers."""


class Leadership:
    """Role of this server among those on its store. Owner of what only a leader has: its triggers."""

    def __init__(
        self,
        runtime: ServingRuntime,
        store: Store | None,
        access: AccessControl | None,
        durable: DurableRuns | None,
        targets: TargetRegistry,
        process: ProcessStatus,
        prepare: Prepare | None,
        brokers: Sequence[Broker],
    ) -> None:
        self.triggers: Triggers | None = None  #: of a server that leads
        self.deposed = asyncio.Event()  #: another server leads: this one is of no more use, and is to be started again
        self._runtime = runtime
        self._state = runtime.state
        self._store = store
        self._access = access
        self._durable = durable
        self._targets = targets
        self._process = process
        self._prepare = prepare
        self._brokers = brokers
        engine = runtime.driver.engine
        self._cluster = engine if isinstance(engine, ClusterEngine) else None
        self._url = ""  #: where it listens, as soon as it does
        self._on_triggers: list[Callable[[Triggers], None]] = []
        self._has_limits = self._is_serving_apps = self._is_active = self._is_taking_over = False
        self._tasks: list[asyncio.Task[None]] = []  #: of a standby
        if store is not None:
            store.watch(self._on_term)

    def listens_at(self, url: str) -> None:
        """Advertise where calls are taken; a term that came while the ports were opened begins now."""
        self._url = url
        if self._store is not None:
            self._store.advertise(url)
            if self._store.term and not self._is_active:
                self._on_term(self._store.term)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.triggers is not None:
            self.triggers.close()
            await self.triggers.closed()

    async def take_role(self) -> None:
        """Lead, stand by, or serve calls alone: a store that cannot be used now keeps no runs, but a call needs none."""
        store = self._store
        if store is not None and store.exists:
            store.start()
            await store.opened()
            if not store.term:
                down = store.down
                self._state.set_down(down or StoreDown(f"store {store.name}: it does not answer", hint="try again later"))
                if isinstance(down, NotLeader):
                    self._process.stand_by(self._not_leader)
                    if self._cluster is not None:
                        self._cluster.stand_by(self._not_leader)
                    self._tasks.append(asyncio.create_task(self._follow_users()))
                else:  # users and deployed apps follow when it can be read: see `_on_term`
                    with contextlib.suppress(StoreDown):
                        await self._serve_apps()
                return
        elif store is not None:
            store.expect_none()  # if another server makes it meanwhile, what this one believes is of no more use
        await self._activate()

    def _on_term(self, term: int) -> None:
        """The store says that this server leads, or no longer does."""
        store = self._store
        assert store is not None
        if not term:
            if self._is_active:
                self._step_down()
        elif self._is_active or (self._is_serving_apps and self._prepare is not None and store.succeeds):
            if store.succeeds:  # another server has led since this one began to serve
                self._step_down()
        elif self._url and not self._process.is_closing and not self._is_taking_over:
            self._is_taking_over = True
            self._tasks.append(asyncio.create_task(self._take_over()))

    async def _follow_users(self) -> None:
        """Keep up with tokens while standing by: a token the leader takes must not be refused here as unknown."""
        while self._process.is_standby and self._access is not None:
            await asyncio.sleep(USERS_S)
            with contextlib.suppress(LaminaError):
                await self._access.load()

    async def _take_over(self) -> None:
        assert self._store is not None
        try:
            await self._activate()
            self._store.advertise(self._url)
            log.warning("this server leads now")
        except Exception:
            log.exception("the lead cannot be taken over")
            self._step_down()

    async def _activate(self) -> None:
        """Read all there is in the store, and only then serve: nothing that was known before counts."""
        store = self._store
        await self._serve_apps()
        if self._durable is not None:
            await self._state.open(self._durable.store)
            self._durable.open()
        self.triggers = open_triggers(
            *(self._runtime.app, self._state, self._runtime.driver, self._durable, self._brokers),
            lambda name: any(target.name == name for target in self._targets.all),
        )
        for then in self._on_triggers:
            then(self.triggers)
        if not self.triggers.opened.is_set():  # with a store that does not answer, calls need none of them
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.triggers.opened.wait(), TRIGGERS_S)
            if self._access is not None and store is not None and store.exists:
                await self._access.load(afresh=True)  # others may have made users and tokens meanwhile
        self._is_active = True
        if store is None or store.term or not store.exists:
            self._process.lead()
            if self._cluster is not None:
                self._cluster.lead(store.term if store is not None else 0)
        else:
            self._step_down()  # the lead was lost while all of it was read

    async def _serve_apps(self) -> None:
        """Serve users and apps as the store has them now."""
        if self._access is not None:
            if self._store is not None and self._store.exists:
                await self._access.load(afresh=True)
            if not self._has_limits:
                self._has_limits = True
                sync_tenant_limits(self._access, self._runtime.driver)
        if self._prepare is not None and not self._is_serving_apps:
            self._on_triggers.append(await self._prepare(self._runtime.app, self._runtime.driver, self._targets))
        self._is_serving_apps = True

    def _step_down(self) -> None:
        """Another server leads: take nothing more, start nothing more, and leave all runs to it."""
        if self.deposed.is_set() or self._process.is_closing:
            return
        self._process.stand_by(self._not_leader)
        if self._cluster is not None:
            self._cluster.stand_by(self._not_leader)
        if self.triggers is not None:
            self.triggers.close()
        if self._durable is not None:
            self._durable.abandon()
        self._state.set_down(self._not_leader())
        self.deposed.set()

    def _not_leader(self) -> NotLeader:
        """The refusal of a standby, with the leader's address as it is known now."""
        known = self._store.leader if self._store is not None else ""
        hint = f"ask {known}" if known else "ask that one, or try again in a moment"
        return NotLeader(f"this server stands by; another leads{f', at {known}' if known else ''}", leader=known, hint=hint)
