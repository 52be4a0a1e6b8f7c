"""Sample inputs of an app's functions, for the profiler and the probe of a fresh instance.

    def examples():
        return {"resize": [photo], "classify": [{"image": photo, "top": 5}]}

In the app's file: per function a list of bodies, bound as those of requests are. Several are better where inputs differ in
size: a batch takes them in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamina.errors import BadValue, LoadFailed
from lamina.sdk.app import App
from lamina.sdk.binding import bind
from lamina.sdk.model_bundle import bundle_samples, is_bundle
from lamina.sdk.user_errors import message_of, user_frames_only

Inputs = dict[str, Any]
NAME = "examples"


def samples_of(app: App, target: str) -> dict[str, list[Inputs]]:
    """Sample inputs by function. `target` is what the app was loaded from; empty if its file has no `examples()`."""
    if is_bundle(target):
        return bundle_samples(app, target)
    where = target.partition(":")[0]
    module = sys.modules.get(Path(where).stem if where.endswith(".py") else where)
    examples = getattr(module, NAME, None)
    if not callable(examples):
        return {}
    try:
        found = examples()
    except Exception as error:
        raise LoadFailed(f"{where}: {NAME}() failed: {message_of(error)}") from user_frames_only(error)
    if not isinstance(found, Mapping):
        raise BadValue(f"{where}: {NAME}() gave {type(found).__name__}", hint='return {"function": [body, ...]}')
    return {name: _bound(app, where, name, bodies) for name, bodies in found.items()}


def _bound(app: App, where: str, name: Any, bodies: Any) -> list[Inputs]:
    if name not in app.functions:
        raise BadValue(f"{where}: {NAME}() names {name!r}, which is no function", hint=f"there is {', '.join(app.functions)}")
    if not isinstance(bodies, Sequence) or isinstance(bodies, str | bytes) or not bodies:
        raise BadValue(f"{where}: {NAME}()[{name!r}] is no list of bodies", hint="write [body], or several")
    try:
        return [bind(app.functions[name].params, body) for body in bodies]
    except BadValue as error:
        raise BadValue(f"{where}: {NAME}()[{name!r}]: {error.message}", hint=error.hint) from None
