"""OpenAPI contract: requests that schemathesis makes from our document; none may be answered with a 5xx."""

from __future__ import annotations

import importlib.util

import pytest
from benchmarks import contract


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_a_few_hundred_generated_requests_get_no_server_error() -> None:
    made, wrong = contract.run(110, "fuzzing")
    assert made >= 200, wrong
    assert not wrong
