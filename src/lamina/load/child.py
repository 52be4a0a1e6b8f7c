"""The generator in its own process, as seen from the one that watches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import msgspec

from lamina.errors import LaminaError, Unreachable
from lamina.load.plan import Plan
from lamina.load.record import Result, Second


class _Said(msgspec.Struct):
    second: Second | None = None
    result: Result | None = None
    error: str = ""


def offer(plan: Plan, on_second: Callable[[Second], None] = lambda second: None) -> Result:
    """Run `plan` to its end."""
    plan.request()  # a wrong address is known before anything starts
    command = [sys.executable, "-m", "lamina.load.generator"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        try:
            for line in process.stdout:
                said = msgspec.json.decode(line, type=_Said)
                if said.error:
                    raise Unreachable(f"{plan.url}: {said.error}", hint="is the server running, and on that port?")
                if said.second is not None:
                    on_second(said.second)
                if said.result is not None:
                    return said.result
        finally:
            process.kill()
    raise LaminaError("the load generator ended without a result")
