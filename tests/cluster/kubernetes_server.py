"""Fake Kubernetes API server over real HTTP: pods with labels, StatefulSets with a scale, who may do what."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POD = re.compile(r"/api/v1/namespaces/ml/pods/([^/]+)")
SCALE = re.compile(r"/apis/apps/v1/namespaces/ml/statefulsets/([^/]+)/scale")


class FakeKubernetes:
    """A namespace `ml`. Objects are changed by its API, or by a test that plays the cluster."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, str]] = {}  #: labels by name
        self.scales: dict[str, dict[str, int]] = {}  #: `wanted` and `there` by name
        self.allowed: set[str] | None = None  #: names that the Role allows; None: all
        self.token = "account-token"
        self.asked: list[str] = []
        self.changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def until(self, holds: Any, timeout_s: float = 20.0) -> None:
        """Wait until something holds of the cluster."""
        with self.changed:
            assert self.changed.wait_for(holds, timeout_s), (self.pods, self.scales, self.asked[-10:])

    def answer(self, method: str, path: str, token: str, kind: str, body: Any) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        if token != f"Bearer {self.token}":
            return 401, {"message": "Unauthorized"}
        pod, scale = POD.fullmatch(path), SCALE.fullmatch(path)
        name = pod[1] if pod else scale[1] if scale else ""
        if self.allowed is not None and name not in self.allowed:
            return 403, {"message": f"{name} is forbidden: User cannot {method.lower()}"}
        if method == "PATCH" and kind != "application/merge-patch+json":
            return 415, {"message": "the body of the request was in an unknown format"}
        if pod and name in self.pods:
            self.pods[name].update(body["metadata"]["labels"])
            return 200, {"kind": "Pod", "metadata": {"name": name, "labels": self.pods[name]}}
        if scale and name in self.scales:
            if method == "PATCH":
                self.scales[name]["wanted"] = body["spec"]["replicas"]
            found = self.scales[name]
            return 200, {"kind": "Scale", "spec": {"replicas": found["wanted"]}, "status": {"replicas": found["there"]}}
        return 404, {"message": f"{name} not found"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._respond("GET")

            def do_PATCH(self) -> None:
                self._respond("PATCH")

            def _respond(self, method: str) -> None:
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                with cluster.changed:
                    token, kind = self.headers.get("authorization", ""), self.headers.get("content-type", "")
                    status, found = cluster.answer(method, self.path, token, kind, body)
                    cluster.changed.notify_all()
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        return Handler
