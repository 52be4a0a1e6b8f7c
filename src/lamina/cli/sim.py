"""`lamina sim SCENARIO`: a scenario through the real controller and policy, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lamina.cli._from_server import from_server_option
from lamina.cli._shared import console, policy_options
from lamina.errors import BadValue

if TYPE_CHECKING:
    from lamina.core.eventlog import EventLogWriter
    from lamina.sim.scenario import Scenario


@click.command()
@click.argument("scenario", required=False, type=click.Path(readable=False, path_type=Path))
@from_server_option
@click.option("--policy", help="Policy to use instead of the scenario's: a name, or the path of a file.")
@click.option("--policy-option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the policy; repeatable.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed to use instead of the scenario's.")
@click.option("--calls", type=click.IntRange(min=1), help="Stop after this number of calls.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines instead of a table: targets, functions, devices, total.")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Write every event and action as JSON lines.")
@click.option("--explain", is_flag=True, help="Log decisions and their alternatives too, for `lamina explain`.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw latency, rates and utilisation (.png or .svg).")
@click.option(
    "--charge-decisions", is_flag=True, help="Add the time the controller takes on this machine to the simulated clock."
)
@click.option("--check", is_flag=True, help="Check every invariant after every event; slow.")
def command(
    scenario: Path | None,
    server: str | None,
    policy: str | None,
    options: tuple[str, ...],
    seed: int | None,
    calls: int | None,
    as_json: bool,
    log_file: Path | None,
    explain: bool,
    plot: Path | None,
    charge_decisions: bool,
    check: bool,
) -> int:
    """Simulate a SCENARIO file: SLO attainment, latency and cost.

    \b
    Examples:
      lamina sim scenarios/quickstart.toml --policy fifo
      lamina sim scenario.toml --seed 7 --json
      lamina sim scenario.toml --log events.jsonl --explain
      lamina sim --from-server http://127.0.0.1:8700 --policy edf
    """
    from lamina.sim import scenario as scenarios
    from lamina.sim import summary as summaries
    from lamina.sim.decision_charge import DecisionCharge
    from lamina.sim.run import run

    if explain and log_file is None:
        raise BadValue("--explain: no log to write it to", hint="add --log FILE")
    if plot is not None:
        from lamina.sim.plot import check_path

        check_path(plot)
    if server is not None:
        from lamina.cli._from_server import scenario_from_server, with_server_profiles

        read = with_server_profiles(scenarios.read(scenario), server) if scenario is not None else scenario_from_server(server)
    elif scenario is not None:
        read = scenarios.read(scenario)
    else:
        raise click.UsageError("nothing to simulate: give a SCENARIO, or --from-server URL")
    with _log(log_file) as writer, _progress(read, calls) as progress:
        summary = run(
            read,
            policy,
            policy_options(options),
            seed=seed,
            calls=calls,
            progress=progress,
            watch=writer.write if writer else None,
            check=check,
            explain=explain,
            decisions=DecisionCharge() if charge_decisions else None,
        )
    if as_json:
        click.echo(summaries.json_lines(summary), nl=False)
    else:
        terminal = console()
        terminal.print(summaries.tables(summary, terminal.width))
    if plot is not None:
        from lamina.sim.plot import save

        save(summary, plot)
    return 0


@contextmanager
def _log(path: Path | None) -> Iterator[EventLogWriter | None]:
    """Where every event and action is written, if anywhere."""
    if path is None:
        yield None
        return
    from lamina.core.eventlog import EventLogWriter

    try:
        writer = EventLogWriter(path)
    except OSError as error:
        raise BadValue(f"--log {path}: {error.strerror}", hint="give a file in a folder that is there") from None
    with closing(writer):
        yield writer


@contextmanager
def _progress(scenario: Scenario, calls: int | None) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere. How far it is shows in calls or in virtual time, whatever the limit is."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from lamina.types import NEVER_US

    limit = calls or scenario.calls
    timed = not limit and scenario.duration_us < NEVER_US
    total = limit or (scenario.duration_us / 1e6 if timed else None)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[calls]:,} calls"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total, calls=0)
        yield lambda number, now_us: bar.update(task, completed=now_us / 1e6 if timed else number, calls=number)
