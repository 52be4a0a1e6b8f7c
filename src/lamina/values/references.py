"""References to encoded values: bytes inline, in a slot of shared memory, or still on a device; and an error in place of one."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from lamina.errors import LaminaError
from lamina.ipc.framing import Natural

MAX_SLOT = 2**31

Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOT)]
Owner = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,32}\Z")]
"""Names a process inside the folder of shared memory. It becomes part of a file name, hence the pattern."""


class ShmRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0, tag_field="kind"):
    """Reference to `size` bytes of a slot of shared memory."""

    owner: Owner
    slot: Slot
    size: Natural
    start: Natural = 0


ErrorText = Annotated[str, Meta(max_length=2**20)]
MAX_FIELDS = 1_000


class ErrorInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1, tag_field="kind"):
    """An exception as data: the class that was raised, its message, and the user's own frames of its trace.

    There may be thousands in a frame of a process with code of a tenant, so each is flat: `fields` are encoded."""

    type: ErrorText
    message: ErrorText
    trace: ErrorText = ""
    hint: ErrorText = ""  #: what to do about it, where the error says so
    status: int = 0  #: of a response that was raised
    response: Annotated[bytes, Meta(max_length=2**20)] = b""  #: encoded
    fields: bytes = b""  #: of an input that are not as they should be, and why


def pack_fields(fields: list[tuple[str, str]]) -> bytes:
    return msgspec.msgpack.encode(fields[:MAX_FIELDS]) if fields else b""


def unpack_fields(info: ErrorInfo) -> list[tuple[str, str]]:
    """The fields of an error; none, if they are not as they should be either."""
    try:
        return _fields_decoder.decode(info.fields) if info.fields else []
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


_fields_decoder = msgspec.msgpack.Decoder(Annotated[list[tuple[str, str]], Meta(max_length=MAX_FIELDS)])


class DeviceRef(ShmRef, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2, tag_field="kind"):
    """Reference to a value that is still on the device that made it. Only the executor there can use it as it is."""


class NodeRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3, tag_field="kind"):
    """Reference to a value in the memory of another machine: fetched from `address`, with a ticket for it alone.

    It travels between machines and is no `Stored`: a leader keeps such a value as a `DeviceRef`, whose owner is the machine."""

    address: str  #: of a data port; "": the receiver's own
    owner: Owner
    slot: Slot
    size: Natural
    start: Natural = 0
    ticket: bytes = b""
    serial: Natural = 0  #: of the value in its slot, which others will be in; 0: it is not told


Stored = bytes | ShmRef | DeviceRef
"""An encoded value, here or in shared memory, or one on a device or on another machine."""


def stored_size(stored: Stored) -> int:
    return len(stored) if isinstance(stored, bytes) else stored.size


class ValuesExhausted(LaminaError):
    """No room for one more value of a run in flight."""

    status = 503
    code: ClassVar[str] = "memory-exhausted"


class ReleaseSlots(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Slots of the worker without readers. `retired` ones are still mapped somewhere, and must not be written again."""

    slots: list[Slot]
    retired: list[Slot] = []
