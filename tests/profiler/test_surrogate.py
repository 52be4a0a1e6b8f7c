from __future__ import annotations

import math

import pytest

from lamina.profiler.bench import GridPoint
from lamina.profiler.surrogate import Surrogate, without_stalls

ENDS: dict[GridPoint, list[float]] = {(1, 1): [100.0] * 20, (32, 1): [3200.0] * 20}


def test_a_measured_place_is_as_sure_as_its_repeats() -> None:
    few = Surrogate({(1, 1): [90.0, 100.0, 110.0]})
    many = Surrogate({(1, 1): [90.0, 100.0, 110.0] * 10})
    assert many.uncertainty((1, 1)) < 0.5 * few.uncertainty((1, 1))


def test_a_wider_gap_is_less_sure() -> None:
    near = Surrogate({(1, 1): [100.0] * 20, (8, 1): [110.0] * 20})
    far = Surrogate({(1, 1): [100.0] * 20, (8, 1): [800.0] * 20})
    assert near.uncertainty((4, 1)) < far.uncertainty((4, 1))


def test_between_equal_times_nothing_is_left_to_know() -> None:
    flat = Surrogate({(1, 1): [100.0] * 50, (8, 1): [100.0] * 50})
    assert flat.uncertainty((4, 1)) == pytest.approx(flat.uncertainty((1, 1)))


def test_a_point_where_it_was_expected_makes_the_rest_surer() -> None:
    expected = Surrogate({**ENDS, (8, 1): [800.0] * 20})
    surprising = Surrogate({**ENDS, (8, 1): [110.0] * 20})
    assert expected.uncertainty((16, 1)) < 0.5 * surprising.uncertainty((16, 1))


def test_what_nothing_bounds_is_not_known_at_all() -> None:
    assert Surrogate({(1, 2): [100.0]}).uncertainty((4, 1)) == math.inf


def test_a_bigger_batch_that_looks_faster_is_believed_less() -> None:
    level = Surrogate({(1, 1): [100.0] * 5, (2, 1): [100.0] * 5})
    wrong = Surrogate({(1, 1): [140.0] * 5, (2, 1): [100.0] * 5})
    assert wrong.uncertainty((2, 1)) > 2 * level.uncertainty((2, 1))


def test_the_prediction_is_the_one_plans_make() -> None:
    assert Surrogate(ENDS).predicted_us((16, 1)) == pytest.approx(100 + 3100 * 15 / 31)


def test_a_stall_of_the_machine_is_left_out() -> None:
    assert without_stalls([10.0, 11.0, 9.0, 500.0]) == [10.0, 11.0, 9.0]


def test_samples_that_differ_are_known_once_all_had_their_turn() -> None:
    """Eight of them, from 60 to 140: after two rounds nothing is left to chance, however far apart they are."""
    samples = [60.0, 140.0, 70.0, 130.0, 80.0, 120.0, 90.0, 110.0]
    chance = Surrogate({(1, 1): samples * 2})
    census = Surrogate({(1, 1): samples * 2}, cycle=lambda batch: 8)
    assert census.uncertainty((1, 1)) < 0.04 < 0.1 < chance.uncertainty((1, 1))


def test_samples_that_had_no_turn_yet_count_as_chance() -> None:
    samples = [60.0, 140.0, 70.0, 130.0]
    assert Surrogate({(1, 1): samples}, cycle=lambda batch: 400).uncertainty((1, 1)) == pytest.approx(
        Surrogate({(1, 1): samples}).uncertainty((1, 1)), rel=0.05
    )


def test_a_machine_that_is_slow_every_other_round_is_not_sure_because_all_had_their_turn() -> None:
    samples = [60.0, 140.0, 70.0, 130.0, 80.0, 120.0, 90.0, 110.0]
    steady = Surrogate({(1, 1): samples * 4}, cycle=lambda batch: 8)
    moody = Surrogate({(1, 1): (samples + [1.5 * us for us in samples]) * 2}, cycle=lambda batch: 8)
    assert moody.uncertainty((1, 1)) > 2 * steady.uncertainty((1, 1))
