"""Echo of sixteen numbers through the Open Inference Protocol, 16 connections, beside PyTriton and MLServer in the same run.

The peers have Pythons of their own: LAMINA_BENCH_PYTRITON and LAMINA_BENCH_MLSERVER name them, as in
`LAMINA_BENCH_PYTRITON=/opt/pytriton/bin/python python -m benchmarks oip`. Without one, that peer is left out. All servers are
up at once and loaded in turn, three rounds; figures are medians. REST is binary, but for MLServer, which takes JSON only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.grpc_load import closed_grpc
from benchmarks.report import Report
from benchmarks.servers import APPS, free_port, started, wait_for

CONNECTIONS = 16
SECONDS = 2
ROUNDS = 3
PEERS = Path(__file__).parent / "peers"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
RAW = struct.pack("<16f", *range(16))
_INPUT = {"name": "x", "shape": [1, 16], "datatype": "FP32"}
JSON_BODY = json.dumps({"inputs": [{**_INPUT, "data": [float(n) for n in range(16)]}]}).encode()
_HEAD = json.dumps(
    {"inputs": [{**_INPUT, "parameters": {"binary_data_size": 64}}], "parameters": {"binary_data_output": True}}
).encode()


@dataclass
class Peer:
    name: str
    command: Callable[[int, int], list[str]]
    binary: bool = True
    http_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    rest: list[float] = field(default_factory=list)
    grpc: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/v2/models/echo/infer"


def peers() -> list[Peer]:
    found = [Peer("lamina", _ours)]
    pytriton, mlserver = os.environ.get("LAMINA_BENCH_PYTRITON"), os.environ.get("LAMINA_BENCH_MLSERVER")
    if pytriton:
        found.append(Peer("PyTriton", _script(pytriton, "pytriton_echo.py")))
    if mlserver:
        found.append(Peer("MLServer", _script(mlserver, "mlserver_echo.py", "1"), binary=False))
        found.append(Peer("MLServer in process", _script(mlserver, "mlserver_echo.py", "0"), binary=False))
    return found


def _script(python: str, name: str, *more: str) -> Callable[[int, int], list[str]]:
    return lambda http, grpc: [python, str(PEERS / name), str(http), str(grpc), *more]


def _ours(http: int, grpc: int) -> list[str]:
    app = str(APPS / "tensor_echo.py")
    return [
        sys.executable,
        "-m",
        "lamina",
        "serve",
        app,
        "--port",
        str(http),
        "--grpc-port",
        str(grpc),
        "--json",
        "--store",
        "none",
    ]


def rest_rate(peer: Peer) -> float:
    body = _HEAD + RAW if peer.binary else JSON_BODY
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method="POST"; wrk.body="' + "".join(f"\\{byte:03d}" for byte in body) + '"\n')
        if peer.binary:
            script.write(f'wrk.headers["Inference-Header-Content-Length"]="{len(_HEAD)}"\n')
        else:
            script.write('wrk.headers["Content-Type"]="application/json"\n')
        script.flush()
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}", "-s", script.name, peer.url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in said, f"{peer.name}: {said}"
    found = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    assert found, said
    return float(found[1])


def grpc_rate(peer: Peer, message: bytes) -> float:
    result = closed_grpc(f"127.0.0.1:{peer.grpc_port}", METHOD, message, CONNECTIONS, SECONDS)
    assert not result.errors, f"{peer.name}: {result}"
    return result.rate


def run(report: Report) -> None:
    from lamina.gateway.oip.schema import load_schema

    asked = load_schema()["ModelInferRequest"](model_name="echo")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    asked.raw_input_contents.append(RAW)
    message = asked.SerializeToString()
    found = peers()
    with contextlib.ExitStack() as stack:
        for peer in found:
            stack.enter_context(started(peer.command(peer.http_port, peer.grpc_port)))
        for peer in found:
            wait_for(peer.url, JSON_BODY, 60)
            grpc_rate(peer, message)  # the first calls of all are slower
        for _ in range(ROUNDS):
            for peer in found:
                peer.rest.append(rest_rate(peer))
                peer.grpc.append(grpc_rate(peer, message))
    ours = found[0]
    goals = {"PyTriton": 1.5, "MLServer": 3.0}
    for kind in ("rest", "grpc"):
        mine = statistics.median(getattr(ours, kind))
        report.add(f"V2 {kind} echo, 16 connections", mine, "req/s", rounds=[round(rate) for rate in getattr(ours, kind)])
        for peer in found[1:]:
            theirs = statistics.median(getattr(peer, kind))
            report.add(f"V2 {kind} echo, of {peer.name}'s rate", mine / theirs, "x", least=goals.get(peer.name), theirs=theirs)
