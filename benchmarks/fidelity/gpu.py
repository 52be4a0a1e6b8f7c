"""`python -m benchmarks.fidelity.gpu FILE [SLICER] [soft]`: three models on slices of a GPU, measured and then served under load.

Runs on the machine with the GPU and simulates nothing: FILE (`recorded.py`) is for
`python -m benchmarks.fidelity replay FILE`. First one model is alone, then all three are busy at once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.apps import three
from benchmarks.fidelity.cases import SEED, poisson
from benchmarks.fidelity.live import handovers, in_company, known, measured, profile_of, served
from benchmarks.fidelity.recorded import Recording, phase_of, write
from benchmarks.gpu.common import machine
from lamina import encoding, policies
from lamina.bootstrap import open_local
from lamina.core.events import Deployed
from lamina.core.lifecycle import InstancePhase
from lamina.gpu.slicers import SliceMode

APP = "benchmarks/apps/three.py"
LOADS = (0.5, 0.7, 0.8)
"""Of what a function can do in its largest batches, on its slice, alone."""
SECONDS = 11.0
ROUND_S = 1.5
"""Of measuring, for each function, before, between and after."""
GOAL = 4.0
"""Times the largest batch."""
WARM_S = 2.0
"""Of load before anything counts: what handing over takes in service is seen there."""
READY_S = 45.0
SIZES = (1, 2, 4, three.MOST)
"""Of batches in company: those there are graphs of."""


async def measure(slicer: str, slices: SliceMode, out: Path, seconds: float, round_s: float) -> None:
    """Writes after each part: what there is counts, should the time run out."""
    started = open_local(APP, policy=policies.build("edf"), gpu=slicer, slices=slices, shadow_batches=True)
    loop, begin_s = started.driver, time.monotonic()
    for gpu in loop.engine.gpus:  # type: ignore[attr-defined]  # one batch at a time, on its own slice: graphs for others are not made
        gpu.device = replace(gpu.device, limits=replace(gpu.device.limits, batches_per_instance=1))
    functions = tuple(replace(spec, home=True, lend=False) for spec in started.app.deployed().functions)
    await loop.start(Deployed(functions))
    await _ready(loop, len(functions))
    ready_s = time.monotonic() - begin_s
    print(f"ready after {ready_s:.1f} s", flush=True)
    samples = {name: three.item(name) for name in three.NAMES}
    inputs = {name: {key: encoding.encode(value) for key, value in body.items()} for name, body in samples.items()}
    [device] = [one for one in loop.engine.devices if one.family == "gpu"][-1:]
    await measured(started, samples, three.MOST, round_s)  # the first seconds of a server have more to do than batches
    rounds = [await measured(started, samples, three.MOST, round_s)]
    profiles = [profile_of(name, device.kind, [runs]) for name, runs in rounds[0].items()]
    full_us = {profile.function: max(point.p50_us for point in profile.points) for profile in profiles}
    print({name: round(us) for name, us in full_us.items()}, [profile.handover for profile in profiles], flush=True)
    slos_us = {name: round(GOAL * us) for name, us in full_us.items()}
    company = await in_company(started, samples, SIZES, 15)
    print(company, flush=True)
    about = (machine() if slicer != "null" else {}) | {"seed": SEED, "ready_s": round(ready_s, 1)}
    run = Recording(about, device, functions, company, [], rounds, [])
    write(out, run)
    for who in (three.NAMES[:1], three.NAMES):
        rates = {name: three.MOST * 1e6 / full_us[name] for name in who}
        warm = await served(loop, poisson({name: 0.6 * rate for name, rate in rates.items()}, slos_us, WARM_S, SEED + 1), inputs)
        run.handovers.append(handovers(warm.batches))
        print(run.handovers[-1], flush=True)
        for load in LOADS:
            calls = poisson({name: load * rate for name, rate in rates.items()}, slos_us, seconds)
            known(loop, [profile_of(name, device.kind, [runs]) for name, runs in rounds[-1].items()])
            found = await served(loop, calls, inputs)
            run.phases.append(phase_of(who, load, found))
            write(out, run)
            print(who, load, found.told, flush=True)
        rounds.append(await measured(started, samples, three.MOST, round_s))
        write(out, run)
    print(f"{time.monotonic() - begin_s:.1f} s", flush=True)
    await loop.stop()


async def _ready(loop: Any, count: int) -> None:
    """Instances warm, and every graph made: then nobody is busy with anything but batches."""
    ends_s, before, since_s = time.monotonic() + READY_S, -1, time.monotonic()
    while time.monotonic() < ends_s:
        await asyncio.sleep(0.2)
        warm = sum(instance.phase is InstancePhase.WARM for instance in loop.controller.state.instances.values())
        usages = [gpu.usage for gpu in loop.engine.gpus]
        graphs = sum(usage.graphs for usage in usages if usage is not None)
        if graphs != before or warm < count:
            before, since_s = graphs, time.monotonic()
        elif time.monotonic() - since_s > 2.5:
            return
    print("not everything was ready:", loop.engine.load_errors, flush=True)


def main() -> None:
    out, slicer = Path(sys.argv[1]), next((word for word in sys.argv[2:] if word != "soft"), "auto")
    slices: SliceMode = "soft" if "soft" in sys.argv[2:] else "hard"
    quick = slicer == "null"
    out.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(measure(slicer, slices, out, 2.0 if quick else SECONDS, 0.3 if quick else ROUND_S))


if __name__ == "__main__":
    main()
