"""Server configuration: the options of `lamina serve`, in groups by what they configure.

The names of fields are those of the command's parameters, so an option is added in two places: there, and in its group here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from lamina.errors import BadValue
from lamina.units import parse_bytes, parse_us, show_bytes

if TYPE_CHECKING:
    from lamina.cluster.agent_listener import ListenForAgents
    from lamina.cluster.launchers import Launcher
    from lamina.cluster.node_pools import NodePool
    from lamina.engines.app_environments import EnvironmentOptions
    from lamina.state.brokers import Broker

T = TypeVar("T")
MIN_BUDGET_BYTES = 16 * 2**20
CONSOLE_PORT = 8701
"""Of management with a console, where `--admin-port` names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What is served: an app, model files, a model repository."""

    file: str | None
    models: tuple[str, ...]
    model_repository: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Where batches run, and by which policy."""

    policy: str
    options: tuple[str, ...]  #: of the policy
    engine: str
    emulate: str | None
    profiles: Path | None
    gpu: str
    slices: Literal["auto", "hard", "soft"]
    gpu_cores: int  #: of the host, leased with the slices of each GPU
    gpu_standby: Literal["models", "imports", "off"]
    no_probe: bool
    slo_check: Literal["refuse", "warn", "off"]
    explain: bool
    state_data_limit: str
    variables: tuple[str, ...]  #: of the environment, for the app's own functions
    brokers: tuple[str, ...]  #: of messages that start runs

    @property
    def named_brokers(self) -> tuple[Broker, ...]:
        from lamina.state.brokers import parse_broker

        found = [parse_broker(text) for text in self.brokers]
        names = [broker.name for broker in found]
        for name in names:
            if names.count(name) > 1:
                raise BadValue(f"--broker: two are called {name!r}", hint="give each a name of its own")
        return tuple(found)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by name; one without a value has that of the server."""
        found = {}
        for text in self.variables:
            name, sign, value = text.partition("=")
            if not name or (not sign and name not in os.environ):
                raise BadValue(f"--env: {text[:80]!r} is not set", hint="NAME of a variable that is set, or NAME=VALUE")
            found[name] = value if sign else os.environ[name]
        return found

    @property
    def emulated_devices(self) -> str:
        """Devices to emulate; "": batches run on this machine."""
        return self.emulate or ("h200" if self.engine == "emulated" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Addresses of HTTP and gRPC, and how they are served."""

    host: str
    port: int
    grpc_port: int | None
    ingress: int
    memory_budget: str | None  #: None: a part of the memory there is
    tls_cert: Path | None
    tls_key: Path | None
    allow_hosts: tuple[str, ...]  #: names besides the address itself
    cors_origins: tuple[str, ...]  #: of web pages that may call
    advertise: str | None
    no_auth: bool
    role_label_pods: str | None  #: of Kubernetes, with commas

    @property
    def advertised(self) -> str:
        """Where clients reach this server when it leads; "": where it listens."""
        if self.advertise:
            if not self.advertise.startswith(("http://", "https://")):
                raise BadValue(f"--advertise: {self.advertise!r} is no address", hint="write http://HOST:8700")
            return self.advertise.rstrip("/")
        return self.url.replace("127.0.0.1", socket.gethostname(), 1) if self.host in ("0.0.0.0", "::") else ""

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names besides the address itself that requests may be for; clients that follow the leader use the advertised one."""
        name = urlsplit(self.advertised).hostname
        return (*self.allow_hosts, name) if name else self.allow_hosts

    @property
    def tls(self) -> tuple[str, str] | None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadValue("TLS takes a certificate and its key", hint="give both --tls-cert and --tls-key")
        return (str(self.tls_cert), str(self.tls_key)) if self.tls_cert and self.tls_key else None

    @property
    def memory_bytes(self) -> int:
        """Limit of what clients may make the server hold; 0: the default."""
        if self.memory_budget is None:
            return 0
        found = parse_bytes(self.memory_budget, "--memory-budget")
        if found < MIN_BUDGET_BYTES:
            raise BadValue(
                f"--memory-budget: {self.memory_budget!r} is too little",
                hint=f"at least {show_bytes(MIN_BUDGET_BYTES)}; half of it is the most one client may use",
            )
        return found

    @property
    def url(self) -> str:
        """Where functions that call others over HTTP find this server; "": the port is not known yet."""
        if not self.port:
            return ""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Where durable runs and state are kept, and for how long."""

    place: str | None  #: None: beside the app; "none": nowhere
    keep: str

    @property
    def retention_us(self) -> int:
        return parse_us(self.keep, "--keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Management of a server: its address, and the folder of deployed apps."""

    admin_port: int | None
    admin_host: str
    console: bool
    apps: Path | None
    trust_deployers: bool
    tenant_users: str
    operator_token_file: Path | None

    @property
    def management_port(self) -> int | None:
        """None: no management. A console needs it."""
        return CONSOLE_PORT if self.admin_port is None and self.console else self.admin_port

    @property
    def operator_token(self) -> str:
        """Token that is kept outside the store, of its file or, where none is named, of LAMINA_TOKEN; "": none."""
        if self.operator_token_file is None:
            return os.environ.get("LAMINA_TOKEN", "")
        try:
            found = self.operator_token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadValue(f"--operator-token-file: {error}", hint="a file with one token in it") from None
        if not found:
            raise BadValue(f"--operator-token-file: {self.operator_token_file} is empty", hint="a file with one token in it")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagingOptions:
    """Packages of apps: where their environments are kept, and where they are installed from."""

    environments: Path | None
    wheelhouse: Path | None
    allow_builds: bool

    def folder(self, store: Path) -> Path:
        """Folder of environments, by default beside the store."""
        return self.environments or store / "environments"

    @property
    def terms(self) -> EnvironmentOptions:
        return environment_terms(self.wheelhouse, self.allow_builds)


def environment_terms(wheelhouse: Path | None, allow_builds: bool) -> EnvironmentOptions:
    """Options of environments from those of a command."""
    from lamina.engines.app_environments import EnvironmentOptions

    if wheelhouse is not None and not wheelhouse.is_dir():
        raise BadValue(f"--wheelhouse: no folder {str(wheelhouse)!r}", hint="pip download -d DIR -r requirements.txt makes one")
    return EnvironmentOptions(wheelhouse=str(wheelhouse.resolve()) if wheelhouse else "", allow_builds=allow_builds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Agents of other machines, which may join here."""

    agents: str | None  #: HOST:PORT; None: there are none
    agents_advertise: str | None
    agents_peers: str | None  #: other servers, for agents that launchers start
    join_token_file: Path | None
    agents_tls_ca: Path | None
    agents_tls_cert: Path | None
    agents_tls_key: Path | None
    no_devices: bool
    launchers: tuple[str, ...]

    @property
    def pools(self) -> tuple[tuple[Launcher, NodePool], ...]:
        """Launchers of machines, each with its pool. Agents join where this server says, and know its token."""
        from lamina.cluster.launchers import JoinTerms, open_launcher, parse_terms
        from lamina.cluster.node_pools import NodePool

        listen = self.listen
        if listen is None or not self.launchers:
            return ()
        if not listen.port:
            raise BadValue("--launcher: agents must know the port to join", hint="--agents HOST:8710")
        host = listen.advertise or (socket.gethostname() if listen.host in ("0.0.0.0", "::") else listen.host)
        others = [text.strip() for text in (self.agents_peers or "").split(",") if text.strip()]
        for text in others:
            parse_address(text, "--agents-peers")
        addresses = tuple(dict.fromkeys([f"{host}:{listen.port}", *others]))
        join = JoinTerms(addresses, listen.token.own.decode("utf-8", "replace"))
        terms = [parse_terms(text) for text in self.launchers]
        return tuple((open_launcher(one, join), NodePool(one)) for one in terms)

    @property
    def listen(self) -> ListenForAgents | None:
        """Where agents join; None: nowhere."""
        if self.agents is None:
            given = self.join_token_file or self.agents_tls_ca or self.agents_tls_cert or self.agents_tls_key
            if self.no_devices or given or self.agents_advertise or self.launchers or self.agents_peers:
                raise BadValue("--agents is not given, and other options about agents are", hint="--agents HOST:PORT")
            return None
        from lamina.cluster.agent_listener import ListenForAgents
        from lamina.cluster.credentials import TlsFiles, read_token

        host, port = parse_address(self.agents, "--agents")
        files = (self.agents_tls_ca, self.agents_tls_cert, self.agents_tls_key)
        tls = TlsFiles(*(str(file) if file else "" for file in files))
        tls.check("--agents-tls")
        token = read_token(self.join_token_file, "--join-token-file", host)
        return ListenForAgents(host=host, port=port, token=token, tls=tls, advertise=self.agents_advertise or "")


def parse_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT in two parts; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise BadValue(f"{option}: {text[:80]!r} is not HOST:PORT", hint="such as 0.0.0.0:8710")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Logs, traces, and what clients and the terminal are told."""

    otlp: str | None
    trace_ratio: float
    log_format: Literal["text", "json"]
    log_level: str
    log_calls: bool
    log_file: Path | None
    plain_errors: bool
    opens_page: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All options of `lamina serve`."""

    source: SourceOptions
    engine: EngineOptions
    listen: ListenOptions
    store: StoreOptions
    access: AccessOptions
    agents: AgentOptions
    packaging: PackagingOptions
    observe: ObserveOptions
    grace_s: float
    drain_s: float = 0.0


def server_config(options: Mapping[str, Any]) -> ServerConfig:
    """Groups of the options of `lamina serve`."""
    return ServerConfig(
        source=_group(SourceOptions, options),
        engine=_group(EngineOptions, options),
        listen=_group(ListenOptions, options),
        store=_group(StoreOptions, options),
        access=_group(AccessOptions, options),
        agents=_group(AgentOptions, options),
        packaging=_group(PackagingOptions, options),
        observe=_group(ObserveOptions, options),
        grace_s=parse_us(options["grace"], "--grace") / 1e6,
        drain_s=parse_us(options["drain"], "--drain") / 1e6,
    )


def _group(kind: type[T], options: Mapping[str, Any]) -> T:
    return kind(**{field.name: options[field.name] for field in fields(kind)})  # type: ignore[arg-type]
