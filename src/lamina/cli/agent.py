"""`lamina agent --join HOST:PORT`: the devices of this machine for a server on another one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lamina.cli._server_config import environment_terms, parse_address
from lamina.cli.serve import Gpus
from lamina.errors import BadValue
from lamina.units import parse_us

if TYPE_CHECKING:
    from lamina.cluster.credentials import JoinToken
    from lamina.cluster.leader_session import AgentConfig
    from lamina.engines.app_environments import EnvironmentOptions

_PEM = click.Path(readable=False, path_type=Path)
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.option(
    "--join", "joins", required=True, metavar="HOST:PORT[,...]", help="Servers, of which one leads; see serve --agents."
)
@click.option("--name", help="Name of this node; default: the host name.")
@click.option("--gpu", type=Gpus(), default="auto", show_default=True, help="How GPUs are sliced, as for serve.")
@click.option("--slices", type=click.Choice(["auto", "hard", "soft"]), default="auto", show_default=True, help="As for serve.")
@click.option(
    "--gpu-cores",
    type=click.IntRange(0, 1_024),
    default=0,
    show_default=True,
    help="Cores of this machine that are leased with the slices of each GPU; 0: they are not counted.",
)
@click.option(
    "--gpu-standby", type=click.Choice(["models", "imports", "off"]), default="models", show_default=True, help="As for serve."
)
@click.option("--advertise", metavar="HOST:PORT", help="Where other machines fetch values from this one; default: any port here.")
@click.option("--token-file", type=_PEM, help="File with the join token; or LAMINA_JOIN_TOKEN.")
@click.option("--tls-ca", type=_PEM, help="Authority that has signed the certificates of all machines (PEM).")
@click.option("--tls-cert", type=_PEM, help="Certificate of this machine (PEM).")
@click.option("--tls-key", type=_PEM, help="Key of that certificate (PEM).")
@click.option("--folder", type=click.Path(path_type=Path), help="Where code is kept; default: ~/.cache/lamina/agents/NAME.")
@click.option("--trust-deployers", is_flag=True, help="Take code of tenants too; it runs as this process' user.")
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path),
    help="Install packages of apps from the wheels in this folder, without an index.",
)
@click.option("--allow-builds", is_flag=True, help="Build packages of apps that have no wheel, which runs their code.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Format of the log.")
@click.option("--grace", default="30s", show_default=True, help="How long it may take to be drained when it is to end.")
@click.option("--ready-file", type=click.Path(path_type=Path), help="File that is there once a server has been joined.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line for every server joined.")
def command(**options: Any) -> int:
    """Run batches on this machine's cores and GPUs for a server on another one.

    \b
    Examples:
      lamina agent --join 10.0.0.5:8710 --token-file token
      lamina agent --join leader:8710,standby:8710 --name gpu-node-3
    """
    import asyncio

    from lamina.gateway.observability import logs
    from lamina.ipc.child_process import adopt_orphans, kill_orphans
    from lamina.server.async_stderr import async_stderr
    from lamina.server.http_server import event_loop_factory

    grace_s = parse_us(options["grace"], "--grace") / 1e6
    with async_stderr():
        logs.configure(options["log_format"], calls=False)
        config = agent_config(options)
        others = adopt_orphans()
        try:
            with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                terms = environment_terms(options["wheelhouse"], options["allow_builds"])
                report = (options["as_json"], options["ready_file"])
                gpus = {name: options[name] for name in ("gpu", "slices", "gpu_cores", "gpu_standby")}
                runner.run(_serve(config, gpus, grace_s, terms, *report))
        finally:
            kill_orphans(others)
    return 0


async def _serve(
    config: AgentConfig,
    gpus: dict[str, Any],
    grace_s: float,
    terms: EnvironmentOptions,
    as_json: bool,
    ready_file: Path | None,
) -> None:
    import asyncio
    import signal

    import msgspec

    from lamina.bootstrap import open_agent
    from lamina.cluster.leader_session import LeaderSession
    from lamina.gateway.deploy.app_package import unpack_from_leader

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    if ready_file is not None:  # of an agent before this one, in a folder that outlives processes
        ready_file.unlink(missing_ok=True)

    def joined(session: LeaderSession) -> None:
        if ready_file is not None:
            ready_file.touch()
        told = {"node": config.name, "leader": session.address, "epoch": session.epoch, "incarnation": session.incarnation}
        if as_json:
            click.echo(msgspec.json.encode(told).decode())
        else:
            click.echo(f"node {config.name} has joined {session.address}   (epoch {session.epoch}, Ctrl-C drains)")

    agent = open_agent(config, unpack_from_leader, **gpus, environments=terms)
    await agent.run(stop, on_joined=joined, grace_s=grace_s)


def agent_config(options: dict[str, Any]) -> AgentConfig:
    """Configuration of an agent from the options of the command."""
    import socket

    from lamina.cluster.credentials import TlsFiles
    from lamina.cluster.leader_session import AgentConfig

    joins, token, host, port = membership_options(options)
    name = options["name"] or re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip("-.")[:63]
    if not _NAME.fullmatch(name):
        raise BadValue(f"--name: {name[:80]!r} cannot be the name of a node", hint="up to 63 letters, digits, . and -")
    tls = TlsFiles(*(str(options[name] or "") for name in ("tls_ca", "tls_cert", "tls_key")))
    tls.check()
    folder = options["folder"] or Path.home() / ".cache" / "lamina" / "agents" / name
    return AgentConfig(
        name=name,
        joins=joins,
        token=token,
        tls=tls,
        host=host,
        port=port,
        advertise=options["advertise"] or "",
        folder=folder,
        trusts_deployers=options["trust_deployers"],
    )


def membership_options(options: dict[str, Any]) -> tuple[tuple[str, ...], JoinToken, str, int]:
    """Servers to join, the join token, and where the values of this machine are to be had; from the options of a command."""
    from lamina.cluster.credentials import read_token

    joins = tuple(text.strip() for text in options["joins"].split(",") if text.strip())
    places = [parse_address(text, "--join") for text in joins]
    if not places:
        raise BadValue("--join: no address", hint="--join HOST:PORT")
    is_local = all(host in LOOPBACK for host, _ in places)
    token = read_token(options["token_file"], "--token-file", "localhost" if is_local else "")
    if not options["advertise"]:
        return joins, token, own_address(places), 0
    return joins, token, "0.0.0.0", parse_address(options["advertise"], "--advertise")[1]


def own_address(servers: Sequence[tuple[str, int]]) -> str:
    """Address of this machine as others see it: that of the route to a server, one of another machine if there is one. Nothing
    is sent. Without a network all addresses there are by the time a server is joined."""
    import socket

    host, port = next((place for place in servers if place[0] not in LOOPBACK), ("", 0))
    if not host:
        return "127.0.0.1"
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return "0.0.0.0"
