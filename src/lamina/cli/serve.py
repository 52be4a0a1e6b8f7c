"""`lamina serve FILE`: an app behind HTTP on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lamina import plugins
from lamina.cli._shared import PORT, FiniteFloat
from lamina.plugins import DEFAULT_POLICY

_PEM = click.Path(readable=False, path_type=Path)


class Gpus(click.Choice):  # type: ignore[type-arg]
    """How GPUs are sliced: by a back end of `gpu/slicers`, or one in a file of its own."""

    def __init__(self) -> None:
        super().__init__(["auto", "no", *plugins.names("gpu.slicers")])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if str(value).endswith(".py") else super().convert(value, param, ctx)


@click.command()
@click.argument("file", metavar="[FILE[:APP]|FOLDER]", required=False)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=SOURCE[,slo=50ms][,sha256=...]",
    help="Serve a model: file, folder, http(s):// or s3://; repeatable.",
)
@click.option("--model-repository", type=click.Path(path_type=Path), help="Serve a folder of models: NAME/VERSION/model.onnx.")
@click.option("--policy", default=DEFAULT_POLICY, show_default=True, help="A policy by name, or the path of a file with one.")
@click.option("--policy-option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the policy; repeatable.")
@click.option("--engine", type=click.Choice(["local", "emulated"]), default="local", show_default=True, help="Where batches run.")
@click.option("--emulate", metavar="DEVICES", help='Emulated devices, such as "h200x2"; implies --engine emulated.')
@click.option("--profiles", type=click.Path(path_type=Path), help="Folder of profiles; default: `profiles` beside the app.")
@click.option(
    "--gpu",
    type=Gpus(),
    default="auto",
    show_default=True,
    help="How GPUs are sliced. auto: find GPUs; no: use none; cpu, null: emulate one, for tests.",
)
@click.option(
    "--slices",
    type=click.Choice(["auto", "hard", "soft"]),
    default="auto",
    show_default=True,
    help="hard: slices have SMs of their own; soft: slices share all SMs; auto: soft for models with similar SLOs.",
)
@click.option(
    "--gpu-cores",
    type=click.IntRange(0, 1_024),
    default=0,
    show_default=True,
    help="Cores of this machine that are leased with the slices of each GPU; 0: they are not counted.",
)
@click.option(
    "--gpu-standby",
    type=click.Choice(["models", "imports", "off"]),
    default="models",
    show_default=True,
    help="What stands by behind the executor of a GPU. models: back in a second; imports: no memory of the device; off: nothing.",
)
@click.option("--no-probe", is_flag=True, help="Do not time functions without a profile on their examples() at load.")
@click.option(
    "--slo-check",
    type=click.Choice(["refuse", "warn", "off"]),
    default="refuse",
    show_default=True,
    help="What to do at the start about an SLO that one request alone misses by far.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; any but loopback requires tokens.")
@click.option("--no-auth", is_flag=True, help="Ask for no token, wherever it listens: all who reach the port may call.")
@click.option(
    "--advertise", metavar="URL", help="Where clients reach this server, told by its standby; default: where it listens."
)
@click.option(
    "--role-label-pods", metavar="POD,POD", help="In Kubernetes: label the leader's pod among these, this one included."
)
@click.option("--port", type=PORT, default=8700, show_default=True, help="Port to listen on; 0 lets the system choose.")
@click.option("--grpc-port", type=PORT, help="Serve the Open Inference Protocol over gRPC on this port as well.")
@click.option(
    "--ingress",
    type=click.IntRange(0, 64),
    default=0,
    help="Number of HTTP and gRPC front-end processes (0: in the controller).",
)
@click.option(
    "--memory-budget",
    metavar="SIZE",
    help="Most memory that clients may make the server hold, such as 2GiB; default: a quarter of what there is.",
)
@click.option(
    "--state-data-limit",
    metavar="SIZE",
    default="256KiB",
    show_default=True,
    help="Most data a state of a state machine may work on (States.DataLimitExceeded).",
)
@click.option("--otlp", metavar="URL", help="Send traces to this OpenTelemetry collector, http://HOST:4318/v1/traces.")
@click.option(
    "--trace-ratio",
    type=FiniteFloat(0, 1),
    default=0.01,
    show_default=True,
    help="Share of calls without a traceparent to trace.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Format of the log.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least level of what is logged, by the server and by functions.",
)
@click.option("--log-calls", is_flag=True, help="Log every call, to stderr.")
@click.option("--grace", default="30s", show_default=True, help="How long calls in flight may take at shutdown.")
@click.option(
    "--drain",
    default="0s",
    show_default=True,
    help="At shutdown, first be not ready and go on serving for so long: until a load balancer has noticed.",
)
@click.option("--store", "place", metavar="PATH|URL|none", help="Where runs are kept; default: a folder .lamina beside the app.")
@click.option("--keep", default="168h", show_default=True, help="How long ended runs and their results are kept.")
@click.option("--plain-errors", is_flag=True, help="Do not send error messages and tracebacks of functions to clients.")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Write every event and action as JSON lines.")
@click.option("--explain", is_flag=True, help="Record what each batch was compared with, for `lamina explain`; slower.")
@click.option("--open", "opens_page", is_flag=True, help="Open the page of the server in a browser when it is ready.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready, and no status line.")
@click.option("--admin-port", type=PORT, help="Management on this port (tokens, deploy, logs); default: none.")
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="Address of management.")
@click.option("--operator-token-file", type=_PEM, help="Token with all scopes that is kept outside the store.")
@click.option("--console", is_flag=True, help="Web console on the management port, 8701 unless --admin-port names another.")
@click.option("--trust-deployers", is_flag=True, help="Take code of tenants also where nothing keeps it apart from others.")
@click.option("--tenant-users", default="200000-265535", show_default=True, help="Users that functions of tenants run as.")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Variable for the operator's own app; repeatable."
)
@click.option(
    "--broker",
    "brokers",
    multiple=True,
    metavar="NAME=URL[,tenant=T]",
    help="Broker whose messages may start runs: mqtt://, nats:// or amqp://; repeatable.",
)
@click.option("--apps", type=click.Path(path_type=Path), help="Where deployed apps are kept; default: beside the store.")
@click.option(
    "--environments", type=click.Path(path_type=Path), help="Where environments of apps are kept; default: beside the store."
)
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path),
    help="Install packages of apps from the wheels in this folder, without an index.",
)
@click.option("--allow-builds", is_flag=True, help="Build packages of apps that have no wheel, which runs their code.")
@click.option(
    "--allow-host", "allow_hosts", multiple=True, metavar="NAME", help="Answer to this host name too; repeatable. *: any name."
)
@click.option(
    "--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN", help="Let web pages of this origin call; repeatable."
)
@click.option("--agents", metavar="HOST:PORT", help="Let agents of other machines join here; values use the next port.")
@click.option("--agents-advertise", metavar="HOST", help="Host name that agents reach this machine by; default: where they have.")
@click.option("--agents-peers", metavar="HOST:PORT,...", help="Where the standbys take agents, for machines that are launched.")
@click.option("--join-token-file", type=_PEM, help="File with the token that agents must know; or LAMINA_JOIN_TOKEN.")
@click.option("--agents-tls-ca", type=_PEM, help="Authority that has signed the certificates of all machines (PEM).")
@click.option("--agents-tls-cert", type=_PEM, help="Certificate of this machine for agents (PEM).")
@click.option("--agents-tls-key", type=_PEM, help="Key of that certificate (PEM).")
@click.option("--no-devices", is_flag=True, help="Run no batches on this machine: agents do.")
@click.option(
    "--launcher",
    "launchers",
    multiple=True,
    metavar="NAME[:ARG][,kind=K][,min=N][,max=N]",
    help="What makes and ends machines with agents: static, command, kubernetes, ray; repeatable.",
)
@click.option("--tls-cert", type=_PEM, help="TLS certificate (PEM).")
@click.option("--tls-key", type=_PEM, help="TLS key (PEM).")
def command(**options: Any) -> int:
    """Serve the functions and workflows of an app over HTTP.

    \b
    Examples:
      lamina serve app.py
      lamina serve my_app/ --wheelhouse wheels/
      lamina serve app.py --policy edf --store none
      lamina serve app.py --emulate h200x2 --port 0
      lamina serve --model classify=resnet50.onnx
    """
    from lamina.cli._serve_command import serve
    from lamina.cli._server_config import server_config

    return serve(server_config(options))
