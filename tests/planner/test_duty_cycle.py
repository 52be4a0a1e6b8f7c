from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.planner.partitioning.duty_cycle import CycleLoad, largest_batch, longest_cycle

costs = st.tuples(st.floats(0.1, 20), st.floats(0.01, 4))
loads = st.lists(st.tuples(st.floats(1, 900), st.floats(5, 300), costs), min_size=1, max_size=3)


def made(rows: list[tuple[float, float, tuple[float, float]]]) -> list[CycleLoad]:
    return [
        CycleLoad(rate, slo_ms, lambda batch, fixed=fixed, each=each: fixed + each * batch)
        for rate, slo_ms, (fixed, each) in rows
    ]


def works(found: list[CycleLoad], duty_ms: float) -> bool:
    """By definition: what comes in a round is one batch of each, and all batches run within the next."""
    batches = [max(1, -int(-load.rate * duty_ms // 1000)) for load in found]
    if max(batches) > 32:
        return False
    busy_ms = sum(load.latency_ms(batch) for load, batch in zip(found, batches, strict=True))
    return busy_ms <= duty_ms and busy_ms + duty_ms <= min(load.slo_ms for load in found)


@given(loads)
def test_a_cycle_takes_all_requests_and_is_in_time(rows: list[tuple[float, float, tuple[float, float]]]):
    found = made(rows)
    cycle = longest_cycle(found)
    if cycle is not None:
        busy_ms = sum(load.latency_ms(batch) for load, batch in zip(found, cycle.batches, strict=True))
        assert busy_ms <= cycle.duty_ms * 1.000001
        assert busy_ms + cycle.duty_ms <= min(load.slo_ms for load in found) * 1.000001
        assert all(load.rate * cycle.duty_ms / 1000 <= batch + 1e-6 for load, batch in zip(found, cycle.batches, strict=True))


@given(loads)
def test_no_longer_cycle_works(rows: list[tuple[float, float, tuple[float, float]]]):
    found = made(rows)
    cycle = longest_cycle(found)
    shortest_ms = cycle.duty_ms * 1.000001 if cycle else 0.0
    limit_ms = min(load.slo_ms for load in found)
    tried = [shortest_ms + (limit_ms - shortest_ms) * step / 400 for step in range(1, 400)]
    assert not any(works(found, duty_ms) for duty_ms in tried)


@given(st.integers(0, 40))
def test_the_largest_batch_is_found_by_bisection(most: int):
    assert largest_batch(lambda batch: batch <= most, 33) == min(most, 32)


def test_a_rare_request_is_run_before_a_second_one_comes():
    """One request a second and 20 ms allowed: the round is as long as the SLO lets it be, not a second."""
    cycle = longest_cycle([CycleLoad(1, 20, lambda batch: 4.0 * batch)])
    assert cycle is not None
    assert (cycle.duty_ms, cycle.batches) == (16, (1,))
