"""An interactive model (a quarter of the device, 25 ms) behind HTTP beside closed-loop callers of 0.2 s of work.

On half of the device, a callable that cannot be stopped, without and with a home of the interactive one; and on the whole device,
a model that runs in segments, without an SLO and with one of ten seconds. What is left to that is the time in which no batch of
the other runs, for it needs every unit.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.request

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.server import load, once, post, request, served

RATES, SECONDS, CALLERS = (200.0, 600.0), 5.0, 3
GOAL_S = 0.025
ROUNDS = b"75"
CASES = os.environ.get("LAMINA_CASES", "0,1,whole,patient").split(",")
"""Home of the interactive one, or not; and the long work on the whole device, without and with an SLO."""

WHOLE = {"whole": "whole_device", "patient": "whole_device_patient"}
LABELS = {
    "0": "default options",
    "1": "with a home",
    "whole": "long work on the whole device",
    "patient": "long work on the whole device, with an SLO of 10 s",
}


class Callers:
    """Closed-loop callers of the long function, and how many answers they had."""

    def __init__(self, port: int, count: int, function: str = "long_work") -> None:
        self.times: list[float] = []
        self._wire = post(f"/v1/functions/{function}", ROUNDS, patient=True)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(port,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _call(self, port: int) -> None:
        while not self._stop.is_set():
            status, _, took_s = once(port, self._wire)
            if status == 200:
                self.times.append(took_s)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def run(bench: Bench) -> None:
    for case in CASES:
        home, function, label = "0" if case in WHOLE else case, WHOLE.get(case, "long_work"), LABELS[case]
        with served("--env", f"LAMINA_HOME={home}", app="benchmarks/gpu/beside_app.py") as (url, port, _):
            for name in ("resnet50", function):
                wire = request(name, patient=True) if name == "resnet50" else post(f"/v1/functions/{name}", ROUNDS, patient=True)
                print(f"   {label}: first {name}: {[once(port, wire)[::2] for _ in range(3)]}", flush=True)
            time.sleep(12)  # graphs are captured, and cut
            alone = Callers(port, CALLERS, function)
            time.sleep(SECONDS)
            alone.stop()
            done = len(alone.times) / SECONDS
            took_ms = 1e3 * sorted(alone.times)[len(alone.times) // 2]
            bench.report.add(f"{label}: long work alone", round(done, 2), "calls/s", p50_ms=round(took_ms, 1))
            for rate in RATES:
                callers = Callers(port, CALLERS, function)
                time.sleep(1)
                before, used_s = len(callers.times), device_s(url, "resnet50")
                found = load(port, {"resnet50": rate}, SECONDS, seed=7)
                after, used_s = len(callers.times), device_s(url, "resnet50") - used_s
                callers.stop()
                in_time = sum(status == 200 and took <= GOAL_S for _, status, took in found)
                missed = [place for place, (_, status, took) in enumerate(found) if status != 200 or took > GOAL_S]
                times = sorted(took * 1e3 for _, status, took in found if status == 200)
                long_hz, left = (after - before) / (SECONDS + 0.2), 1 - used_s / SECONDS
                bench.report.add(
                    f"{label}: {rate:.0f} interactive calls/s beside {CALLERS} long callers: within 25 ms",
                    round(100 * in_time / len(found), 2),
                    "%",
                    least=99.5 if case == "1" else 99,
                    p50_ms=percentile(times, 0.5) if times else 0.0,
                    p99_ms=percentile(times, 0.99) if times else 0.0,
                    statuses=str({code: sum(status == code for _, status, _ in found) for code in {s for _, s, _ in found}}),
                    long_calls_per_s=round(long_hz, 2),
                    late_at_s=str([round(place / rate, 2) for place in missed[:40]]),
                )
                if case in WHOLE:
                    what = f"{label}: {rate:.0f} interactive calls/s: long work, of the time that is left"
                    more = {"interactive_busy": round(1 - left, 3), "of_alone": round(long_hz / done, 3)}
                    bench.report.add(what, 100 * long_hz / done / max(left, 0.01), "%", least=80, **more)


def device_s(url: str, function: str) -> float:
    """Seconds of the device that batches of a function have had, as the server counts them."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    mine = [line for line in lines if f'function="{function}"' in line and line.startswith("lamina_step_seconds_sum")]
    return sum(float(line.rpartition(" ")[2]) for line in mine)
