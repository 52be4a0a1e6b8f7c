"""Import cost: `import lamina` loads none of its parts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.live


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_lamina_loads_none_of_its_parts():
    assert {name for name in imported("import lamina") if name.startswith("lamina.")} == set()


def test_an_app_needs_no_heavy_library():
    code = "import lamina; app = lamina.App('a'); app.function(name='f')(lambda x: x); app.deployed()"
    heavy = {"numpy", "onnxruntime", "torch", "httptools", "http.client", "matplotlib", "rich", "click"}
    assert imported(code) & heavy == set()
