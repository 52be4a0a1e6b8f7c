"""Command launcher: a program of the operator's, for clouds and schedulers that have a command line.

It is called without a shell, as `PROGRAM want KIND COUNT` and `PROGRAM release NODE`, with the addresses to join in `LAMINA_JOIN`
and the token in `LAMINA_JOIN_TOKEN`. It returns when the order has been placed; the machine may come minutes later. An exit code
other than 0 is logged with its last line, and `want` is said again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from lamina.cluster.launchers import JoinTerms, LaunchTerms
from lamina.errors import BadValue, LoadFailed

TIMEOUT_S = 120.0


class CommandLauncher:
    def __init__(self, program: str, prefix: str, join: JoinTerms) -> None:
        self._program = program
        self._prefix = prefix
        self._join = join

    def want(self, kind: str, count: int) -> None:
        self._call("want", kind or "any", str(count))

    def release(self, node: str) -> None:
        self._call("release", node)

    def makes(self, node: str) -> bool:
        return node.startswith(self._prefix)

    def next_to_leave(self, nodes: Sequence[str]) -> str:
        return ""

    def _call(self, *words: str) -> None:
        told = {"LAMINA_JOIN": ",".join(self._join.addresses), "LAMINA_JOIN_TOKEN": self._join.token}
        try:
            done = subprocess.run(
                [self._program, *words],
                env={**os.environ, **told},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LoadFailed(f"launcher {self._program} {' '.join(words)}: {error}") from None
        if done.returncode:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            raise LoadFailed(
                f"launcher {self._program} {' '.join(words)}: exit code {done.returncode}"
                + (f": {said[-1][:400]}" if said else "")
            )


def launcher(terms: LaunchTerms, join: JoinTerms) -> CommandLauncher:
    program = shutil.which(terms.argument) if terms.argument else None
    if program is None:
        raise BadValue(f"--launcher command: no program {terms.argument[:200]!r}", hint="--launcher command:/path/to/program")
    return CommandLauncher(program, terms.prefix, join)
