"""`lamina plan TASKS`: how many GPUs it takes, cut how, and which model goes where."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lamina.cli import EXIT_FAILED
from lamina.errors import BadValue

if TYPE_CHECKING:
    from lamina.cli._glet_files import SchedConfig
    from lamina.planner.glet import Plan, Planner, Task

MOST_GPUS = 16
"""Where the search for the fewest GPUs gives up."""

_CONFIGS = {
    "gpulet": "config-gpulet-int.json",
    "gpulet-noint": "config-gpulet-noint.json",
    "greedy_part": "config-greedy_part.json",
    "timesharing": "config-timesharing_only.json",
}
_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("tasks", type=_FILE)
@click.option("--policy", default="gpulet", show_default=True, help="gpulet, gpulet-noint, greedy_part or timesharing.")
@click.option("--glet-dir", type=_FILE, help="Folder with gpu-let's files: profiles, memory, inputs.")
@click.option("--sched-config", type=_FILE, help="Flags of the scheduler; default: those of the policy.")
@click.option("--device-config", type=_FILE, help="Kinds of GPUs; default: device-config.json in that folder.")
@click.option("--gpus", metavar="N | KIND=N,...", help="GPUs there are; default: as few as possible.")
@click.option(
    "--network", type=click.FloatRange(min=0, min_open=True), help="Gbit/s of input a GPU can receive; default: no limit."
)
@click.option("--compat", is_flag=True, help="Exactly as the original plans, quirks and all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--plot", type=_FILE, help="Draw the GPUs and their slices (.png or .svg).")
def command(
    tasks: Path,
    policy: str,
    glet_dir: Path | None,
    sched_config: Path | None,
    device_config: Path | None,
    gpus: str | None,
    network: float | None,
    compat: bool,
    as_json: bool,
    plot: Path | None,
) -> int:
    """Plan GPUs for TASKS, a CSV of model,rate,SLO lines: how they are cut, who runs where, in which batches."""
    from lamina.cli import _plan_show as show
    from lamina.cli._glet_files import read_catalogue
    from lamina.cli._glet_tasks import read_tasks
    from lamina.planner.glet import COMPAT, NETWORK_GBITS, REPAIRED, Planner

    if plot is not None:
        from lamina.sim.plot import check_name

        check_name(plot)
    _check_policy(policy)
    if glet_dir is None:
        raise BadValue("--glet-dir: profiles are needed", hint="name a folder with gpu-let's files")
    config = _config(policy, glet_dir, sched_config)
    catalogue = read_catalogue(glet_dir, device_config or glet_dir / "device-config.json")
    wanted = read_tasks(tasks, catalogue)
    limit = network * 1e9 / 2**30 if network else NETWORK_GBITS if compat else float("inf")
    planner = Planner(catalogue, replace(config.rules, network_gbits=limit), COMPAT if compat else REPAIRED)
    kinds, plan = _find(planner, wanted, _gpus(gpus, config, list(catalogue.kinds)), config, compat)
    scale = None if plan.schedulable or plan.aborted or (compat and as_json) else planner.largest_scale(wanted, kinds)
    if as_json:
        import msgspec

        told = show.as_published(plan) if compat else show.as_json(plan, kinds, scale)
        click.echo(msgspec.json.encode(told).decode())
    else:
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=120)
        console.print(show.tables(plan, policy, kinds, scale))
    if plot is not None:
        from lamina.cli._plan_plot import save

        save(plan, policy, kinds, plot)
    return 0 if plan.schedulable else EXIT_FAILED


def _check_policy(name: str) -> None:
    if name == "frontier":
        raise BadValue("--policy 'frontier': it has no plan ahead of time yet", hint="`lamina sim` plays it on a scenario")
    if name not in _CONFIGS:
        import difflib

        close = difflib.get_close_matches(name, _CONFIGS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_CONFIGS)}"
        raise BadValue(f"--policy {name!r}: no such policy can plan", hint=hint)


def _config(policy: str, folder: Path, file: Path | None) -> SchedConfig:
    """The file that was named, gpu-let's own for that policy, or its flags without a file."""
    from lamina.cli._glet_files import SchedConfig, read_sched_config
    from lamina.planner.glet import POLICIES

    usual = folder / "SchedConfigs" / _CONFIGS[policy]
    if file is not None or usual.is_file():
        return read_sched_config(file or usual)
    rules = POLICIES[policy]
    return SchedConfig(part=rules.partitioning, interference=rules.interference, self_tuning=1 if rules.self_tuning else None)


def _gpus(text: str | None, config: SchedConfig, known: Sequence[str]) -> list[str] | None:
    """The kind of every GPU; None: to be found."""
    if text is None:
        return None
    usual = [gpu.type for gpu in config.gpus] or list(known)
    kinds: list[str] = []
    for pair in text.split(","):
        kind, equals, count = pair.strip().rpartition("=")
        if not equals and len(set(usual)) != 1:
            raise BadValue(f"--gpus {text!r}: which kind?", hint=f"write {usual[0]}={count}; there are {', '.join(known)}")
        kind = kind if equals else usual[0]
        if kind not in known:
            raise BadValue(f"--gpus {text!r}: no kind {kind!r}", hint=f"there are {', '.join(known)}")
        if not count.isdigit() or int(count) > 1000:
            raise BadValue(f"--gpus {text!r}: {count!r} is not a number of GPUs", hint="write 4, or 2080ti=4,3080=2")
        kinds += [kind] * int(count)
    if not kinds:
        raise BadValue(f"--gpus {text!r}: no GPU at all", hint="at least one")
    return sorted(kinds)


def _find(
    planner: Planner, tasks: Sequence[Task], gpus: list[str] | None, config: SchedConfig, compat: bool
) -> tuple[Sequence[str], Plan]:
    """On the GPUs that are given; the original takes them from its configuration; else as few as possible."""
    own = sorted(gpu.type for gpu in config.gpus for _ in range(gpu.num))
    unknown = set(own) - set(planner.catalogue.kinds)
    if unknown:
        raise BadValue(
            f"scheduler configuration: no kind {min(unknown)!r}", hint=f"there are {', '.join(planner.catalogue.kinds)}"
        )
    if gpus is None and compat and own:
        gpus = own
    if gpus is None and compat:
        raise BadValue("--compat: the scheduler configuration names no GPUs", hint="add --gpus")
    kinds = sorted(set(gpus or own or planner.catalogue.kinds))
    if gpus is not None:
        return gpus, planner.plan(tasks, gpus)
    return planner.fewest(tasks, kinds, MOST_GPUS)
