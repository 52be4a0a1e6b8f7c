"""C1 for bodies that are refused after they were read: the error that says so does not hold them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from lamina.errors import LaminaError
from lamina.gateway.oip import rest_infer
from lamina.gateway.routes import problems
from lamina.gateway.routes.codec_pool import MAX_WAITING, CodecPool


class Body(bytearray):
    """Can be referred to weakly."""


class Replies:
    """The statuses that an exchange was to answer with."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def respond(self, status: int, *_: bytes) -> None:
        self.statuses.append(status)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles stay, as they do for long in a server, whose collector is put off."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("answered", [problems.answered, rest_infer._answered], ids=["calls", "inference"])
def test_c1_a_body_that_codecs_have_no_room_for_is_given_back_at_once(answered: Any):
    def then(found: dict[str, bytes] | LaminaError) -> None:
        if isinstance(found, LaminaError):
            raise found

    pool, exchange = CodecPool(processes=0), Replies()
    for _ in range(MAX_WAITING):
        pool.submit("call", {}, b"", then)
    body = Body(100)
    held = weakref.ref(body)
    pool.submit("call", {}, body, answered(exchange, then))  # type: ignore[arg-type]
    del body
    assert exchange.statuses == [503]
    assert held() is None
