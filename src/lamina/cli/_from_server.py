"""Input of `lamina plan`, `lamina sim` and `lamina profiles pull` from a running server: what it has learnt, serves and has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import structs

from lamina.errors import BadValue

if TYPE_CHECKING:
    from lamina.gateway.routes.profiles import ServerSnapshot
    from lamina.predict.profile import Profile
    from lamina.sim.scenario import Scenario

SPAN_US = 60_000_000
"""How long a simulation made from a server lasts."""

F = TypeVar("F", bound=Callable[..., Any])


def from_server_option(command: F) -> F:
    help = "Start from what this server has learnt of its functions; without a file, from its functions, devices and rates too."
    return click.option("--from-server", "server", metavar="URL", help=help)(command)


def fetch_snapshot(url: str) -> ServerSnapshot:
    """Snapshot of a server; `LAMINA_TOKEN` must be an operator's where tokens are needed."""
    from lamina.gateway.routes.profiles import ServerSnapshot
    from lamina.sdk.client import Client

    with Client(url, token=os.environ.get("LAMINA_TOKEN") or None) as client:
        return msgspec.convert(client.profiles(), ServerSnapshot)


def scenario_from_server(url: str) -> Scenario:
    """A server as a scenario: each target is called at the rate of the last minute."""
    from lamina.predict.interference import bandwidth_interference
    from lamina.sim.scenario import Scenario
    from lamina.sim.workload import Workload, steps
    from lamina.types import NEVER_US

    found = fetch_snapshot(url)
    called = {target: rate for target, rate in found.rates.items() if rate > 0}
    if not called:
        raise BadValue(
            f"--from-server {url}: no call was answered there in the last minute", hint="give a file with rates as well"
        )
    known = {one.function for one in found.profiles if one.points}
    flows = {flow.name: flow.functions for flow in found.flows}
    if unknown := sorted({name for target in called for name in flows.get(target, (target,))} - known):
        raise BadValue(f"--from-server {url}: nothing is known yet of {', '.join(unknown)}", hint="call it a few times first")
    return Scenario(
        name=urlsplit(url).netloc or url,
        devices=tuple(found.devices),
        functions=tuple(one for one in found.functions if one.name in known),
        flows=tuple(flow for flow in found.flows if known.issuperset(flow.functions)),
        profiles=tuple(found.profiles),
        loads=tuple(Workload(target=target, segments=steps([(NEVER_US, rate)])) for target, rate in called.items()),
        duration_us=SPAN_US,
        interference=bandwidth_interference(found.profiles) if any(one.bandwidth for one in found.profiles) else None,
    )


def with_server_profiles(scenario: Scenario, url: str) -> Scenario:
    """The scenario with the server's profiles where it has learnt them: same function, same kind of device."""
    return structs.replace(scenario, profiles=tuple(merge_profiles(scenario.profiles, fetch_snapshot(url).profiles, url)))


def merge_profiles(own: Sequence[Profile], learnt: Sequence[Profile], url: str) -> list[Profile]:
    found = {(one.function, one.device): one for one in learnt if one.points}
    merged = [found.get((one.function, one.device), one) for one in own]
    if not any(one is not mine for one, mine in zip(merged, own, strict=True)):
        known = ", ".join(sorted(f"{function} on {device}" for function, device in found)) or "nothing"
        raise BadValue(f"--from-server {url}: none of the functions here is known there", hint=f"it has learnt {known}")
    return merged
