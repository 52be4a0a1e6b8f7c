"""Errors of the States Language: of a document, with all its problems, and of a state, by the name the language gives it."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.workflow.error_policy import RUNTIME
from lamina.errors import BadFlow

PARAMETER_PATH = "States.ParameterPathFailure"
RESULT_PATH = "States.ResultPathMatchFailure"
NO_CHOICE = "States.NoChoiceMatched"
INTRINSIC = "States.IntrinsicFailure"
DATA_LIMIT = "States.DataLimitExceeded"


class StateError(Exception):
    """Error of a state: `name` is what Retry and Catch match, `cause` is for people."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"{name}: {cause}")
        self.name = name
        self.cause = cause


def runtime_error(cause: str) -> StateError:
    """A `States.Runtime` error: the document does not fit its data."""
    return StateError(RUNTIME, cause)


@dataclass(frozen=True, slots=True)
class LintProblem:
    path: str
    clause: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: [{self.clause}] {self.message}"


class BadDocument(BadFlow):
    """Invalid state machine; `problems` are all that was found."""

    def __init__(self, problems: list[LintProblem], source: str = "", *, hint: str = "") -> None:
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in problems), hint=hint)
        self.problems = problems
        self.source = source
