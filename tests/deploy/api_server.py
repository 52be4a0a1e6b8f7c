"""A Kubernetes control plane on this machine, from programs that scripts/build_kubernetes.sh has built.

etcd, API server, scheduler and controllers are the real ones. Nodes are kubemark's: a real kubelet whose containers are
pretended, so pods are scheduled, started, evicted and ended, and nothing runs in them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.test_cluster_command import free_port

ADMIN = "the-token-of-the-tests-administrator"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubemark")
CONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "https://127.0.0.1:PORT", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: TOKEN}}]
contexts: [{name: here, context: {cluster: here, user: admin}}]
current-context: here
"""


def programs() -> Path | None:
    """Where they are; None: they have not been built."""
    folder = Path(os.environ.get("LAMINA_KUBERNETES", "/nowhere"))
    return folder if shutil.which("etcd") and all((folder / name).exists() for name in PROGRAMS) else None


class ControlPlane:
    """One cluster. `ask` speaks to its API, as the administrator or with another token."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.config = folder / "kubeconfig"
        self.authority = folder / "certs" / "apiserver.crt"

    def request(
        self, method: str, path: str, body: object = None, *, token: str = ADMIN, kind: str = "application/json"
    ) -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=str(self.authority))
        link = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)
        headers = {"authorization": f"Bearer {token}", "content-type": kind}
        try:
            link.request(method, path, None if body is None else json.dumps(body), headers)
            answer = link.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            link.close()

    def get(self, path: str) -> Any:
        status, found = self.request("GET", path)
        assert status == 200, (path, found)
        return found

    def pods(self, namespace: str) -> dict[str, Any]:
        return {one["metadata"]["name"]: one for one in self.get(f"/api/v1/namespaces/{namespace}/pods")["items"]}

    def until(self, what: str, is_so: Callable[[], bool], limit_s: float = 90.0) -> None:
        until_s = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < until_s, f"not within {limit_s:g} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1_500:]}" for log in sorted(self.folder.glob("*.log")))


def is_ready(pod: dict[str, Any]) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


@contextlib.contextmanager
def control_plane(folder: Path, nodes: int) -> Iterator[ControlPlane]:
    where = programs()
    assert where is not None
    store, peers, port = (free_port() for _ in range(3))
    made = ControlPlane(folder, port)
    made.config.write_text(CONFIG.replace("PORT", str(port)).replace("TOKEN", ADMIN))
    (folder / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: object) -> None:
        with open(folder / f"{name}.log", "wb") as log:
            running.append(subprocess.Popen([str(one) for one in command], cwd=folder, stdout=log, stderr=log))

    try:
        clients = f"http://127.0.0.1:{store}"
        listens = ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        listens += ["--listen-peer-urls", f"http://127.0.0.1:{peers}"]
        start("etcd", "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", *listens)
        start(
            *("api", where / "kube-apiserver", "--etcd-servers", clients, "--bind-address", "127.0.0.1", "--secure-port", port),
            *("--cert-dir", folder / "certs", "--token-auth-file", folder / "tokens.csv", "--authorization-mode", "RBAC"),
            *("--service-account-key-file", key, "--service-account-signing-key-file", key),
            *("--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", "10.96.0.0/16"),
        )

        def answers() -> bool:
            with contextlib.suppress(OSError, ValueError):
                return made.request("GET", "/api/v1/namespaces/kube-system")[0] == 200
            return False

        made.until("the API server answers", answers)
        common = ("--kubeconfig", made.config, "--leader-elect=false", "--port", 0, "--secure-port", 0)
        start(
            *("controllers", where / "kube-controller-manager", *common, "--service-account-private-key-file", key),
            *("--root-ca-file", made.authority),
        )
        start("scheduler", where / "kube-scheduler", *common)
        for number in range(nodes):
            ports = ("--kubelet-port", free_port(), "--kubelet-read-only-port", free_port())
            name = f"node-{number}"
            start(name, where / "kubemark", "--morph=kubelet", f"--name={name}", "--kubeconfig", made.config, *ports)
        made.until("nodes are ready", lambda: sum(is_ready(one) for one in made.get("/api/v1/nodes")["items"]) == nodes)
        yield made
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()
