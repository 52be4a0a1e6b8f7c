"""The thesis's five scheduling traces, live: its policies decide, and kernel graphs run in the product's executor.

`python -m benchmarks.kaas_live` writes results/kaas-live.json. Two executors stand for the two GPUs. A request of R is a graph of
two kernels, one of B of eight (load 4 and 10 steps); the clock moves by one step when every executor has been polled once, which
runs one kernel of what it has. So what takes how long is decided by the executor, and nothing waits for a timer: the same run
every time. The simulator plays the same trace from profiles alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lamina import kernels
from lamina.core.actions import Load, Reply, StartBatch, Unload, WakeAt
from lamina.core.events import BatchFinished, CallArrived, Event, InstanceReady, Tick
from lamina.gpu.executor import SliceExecutor
from lamina.gpu.slicers.null import NullSlicer, null_device
from lamina.kernels.host_run import HostGraph
from lamina.lab.experiments import kaas
from lamina.lab.experiments._call_player import play_calls
from lamina.sim.run import build_controller, setup_events

RESULT = Path(__file__).parents[1] / "results" / "kaas-live.json"
MAX_STEPS = 200


@kernels.numpy_kernel
def advance(x: Any, y: Any) -> None:
    y[...] = x * 3 + 1


def graph_of(launches: int) -> HostGraph:
    """A chain of kernels, each of which needs the one before."""
    g = kernels.GraphBuilder()
    buffer = g.input("x", "int64", (4,))
    for place in range(launches):
        last = place == launches - 1
        made = g.output("y", "int64", (4,)) if last else g.temporary(f"t{place}", "int64", (4,))
        g.launch(advance, buffer, kernels.out(made))
        buffer = made
    return HostGraph(g.build())


class LiveGpus:
    """Executors by device, and the work of the controller's actions on them."""

    def __init__(self, devices: list[str], models: dict[str, kaas.KaasModel]) -> None:
        self._models, self._example = models, np.zeros((1, 4), np.int64)
        self._executors = {device: SliceExecutor(NullSlicer(null_device(units=1))) for device in devices}
        self._loads: list[tuple[int, int, str]] = []  #: when begun, when ready, instance
        self._batches: dict[tuple[str, int], tuple[int, StartBatch]] = {}  #: and when it was begun
        self.results: dict[str, int] = {}

    def perform(self, step: int, action: Any) -> None:
        if isinstance(action, Load):
            executor, name = self._executors[action.device], action.function
            executor.load(action.instance, graph_of(round(self._models[name].run_steps)), (self._example,), buckets=(1,))
            executor.prepare(action.instance, [1])
            self._loads.append((step, step + round(self._models[name].load_steps), action.instance))
        elif isinstance(action, StartBatch):
            ticket = self._executors[action.device].submit(action.instance, [np.zeros(4, np.int64)], 1)
            self._batches[action.device, ticket] = step, action

    def run_one_kernel_each(self, step: int) -> list[Event]:
        """One step: what ended and what is loaded by now, in the order in which it was begun."""
        ended: list[tuple[int, int, Event]] = []
        for device, executor in self._executors.items():
            for done in executor.poll():
                assert done.error is None and done.outputs is not None
                began, start = self._batches.pop((device, done.ticket))
                self.results[start.jobs[0].call_id] = int(done.outputs[0][0][0])
                launches = round(self._models[start.function].run_steps)
                ended.append((began, start.batch_id, BatchFinished(start.batch_id, launches * kaas.STEP_US)))
        ended += [(began, 0, InstanceReady(instance)) for began, at, instance in self._loads if at == step]
        return [event for *_, event in sorted(ended, key=lambda one: one[:2])]


def replay(policy: str, params: str = "trace-i", seed: int = 0) -> tuple[list[list[Any]], LiveGpus]:
    """[request, step of its start, GPU] in the order they started, and the GPUs they ran on."""
    options = kaas.COMPAT.get(policy, {}) | ({"seed": seed} if policy == "kaas_mlfq" else {})
    models = {model.name: model for model in kaas.SETS[params]}
    scenario = kaas.world(kaas.SETS[params], 2, policy, options)
    controller = build_controller(scenario)
    gpus = LiveGpus([device.id for device in scenario.devices], models)
    calls = {call.arrived_us // kaas.STEP_US: call for call in kaas.requests(kaas.TRACE)}
    loading: dict[str, int] = {}
    wake_at: set[int] = set()
    starts: list[list[Any]] = []
    left = len(calls)
    for step in range(MAX_STEPS):
        events = setup_events(scenario) if step == 0 else []
        events += gpus.run_one_kernel_each(step) if step else []
        events += [CallArrived(calls[step])] if step in calls else []
        events += [Tick()] if step in wake_at else []
        for event in events:
            for action in controller.handle(step * kaas.STEP_US, event):
                if isinstance(action, WakeAt):
                    wake_at.add(max(step + 1, -(-action.at_us // kaas.STEP_US)))
                elif isinstance(action, Reply):
                    left -= 1
                elif isinstance(action, Load):
                    loading[action.instance] = step
                elif isinstance(action, StartBatch):
                    began = loading.pop(action.instance, step)
                    starts.append([action.jobs[0].call_id, began, int(action.device.removeprefix("gpu"))])
                assert not isinstance(action, Unload), "nothing is evicted in these traces"
                gpus.perform(step, action)
        if not left:
            break
    assert not left, "a request was never answered"
    starts.sort(key=lambda one: (one[1], int(one[0][1:])))
    return starts, gpus


def simulated(policy: str, params: str = "trace-i", seed: int = 0) -> list[list[Any]]:
    """The same trace by the simulator."""
    options = kaas.COMPAT.get(policy, {}) | ({"seed": seed} if policy == "kaas_mlfq" else {})
    played = play_calls(kaas.world(kaas.SETS[params], 2, policy, options), kaas.requests(kaas.TRACE))
    return kaas.starts_of(played)


def rows(seeds: int) -> list[dict[str, Any]]:
    found = []
    for policy, printed in kaas.PUBLISHED.items():
        for params in ("trace-i", "trace-ii"):
            for seed in range(seeds if policy == "kaas_mlfq" else 1):
                live, gpus = replay(policy, params, seed)
                expected = {call: (3 ** launches_of(call, params) - 1) // 2 for call in gpus.results}
                found.append(
                    {
                        "policy": policy,
                        "params": params,
                        "seed": seed,
                        "starts": live,
                        "as_simulated": live == simulated(policy, params, seed),
                        "as_printed": live == printed,
                        "results_right": gpus.results == expected,
                    }
                )
    return found


def launches_of(call: str, params: str) -> int:
    return round(next(model.run_steps for model in kaas.SETS[params] if model.name == call[0]))


def main() -> None:
    found = rows(seeds=64)
    lines = ",\n".join(json.dumps(row) for row in found)
    RESULT.write_text(f'{{"kind": "kernel graphs on the host, one kernel a step", "rows": [\n{lines}\n]}}\n')
    for row in found:
        if row["as_printed"] or row["policy"] != "kaas_mlfq":
            sys.stdout.write(f"{row['policy']} {row['params']} seed {row['seed']}: as printed {row['as_printed']}\n")
    sys.stdout.write(f"{sum(row['as_simulated'] for row in found)} of {len(found)} as simulated\n")


if __name__ == "__main__":
    main()
