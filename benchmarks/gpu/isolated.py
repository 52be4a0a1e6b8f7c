"""A function alone in its process under MPS beside the executor: its share, its memory, and what one death does to the other."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.faults import executor
from benchmarks.gpu.server import once, post, request, served


def run(bench: Bench) -> None:
    with served(app="benchmarks/gpu/isolated_app.py") as (url, port, _):

        def alone(gib: float) -> dict[str, Any]:
            status, body, _ = once(port, post("/v1/functions/alone", json.dumps(gib).encode(), patient=True))
            return json.loads(body) if status == 200 else {"status": status, "said": body.decode()[:200]}

        status, _, took_s = once(port, request("resnet50", patient=True))
        bench.report.add("a model in the executor, itself a client of MPS: first call", took_s, "s", status=status)
        small, large = alone(1), alone(8)
        bench.report.add(
            "SMs the isolated process sees, of 132, with 2 of 15 units", small.get("sms", 0), "SMs", most=18, **small
        )
        bench.report.add("8 GiB granted under a limit of 3", float(large.get("got", True)), "", most=0, **large)
        time.sleep(12)  # until the spare has done its imports
        pid, answer = executor(url)["pid"], once(port, request("resnet50"))[1]
        os.kill(pid, signal.SIGKILL)
        begin = time.perf_counter()
        status, again, _ = once(port, request("resnet50", patient=True))
        took_s = time.perf_counter() - begin
        same = status == 200 and again == answer
        bench.report.add("F2 with a spare executor: from kill -9 to the next answer", took_s, "s", most=10, same_answer=same)
        after = alone(1)
        bench.report.add("the isolated process is the same after that", float(after.get("pid") == small.get("pid")), "", least=1)
        os.kill(int(after["pid"]), signal.SIGKILL)
        times = [once(port, request("resnet50")) for _ in range(20)]
        good = sum(one[0] == 200 for one in times)
        bench.report.add("calls to the model right after the isolated process was killed: answered", good, "of 20", least=20)
        bench.report.add("and it comes back", float("sms" in alone(1)), "", least=1)
