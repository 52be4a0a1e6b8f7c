"""One of five tenants in a process of its own, each with a fifth of the GPU under MPS: the rival in `five.py` with no executor.

    python -m benchmarks.gpu.five_mps NAME     answers each line, which says what to try, with an outcome

A tenant has its controller, its policy and its loop for itself, so these five have five times the host that the others have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.gpu.inprocess import InProcess, Outcome
from benchmarks.gpu.zoo import FIVE

UNITS = 3
MASK = 0b111


class Tenants:
    """All five, started at once. A trial begins at the same moment in each."""

    def __init__(self) -> None:
        from lamina.gpu.mps import MpsSlicer

        self._slicer = MpsSlicer()
        fifth = (1 << self._slicer.device.units // 5) - 1
        environment = {**os.environ, **self._slicer.environment(fifth)}
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # five clients with 32 queues each: the daemon has not as many
        command = [sys.executable, "-m", "benchmarks.gpu.five_mps"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self._processes = {name: subprocess.Popen([*command, name], **pipes) for name in FIVE}

    def wait(self) -> bool:
        """Until all have loaded their model, or one cannot."""
        try:
            return all(self._read(process)["ready"] for process in self._processes.values())
        except RuntimeError as error:
            print(f"no MPS tenants: {error}")
            return False

    def at(self, factor: int, options: dict[str, Any]) -> Any:
        from benchmarks.gpu.five import SECONDS

        def tried(rate: float, seed: int = 1) -> Outcome:
            trial = {"factor": factor, "rate": rate, "options": options, "trial": seed}
            self._ask(trial, 0.25, 0)
            return self._ask(trial, SECONDS, seed)

        return tried

    def _ask(self, trial: dict[str, Any], seconds: float, seed: int) -> Outcome:
        trial = {**trial, "seconds": seconds, "at_s": time.time() + 0.05}
        for number, process in enumerate(self._processes.values()):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**trial, "seed": seed * 100 + number}) + "\n")
            process.stdin.flush()
        whole = Outcome()
        for name, process in self._processes.items():
            found = self._read(process)
            for key in ("sent", "in_time", "refused", "late", "failed", "batches", "items", "unit_us"):
                setattr(whole, key, getattr(whole, key) + found[key])
            whole.by_function[name], whole.sent_to[name] = found["in_time"], found["sent"]
            whole.latencies_us += found["latencies_us"]
            whole.busy_us += found["busy_us"] // len(FIVE)
            whole.wall_us = max(whole.wall_us, found["wall_us"])
            whole.longest_turn_us = max(whole.longest_turn_us, found["longest_turn_us"])
        return whole

    @staticmethod
    def _read(process: Any) -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a tenant ended with status {process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._slicer.close()


def serve(name: str) -> None:
    from benchmarks.gpu import zoo
    from benchmarks.gpu.apart import BUCKETS, PlainSlicer, catalogue
    from benchmarks.gpu.five import SOFT, profiles, specs_for
    from lamina.gpu.cuda_runtime import CudaRuntime
    from lamina.gpu.executor import SliceExecutor
    from lamina.types import DeviceSpec

    device = DeviceSpec(id="gpu0", kind="h200", units=15, memory_mib=100_000, limits=catalogue(UNITS))
    slicer = PlainSlicer(device)
    executor = SliceExecutor(slicer, CudaRuntime())  # type: ignore[arg-type]
    model = zoo.build(name)
    executor.load(name, model.module, model.make_input(1), buckets=BUCKETS)
    executor.prepare(name, [MASK])
    items = {name: model.make_input(1)[0]}
    profile_list, _ = profiles()
    print(json.dumps({"ready": True}), flush=True)
    loop, asked = None, None
    for line in sys.stdin:
        trial = json.loads(line)
        wanted = {key: trial[key] for key in ("factor", "rate", "options", "trial")}
        if loop is None or asked != wanted:  # a new trial begins with nothing learnt, as everywhere
            specs = specs_for(trial["factor"], UNITS, fixed=True, names=(name,))
            loop = InProcess(slicer, executor, specs, items, "edf", device, profile_list, {name: MASK}, trial["options"], SOFT)
            asked = wanted
        while time.time() < trial["at_s"]:
            pass
        outcome = loop.open({name: trial["rate"]}, trial["seconds"], seed=trial["seed"])
        said = {key: value for key, value in vars(outcome).items() if not isinstance(value, Counter)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
