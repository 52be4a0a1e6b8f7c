"""Unplaceable functions: those that no device here can run as they ask, said before the first call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina.types import DeviceSpec, FunctionSpec
from lamina.units import show_bytes


def unplaceable(functions: Iterable[FunctionSpec], devices: Sequence[DeviceSpec]) -> list[str]:
    """One line for each unplaceable function."""
    return [line for function in functions if (line := _why_unplaceable(function, devices))]


def _why_unplaceable(function: FunctionSpec, devices: Sequence[DeviceSpec]) -> str:
    fitting = [device for device in devices if function.fits_family(device.family)]
    if not fitting:
        return f"{function.name} needs a {'GPU' if function.gpu == 'must' else 'CPU'}, and there is none: its calls are refused"
    most_mib = max(device.memory_mib for device in fitting)
    if function.memory_mib > most_mib:
        wish, most = show_bytes(function.memory_mib * 2**20), show_bytes(most_mib * 2**20)
        return f"{function.name} asks for {wish} where there are {most}: its calls are refused"
    most_units = max(device.units for device in fitting)
    if all(device.family == "cpu" for device in fitting) and function.cores > most_units:
        return f"{function.name} asks for {function.cores} cores where there are {most_units}: it gets those"
    return ""
