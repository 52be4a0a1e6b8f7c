"""`lamina cluster`: agents on plain hosts or on a Ray cluster, and the nodes of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from lamina.cli._admin_client import ask, json_option, show, url_option
from lamina.cli._shared import CommandGroup
from lamina.cluster.hosts import SSH, AgentHost, parse_hosts, start_agent, stop_agent
from lamina.errors import BadValue, LaminaError, LoadFailed, Unreachable
from lamina.units import parse_us

_AT_ONCE = 16
_hosts = click.argument("hosts", nargs=-1, metavar="[HOST[=NODE]]...")
_hosts_file = click.option("--hosts", "hosts_file", type=click.Path(path_type=Path), help="File with one HOST[=NODE] a line.")
_ssh = click.option("--ssh", default=SSH, show_default=True, help="Command that reaches a host; localhost needs none.")
_ray = click.option("--ray", metavar="ADDRESS", help="A Ray cluster instead of hosts: HOST:6379, ray://HOST:10001 or auto.")


@click.group(cls=CommandGroup)
def command() -> None:
    """Agents on several machines: start, list, drain and end them."""


@command.command()
@_hosts
@_hosts_file
@_ray
@click.option("--count", type=click.IntRange(1, 1000), default=1, help="How many agents, with --ray.")
@click.option("--join", required=True, metavar="HOST:PORT[,...]", help="Where the servers listen for agents: serve --agents.")
@click.option("--token-file", type=click.Path(path_type=Path, readable=False), required=True, help="File with the join token.")
@click.option("--agent-option", "options", multiple=True, metavar="OPTION", help="Option for each agent; repeatable.")
@click.option("--program", default="", help="How an agent is called on a host; default: lamina agent.")
@click.option("--wait", default="0s", show_default=True, help="Wait until all of them are live, at most so long.")
@_ssh
@url_option
def up(
    hosts: tuple[str, ...],
    hosts_file: Path | None,
    ray: str | None,
    count: int,
    join: str,
    token_file: Path,
    options: tuple[str, ...],
    program: str,
    wait: str,
    ssh: str,
    admin_url: str,
) -> None:
    """Start agents that join a server.

    \b
    Examples:
      lamina cluster up gpu1 gpu2 --join leader:8710 --token-file token
      lamina cluster up localhost=a localhost=b --join 127.0.0.1:8710 --token-file token
      lamina cluster up --ray auto --count 4 --join leader:8710 --token-file token
    """
    limit_s = parse_us(wait, "--wait") / 1e6
    token = _read_token(token_file)
    if ray is not None:
        _reject_hosts(hosts, hosts_file)
        launcher = _ray_launcher(ray, join, token)
        launcher.want("", count)
        nodes = [str(one["node"]) for one in launcher.list()]
        click.echo(f"Ray keeps {len(nodes)} agents: {', '.join(sorted(nodes))}")
    else:
        places = _places(hosts, hosts_file)
        nodes = [one.node for one in places]
        _each(places, lambda at: start_agent(at, join, token, ssh=ssh, program=program, options=options))
    if limit_s:
        _wait_live(nodes, limit_s, admin_url)


@command.command()
@url_option
@json_option
def status(admin_url: str, as_json: bool) -> None:
    """Nodes of a server: state, devices, round trip, instances."""
    nodes: list[dict[str, Any]] = ask("GET", "/v1/nodes", admin_url)
    if as_json:
        show(nodes, {}, True, "")
        return
    rows = [
        {
            "name": one["name"],
            "state": one["state"],
            "devices": ", ".join(f"{device['kind']} ({device['units']})" for device in one["devices"]) or "-",
            "instances": len(one["instances"]),
            "rtt": f"{one['rtt_us'] / 1000:.2f} ms",
            "silent": f"{one['silent_ms']} ms",
            "address": one["address"],
        }
        for one in nodes
    ]
    columns = {"name": "NODE", "state": "STATE", "devices": "DEVICES (UNITS)", "instances": "INSTANCES"}
    show(rows, {**columns, "rtt": "ROUND TRIP", "silent": "LAST BEAT", "address": "ADDRESS"}, False, "no nodes")


@command.command()
@click.argument("node")
@url_option
def drain(node: str, admin_url: str) -> None:
    """Drain a node: its instances are replaced elsewhere, then its agent leaves."""
    ask("POST", f"/v1/nodes/{node}/drain", admin_url, b"{}")
    click.echo(f"{node} is draining")


@command.command()
@_hosts
@_hosts_file
@_ray
@click.option("--grace", default="60s", show_default=True, help="How long an agent may take to drain.")
@_ssh
def down(hosts: tuple[str, ...], hosts_file: Path | None, ray: str | None, grace: str, ssh: str) -> None:
    """End agents: each drains itself first."""
    grace_s = parse_us(grace, "--grace") / 1e6
    if ray is not None:
        _reject_hosts(hosts, hosts_file)
        launcher = _ray_launcher(ray, "", "")
        for one in launcher.list():
            launcher.release(str(one["node"]))
            click.echo(f"{one['node']}: ended")
        return
    _each(_places(hosts, hosts_file), lambda at: stop_agent(at, grace_s, ssh=ssh))


def _places(hosts: Sequence[str], file: Path | None) -> list[AgentHost]:
    given = list(hosts)
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadValue(f"--hosts: {error}", hint="a file with one HOST or HOST=NODE a line") from None
        given += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not given:
        raise BadValue("no hosts", hint="lamina cluster up gpu1 gpu2 ..., --hosts FILE, or --ray ADDRESS")
    return parse_hosts(given)


def _reject_hosts(hosts: Sequence[str], file: Path | None) -> None:
    if hosts or file is not None:
        raise BadValue("--ray: hosts are given too", hint="Ray chooses its nodes; leave the hosts out")


def _ray_launcher(address: str, join: str, token: str) -> Any:
    from lamina.cluster.launchers import JoinTerms, LaunchTerms, open_launcher

    addresses = tuple(text.strip() for text in join.split(",") if text.strip())
    return open_launcher(LaunchTerms("ray", "" if address == "auto" else address), JoinTerms(addresses, token))


def _read_token(file: Path) -> str:
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(
            f"--token-file: {error}", hint="openssl rand -hex 32 > FILE, the same for serve --join-token-file"
        ) from None
    if not token:
        raise BadValue(f"--token-file: {file} is empty", hint="openssl rand -hex 32 > FILE")
    return token


def _each(places: Sequence[AgentHost], work: Callable[[AgentHost], str]) -> None:
    """Do it on all hosts at once; one that fails does not keep the others from it."""
    failed: list[str] = []

    def one(at: AgentHost) -> tuple[AgentHost, str, bool]:
        try:
            return at, work(at), True
        except LaminaError as error:
            return at, str(error), False

    with ThreadPoolExecutor(min(_AT_ONCE, len(places))) as pool:
        for at, said, done in pool.map(one, places):
            click.echo(f"{at.node}: {said}", err=not done)
            if not done:
                failed.append(at.node)
    if failed:
        raise LoadFailed(f"{len(failed)} of {len(places)} hosts failed: {', '.join(failed)}", hint="the others are done")


def _wait_live(nodes: Sequence[str], limit_s: float, admin_url: str) -> None:
    ends_s = time.monotonic() + limit_s
    missing = set(nodes)
    while missing:
        states = {one["name"]: one["state"] for one in ask("GET", "/v1/nodes", admin_url)}
        missing = {node for node in nodes if states.get(node) != "live"}
        if missing and time.monotonic() > ends_s:
            raise Unreachable(
                f"after {limit_s:g} s these have not joined: {', '.join(sorted(missing))}",
                hint="~/.lamina/agents/NODE/log on their hosts says why",
            )
        time.sleep(0.1)
    click.echo(f"{len(nodes)} nodes are live")
