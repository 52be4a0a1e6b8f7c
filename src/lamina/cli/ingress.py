"""`lamina ingress --join HOST:PORT`: a front door for clients, on any machine, that outlives the server behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lamina.cli._shared import PORT
from lamina.cli.agent import membership_options
from lamina.errors import BadValue
from lamina.units import parse_bytes, parse_us

if TYPE_CHECKING:
    from lamina.gateway.ingress.front_door import FrontDoorConfig

_PEM = click.Path(readable=False, path_type=Path)


@click.command()
@click.option(
    "--join", "joins", required=True, metavar="HOST:PORT[,...]", help="Servers, of which one leads; see serve --agents."
)
@click.option("--name", help="Name of this front door; default: the host name.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on for clients.")
@click.option("--port", type=PORT, default=8700, show_default=True, help="Port to listen on; several front doors may share it.")
@click.option("--grpc-port", type=PORT, help="Serve the Open Inference Protocol over gRPC on this port as well.")
@click.option("--no-auth", is_flag=True, help="Listen where others can reach it though the server asks for no token.")
@click.option("--tls-cert", type=_PEM, help="Certificate for clients (PEM).")
@click.option("--tls-key", type=_PEM, help="Key of that certificate (PEM).")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Host name that clients may use; repeatable.")
@click.option("--cors-origin", "origins", multiple=True, metavar="URL", help="Origin of web pages that may call; repeatable.")
@click.option("--memory-budget", metavar="SIZE", help="Most memory that clients may make it hold; default: a quarter.")
@click.option("--hold", default="10s", show_default=True, help="How long a request waits while no server leads.")
@click.option(
    "--advertise", metavar="HOST:PORT", help="Where other machines fetch large bodies from this one; default: any port."
)
@click.option("--token-file", type=_PEM, help="File with the join token; or LAMINA_JOIN_TOKEN.")
@click.option("--join-tls-ca", type=_PEM, help="Authority that has signed the certificates of all machines (PEM).")
@click.option("--join-tls-cert", type=_PEM, help="Certificate of this machine towards the others (PEM).")
@click.option("--join-tls-key", type=_PEM, help="Key of that certificate (PEM).")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Format of the log.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when it listens.")
def command(**options: Any) -> int:
    """Take requests on this machine for whichever server leads.

    \b
    Examples:
      lamina ingress --join leader:8710,standby:8710 --token-file token
      lamina ingress --join leader:8710 --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
    """
    import asyncio
    import signal

    import msgspec

    from lamina.gateway.ingress.front_door import FrontDoor
    from lamina.gateway.observability import logs
    from lamina.server.async_stderr import async_stderr
    from lamina.server.http_server import event_loop_factory

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        door = FrontDoor(config)

        def listening(port: int, grpc_port: int) -> None:
            if options["as_json"]:
                told = {"url": f"http://{config.host}:{port}", "port": port, "grpc_port": grpc_port}
                click.echo(msgspec.json.encode(told).decode())
            else:
                click.echo(f"front door {config.name} at {config.host}:{port}, for {', '.join(config.joins)}   (Ctrl-C ends it)")

        await door.run(stop, listening)

    with async_stderr():
        logs.configure(options["log_format"], calls=False)
        config = front_door_config(options)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(serve())
    return 0


def front_door_config(options: dict[str, Any]) -> FrontDoorConfig:
    """Configuration of a front door from the options of the command."""
    import socket

    from lamina.cluster.credentials import TlsFiles
    from lamina.gateway.ingress.front_door import FrontDoorConfig
    from lamina.server.origins import OriginSettings

    joins, token, data_host, data_port = membership_options(options)
    name = re.sub(r"[^A-Za-z0-9.-]", "-", options["name"] or socket.gethostname()).strip("-.")[:63] or "ingress"
    between = TlsFiles(*(str(options[one] or "") for one in ("join_tls_ca", "join_tls_cert", "join_tls_key")))
    between.check("--join-tls")
    if bool(options["tls_cert"]) != bool(options["tls_key"]):
        raise BadValue("TLS takes a certificate and its key", hint="give both --tls-cert and --tls-key")
    return FrontDoorConfig(
        name=name,
        joins=joins,
        token=token,
        tls_between=between,
        host=options["host"],
        port=options["port"],
        grpc_port=options["grpc_port"] if options["grpc_port"] is not None else -1,
        tls=(str(options["tls_cert"]), str(options["tls_key"])) if options["tls_cert"] else None,
        origins=OriginSettings(hosts=tuple(options["hosts"]), cors=tuple(options["origins"])),
        memory_bytes=parse_bytes(options["memory_budget"], "--memory-budget") if options["memory_budget"] else 0,
        data_host=data_host,
        data_port=data_port,
        advertise=options["advertise"] or "",
        hold_us=parse_us(options["hold"], "--hold"),
        no_auth=options["no_auth"],
    )
