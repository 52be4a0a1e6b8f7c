"""Emulated outputs: a typed model gives what its metadata promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_emulated
from lamina.engines.emulated import zero_outputs
from lamina.gateway.bootstrap import open_gateway
from lamina.predict.profile import Point, Profile
from lamina.sdk.app_loader import load_app
from lamina.sdk.tensors import Port, Signature, Tensor
from tests.serving import Browser, run, write_app

APP = """
from typing import Annotated, TypedDict
import numpy as np
import lamina
from lamina import Tensor
app = lamina.App("made-up")
Row = Annotated[np.ndarray, Tensor("FP32", [4])]

class Found(TypedDict):
    boxes: Annotated[np.ndarray, Tensor("INT64", [-1, 2])]
    labels: Annotated[list, Tensor("BYTES", [-1])]

@app.function(batch=8, gpu=lamina.GPU(0.5))
def double(x: list[Row]) -> list[Row]: ...

@app.function(gpu=lamina.GPU(0.5))
def find(x: Row) -> Found: ...
"""


@pytest.mark.live
def test_models_answer_with_zeros_of_what_they_promise(tmp_path: Path) -> None:
    profiles = [
        Profile(function=name, device="h200", points=[Point(batch=b, units=8, p50_us=100.0) for b in (1, 8)], load_us=1)
        for name in ("double", "find")
    ]

    async def work() -> list[Any]:
        gateway = await open_gateway(open_emulated(load_app(str(write_app(tmp_path, APP))), "h200", profiles))
        try:
            async with Browser(gateway.port) as browser:
                found = []
                for name, shape in (("double", [2, 4]), ("find", [4])):
                    data = [0.5] * (shape[0] * shape[-1] if len(shape) > 1 else 4)
                    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}]}
                    answer = await browser.ask("POST", f"/v2/models/{name}/infer", json.dumps(body).encode())
                    assert answer.status == 200, answer.body
                    found.append([(one["datatype"], one["shape"], one["data"]) for one in answer.json["outputs"]])
                return found
        finally:
            await gateway.stop(1)

    assert run(work) == [[("FP32", [2, 4], [0.0] * 8)], [("INT64", [1, 2], [0, 0]), ("BYTES", [1], [""])]]


def test_what_has_no_type_is_null() -> None:
    assert zero_outputs(Signature((), (Port("output"),))) is None
    assert zero_outputs(Signature((), (Port("a", Tensor("BYTES", [2, -1])), Port("b")))) == {"a": [[b""], [b""]], "b": None}
