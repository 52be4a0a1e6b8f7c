"""Errors of the States Language, by their names: raised for what a document or its data get wrong."""

from __future__ import annotations

from lamina.core.workflow.error_policy import RUNTIME

PARAMETER_PATH = "States.ParameterPathFailure"
RESULT_PATH = "States.ResultPathMatchFailure"
NO_CHOICE = "States.NoChoiceMatched"
INTRINSIC = "States.IntrinsicFailure"


class StateError(Exception):
    """Error of a state: `name` is what Retry and Catch match, `cause` is for people."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"{name}: {cause}")
        self.name = name
        self.cause = cause


def runtime_error(cause: str) -> StateError:
    """A `States.Runtime` error: the document does not fit its data."""
    return StateError(RUNTIME, cause)
