"""Processes of their own that isolated functions have on GPUs: which functions get one, and what holds it to its share.

Processes share a device under MPS only as clients of one daemon, the executor among them; others take turns on it. So the daemon
is there from the start of the server, or nothing is isolated on such a device.
"""

from __future__ import annotations

from collections.abc import Iterable

from lamina.errors import BadValue
from lamina.gpu.mps import MpsSlicer
from lamina.gpu.slicers import back_end
from lamina.types import DeviceSpec, FunctionSpec

ON_GPU = {"LAMINA_TORCH_DEVICE": "cuda"}
"""Where a `TorchModel` runs that is alone in its process."""


class GpuProcesses:
    """Isolated functions on the GPUs of this machine, which are given with their slicers. Each is a worker like one on cores."""

    def __init__(self, devices: Iterable[tuple[str, DeviceSpec]] = (), mps: MpsSlicer | None = None) -> None:
        found = list(devices)
        self.devices = {device.id: device for _, device in found}
        self.mps = mps
        self._has_no_daemon = mps is None and any(back_end(slicer).supports_mps for slicer, _ in found)

    def isolates(self, spec: FunctionSpec | None, device: str, user: int) -> bool:
        """Does an instance there get a process of its own? The executor loads it otherwise."""
        return spec is not None and spec.isolated and device in self.devices and not self._refusal(user)

    def environment(self, spec: FunctionSpec | None, device: str) -> dict[str, str]:
        """What holds a process to its share of a GPU; nothing on cores."""
        if self.mps is None or spec is None or device not in self.devices:
            return {}
        mask = (1 << spec.units_on(self.devices[device])) - 1
        return {**self.mps.environment(mask, spec.memory_mib), **ON_GPU}

    def end_client(self, pid: int) -> None:
        """Called, in a thread, before a process on a GPU is killed."""
        if self.mps is not None:
            self.mps.daemon.terminate(pid)

    def check_packages(self, specs: Iterable[FunctionSpec], user: int = 0) -> None:
        """Refuse functions on a GPU of an app with packages of its own that would share the executor, which has others."""
        for spec in specs:
            if spec.gpu == "no":
                continue
            if not spec.isolated:
                raise BadValue(
                    f"{spec.name!r} is for a GPU, where functions share one process, with the packages of its machine",
                    hint="gpu=lamina.GPU(..., isolated=True) gives it a process of its own, with the packages of its app; "
                    "or install these on the machine and leave the requirements file out",
                )
            if refusal := self._refusal(user):
                raise BadValue(
                    f"{spec.name!r} has packages of its own, and no process of its own on the GPU: {refusal}",
                    hint="install its packages on the machine and leave the requirements file out, or lamina serve FOLDER",
                )

    def close(self) -> None:
        if self.mps is not None:
            self.mps.close()

    def _refusal(self, user: int) -> str:
        """Why none can be isolated here; "": they can."""
        if self._has_no_daemon:
            return "no MPS daemon runs here. A server starts one whose own app has an isolated function; agents have none"
        if self.mps is not None and user:
            return "its process is a tenant's, and the MPS daemon takes those of the server's user only"
        return ""
