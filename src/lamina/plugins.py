"""Plugins by file name: `load("policies", "edf")`. The file name is the registration: no enum, no entry-point table."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from lamina.errors import BadValue, LoadFailed, UnknownPlugin, did_you_mean, read_user_file

DEFAULT_POLICY = "frontier"
"""The policy of a server or scenario that names none."""


def names(package: str) -> list[str]:
    """Plugins of one package, such as `names("policies")`."""
    return sorted(modules(package))


def modules(package: str) -> dict[str, str]:
    """Plugins of one package by name, with their modules. Policies lie in `policies/` and in `published/<paper>/policies/`."""
    home = importlib.import_module(f"lamina.{package}")
    folders = {f"lamina.{package}": list(home.__path__)}
    if package == "policies":
        papers = Path(__file__).parent / "published"
        folders |= {f"lamina.published.{path.parent.name}.policies": [str(path)] for path in sorted(papers.glob("*/policies"))}
    return {
        found.name: f"{parent}.{found.name}"
        for parent, paths in folders.items()
        for found in pkgutil.iter_modules(paths)
        if not found.name.startswith("_") and found.name != "defaults"
    }


def load(package: str, name: str) -> ModuleType:
    """The module called `name`, or the file itself if `name` is a path ending in `.py`."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    known = modules(package)
    if name not in known:
        raise UnknownPlugin(
            f"no {name!r} in {package}; there are {', '.join(known)}",
            hint=did_you_mean(name, known, f"write one file, {package}/{name}.py, or give a path to it"),
        )
    return importlib.import_module(known[name])


def _load_file(path: Path) -> ModuleType:
    try:
        check_source(path, "give the path of a Python file")
    except BadValue as error:
        raise UnknownPlugin(error.message, hint=error.hint) from None
    spec = importlib.util.spec_from_file_location(f"lamina_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UnknownPlugin(f"{str(path)!r} is no Python file", hint="give the path of one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise LoadFailed(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def check_source(path: Path, hint: str) -> None:
    """Check a source file before Python runs it, so that an unreadable file gives an error instead of a traceback."""
    if b"\0" in read_user_file(path, hint):
        raise BadValue(f"{str(path)!r} is no Python file", hint=hint)
