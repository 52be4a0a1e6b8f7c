"""App loader: `load_app("app.py")` imports an app from a file or a module; its errors show the user's code alone."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

import lamina
from lamina.errors import BadValue, LaminaError, LoadFailed, did_you_mean
from lamina.plugins import check_source
from lamina.sdk.app import App
from lamina.sdk.model_bundle import is_bundle, open_bundle
from lamina.sdk.user_errors import message_of, place_of, user_frames_only

_LOADED_MARK = "__lamina_loaded__"
"""Marks modules that were loaded from an app file: these, and no others, give way to another file of the same name."""
_loading: ContextVar[str] = ContextVar("lamina_loading", default="")
_NO_OPTION = re.compile(r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'.*")


def load_app(target: str, environment: Mapping[str, str] | None = None) -> App:
    """The app at "path/file.py", "path/file.py:name", "package.module" or "package.module:name".

    `environment`: variables that are set while it is imported, so that it declares here what its processes will find.
    """
    if environment:
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            return load_app(target)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
    if is_bundle(target):
        return open_bundle(target)
    if "://" in target:
        raise BadValue(f"{target!r} is an address", hint="an app is a file on this machine: app.py")
    where, _, name = target.partition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    found = _find_app(module, where, name)
    found.set_source(f"{Path(where).resolve()}:{name}".rstrip(":") if where.endswith(".py") else target)
    return found


def _from_file(path: Path) -> ModuleType:
    check_source(path, "give the path of the file that holds the app")
    path = path.resolve()
    name = path.stem
    before = sys.modules.get(name)
    if before is not None and not hasattr(before, _LOADED_MARK) and getattr(before, "__file__", None) != str(path):
        raise BadValue(f"file {path.name!r} has the name of the module {name!r}, which is in use", hint="rename the file")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` does: the file's neighbours can be imported, now and later
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    setattr(module, _LOADED_MARK, True)
    sys.modules[name] = module
    token = _loading.set("file")
    try:
        spec.loader.exec_module(module)
    except _ImportEnded:
        pass
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(str(path), error) from user_frames_only(error)
    finally:
        _loading.reset(token)
    return module


class _ImportEnded(BaseException):
    """End of an import at `app.serve()`: what comes after it belongs to the program, not to the app."""


def end_import() -> bool:
    """End the import of the file that is being loaded. False: this is the program itself; of a module nothing can be left out."""
    if _loading.get() == "file":
        raise _ImportEnded
    return bool(_loading.get())


def source_of(app: App) -> str:
    """Where another process finds an app of this one: "path/file.py:name"; "" if it lies in no file, as in a notebook."""
    for module in [sys.modules.get("__main__"), *list(sys.modules.values())]:
        file = getattr(module, "__file__", None)
        if module is None or not file or not str(file).endswith(".py") or not Path(file).is_file():
            continue
        for name, value in list(vars(module).items()):
            if value is app:
                return f"{Path(file).resolve()}:{name}" if module.__name__ == "__main__" else f"{module.__name__}:{name}"
    return ""


def _from_module(name: str) -> ModuleType:
    path = Path(name)
    if path.is_dir() and not (path / "__init__.py").exists():
        raise BadValue(f"{name!r} is a folder", hint=f"name the file that holds the app: {path / 'app.py'}")
    if os.sep in name or path.is_file():
        raise BadValue(f"{name!r} is no Python file", hint="an app is a file that ends in .py")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    token = _loading.set("module")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise BadValue(f"no module {name!r}", hint="give the path of a file, or install the package") from None
        raise _import_error(name, error) from user_frames_only(error)
    except (Exception, SystemExit) as error:
        raise _import_error(name, error) from user_frames_only(error)
    finally:
        _loading.reset(token)


def _import_error(where: str, error: BaseException) -> LaminaError:
    """The error of an import that failed. A bad value given to us is reported with its line; the rest is the file's own error."""
    if isinstance(error, BadValue):
        place = place_of(error)
        return type(error)(error.message if error.message.startswith(place) else f"{place}: {error.message}", hint=error.hint)
    if isinstance(error, TypeError) and (unknown := _unknown_option(error)) is not None:
        return unknown
    hint = f"install {error.name!r}" if isinstance(error, ModuleNotFoundError) else ""
    if isinstance(error, ImportError) and "relative import" in str(error):
        hint = _package_hint(Path(where))
    said = f"{where} cannot be imported: {message_of(error)}"
    return LoadFailed(said.replace(f"{os.getcwd()}{os.sep}", ""), hint=hint)  # as the user has named it


def _package_hint(path: Path) -> str:
    """How to load a file that imports its neighbours as a part of their package does."""
    parts, folder = [path.stem], path.resolve().parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    if len(parts) == 1:
        return "write the import without a dot: the neighbours of the file can be imported by their names"
    return f"it is part of a package: name the module {'.'.join(parts)} instead, from the folder above {parts[0]}"


def _unknown_option(error: TypeError) -> BadValue | None:
    """An unknown option as `BadValue`: `@app.function(btach=4)`, `lamina.SLO(latncy="50ms")`. Python gives it as text alone."""
    found = _NO_OPTION.fullmatch(str(error))
    owner = getattr(lamina, found[1], None) if found else None
    if found is None or not isinstance(owner, type):
        return None
    known = [name for name in inspect.signature(getattr(owner, found[2])).parameters if name not in ("self", "bare", "_")]
    what = f"@app.{found[2]}" if owner is App else found[1]
    hint = did_you_mean(found[3], known, f"there are {', '.join(known)}")
    return BadValue(f"{place_of(error)}: {what} has no option {found[3]!r}", hint=hint)


def _find_app(module: ModuleType, where: str, name: str) -> App:
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if name:
        if name not in apps:
            raise BadValue(f"no app {name!r} in {where}", hint=_app_names(apps, name, where))
        return apps[name]
    distinct = {id(app): key for key, app in apps.items()}
    if not distinct:
        raise BadValue(f"no app in {where}", hint='make one: app = lamina.App("name")')
    if len(distinct) > 1:
        names = ", ".join(sorted(distinct.values()))
        raise BadValue(f"several apps in {where}: {names}", hint=f"name one, such as {where}:{min(distinct.values())}")
    return next(iter(apps.values()))


def _app_names(apps: dict[str, App], name: str, where: str) -> str:
    if any(name in app.functions or name in app.workflows for app in apps.values()):
        return f"{name} is no app but a target of one: name it apart, as in lamina run {where} {name}"
    return f"there is {', '.join(sorted(apps))}" if apps else 'make one: app = lamina.App("name")'
