"""Documents through the builder and back."""

from __future__ import annotations

import pytest

from lamina.sdk.builder import build
from lamina.sdk.rebuild import rebuild
from tests.asl.kit import Case
from tests.asl.test_conformance import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_document_taken_into_the_builder_comes_back_the_same(case: Case):
    top = {key: value for key, value in case.document.items() if key not in ("States", "StartAt")}
    assert {**top, **build(rebuild(case.document))} == case.document
