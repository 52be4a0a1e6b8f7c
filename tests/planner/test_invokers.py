"""Home devices of functions."""

from __future__ import annotations

from collections import Counter

from lamina.planner.esg.invokers import homes

NODES = tuple(f"n{place}" for place in range(16))


def test_a_home_does_not_depend_on_the_order_in_which_devices_came():
    assert homes("f", NODES) == homes("f", NODES[::-1])


def test_functions_are_spread_over_the_devices():
    count = Counter(homes(f"f{number}", NODES)[0] for number in range(1_600))
    assert len(count) == 16
    assert max(count.values()) < 150


def test_when_a_device_goes_only_those_who_lived_there_move():
    left = NODES[:-1]
    for number in range(200):
        before = homes(f"f{number}", NODES)
        assert homes(f"f{number}", left)[0] == (before[0] if before[0] != NODES[-1] else before[1])
