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
    from lamina.gateway.console.what_if import scenario_of

    return scenario_of(fetch_snapshot(url), urlsplit(url).netloc or url, f"--from-server {url}")


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
