"""An app on an engine with a policy: what `serve`, `run` and tests all begin with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from lamina import policies
from lamina.core.controller import Controller
from lamina.core.policy import Dispatch
from lamina.errors import BadValue
from lamina.live.data import Data
from lamina.live.emulated import EmulatedEngine, Pretence
from lamina.live.local import LocalEngine
from lamina.live.loop import LiveLoop
from lamina.predict import devices, online, profile
from lamina.predict.table import Table
from lamina.predict.world import World
from lamina.sdk.app import App
from lamina.sdk.load import load_app

DEFAULT_POLICY = "edf"


@dataclass(slots=True)
class Live:
    app: App
    loop: LiveLoop

    async def start(self) -> None:
        await self.loop.start(self.app.deployed())


def open_local(app_path: str, *, policy: Dispatch | None = None, profiles: Path | None = None, probe: bool = False) -> Live:
    """On this machine, in worker processes. With `probe`, what has no profile is timed on its sample inputs when it is loaded."""
    app = load_app(app_path)
    engine = LocalEngine(app_path)
    table = Table(read_profiles(app_path, profiles))
    if probe:  # what must not run twice does not run for nobody either
        functions = [function for function in app.functions.values() if function.spec.idempotent]
        engine.unknown = {one.name for one in functions if not table.latency_us(one.name, engine.devices[0].kind, 1, 1)}
    predictor = online.Predictor(table)
    controller = Controller(policy or policies.build(DEFAULT_POLICY), predictor)
    data = Data(engine.pool, engine.reader, engine.release)
    loop = LiveLoop(controller, engine, data)
    engine.deadline_us = loop.deadline_us
    return Live(app, loop)


def open_emulated(
    app: App,
    kinds: str,
    found: list[profile.Profile],
    *,
    policy: Dispatch | None = None,
    seed: int = 0,
    noise: float = 0.05,
) -> Live:
    """On make-believe devices, which take as long as the profiles say."""
    made = devices.make(kinds)
    table = Table(found, margin=2 * noise)
    for name, function in app.functions.items():
        fitting = [device for device in made if function.spec.fits_family(device.family)]
        if not fitting:
            raise BadValue(f"{name!r} fits none of {kinds}", hint="give it gpu=GPU(...), or emulate a cpu as well")
        if not any(table.latency_us(name, device.kind, 1, 1) for device in fitting):
            raise BadValue(
                f"no profile of {name!r} on {', '.join(sorted({device.kind for device in fitting}))}",
                hint="put one into a folder `profiles` beside the app, or name the folder with --profiles",
            )
    world = World(table, random.Random(seed), noise)
    controller = Controller(policy or policies.build(DEFAULT_POLICY), online.Predictor(table))
    return Live(app, LiveLoop(controller, EmulatedEngine(made, world), Pretence(world)))


def read_profiles(app_path: str, folder: Path | None) -> list[profile.Profile]:
    """From `folder`, or from a folder `profiles` beside the app, which is used without being asked for."""
    if folder is None:
        beside = Path(app_path.rpartition(":")[0] if ".py:" in app_path else app_path).parent / "profiles"
        return profile.read_all(beside) if beside.is_dir() else []
    if not folder.is_dir():
        raise BadValue(f"profiles: no folder {str(folder)!r}")
    return profile.read_all(folder)
