"""Values that stay on the device between two steps, by slot: the executor's side, which alone holds them."""

from __future__ import annotations

from typing import Any

from lamina import values
from lamina.errors import LaminaError
from lamina.live.frames import DeviceRef, ErrorInfo, ShmRef, Stored
from lamina.live.gpu_frames import Fetched
from lamina.live.ledger import ValueLost
from lamina.live.results import packed
from lamina.live.shm import Pool, Reader


class DeviceValues:
    def __init__(self, owner: str, pool: Pool, reader: Reader) -> None:
        self._owner, self._pool, self._reader = owner, pool, reader
        self._held: dict[int, Any] = {}
        self._last = 0

    def keep(self, output: Any) -> DeviceRef:
        self._last += 1
        self._held[self._last] = output
        return DeviceRef(self._owner, self._last, getattr(getattr(output, "tensor", output), "nbytes", 0))

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._held.pop(slot, None)

    def open(self, stored: Stored) -> Any:
        """Decode a value. One on the device stays there: its readers wait for its event, on their own streams."""
        if isinstance(stored, DeviceRef):
            if stored.owner != self._owner or stored.slot not in self._held:
                raise ValueLost("a value that was on the device is not there any more")
            return self._held[stored.slot]
        return values.decode(self._reader.view(stored) if isinstance(stored, ShmRef) else stored)

    def open_on_host(self, stored: Stored) -> Any:
        value = self.open(stored)
        return _on_host(value) if isinstance(stored, DeviceRef) else value

    def fetched(self, slot: int) -> Fetched:
        """Copy a value to the host, for a reader elsewhere."""
        try:
            (result,) = packed(self._pool, [_on_host(self._held[slot])])
        except (KeyError, LaminaError) as error:
            result = ErrorInfo("ValueLost", f"value {slot} is not on the device: {error}")
        assert not isinstance(result, DeviceRef)
        return Fetched(slot, result)


def _on_host(value: Any) -> Any:
    return value.on_host() if hasattr(value, "on_host") else value
