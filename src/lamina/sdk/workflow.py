"""A workflow is a plain function over decorated functions. Traced once it is a flow; called in Python it just computes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from lamina.core.flow import Flow
from lamina.errors import BadFlow, BadValue, LaminaError
from lamina.sdk.binding import Param, defaults_of, params_of
from lamina.sdk.remote import Remote
from lamina.sdk.tracing import Direct, Tracer, mode
from lamina.sdk.user_errors import clean, message_of
from lamina.types import Slo

if TYPE_CHECKING:
    from pathlib import Path

    from lamina.asl.fields import Dialect
    from lamina.sdk.app import App
    from lamina.sdk.states import StatesWorkflow

P = ParamSpec("P")
R = TypeVar("R")


class Workflow(Remote, Generic[P, R]):
    """Made by `@app.workflow(...)`. `target` is the function as it was written."""

    kind = "workflows"

    def __init__(self, app: App, target: Callable[P, R], name: str, slo: Slo, place: str) -> None:
        self.target = target
        if inspect.iscoroutinefunction(target):
            raise BadFlow(
                f"{place}: an async def workflow is not supported yet",
                hint="write a plain def; steps that do not use each other's results run at once anyway",
            )
        if not inspect.isfunction(target):
            raise BadFlow(f"{place}: a workflow is made of a plain function", hint="decorate a def")
        self.app = app
        self.name = name
        self.slo = slo
        self.place = place
        self.params: tuple[Param, ...] = params_of(target, place)
        functools.update_wrapper(self, target, updated=())

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.target.__doc__ or "")

    def __repr__(self) -> str:
        return f"<workflow {self.name!r} of app {self.app.name!r}>"

    @cached_property
    def flow(self) -> Flow:
        """The graph, traced when it is first asked for."""
        tracer = Tracer(self.name, self.app.functions)
        token = mode.set(tracer)
        try:
            body: Callable[..., Any] = self.target
            symbols = {name: tracer.parameter(name, default) for name, default in defaults_of(body).items()}
            return tracer.finish(self.slo, body(**symbols))
        except LaminaError:
            raise
        except Exception as error:
            raise BadFlow(
                f"{self.place}: workflow {self.name!r} cannot be traced: {message_of(error)}",
                hint="a workflow passes values on and compares them; whatever else it does belongs into functions",
            ) from clean(error)
        finally:
            mode.reset(token)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Computes in process. Inside another workflow it is part of that one."""
        if mode.get() is not None:
            return self.target(*args, **kwargs)
        return self._direct(Direct(), args, kwargs)

    def local(self, *args: Any, mocks: Mapping[str, Callable[..., Any]] | None = None, **kwargs: Any) -> Any:
        """Computes in process, with the functions named in `mocks` replaced."""
        self._not_traced("local")
        mocks = mocks or {}
        if unknown := sorted(mocks.keys() - self.app.functions.keys()):
            known = ", ".join(self.app.functions)
            raise BadValue(f"mocks: no function {unknown[0]!r} in app {self.app.name!r}", hint=f"there is {known}")
        return self._direct(Direct(mocks), args, kwargs)

    def to_asl(self, dialect: Dialect = "strict") -> dict[str, Any]:
        """The document of a workflow made of states; one that is traced from Python has none."""
        from lamina.asl.export import export

        return export(self.flow, dialect)

    def portability(self) -> list[str]:
        """What would not carry over to another engine, one remark each."""
        from lamina.asl.export import is_states
        from lamina.asl.portability import portability

        if not is_states(self.flow):
            return [f"{self.place}: traced from Python: its steps run as their values arrive, which states cannot say"]
        return portability(self.to_asl("extended"))

    def side_file(self) -> str:
        """GPU, SLO and scaling of its steps, for an export to travel with."""
        from lamina.asl.side import write_side

        return write_side(self.flow, {name: function.spec for name, function in self.app.functions.items()})

    @staticmethod
    def from_asl(source: str | Path | Mapping[str, Any], **options: Any) -> StatesWorkflow:
        """A workflow of `app` out of a document, or the path of one; see `lamina.sdk.states.from_asl`."""
        from lamina.sdk.states import from_asl

        return from_asl(source, **options)

    def _direct(self, direct: Direct, args: Any, kwargs: Any) -> R:
        token = mode.set(direct)
        try:
            return self.target(*args, **kwargs)
        finally:
            mode.reset(token)
