"""Kubernetes launcher: the scale of the agents' StatefulSet.

A StatefulSet ends the pod with the highest number first, so that is the node to leave. The pod gets a signal, and its agent
drains itself within the pod's grace period. The Role of the chart allows this one StatefulSet (deploy/helm/lamina).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lamina.cluster.kubernetes_api import KubernetesApi
from lamina.cluster.launchers import JoinTerms, LaunchTerms
from lamina.errors import BadValue, Conflict

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


class KubernetesLauncher:
    def __init__(self, api: KubernetesApi, stateful_set: str) -> None:
        self._api = api
        self._set = stateful_set
        self._pod = re.compile(rf"{re.escape(stateful_set)}-(\d+)")

    def want(self, kind: str, count: int) -> None:
        if self._api.read_scale(self._set).wanted < count:
            self._api.set_scale(self._set, count)

    def release(self, node: str) -> None:
        found = self._pod.fullmatch(node)
        wanted = self._api.read_scale(self._set).wanted
        if found is None or int(found[1]) != wanted - 1:
            raise Conflict(f"{node} is not the last pod of {self._set}, which has {wanted}", hint="it is drained, and stays")
        self._api.set_scale(self._set, wanted - 1)

    def makes(self, node: str) -> bool:
        return self._pod.fullmatch(node) is not None

    def next_to_leave(self, nodes: Sequence[str]) -> str:
        return max(nodes, key=self._number, default="")

    def _number(self, node: str) -> int:
        found = self._pod.fullmatch(node)
        return int(found[1]) if found is not None else -1


def launcher(terms: LaunchTerms, join: JoinTerms) -> KubernetesLauncher:
    if not _NAME.fullmatch(terms.argument):
        raise BadValue(
            f"--launcher kubernetes: {terms.argument[:80]!r} is no StatefulSet", hint="--launcher kubernetes:lamina-agent-h200"
        )
    return KubernetesLauncher(KubernetesApi.of_this_pod(), terms.argument)
