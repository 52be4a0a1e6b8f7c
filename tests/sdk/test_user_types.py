"""Static types under decorators: the author of an app keeps the help of a type checker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".mypy_cache" / "users"  # one for all: what numpy and lamina say is read once
SETTINGS = """[mypy]
plugins = lamina.sdk.mypy_plugin
strict = True
[mypy-cv2.*,PIL.*,matplotlib.*,onnxruntime.*,rapidocr.*]
follow_imports = skip
ignore_missing_imports = True
"""


def complaints(files: list[Path], folder: Path) -> str:
    """Of mypy as an author has it, with the plugin and at its strictest; empty if there are none."""
    (folder / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    ways = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(CACHE)]
    command = [sys.executable, "-m", "mypy", *ways, *map(str, files)]
    checked = subprocess.run(command, cwd=files[0].parent, capture_output=True, text=True, check=False)
    return "" if checked.returncode == 0 else checked.stdout + checked.stderr


@pytest.mark.slow
def test_an_app_of_a_user_passes_the_strictest_check(tmp_path: Path) -> None:
    assert complaints([Path(__file__).with_name("user_app.py")], tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("example", ["cascade", "ensemble", "ocr", "policies"])
def test_the_examples_pass_it_too(example: str, tmp_path: Path) -> None:
    assert complaints(sorted((ROOT / "examples" / example).glob("*.py")), tmp_path) == ""


@pytest.mark.slow
def test_an_app_that_lies_in_another_file_is_known_too(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text('import lamina\n\napp = lamina.App("shop")\n', encoding="utf-8")
    uses = tmp_path / "uses.py"
    price = "class Price:\n    def __call__(self, x: int) -> str:\n        return str(x)\n"
    uses.write_text(f'from base import app\n\n\n@app.function()\n{price}\n\nPrice.remote("x")\n', encoding="utf-8")
    said = complaints([uses], tmp_path)
    assert 'uses.py:10: error: Argument 1 to "remote" of "RemoteTarget" has incompatible type "str"; expected "int"' in said


def pyright_findings(folder: Path) -> list[dict[str, object]]:
    """What pyright says of `user_app.py`, as an editor would show it; it needs node, and skips without."""
    pytest.importorskip("pyright")
    if shutil.which("node") is None:
        pytest.skip("no node")
    shutil.copy(Path(__file__).with_name("user_app.py"), folder)
    settings = {
        "include": ["user_app.py"],
        "extraPaths": [str(ROOT / "src")],
        "reportUnnecessaryTypeIgnoreComment": "error",  # what mypy finds wrong, it must find wrong too
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    try:
        found = json.loads(checked.stdout[checked.stdout.index("{") :])
    except ValueError:
        pytest.skip(f"pyright is not to be had here: {checked.stderr[-200:]}")
    assert found["summary"]["filesAnalyzed"] == 1
    diagnostics: list[dict[str, object]] = found["generalDiagnostics"]
    return diagnostics


@pytest.mark.slow
def test_an_editor_sees_the_same_types(tmp_path: Path) -> None:
    assert pyright_findings(tmp_path) == []
