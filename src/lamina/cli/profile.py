"""`lamina profile FILE[:FUNCTION]`: measure a function on slices of a device, and write what serving and plans start from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from lamina.cli import EXIT_STOPPED
from lamina.cli._profile_report import latencies
from lamina.errors import BadValue
from lamina.units import parse_share, parse_us, show_us

if TYPE_CHECKING:
    from lamina.profiler.measurement import MeasurementProgress
    from lamina.profiler.session import ProfileResult


@click.command()
@click.argument("target", metavar="FILE[:FUNCTION]")
@click.argument("function", required=False, metavar="")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Device to measure on.")
@click.option("--budget", default="60s", show_default=True, help="Time limit for each function.")
@click.option("--target", "sure", default="5%", show_default=True, help="Stop when every place is known to this uncertainty.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write to; default: `profiles` beside the app.")
@click.option("--input", "inputs", multiple=True, metavar="JSON|@FILE", help="A sample input, instead of examples(); repeatable.")
@click.option("--fresh", is_flag=True, help="Discard earlier runs instead of resuming.")
@click.option("--predict", "kind", metavar="KIND", help="Only predict the latency of a torch model on this kind of device.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per function, and no table.")
def command(
    target: str,
    function: str | None,
    device: Literal["cpu", "gpu"],
    budget: str,
    sure: str,
    out: Path | None,
    inputs: tuple[str, ...],
    fresh: bool,
    kind: str | None,
    as_json: bool,
) -> int:
    """Measure a function of an app, or all that have sample inputs, and write their profiles.

    \b
    Examples:
      lamina profile app.py:classify --budget 30s
      lamina profile app.py:classify --input @cat.png
      lamina profile app.py:classify --predict h200
    """
    from lamina.profiler import session

    if function is not None:
        raise click.UsageError(f"one function of a file is written {target}:{function}")
    if kind is not None:
        return _predict(target, kind, out, as_json)
    budget_s = parse_us(budget, "--budget") / 1e6
    if not budget_s:
        raise BadValue(f"--budget: {budget!r} is no time at all", hint="a minute is enough for most: 60s")
    options = session.ProfileOptions(out=out, target=parse_share(sure, "--target"), budget_s=budget_s, fresh=fresh)
    for one in session.find_targets(target, [_body(text) for text in inputs]):
        bench = session.open_bench(one, device)
        try:
            with _progress(one.function.name, budget_s, options.target) as watch:
                result = session.profile_function(one, bench, options, watch)
        finally:
            bench.close()
        _show(result, as_json)
        if result.stopped:
            return EXIT_STOPPED
    return 0


def _predict(target: str, kind: str, out: Path | None, as_json: bool) -> int:
    from lamina.predict.profile import read
    from lamina.profiler import build_profile, session
    from lamina.profiler.model_trace import predict_profile

    where, function = session.find_function(target)
    folder = out if out is not None else where.parent / "profiles"
    path = folder / f"{function.name}.{kind}.json"
    if path.exists() and read(path).meta.get("source") != "predicted":
        raise BadValue(f"{path} was measured, a guess would replace it", hint="keep the guess elsewhere: --out FOLDER")
    profile = predict_profile(function, kind)
    folder.mkdir(parents=True, exist_ok=True)
    build_profile.write_atomically(profile, path)
    if as_json:
        told = {"function": profile.function, "device": kind, "file": str(path), "points": len(profile.points), **profile.meta}
        click.echo(msgspec.json.encode(told).decode())
        return 0
    latencies(profile)
    click.echo(f"predicted from {profile.meta['learnt_from']} on {kind}, nothing was measured", err=True)
    if profile.meta["worth_measuring"]:
        click.echo(f"worth measuring first: {profile.meta['worth_measuring']}", err=True)
    click.echo(f"{path}\n", err=True)
    return 0


def _body(text: str) -> Any:
    from lamina.cli._shared import parse_inputs

    return parse_inputs(text, None, ())[0]


def _show(result: ProfileResult, as_json: bool) -> None:
    profile, outcome, why = result.profile, result.outcome, result.uncertainty_reason
    if as_json:
        told = {
            "function": profile.function,
            "device": profile.device,
            "file": str(result.path),
            "points": len(profile.points),
            "spent_s": round(outcome.spent_s, 2),
            "unsure": round(outcome.uncertainty, 4) if math.isfinite(outcome.uncertainty) else None,
            "reached": outcome.reached,
            "why_unsure": why,
            "kept_runs": result.kept_runs,
        }
        click.echo(msgspec.json.encode(told).decode())
        return
    if result.dropped:
        click.echo(f"earlier runs are not used: {result.dropped}", err=True)
    latencies(profile)
    sure = f"sure to {100 * outcome.uncertainty:.1f}%" if math.isfinite(outcome.uncertainty) else "not sure of anything yet"
    kept = f", {result.kept_runs} runs from before" if result.kept_runs else ""
    click.echo(
        f"{_points(len(profile.points))} in {outcome.spent_s:.1f}s{kept}, {sure}; "
        f"load {show_us(profile.load_us)}, {profile.memory_mib} MiB",
        err=True,
    )
    if why:
        click.echo(f"target of {profile.meta['target']:.0%} not reached: {why}\nrun the same command to resume", err=True)
    click.echo(f"{result.path}\n", err=True)


def _points(count: int) -> str:
    return f"{count} point{'s'[: count != 1]}"


@contextmanager
def _progress(name: str, budget_s: float, target: float) -> Iterator[Callable[[MeasurementProgress], None] | None]:
    """A bar on a terminal, nothing elsewhere: time spent, and how sure it is so far."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=budget_s, state="loading")

        def watch(progress: MeasurementProgress) -> None:
            unsure = f"{100 * progress.uncertainty:.1f}%" if math.isfinite(progress.uncertainty) else "?"
            state = f"{_points(progress.points)}, sure to {unsure} (wanted {100 * target:g}%)"
            bar.update(task, completed=progress.spent_s, state=state if progress.points else "warming up")

        yield watch
