"""Messages between the gateway and the host of its web apps; framed like those of workers."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from lamina.gateway.observability.logs import LogFormat
from lamina.ipc.framing import FrameReader, Natural, SocketClose, SocketMessage, SocketTaken, StopProcess

HeaderList = list[tuple[bytes, bytes]]

PIECE_BYTES = 256 * 2**10
"""Of a body, in either direction."""


class WebHostSetup(Struct, frozen=True, kw_only=True):
    """Settings of the host process, as JSON on its command line."""

    source: str  #: the app, as `load_app` takes it
    fd: int = -1
    log_format: LogFormat = ""


# ------------------------------------------------------------------------- to the host


class WebRequest(Struct, frozen=True, array_like=True, tag=1):
    """A request for the application that is mounted at `mount`; a WebSocket, if `is_socket`."""

    number: Natural
    mount: str
    method: str
    path: bytes
    query: bytes
    headers: HeaderList
    client: str
    body: bytes = b""  #: its first piece
    is_socket: bool = False
    protocols: tuple[str, ...] = ()
    more: bool = False  #: of the body follows


class WebRequestBody(Struct, frozen=True, array_like=True, tag=6):
    """A further piece of the body of a request."""

    number: Natural
    data: bytes
    more: bool


class WebClientLeft(Struct, frozen=True, array_like=True, tag=4):
    """The client has left; `code` of its WebSocket."""

    number: Natural
    code: Natural = 1006


class WebDrained(Struct, frozen=True, array_like=True, tag=5):
    """The client has taken so much of the response, as `piece_cost` counts it: as much may follow."""

    number: Natural
    size: Natural


# ----------------------------------------------------------------------- from the host


class WebHostReady(Struct, frozen=True, array_like=True, tag=10):
    """The applications have started; or why not."""

    error: str = ""


class WebStart(Struct, frozen=True, array_like=True, tag=11):
    """Status and headers of a response."""

    number: Natural
    status: Natural
    headers: HeaderList


class WebBody(Struct, frozen=True, array_like=True, tag=12):
    """A part of the body of a response."""

    number: Natural
    data: bytes
    more: bool


class WebEnded(Struct, frozen=True, array_like=True, tag=13):
    """The application is done with a request, and holds nothing of it; without `is_complete`, it has raised, or ended without a
    whole response."""

    number: Natural
    is_complete: bool


class WebAccept(Struct, frozen=True, array_like=True, tag=14):
    """The application accepts a WebSocket."""

    number: Natural
    protocol: str
    headers: HeaderList


ToWebHost = WebRequest | WebRequestBody | SocketMessage | WebClientLeft | WebDrained | StopProcess
FromWebHost = WebHostReady | WebStart | WebBody | WebEnded | WebAccept | SocketMessage | SocketTaken | SocketClose


def web_host_reader() -> FrameReader[FromWebHost]:
    return FrameReader(msgspec.msgpack.Decoder(FromWebHost))


def gateway_reader() -> FrameReader[ToWebHost]:
    return FrameReader(msgspec.msgpack.Decoder(ToWebHost))
