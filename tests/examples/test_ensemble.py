from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lamina.errors import BadValue
from lamina.sdk.app import App


@pytest.fixture(scope="module")
def models(ensemble: App) -> dict[str, Any]:
    import digits

    return {name: learn() for name, learn in digits.MODELS.items()}


@pytest.fixture(scope="module")
def marks(models: dict[str, Any]) -> dict[str, list[float]]:
    """Share of right answers of each model and of all together, on five sets nobody has learnt from."""
    import digits

    found: dict[str, list[float]] = {name: [] for name in (*models, "together")}
    for seed in range(1, 6):
        images, truth = digits.pictures(2_000, seed)
        chances = {name: model(digits.normalised(images)) for name, model in models.items()}
        chances["together"] = np.mean(list(chances.values()), axis=0)
        for name, chance in chances.items():
            found[name].append(float((chance.argmax(1) == truth).mean()))
    return found


def test_the_models_agree_with_the_truth_more_often_together_than_the_best_of_them_alone(marks: dict[str, list[float]]) -> None:
    alone = np.max([marks[name] for name in marks if name != "together"], axis=0)
    assert (np.array(marks["together"]) > alone + 0.01).all()


def test_no_model_is_carried_by_the_others(marks: dict[str, list[float]]) -> None:
    assert min(min(scores) for scores in marks.values()) > 0.89


def test_the_workflow_says_what_the_mean_of_the_models_says(ensemble: App, models: dict[str, Any]) -> None:
    import digits

    images, _ = digits.pictures(20, seed=11)
    ready = digits.normalised(images)
    mean = np.mean([model(ready) for model in models.values()], axis=0)
    classify = ensemble.workflows["classify"]
    said = [classify.local(image.reshape(digits.ROWS, digits.COLUMNS).tolist())["digit"] for image in images]
    assert said == mean.argmax(1).tolist()


def test_the_three_models_can_run_at_the_same_time(ensemble: App) -> None:
    nodes = ensemble.workflows["classify"].flow.nodes
    assert set(nodes["prepare"].next) == {"pairs", "network", "neighbours"}


@pytest.mark.parametrize("learner", ["pairs", "network", "neighbours"])
def test_a_batch_gets_the_answers_its_pictures_would_get_alone(ensemble: App, learner: str) -> None:
    import digits

    ready = digits.normalised(digits.pictures(8, seed=12)[0])
    runner = ensemble.functions[learner].open()
    together = runner.run([{"picture": picture} for picture in ready])
    alone = [runner.run([{"picture": picture}])[0] for picture in ready]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ([[0.0] * 7] * 8, "56 numbers"),
        ("seven", "not a grid"),
        ([[0.0] * 6 + [float("nan")]] * 9, "not-a-number"),
        (None, "1 numbers"),
    ],
)
def test_what_is_no_picture_is_refused_with_a_reason(ensemble: App, image: object, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        ensemble.workflows["classify"].local(image)
