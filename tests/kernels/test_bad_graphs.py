"""Mutated graphs and requests, a quick version of `benchmarks/bad_graphs.py`: each a clear error, or right after all."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks import bad_graphs


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_a_thousand_mutated_graphs_are_refused_with_a_hint_or_run():
    found = bad_graphs.graphs(1_000, seed=7)
    assert sum(found.values()) == 1_000 and found["refused"] > 500 and found["right"] > 10


@pytest.mark.live
def test_mutated_requests_get_clear_errors_and_nothing_is_left_of_them():
    found = asyncio.run(bad_graphs.requests(300, seed=7))
    answers = found["answers"]
    assert sum(answers.values()) > 250 and set(answers) <= {"right", "400 bad-value", "404 not-found", "422 unprocessable"}
    assert found["same_processes"] and found["after"]["files"] <= found["before"]["files"] + 2
    assert found["buffers_kept"] <= 60, "only what a right request asked to keep"
