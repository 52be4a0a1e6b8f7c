"""`GET /v1/profiles`: what a server has learnt of its functions, as profiles, with all else a plan or simulation starts from."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, structs

from lamina.core.workflow.flow import Flow
from lamina.drivers.realtime import RealtimeDriver
from lamina.gateway.observability.metrics import RollingStats
from lamina.gateway.routes.targets import CallTarget
from lamina.predict.online import OnlinePredictor
from lamina.predict.profile import Profile
from lamina.types import DeviceSpec, FunctionSpec


class ServerSnapshot(Struct, frozen=True, kw_only=True):
    """A server as a plan or a simulation sees it: what it has, what it serves, and how long that takes there."""

    profiles: list[Profile]
    functions: list[FunctionSpec]
    flows: list[Flow]  #: of workflows
    devices: list[DeviceSpec]
    rates: dict[str, float]  #: answers a second by target, over the last minute
    ways_us: dict[str, int] = {}  #: there and back by device, as planned with


def take_snapshot(driver: RealtimeDriver, recent: RollingStats, targets: Iterable[CallTarget]) -> ServerSnapshot:
    controller, now_us = driver.controller, driver.now_us()
    specs = {name: function.spec for name, function in controller.state.functions.items()}
    predictor = controller.predictor
    known = predictor.learnt_profiles() if isinstance(predictor, OnlinePredictor) else []
    return ServerSnapshot(
        profiles=[
            structs.replace(one, memory_mib=one.memory_mib or specs[one.function].memory_mib)
            for one in known
            if one.function in specs and (one.points or one.load_us)
        ],
        functions=list(specs.values()),
        flows=[flow for name, flow in controller.flows.items() if name not in specs],
        devices=[device.spec for device in controller.state.devices.values()],
        ways_us={device.spec.id: device.way_us for device in controller.state.devices.values() if device.way_us},
        rates={target.name: recent.reply_rate(now_us, target.name) for target in targets},
    )
