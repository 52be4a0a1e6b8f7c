"""`lamina plan TASKS`: how many GPUs it takes, cut how, and which function goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from lamina.cli import EXIT_FAILED
from lamina.cli._from_server import from_server_option
from lamina.cli._shared import FiniteFloat, InputFile, console
from lamina.errors import BadValue
from lamina.plugins import DEFAULT_POLICY

if TYPE_CHECKING:
    from lamina.cli import _plan_report as show
    from lamina.cli._plan_input import PlanInput
    from lamina.planner.partitioning.plan import PartitionPlan

MAX_GPUS = 16
"""Where the search for the fewest GPUs gives up."""

TARGET = 0.99
MORE_ROOM = 1.25
MAX_ATTEMPTS = 8
"""A function whose calls miss the target is planned with this much more of its rate, so many times at most (six times in all)."""

_FILE = click.Path(readable=False, path_type=Path)


@click.command()
@click.argument("tasks", required=False, type=InputFile("give a scenario (.toml), or a CSV of model,rate,SLO lines"))
@click.option(
    "--policy",
    help=f"gpulet, gpulet-noint, greedy_part, timesharing or frontier; default {DEFAULT_POLICY}, with --compat gpulet.",
)
@click.option("--gpus", metavar="N | KIND=N,...", help="Available GPUs; default: as few as possible.")
@click.option("--profiles", type=_FILE, help="Folder with the profiler's files, for a list of tasks by name.")
@from_server_option
@click.option("--glet-dir", type=_FILE, help="Folder with gpu-let's files: profiles, memory, inputs.")
@click.option("--sched-config", type=_FILE, help="Flags of the scheduler; default: those of the policy.")
@click.option("--device-config", type=_FILE, help="Kinds of GPUs; default: device-config.json in that folder.")
@click.option("--network", type=FiniteFloat(min=0, min_open=True), help="Gbit/s of input a GPU can receive; default: no limit.")
@click.option("--compat", is_flag=True, help="Plan exactly as the original does, defects included.")
@click.option(
    "--target",
    type=FiniteFloat(0, 1, min_open=True),
    help=f"Share of calls of every function or workflow to be within SLO; default {TARGET:g}.",
)
@click.option("--check", is_flag=True, help="Simulate the plan for longer, under the input's own loads.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of that simulation.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--plot", type=_FILE, help="Draw the GPUs and their slices (.png or .svg).")
@click.option("--page", type=_FILE, help="Write the plan as a web page (.html).")
def command(
    tasks: Path | None,
    policy: str | None,
    gpus: str | None,
    profiles: Path | None,
    server: str | None,
    glet_dir: Path | None,
    sched_config: Path | None,
    device_config: Path | None,
    network: float | None,
    compat: bool,
    target: float | None,
    check: bool,
    seed: int,
    as_json: bool,
    plot: Path | None,
    page: Path | None,
) -> int:
    """Plan GPUs for TASKS: a scenario (.toml), or a CSV of model,rate,SLO lines. Prints slices, placement, batch sizes and
    SLO attainment.

    \b
    Examples:
      lamina plan scenarios/quickstart.toml --check
      lamina plan tasks.csv --profiles profiles/v100 --gpus 4
      lamina plan tasks.csv --profiles profiles/h200 --policy frontier --target 0.999
      lamina plan --from-server http://127.0.0.1:8700
    """
    from lamina.cli import _plan_report as show
    from lamina.planner.partitioning.catalogue import WHOLE

    policy = policy or ("gpulet" if compat else DEFAULT_POLICY)
    if plot is not None:
        from lamina.sim.plot import check_path

        check_path(plot)
    if server is not None:
        given = _read_from_server(tasks, policy, server, network or 0.0, compat)
    elif tasks is not None:
        given = _read(tasks, policy, profiles, glet_dir, sched_config, device_config, network or 0.0, compat)
    else:
        raise click.UsageError("nothing to plan for: give TASKS, or --from-server URL")
    wanted = _gpus(gpus, given)
    if compat and target is not None:
        raise BadValue("--target: the original plans for no attainment", hint="leave --compat or --target out")
    kinds, plan, estimate = _find(given, wanted, compat, target or TARGET)
    units = {kind: known.cuts[WHOLE] for kind, known in given.catalogue.kinds.items()}
    told = show.PlanReport(policy, plan, kinds, units, given.prices, estimate, target or TARGET)
    if not plan.schedulable and not plan.aborted and not (compat and as_json):
        told = _advise(given, told, wanted)
    if check and plan.schedulable:
        told = show.with_check(told, show.simulate_plan(given, plan, kinds, seed))
    if as_json:
        click.echo(msgspec.json.encode(show.as_published(plan) if compat else show.as_json(told)).decode())
    else:
        console().print(show.tables(told))
    if plot is not None:
        show.save_plot(plan, policy, kinds, plot)
    if page is not None:
        from lamina.cli._shared import write_text

        write_text(show.html_page(told), page)
    return EXIT_FAILED if not plan.schedulable or (target is not None and not told.meets_target) else 0


def _read(
    tasks: Path,
    policy: str,
    profiles: Path | None,
    glet_dir: Path | None,
    sched_config: Path | None,
    device_config: Path | None,
    network_gbit: float,
    compat: bool,
) -> PlanInput:
    """Read the input, from whichever of the files it is in."""
    from lamina.cli import _plan_input as source

    source.check_policy(policy)
    if compat and glet_dir is None:
        raise BadValue("--compat: the original reads its own files only", hint="name their folder with --glet-dir")
    if tasks.suffix == ".toml":
        from lamina.sim import scenario

        return source.from_scenario(scenario.read(tasks), policy, network_gbit)
    if profiles is not None:
        return source.from_profiles(tasks, profiles, policy, network_gbit)
    if glet_dir is not None:
        return source.from_glet(tasks, policy, glet_dir, sched_config, device_config, network_gbit, compat)
    raise BadValue("--profiles: profiles are needed", hint="name a folder with them, or with gpu-let's files (--glet-dir)")


def _read_from_server(tasks: Path | None, policy: str, url: str, network_gbit: float, compat: bool) -> PlanInput:
    """Input with the profiles that a server has learnt; without TASKS, with all else that it serves and has."""
    from lamina.cli import _from_server as server
    from lamina.cli import _plan_input as source
    from lamina.sim import scenario

    source.check_policy(policy)
    if compat:
        raise BadValue("--compat: the original reads its own files only", hint="leave --from-server out")
    if tasks is None:
        return source.from_scenario(server.scenario_from_server(url), policy, network_gbit)
    if tasks.suffix == ".toml":
        return source.from_scenario(server.with_server_profiles(scenario.read(tasks), url), policy, network_gbit)
    found = server.fetch_snapshot(url)
    return source.from_known_profiles(
        tasks, found.profiles, policy, network_gbit, {one.kind: one for one in found.devices}, f"--from-server {url}"
    )


def _gpus(text: str | None, given: PlanInput) -> list[str] | None:
    """Kinds of the GPUs; None: to be found."""
    if text is None:
        return None
    known = given.kinds
    usual = given.own or known
    kinds: list[str] = []
    for pair in text.split(","):
        kind, equals, count = pair.strip().rpartition("=")
        if not equals and len(set(usual)) != 1:
            raise BadValue(f"--gpus {text!r}: which kind?", hint=f"write {usual[0]}={count}; there are {', '.join(known)}")
        kind = kind if equals else usual[0]
        if kind not in known:
            raise BadValue(f"--gpus {text!r}: no kind {kind!r}", hint=f"there are {', '.join(known)}")
        if not count.isdigit() or int(count) > 1000:
            raise BadValue(f"--gpus {text!r}: {count!r} is not a number of GPUs", hint=f"write 4, or {known[0]}=4")
        kinds += [kind] * int(count)
    if not kinds:
        raise BadValue(f"--gpus {text!r}: no GPU at all", hint="at least one")
    return sorted(kinds)


def _find(
    given: PlanInput, gpus: list[str] | None, compat: bool, target: float
) -> tuple[Sequence[str], PartitionPlan, show.PlanCheck | None]:
    """Plan, kinds of its GPUs, and estimate: on the GPUs that are given, else on as few as possible.

    Planners know rates and rounds, not bursts in a row. So a plan is tried out at the peak rates, in a short simulation, and
    functions whose calls miss the target get more room until all meet it. If that fits nowhere, the best plan is returned.
    """
    from lamina.cli import _plan_report as show

    if gpus is None and compat and not given.own:
        raise BadValue("--compat: the scheduler configuration names no GPUs", hint="add --gpus")
    if compat:
        gpus = gpus or given.own
        return gpus, given.planner.plan(given.tasks, gpus), None
    best: tuple[Sequence[str], PartitionPlan, show.PlanCheck | None] | None = None
    room: dict[str, float] = {}
    for _ in range(MAX_ATTEMPTS):
        tasks = [replace(task, rate=task.rate * room.get(given.name_of(task), 1.0)) for task in given.tasks]
        kinds: Sequence[str]
        if gpus is not None:
            kinds, plan = gpus, given.planner.plan(tasks, gpus)
        else:
            kinds, plan = given.planner.plan_fewest_gpus(tasks, sorted(set(given.own or given.kinds)), MAX_GPUS)
        if not plan.schedulable:
            return best or (kinds, plan, None)
        estimate = show.estimate_plan(given, plan, kinds)
        if best is None or best[2] is None or estimate.worst > best[2].worst:
            best = (kinds, plan, estimate)
        short = [name for name, attainment in estimate.by_function.items() if attainment < target]
        if not short:
            return kinds, plan, estimate
        for function in given.functions_of(short):
            room[function] = room.get(function, 1.0) * MORE_ROOM
    assert best is not None, "there is always an attempt"
    return best


def _advise(given: PlanInput, told: show.PlanReport, wanted: list[str] | None) -> show.PlanReport:
    """Advice for a plan that does not fit: the largest scale of all rates, or the number of GPUs needed."""
    told = replace(told, scale=given.planner.largest_scale(given.tasks, told.kinds))
    if wanted is None or not told.plan.headroom:  # every number was tried, or none would help
        return told
    kinds, plan = given.planner.plan_fewest_gpus(given.tasks, sorted(set(wanted)), MAX_GPUS)
    return replace(told, needed=tuple(kinds) if plan.schedulable else ())
