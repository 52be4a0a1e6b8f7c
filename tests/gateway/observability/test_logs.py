"""Log lines: readable by machines, one object each."""

from __future__ import annotations

import logging

import msgspec
import pytest

from lamina.core.actions import FailCall, Reject, Reply
from lamina.drivers.driver import Ending
from lamina.gateway.observability.logs import JsonFormatter, access, log_call


def line_of(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(JsonFormatter().format(record))
    return found


def test_an_exception_is_one_line_with_its_trace() -> None:
    try:
        raise KeyError("color")
    except KeyError as error:
        record = logging.LogRecord("lamina", logging.ERROR, "", 0, "no %s", ("luck",), (KeyError, error, error.__traceback__))
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "KeyError: 'color'" in msgspec.json.decode(text)["trace"]


@pytest.mark.parametrize(
    ("ending", "outcome", "more"),
    [
        (Reply("c1", 1500, late=False, cost=0.5), "met", {"latency_ms": 1.5, "cost": 0.5}),
        (Reply("c1", 1500, late=True), "late", {}),
        (Reject("c1", "deadline"), "refused", {"reason": "deadline"}),
        (FailCall("c1", "function-failed", "resize"), "failed", {"step": "resize"}),
    ],
)
def test_a_call_leaves_one_line_with_its_id_and_outcome(
    ending: Ending, outcome: str, more: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, access.name):
        log_call("thumbnail", ending, "acme")
    line = line_of(caplog.records[0])
    assert line | {"call_id": "c1", "tenant": "acme", "outcome": outcome, **more} == line


def test_text_that_tries_to_be_a_second_line_stays_in_its_field() -> None:
    record = logging.LogRecord("lamina", logging.INFO, "", 0, 'x\n{"level":"error"}', (), None)
    assert line_of(record)["level"] == "info"
