"""OpenAPI that generates clients (problem P7 of a newcomer's first hour): schemas of requests and results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.gateway.routes.openapi import document
from lamina.gateway.routes.targets import CallTarget
from lamina.sdk.binding import Param
from lamina.types import Slo
from tests.serving import Answer, Browser, run, shared, write_app

APP = """
import datetime
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict
from uuid import UUID

import msgspec
import numpy as np
from pydantic import BaseModel, Field

import lamina

app = lamina.App("typed")


@dataclass
class Box:
    x: int
    label: str = ""


class Score(msgspec.Struct):
    value: float
    box: Box


class Item(BaseModel):
    name: str
    boxes: list[Box2] = []


class Options(TypedDict):
    depth: int


@app.function()
def score(box: Box, options: Options | None = None) -> Score:
    return Score(1.0, box)


@app.function()
def thumb(image: bytes, width: int = 32) -> bytes:
    return image


@app.function()
def item(item: Item) -> Item:
    return item


@app.function()
def array(x: Annotated[np.ndarray, lamina.Tensor("FP32", [2, -1])]) -> list[float]:
    return []


@app.function()
def tell(about: str):
    yield about


class Pet(BaseModel):
    kind: Literal["cat"]
    id: UUID
    legs: Annotated[int, Field(ge=3)]


@app.function()
def fussy(
    pet: Pet,
    at: datetime.date,
    pair: tuple[int, str],
    mode: Literal["fast"],
    x: Annotated[np.ndarray, lamina.Tensor("FP32", [2, -1])],
) -> str:
    return f"{pet.legs} {at} {pair[1]} {mode} {x.shape}"


@app.workflow()
def flow(image: bytes, width: int) -> bytes:
    return thumb(image, width)
""".replace("boxes: list[Box2] = []", "count: int = 1")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    pytest.importorskip("pydantic")
    with shared(write_app(tmp_path_factory.mktemp("typed"), APP)) as gateway:
        yield gateway.port


def asked(port: int, path: str) -> Answer:
    async def work() -> Answer:
        async with Browser(port) as browser:
            return await browser.ask("GET", path)

    return run(work)


@pytest.fixture(scope="module")
def found(port: int) -> dict[str, Any]:
    return asked(port, "/openapi.json").json


def body(found: dict[str, Any], name: str, kind: str = "application/json") -> Any:
    return found["paths"][f"/v1/functions/{name}"]["post"]["requestBody"]["content"][kind]["schema"]


def result(found: dict[str, Any], name: str) -> Any:
    return found["paths"][f"/v1/functions/{name}"]["post"]["responses"]["200"]["content"]


def test_p7_dataclasses_structs_and_typed_dicts_have_schemas(found: dict[str, Any]):
    properties = body(found, "score")["properties"]
    assert properties["box"] == {"$ref": "#/components/schemas/Box"}
    assert properties["options"]["anyOf"][0] == {"$ref": "#/components/schemas/Options"}
    assert body(found, "score")["required"] == ["box"]
    schemas = found["components"]["schemas"]
    assert schemas["Box"]["properties"]["x"] == {"type": "integer"}
    assert schemas["Score"]["properties"]["box"] == {"$ref": "#/components/schemas/Box"}
    assert result(found, "score")["application/json"]["schema"] == {"$ref": "#/components/schemas/Score"}


def test_p7_pydantic_models_have_schemas(found: dict[str, Any]):
    assert body(found, "item")["properties"]["item"]["properties"]["name"]["type"] == "string"
    assert result(found, "item")["application/json"]["schema"]["required"] == ["name"]


def test_p7_bytes_are_base64_in_json_and_files_in_forms(found: dict[str, Any]):
    assert body(found, "thumb")["properties"]["image"] == {"type": "string", "contentEncoding": "base64"}
    form = body(found, "thumb", "multipart/form-data")["properties"]
    assert form == {"image": {"type": "string", "format": "binary"}, "width": {"type": "integer"}}
    assert "application/octet-stream" in result(found, "thumb")


def test_p7_arrays_say_their_shape(found: dict[str, Any]):
    x = body(found, "array")["properties"]["x"]
    assert (x["type"], x["items"]["items"]["type"]) == ("array", "number")
    assert x["description"] == "FP32 of shape [2, -1]"


def test_streams_are_offered_where_a_function_yields(found: dict[str, Any]):
    assert "text/event-stream" in result(found, "tell")


def test_every_reference_leads_somewhere_and_no_path_of_a_file_is_told(found: dict[str, Any], tmp_path: Path):
    text = json.dumps(found)
    schemas = found["components"]["schemas"]
    for part in text.split('"$ref": "')[1:]:
        assert part.split('"')[0].removeprefix("#/components/schemas/") in schemas
    assert str(tmp_path.parent) not in text
    assert "/tmp/" not in text


def test_p7_the_page_to_try_it_loads_nothing_from_elsewhere(port: int):
    page = asked(port, "/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    parts = re.findall(rb'(?:src|href)="([^"]+)"', page.body)
    assert parts == [b"/docs/page.css", b"/openapi.json", b"/docs/page.js"]
    for part in parts:
        found = asked(port, part.decode())
        assert found.status == 200
        assert b"://" not in found.body or part == b"/openapi.json"
    assert b"<script>" not in page.body
    assert b"innerHTML" not in asked(port, "/docs/page.js").body


def test_p7_the_page_calls_a_function_in_a_browser(port: int):
    browsers = pytest.importorskip("playwright.sync_api")
    where = shutil.which("chromium")
    if where is None:
        pytest.skip("no Chromium here")
    with browsers.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=where, args=["--no-sandbox"])
        try:
            page = browser.new_page()
            refused: list[str] = []
            page.on("console", lambda message: refused.append(message.text) if message.type == "error" else None)
            page.goto(f"http://127.0.0.1:{port}/docs")
            box = page.locator("details", has_text="POST /v1/functions/score").first
            box.locator("summary").first.click()
            box.locator("button").click()
            box.locator("pre", has_text='"value": 1').wait_for(timeout=60_000)
            fussy = page.locator("details", has_text="POST /v1/functions/fussy").first
            fussy.locator("summary").first.click()
            fussy.locator("button").click()  # the body that is there fits
            fussy.locator("pre", has_text='"3 2026-01-01 text fast (2, 1)"').wait_for(timeout=60_000)
            assert [text for text in refused if "favicon" not in text and "404" not in text] == []
        finally:
            browser.close()


def test_two_classes_of_one_name_stay_apart():
    first = {"$ref": "#/$defs/Item", "$defs": {"Item": {"type": "object", "title": "one"}}}
    other = {"$ref": "#/$defs/Item", "$defs": {"Item": {"type": "object", "title": "two"}}}
    targets = [CallTarget(name, "function", (Param("x", schema=schema),), Slo()) for name, schema in (("a", first), ("b", other))]
    made = document(targets, {})
    assert body(made, "a")["properties"]["x"] == {"$ref": "#/components/schemas/Item"}
    assert body(made, "b")["properties"]["x"] == {"$ref": "#/components/schemas/b.Item"}
    assert made["components"]["schemas"]["b.Item"]["title"] == "two"


def test_a_schema_that_makes_no_sense_harms_no_other():
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"items": deep}
    hostile = [{"$defs": {"a": deep}}, {"$defs": 3}, {"type": 7}, {"$ref": 3, "$defs": {"Problem": {"type": "object"}}}]
    targets = [CallTarget(f"f{at}", "function", (Param("x", schema=one),), Slo()) for at, one in enumerate(hostile)]
    made = document(targets, {})
    assert body(made, "f0")["properties"]["x"] == {}
    assert made["components"]["schemas"]["Problem"]["required"] == ["title", "status", "code", "id"]


@pytest.mark.skipif(shutil.which("npx") is None, reason="openapi-typescript runs on node")
def test_a_typescript_client_is_generated_from_it(found: dict[str, Any], tmp_path: Path):
    (tmp_path / "openapi.json").write_text(json.dumps(found))
    command = ["npx", "--yes", "--offline", "openapi-typescript", "openapi.json", "-o", "api.d.ts"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    if made.returncode and b"ENOTCACHED" in made.stderr + made.stdout:
        pytest.skip("openapi-typescript is not installed: npm install -g openapi-typescript")
    assert made.returncode == 0, made.stderr.decode()
    text = (tmp_path / "api.d.ts").read_text()
    assert 'box: components["schemas"]["Box"]' in text
