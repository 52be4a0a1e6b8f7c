"""Workflows: plain functions over decorated functions. Traced once they are flows; called in Python they just compute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from lamina.core.workflow.flow import Flow
from lamina.errors import BadFlow, BadValue, LaminaError
from lamina.sdk.annotation_conversion import typed_params
from lamina.sdk.binding import Param, defaults_of, hints_of, params_of
from lamina.sdk.json_schema import schema_of
from lamina.sdk.recorder import Recorder
from lamina.sdk.remote_target import RemoteTarget
from lamina.sdk.symbols import UnawaitedCall
from lamina.sdk.tensors import Signature, signature_of
from lamina.sdk.user_errors import message_of, user_frames_only, user_place
from lamina.sdk.workflow_tracing import InProcess, WorkflowTracer, call_mode
from lamina.types import Slo

if TYPE_CHECKING:
    from pathlib import Path

    from lamina.asl.fields import Dialect
    from lamina.sdk.app import App
    from lamina.sdk.states_workflow import StatesWorkflow

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Workflow(RemoteTarget[P, R_co]):
    """A workflow of an app, made by `@app.workflow(...)`. `target` is the function as it was written."""

    kind = "workflows"

    def __init__(self, app: App, target: Callable[P, R_co], name: str, slo: Slo, place: str) -> None:
        self.target = target
        self.is_async = inspect.iscoroutinefunction(target)
        if not inspect.isfunction(target):
            raise BadFlow(f"{place}: a workflow is made of a plain function", hint="decorate a def")
        self.app = app
        self.name = name
        self.slo = slo
        self.place = place
        self.params: tuple[Param, ...] = typed_params(params_of(target, place), target, at_entry=True)
        functools.update_wrapper(self, target, updated=())

    @cached_property
    def signature(self) -> Signature:
        """Inputs and outputs as tensors, as far as the annotations tell."""
        return signature_of(getattr(self, "target", None), self.params)  # states have none

    @cached_property
    def returns(self) -> Any:
        """Annotation of its result; None if there is none."""
        target = getattr(self, "target", None)  # states have none
        return hints_of(target).get("return") if target is not None else None

    @property
    def result_schema(self) -> dict[str, Any]:
        """JSON Schema of its result; {}: any."""
        return schema_of(self.returns, "serialization")

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.target.__doc__ or "")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """A notebook draws it: as Mermaid, which JupyterLab, VS Code and GitHub render."""
        from lamina.asl.draw import draw_flow

        return {"text/markdown": f"```mermaid\n{draw_flow(self.flow)}\n```", "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"<workflow {self.name!r} of app {self.app.name!r}>"

    @cached_property
    def flow(self) -> Flow:
        """The graph, traced or read when it is first asked for."""
        tracer = Recorder(self.name, self.app.functions) if self.is_async else WorkflowTracer(self.name, self.app.functions)
        token = call_mode.set(tracer)
        try:
            body: Callable[..., Any] = self.target
            hints = hints_of(body)
            symbols = {name: tracer.parameter(name, default, hints.get(name)) for name, default in defaults_of(body).items()}
            if isinstance(tracer, Recorder):
                from lamina.sdk.ast_workflow import read_workflow

                return tracer.finish(self.slo, read_workflow(body, tracer, symbols))
            return tracer.finish(self.slo, body(**symbols))
        except LaminaError:
            raise
        except Exception as error:
            raise BadFlow(
                f"{self.place}: workflow {self.name!r} cannot be traced: {message_of(error)}",
                hint="a workflow passes values on and compares them; whatever else it does belongs into functions",
            ) from user_frames_only(error)
        finally:
            call_mode.reset(token)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute in process, an `async def` when awaited. Inside another workflow it is part of that one."""
        where = call_mode.get()
        if where is None:
            if self.is_async:
                return cast(R_co, self._awaited(InProcess(is_async=True), args, kwargs))
            return self._direct(InProcess(), args, kwargs)
        return cast(R_co, self._inside(where, args, kwargs))

    def _inside(self, where: WorkflowTracer | InProcess, args: Any, kwargs: Any) -> Any:
        if isinstance(where, Recorder) and not where.eager:
            if not self.is_async:
                return UnawaitedCall(f"{self.name}(...)", lambda: where.record_plain(lambda: self.target(*args, **kwargs)))
            from lamina.sdk.ast_workflow import read_workflow

            given = inspect.signature(self.target).bind(*args, **kwargs)
            given.apply_defaults()
            return UnawaitedCall(f"{self.name}(...)", lambda: read_workflow(self.target, where, given.arguments))
        if self.is_async and not getattr(where, "is_async", False):
            raise BadFlow(
                f"{user_place()}: {self.name!r} is an async def, called in a plain def workflow",
                hint="make the outer one an async def and await the inner one",
            )
        if isinstance(where, InProcess) and where.is_async and not self.is_async:
            return UnawaitedCall(f"{self.name}(...)", lambda: self._direct(InProcess(where.mocks), args, kwargs))
        return self.target(*args, **kwargs)

    def local(self, *args: Any, mocks: Mapping[str, Callable[..., Any]] | None = None, **kwargs: Any) -> Any:
        """Compute in process, with the functions named in `mocks` replaced."""
        self._not_traced("local")
        mocks = mocks or {}
        if unknown := sorted(mocks.keys() - self.app.functions.keys()):
            known = ", ".join(self.app.functions)
            raise BadValue(f"mocks: no function {unknown[0]!r} in app {self.app.name!r}", hint=f"there is {known}")
        if self.is_async:
            import asyncio

            return asyncio.run(self._awaited(InProcess(mocks, is_async=True), args, kwargs))
        return self._direct(InProcess(mocks), args, kwargs)

    def to_asl(self, dialect: Dialect = "strict") -> dict[str, Any]:
        """The workflow as a document of the States Language: the one it was made of, or one that does what its Python does.
        Raises `BadFlow` for what the language has no word for."""
        from lamina.asl.export import to_document

        return to_document(self.flow, dialect, lambda name: [param.name for param in self.app.functions[name].params])

    def portability(self) -> list[str]:
        """Portability remarks: what would not carry over to another engine."""
        from lamina.asl.export import is_asl_flow, portability
        from lamina.asl.flow_export import NotInStates

        try:
            remarks = portability(self.to_asl("extended"))
        except NotInStates as error:
            return [f"{self.place}: {error.message}"]
        if not is_asl_flow(self.flow):
            remarks.insert(0, f"{self.place}: written in Python: its steps run as their values arrive; states run in turn")
        return remarks

    def side_file(self) -> str:
        """GPU, SLO and scaling of its steps, for an export to travel with."""
        from lamina.asl.sidecar import write_sidecar

        return write_sidecar(self.flow, {name: function.spec for name, function in self.app.functions.items()})

    @staticmethod
    def from_asl(source: str | Path | Mapping[str, Any], **options: Any) -> StatesWorkflow:
        """A workflow of `app` out of a document, or the path of one; see `lamina.sdk.states_workflow.from_asl`."""
        from lamina.sdk.states_workflow import from_asl

        return from_asl(source, **options)

    async def _awaited(self, direct: InProcess, args: Any, kwargs: Any) -> Any:
        token = call_mode.set(direct)
        try:
            return await cast(Any, self.target(*args, **kwargs))
        finally:
            call_mode.reset(token)

    def _direct(self, direct: InProcess, args: Any, kwargs: Any) -> R_co:
        token = call_mode.set(direct)
        try:
            return self.target(*args, **kwargs)
        finally:
            call_mode.reset(token)
