"""Reads the text on a page: find the lines, turn each upright, read each.

Three real models, one goal for the whole. A page becomes as many jobs as it has lines, and lines of different pages share
batches.

    lamina serve examples/ocr/app.py
    lamina call read_page --file page.png
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

import detection
import lamina
import recognition
from lamina.errors import BadValue
from lamina.sdk.onnx import OnnxModel
from pixels import Pixels, decode, model_file

app = lamina.App("ocr")
STANDING = lamina.Scale(min=1, max=2)
Line = dict[str, Any]
"""`box`: four corners, from the top left; `image`: the line cut out of the page."""


@app.function(cpu=lamina.CPU(1, memory="512MiB"), scale=STANDING)
class Detect:
    """The lines on a page, given as a PNG or JPEG file, in reading order."""

    def load(self) -> None:
        self.model = _model(detection.MODEL, (1, 3, 384, 512))

    def __call__(self, image: bytes) -> list[Line]:
        page = decode(image)
        return detection.lines(page, self.model.run(detection.prepare(page))[0, 0])


@app.function(batch=8, cpu=lamina.CPU(1, memory="256MiB"), scale=STANDING)
class Orient:
    """The line as it came, or turned by 180 degrees if it stood on its head."""

    def load(self) -> None:
        self.model = _model(recognition.ANGLE_MODEL, (1, 3, 48, 192))

    def __call__(self, line: list[Line]) -> list[Line]:
        upright = recognition.turned([_image(one) for one in line], self.model.run)
        return [{**one, "image": image} for one, image in zip(line, upright, strict=True)]


@app.function(batch=8, cpu=lamina.CPU(1, memory="512MiB"), scale=STANDING)
class Recognise:
    """What a line says: its text, the mean confidence in its characters, and where it stands."""

    def load(self) -> None:
        self.model = _model(recognition.MODEL, (1, 3, 48, 320))
        inside = self.model.session().get_modelmeta().custom_metadata_map
        self.alphabet = recognition.alphabet_of(inside["character"])

    def __call__(self, line: list[Line]) -> list[dict[str, Any]]:
        found = recognition.read([_image(one) for one in line], self.model.run, self.alphabet)
        return [
            {"text": text, "score": round(score, 4), "box": one.get("box")}
            for one, (text, score) in zip(line, found, strict=True)
        ]


def _model(name: str, shape: tuple[int, ...]) -> OnnxModel:
    """Loaded, and run once: the first run allocates, and no request should pay for that."""
    cv2.setNumThreads(1)  # the work is in the models, whose threads follow the slice; OpenCV's would not
    model = lamina.onnx_model(model_file(name))
    model.run(np.zeros(shape, np.float32))
    return model


def _image(line: Line) -> Pixels:
    image = line.get("image") if isinstance(line, dict) else None
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise BadValue("line: no image in it", hint='send {"image": array}, of uint8, height x width x 3')
    if min(image.shape) < 1:
        raise BadValue(f"line: its image is empty, {image.shape}", hint="send at least one pixel")
    return image


@app.workflow(slo=lamina.SLO("4s"))
def read_page(image: bytes) -> Any:
    """Text, confidence and place of every line on a page."""
    return lamina.each(lambda line: Recognise(Orient(line)), Detect(image), expect=8)


def examples() -> dict[str, list[Any]]:
    """For the profiler: pages, and the lines cut out of them."""
    from sample import invoice, line  # needs fonts, which serving does not

    pages = [invoice(seed) for seed in range(4)]
    lines: list[Line] = [{"image": decode(line(text))} for _, texts in pages for text in texts]
    return {"detect": [page for page, _ in pages], "orient": lines, "recognise": lines}
