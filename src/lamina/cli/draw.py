"""`lamina draw FILE WORKFLOW`: the steps of a workflow as a graph, with the time, slack and batch of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lamina.cli._shared import url_option, write_text
from lamina.errors import BadValue

_IMAGES = (".svg", ".png", ".pdf")

format_option = click.option(
    "--format", type=click.Choice(["mermaid", "dot"]), help="Default: by the ending of the file, .mmd or .dot; else mermaid."
)


@click.command()
@click.argument("file", metavar="FILE[:APP]")
@click.argument("workflow", required=False)
@click.option("--profiles", type=click.Path(path_type=Path), help="Folder of profiles; default: `profiles` beside the app.")
@click.option("--device", "kind", help="Kind of device to plan for; default: the first one with profiles.")
@click.option("--run", "run_id", metavar="RUN", help="Show measurements of this run instead.")
@url_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="File to write; default: WORKFLOW.mmd. .svg, .png and .pdf need Graphviz. - is standard output.",
)
@format_option
def command(
    file: str,
    workflow: str | None,
    profiles: Path | None,
    kind: str | None,
    run_id: str | None,
    url: str,
    output: Path | None,
    format: str | None,
) -> int:
    """Draw a workflow as a Mermaid or DOT graph, with the time, slack and batch of each step: planned, or of a run.

    \b
    Examples:
      lamina draw app.py react -o react.mmd
      lamina draw app.py react -o react.svg
      lamina draw app.py react --run RUN
    """
    from lamina.asl.draw import draw_flow
    from lamina.sdk.app_loader import load_app

    app = load_app(file)
    flow = _chosen(app, workflow).flow
    if run_id is not None:
        notes, subtitle = _measured(flow, run_id, url)
    else:
        notes, subtitle = _planned(app, flow, file, profiles, kind)
    name = f"{flow.name}.{'dot' if format == 'dot' else 'mmd'}"
    write_graph(lambda kind: draw_flow(flow, notes, subtitle, kind), output or Path(name), format)
    return 0


def write_graph(draw: Callable[[Any], str], path: Path, format: str | None) -> None:
    """Write a graph to a file, or standard output for `-`: as text, or rendered by Graphviz if the file is an image."""
    if path.suffix.lower() in _IMAGES:
        _render(draw("dot"), path)
    else:
        write_text(draw(format or ("dot" if path.suffix.lower() in (".dot", ".gv") else "mermaid")), path)


def _render(graph: str, path: Path) -> None:
    import shutil
    import subprocess

    graphviz = shutil.which("dot")
    if graphviz is None:
        hint = "write a .mmd (Mermaid) or .dot file instead, or install Graphviz"
        raise BadValue(f"{path}: images are rendered by Graphviz, and there is no `dot` on the PATH", hint=hint)
    command = [graphviz, f"-T{path.suffix[1:].lower()}", "-o", str(path)]
    done = subprocess.run(command, input=graph, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadValue(f"{path}: dot failed: {done.stderr.strip()[:500]}")
    click.echo(f"wrote {path}", err=True)


def _chosen(app: Any, name: str | None) -> Any:
    from lamina.sdk.workflow import Workflow

    if name is None:
        if len(app.workflows) != 1:
            hint = f"name one: {', '.join(app.workflows)}" if app.workflows else "make one with @app.workflow()"
            raise BadValue(f"app {app.name!r} has {len(app.workflows) or 'no'} workflows", hint=hint)
        name = next(iter(app.workflows))
    found = app.target(name)
    if not isinstance(found, Workflow):
        raise BadValue(f"{name!r} is a function", hint="draw a workflow")
    return found


def _planned(app: Any, flow: Any, file: str, folder: Path | None, kind: str | None) -> tuple[Any, str]:
    from lamina.asl.annotations import planned_notes
    from lamina.bootstrap import read_profiles
    from lamina.predict.device_presets import PRESETS
    from lamina.predict.profile_table import ProfileTable
    from lamina.units import show_us

    found = read_profiles(file, folder)
    slo = f"SLO {show_us(flow.slo.latency_us)}" if flow.slo.latency_us else "no SLO"
    if not found:
        return {}, f"{slo}; no profiles"
    kinds = list(dict.fromkeys(one.device for one in found if one.function in flow.functions)) or [found[0].device]
    if kind is not None and kind not in kinds:
        raise BadValue(f"--device {kind!r}: no profiles of it", hint=f"there are {', '.join(kinds)}")
    kind = kind or kinds[0]
    table, device = ProfileTable(found), PRESETS.get(kind)

    def time_us(function: str, batch: int) -> int:
        units = app.functions[function].spec.units_on(device) if device is not None else 1
        return round(table.median_us(function, kind, batch, units))

    batches = {name: function.spec.max_batch for name, function in app.functions.items()}
    return planned_notes(flow, time_us, batches), f"{slo}; planned with medians on {kind}"


def _measured(flow: Any, run_id: str, url: str) -> tuple[Any, str]:
    from lamina.asl.annotations import measured_notes
    from lamina.sdk.client import Client

    with Client(url, token=os.environ.get("LAMINA_TOKEN") or None) as client:
        run = client.run(run_id)
        state, events = run.status().state, run.history()
    began_us = next((event["at_us"] for event in events if event["kind"] == "began"), events[0]["at_us"])
    goal_us = flow.slo.latency_us
    return measured_notes(flow, events, began_us + goal_us if goal_us else 0), f"run {run_id}, {state}: measured"
