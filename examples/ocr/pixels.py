"""From bytes to pixels and from pixels to what the models take.

The size is read from the file's header before anything is decoded: a few bytes must not make a worker allocate gigabytes.
"""

from __future__ import annotations

import re
import struct
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from lamina.errors import BadValue, LoadFailed

Pixels = npt.NDArray[np.uint8]  #: height, width, 3; blue first, as OpenCV reads them and as the models were trained
Tensor = npt.NDArray[np.float32]

MIN_SIDE_PX = 8
MAX_PIXELS = 40_000_000
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the markers whose segment holds the size
_SEND_AN_IMAGE = "send the bytes of a PNG or JPEG file"


def decode(image: object) -> Pixels:
    """The pixels of a PNG or JPEG file, or an error that says why there are none."""
    if not isinstance(image, bytes | bytearray | memoryview):
        raise BadValue(f"image: a value of type {type(image).__name__} is not a file", hint=_SEND_AN_IMAGE)
    width, height = _size(bytes(image))
    if min(width, height) < MIN_SIDE_PX:
        raise BadValue(
            f"image: {width} x {height} pixels are too few to hold text", hint=f"both sides need at least {MIN_SIDE_PX}"
        )
    if width * height > MAX_PIXELS:
        raise BadValue(
            f"image: {width} x {height} pixels are too many",
            hint=f"scale it to at most {MAX_PIXELS // 1_000_000} million; 150 dots per inch suffice for a page",
        )
    try:
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise BadValue("image: the file is damaged", hint="open and save it again")
    return np.asarray(pixels, np.uint8)


def _size(image: bytes) -> tuple[int, int]:
    """Width and height as the header has them."""
    if image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) >= 24:
        width, height = struct.unpack(">II", image[16:24])
        return width, height
    if image.startswith(b"\xff\xd8"):
        at = 2
        while (found := re.compile(rb"\xff+([^\xff\x00])").match(image, at)) and len(image) >= found.end() + 7:
            at = found.end()
            length, _, height, width = struct.unpack(">HBHH", image[at : at + 7])
            if found[1][0] in _JPEG_FRAMES:
                return width, height
            at += length
    raise BadValue(f"image: {len(image)} bytes that are neither PNG nor JPEG", hint=_SEND_AN_IMAGE)


def to_tensor(pixels: Pixels) -> Tensor:
    """All three models want channels first and values in -1..1."""
    return (pixels.astype(np.float32) / 127.5 - 1.0).transpose(2, 0, 1)


def to_line(pixels: Pixels, height_px: int, widest_px: int) -> Tensor:
    """A line of text at the height a model was trained on, its shape kept up to a width."""
    height, width = pixels.shape[:2]
    new_width = min(widest_px, max(1, -(-height_px * width // height)))
    return to_tensor(np.asarray(cv2.resize(pixels, (new_width, height_px)), np.uint8))


def stack(lines: list[Tensor], width_px: int) -> Tensor:
    """Lines as one batch, each filled up with grey on the right."""
    channels, height = lines[0].shape[:2]
    batch = np.zeros((len(lines), channels, height, width_px), np.float32)
    for row, line in zip(batch, lines, strict=True):
        row[:, :, : line.shape[2]] = line
    return batch


def model_file(name: str) -> Path:
    """A model inside the rapidocr wheel; looked up without importing the package, which would load all of it."""
    spec = find_spec("rapidocr")
    folder = Path(spec.origin).parent / "models" if spec and spec.origin else None
    if folder is None or not (folder / name).is_file():
        raise LoadFailed(f"{name} is not installed", hint="pip install 'lamina[ocr]'")
    return folder / name
