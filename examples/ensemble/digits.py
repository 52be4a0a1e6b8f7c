"""Small damaged pictures of digits, made in code, and three models that learn them in a moment.

The models differ in kind, so they err on different pictures: that is what an ensemble lives on.

    python examples/ensemble/digits.py                  how good each is, and how good they are together
    python examples/ensemble/digits.py --picture 3      a picture to classify, as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]  #: of 32 bits wherever models see them
Ints = npt.NDArray[np.int64]
Model = Callable[[Floats], Floats]
"""Pictures, one per row, to chances, one per digit."""

ROWS, COLUMNS = 9, 7
PIXELS = ROWS * COLUMNS
TRAIN_SEED = 7
_NOISE = 0.3
_PATCH = 4
_FACES = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


def faces() -> Floats:
    """The ten digits undamaged, in the middle of the frame."""
    rows = [line.split() for line in _FACES.split("\n") if line]
    strokes = [[[cell == "#" for cell in row[digit]] for row in rows] for digit in range(10)]
    return np.pad(np.array(strokes, np.float32), ((0, 0), (1, 1), (1, 1)))


def pictures(count: int, seed: int) -> tuple[Floats, Ints]:
    """Digits in light or dark ink, a patch of each covered, under noise; and which digits they are."""
    rng = np.random.default_rng(seed)
    digits = rng.integers(0, 10, count)
    images = faces()[digits] * rng.uniform(0.7, 1.3, (count, 1, 1)).astype(np.float32)
    tops, lefts = rng.integers(0, ROWS - _PATCH + 1, count), rng.integers(0, COLUMNS - _PATCH + 1, count)
    for image, top, left, shade in zip(images, tops, lefts, rng.uniform(-0.5, 1.5, count), strict=True):
        image[top : top + _PATCH, left : left + _PATCH] = shade
    images += rng.normal(0, _NOISE, images.shape).astype(np.float32)
    return images.reshape(count, PIXELS), digits


def normalised(images: Floats) -> Floats:
    """Mean 0 and deviation 1 per picture: how dark the ink was says nothing."""
    return np.asarray((images - images.mean(1, keepdims=True)) / np.maximum(images.std(1, keepdims=True), 1e-6))


@cache
def lessons() -> tuple[Floats, Ints]:
    """What the models learn from."""
    images, digits = pictures(3_000, TRAIN_SEED)
    return normalised(images), digits


def softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def pairs(ridge: float = 100.0) -> Model:
    """A linear model of pixels and of products of neighbours: a stroke is more than its pixels."""
    images, digits = lessons()
    known = _with_products(images)
    wanted = np.eye(10, dtype=np.float32)[digits] - 0.1
    weights = np.linalg.solve(known.T @ known + ridge * np.eye(known.shape[1], dtype=np.float32), known.T @ wanted)
    return lambda asked: softmax(6 * _with_products(asked) @ weights)


def _with_products(images: Floats) -> Floats:
    square = images.reshape(-1, ROWS, COLUMNS)
    parts = (square, square[:, 1:] * square[:, :-1], square[:, :, 1:] * square[:, :, :-1])
    return np.concatenate([part.reshape(len(images), -1) for part in parts], axis=1)


def network(hidden: int = 48, epochs: int = 12) -> Model:
    """One hidden layer, trained with momentum."""
    images, digits = lessons()
    rng = np.random.default_rng(TRAIN_SEED)
    weights = [
        rng.normal(0, (2 / PIXELS) ** 0.5, (PIXELS, hidden)).astype(np.float32),
        np.zeros(hidden, np.float32),
        rng.normal(0, (1 / hidden) ** 0.5, (hidden, 10)).astype(np.float32),
        np.zeros(10, np.float32),
    ]
    speeds = [np.zeros_like(weight) for weight in weights]
    wanted = np.eye(10, dtype=np.float32)[digits]
    for epoch in range(epochs):
        rate = 0.05 * (1 - epoch / epochs)
        for batch in np.array_split(rng.permutation(len(images)), len(images) // 50):
            inner = np.maximum(images[batch] @ weights[0] + weights[1], 0)
            error = (softmax(inner @ weights[2] + weights[3]) - wanted[batch]) / len(batch)
            back = (error @ weights[2].T) * (inner > 0)
            slopes = (images[batch].T @ back, back.sum(0), inner.T @ error, error.sum(0))
            for weight, speed, slope in zip(weights, speeds, slopes, strict=True):
                speed *= 0.9
                speed -= rate * (slope + 1e-3 * weight)
                weight += speed
    return lambda asked: softmax(np.maximum(asked @ weights[0] + weights[1], 0) @ weights[2] + weights[3])


def neighbours(nearest: int = 7, kept: int = 30) -> Model:
    """The digits of the most alike lessons, compared along their main directions only."""
    images, digits = lessons()
    directions = np.linalg.svd(images, full_matrices=False)[2][:kept].T
    known = images @ directions
    wanted = np.eye(10, dtype=np.float32)[digits]

    def chances(asked: Floats) -> Floats:
        distance = (known**2).sum(1) - 2 * (asked @ directions) @ known.T
        near = np.argpartition(distance, nearest, axis=1)[:, :nearest]
        return np.asarray((wanted[near].sum(1) + np.float32(0.1)) / np.float32(nearest + 1))

    return chances


MODELS: dict[str, Callable[[], Model]] = {"pairs": pairs, "network": network, "neighbours": neighbours}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Mark the models, or make a picture.")
    parser.add_argument("--picture", type=int, choices=range(10), help="print a damaged picture of this digit as JSON")
    wanted = parser.parse_args(arguments).picture
    images, digits = pictures(4_000, seed=1)
    if wanted is not None:
        print(json.dumps(images[digits == wanted][0].reshape(ROWS, COLUMNS).astype(float).round(3).tolist()))
        return
    chances = {name: learn()(normalised(images)) for name, learn in MODELS.items()}
    chances["together"] = np.mean(list(chances.values()), axis=0)
    for name, chance in chances.items():
        print(f"{name:12s} {(chance.argmax(1) == digits).mean():.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
