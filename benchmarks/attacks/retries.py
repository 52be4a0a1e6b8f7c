"""How soon is what ran on a machine that is killed started on another one? From the kill to the action, at the leader.

    python -m benchmarks.attacks.retries --kills 20 --out results/attacks/retries.json

A leader in this process and two agents; a function stands on both, and one of them runs a call of it and is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lamina import encoding, policies
from lamina.bootstrap import ClusterOptions, open_local
from lamina.cluster.agent_listener import ListenForAgents
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.cluster.credentials import JoinToken
from lamina.core.actions import Action, StartBatch
from lamina.core.events import Event
from lamina.gateway.deploy.app_package import pack_around
from lamina.types import call_for

TOKEN = "a token of the measurement alone"
APP = """
import time

import lamina

app = lamina.App("retried")


@app.function(scale=lamina.Scale(min=2, max=2))
def nap(seconds):
    time.sleep(seconds)
"""


async def measure(kills: int, folder: Path) -> list[float]:
    (folder / "app.py").write_text(APP)
    listen = ListenForAgents(host="127.0.0.1", port=0, token=JoinToken(TOKEN.encode()))
    runtime = open_local(
        str(folder / "app.py"),
        policy=policies.build("frontier"),
        cluster=ClusterOptions(listen=listen, pack=pack_around, local_devices=False),
    )
    driver, engine = runtime.driver, runtime.driver.engine
    assert isinstance(engine, ClusterEngine)
    started: list[tuple[float, str]] = []

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        started.extend((time.monotonic(), one.device) for one in actions if isinstance(one, StartBatch))

    driver.add_observer(watch)
    await runtime.start()
    engine.lead(0)

    def agent(name: str) -> subprocess.Popen[bytes]:
        join = ["--join", f"127.0.0.1:{engine.listener.port}", "--name", name, "--gpu", "no", "--folder", str(folder / name)]
        env = {**os.environ, "LAMINA_JOIN_TOKEN": TOKEN}
        with (folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "lamina", "agent", *join], env=env, stdout=log, stderr=log)

    agents = {name: agent(name) for name in ("a", "b")}
    function = driver.controller.state.functions["nap"]
    took: list[float] = []
    try:
        for number in range(kills):
            while len({one.device for one in function.instances.values() if one.phase.value == "warm"}) < 2:
                await asyncio.sleep(0.01)
            started.clear()
            end: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            call = call_for(f"c{number}", "nap", driver.now_us(), function.spec.slo)
            driver.submit(call, {"seconds": encoding.encode(0.3)}, end.set_result)
            while not started:
                await asyncio.sleep(0.001)
            victim = started[0][1].partition(".")[0]
            await asyncio.sleep(0.1)  # it is there by now
            began_s = time.monotonic()
            agents[victim].send_signal(signal.SIGKILL)
            while len(started) < 2:
                await asyncio.sleep(0.001)
            took.append(started[1][0] - began_s)
            await end
            agents[victim].wait()
            agents[victim] = agent(victim)
    finally:
        for process in agents.values():
            process.kill()
            process.wait()
        await driver.stop(1.0)
    return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="retries-") as folder:
        took = sorted(asyncio.run(measure(options.kills, Path(folder))))
    found = {
        "label": "measured",
        "setup": {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()},
        "kills": len(took),
        "retried_ms": {"median": round(took[len(took) // 2] * 1e3, 1), "worst": round(took[-1] * 1e3, 1)},
        "all_ms": [round(one * 1e3, 1) for one in took],
    }
    print(json.dumps(found))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
