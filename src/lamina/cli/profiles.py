"""`lamina profiles`: what has been measured or learnt. List profiles, show one, draw it, compare two, pull them from a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lamina.cli import _profile_report as show
from lamina.cli._shared import CommandGroup, console
from lamina.errors import BadValue
from lamina.units import show_us

if TYPE_CHECKING:
    from lamina.predict.profile import Profile

FILE = click.Path(readable=False, path_type=Path)


@click.group(cls=CommandGroup)
def command() -> None:
    """Measured latencies of functions: list them, show one, draw it, compare two, pull what a server has learnt."""


@command.command("ls")
@click.argument("folder", type=FILE, default=Path("profiles"))
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def list_all(folder: Path, as_json: bool) -> None:
    """List the profiles in FOLDER and below it."""
    from lamina.predict.profile import read

    if not folder.is_dir():
        raise BadValue(f"no folder {str(folder)!r}", hint="give the folder that holds the profiles")
    rows = [{"file": str(path), **_about(read(path))} for path in sorted(folder.rglob("*.json"))]
    if as_json:
        _echo(rows)
        return
    if not rows:
        click.echo(f"no profiles in {folder}; lamina profile APP.py writes some", err=True)
        return
    table = show.table("function", "device", "points", "batches", "units", "load", "memory", "date", "file")
    for row in rows:
        load, memory = row["load_us"], row["memory_mib"]
        table.add_row(
            row["function"],
            row["device"],
            str(row["points"]),
            f"{row['min_batch']}-{row['max_batch']}",
            f"{row['min_units']}-{row['max_units']}",
            show_us(load) if load else "-",
            f"{memory} MiB" if memory else "-",
            "predicted" if row["source"] == "predicted" else row["date"][:10] or "-",
            row["file"],
        )
    console(show.WIDTH).print(table)


@command.command("show")
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def show_one(file: Path, as_json: bool) -> None:
    """Show the latencies in a profile FILE, and where they come from."""
    from lamina.predict.profile import read

    profile = read(file)
    if as_json:
        _echo(profile)
        return
    show.latencies(profile)
    if profile.load_us or profile.memory_mib:
        click.echo(f"load {show_us(profile.load_us)}, memory {profile.memory_mib} MiB")
    for line in show.other_measurements(profile):
        click.echo(line)
    for name, value in profile.meta.items():
        click.echo(f"{name}: {value}")


@command.command("plot")
@click.argument("file", type=FILE)
@click.option("--out", type=FILE, help="The picture, .svg or .png; default: beside the profile.")
def plot(file: Path, out: Path | None) -> None:
    """Draw latency over batch size, a curve per number of units."""
    import importlib.util

    from lamina.predict.profile import read

    profile = read(file)
    out = out or file.with_suffix(".svg")
    if out.suffix not in (".svg", ".png"):
        raise BadValue(f"--out {out}: no picture ends in {out.suffix!r}", hint="end the name in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadValue("plot: matplotlib is not installed", hint="pip install 'lamina[plots]'")
    if not profile.points:
        raise BadValue(f"{file}: no points to draw")
    show.save(profile, out)
    click.echo(str(out))


@command.command("compare")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def compare_two(before: Path, after: Path, as_json: bool) -> None:
    """Compare two profiles: the ratio of medians at every place both have, and the biggest change."""
    from lamina.predict.profile import compare_profiles, read

    old, new = read(before), read(after)
    found = compare_profiles(old, new)
    if as_json:
        _echo(found)
        return
    table = show.table("units", "batch", "before", "after", "ratio", title=f"{_name(old)} -> {_name(new)}")
    for change in found.changes:
        units = f"{change.units}, {change.cores} cores" if change.cores else str(change.units)
        table.add_row(units, str(change.batch), show_us(change.before_us), show_us(change.after_us), f"{change.ratio:.2f}")
    console(show.WIDTH).print(table)
    big = found.biggest
    click.echo(
        f"median ratio {found.median_ratio:.3f}; biggest change {big.ratio:.2f}x at batch {big.batch} on {big.units} units"
    )
    if found.only_before or found.only_after:
        click.echo(f"not compared: {found.only_before} points only before, {found.only_after} only after")


@command.command("pull")
@click.option("--server", "--url", "url", help="URL of the server; default LAMINA_URL, else http://127.0.0.1:8700.")
@click.option("--out", type=FILE, default=Path("learnt"), show_default=True, help="Folder for the files, made if need be.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array with what was written.")
def pull(url: str | None, out: Path, as_json: bool) -> None:
    """Write what a running server has learnt as profile files, FUNCTION.DEVICE.json each.

    \b
    Examples:
      lamina profiles pull --server http://127.0.0.1:8700 --out learnt
    """
    import os

    from lamina.cli._from_server import fetch_snapshot
    from lamina.cli._shared import DEFAULT_URL
    from lamina.predict.profile import write

    url = url or os.environ.get("LAMINA_URL", DEFAULT_URL)
    found = [one for one in fetch_snapshot(url).profiles if one.points]
    if not found:
        raise BadValue(f"{url} has learnt nothing yet", hint="call its functions first")
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for one in found:
        file = out / f"{one.function}.{one.device}.json"
        write(one, file)
        rows.append({"file": str(file), **_about(one)})
    if as_json:
        _echo(rows)
        return
    for row in rows:
        click.echo(f"{row['file']}: {row['points']} points, {row['source'] or 'as it was given'}")


def _name(profile: Profile) -> str:
    return f"{profile.function} on {profile.device}"


def _about(profile: Profile) -> dict[str, Any]:
    batches, units = [p.batch for p in profile.points] or [0], [p.units for p in profile.points] or [0]
    return {
        "function": profile.function,
        "device": profile.device,
        "points": len(profile.points),
        "min_batch": min(batches),
        "max_batch": max(batches),
        "min_units": min(units),
        "max_units": max(units),
        "load_us": profile.load_us,
        "memory_mib": profile.memory_mib,
        "date": str(profile.meta.get("date", "")),
        "source": str(profile.meta.get("source", "")),
        "machine": str(profile.meta.get("machine", "")),
    }


def _echo(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value).decode())
