"""Who may stand beside whom, by what they ask of the memory."""

from __future__ import annotations

import pytest

from lamina.planner.neighbours import Running, within_bandwidth
from lamina.predict.interference import Bandwidth, Linear

MODEL = Bandwidth({("reader", "h200"): 1.0, ("writer", "h200"): 0.8, ("counter", "h200"): 0.0})


def running(function: str, share: float) -> Running:
    return Running(function, 1, share)


@pytest.mark.parametrize(("share", "fits"), [(0.3, True), (0.4, True), (0.5, False)])
def test_neighbours_are_refused_past_seventy_percent_of_the_peak(share: float, fits: bool):
    assert within_bandwidth(MODEL, running("reader", share), [running("writer", 0.3)], "h200") is fits


def test_who_stands_alone_may_ask_for_everything():
    assert within_bandwidth(MODEL, running("reader", 1.0), [running("counter", 0.5)], "h200")


def test_who_asks_for_nothing_may_stand_anywhere():
    assert within_bandwidth(MODEL, running("counter", 1.0), [running("reader", 0.9), running("writer", 0.1)], "h200")


def test_what_was_not_measured_on_this_kind_of_device_counts_for_nothing():
    assert within_bandwidth(MODEL, running("reader", 1.0), [running("writer", 1.0)], "v100")


@pytest.mark.parametrize("model", [None, Linear({}, {})])
def test_without_known_demands_there_is_no_rule(model: Linear | None):
    assert within_bandwidth(model, running("reader", 1.0), [running("writer", 1.0)], "h200")
