from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from lamina.sdk.app import App
from lamina.sdk.app_loader import load_app

EXAMPLES = Path(__file__).parents[2] / "examples"


def _opened(name: str) -> Iterator[App]:
    app = load_app(str(EXAMPLES / name / "app.py"))  # its neighbours can be imported from here on
    yield app
    app.close()


@pytest.fixture(scope="session")
def ocr() -> Iterator[App]:
    if find_spec("rapidocr") is None:  # only its files are needed; importing it would load all of it
        pytest.skip("rapidocr is not installed")
    for package in ("onnxruntime", "cv2", "PIL"):
        pytest.importorskip(package)
    yield from _opened("ocr")


@pytest.fixture(scope="session")
def ensemble() -> Iterator[App]:
    yield from _opened("ensemble")


@pytest.fixture(scope="session")
def cascade() -> Iterator[App]:
    yield from _opened("cascade")
