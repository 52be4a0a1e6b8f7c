"""The States Language, clause by clause: what goes in, what must come out, and when."""

from __future__ import annotations

import json

import pytest

from lamina.asl.compile import compile_flow
from lamina.asl.export import to_document
from lamina.asl.lint import lint
from lamina.core.workflow.flow import Flow
from tests.asl import cases_choice, cases_data, cases_errors, cases_flow, cases_spec
from tests.asl.conformance_case import Case, run

CASES = [*cases_data.CASES, *cases_choice.CASES, *cases_flow.CASES, *cases_errors.CASES, *cases_spec.CASES]


def flow_of(case: Case) -> Flow:
    return compile_flow(case.document, "machine", lambda resource: (resource, None), dialect=case.dialect)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_execution_does_what_the_clause_says(case: Case):
    outcome = run(case)
    if case.error or not outcome.ok:
        assert (outcome.ok, outcome.error) == (False, case.error), outcome
        assert case.cause is None or outcome.cause == case.cause
    else:
        assert outcome.output == case.want
    assert case.took_s is None or outcome.took_us == pytest.approx(case.took_s * 1e6, abs=2)


def test_there_are_enough_cases_and_each_names_its_own_clause():
    names = [case.clause for case in CASES]
    assert len(names) == len(set(names)) >= 150


DEFECTS_OF_KNIX = {
    "retry never sleeps": ["Retry: really waits between tries", "Retry: BackoffRate multiplies the interval"],
    "exhausted retries are a normal result": ["Retry: exhausted tries are a failure, not a result"],
    "a Retry hides every Catch": [
        "Catch: works beside Retry, after it",
        "Catch: works beside a Retry that does not know the error",
    ],
    "States.ALL is no wildcard": ["Retry: States.ALL is a wildcard", "Catch: States.ALL is a wildcard"],
    "errors match by their text": [
        "Retry: the text of an error does not count",
        "Catch: the first catcher that knows the error counts",
    ],
    "unlisted errors are retried once": ["Retry: an error that is not named is not retried"],
    "Fail passes its input on": ["Fail State: is a failure", "Fail State: ErrorPath and CausePath"],
    "conditions are run as code": [
        "Choice State: data is data, never code",
        "Choice State: no rule holds and there is no Default",
    ],
    "MaxConcurrency in batches with a sleep": ["Map State: MaxConcurrency is a sliding window"],
    "Wait blocks a process": ["Wait State: a wait of a year holds nothing up"],
    "no timeouts at all": [
        "TimeoutSeconds: fires",
        "HeartbeatSeconds: a silent task fails",
        "Top-level fields: TimeoutSeconds ends the execution",
    ],
    "no Retry or Catch of Parallel and Map": [
        "Parallel State: Retry runs all branches again",
        "Map State: Retry runs all items again",
    ],
}


@pytest.mark.parametrize("defect", DEFECTS_OF_KNIX)
def test_a_known_defect_of_others_has_its_case_here(defect: str):
    assert set(DEFECTS_OF_KNIX[defect]) <= {case.clause for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_document_comes_back_as_it_went_in(case: Case):
    assert to_document(flow_of(case)) == case.document


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_a_flow_survives_the_trip_through_json(case: Case):
    import msgspec

    flow = flow_of(case)
    again = msgspec.json.decode(msgspec.json.encode(flow), type=Flow)
    assert again == flow
    assert to_document(again) == case.document


def test_the_dialect_is_the_strict_one_unless_a_case_says_otherwise():
    for case in CASES:
        strict = lint(json.loads(json.dumps(case.document)))
        assert bool(strict) == (case.dialect == "extended"), (case.clause, strict)
