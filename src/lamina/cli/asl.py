"""`lamina asl`: documents in the Amazon States Language, checked, run, drawn, taken in and given out."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lamina.cli._shared import CommandGroup, InputFile
from lamina.cli.draw import format_option, write_graph
from lamina.errors import BadValue, read_user_file

_FILE = InputFile("give the path of a state machine, a JSON file", allow_dash=True)
_DIALECT = click.Choice(["strict", "extended"])


@click.group(cls=CommandGroup)
def command() -> None:
    """Amazon States Language: import, export, lint, run and draw state machines."""


@command.command()
@click.argument("file", type=_FILE)
@click.option("--dialect", type=_DIALECT, default="strict", show_default=True, help="extended: with the fields of KNIX.")
@click.option("--portability", is_flag=True, help="List what would behave differently on other engines, by line.")
@click.option("--side", type=_FILE, help="The side file with GPU, SLO and scaling per state.")
def lint(file: Path, dialect: Any, portability: bool, side: Path | None) -> int:
    """Check a document; every finding has file, JSON path and clause."""
    from lamina.asl.export import portability as portability_remarks
    from lamina.asl.lint import check

    text, document = _read(file)
    check(document, dialect, str(file))
    if side is not None:
        from lamina.asl.sidecar import read_sidecar

        read_sidecar(side.read_text(), document, str(side))
    if portability:
        for remark in portability_remarks(document, text):
            click.echo(f"{file}:{remark}")
    return 0


@command.command()
@click.argument("file", type=_FILE)
@click.option("--input", "given", default="{}", metavar="JSON", help="The input; @FILE reads it from a file. Default: {}.")
@click.option("--virtual-time", is_flag=True, help="Do not wait: the clock jumps to the next event.")
@click.option("--bind", "bindings", multiple=True, metavar="NAME=MODULE:CALLABLE", help="Callable for a Resource; repeatable.")
@click.option("--dialect", type=_DIALECT, default="extended", show_default=True, help="strict: without the fields of KNIX.")
@click.option("--seed", type=int, default=None, help="Seed of MathRandom and UUID; default: random.")
def run(file: Path, given: str, virtual_time: bool, bindings: tuple[str, ...], dialect: Any, seed: int | None) -> int:
    """Run a document once and print its output as JSON. A failed execution prints Error and Cause, and exits with 1."""
    from lamina import encoding
    from lamina.asl.compile import compile_flow
    from lamina.asl.document import resolve_resource, resources_of
    from lamina.asl.lint import check
    from lamina.asl_local_run import LocalStateMachine

    _, document = _read(file)
    check(document, dialect, str(file))
    bound = dict(_binding(pair, file) for pair in bindings)
    tasks = {resource: resolve_resource(resource, bound) for resource in resources_of(document)}
    flow = compile_flow(document, file.stem, lambda resource: (resource, None), dialect=dialect, source=str(file))
    with contextlib.redirect_stdout(sys.stderr):  # whatever tasks print, the output stands alone
        outcome = LocalStateMachine(flow, tasks, virtual=virtual_time, seed=seed).run(_input(given), f"{file.stem}-1")
    shown = outcome.output if outcome.ok else {"Error": outcome.error, "Cause": outcome.cause}
    click.echo(encoding.to_json(shown).decode())
    return 0 if outcome.ok else 1


@command.command("import")
@click.argument("file", type=_FILE)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The app to write; default: stdout.")
@click.option("--name", help="Name of the workflow; default: that of the file.")
@click.option("--dialect", type=_DIALECT, default="extended", show_default=True, help="strict: without the fields of KNIX.")
def import_(file: Path, out: Path | None, name: str | None, dialect: Any) -> int:
    """Write a Python app for a document: one function to fill in per Resource, and the workflow."""
    from lamina.asl.lint import check
    from lamina.asl.scaffold import app_source

    _, document = _read(file)
    check(document, dialect, str(file))
    source = app_source(document, name or file.stem)
    if out is None:
        click.echo(source, nl=False)
    else:
        out.write_text(source)
    return 0


@command.command()
@click.argument("app", metavar="FILE[:APP]")
@click.argument("name")
@click.option("--dialect", type=_DIALECT, default="strict", show_default=True, help="extended: with the fields of KNIX.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The document to write; default: stdout.")
@click.option("--side", type=click.Path(dir_okay=False, path_type=Path), help="Write GPU, SLO and scaling per state here.")
def export(app: str, name: str, dialect: Any, out: Path | None, side: Path | None) -> int:
    """Write a workflow of an app as a document."""
    import json

    from lamina.sdk.app_loader import load_app
    from lamina.sdk.workflow import Workflow

    workflow = load_app(app).target(name)
    if not isinstance(workflow, Workflow):
        raise BadValue(f"{name!r} is a function", hint="export a workflow")
    text = json.dumps(workflow.to_asl(dialect), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)
    if side is not None:
        side.write_text(workflow.side_file())
    return 0


@command.command()
@click.argument("file", metavar="FILE")
@click.argument("name", required=False)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, .mmd or .dot; .svg, .png and .pdf need Graphviz. Default: stdout.",
)
@format_option
def draw(file: str, name: str | None, out: Path | None, format: str | None) -> int:
    """Draw a document, or a workflow NAME of an app FILE, as a Mermaid or DOT graph."""
    from lamina.asl.compile import compile_flow
    from lamina.asl.draw import draw_flow

    if name is not None:
        from lamina.sdk.app_loader import load_app
        from lamina.sdk.workflow import Workflow

        workflow = load_app(file).target(name)
        if not isinstance(workflow, Workflow):
            raise BadValue(f"{name!r} is a function", hint="draw a workflow")
        flow = workflow.flow
    else:
        path = Path(file)
        if path.suffix == ".py" and path.is_file():
            raise BadValue(f"{file!r} is an app", hint=f"name one of its workflows: lamina asl draw {file} NAME")
        _, document = _read(path)
        flow = compile_flow(document, path.stem, lambda resource: (resource, None), dialect="extended", source=file)
    write_graph(lambda kind: draw_flow(flow, format=kind), out or Path("-"), format)
    return 0


def _read(file: Path) -> tuple[str, Any]:
    from lamina.asl.document import parse_document
    from lamina.sdk.states_workflow import read_document

    text = sys.stdin.read() if str(file) == "-" else read_document(file)
    return text, parse_document(text, str(file))


def _input(text: str) -> Any:
    from lamina import encoding

    if text.startswith("@"):
        path = Path(text[1:])
        content = read_user_file(path, "write --input @FILE, or --input JSON", field="--input")
        try:
            return encoding.from_json(content)
        except BadValue as error:
            raise BadValue(f"--input {path}: {error.message}", hint="it holds one JSON value, in UTF-8") from None
    try:
        return encoding.from_json(text.encode())
    except BadValue as error:
        raise BadValue(f"--input: {error.message}", hint="""quote it for the shell: '{"x": 1}'""") from None


def _binding(pair: str, file: Path) -> tuple[str, Callable[..., Any]]:
    """NAME=module:callable or NAME=file.py:callable. NAME may hold = and :, so the last = counts."""
    name, equals, target = pair.rpartition("=")
    where, colon, attribute = target.rpartition(":")
    if not (equals and colon and name and where and attribute):
        raise BadValue(f"--bind {pair!r}", hint="write NAME=module:callable")
    found: Any = _module(where, file, pair)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadValue(f"--bind {pair!r}: {where} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise BadValue(f"--bind {pair!r}: {attribute!r} cannot be called")
    return name, found


def _module(where: str, file: Path, pair: str) -> Any:
    """By name, as seen from here or from beside the document; or by the path of a file."""
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        for folder in (str(file.resolve().parent), str(Path.cwd())):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        return importlib.import_module(where)
    except Exception as error:
        raise BadValue(f"--bind {pair!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error
