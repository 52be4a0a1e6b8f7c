"""Fields of the States Language by state type. Data, so that the linter, the exporter and the docs agree."""

from __future__ import annotations

from typing import Literal

Dialect = Literal["strict", "extended"]

_PATHS = {"InputPath", "OutputPath"}
_RESULT = {"Parameters", "ResultSelector", "ResultPath"}
_ON = {"Next", "End"}
_CARE = {"Retry", "Catch"}
COMMON = {"Type", "Comment", "QueryLanguage"}

STATES: dict[str, set[str]] = {
    "Task": _PATHS
    | _RESULT
    | _ON
    | _CARE
    | {"Resource", "TimeoutSeconds", "TimeoutSecondsPath", "HeartbeatSeconds", "HeartbeatSecondsPath", "Credentials"},
    "Pass": _PATHS | _ON | {"Parameters", "ResultPath", "Result"},
    "Choice": _PATHS | {"Choices", "Default"},
    "Wait": _PATHS | _ON | {"Seconds", "SecondsPath", "Timestamp", "TimestampPath"},
    "Succeed": _PATHS,
    "Fail": {"Error", "ErrorPath", "Cause", "CausePath"},
    "Parallel": _PATHS | _RESULT | _ON | _CARE | {"Branches"},
    "Map": _PATHS
    | _RESULT
    | _ON
    | _CARE
    | {"ItemProcessor", "Iterator", "ItemsPath", "ItemSelector", "MaxConcurrency", "MaxConcurrencyPath", "Label"}
    | {"ToleratedFailureCount", "ToleratedFailureCountPath"}
    | {"ToleratedFailurePercentage", "ToleratedFailurePercentagePath"},
}

TOP = {"StartAt", "States", "Comment", "Version", "TimeoutSeconds", "QueryLanguage"}
INNER = {"StartAt", "States", "Comment", "ProcessorConfig", "QueryLanguage"}

EXTENDED: dict[str, set[str]] = {
    "Task": {"PotentialNext", "SessionFunction", "SessionFunctionParameters"},
    "Parallel": {"WaitForNumBranches"},
}
EXTENDED_TOP = {"EnableCheckpoints", "AllowImmediateMessages"}
"""Fields of the KNIX dialect. Exports without them stay valid elsewhere."""

JSONATA = {"Assign", "Output", "Arguments", "Items", "Condition"}
"""Fields that came with JSONata and variables."""

UNSUPPORTED = {
    "ItemReader": "reads items from a store, which there is none of here; put them into the input",
    "ItemBatcher": "groups items, which is done by the scheduler here; use the batch size of the function",
    "ResultWriter": "writes results to a store, which there is none of here; use the output",
}

RESERVED_ERRORS = {
    "States.ALL",
    "States.HeartbeatTimeout",
    "States.Timeout",
    "States.TaskFailed",
    "States.Permissions",
    "States.ResultPathMatchFailure",
    "States.ParameterPathFailure",
    "States.BranchFailed",
    "States.NoChoiceMatched",
    "States.IntrinsicFailure",
    "States.ExceedToleratedFailureThreshold",
    "States.ItemReaderFailed",
    "States.ResultWriterFailed",
    "States.QueryEvaluationError",
    "States.Runtime",
    "States.DataLimitExceeded",
}

MAX_NAME = 80
MAX_SECONDS = 99_999_999
MAX_DELAY_SECONDS = 31_622_400
