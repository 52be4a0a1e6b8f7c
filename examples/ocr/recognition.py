"""What a line says, and which way up it is.

Lines are filled up to a multiple of 32 pixels and only lines of one width share a run. The usual way, filling up to the
widest of the batch, costs more (time grows with the width) and lets an answer depend on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pixels import Pixels, Tensor, stack, to_line

MODEL = "PP-OCRv6_rec_small.onnx"
ANGLE_MODEL = "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
HEIGHT_PX = 48
WIDTH_STEP_PX = 32
MAX_WIDTH_PX = 2048
ANGLE_WIDTH_PX = 192
MAX_PIECES = 4
TURN_THRESHOLD = 0.9  # turning a good line ruins it, so only the sure ones
BLANK = 0

Run = Callable[[Tensor], Tensor]


def turned(images: list[Pixels], run: Run) -> list[Pixels]:
    """Each image upright: the model says whether it stands on its head."""
    pieces = [_pieces(to_line(image, HEIGHT_PX, MAX_WIDTH_PX)) for image in images]
    chances = run(stack([piece for group in pieces for piece in group], ANGLE_WIDTH_PX))[:, 1]
    odds, sure = _log_odds(chances), _log_odds(TURN_THRESHOLD)
    upright, start = [], 0
    for image, group in zip(images, pieces, strict=True):
        flip = odds[start : start + len(group)].mean() > sure
        upright.append(np.ascontiguousarray(image[::-1, ::-1]) if flip else image)
        start += len(group)
    return upright


def _log_odds(chance: Any) -> Any:
    """Averaged instead of chances: a piece that is sure counts for more than one that wavers."""
    chance = np.clip(chance, 0.01, 0.99)
    return np.log(chance / (1 - chance))


def _pieces(line: Tensor) -> list[Tensor]:
    """What the model is shown of a line. Squeezing a long one into its width makes upright text look turned."""
    spare_px = line.shape[2] - ANGLE_WIDTH_PX
    if spare_px <= 0:
        return [line]
    starts = np.linspace(0, spare_px, min(MAX_PIECES, 1 + -(-spare_px // ANGLE_WIDTH_PX))).astype(int)
    return [line[:, :, start : start + ANGLE_WIDTH_PX] for start in starts]


def read(images: list[Pixels], run: Run, alphabet: list[str]) -> list[tuple[str, float]]:
    """Text and mean confidence of each image."""
    lines = [to_line(image, HEIGHT_PX, MAX_WIDTH_PX) for image in images]
    by_width: dict[int, list[int]] = {}
    for index, line in enumerate(lines):
        by_width.setdefault(-(-line.shape[2] // WIDTH_STEP_PX) * WIDTH_STEP_PX, []).append(index)
    texts: dict[int, tuple[str, float]] = {}
    for width_px, indices in by_width.items():
        chances = run(stack([lines[index] for index in indices], width_px))
        texts.update((index, _spell(row, alphabet)) for index, row in zip(indices, chances, strict=True))
    return [texts[index] for index in range(len(lines))]


def alphabet_of(characters: str) -> list[str]:
    """Class number to character, from the list inside the model: nothing first, a space last."""
    return ["", *characters.split("\n"), " "]


def _spell(chances: npt.NDArray[np.float32], alphabet: list[str]) -> tuple[str, float]:
    """The likeliest character of each column; repeats are one character unless a blank lies between them."""
    best = chances.argmax(1)
    kept = best != BLANK
    kept[1:] &= best[1:] != best[:-1]
    if not kept.any():
        return "", 0.0
    return _join(alphabet[index] for index in best[kept]), float(chances.max(1)[kept].mean())


def _join(characters: Iterable[str]) -> str:
    return "".join(characters).strip()
