"""`lamina traffic APP`: how calls are divided between versions."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click
import msgspec

from lamina.cli._admin_client import ask, json_option, show, url_option


@click.command()
@click.argument("app")
@click.argument("weights", nargs=-1, metavar="[VERSION=PERCENT]...")
@click.option("--shadow", type=int, metavar="VERSION", help="Copy every call to this version; its answers are dropped.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE:VERSION", help="Calls with this header go to a version; repeatable."
)
@click.option("--attainment-below", type=click.FloatRange(0, 1), help="Roll a version back when fewer of its calls are in time.")
@click.option("--errors-above", type=click.FloatRange(0, 1), help="Roll a version back when more of its calls fail.")
@click.option("--after-calls", type=click.IntRange(1), default=100, show_default=True, help="Calls a version is judged on.")
@url_option
@json_option
def command(
    app: str,
    weights: tuple[str, ...],
    shadow: int | None,
    headers: tuple[str, ...],
    attainment_below: float | None,
    errors_above: float | None,
    after_calls: int,
    admin_url: str,
    as_json: bool,
) -> None:
    """Show how calls are divided between versions of an app, or divide them.

    \b
    Examples:
      lamina traffic shop
      lamina traffic shop 3=90 4=10 --attainment-below 0.95 --errors-above 0.02
      lamina traffic shop 3=100 --header x-cohort=b:4
      lamina traffic shop 4=100
    """
    path = f"/v1/apps/{quote(app, safe='')}/traffic"
    if weights:
        limits = {"attainment_below": attainment_below, "errors_above": errors_above}
        rule = {name: value for name, value in limits.items() if value is not None}
        body = {
            "weights": dict(_weight(text) for text in weights),
            "shadow": shadow,
            "headers": [_header(text) for text in headers],
            "rollback_if": {**rule, "after_calls": after_calls} if rule else None,
        }
        found = ask("PUT", path, admin_url, msgspec.json.encode(body))
    elif shadow is not None or headers or attainment_below is not None or errors_above is not None:
        raise click.UsageError("give the weights too: lamina traffic APP VERSION=PERCENT ...")
    else:
        found = ask("GET", path, admin_url)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    _print(found)


def _weight(text: str) -> tuple[str, float]:
    version, _, percent = text.partition("=")
    try:
        return version, float(percent)
    except ValueError:
        raise click.UsageError(f"{text!r}: write VERSION=PERCENT, such as 4=10") from None


def _header(text: str) -> dict[str, str]:
    name, equals, rest = text.partition("=")
    value, colon, version = rest.rpartition(":")
    if not (name and equals and value and colon and version):
        raise click.UsageError(f"--header {text!r}: write NAME=VALUE:VERSION, such as x-cohort=b:4")
    return {"name": name, "value": value, "version": version}


def _print(found: dict[str, Any]) -> None:
    rows = []
    for version in sorted({*found["weights"], *found["counts"], *found["rolled_back"]}, key=int):
        gone = found["rolled_back"].get(version)
        role = "stable" if version == found["stable"] else "shadow" if version == found["shadow"] else "candidate"
        weight = 0 if gone is not None else found["weights"].get(version, 0)
        counts = found["counts"].get(version, {})
        rows.append({"version": version, "role": f"rolled back: {gone}" if gone else role, "weight": f"{weight:g}%", **counts})
    columns = {"version": "VERSION", "weight": "WEIGHT", "offered": "OFFERED", "in_time": "IN TIME", "late": "LATE"}
    show(rows, columns | {"refused": "REFUSED", "failed": "FAILED", "role": ""}, False, "")
    for one in found["headers"]:
        version = found["stable"] if str(one["version"]) in found["rolled_back"] else one["version"]
        click.echo(f"{one['name']}: {one['value']} goes to version {version}")
    if found["state"] == "loading":
        click.echo("its versions are being loaded; until then all calls go to the stable one")
