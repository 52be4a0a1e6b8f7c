"""Values that stay on the device between two steps, by slot: the executor's side, which alone holds them."""

from __future__ import annotations

from typing import Any

from lamina import encoding
from lamina.errors import LaminaError
from lamina.gpu.protocol import ValueFetched
from lamina.ipc.protocol import DeviceRef, ErrorInfo, ShmRef, Stored
from lamina.values.shm import ShmPool, ShmReader
from lamina.values.slot_refs import ValueLost
from lamina.worker.job_codec import encode_results


class DeviceValues:
    def __init__(self, owner: str, pool: ShmPool, reader: ShmReader) -> None:
        self._owner, self._pool, self._reader = owner, pool, reader
        self._held: dict[int, Any] = {}
        self._last = 0

    def keep(self, output: Any) -> DeviceRef:
        self._last += 1
        self._held[self._last] = output
        return DeviceRef(self._owner, self._last, getattr(getattr(output, "tensor", output), "nbytes", 0))

    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            self._held.pop(slot, None)

    def open(self, stored: Stored) -> Any:
        """Decode a value. One on the device stays there: its readers wait for its event, on their own streams."""
        if isinstance(stored, DeviceRef):
            if stored.owner != self._owner or stored.slot not in self._held:
                raise ValueLost("a value that was on the device is not there any more")
            return self._held[stored.slot]
        return encoding.decode(self._reader.view(stored) if isinstance(stored, ShmRef) else stored)

    def open_on_host(self, stored: Stored) -> Any:
        value = self.open(stored)
        return _on_host(value) if isinstance(stored, DeviceRef) else value

    def fetch(self, slot: int) -> ValueFetched:
        """Copy a value to the host, for a reader elsewhere."""
        try:
            (result,) = encode_results(self._pool, [_on_host(self._held[slot])])
        except (KeyError, LaminaError) as error:
            result = ErrorInfo("ValueLost", f"value {slot} is not on the device: {error}")
        assert not isinstance(result, DeviceRef)
        return ValueFetched(slot, result)


def _on_host(value: Any) -> Any:
    return value.on_host() if hasattr(value, "on_host") else value
