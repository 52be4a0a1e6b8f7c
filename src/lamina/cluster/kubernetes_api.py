"""Kubernetes API client: the two things that a server asks of it, a label on a pod and the scale of a StatefulSet.

Four requests in all, so this is `http.client` and not the official package: that one is forty megabytes, and generated for every
object there is. All of it blocks, with a time limit: callers run it in a thread.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from lamina.errors import BadValue, LaminaError, Unreachable

log = logging.getLogger("lamina")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 5.0
MERGE = "application/merge-patch+json"

ROLE_LABEL = "lamina.dev/role"
LOOK_S = 0.05
"""How often the role of the server is looked at: it costs one comparison."""

RENEW_S = 2.0
"""How often the label is written again. A patch that changes nothing is not stored by the API server."""

RETRY_S = 0.5


class KubernetesError(Unreachable):
    """A request that the Kubernetes API did not grant, or that did not reach it."""


class ReplicaScale(Struct, frozen=True):
    """Scale of a StatefulSet: pods wanted, and pods there."""

    wanted: int
    there: int


class KubernetesApi:
    """Client of one namespace."""

    def __init__(self, url: str, namespace: str, token: Callable[[], str], authority: Path | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadValue(f"Kubernetes API: {url!r} is no address", hint="such as https://10.96.0.1:443")
        self._host, self._port, self._is_tls = parts.hostname, parts.port, parts.scheme == "https"
        self._namespace = namespace
        self._token = token
        self._authority = authority

    @classmethod
    def of_this_pod(cls) -> KubernetesApi:
        """Client with the service account of this process' pod. The token is read anew each time: it is rotated."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (ACCOUNT / "token").exists():
            raise BadValue(
                "this process has no Kubernetes service account",
                hint="run it in a pod with automountServiceAccountToken: true and a Role (deploy/helm/lamina)",
            )
        host = f"[{host}]" if ":" in host else host
        namespace = (ACCOUNT / "namespace").read_text().strip()
        return cls(f"https://{host}:{port}", namespace, lambda: (ACCOUNT / "token").read_text().strip(), ACCOUNT / "ca.crt")

    def label_pod(self, name: str, label: str, value: str) -> None:
        body = {"metadata": {"labels": {label: value}}}
        self._ask("PATCH", f"/api/v1/namespaces/{self._namespace}/pods/{name}", body)

    def read_scale(self, stateful_set: str) -> ReplicaScale:
        found = self._ask("GET", self._scale_path(stateful_set))
        return ReplicaScale(found.get("spec", {}).get("replicas", 0), found.get("status", {}).get("replicas", 0))

    def set_scale(self, stateful_set: str, wanted: int) -> None:
        self._ask("PATCH", self._scale_path(stateful_set), {"spec": {"replicas": wanted}})

    def _scale_path(self, stateful_set: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets/{stateful_set}/scale"

    def _ask(self, method: str, path: str, body: object | None = None) -> dict[str, Any]:
        connection: http.client.HTTPConnection
        if self._is_tls:
            context = ssl.create_default_context(cafile=str(self._authority) if self._authority else None)
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        headers = {"authorization": f"Bearer {self._token()}", "accept": "application/json", "content-type": MERGE}
        try:
            connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read(1 << 20)
        except (OSError, http.client.HTTPException) as error:
            raise KubernetesError(f"Kubernetes API: {error or type(error).__name__}", hint="it is tried again") from None
        finally:
            connection.close()
        if answer.status not in (200, 201):
            raise KubernetesError(f"Kubernetes API: {method} {path}: {answer.status} {_reason(text)}", hint=_hint(answer.status))
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise KubernetesError(f"Kubernetes API: {method} {path}: {error}") from None


def _reason(text: bytes) -> str:
    try:
        return str(msgspec.json.decode(text, type=dict[str, Any]).get("message", ""))[:400]
    except msgspec.MsgspecError:
        return text[:100].decode("utf-8", "replace")


def _hint(status: int) -> str:
    return "the service account's Role does not allow it" if status in (401, 403) else "it is tried again"


class RoleLabels:
    """Role of each server as a label of its pod, so that a Service finds the leader.

    Each server labels its own pod, again and again. One that takes the lead labels the others as standbys too, once: the last
    leader may be frozen, and would keep calls for itself. If it wakes up, its own next label says the same.
    """

    def __init__(self, api: KubernetesApi, own: str, pods: tuple[str, ...]) -> None:
        if own not in pods:
            raise BadValue(f"--role-label-pods: {own!r}, this pod, is not one of {', '.join(pods)}", hint="name all controllers")
        self._api = api
        self._own = own
        self._others = [pod for pod in pods if pod != own]

    async def follow(self, role: Callable[[], str]) -> None:
        """Keep the labels as `role` says, for ever."""
        clock = asyncio.get_running_loop().time
        told, next_s = "", 0.0
        while True:
            now = role()
            if now != told or clock() >= next_s:
                is_told = await self._label(self._own, now)
                if is_told and now != told and now == "leader":
                    await asyncio.gather(*(self._label(pod, "standby") for pod in self._others))
                told = now if is_told else told
                next_s = clock() + (RENEW_S if is_told else RETRY_S)
                if not is_told:
                    await asyncio.sleep(RETRY_S)
            await asyncio.sleep(LOOK_S)

    async def _label(self, pod: str, role: str) -> bool:
        try:
            await asyncio.to_thread(self._api.label_pod, pod, ROLE_LABEL, role)
        except LaminaError as error:
            if pod == self._own:  # another one may be gone
                log.warning("the role of pod %s cannot be told: %s", pod, error)
            return False
        return True
