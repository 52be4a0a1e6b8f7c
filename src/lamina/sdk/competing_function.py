"""Competing functions: one name with several bodies, functions of the app, of which the controller gives each call to one.

    @app.function(slo="50ms", compete=(tag_cpu, tag_gpu))
    def tag(image: bytes) -> str:
        return tag_cpu(image)

What is decorated gives the name, the parameters and what a call in plain Python does; served, one of the bodies runs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lamina.core.workflow.flow import Flow, competing_flow
from lamina.errors import BadFlow, BadValue
from lamina.sdk.function import Function
from lamina.sdk.user_errors import user_place
from lamina.sdk.workflow import Workflow
from lamina.sdk.workflow_tracing import call_mode
from lamina.types import Slo

if TYPE_CHECKING:
    from lamina.sdk.app import App

P = ParamSpec("P")
R = TypeVar("R")


class CompetingFunction(Workflow[P, R]):
    """A function with several bodies, made by `@app.function(compete=...)`."""

    kind = "functions"

    def __init__(
        self, app: App, target: Callable[P, R], name: str, slo: Slo, place: str, bodies: tuple[Function[..., Any], ...]
    ) -> None:
        super().__init__(app, target, name, slo, place)
        self.bodies = bodies
        names = {param.name for param in self.params}
        for body in bodies:
            if app.functions.get(body.name) is not body:
                raise BadValue(f"{place}: compete: {body.name!r} is of another app", hint="define both on one App")
            if body.streams or body.incoming:
                raise BadValue(f"{place}: compete: {body.name!r} yields or takes messages", hint="bodies return one result")
            theirs = {param.name for param in body.params}
            required = {param.name for param in body.params if param.required}
            if not names <= theirs or not required <= names:
                raise BadValue(
                    f"{place}: compete: {body.name!r} takes {', '.join(sorted(theirs))}, not {', '.join(sorted(names))}",
                    hint="all bodies have the parameters of the function they are bodies of",
                )

    @cached_property
    def flow(self) -> Flow:
        return competing_flow(self.name, [body.name for body in self.bodies], self.slo)

    def __repr__(self) -> str:
        return f"<function {self.name!r} of app {self.app.name!r}, by {' or '.join(body.name for body in self.bodies)}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """In plain Python what was decorated is called. A workflow names one of the bodies."""
        if call_mode.get() is not None:
            hint = f"call {' or '.join(body.name for body in self.bodies)} there"
            raise BadFlow(f"{user_place()}: {self.name!r} has competing bodies and is no step of a workflow", hint=hint)
        return self.target(*args, **kwargs)

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """One request, handled in this process by the first body."""
        return self.bodies[0].local(*args, **kwargs)


def checked_bodies(compete: Any, place: str) -> tuple[Function[..., Any], ...]:
    """The bodies given with `compete=`."""
    bodies = tuple(compete) if isinstance(compete, tuple | list) else ()
    if len({id(body) for body in bodies}) < 2 or not all(isinstance(body, Function) for body in bodies):
        raise BadValue(
            f"{place}: compete: {compete!r} is no pair of functions",
            hint="write compete=(on_cpu, on_gpu)",
        )
    return bodies
