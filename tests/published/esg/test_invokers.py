"""Home devices of functions."""

from __future__ import annotations

from collections import Counter

from lamina.published.esg.invokers import devices_by_home

NODES = tuple(f"n{place}" for place in range(16))


def test_a_home_does_not_depend_on_the_order_in_which_devices_came():
    assert devices_by_home("f", NODES) == devices_by_home("f", NODES[::-1])


def test_functions_are_spread_over_the_devices():
    count = Counter(devices_by_home(f"f{number}", NODES)[0] for number in range(1_600))
    assert len(count) == 16
    assert max(count.values()) < 150


def test_when_a_device_goes_only_functions_at_home_there_move():
    left = NODES[:-1]
    for number in range(200):
        before = devices_by_home(f"f{number}", NODES)
        assert devices_by_home(f"f{number}", left)[0] == (before[0] if before[0] != NODES[-1] else before[1])
