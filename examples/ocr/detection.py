"""Where the text is: the model marks each pixel's chance of lying in the core of a line; here lines are made of it.

A core is thinner than its line, because cores of neighbouring lines must not touch. Growing it back moves every side
outwards by area / perimeter x ratio. For a rectangle that is the rectangle with both sides longer by twice the distance:
rounded corners do not change the smallest rectangle around it, so no polygon library is needed.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from pixels import Pixels, Tensor, to_tensor

MODEL = "PP-OCRv6_det_small.onnx"
LONG_SIDE_PX = 512  # time grows with the area; lines are cut from the full image, so only finding them suffers
STRIDE_PX = 32  # the model halves its input five times
PIXEL_THRESHOLD = 0.3
LINE_THRESHOLD = 0.5
GROW_RATIO = 1.6
MIN_CORE_PX = 3
MAX_LINES = 256  # every line becomes two jobs: a page of noise must not become a thousand
TALL = 1.5

Corners = npt.NDArray[np.float32]  #: top left, top right, bottom right, bottom left


def prepare(page: Pixels) -> Tensor:
    """The page as the model's input: no side above the limit, both multiples of the stride."""
    height, width = page.shape[:2]
    ratio = min(1.0, LONG_SIDE_PX / max(height, width))
    new_height, new_width = (max(STRIDE_PX, round(side * ratio / STRIDE_PX) * STRIDE_PX) for side in (height, width))
    resized = cv2.resize(page, (new_width, new_height), interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
    return to_tensor(np.asarray(resized, np.uint8))[None]


def lines(page: Pixels, chances: Tensor) -> list[dict[str, Any]]:
    """Box and image of every line, in reading order. `chances` is the model's map, at its own scale."""
    height, width = page.shape[:2]
    scale = np.array([width / chances.shape[1], height / chances.shape[0]], np.float32)
    found = [_clockwise(np.clip(corners * scale, 0, [width - 1, height - 1]).astype(np.float32)) for corners in _cores(chances)]
    return [
        {"box": np.round(corners).astype(int).tolist(), "image": _cut(page, corners)}
        for corners in _in_reading_order(found)
        if _sides(corners)[0] >= MIN_CORE_PX and _sides(corners)[1] >= MIN_CORE_PX
    ]


def _cores(chances: Tensor) -> list[Corners]:
    mask = cv2.dilate((chances > PIXEL_THRESHOLD).astype(np.uint8), np.ones((2, 2), np.uint8))
    outlines, tree = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if not outlines:
        return []
    # An outline with a parent is a hole in a line, not a line.
    outer = [outline for outline, (*_, parent) in zip(outlines, tree[0], strict=True) if parent < 0]
    outer.sort(key=cv2.contourArea, reverse=True)
    found = []
    for outline in outer[:MAX_LINES]:
        centre, (width, height), angle = cv2.minAreaRect(outline)
        if min(width, height) < MIN_CORE_PX:
            continue
        if _mean_inside(chances, cv2.boxPoints((centre, (width, height), angle))) < LINE_THRESHOLD:
            continue
        grow = 2 * GROW_RATIO * (width * height) / (2 * (width + height))
        found.append(np.asarray(cv2.boxPoints((centre, (width + grow, height + grow), angle)), np.float32))
    return found


def _mean_inside(chances: Tensor, corners: Any) -> float:
    height, width = chances.shape
    low = np.clip(np.floor(corners.min(0)).astype(int), 0, [width - 1, height - 1])
    high = np.clip(np.ceil(corners.max(0)).astype(int), 0, [width - 1, height - 1]) + 1
    window = chances[low[1] : high[1], low[0] : high[0]]
    mask = np.zeros(window.shape, np.uint8)
    cv2.fillPoly(mask, [np.round(corners - low).astype(np.int32)], 1)
    return float(cv2.mean(window, mask)[0])


def _clockwise(corners: Corners) -> Corners:
    """Corners from the top left, whatever order the rectangle came in: the left pair first, each pair from the top."""
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    left, right = (pair[np.argsort(pair[:, 1], kind="stable")] for pair in (by_x[:2], by_x[2:]))
    return np.stack([left[0], right[0], right[1], left[1]])


def _sides(corners: Corners) -> tuple[float, float]:
    across = max(np.linalg.norm(corners[0] - corners[1]), np.linalg.norm(corners[3] - corners[2]))
    down = max(np.linalg.norm(corners[0] - corners[3]), np.linalg.norm(corners[1] - corners[2]))
    return float(across), float(down)


def _in_reading_order(boxes: list[Corners]) -> list[Corners]:
    """Rows from top to bottom, each from left to right. A box opens a new row once its centre is below half of the row's."""
    rows: list[list[Corners]] = []
    for box in sorted(boxes, key=lambda corners: float(corners[:, 1].mean())):
        first = rows[-1][0] if rows else None
        if first is None or float(box[:, 1].mean() - first[:, 1].mean()) > float(np.ptp(first[:, 1])) / 2:
            rows.append([])
        rows[-1].append(box)
    return [box for row in rows for box in sorted(row, key=lambda corners: float(corners[:, 0].min()))]


def _cut(page: Pixels, corners: Corners) -> Pixels:
    """The line, straightened. A tall one runs up or down the page: laid on its side, it may stand on its head,
    which the next step finds out."""
    width, height = (round(side) for side in _sides(corners))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    line = cv2.warpPerspective(
        page,
        cv2.getPerspectiveTransform(corners, target),
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return np.ascontiguousarray(np.rot90(line) if height >= TALL * width else line, np.uint8)
