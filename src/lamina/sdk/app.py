"""Apps: a name with its functions, workflows, triggers and state, and the clients that call them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from lamina.core.events import Deployed
from lamina.errors import BadValue, UnknownTarget, did_you_mean
from lamina.kernels.graph import GraphBuilder
from lamina.sdk.app_state import InMemoryState, KeyValueState, Transaction
from lamina.sdk.competing_function import CompetingFunction, checked_bodies
from lamina.sdk.context import context
from lamina.sdk.function import Function
from lamina.sdk.kernel_graph import KernelGraphFunction
from lamina.sdk.loaded_kernel_graph import InMemoryBuffers
from lamina.sdk.resources import CPU, GPU, SLO, Quota, Scale, checked_bool, checked_int, checked_objective
from lamina.sdk.torch_model import TorchModel
from lamina.sdk.triggers import Trigger, bind_trigger, make_trigger
from lamina.sdk.user_errors import user_place
from lamina.sdk.volume import Volume
from lamina.sdk.workflow import Workflow
from lamina.types import MAX_CONCURRENCY, FunctionSpec, Objective, call_parts
from lamina.units import parse_bytes, parse_us

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from lamina.sdk.async_client import AsyncClient
    from lamina.sdk.client import Client

    _OpenClient = tuple[AsyncClient, AsyncIterator[None]]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

MAX_CACHE_US = 7 * 86_400_000_000
"""Longest time a result is kept."""

_UNSAID: dict[str, Any] = {
    "batch": 1,
    "cpu": None,
    "gpu": None,
    "scale": None,
    "quota": None,
    "home": False,
    "concurrency": 1,
}
"""Options that bodies have, and a function with competing bodies has not."""

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class FunctionOptions(TypedDict, total=False):
    """Keyword options of `App.function`."""

    name: str | None
    slo: SLO | str | None
    cpu: CPU | int | float | None
    gpu: GPU | str | float | None
    scale: Scale | None
    quota: Quota | None
    home: bool
    lend: bool
    idempotent: bool
    max_queue: int
    objective: Objective
    concurrency: int
    cache: str | None
    compete: Sequence[Function[..., Any]] | None


class ServedClass(Protocol[P, R_co]):
    """A class whose instances handle requests. (A protocol of its own: pyright takes functions for a `type[Callable]` too.)"""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class FunctionDecorator(Protocol):
    """Decorator that keeps the types of its target: of a class those of its `__call__`. (mypy overlooks what a decorator makes
    of a class under `@`; see `mypy_plugin`.)"""

    @overload
    def __call__(self, target: type[TorchModel], /) -> Function[..., Any]: ...
    @overload
    def __call__(self, target: type[ServedClass[P, R_co]], /) -> Function[P, R_co]: ...
    @overload
    def __call__(self, target: Callable[P, R], /) -> Function[P, R]: ...


class BatchedDecorator(Protocol):
    """Decorator of a batched function. Its parameters are lists; a request is one entry of each, which no annotation says."""

    def __call__(self, target: Callable[..., Any], /) -> Function[..., Any]: ...


AsgiApplication = Callable[..., Awaitable[None]]
"""An ASGI application: it is called with scope, receive and send."""


class TriggerDecorator(Protocol):
    def __call__(self, target: T, /) -> T: ...


class WorkflowDecorator(Protocol):
    def __call__(self, target: Callable[P, R], /) -> Workflow[P, R]: ...


class RunningServer(Protocol):
    """Server that `App.serve` has started."""

    @property
    def url(self) -> str: ...

    @property
    def client(self) -> Client: ...

    def start(self, *, announce: bool = False) -> RunningServer: ...

    def wait(self) -> None: ...

    def stop(self, grace_s: float = 5.0) -> None: ...


class App:
    """An app: `App("vision")`; then `@app.function(...)` and `@app.workflow(...)`."""

    def __init__(self, name: str) -> None:
        self.name = _checked(name, "app name")
        self.functions: dict[str, Function[..., Any]] = {}
        self.workflows: dict[str, Workflow[..., Any]] = {}
        self.triggers: list[Trigger] = []
        self.local_state = InMemoryState()  #: state of this process; a server has its own
        self.local_buffers = InMemoryBuffers()  #: by key, of this process: for kernel graphs that are called with `.local`
        self.mounts: dict[str, AsgiApplication] = {}  #: web apps beside the functions, by path
        self.source = ""  #: where it was loaded from, as `load_app` takes it; "": it was made here
        self._url = ""  #: of the server that calls of this process go to; "": the one at `LAMINA_URL`
        self._server_loop: AbstractEventLoop | None = None  #: of that server, if it runs in this process
        self._clients: dict[tuple[str, str], Client] = {}
        self._async_clients: WeakKeyDictionary[AbstractEventLoop, dict[tuple[str, str], _OpenClient]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<app {self.name!r}: {', '.join([*self.functions, *self.workflows]) or 'empty'}>"

    @overload
    def function(self, *bare: Any, batch: Literal[1] = 1, **options: Unpack[FunctionOptions]) -> FunctionDecorator: ...
    @overload
    def function(self, *bare: Any, batch: int, **options: Unpack[FunctionOptions]) -> BatchedDecorator: ...
    def function(
        self,
        *bare: Any,
        batch: int = 1,
        name: str | None = None,
        slo: SLO | str | None = None,
        cpu: CPU | int | float | None = None,
        gpu: GPU | str | float | None = None,
        scale: Scale | None = None,
        quota: Quota | None = None,
        home: bool = False,
        lend: bool = True,
        idempotent: bool = True,
        max_queue: int = 10_000,
        objective: Objective = "",
        concurrency: int = 1,
        cache: str | None = None,
        compete: Sequence[Function[..., Any]] | None = None,
    ) -> FunctionDecorator | BatchedDecorator:
        """Make a function of a callable, or of a class with `__call__` and, optionally, `load` and `close`.

        With `batch` above 1, every parameter is a list with one entry per request, and so is the result.
        `home` keeps a slice for it alone; with `lend`, others may use it while it is idle.
        `idempotent=False` says that a request must not be run again, whatever happens to its worker.
        `objective` is what the policy aims at: "deadline", "latency", "cost" or "throughput".
        `concurrency` is for functions that await or yield: one instance serves so many calls at once on its cores.
        `cache="10m"` keeps results for so long: an equal call of the same tenant gets the one that is there. For functions whose
        result depends on their inputs alone.
        `compete=(on_cpu, on_gpu)` names functions of the app that are its bodies: each call goes to one of them, to another too
        when the first is late or lost. Of the other options `name` and `slo` are its own.
        """
        if bare:
            raise BadValue(f"{user_place()}: @app.function without parentheses", hint="write @app.function()")
        options: Any = {
            "batch": batch,
            "name": name,
            "slo": slo,
            "cpu": cpu,
            "gpu": gpu,
            "scale": scale,
            "quota": quota,
            "home": home,
            "lend": lend,
            "idempotent": idempotent,
            "max_queue": max_queue,
            "objective": objective,
            "concurrency": concurrency,
            "cache": cache,
        }
        if compete is not None:
            return self._competing(compete, name, slo, cache, options)
        _function_spec(
            batch, slo, cpu, gpu, scale, quota, home, lend, idempotent, max_queue, objective, concurrency, cache
        )  # with the line of the mistake
        return lambda target: self.add_function(target, options)

    def _competing(
        self, compete: Any, name: str | None, slo: SLO | str | None, cache: str | None, options: dict[str, Any]
    ) -> FunctionDecorator:
        """Decorator of a function whose bodies are others."""
        place = user_place()
        bodies = checked_bodies(compete, place)
        kept = [key for key in ("batch", "cpu", "gpu", "scale", "quota", "home", "concurrency") if options[key] != _UNSAID[key]]
        if kept or cache is not None:
            what = kept[0] if kept else "cache"
            hint = (
                "give it to the bodies: each has its own" if kept else "results are kept for calls of a body itself; leave it out"
            )
            raise BadValue(f"{place}: {what}= beside compete=", hint=hint)
        goal = _slo(slo).spec()

        def decorate(target: Any, /) -> Any:
            target_name = name or target.__name__
            self.claim_name(target_name, place, target)
            made: CompetingFunction[..., Any] = CompetingFunction(self, target, target_name, goal, place, bodies)
            self.workflows[target_name] = made
            return made

        return cast(FunctionDecorator, decorate)

    def add_function(
        self, target: Any, options: dict[str, Any], bound: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    ) -> Function[..., Any]:
        """Add a function with the options of `function`. A class whose arguments are missing is none yet: see `Function.bind`."""
        place = user_place()
        given = {key: value for key, value in options.items() if key != "name"}
        target_name = options.get("name") or (_snake(target.__name__) if isinstance(target, type) else target.__name__)
        self.claim_name(target_name, place, target)
        spec = _function_spec(**given)
        function: Function[..., Any] = Function(
            *(self, target, replace(spec, name=target_name), place),
            home=given["home"],
            options=cast(FunctionOptions, given),
            bound=bound,
        )
        if not function.needs_arguments:
            self.functions[target_name] = function
        return function

    def kernel_graph(
        self,
        *bare: Any,
        batch: int = 1,
        iterations: int = 1,
        name: str | None = None,
        slo: SLO | str | None = None,
        cpu: CPU | int | float | None = None,
        gpu: GPU | str | float | None = None,
        scale: Scale | None = None,
        quota: Quota | None = None,
        home: bool = False,
        lend: bool = True,
        idempotent: bool = True,
        max_queue: int = 10_000,
        objective: Objective = "",
    ) -> Callable[[Callable[[GraphBuilder], None]], KernelGraphFunction]:
        """Make a function of a kernel graph: what is decorated is called once, here, with a `GraphBuilder` (`lamina.kernels`).

        All launches run `iterations` times for each request. The other options are those of `function`."""
        if bare:
            raise BadValue(f"{user_place()}: @app.kernel_graph without parentheses", hint="write @app.kernel_graph()")
        spec = _function_spec(batch, slo, cpu, gpu, scale, quota, home, lend, idempotent, max_queue, objective, 1)

        def decorate(build: Callable[[GraphBuilder], None]) -> KernelGraphFunction:
            place = user_place()
            target_name = name or build.__name__
            self.claim_name(target_name, place, build)
            builder = GraphBuilder()
            build(builder)
            made = replace(spec, name=target_name)
            graph = builder.build(checked_int(iterations, "iterations", 1))
            function = KernelGraphFunction(self, graph, made, place, inspect.getdoc(build) or "", home=home)
            self.functions[target_name] = function
            return function

        return decorate

    def workflow(self, *bare: Any, name: str | None = None, slo: SLO | str | None = None) -> WorkflowDecorator:
        """Make a workflow of a plain function; its SLO is for the whole, from arrival to answer."""
        if bare:
            raise BadValue(f"{user_place()}: @app.workflow without parentheses", hint="write @app.workflow()")
        goal = _slo(slo).spec()

        def decorate(target: Callable[P, R], /) -> Workflow[P, R]:
            place = user_place()
            target_name = name or target.__name__
            self.claim_name(target_name, place, target)
            workflow = Workflow(self, target, target_name, goal, place)
            self.workflows[target_name] = workflow
            return workflow

        return decorate

    def mount(self, path: str, application: AsgiApplication) -> None:
        """Serve an ASGI application (FastAPI, Starlette, ...) at a path, on the port of the functions, whose own routes go first.

        It runs in a process of its own beside the server, with its lifespan. There `await function.aio(...)` and
        `app.async_client()` call functions without network or token; `.remote(...)` is for threads.
        """
        if not isinstance(path, str) or not path.startswith("/") or "//" in path or not path.isascii():
            raise BadValue(
                f"{user_place()}: mount: {path!r} is no path", hint='write app.mount("/", web) or app.mount("/shop", web)'
            )
        if not callable(application):
            raise BadValue(f"{user_place()}: mount: {application!r} is no ASGI application", hint="give the FastAPI() itself")
        taken = path.split("/")[1]
        if taken in ("v1", "v2", "healthz", "readyz", "metrics", "openapi.json", "docs"):
            raise BadValue(f"{user_place()}: mount: /{taken} is the server's own", hint='another path, such as "/" or "/web"')
        if path in self.mounts:
            raise BadValue(f"{user_place()}: mount: {path!r} is taken already", hint="one application for each path")
        self.mounts[path] = application

    def set_source(self, source: str) -> None:
        """Note where the app was loaded from: other processes load it there too."""
        self.source = source

    def every(self, interval: str, *, input: dict[str, Any] | None = None, overlap: str | None = None) -> TriggerDecorator:
        """Start the target at fixed intervals: `@app.every("5m")`. A parameter `due` gets the time, as text. `overlap`: what
        to do while the start before is under way: "skip" (usual), "queue", "cancel" (that one) or "allow"."""
        return self._trigger(make_trigger(every=interval, input=input, overlap=overlap))

    def cron(
        self, times: str, *, zone: str = "UTC", input: dict[str, Any] | None = None, overlap: str | None = None
    ) -> TriggerDecorator:
        """Start the target at times of the day: `@app.cron("*/5 * * * *")`, `zone="Europe/Berlin"`. `overlap` as for `every`."""
        return self._trigger(make_trigger(cron=times, zone=zone, input=input, overlap=overlap))

    def on_change(
        self, key: str, *, workflow: str = "", input: dict[str, Any] | None = None, overlap: str | None = None
    ) -> TriggerDecorator:
        """Start the target when state changes: of the app, or of a `workflow`; `*` in the key matches anything.
        Parameters `key`, `value` (None if it is gone) and `version` tell about the change. `overlap` as for `every`; here "allow"
        is usual: every change starts a run."""
        return self._trigger(make_trigger(on_change=key, workflow=workflow, input=input, overlap=overlap))

    def on_message(
        self, broker: str, topic: str, *, input: dict[str, Any] | None = None, overlap: str | None = None
    ) -> TriggerDecorator:
        """Start the target for each message of a topic, subject or queue: `@app.on_message("plant", "sensors/+/heat")`.
        `broker` is one that the operator has named (`lamina serve --broker plant=mqtt://...`). Parameters `topic`, `message`
        (parsed, where it is JSON) and `message_id` tell about it. `overlap` as for `every`; here "allow" is usual."""
        return self._trigger(make_trigger(broker=broker, topic=topic, input=input, overlap=overlap))

    def _trigger(self, trigger: Trigger) -> TriggerDecorator:
        def decorate(target: T) -> T:
            if not isinstance(target, Function | Workflow) or target.app is not self:
                raise BadValue(
                    f"{user_place()}: a trigger starts functions and workflows of its app",
                    hint="write it above @app.workflow() or @app.function()",
                )
            self.triggers.append(bind_trigger(trigger, target))
            return target

        return decorate

    def volume(self, name: str, *, size: str = "") -> Volume:
        """A folder that the functions of the app share: `volume.path`. It is kept over versions and restarts of the server;
        `size` such as "10GiB" limits what may be in it."""
        return Volume(self.name, _checked(name, "volume name"), parse_bytes(size, "size") if size else 0)

    @property
    def state(self) -> KeyValueState:
        """State that all functions of the app share: see `lamina.sdk.app_state`. Outside of a step it is that of this process."""
        return KeyValueState(self.transaction, "app")

    def transaction(self) -> AbstractContextManager[Transaction]:
        """The transaction of the step that is running here, or a new one."""
        running = context().transaction
        return nullcontext(running) if running is not None else self.local_state.transaction()

    def target(self, name: str) -> Function[..., Any] | Workflow[..., Any]:
        """The function or workflow of that name."""
        found = self.functions.get(name) or self.workflows.get(name)
        if found is None:
            known = [*self.functions, *self.workflows]
            hint = did_you_mean(name, known, f"there is {', '.join(known) or 'nothing'}")
            raise UnknownTarget(f"no function or workflow {name!r} in app {self.name!r}", hint=hint)
        return found

    def deployed(self) -> Deployed:
        """The `Deployed` event of this app, for a controller. Traces its workflows, so a wrong one is found here."""
        specs = tuple(function.spec for function in self.functions.values())
        return Deployed(specs, tuple(workflow.flow for workflow in self.workflows.values()))

    def client(self) -> Client:
        """The client for the server at `LAMINA_URL`, with the token in `LAMINA_TOKEN`, as they are now; cached."""
        from asyncio import _get_running_loop

        from lamina.sdk.client import Client
        from lamina.sdk.client_codec import default_server

        if self._server_loop is not None and _get_running_loop() is self._server_loop:
            hint = "await function.aio(...), or call it from a plain `def` endpoint"
            raise BadValue("a blocking call in the event loop of the server would wait for itself", hint=hint)
        url, token = default_server()
        url = self._url or url
        if (url, token) not in self._clients:
            self._clients[url, token] = Client(url, token=token or None)
        return self._clients[url, token]

    def async_client(self) -> AsyncClient:
        """The asyncio client for the same server; connections belong to the loop they were made on."""
        import asyncio

        from lamina.sdk.async_client import AsyncClient
        from lamina.sdk.client_codec import default_server

        url, token = default_server()
        url = self._url or url
        clients = self._async_clients.setdefault(asyncio.get_running_loop(), {})
        if (url, token) not in clients:
            client = AsyncClient(url, token=token or None)
            clients[url, token] = client, _close_with_loop(client)
        return clients[url, token][0]

    def connect(self, url: str, loop: AbstractEventLoop | None = None) -> None:
        """Send remote calls of this process (`.remote`, `.aio`, ...) to this server; "": to the one at `LAMINA_URL` again.
        `loop` is the server's, if that runs in this process."""
        self._url, self._server_loop = url, loop

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8700,
        policy: str | None = None,
        background: bool | None = None,
    ) -> RunningServer:
        """Serve the app from a script or a notebook.

        In a script it returns when the server was stopped (Ctrl-C, SIGTERM); functions run in worker processes, which import the
        script: what it does besides belongs below `if __name__ == "__main__":`. In a notebook, and where an event loop runs, it
        returns at once, with the server: `server.url`, `server.client`, `server.stop()`; functions of a notebook run in its
        threads, and a server that an earlier cell has started for an app of this name is stopped. `background` decides otherwise.
        Where the script is only imported, by a worker or by `lamina serve`, its import ends here.
        """
        from lamina.sdk.app_loader import end_import

        is_imported = end_import()
        if background is None:
            background = _is_interactive() or _in_event_loop()
        local_server = import_module("lamina.gateway.local_server")
        server: RunningServer = local_server.LocalServer(self, host=host, port=port, policy=policy)
        if not is_imported:
            if _is_interactive():
                local_server.replace_earlier(server)
            server.start(announce=True)
            if not background:
                server.wait()
        return server

    def close(self) -> None:
        """Close what calls from this process have opened: local instances, and connections except those of asyncio."""
        for function in self.functions.values():
            function.close()
        while self._clients:
            self._clients.popitem()[1].close()

    def claim_name(self, name: str, place: str, target: Any = None) -> None:
        """Check that a name is valid and not taken in this app. In a notebook a cell that runs again defines its names anew."""
        _checked(name, "name", place)
        taken = self.functions.get(name) or self.workflows.get(name)
        if taken is None:
            return
        if not (_is_interactive() and getattr(target, "__module__", "") == "__main__"):
            raise BadValue(
                f"{place}: app {self.name!r} has a {name!r} already, from {taken.place}", hint="give one of them another name="
            )
        self.functions.pop(name, None)
        self.workflows.pop(name, None)
        self.triggers = [trigger for trigger in self.triggers if trigger.target != name]
        if self._url:
            sys.stdout.write(f"{name} is defined anew; the server has it after app.serve()\n")


def _is_interactive() -> bool:
    """Whether this is a notebook or an interpreter: what is typed there may be typed again."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _in_event_loop() -> bool:
    """Whether this thread runs a loop of asyncio, which must not wait for a server."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _close_with_loop(client: AsyncClient) -> AsyncIterator[None]:
    """Close the client when its loop ends: loops close the asynchronous iterators that are under way, and nothing else."""

    async def under_way() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await client.close()

    iterator = under_way()
    with suppress(StopIteration):  # as far as its `yield`; there is nothing to wait for
        anext(iterator).__await__().send(None)
    return iterator


def _checked(name: Any, field: str, place: str = "") -> str:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise BadValue(
            f"{place}{': ' if place else ''}{field}: {name!r} cannot be used",
            hint="up to 63 of a-z 0-9 . _ - and a letter or digit first; give one with name=",
        )
    return name


def _snake(name: str) -> str:
    """Snake case of a class name: ResNet is res_net, OCRModel is ocr_model."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _function_spec(
    batch: int,
    slo: SLO | str | None,
    cpu: CPU | int | float | None,
    gpu: GPU | str | float | None,
    scale: Scale | None,
    quota: Quota | None,
    home: bool,
    lend: bool,
    idempotent: bool,
    max_queue: int,
    objective: Objective,
    concurrency: int,
    cache: str | None = None,
) -> FunctionSpec:
    """Spec of a function without its name."""
    if not isinstance(cpu, CPU):
        cpu = CPU(1 if cpu is None else cpu)
    if gpu is not None and not isinstance(gpu, GPU):
        gpu = GPU(gpu)
    isolated = gpu is not None and gpu.isolated
    at_once = checked_int(concurrency, "concurrency", 1)
    if at_once > MAX_CONCURRENCY:
        raise BadValue(f"concurrency: {at_once} is out of range", hint=f"write a whole number from 1 to {MAX_CONCURRENCY}")
    return FunctionSpec(
        name="",
        max_batch=checked_int(batch, "batch", 1),
        cores=cpu.whole_cores,
        concurrency=at_once,
        parts=call_parts(cpu.part, at_once),
        share=gpu.part if gpu else 0.0,
        gpu="no" if gpu is None else "must" if gpu.required else "may",
        memory_mib=max(cpu.memory_mib, gpu.memory_mib if gpu else 0),
        isolated=isolated,
        home=checked_bool(home, "home") or isolated,  # the share of a process is fixed when it starts
        lend=checked_bool(lend, "lend") and not isolated,
        quota=_quota(quota, gpu).spec(),
        scale=_scale(scale).spec(),
        slo=_slo(slo).spec(),
        idempotent=checked_bool(idempotent, "idempotent"),
        max_queue=checked_int(max_queue, "max_queue", 1),
        objective=checked_objective(objective),
        cache_us=_cache_us(cache, idempotent),
    )


def _cache_us(cache: str | None, idempotent: bool) -> int:
    if cache is None:
        return 0
    if not idempotent:
        raise BadValue(
            "cache: given beside idempotent=False", hint="a call that must run each time cannot be kept: leave one out"
        )
    cache_us = parse_us(cache, "cache")
    if not 0 < cache_us <= MAX_CACHE_US:
        raise BadValue(f"cache: {cache!r} is out of range", hint="write a time such as cache='10m', up to '7d'")
    return cache_us


def _slo(slo: SLO | str | None) -> SLO:
    return slo if isinstance(slo, SLO) else SLO(slo)


def _scale(scale: Any) -> Scale:
    if scale is not None and not isinstance(scale, Scale):
        raise BadValue(f"scale: {scale!r} is not a Scale", hint="write scale=lamina.Scale(min=1, max=4)")
    return scale or Scale()


def _quota(quota: Any, gpu: GPU | None) -> Quota:
    if quota is not None and not isinstance(quota, Quota):
        raise BadValue(f"quota: {quota!r} is not a Quota", hint="write quota=lamina.Quota(limit=0.5)")
    if quota is not None and gpu is not None and gpu.limit is not None:
        raise BadValue("gpu.limit: given beside quota", hint="put the limit into one of them")
    return quota or Quota(limit=gpu.time_limit if gpu else 1.0)
