"""Ray launcher: agents as detached actors of a Ray cluster, one a node, and Ray's autoscaler for the nodes.

Ray places agents and starts them again; batches never pass through it. An agent takes one `lamina_node`, a custom resource that
nodes for it announce: `ray start --resources '{"lamina_node": 1}'`. With Ray's head away agents run on, and none is placed.

A driver of Ray ends its process when the head has been away for a minute. So no Ray is in this process: each order is a process
of its own (`_ray_order.py`), given what it needs on its standard input.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from lamina.cluster.launchers import JoinTerms, LaunchTerms
from lamina.errors import BadValue, LoadFailed

ORDER_S = 120.0
"""Most time for an order: the start of a driver, and for a release the drain of an agent."""

DEFAULT_PREFIX = "ray"
_PREFIX = re.compile(r"[a-z][a-z0-9-]{0,30}")


class RayLauncher:
    def __init__(self, address: str, prefix: str, join: JoinTerms) -> None:
        self._address = address
        self._prefix = prefix
        self._join = join
        self._node = re.compile(rf"{re.escape(prefix)}-\d+")

    def want(self, kind: str, count: int) -> None:
        self._order({"order": "want", "count": count})

    def release(self, node: str) -> None:
        self._order({"order": "release", "node": node})

    def makes(self, node: str) -> bool:
        return self._node.fullmatch(node) is not None

    def next_to_leave(self, nodes: Sequence[str]) -> str:
        return ""

    def list(self) -> list[dict[str, str]]:
        """Agents that Ray knows, with the state of their actors."""
        found: list[dict[str, str]] = msgspec.json.decode(self._order({"order": "list"}))
        return found

    def _order(self, order: dict[str, object]) -> bytes:
        told = {**order, "address": self._address, "prefix": self._prefix, "join": self._join}
        command = [sys.executable, "-m", "lamina.cluster.launchers._ray_order"]
        try:
            done = subprocess.run(
                command,
                input=msgspec.json.encode(told),
                env={**os.environ, "RAY_LOG_TO_STDERR": "0", "RAY_DEDUP_LOGS": "0"},
                capture_output=True,
                timeout=ORDER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"Ray at {self._address or 'auto'} did not take an order within {ORDER_S:g} s") from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no word of it"]
            raise LoadFailed(f"Ray at {self._address or 'auto'}: {said[-1][:400]}", hint="ray status")
        return done.stdout


def launcher(terms: LaunchTerms, join: JoinTerms) -> RayLauncher:
    if importlib.util.find_spec("ray") is None:
        raise BadValue("--launcher ray: Ray is not installed", hint="pip install 'lamina[ray]'")
    prefix = terms.prefix or DEFAULT_PREFIX
    if not _PREFIX.fullmatch(prefix):
        raise BadValue(f"--launcher ray: prefix={prefix[:80]!r} cannot begin the name of a node", hint="letters, digits and -")
    return RayLauncher(terms.argument, prefix, join)
