"""Composition of a server: an app, a policy, an engine, the loop, HTTP and gRPC; started and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from lamina.access.access_control import AccessControl
from lamina.bootstrap import ServingRuntime
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.core.controller import Controller
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Predictor
from lamina.drivers.driver import Ending, EventObserver
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import RETENTION_US, DurableRuns
from lamina.errors import BadValue, LaminaError, NotLeader, StoreDown
from lamina.gateway.auth import Authenticator, sync_tenant_limits
from lamina.gateway.auth import check_host as check_host
from lamina.gateway.ingress.remote_session import FrontDoors
from lamina.gateway.ingress.supervisor import IngressSupervisor
from lamina.gateway.observability.billing import Billing
from lamina.gateway.observability.gauges import CacheCounters, MemoryGauges, RunGauges
from lamina.gateway.observability.logs import RefusalLog
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.tracer import Tracer, attach_call_context
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ModelCatalog
from lamina.gateway.oip.openapi import paths as v2_paths
from lamina.gateway.oip.setup import PREFIX as V2_PREFIX
from lamina.gateway.oip.setup import OpenInference
from lamina.gateway.oip.statistics import ModelStatistics
from lamina.gateway.routes import runs, state
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.codec_pool import CodecPool
from lamina.gateway.routes.cold_start_grace import ColdStartGrace
from lamina.gateway.routes.explain import ExplainRoutes, SampledRefusals
from lamina.gateway.routes.kernels import BufferRoutes, KernelRoutes
from lamina.gateway.routes.openapi import document
from lamina.gateway.routes.prediction_cache import PredictionCache, PredictionStore
from lamina.gateway.routes.problems import caller_problem, ending_problem, parse_error_body
from lamina.gateway.routes.request_options import OWN_HEADERS
from lamina.gateway.routes.router import Router
from lamina.gateway.routes.sessions import SessionRoutes
from lamina.gateway.routes.sockets import SocketRoutes
from lamina.gateway.routes.targets import TargetRegistry, call_targets
from lamina.gateway.routes.tasks import TaskRoutes
from lamina.gateway.routes.triggers import TriggerRoutes
from lamina.gateway.web_app.web_process import WebProcess
from lamina.planner.capacity_check import absent_bodies, check_capacity
from lamina.planner.slo_check import Measured, SloShortfall, slo_shortfalls
from lamina.predict.online import OnlinePredictor
from lamina.sdk.app import App
from lamina.sdk.app_loader import source_of
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpLimits, HttpServer
from lamina.server.listener import server_context
from lamina.server.memory_budget import MemoryBudget
from lamina.server.origins import OriginPolicy, OriginSettings, is_loopback
from lamina.server.process_status import ProcessStatus, default_memory_budget
from lamina.state.brokers import Broker
from lamina.state.triggers import Triggers, open_triggers
from lamina.store.base import Store

log = logging.getLogger("lamina")

CACHE_SHARE = 8
"""One part in so many of the memory budget is for results that are kept (`cache=`)."""

TRIM_EVERY_S = 2.0
TRIGGERS_S = 2.0
"""How long a server that begins to lead waits for the triggers in its store."""

REFUSALS_EVERY_S = 5.0

USERS_S = 2.0
"""How often a standby reads users and tokens."""

Prepare = Callable[[App, RealtimeDriver, TargetRegistry], Awaitable[Callable[[Triggers], None]]]
"""Deploys what an earlier server had deployed, before any call comes, new or left over; returns what is to get the triggers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where and how a gateway listens."""

    host: str = "127.0.0.1"
    port: int = 0  #: 0: the system chooses one
    grpc_port: int | None = None  #: None: no gRPC
    ingress: int = 0  #: processes of their own that speak HTTP and gRPC; 0: this one does
    tls: tuple[str, str] | None = None  #: files of certificate and key
    limits: HttpLimits = HttpLimits()
    origins: OriginSettings = OriginSettings()  #: host names and web pages besides its own
    memory_bytes: int = 0  #: budget for what clients make the server hold; 0: a part of the memory there is
    advertised: str = ""  #: where clients reach it, if that is not where it listens
    no_auth: bool = False  #: no token is asked for, wherever it listens
    is_embedded: bool = False  #: it opens no port: another server brings the requests


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayObservers:
    """What else sees the calls and events of a gateway, beside its metrics and billing."""

    tracer: Tracer | None = None
    on_event: EventObserver | None = None
    on_call_ended: Sequence[Callable[[str, Ending, str], None]] = ()


class Gateway:
    """A server: its routes and what they stand on. Built complete; `start` opens its ports."""

    def __init__(
        self,
        runtime: ServingRuntime,
        listen: ListenConfig,
        store: Store | None,
        retention_us: int,
        access: AccessControl | None,
        observers: GatewayObservers,
        full_errors: bool,
        prepare: Prepare | None = None,
        brokers: Sequence[Broker] = (),
    ) -> None:
        self._brokers = brokers
        auth = Authenticator(access, requires_token=not listen.no_auth and check_host(listen.host, access))
        limits, tracer = listen.limits, observers.tracer
        self.app, self.driver = app, loop = runtime.app, runtime.driver
        origins = structs.replace(listen.origins, tenant_users=loop.engine.shared.tenant_users)
        self._listen = listen = dataclasses.replace(listen, origins=origins)
        self.cluster = loop.engine if isinstance(loop.engine, ClusterEngine) else None
        if self.cluster is None:  # else there may be more devices later
            deployed = app.deployed()
            absent = absent_bodies(deployed.flows, {spec.name: spec for spec in deployed.functions}, loop.engine.devices)
            check_capacity(
                *(loop.engine.devices, ()),
                [spec for spec in deployed.functions if spec.scale.min and spec.name not in absent],
            )
        self.host = listen.host
        self.port = self.grpc_port = 0
        self.process = ProcessStatus()
        self.auth = auth
        refs = loop.engine.references
        total_bytes = listen.memory_bytes or default_memory_budget()
        own_bytes = total_bytes // 2 if listen.ingress else total_bytes  # the other half is for the processes that read requests
        kept = PredictionStore(own_bytes // CACHE_SHARE)
        self.codecs = codecs = CodecPool()
        buffer_routes = BufferRoutes(runtime.buffers)
        self.budget = MemoryBudget(
            own_bytes,
            {
                "values": lambda: loop.data.held_bytes,
                "shared": lambda: refs.pool.file_bytes if refs is not None else 0,
                "cache": lambda: kept.held_bytes,
                "state": lambda: runtime.state.held_bytes,
                "codecs": lambda: codecs.held_bytes,
                "buffers": lambda: buffer_routes.held_bytes,
            },
            reclaim=kept.reclaim,
        )
        self.billing = Billing(store, time.time)
        self.metrics = Metrics(
            loop.controller,
            last_decision_us=lambda: loop.decision_us,
            call_listeners=(*observers.on_call_ended, self.billing.on_call_ended),
            batch_listeners=(self.billing.on_batch_finished,),
        )
        statistics = ModelStatistics(self.metrics.batches_by_size)
        self.targets = TargetRegistry(call_targets(app), self.metrics.outcomes)
        counters = CacheCounters(lambda: (len(kept), kept.held_bytes))
        self.metrics.registry.register(counters)
        cache = PredictionCache(
            *(loop, kept, self.targets, counters, runtime.state.stateful), tracer.on_answered if tracer is not None else None
        )
        for observe in (self.metrics.on_event, tracer.on_event if tracer is not None else None, observers.on_event):
            if observe is not None:
                loop.add_observer(observe)
        attach_call_context(loop, tracer, has_tenants=access is not None)
        if access is not None:
            access.give_secrets(loop.engine.shared)
        explain = partial(caller_problem, loop, full=full_errors)
        self.durable: DurableRuns | None = None
        if store is not None:
            self.durable = DurableRuns(
                *(loop, store, lambda ending, info: ending_problem(loop, ending, info, full=full_errors).body()),
                retention_us=retention_us,
                on_end=self.metrics.on_call_ended,
                same_transaction=runtime.state.same_transaction,
                devices_may_join=self.cluster is not None,
            )
            self.metrics.registry.register(RunGauges(self.durable))
        self.metrics.registry.register(MemoryGauges(self.budget))
        grace = ColdStartGrace(loop)
        functions = loop.controller.state.functions
        catalogue = ModelCatalog(self.targets, lambda name: functions[name].spec if name in functions else None)
        inference = InferenceService(
            loop, catalogue, self.metrics, statistics, self.process, explain, grace, cache, tracer, codecs
        )
        refusals = SampledRefusals(loop)
        self.oip = OpenInference(
            inference,
            auth.authorize,
            self.is_ready,
            refusals,
            body_limit=limits.body_bytes,
            budget=self.budget,
            check_head=auth.check_head,
            codecs=codecs,
        )
        run_routes = (
            runs.RunRoutes(self.durable, lambda target: loop.engine.shared.source(target).tenant, codecs)
            if self.durable is not None
            else None
        )
        routes = self.billing.routes | state.StateRoutes(runtime.state, loop.engine.shared).routes
        routes |= ExplainRoutes(loop).routes
        routes |= TriggerRoutes(
            *(lambda: self.triggers, self.targets, loop.engine.shared, app.name, access, lambda: time.time_ns() // 1000)
        ).routes
        routes |= TaskRoutes(loop, loop.data.tokens, self.durable).routes
        if run_routes is not None:
            routes |= run_routes.routes
        call_handler = CallHandler(
            *(loop, self.metrics, self.process, explain, grace),
            refusals=refusals,
            tracer=tracer,
            runs=run_routes,
            codecs=codecs,
            cache=cache,
        )
        self._sockets = SocketRoutes(self.targets, call_handler, self.process)
        self._call_sessions = SessionRoutes(self.targets, call_handler, self.process, self.budget)
        routes |= self._sockets.routes | self._call_sessions.routes
        routes |= KernelRoutes(self.targets, call_handler, self.process).routes | buffer_routes.routes
        check_head = auth.check_any_head if app.mounts else auth.check_head
        self._web = self._open_web_apps(limits) if app.mounts else None
        self.router = Router(
            loop,
            self.targets,
            self.metrics,
            call_handler,
            auth.authorize,
            self.process,
            refusals,
            is_ready=self.is_ready,
            memory=self.budget.snapshot,
            openapi=lambda grant: document(
                [one for one in self.targets.all if grant.sees(one.tenant)], v2_paths(catalogue.visible_to(grant))
            ),
            routes=routes,
            mounts={V2_PREFIX: self.oip.rest.handle},
            web=self._web,
        )
        self.server = HttpServer(
            *(self.router.handle, parse_error_body, limits, OWN_HEADERS, self.budget, check_head),
            origins=OriginPolicy(listen.host, origins),
        )
        self.ingress: IngressSupervisor | None = None  #: of the processes that speak HTTP and gRPC, if this one does not
        if listen.ingress:
            slot_refs, requires_token = loop.engine.references, auth.requires_token
            self.ingress = IngressSupervisor(
                *(self.router, self.oip, slot_refs, limits, listen.tls, origins),
                count=listen.ingress,
                requires_token=requires_token,
                memory_bytes=total_bytes - self.budget.limit_bytes,
                check_head=check_head,
            )
        self.front_doors: FrontDoors | None = None  #: on other machines
        if self.cluster is not None:
            self.front_doors = FrontDoors(
                *(self.cluster, self.router, self.oip, runtime.state),
                requires_token=auth.requires_token,
                check_head=check_head,
            )
        self._refusal_log = RefusalLog(self.metrics)
        self.triggers: Triggers | None = None
        self.deposed = asyncio.Event()  #: another server leads: this one is of no more use, and is to be started again
        self._runtime = runtime
        self._access = access
        self._store = store
        self._prepare = prepare
        self._on_triggers: list[Callable[[Triggers], None]] = []
        self._is_serving_apps = self._is_active = self._is_taking_over = self._is_draining = False
        self._tasks: list[asyncio.Task[None]] = []  #: of a standby
        if store is not None:
            store.watch(self._on_term)
            loop.set_barrier(runtime.state.unconfirmed, runtime.state.confirm_call)

    def _open_web_apps(self, limits: HttpLimits) -> WebProcess:
        """The process of the app's web apps, with a private listener for the calls that it makes."""
        app, shared = self.app, self.driver.engine.shared
        source = app.source or source_of(app)
        if not source:
            raise BadValue("mount: the app lies in no file that another process could import", hint="write it into a file")

        def handle(request: HttpRequest, exchange: Exchange) -> None:
            self.router.handle(self.auth.own_request(request), exchange)

        calls = HttpServer(handle, parse_error_body, limits, OWN_HEADERS, self.budget)
        return WebProcess(source, app.mounts, shared.declared, self.budget, calls)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._listen.tls is not None else 'http'}://{host}:{self.port}"

    @property
    def role(self) -> str:
        return "standby" if self.process.is_standby else "leader"

    def slo_shortfalls(self, functions: Iterable[str] | None = None) -> list[SloShortfall]:
        """Functions that miss their SLO alone, by what is known of their times now."""
        controller = self.driver.controller
        states = controller.state.functions
        specs = [states[name].spec for name in (states if functions is None else functions) if name in states]
        return slo_shortfalls(specs, measured_times(controller.predictor))

    @property
    def is_open_to_all(self) -> bool:
        """No token is asked for where others can reach it."""
        return self._listen.no_auth and not is_loopback(self.host)

    def drain(self) -> None:
        """Not ready from now on, and still serving: until a load balancer has noticed, calls keep coming."""
        self._is_draining = True

    def is_ready(self) -> bool:
        return (
            not self._is_draining
            and self.process.refusal is None
            and has_required_instances(self.driver.controller, self.targets.optional_functions())
        )

    async def start(self) -> None:
        """Start the runtime; recover what an earlier server left, or stand by while another leads; then listen."""
        listen = self._listen
        await self._runtime.start()
        try:
            await self._take_role()
            self.process.track_lag()
            self._trim_shared_memory()
            self._log_refusals()
            if self._web is not None:
                await self._web.start()
            if listen.is_embedded:
                return
            if self.ingress is not None:
                ready = await self.ingress.start(self.host, listen.port, listen.grpc_port)
                self.port, self.grpc_port = ready.port, ready.grpc_port
            else:
                secured = {"ssl": server_context(*listen.tls)} if listen.tls is not None else {}
                self.port = await self.server.start(self.host, listen.port, **secured)
                if listen.grpc_port is not None:
                    self.grpc_port = await self.oip.open_grpc(self.host, listen.grpc_port, listen.tls, listen.origins)
            self._advertise()
            if self._store is not None and self._store.term and not self._is_active:  # it came while the ports were opened
                self._on_term(self._store.term)
        except BaseException:  # no caller knows what has been started by now
            await self.stop(0.0)
            raise

    def _trim_shared_memory(self) -> None:
        """Give back slots that were not needed for a while, again and again."""
        refs = self.driver.engine.references
        if refs is not None and not self.process.is_closing:
            refs.trim()
            asyncio.get_running_loop().call_later(TRIM_EVERY_S, self._trim_shared_memory)

    def _log_refusals(self) -> None:
        """Log what was refused lately, again and again."""
        self._refusal_log.poll()
        if not self.process.is_closing:
            asyncio.get_running_loop().call_later(REFUSALS_EVERY_S, self._log_refusals)

    # ------------------------------------------------------------------ the lead

    async def _take_role(self) -> None:
        """Lead, stand by, or serve calls alone: a store that cannot be used now keeps no runs, but a call needs none."""
        store = self._store
        if store is not None and store.exists:
            store.start()
            await store.opened()
            if not store.term:
                down = store.down
                self._runtime.state.set_down(down or StoreDown(f"store {store.name}: it does not answer", hint="try again later"))
                if isinstance(down, NotLeader):
                    self.process.stand_by(self._not_leader)
                    if self.cluster is not None:
                        self.cluster.stand_by(self._not_leader)
                    self._tasks.append(asyncio.create_task(self._follow_users()))
                else:
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
        elif self._is_active or (self._is_serving_apps and self._prepare is not None):
            if store.succeeds:  # another server has led since this one began to serve
                self._step_down()
        elif self.port and not self.process.is_closing and not self._is_taking_over:
            self._is_taking_over = True
            self._tasks.append(asyncio.create_task(self._take_over()))

    async def _follow_users(self) -> None:
        """Keep up with tokens while standing by: a token the leader takes must not be refused here as unknown."""
        while self.process.is_standby and self._access is not None:
            await asyncio.sleep(USERS_S)
            with contextlib.suppress(LaminaError):
                await self._access.load()

    async def _take_over(self) -> None:
        try:
            await self._activate()
            self._advertise()
            log.warning("this server leads now")
        except Exception:
            log.exception("the lead cannot be taken over")
            self._step_down()

    async def _activate(self) -> None:
        """Read all there is in the store, and only then serve: nothing that was known before counts."""
        store = self._store
        await self._serve_apps()
        state = self._runtime.state
        if self.durable is not None:
            await state.open(self.durable.store)
            self.durable.open()
        served = self.targets
        self.triggers = open_triggers(
            *(self.app, state, self.driver, self.durable, self._brokers),
            lambda name: any(target.name == name for target in served.all),
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
            self.process.lead()
            if self.cluster is not None:
                self.cluster.lead(store.term if store is not None else 0)
        else:
            self._step_down()  # the lead was lost while all of it was read

    async def _serve_apps(self) -> None:
        """Serve users and apps as the store has them now."""
        if self._access is not None:
            if self._store is not None and self._store.exists:
                await self._access.load(afresh=True)
            if not self._is_serving_apps:
                sync_tenant_limits(self._access, self.driver)
        if self._prepare is not None and not self._is_serving_apps:
            self._on_triggers.append(await self._prepare(self.app, self.driver, self.targets))
        self._is_serving_apps = True

    def _step_down(self) -> None:
        """Another server leads: take nothing more, start nothing more, and leave all runs to it."""
        if self.deposed.is_set() or self.process.is_closing:
            return
        self.process.stand_by(self._not_leader)
        if self.cluster is not None:
            self.cluster.stand_by(self._not_leader)
        if self.triggers is not None:
            self.triggers.close()
        if self.durable is not None:
            self.durable.abandon()
        self._runtime.state.set_down(self._not_leader())
        self.deposed.set()

    def _not_leader(self) -> NotLeader:
        """The refusal of a standby, with the leader's address as it is known now."""
        known = self._store.leader if self._store is not None else ""
        hint = f"ask {known}" if known else "ask that one, or try again in a moment"
        return NotLeader(f"this server stands by; another leads{f', at {known}' if known else ''}", leader=known, hint=hint)

    def _advertise(self) -> None:
        if self._store is not None:
            self._store.advertise(self._listen.advertised or self.url)

    async def stop(self, grace_s: float = 30.0) -> int:
        """Accept nothing new, finish what was accepted, then end the workers; returns how many calls were cancelled."""
        if self.process.is_closing:
            return 0
        self.process.close()
        self._sockets.drain()
        self._call_sessions.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.triggers is not None:
            self.triggers.close()
            await self.triggers.closed()
        await self.server.stop_accepting()
        if self.ingress is not None:
            await self.ingress.stop_accepting()
        if self.durable is not None:
            until_s = asyncio.get_running_loop().time() + grace_s
            await self.durable.stop(grace_s)
            grace_s = max(0.1, until_s - asyncio.get_running_loop().time())
        left = await self.driver.drain(grace_s)
        self.billing.flush()
        if self.durable is not None:
            await self.durable.store.close()  # with what those calls have changed of the state
        if self.ingress is not None:
            await self.ingress.stop()
        await self.oip.stop(0.5)
        await self.server.stop()
        if self._web is not None:
            await self._web.stop()
        await self.codecs.stop()
        await self.driver.stop(min(5.0, grace_s))
        return left


async def open_gateway(
    runtime: ServingRuntime,
    listen: ListenConfig | None = None,
    *,
    store: Store | None = None,
    retention_us: int = RETENTION_US,
    access: AccessControl | None = None,
    prepare: Prepare | None = None,
    brokers: Sequence[Broker] = (),
    observers: GatewayObservers | None = None,
    full_errors: bool = True,
) -> Gateway:
    """Start a server.

    `store` is for durable runs and state; without one there are no durable runs, and state ends with the server. Runs are kept
    for `retention_us` after their end. `brokers` are those that triggers may name. `full_errors` tells clients what a function
    that failed has said.
    """
    listen, observers = listen or ListenConfig(), observers or GatewayObservers()
    gateway = Gateway(runtime, listen, store, retention_us, access, observers, full_errors, prepare, brokers)
    await gateway.start()
    return gateway


def measured_times(predictor: Predictor) -> list[Measured]:
    """Times of batches of one that have been measured."""
    if not isinstance(predictor, OnlinePredictor):
        return []
    known = predictor.learnt_profiles()
    return [(one.function, point.units, point.p50_us) for one in known for point in one.points if point.batch == 1]


def has_required_instances(controller: Controller, optional: set[str]) -> bool:
    """Every function has its minimum of warm instances, but for bodies of competing functions that no device can host."""
    state = controller.state
    specs = {name: function.spec for name, function in state.functions.items()}
    optional = optional | absent_bodies(controller.flows.values(), specs, [device.spec for device in state.devices.values()])
    return all(
        name in optional or sum(one.phase is InstancePhase.WARM for one in function.instances.values()) >= function.spec.scale.min
        for name, function in controller.state.functions.items()
    )
