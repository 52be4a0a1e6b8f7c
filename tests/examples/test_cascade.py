from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lamina.errors import BadValue
from lamina.sdk.app import App


@pytest.fixture(scope="module")
def result(cascade: App) -> SimpleNamespace:
    """Share of right answers of each way to answer, on waves nobody has learnt from."""
    import waves

    signals, shapes = waves.waves(3_000, seed=1)
    quick, thorough = waves.quick()(signals), waves.thorough()(signals)
    unsure = quick.max(1) < waves.SURE
    answers = np.where(unsure, thorough.argmax(1), quick.argmax(1))
    right = [float((said == shapes).mean()) for said in (quick.argmax(1), thorough.argmax(1), answers)]
    return SimpleNamespace(quick=right[0], thorough=right[1], cascade=right[2], asked=float(unsure.mean()))


def test_three_quarters_of_the_waves_never_reach_the_thorough_model(result: SimpleNamespace) -> None:
    assert result.asked < 0.25


def test_the_cascade_is_nearly_as_often_right_as_the_thorough_model(result: SimpleNamespace) -> None:
    assert result.cascade > result.thorough - 0.005


def test_the_quick_model_alone_would_not_do(result: SimpleNamespace) -> None:
    assert result.quick < result.cascade - 0.03


def test_a_clear_wave_is_answered_by_the_first_model_alone(cascade: App) -> None:
    import waves

    square = waves.ideal(2, (5.3 * np.arange(waves.SAMPLES) / waves.SAMPLES).astype(np.float32))

    def never(signal: object) -> None:
        raise AssertionError("the second model was asked")

    answer = cascade.workflows["classify"].local(square.tolist(), mocks={"second": never})
    assert (answer["shape"], answer["by"]) == ("square", "first")


def test_a_doubtful_wave_is_answered_by_the_second_model(cascade: App) -> None:
    import waves

    signals, _ = waves.waves(200, seed=9)
    doubtful = signals[waves.quick()(signals).max(1).argmin()]
    assert cascade.workflows["classify"].local(doubtful.tolist())["by"] == "second"


def test_the_second_model_is_on_one_branch_only(cascade: App) -> None:
    choice = cascade.workflows["classify"].flow.nodes["when"]
    assert [branch for branch in choice.branches if "second" in branch] == [("second",)]


@pytest.mark.parametrize(
    ("wave", "says"),
    [
        ([0.0] * 255, "shape"),
        (["a"] * 256, "not a list"),
        ([float("inf")] + [0.0] * 255, "infinite"),
        ([1.0] * 256, "equal"),
    ],
)
def test_what_is_no_wave_is_refused_with_a_reason(cascade: App, wave: object, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        cascade.workflows["classify"].local(wave)
