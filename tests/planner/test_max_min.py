"""Max-min fair allocation: against the definition, by brute force over all divisions of a few whole units."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.planner.max_min import Demand, max_min

needs = st.lists(st.integers(0, 6), min_size=1, max_size=4)
weighted = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10)), min_size=1, max_size=6)


def best_division(capacity: int, needs: list[int], parts: int) -> list[float]:
    """The division of the capacity in `parts` per unit whose sorted grants are lexicographically largest."""
    steps = [range(need * parts + 1) for need in needs]
    fitting = [grants for grants in product(*steps) if sum(grants) <= capacity * parts]
    return [grant / parts for grant in max(fitting, key=lambda grants: sorted(grants))]


@given(st.integers(0, 12), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_the_smallest_grant_is_as_large_as_can_be_then_the_next(capacity: int, needs: list[int]):
    """Six parts a unit hold every level there is for up to three demands."""
    granted = max_min(capacity, {number: Demand(need) for number, need in enumerate(needs)})
    assert sorted(granted.values()) == pytest.approx(sorted(best_division(capacity, needs, 6)))


@given(st.floats(0, 200), weighted)
def test_nothing_is_left_over_while_a_demand_is_not_met_and_none_has_more_than_it_asks_for(capacity: float, wanted):
    demands = {number: Demand(*one) for number, one in enumerate(wanted)}
    granted = max_min(capacity, demands)
    assert all(granted[key] <= demand.need + 1e-9 for key, demand in demands.items())
    assert sum(granted.values()) == pytest.approx(min(capacity, sum(demand.need for demand in demands.values())))


@given(st.floats(0, 200), weighted)
def test_a_demand_that_is_not_met_has_for_its_weight_as_much_as_any_other(capacity: float, wanted):
    demands = {number: Demand(*one) for number, one in enumerate(wanted)}
    granted = max_min(capacity, demands)
    levels = {key: granted[key] / demand.weight for key, demand in demands.items()}
    for key, demand in demands.items():
        if granted[key] < demand.need - 1e-9:
            assert levels[key] >= max(levels.values()) - 1e-6
