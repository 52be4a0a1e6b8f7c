"""`lamina top`: slices and their owners, what functions hold and use, and how calls fare, live in a terminal."""

from __future__ import annotations

import os
import time
from typing import Any

import click
import msgspec

from lamina.cli._shared import FiniteFloat, console, url_option
from lamina.units import show_bytes

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@click.command()
@url_option
@click.option("--every", default=1.0, show_default=True, type=FiniteFloat(min=0.1), help="Refresh interval in seconds.")
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print once as JSON, as GET /v1/status.")
def command(url: str, every: float, once: bool, as_json: bool) -> int:
    """Watch a running server: slices, owners, shares, memory, bandwidth, queues, and p99 against the SLO.

    \b
    Examples:
      lamina top
      lamina top --once --url http://127.0.0.1:8700
    """
    from lamina.sdk.client import Client

    with Client(url, token=os.environ.get("LAMINA_TOKEN") or None) as client:
        if as_json:
            click.echo(msgspec.json.encode(client.status()).decode())
            return 0
        if once:
            console().print(page(client.status()))
            return 0
        from rich.live import Live

        with Live(page(client.status()), auto_refresh=False, screen=True) as live:
            try:
                while True:
                    time.sleep(every)
                    live.update(page(client.status()), refresh=True)
            except KeyboardInterrupt:
                return 0


def page(status: dict[str, Any]) -> Any:
    """Status as tables."""
    from rich.console import Group

    letters = {function["name"]: _LETTERS[i % len(_LETTERS)] for i, function in enumerate(status["functions"])}
    return Group(_devices(status, letters), "", _functions(status, letters), "", _targets(status), _memory(status))


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        left = column.startswith("<")
        table.add_column(column.lstrip("<"), justify="left" if left else "right", no_wrap=left)
    return table


def _devices(status: dict[str, Any], letters: dict[str, str]) -> Any:
    table = _table(
        f"{status['calls']} calls in flight; units: A-Z running that function, . reserved, - free",
        "<device", "<kind", "<units", "leased", "memory MiB", "weights", "bandwidth", "restarts",
    )  # fmt: skip
    for device in status["devices"]:
        executor = device["executor"] or {}
        used_mib = executor.get("device_used_mib") or device["memory_used_mib"]
        table.add_row(
            device["id"],
            f"{device['kind']} soft" if device["soft"] else device["kind"],
            unit_map(device, letters),
            f"{device['leased']}/{device['units']}",
            f"{used_mib}/{device['memory_mib']}",
            str(executor.get("weights_mib", "")),
            "" if device["bandwidth"] is None else f"{100 * device['bandwidth']:.0f} % {device['bandwidth_from']}",
            str(executor.get("restarts", "")),
        )
    return table


def unit_map(device: dict[str, Any], letters: dict[str, str]) -> str:
    """Map of a device, one sign per unit: the running function, a reserved slice, or free."""
    signs = ["-"] * device["units"]
    for home in device["homes"]:
        _paint(signs, home["mask"], ".")
    for slice_ in device["slices"]:
        _paint(signs, slice_["mask"], letters.get(slice_["function"], "?"))
    return "".join(signs)


def _paint(signs: list[str], mask: int, sign: str) -> None:
    for unit in range(len(signs)):
        if mask >> unit & 1:
            signs[unit] = sign


def _functions(status: dict[str, Any], letters: dict[str, str]) -> Any:
    table = _table(
        f"shares of the devices in the last {status['window_s']:g} s",
        "<", "<function", "<instances", "queue", "held", "used", "batches/s", "calls/s", "per batch",
    )  # fmt: skip
    for function in status["functions"]:
        phases = [f"{one['device']}:{one['phase']}" for one in function["instances"]]
        batches, jobs = function["batches_per_s"], function["jobs_per_s"]
        table.add_row(
            letters[function["name"]],
            function["name"],
            " ".join(phases) or "-",
            str(function["queue"]),
            f"{100 * function['held']:.1f} %",
            f"{100 * function['used']:.1f} %",
            f"{batches:g}",
            f"{jobs:g}",
            f"{jobs / batches:.1f}" if batches else "",
        )
    return table


def _targets(status: dict[str, Any]) -> Any:
    table = _table(
        "calls of the last minute", "<target", "<kind", "answers", "per s", "p50 ms", "p99 ms", "SLO ms", "within SLO", "<"
    )
    for target in status["targets"]:
        if not target["answers"]:
            table.add_row(target["name"], target["kind"], "0", "", "", "", _number(target["slo_ms"]), "", "")
            continue
        late = target["slo_ms"] is not None and target["p99_ms"] > target["slo_ms"]
        table.add_row(
            target["name"],
            target["kind"],
            str(target["answers"]),
            f"{target['per_s']:g}",
            _number(target["p50_ms"]),
            _number(target["p99_ms"]),
            _number(target["slo_ms"]),
            f"{100 * target['met']:.1f} %",
            "[red]p99 over SLO[/red]" if late else "",
        )
    return table


def _memory(status: dict[str, Any]) -> str:
    """Memory that clients make the server hold, by layer."""
    account = status.get("memory")
    if not account:  # of an older server
        return ""
    layers = ", ".join(f"{name} {show_bytes(size)}" for name, size in account["layers"].items() if size)
    refused = sum(account["refusals"].values())
    used = f"memory of clients {show_bytes(account['used_bytes'])} of {show_bytes(account['limit_bytes'])}"
    return f"{used}{f' ({layers})' if layers else ''}; refused for want of it: {refused}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
