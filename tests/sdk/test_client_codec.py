from __future__ import annotations

import traceback
from typing import Any

import msgspec
import pytest

from lamina import encoding, errors
from lamina.errors import BadValue, FunctionFailed, LaminaError, Refused
from lamina.sdk.client_codec import VALUE, CallOptions, CallResult, ClientResponse, call_request, result_of, server_at

SERVER = server_at("http://localhost:8700/base/", "secret")


def problem(status: int, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return result_of(ClientResponse(status, headers or {}, msgspec.json.encode(fields)))


def test_a_call_goes_to_its_target_with_named_inputs_and_options():
    request = call_request(SERVER, "functions", "mlp", {"x": 1}, CallOptions("50ms", 2, 0.5))
    assert (request.method, request.path) == ("POST", "/base/v1/functions/mlp")
    assert encoding.decode(request.body) == {"x": 1}
    assert request.headers == {
        "host": "localhost:8700",
        "accept": f"{VALUE}, application/json",
        "authorization": "Bearer secret",
        "content-type": VALUE,
        "lamina-deadline-ms": "50",
        "lamina-priority": "2",
        "lamina-cost-limit": "0.5",
    }


def test_a_name_cannot_break_out_of_the_path():
    assert call_request(SERVER, "functions", "../x y\r\n", {}, CallOptions()).path == "/base/v1/functions/..%2Fx%20y%0D%0A"


@pytest.mark.parametrize("url", ["localhost:8700", "ftp://host", "http://", "http://host:port", "http://h/?q=1", ""])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(BadValue, match=r"^url: "):
        server_at(url, None)


def test_a_token_with_a_line_break_is_refused():
    with pytest.raises(BadValue, match=r"^token: "):
        server_at("http://host", "a\r\nb")


@pytest.mark.parametrize(("inputs", "sent"), [({"x": 3}, {"x": 3}), (None, {}), (3, 3), ([1, 2], [1, 2])])
def test_a_mapping_is_inputs_by_name_and_anything_else_the_value_of_the_only_parameter(inputs: object, sent: object):
    assert encoding.decode(call_request(SERVER, "functions", "f", inputs, CallOptions()).body) == sent


def test_a_deadline_needs_its_unit():
    with pytest.raises(BadValue, match=r"^deadline: "):
        call_request(SERVER, "functions", "f", {}, CallOptions("50"))


def test_an_answer_tells_how_it_came_about():
    headers = {
        "content-type": VALUE,
        "lamina-call-id": "c1",
        "lamina-latency-ms": "12.5",
        "lamina-queue-ms": "2.5",
        "lamina-batch": "4",
        "lamina-slice": "gpu0/0-3",
        "lamina-cost": "0.25",
        "lamina-cold-start-ms": "7",
        "lamina-retries": "1",
    }
    answer = result_of(ClientResponse(200, headers, encoding.encode([1])))
    assert answer == CallResult([1], "c1", 12.5, 2.5, 4, "gpu0/0-3", 0.25, 7.0, 1)


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [("application/json; charset=utf-8", b'{"a": 1}', {"a": 1}), ("application/octet-stream", b"abc", b"abc")],
)
def test_other_kinds_of_answer_are_read_too(kind: str, body: bytes, value: Any):
    answer = result_of(ClientResponse(200, {"content-type": kind}, body))
    assert isinstance(answer, CallResult)
    assert answer.value == value


def test_an_answer_that_cannot_be_read_is_an_error():
    assert isinstance(result_of(ClientResponse(200, {"content-type": VALUE}, b"\xc1")), LaminaError)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "bad-value", errors.BadValue),
        (404, "unknown-target", errors.UnknownTarget),
        (504, "deadline-exceeded", errors.DeadlineExceeded),
        (503, "worker-lost", errors.WorkerLost),
        (503, "load-failed", errors.LoadFailed),
        (503, "cancelled", errors.Cancelled),
        (422, "unprocessable", errors.BadValue),
        (413, "too-large", errors.BadValue),
        (500, "never-heard-of", errors.LaminaError),
    ],
)
def test_a_problem_becomes_the_error_of_its_code(status: int, code: str, kind: type[LaminaError]):
    error = problem(status, code=code, detail="what happened", hint="what to do")
    assert type(error) is kind
    assert ("what happened" in error.message, error.hint) == (True, "what to do")


def test_a_refusal_says_why_when_to_come_back_and_what_could_be_promised():
    error = problem(429, code="refused", detail="no", reason="deadline", retry_after_s=1.5, offer_ms=80.0)
    assert isinstance(error, Refused)
    assert (error.reason, error.retry_after_s, error.offer_ms) == ("deadline", 1.5, 80.0)


def test_a_refusal_without_fields_reads_the_header():
    error = problem(429, {"retry-after": "3"}, code="refused")
    assert (error.retry_after_s, error.offer_ms) == (3.0, None)


def test_a_refusal_for_lack_of_capacity_is_a_refusal():
    assert isinstance(problem(503, code="unavailable", reason="no-capacity"), Refused)


def test_the_error_of_a_function_brings_its_trace_as_cause():
    trace = 'Traceback (most recent call last):\n  File "app.py", line 3, in detect\nValueError: bad image\n'
    error = problem(500, code="function-failed", detail="ValueError: bad image", error="ValueError", step="detect", trace=trace)
    assert isinstance(error, FunctionFailed)
    assert (error.error, error.step, error.remote_trace) == ("ValueError", "detect", trace)
    told = "".join(traceback.format_exception(error))
    assert told.index('File "app.py", line 3') < told.index("FunctionFailed: ValueError: bad image")


def test_an_error_carries_the_id_of_its_call():
    assert problem(500, code="function-failed", id="c7", step="detect").__notes__ == ["call: c7  step: detect"]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"detail": 3, "status": "x"}'])
def test_an_error_that_is_no_problem_document_is_still_an_error(body: bytes):
    assert isinstance(result_of(ClientResponse(502, {}, body)), LaminaError)
