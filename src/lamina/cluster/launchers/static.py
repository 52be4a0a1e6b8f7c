"""Static launcher: machines that are started and ended by hand, or by systemd. It makes none."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.cluster.launchers import JoinTerms, LaunchTerms
from lamina.errors import BadValue


class StaticLauncher:
    def want(self, kind: str, count: int) -> None:
        pass

    def release(self, node: str) -> None:
        pass

    def makes(self, node: str) -> bool:
        return False

    def next_to_leave(self, nodes: Sequence[str]) -> str:
        return ""


def launcher(terms: LaunchTerms, join: JoinTerms) -> StaticLauncher:
    if terms.argument:
        raise BadValue(f"--launcher static: takes no argument, got {terms.argument[:80]!r}", hint="--launcher static")
    return StaticLauncher()
