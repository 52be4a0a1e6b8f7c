"""Tiny wheels for tests: packages of one module, made without a build tool and without a network."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, source: str = "", needs: Sequence[str] = (), **files: str) -> Path:
    """A wheel `name` whose module of that name has `version` in it; `files` lie beside it, `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    content = {
        f"{name}.py": f"version = {version!r}\n{source}",
        **{file.replace("__", "."): text for file, text in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {one}\n" for one in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{one},,\n" for one in [*content, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
    return path
