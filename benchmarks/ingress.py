"""HTTP and gRPC in several processes: answers a second with 1, 2, 4, ... ingress processes in front of one controller.

Real requests with bodies that must be read: JSON to `/v1`, JSON tensors of the Open Inference Protocol, raw tensors over gRPC;
the functions do next to nothing. Beside each rate: what the controller's process spent on a call, which is the ceiling of all.
Worth a look only where there are cores for all: 8 ingress processes, the controller, 3 workers and 4 generators.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grpc_load import closed_grpc
from benchmarks.load import Result, closed
from benchmarks.report import Report
from benchmarks.servers import APPS, free_port, started, wait_for

SECONDS = float(os.environ.get("LAMINA_BENCH_SECONDS", "3"))
WARM_S = 0.5  # the first calls teach the controller how long they take
GENERATORS = 4
CONNECTIONS = 64  # of each generator
CORES = 16
"""With so many, 8 ingress processes are measured, and what they must do is said."""

INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Server:
    pid: int
    port: int
    grpc_port: int

    def cpu_s(self) -> float:
        """Of the controller's process alone."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Load = Callable[[Server, float], Result]
"""Loads a server for so many seconds."""


def numbers(count: int) -> list[float]:
    return [round(0.001 * n, 7) + 0.1234567 for n in range(count)]


def plain(count: int) -> Load:
    body = json.dumps(numbers(count))
    return lambda server, seconds: closed(f"http://127.0.0.1:{server.port}/v1/functions/length", body, CONNECTIONS, seconds)


def tensor(count: int) -> Load:
    given = {"name": "x", "shape": [1, count], "datatype": "FP32", "data": numbers(count)}
    body = json.dumps({"inputs": [given]})
    return lambda server, seconds: closed(f"http://127.0.0.1:{server.port}/v2/models/peak/infer", body, CONNECTIONS, seconds)


def message(count: int) -> Load:
    from lamina.gateway.oip.schema import load_schema

    asked = load_schema()["ModelInferRequest"](model_name="peak")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, count])
    asked.raw_input_contents.append(struct.pack(f"<{count}f", *numbers(count)))
    body = asked.SerializeToString()
    return lambda server, seconds: closed_grpc(f"127.0.0.1:{server.grpc_port}", INFER, body, CONNECTIONS, seconds)


ALL, ENDS = (0, 1, 2, 4, 8), (0, 1, 8)
LOADS: dict[str, tuple[Callable[[int], Load], int, tuple[int, ...], bool]] = {
    # how it is asked, how many numbers, with how many ingress processes, and whether 8 must answer 4 times what one does
    "JSON, one number": (plain, 1, ENDS, False),
    "JSON, 2,000 numbers (22 kB)": (plain, 2_000, ALL, True),
    "JSON, 8,000 numbers (88 kB)": (plain, 8_000, ALL, True),
    "V2 JSON tensor of 2,000 (22 kB)": (tensor, 2_000, ENDS, True),
    "V2 JSON tensor of 8,000 (88 kB)": (tensor, 8_000, ENDS, True),
    "V2 gRPC tensor of 2,000 (8 kB)": (message, 2_000, ENDS, False),
}


def run(report: Report) -> None:
    is_wide = len(os.sched_getaffinity(0)) >= CORES
    for name, (asked, count, counts, must) in LOADS.items():
        if asked is message and not _has_grpc():
            continue
        load = asked(count)
        rates: dict[int, float] = {}
        for ingress in counts if is_wide else (0, 1, 2):
            with serving(ingress) as server:
                load(server, WARM_S)
                before_s = server.cpu_s()
                found = _together(load, server)
                spent_s = server.cpu_s() - before_s
            rates[ingress] = rate = sum(one.rate for one in found)
            p50_ms, p99_ms = (max(getattr(one, key) for one in found) for key in ("p50_ms", "p99_ms"))
            where = f"{ingress} ingress processes" if ingress else "no ingress process"
            details = {"p50_ms": p50_ms, "p99_ms": p99_ms, "errors": sum(one.errors for one in found)}
            report.add(f"{name}, {where}", rate, "answers/s", **details, controller_us=1e6 * spent_s / (rate * SECONDS))
        most = max(rates)
        least = 4.0 if must and most == 8 else None
        report.add(f"{name}: {most} ingress processes to one", rates[most] / rates[1], "x", least=least)


def _has_grpc() -> bool:
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def serving(ingress: int) -> Iterator[Server]:
    port, grpc_port = free_port(), free_port()
    grpc = ["--grpc-port", str(grpc_port)] if _has_grpc() else []
    options = ["--port", str(port), *grpc, "--ingress", str(ingress), "--store", "none", "--json"]
    with started([sys.executable, "-m", "lamina", "serve", str(APPS / "length.py"), *options]) as process:
        wait_for(f"http://127.0.0.1:{port}/readyz", None)
        yield Server(process.pid, port, grpc_port)


def _together(load: Load, server: Server) -> list[Result]:
    with ThreadPoolExecutor(GENERATORS) as pool:
        return list(pool.map(lambda _: load(server, SECONDS), range(GENERATORS)))
