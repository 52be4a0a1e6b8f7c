"""Noisy waves of four shapes, made in code: a quick model that is often right, and a thorough one that nearly always is.

The quick model weighs the strengths of a few harmonics. The thorough one compares the wave with every shape at every
pitch and shift, which is about the best that can be done and takes ten times as long.

    python examples/cascade/waves.py                    how good each is, and what the cascade saves
    python examples/cascade/waves.py --wave square      a wave to classify, as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]  #: of 32 bits wherever models see them
Ints = npt.NDArray[np.int64]
Model = Callable[[Floats], Floats]
"""Waves, one per row, to chances, one per shape."""

SHAPES = ("sine", "triangle", "square", "saw")
SAMPLES = 256
TRAIN_SEED = 7
SURE = 0.9
_PITCHES = np.arange(3, 9, 1 / 16)  # periods in a wave
_SHIFTS = 64


def ideal(shape: int, phase: Floats) -> Floats:
    """One of the shapes at `phase` (in periods), with an effective value of 1."""
    turn = phase % 1.0
    if SHAPES[shape] == "sine":
        return np.asarray(np.sqrt(np.float32(2)) * np.sin(2 * np.pi * turn, dtype=np.float32))
    if SHAPES[shape] == "square":
        return np.where(turn < 0.5, np.float32(1), np.float32(-1))
    saw = (2 * turn - 1).astype(np.float32)
    return np.asarray(np.sqrt(np.float32(3)) * (saw if SHAPES[shape] == "saw" else 2 * np.abs(saw) - 1))


def waves(count: int, seed: int) -> tuple[Floats, Ints]:
    """Waves of any pitch and shift, some clean and some drowned in noise; and which shapes they are."""
    rng = np.random.default_rng(seed)
    shapes = rng.integers(0, len(SHAPES), count)
    times = np.arange(SAMPLES, dtype=np.float32) / SAMPLES
    phases = rng.uniform(_PITCHES[0], _PITCHES[-1], (count, 1)) * times + rng.uniform(0, 1, (count, 1))
    clean = np.stack([ideal(shape, phase) for shape, phase in zip(shapes, phases.astype(np.float32), strict=True)])
    noise = rng.normal(0, 1, clean.shape) * rng.choice([0.1, 0.3, 0.6, 1.2], (count, 1), p=[0.3, 0.3, 0.25, 0.15])
    return normalised((clean + noise).astype(np.float32)), shapes


def normalised(signals: Floats) -> Floats:
    signals = signals - signals.mean(-1, keepdims=True)
    return np.asarray(signals / np.maximum(signals.std(-1, keepdims=True), np.float32(1e-6)))


def softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def quick(steps: int = 300) -> Model:
    """Learns to weigh the harmonics: softmax regression on a few features and their products."""
    known, shapes = waves(3_000, TRAIN_SEED)
    features = _features(known)
    centre, spread = features.mean(0), features.std(0) + np.float32(1e-6)
    features = (features - centre) / spread
    wanted = np.eye(len(SHAPES), dtype=np.float32)[shapes]
    weights = np.zeros((features.shape[1], len(SHAPES)), np.float32)
    bias = np.log(wanted.mean(0))
    for _ in range(steps):
        error = softmax(features @ weights + bias) - wanted
        weights -= np.float32(0.5) * features.T @ error / np.float32(len(features))
        bias -= np.float32(0.5) * error.mean(0)
    return lambda asked: softmax((_features(asked) - centre) / spread @ weights + bias)


def _features(signals: Floats) -> Floats:
    """How strong each multiple of the pitch is, how flat the wave and how steep; each alone and by every other."""
    power = np.abs(np.fft.rfft(signals * np.hanning(SAMPLES))) ** 2 + 1e-6
    rows = np.arange(len(signals))[:, None]
    peak = power[:, 2:12].argmax(1)[:, None] + 2
    before, at, after = np.log(power[rows, peak + np.array([-1, 0, 1])]).T
    bend = np.minimum(before - 2 * at + after, -1e-3)
    pitch = peak[:, 0] + np.clip((before - after) / (2 * bend), -0.5, 0.5)  # the top of a parabola through the three
    places = np.rint(np.outer(pitch, np.arange(1, 8))).astype(int)[:, :, None] + np.array([-1, 0, 1])
    strengths = np.log(power[rows[:, :, None], np.minimum(places, SAMPLES // 2)].sum(2))
    slopes = np.diff(signals, axis=1)
    values = [np.mean(signals**4, axis=1), np.mean(np.abs(signals), axis=1), np.log(np.mean(slopes**2, axis=1) + 1e-6)]
    single = np.concatenate([strengths[:, 1:] - strengths[:, :1], np.stack(values, axis=1)], axis=1)
    left, right = np.triu_indices(single.shape[1])
    return np.concatenate([single, single[:, left] * single[:, right]], axis=1).astype(np.float32)


def thorough() -> Model:
    """Compares with every shape at every pitch and shift."""
    times = np.arange(SAMPLES, dtype=np.float32) / SAMPLES
    grid = [pitch * times + shift / _SHIFTS for pitch in _PITCHES for shift in range(_SHIFTS)]
    banks = [normalised(np.stack([ideal(shape, phase) for phase in grid])) for shape in range(len(SHAPES))]

    def chances(asked: Floats) -> Floats:
        likeness = np.stack([(asked @ bank.T).max(1) / np.float32(SAMPLES) for bank in banks], axis=1)
        noise = np.maximum(1 - likeness.max(1, keepdims=True) ** 2, np.float32(0.02))
        return softmax(np.float32(SAMPLES) * likeness / noise / 4)

    return chances


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Mark the models, or make a wave.")
    parser.add_argument("--wave", choices=SHAPES, help="print a noisy wave of this shape as JSON")
    wanted = parser.parse_args(arguments).wave
    asked, shapes = waves(2_000, seed=1)
    if wanted:
        print(json.dumps(asked[shapes == SHAPES.index(wanted)][0].astype(float).round(3).tolist()))
        return
    said: dict[str, Floats] = {}
    for name, model in (("quick", quick()), ("thorough", thorough())):
        said[name] = model(asked)
        started = time.perf_counter()
        for index in range(100):
            model(asked[index : index + 1])
        each_us = (time.perf_counter() - started) / 100 * 1e6
        print(f"{name:10s} {(said[name].argmax(1) == shapes).mean():.3f} right, {each_us:5.0f} us for one")
    unsure = said["quick"].max(1) < SURE
    cascade = np.where(unsure, said["thorough"].argmax(1), said["quick"].argmax(1))
    print(f"{'cascade':10s} {(cascade == shapes).mean():.3f} right, {unsure.mean():.0%} go on to the thorough one")


if __name__ == "__main__":
    main(sys.argv[1:])
