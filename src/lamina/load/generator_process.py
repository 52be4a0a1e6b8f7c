"""Generator process, as seen from the process that displays it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from lamina.errors import LaminaError, Unreachable
from lamina.load.load_plan import LoadPlan
from lamina.load.results import LoadResult, SecondStats


class _GeneratorMessage(msgspec.Struct):
    second: SecondStats | None = None
    result: LoadResult | None = None
    error: str = ""


def run_load(plan: LoadPlan, on_second: Callable[[SecondStats], None] = lambda second: None) -> LoadResult:
    """Run `plan` to its end."""
    plan.request_bytes()  # a wrong address is known before anything starts
    command = [sys.executable, "-m", "lamina.load.generator"]
    with _forward_interrupts() as pass_on, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pass_on(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        try:
            for line in process.stdout:
                said = msgspec.json.decode(line, type=_GeneratorMessage)
                if said.error:
                    raise Unreachable(f"{plan.url}: {said.error}", hint="is the server running, and on that port?")
                if said.second is not None:
                    on_second(said.second)
                if said.result is not None:
                    return said.result
        finally:
            process.kill()
    raise LaminaError("the load generator ended without a result")


@contextmanager
def _forward_interrupts() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """The first Ctrl-C is for the generator, which then says what it has seen. A second one is for us."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda process: None
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, until it has its own way to stop

    def pass_on(process: subprocess.Popen[bytes]) -> None:
        def once(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            process.send_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, once)

    try:
        yield pass_on
    finally:
        signal.signal(signal.SIGINT, before)
