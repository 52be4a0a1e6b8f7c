"""Workflows of States Language documents, built with the builder or imported. They are served like any other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.asl.compile import DEFAULT_SLO, compile_flow
from lamina.asl.document import parse_document, resolve_resource
from lamina.asl.errors import LintProblem
from lamina.asl.fields import Dialect
from lamina.asl.lint import check, lint
from lamina.asl.sidecar import read_sidecar
from lamina.core.workflow.flow import Flow
from lamina.errors import BadFlow, BadValue, unreadable_file
from lamina.sdk.binding import Param
from lamina.sdk.function import Function
from lamina.sdk.resources import SLO
from lamina.sdk.user_errors import user_place
from lamina.sdk.workflow import Workflow
from lamina.types import Slo

if TYPE_CHECKING:
    from lamina.sdk.app import App

INPUT = (Param("input", required=False, is_whole=True),)
"""The whole body of a call is the value the workflow begins with."""

Source = str | Path | Mapping[str, Any]


class StatesWorkflow(Workflow[..., Any]):
    def __init__(
        self, app: App, document: dict[str, Any], name: str, slo: Slo, bind: Mapping[str, Function[..., Any]], dialect: Dialect
    ) -> None:
        self.app = app
        self.name = name
        self.slo = slo
        self.place = user_place()
        self.params = INPUT
        self.document = document
        self.dialect: Dialect = dialect
        self._bind = bind
        self.flow: Flow = compile_flow(document, name, self._function, dialect=dialect, slo=slo)

    @property
    def doc(self) -> str:
        return str(self.document.get("Comment", ""))

    def lint(self) -> list[LintProblem]:
        return lint(self.document, self.dialect)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BadFlow(
            f"workflow {self.name!r} is made of states and does not run as a Python function",
            hint="use lamina.testing.Runtime(app).call(...) or `lamina asl run`",
        )

    def local(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def _function(self, resource: str) -> tuple[str, tuple[str, ...]]:
        function = resolve_resource(resource, {**self.app.functions, **self._bind})
        return function.name, tuple(param.name for param in function.params)


def from_asl(
    source: Source,
    *,
    app: App,
    name: str | None = None,
    bind: Mapping[str, Function[..., Any]] | None = None,
    slo: SLO | str | None = None,
    side: Source | None = None,
    dialect: Dialect = "extended",
) -> StatesWorkflow:
    """A workflow of `app` out of a document. What its Resources call are functions of the app, by their short name, or by `bind`.

    `side` holds GPU, SLO and scaling, which no document of the language may hold.
    """
    document, where = _load_document(source)
    if name is None:
        name = where.stem if where is not None else None
    if name is None:
        raise BadValue("name: a document has none of its own", hint="give name=")
    made = add_workflow(app, document, name, slo=slo, bind=bind, dialect=dialect, source=str(where or ""))
    if side is not None:
        _apply_sidecar(made, side)
    return made


def add_workflow(
    app: App,
    document: dict[str, Any],
    name: str,
    *,
    slo: SLO | str | None = None,
    bind: Mapping[str, Function[..., Any]] | None = None,
    dialect: Dialect = "extended",
    source: str = "",
) -> StatesWorkflow:
    """Register a valid document as a workflow of `app`."""
    check(document, dialect, source)
    app.claim_name(name, user_place())
    goal = DEFAULT_SLO if slo is None else (slo if isinstance(slo, SLO) else SLO(slo)).spec()
    for function in (bind or {}).values():
        if app.functions.get(function.name) is not function:
            raise BadFlow(f"workflow {name!r} calls {function.name!r} of another app", hint="define both on one App")
    made = StatesWorkflow(app, document, name, goal, bind or {}, dialect)
    app.workflows[name] = made
    return made


def _load_document(source: Source) -> tuple[dict[str, Any], Path | None]:
    if isinstance(source, Mapping):
        return dict(source), None
    path = Path(source)
    return parse_document(read_document(path), str(path)), path


def read_document(path: Path) -> str:
    """The text of a document file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_file(path, error, "give the path of a state machine, a JSON file") from None


def _apply_sidecar(made: StatesWorkflow, side: Source) -> None:
    text = json.dumps(dict(side)) if isinstance(side, Mapping) else Path(side).read_text()
    found = read_sidecar(text, made.document, "" if isinstance(side, Mapping) else str(side))
    for state, fields in found.items():
        task = next(task for task in made.flow.tasks() if task.name == state)
        made.app.functions[task.function].update_spec(**fields)
