"""Documents through the builder and back."""

from __future__ import annotations

import json

import pytest

from lamina.asl.export import portability
from lamina.sdk.builder import build
from lamina.sdk.builder_document import builder_of
from tests.asl.conformance_case import Case
from tests.asl.test_conformance import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_document_taken_into_the_builder_comes_back_the_same(case: Case):
    assert build(builder_of(case.document)) == case.document


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_remark_on_portability_names_a_line_where_the_thing_is(case: Case):
    text = json.dumps(case.document, indent=2)
    lines = text.splitlines()
    for remark in portability(case.document, text):
        number, path, field, _ = remark.split(": ", 3)
        place = lines[int(number) - 1]
        state = path.rpartition("States")[2].strip(".['\"]")
        assert f'"{field}' in place or state.partition(".")[0] in place, remark
