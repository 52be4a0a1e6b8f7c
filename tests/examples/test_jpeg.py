"""The JPEG example: real files, a real classifier, and kernels of CUDA C that compute what their twins do."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.sdk.app import App
from lamina.sdk.app_loader import load_app
from tests.kernels.host_compiler import HostCompiled

EXAMPLE = Path(__file__).parents[2] / "examples" / "jpeg"
TEXTS = ["Invoice 2041", "Total due: 314.15", "Kernel graphs", "The quick brown fox", "Amsterdam", "paid in full"]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    for package in ("onnxruntime", "cv2"):
        pytest.importorskip(package)
    if find_spec("rapidocr") is None:
        pytest.skip("rapidocr is not installed")
    folder = tmp_path_factory.mktemp("jpeg")  # under a name of its own: all examples are called app.py
    for name in ("app.py", "jpeg.cu"):
        (folder / name.replace("app", "jpeg_app")).write_text((EXAMPLE / name).read_text())
    import sys

    app: App = load_app(str(folder / "jpeg_app.py"))
    yield sys.modules["jpeg_app"]
    app.close()


def picture(text: str, *, upside_down: bool = False, grey: bool = False, quality: int = 90, sampling: str = "420") -> bytes:
    import cv2

    image = np.full((48, 24 * len(text), 3), (250, 245, 235), np.uint8)[:, :512]
    cv2.putText(image, text, (8, 34), cv2.FONT_HERSHEY_SIMPLEX, 1.0, (60, 20, 40), 2, cv2.LINE_AA)
    image = image[::-1, ::-1] if upside_down else image
    image = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY) if grey else image
    factor = {"420": 0x221111, "422": 0x211111, "444": 0x111111}[sampling]
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor, cv2.IMWRITE_JPEG_RST_INTERVAL, 7]
    return bytes(cv2.imencode(".jpg", np.ascontiguousarray(image), options)[1])


def test_lines_of_text_are_told_apart_in_one_batch(example: Any):
    calls = [example.request(picture(text, upside_down=flip)) for text in TEXTS for flip in (False, True)]
    found = example.orient.open().run(calls[:8])
    assert [int(one["label"]) for one in found] == [0, 1] * 4
    assert all(one["sureness"] > 0.5 for one in found)


def test_a_file_that_is_none_is_said_to_be_none_and_its_neighbours_are_served(example: Any):
    good, bad = picture("neighbour"), b"\xff\xd8 not a picture"
    found = example.orient.open().run([example.request(file) for file in (good, bad, good)])
    assert [int(one["label"]) for one in found] == [0, -1, 0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> HostCompiled:
    return HostCompiled((EXAMPLE / "jpeg.cu").read_text(), tmp_path_factory.mktemp("kernels"))


def buffers(example: Any, files: list[bytes]) -> dict[str, np.ndarray]:
    requests = [example.request(file) for file in files]
    shapes = {one.name: one for one in example.orient.graph.spec.buffers}
    made = {name: np.zeros((len(files), *one.shape), one.dtype) for name, one in shapes.items()}
    return made | {name: np.array([request[name] for request in requests], shapes[name].dtype) for name in ("file", "size")}


@pytest.mark.parametrize("sampling", ["420", "422", "444"])
def test_the_decoder_in_cuda_c_gives_the_pixels_of_libjpeg(example: Any, compiled: HostCompiled, sampling: str):
    files = [picture(text, quality=quality, sampling=sampling) for text in TEXTS[:2] for quality in (60, 95)]
    files += [picture("grey", grey=True)]
    ours, theirs = buffers(example, files), buffers(example, files)
    names = ("file", "size", "blocks", "pixels", "extents")
    compiled.run("jpeg_decode", len(files), [ours[name] for name in names])
    example.decode_twin(*(theirs[name] for name in names))
    assert ours["extents"].tolist() == theirs["extents"].tolist() and theirs["extents"].min() > 0
    apart = np.abs(ours["pixels"].astype(int) - theirs["pixels"].astype(int))
    assert apart[-1].max() <= 1, "grey: nothing but rounding"
    assert apart.mean() < 0.5 and np.quantile(apart, 0.999) <= 16, "colour: they interpolate it differently"


def test_resize_and_answer_in_cuda_c_are_their_twins(example: Any, compiled: HostCompiled):
    files = [picture("resize me"), picture("A"), b"none"]
    ours, theirs = buffers(example, files), buffers(example, files)
    for made in (ours, theirs):
        example.decode_twin(made["file"], made["size"], made["blocks"], made["pixels"], made["extents"])
    compiled.run("resize", 3, [ours["pixels"], ours["extents"], ours["ready"]], (6, 6), (32, 8))
    example.resize_twin(theirs["pixels"], theirs["extents"], theirs["ready"])
    assert np.allclose(ours["ready"], theirs["ready"], atol=1e-5) and np.abs(theirs["ready"]).max() > 0.5
    chances = np.array([[0.9, 0.1], [0.2, 0.8], [0.2, 0.8]], np.float32)
    compiled.run("answer", 3, [chances, ours["extents"], ours["label"], ours["sureness"]])
    example.answer_twin(chances, theirs["extents"], theirs["label"], theirs["sureness"])
    assert ours["label"].tolist() == theirs["label"].tolist() == [0, 1, -1]
    assert ours["sureness"].tolist() == theirs["sureness"].tolist()


def test_no_damaged_file_leaves_its_buffers(example: Any, compiled: HostCompiled):
    """The compiler checks the bounds of arrays; what lies around the buffers shows writes through pointers."""
    rng, good = random.Random(11), picture("damage this")
    names = ("file", "size", "blocks", "pixels", "extents")
    for turn in range(300):
        file = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            file[rng.randrange(len(file))] = rng.randrange(256)
        if turn % 3 == 0:
            del file[rng.randrange(len(file)) :]
        made = buffers(example, [b"", bytes(file), b""])
        for name in names[2:]:
            made[name][...] = 77
        one = [made[name][1:2] for name in names]
        compiled.run("jpeg_decode", 1, one)
        for name in names[2:]:
            assert (made[name][[0, 2]] == 77).all(), (turn, name)
