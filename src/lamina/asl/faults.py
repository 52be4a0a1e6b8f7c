"""Errors by the names the language gives them. What a document or its data get wrong is raised as one of these."""

from __future__ import annotations

from lamina.core.retry import RUNTIME

PARAMETER_PATH = "States.ParameterPathFailure"
RESULT_PATH = "States.ResultPathMatchFailure"
NO_CHOICE = "States.NoChoiceMatched"
INTRINSIC = "States.IntrinsicFailure"


class StateError(Exception):
    """A state fails: `name` is what Retry and Catch look at, `cause` is for people."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"{name}: {cause}")
        self.name = name
        self.cause = cause


def runtime(cause: str) -> StateError:
    """The document does not fit its data."""
    return StateError(RUNTIME, cause)
