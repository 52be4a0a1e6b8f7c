"""Models without code, on agents: their files travel as packages, by content."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lamina.gateway.deploy.app_package import pack_around, unpack_from_leader
from lamina.sdk.app_loader import load_app
from lamina.sdk.model_bundle import ModelBundle, parse_model_option
from tests.cluster.clusters import cluster
from tests.sdk.tiny_onnx import shaped
from tests.serving import Browser, run

pytest.importorskip("onnxruntime", reason="pip install 'lamina[onnx]'")

DOUBLE = [("Add", ["x", "x"], "y")]


def bundle(folder: Path, file: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "double.onnx").write_bytes(shaped(DOUBLE, {"x": ["n", 4]}, {"y": ["n", 4]}))
    (folder / "double.onnx.data").write_bytes(b"weights kept apart")
    return Path(ModelBundle([parse_model_option(f"double={folder / 'double.onnx'}")], file).target(folder))


@pytest.mark.live
def test_the_package_of_a_model_has_all_its_files_and_its_name_is_their_content(tmp_path: Path) -> None:
    content, entry = pack_around(bundle(tmp_path / "one"), whole=False)
    assert pack_around(bundle(tmp_path / "two"), whole=False)[0] == content  # wherever they lie
    asyncio.run(unpack_from_leader(content, tmp_path / "there"))
    shutil.rmtree(tmp_path / "one")
    assert {path.name for path in (tmp_path / "there").rglob("*") if path.is_file()} == {
        "models.json",
        "double.onnx",
        "double.onnx.data",
    }
    assert list(load_app(str(tmp_path / "there" / entry)).functions) == ["double"]


@pytest.mark.live
def test_an_app_beside_the_models_travels_with_them(tmp_path: Path) -> None:
    target = bundle(tmp_path / "models", str(tmp_path / "app.py"))
    (tmp_path / "app.py").write_text("import lamina\napp = lamina.App('a')\n\n\n@app.function()\ndef f(x):\n    return x\n")
    content, entry = pack_around(target, whole=False)
    asyncio.run(unpack_from_leader(content, tmp_path / "there"))
    assert sorted(load_app(str(tmp_path / "there" / entry)).functions) == ["double", "f"]


@pytest.mark.live
def test_a_model_without_code_runs_on_a_node(tmp_path: Path) -> None:
    target = bundle(tmp_path / "models")

    async def work() -> None:
        async with cluster(target, tmp_path) as made:
            made.start("one")
            await made.live("one")
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
            async with Browser(made.gateway.port) as browser:
                answer = await browser.post("/v2/models/double/infer", body)
            assert answer.status == 200, answer.body
            assert answer.json["outputs"][0]["data"] == [2, 4, 6, 8]
            assert made.nodes()["one"]["instances"] and len(made.nodes()["one"]["packages"]) == 1

    run(work, 90)
