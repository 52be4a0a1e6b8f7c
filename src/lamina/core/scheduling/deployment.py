"""Deployment of functions and workflows, new or in a new version: all of them, or none if anything is wrong."""

from __future__ import annotations

from lamina.core.events import Deployed
from lamina.core.scheduling.dispatch_queue import DispatchQueue
from lamina.core.scheduling.jobs import Order, Queue
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.core.scheduling.token_bucket import quota_bucket
from lamina.core.workflow.flow import function_flow
from lamina.errors import BadFlow
from lamina.types import FunctionSpec


def check_deployment(state: ControllerState, event: Deployed) -> None:
    """Raise what is wrong with it before anything is changed."""
    functions = state.functions.keys() | {spec.name for spec in event.functions}
    for flow in event.flows:
        flow.check()
        if flow.name in functions:
            raise BadFlow(f"{flow.name!r} is a function and a workflow", hint="give one of them another name")
        for name in flow.functions:
            if name not in functions:
                raise BadFlow(f"workflow {flow.name!r} calls {name!r}, which is not deployed")
    for spec in event.functions:
        if spec.name in state.flows and spec.name not in state.functions:
            raise BadFlow(f"{spec.name!r} is a workflow already", hint="give the function another name")


def apply_deployment(now_us: int, state: ControllerState, lines: DispatchQueue, order: Order, event: Deployed) -> None:
    for spec in event.functions:
        known = state.functions.get(spec.name)
        if known is None:
            known = state.functions[spec.name] = FunctionState(spec, Queue(spec.name, order))
        else:
            _replace_spec(state, lines, known, spec)
        known.bucket = quota_bucket(spec.quota, known.bucket, now_us)
        state.flows[spec.name] = function_flow(spec.name, spec.slo)
        if spec.scale.min:
            lines.needs_instance[spec.name] = None
    for flow in event.flows:
        state.flows[flow.name] = flow


def _replace_spec(state: ControllerState, lines: DispatchQueue, known: FunctionState, spec: FunctionSpec) -> None:
    """Put instances under the new spec; a function that kept crashing gets a second chance."""
    known.spec = spec
    known.consecutive_crashes = known.load_not_before_us = 0
    for instance in known.instances.values():
        device = state.devices[instance.device]
        if instance.id in device.homes:
            device.reserve(instance.id, device.homes[instance.id], spec.lend, instance.quota)
        else:
            instance.units = spec.units_on(device.spec)
        lines.device_changed(device)
