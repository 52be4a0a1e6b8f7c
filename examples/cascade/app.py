"""A quick model answers what it is sure of; the thorough one is asked only for the rest.

lamina serve examples/cascade/app.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import lamina
from lamina.errors import BadValue
from waves import SAMPLES, SHAPES, SURE, Floats, normalised, quick, thorough, waves

app = lamina.App("cascade")


@app.function(scale=lamina.Scale(min=1, max=2))
def prepare(wave: Any) -> Floats:
    """256 samples as the models want them: mean 0, deviation 1."""
    try:
        signal = np.asarray(wave, np.float32)
    except (TypeError, ValueError):
        raise BadValue("wave: not a list of numbers", hint=f"send {SAMPLES} numbers") from None
    if signal.shape != (SAMPLES,):
        raise BadValue(f"wave: shape {signal.shape}", hint=f"send {SAMPLES} numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        ready = normalised(signal)
    if not np.isfinite(ready).all():
        raise BadValue("wave: infinite, not-a-number or too large", hint="send plain numbers of moderate size")
    if not ready.any():
        raise BadValue("wave: all samples are equal", hint="send a wave")
    return ready


@app.function(batch=16, scale=lamina.Scale(min=1, max=2))
class First:
    """A guess, and how sure it is."""

    def load(self) -> None:
        self.chances = quick()

    def __call__(self, signal: list[Floats]) -> list[dict[str, Any]]:
        return [_answer(chances, "first") for chances in self.chances(np.stack(signal))]


@app.function(batch=16, scale=lamina.Scale(min=1, max=2))
class Second:
    """A better answer, at ten times the price."""

    def load(self) -> None:
        self.chances = thorough()

    def __call__(self, signal: list[Floats]) -> list[dict[str, Any]]:
        return [_answer(chances, "second") for chances in self.chances(np.stack(signal))]


def _answer(chances: Floats, by: str) -> dict[str, Any]:
    best = int(chances.argmax())
    return {"shape": SHAPES[best], "chance": round(float(chances[best]), 4), "by": by}


@app.workflow(slo="250ms")
def classify(wave: Any) -> Any:
    """The shape of a wave."""
    signal = prepare(wave)
    guess = First(signal)
    return lamina.when(guess["chance"] < SURE, lambda: Second(signal), lambda: guess)


def examples() -> dict[str, list[Any]]:
    """For the profiler."""
    signals = list(waves(16, seed=1)[0])
    return {"prepare": [signal.tolist() for signal in signals], "first": signals, "second": signals}
