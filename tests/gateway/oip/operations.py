"""What a client can do, each under a name; run in a process of its own, which says how each of them ended, as JSON.

Foreign clients bring messages with the same names as ours, threads and event loops of their own, and one reads the command
line when it is imported: none of that is for the process of the tests.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

OPERATIONS: dict[str, Callable[[], Any]] = {}


def operation(function: Callable[[], Any]) -> Callable[[], Any]:
    OPERATIONS[function.__name__] = function
    return function


def run_all() -> None:
    """Nothing may escape: what one of them raises is its result."""
    said = {}
    for name, function in OPERATIONS.items():
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            said[name] = "ok"
        except BaseException:
            said[name] = traceback.format_exc(limit=-3)
    json.dump(said, sys.stdout)


def fails(call: Callable[..., Any], kind: type[BaseException], word: str = "") -> None:
    """It must be refused, in a way the client understands, and say why."""
    with pytest.raises(kind, match=re.escape(word)):
        call()
