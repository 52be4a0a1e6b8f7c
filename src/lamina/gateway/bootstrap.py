"""Composition of a server: an app, a policy, an engine, the loop, HTTP and gRPC; started and stopped in order."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from lamina.access.access_control import AccessControl
from lamina.bootstrap import ServingRuntime
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.core.controller import Controller
from lamina.core.lifecycle import InstancePhase
from lamina.drivers.driver import Ending, EventObserver
from lamina.durable.runs import RETENTION_US, DurableRuns
from lamina.engines.composite import CompositeEngine
from lamina.errors import BadValue
from lamina.gateway.auth import Authenticator
from lamina.gateway.auth import check_host as check_host
from lamina.gateway.ingress.remote_session import FrontDoors
from lamina.gateway.ingress.supervisor import IngressSupervisor
from lamina.gateway.ingress.throttle import HostThrottle
from lamina.gateway.leadership import Leadership, Prepare
from lamina.gateway.observability.billing import Billing
from lamina.gateway.observability.gauges import CacheCounters, GpuGauges, MemoryGauges, RunGauges
from lamina.gateway.observability.logs import RefusalLog
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.tracer import Tracer, attach_call_context
from lamina.gateway.oip.inference_service import InferenceService
from lamina.gateway.oip.model_catalog import ModelCatalog
from lamina.gateway.oip.openapi import paths as v2_paths
from lamina.gateway.oip.setup import PREFIX as V2_PREFIX
from lamina.gateway.oip.setup import OpenInference
from lamina.gateway.oip.statistics import ModelStatistics
from lamina.gateway.routes import runs
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
from lamina.gateway.routes.state import StateRoutes
from lamina.gateway.routes.targets import TargetRegistry, call_targets
from lamina.gateway.routes.tasks import TaskRoutes
from lamina.gateway.routes.triggers import TriggerRoutes
from lamina.gateway.web_app.web_process import WebProcess
from lamina.planner.capacity_check import absent_bodies, check_capacity
from lamina.planner.slo_check import SloShortfall, slo_shortfalls
from lamina.predict.online import measured_times
from lamina.sdk.app import App
from lamina.sdk.app_loader import source_of
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpLimits
from lamina.server.http_server import HttpServer
from lamina.server.listener import server_context
from lamina.server.memory_budget import MemoryBudget
from lamina.server.origins import OriginPolicy, OriginSettings, is_loopback
from lamina.server.process_status import ProcessStatus, default_memory_budget
from lamina.state.brokers import Broker
from lamina.store.base import Store
from lamina.types import DeviceSpec

log = logging.getLogger("lamina")

CACHE_SHARE = 8
"""One part in so many of the memory budget is for results that are kept (`cache=`)."""

TRIM_EVERY_S = 2.0
REFUSALS_EVERY_S = 5.0


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
        self.app, self.driver = runtime.app, runtime.driver
        engine = self.driver.engine
        self.cluster = engine if isinstance(engine, ClusterEngine) else None
        if self.cluster is None:  # else there may be more devices later
            check_devices(self.app, engine.devices)
        self.auth = Authenticator(access, requires_token=not listen.no_auth and check_host(listen.host, access))
        origins = structs.replace(listen.origins, tenant_users=engine.shared.tenant_users)
        self._listen = dataclasses.replace(listen, origins=origins)
        self.host = listen.host
        self.port = self.grpc_port = 0
        self.process = ProcessStatus()
        self._is_draining = False
        self._runtime = runtime
        # what is kept in memory, and how much of it there may be
        self.codecs = CodecPool(copies=self.driver.data.copies)
        total_bytes = listen.memory_bytes or default_memory_budget()
        own_bytes = total_bytes // 2 if listen.ingress else total_bytes  # the other half is for the processes that read requests
        kept = PredictionStore(own_bytes // CACHE_SHARE)
        self.budget = self._memory_budget(own_bytes, kept)
        self._buffers = BufferRoutes(runtime.buffers, self.budget)
        # what sees the calls
        self.billing = Billing(store, time.time)
        self.metrics = self._observe(observers, has_tenants=access is not None)
        self._refusal_log = RefusalLog(self.metrics, self.slo_shortfalls)
        # what is served, durable runs, and the role among the servers on the store
        self.targets = TargetRegistry(call_targets(self.app), self.metrics.outcomes)
        if access is not None:
            access.give_secrets(engine.shared)
        self.durable = self._durable_runs(store, retention_us, full_errors) if store is not None else None
        self._leadership = Leadership(runtime, store, access, self.durable, self.targets, self.process, prepare, brokers)
        self.deposed = self._leadership.deposed
        # the way of a call: handlers, routes, ports
        self._web = self._open_web_apps() if self.app.mounts else None
        self._refusals = SampledRefusals(self.driver)
        self._sockets, self._call_sessions, self.oip, self.router = self._route(access, kept, observers.tracer, full_errors)
        check_head = self.auth.check_any_head if self.app.mounts else self.auth.check_head
        self.server = HttpServer(
            *(self.router.handle, parse_error_body, listen.limits, OWN_HEADERS, self.budget, check_head),
            origins=OriginPolicy(listen.host, origins),
        )
        throttle = HostThrottle(weight_of=self.driver.controller.view.tenant_weight)
        self.ingress: IngressSupervisor | None = None  #: of the processes that speak HTTP and gRPC, if this one does not
        if listen.ingress:
            self.ingress = IngressSupervisor(
                *(self.router, self.oip, engine.references, listen.limits, listen.tls, origins),
                throttle=throttle,
                count=listen.ingress,
                requires_token=self.auth.requires_token,
                memory_bytes=total_bytes - self.budget.limit_bytes,
                check_head=check_head,
            )
        self.front_doors: FrontDoors | None = None  #: on other machines
        if self.cluster is not None:
            self.front_doors = FrontDoors(
                *(self.cluster, self.router, self.oip, runtime.state, throttle),
                requires_token=self.auth.requires_token,
                check_head=check_head,
            )

    def _memory_budget(self, limit_bytes: int, kept: PredictionStore) -> MemoryBudget:
        """One account of all that clients make this process hold."""
        data, state, codecs = self.driver.data, self._runtime.state, self.codecs
        references = self.driver.engine.references
        held = {
            "values": lambda: data.held_bytes,
            "shared": lambda: references.pool.file_bytes if references is not None else 0,
            "cache": lambda: kept.held_bytes,
            "state": lambda: state.held_bytes,
            "codecs": lambda: codecs.held_bytes,
        }
        return MemoryBudget(limit_bytes, held, reclaim=kept.reclaim)

    def _observe(self, observers: GatewayObservers, *, has_tenants: bool) -> Metrics:
        """Metrics; and all others that are told of events, calls and batches."""
        driver, tracer = self.driver, observers.tracer
        metrics = Metrics(
            driver.controller,
            last_decision_us=lambda: driver.decision_us,
            call_listeners=(*observers.on_call_ended, self.billing.on_call_ended),
            batch_listeners=(self.billing.on_batch_finished,),
        )
        metrics.registry.register(MemoryGauges(self.budget))
        if isinstance(driver.engine, CompositeEngine):
            metrics.registry.register(GpuGauges(driver.engine.executor_reports))
        for observe in (metrics.on_event, tracer.on_event if tracer is not None else None, observers.on_event):
            if observe is not None:
                driver.add_observer(observe)
        attach_call_context(driver, tracer, has_tenants=has_tenants)
        return metrics

    def _durable_runs(self, store: Store, retention_us: int, full_errors: bool) -> DurableRuns:
        driver, state = self.driver, self._runtime.state
        durable = DurableRuns(
            *(driver, store, lambda ending, info: ending_problem(driver, ending, info, full=full_errors).body()),
            retention_us=retention_us,
            on_end=self.metrics.on_call_ended,
            same_transaction=state.same_transaction,
            devices_may_join=self.cluster is not None,
        )
        self.metrics.registry.register(RunGauges(durable))
        driver.set_barrier(state.unconfirmed, state.confirm_call)
        return durable

    def _route(
        self, access: AccessControl | None, kept: PredictionStore, tracer: Tracer | None, full_errors: bool
    ) -> tuple[SocketRoutes, SessionRoutes, OpenInference, Router]:
        """Handlers of calls in all protocols, on one path, and the routes that lead to them."""
        driver, targets, process, codecs, durable = self.driver, self.targets, self.process, self.codecs, self.durable
        shared, state = driver.engine.shared, self._runtime.state
        counters = CacheCounters(lambda: (len(kept), kept.held_bytes))
        self.metrics.registry.register(counters)
        cache = PredictionCache(
            *(driver, kept, targets, counters, state.stateful), tracer.on_answered if tracer is not None else None
        )
        explain = partial(caller_problem, driver, full=full_errors)
        grace = ColdStartGrace(driver)
        run_routes = runs.RunRoutes(durable, lambda target: shared.source(target).tenant, codecs) if durable is not None else None
        call_handler = CallHandler(
            *(driver, self.metrics, process, explain, grace),
            refusals=self._refusals,
            tracer=tracer,
            runs=run_routes,
            codecs=codecs,
            cache=cache,
        )
        functions = driver.controller.state.functions
        catalogue = ModelCatalog(targets, lambda name: functions[name].spec if name in functions else None)
        statistics = ModelStatistics(self.metrics.batches_by_size)
        oip = OpenInference(
            InferenceService(driver, catalogue, self.metrics, statistics, process, explain, grace, cache, tracer, codecs),
            self.auth.authorize,
            self.is_ready,
            self._refusals,
            body_limit=self._listen.limits.body_bytes,
            budget=self.budget,
            check_head=self.auth.check_head,
            codecs=codecs,
        )
        leadership = self._leadership
        sockets = SocketRoutes(targets, call_handler, process)
        sessions = SessionRoutes(targets, call_handler, process, self.budget)
        routes = self.billing.routes | StateRoutes(state, shared).routes
        routes |= ExplainRoutes(driver).routes
        routes |= TriggerRoutes(
            *(lambda: leadership.triggers, targets, shared, self.app.name, access, lambda: time.time_ns() // 1000)
        ).routes
        routes |= TaskRoutes(driver, driver.data.tokens, durable).routes
        routes |= run_routes.routes if run_routes is not None else {}
        routes |= sockets.routes | sessions.routes
        routes |= KernelRoutes(targets, call_handler, process).routes | self._buffers.routes
        router = Router(
            *(driver, targets, self.metrics, call_handler, self.auth.authorize, process, self._refusals),
            is_ready=self.is_ready,
            memory=self.budget.snapshot,
            openapi=lambda grant: document(
                [one for one in targets.all if grant.sees(one.tenant)], v2_paths(catalogue.visible_to(grant))
            ),
            routes=routes,
            mounts={V2_PREFIX: oip.rest.handle},
            web=self._web,
        )
        return sockets, sessions, oip, router

    def private_server(self) -> HttpServer:
        """A server for the calls of the app's own processes, as the operator's: for a socket that they alone may open."""

        def handle(request: HttpRequest, exchange: Exchange) -> None:
            self.router.handle(self.auth.own_request(request), exchange)

        return HttpServer(handle, parse_error_body, self._listen.limits, OWN_HEADERS, self.budget)

    def _open_web_apps(self) -> WebProcess:
        """The process of the app's web apps, with a private listener for the calls that it makes."""
        app, shared = self.app, self.driver.engine.shared
        source = app.source or source_of(app)
        if not source:
            raise BadValue("mount: the app lies in no file that another process could import", hint="write it into a file")
        return WebProcess(source, app.mounts, shared.declared, self.budget, self.private_server())

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._listen.tls is not None else 'http'}://{host}:{self.port}"

    @property
    def role(self) -> str:
        return "standby" if self.process.is_standby else "leader"

    def slo_shortfalls(self, target: str = "") -> list[SloShortfall]:
        """Functions and workflows, or the one named, that miss their SLO alone, by what is known of their times now."""
        controller = self.driver.controller
        states = controller.state.functions
        names = [target] if target else list(controller.flows)
        specs = [states[name].spec for name in names if name in states]
        flows = [controller.flows[name] for name in names if name in controller.flows and name not in states]
        return slo_shortfalls(specs, measured_times(controller.predictor, target if specs else ""), flows)

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
            await self._leadership.take_role()
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
            self._leadership.listens_at(listen.advertised or self.url)
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

    async def stop(self, grace_s: float = 30.0) -> int:
        """Accept nothing new, finish what was accepted, then end the workers; returns how many calls were cancelled. On a server
        that another one has taken the lead from, what waits is cancelled at once: its clients can ask that one."""
        if self.process.is_closing:
            return 0
        self.process.close()
        self._sockets.drain()
        self._call_sessions.drain()
        await self._leadership.close()
        await self.server.stop_accepting()
        if self.ingress is not None:
            await self.ingress.stop_accepting()
        waited = self.driver.cancel_waiting() if self.deposed.is_set() else 0
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
        return waited + left


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


def check_devices(app: App, devices: Sequence[DeviceSpec]) -> None:
    """All that must always be loaded has room on these devices."""
    deployed = app.deployed()
    absent = absent_bodies(deployed.flows, {spec.name: spec for spec in deployed.functions}, devices)
    check_capacity(devices, (), [spec for spec in deployed.functions if spec.scale.min and spec.name not in absent])


def has_required_instances(controller: Controller, optional: set[str]) -> bool:
    """Every function has its minimum of warm instances, but for bodies of competing functions that no device can host."""
    state = controller.state
    specs = {name: function.spec for name, function in state.functions.items()}
    optional = optional | absent_bodies(controller.flows.values(), specs, [device.spec for device in state.devices.values()])
    return all(
        name in optional or sum(one.phase is InstancePhase.WARM for one in function.instances.values()) >= function.spec.scale.min
        for name, function in controller.state.functions.items()
    )
