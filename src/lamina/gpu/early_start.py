"""Early start of an executor: its process imports what takes seconds while the server still finds out what it is to serve.

`import torch` and what is built on it take three to seven seconds, and the server needs seconds to find its devices and to load
the app. So the process is started first of all, with the names of the slow libraries that the app mentions, and is told later
what it serves. Nothing of the app itself runs there before that.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from lamina.gpu.discovery import has_nvidia_device
from lamina.ipc.child_process import WarmProcess

EXECUTOR = "lamina.gpu.executor_main"

SLOW = ("torch", "torchvision", "transformers", "timm", "diffusers")
"""Libraries that take long, do nothing when they are imported, and have no options that an app sets before that."""

MAX_FILES = 100
"""Of the app's own that are read for what they mention."""


def start_early(gpu: str, app_path: str) -> WarmProcess | None:
    """A process that imports what the app will need on a GPU; None if there is none, or nothing that takes long."""
    if gpu == "no" or (gpu == "auto" and not has_nvidia_device()):
        return None
    mentioned = mentioned_modules(Path(app_path.partition(":")[0]))
    names = [name for name in SLOW if name in mentioned and importlib.util.find_spec(name) is not None]
    with contextlib.suppress(OSError):  # whatever is wrong is told when the executor is needed
        return WarmProcess.start(EXECUTOR, names) if names else None
    return None


def mentioned_modules(app: Path) -> set[str]:
    """Packages that an app's file imports anywhere, or a module of its own that it imports."""
    found: set[str] = set()
    seen: set[Path] = set()
    left = [app]
    while left and len(seen) < MAX_FILES:
        file = left.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # its load says so
        for name in _imports(tree):
            found.add(name.partition(".")[0])
            for folder in (app.parent, Path()):
                place = folder.joinpath(*name.split("."))
                left += [place.with_suffix(".py"), place / "__init__.py"]
    return found


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
