"""Order to a Ray cluster, as a process of its own: agents wanted, an agent released, or a list of them.

Run as `python -m lamina.cluster.launchers._ray_order`, with the order as JSON on standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lamina.cluster.launchers import JoinTerms

NAMESPACE = "lamina"
RESOURCE = "lamina_node"
DRAIN_S = 60.0
AGAIN_S = 1.0
"""From the end of an agent to that of its actor, which Ray starts again at once."""

_SET_DEATH_SIGNAL = 1  #: PR_SET_PDEATHSIG


class RayOrder(Struct, frozen=True):
    """What the launcher asks for."""

    order: Literal["want", "release", "list"]
    address: str
    prefix: str
    join: JoinTerms
    count: int = 0
    node: str = ""


class AgentActor:
    """Actor that keeps one agent running on its node. If the agent ends by itself so does the actor, and Ray starts it again."""

    def __init__(self, node: str, addresses: list[str], token: str) -> None:
        command = [sys.executable, "-m", "lamina", "agent", "--join", ",".join(addresses), "--name", node]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "LAMINA_JOIN_TOKEN": token},
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        self._is_stopping = False
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> int:
        """End the agent: it drains itself. Its exit code."""
        self._is_stopping = True
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._is_stopping:
            time.sleep(AGAIN_S)
            os._exit(code or 1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def perform(order: RayOrder) -> list[dict[str, str]]:
    import ray
    from ray.autoscaler.sdk import request_resources
    from ray.util import list_named_actors

    ray.init(
        address=order.address or "auto",
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    names = [str(name) for name in list_named_actors() if str(name).startswith(f"{order.prefix}-")]
    if order.order == "want":
        free = (name for name in (f"{order.prefix}-{i}" for i in range(10_000)) if name not in names)
        for _ in range(order.count - len(names)):
            node = next(free)
            ray.remote(AgentActor).options(
                name=node, lifetime="detached", max_restarts=-1, num_cpus=0, resources={RESOURCE: 1}, get_if_exists=True
            ).remote(node, list(order.join.addresses), order.join.token)
            names.append(node)
        request_resources(bundles=[{RESOURCE: 1}] * len(names))
    elif order.order == "release" and order.node in names:
        actor = ray.get_actor(order.node)
        with contextlib.suppress(ray.exceptions.RayError):  # it is being started again, or its node is away
            ray.get(actor.stop.remote(), timeout=DRAIN_S + 10)
        ray.kill(actor)
        request_resources(bundles=[{RESOURCE: 1}] * (len(names) - 1))
    return [{"node": name} for name in names if order.order != "release" or name != order.node]


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RayOrder)
    try:
        found: Any = perform(order)
    except Exception as error:  # Ray's own errors are of many kinds
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    from lamina.cluster.launchers import _ray_order  # by its name: Ray's workers find the actor's class there

    sys.exit(_ray_order.main())
