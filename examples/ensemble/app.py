"""Three models look at the same picture at the same time, and their answers are combined.

lamina serve examples/ensemble/app.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import lamina
from digits import COLUMNS, MODELS, PIXELS, ROWS, Floats, normalised, pictures
from lamina.errors import BadValue

app = lamina.App("ensemble")
STANDING = lamina.Scale(min=1, max=2)


@app.function(slo="50ms", scale=STANDING)
def prepare(image: Any) -> Floats:
    """A picture of 9 x 7 numbers, as the models want it."""
    try:
        picture = np.asarray(image, np.float32)
    except (TypeError, ValueError):
        raise BadValue("image: not a grid of numbers", hint=f"send {ROWS} rows of {COLUMNS} numbers") from None
    if picture.size != PIXELS:
        raise BadValue(f"image: {picture.size} numbers", hint=f"send {ROWS} rows of {COLUMNS} numbers")
    if not np.isfinite(picture).all():
        raise BadValue("image: holds infinity or not-a-number", hint="send plain numbers")
    return normalised(picture.reshape(1, PIXELS)).reshape(PIXELS)


class _Model:
    """Learns when it is loaded: a stand-in for weights read from a file."""

    def load(self) -> None:
        self.chances = MODELS[type(self).__name__.lower()]()

    def __call__(self, picture: list[Floats]) -> list[Floats]:
        return list(self.chances(np.stack(picture)))


@app.function(batch=32, scale=STANDING)
class Pairs(_Model):
    """Chances of each digit, by a linear model of pixels and pairs of pixels."""


@app.function(batch=32, scale=STANDING)
class Network(_Model):
    """Chances of each digit, by a neural network."""


@app.function(batch=32, scale=STANDING)
class Neighbours(_Model):
    """Chances of each digit, by the most alike pictures."""


@app.function(scale=STANDING)
def combine(pairs: Floats, network: Floats, neighbours: Floats) -> dict[str, Any]:
    """The digit that is likeliest on average, and what each model would have said alone."""
    each = {"pairs": pairs, "network": network, "neighbours": neighbours}
    mean = np.mean([np.asarray(chances) for chances in each.values()], axis=0)
    digit = int(mean.argmax())
    votes = {name: int(np.argmax(chances)) for name, chances in each.items()}
    return {"digit": digit, "chance": round(float(mean[digit]), 4), "votes": votes}


@app.workflow(slo="250ms")
def classify(image: Any) -> Any:
    """Which digit a picture shows."""
    picture = prepare(image)
    return combine(Pairs(picture), Network(picture), Neighbours(picture))


def examples() -> dict[str, list[Any]]:
    """For the profiler."""
    images = pictures(16, seed=1)[0]
    ready = list(normalised(images))
    chances = np.full(10, 0.1, np.float32)
    return {
        "prepare": [image.reshape(ROWS, COLUMNS).tolist() for image in images],
        **dict.fromkeys(("pairs", "network", "neighbours"), ready),
        "combine": [dict.fromkeys(("pairs", "network", "neighbours"), chances)],
    }
