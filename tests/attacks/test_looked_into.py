"""Values that the server looks into, between the calls of others: no more of them than a turn of the loop has time for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

import lamina
from lamina import encoding
from lamina.encoding import MAX_HEADERS, MAX_LOOKED_INTO, RESPONSE, count_parts, list_length, looked_into
from lamina.errors import BadValue
from lamina.gateway.bootstrap import Gateway
from lamina.values.references import ErrorInfo
from lamina.values.storage import ValueStorage
from tests.serving import raw as ask_raw
from tests.serving import request, run, shared, write_app

MANY = b"[" + b"[]," * MAX_LOOKED_INTO + b"1]"

APP = """
from typing import Any

import lamina

app = lamina.App("looking")
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE)
def echo(x: Any) -> Any:
    return x


@app.function(scale=ONE)
def one(x: Any) -> int:
    return 1


@app.workflow()
def chosen(x):
    return lamina.when(x == 5, lambda: one(x), lambda: one(0))


@app.workflow()
def chosen_of_result(x):
    found = echo(x)
    return lamina.when(found == 5, lambda: one(found), lambda: one(0))


@app.workflow()
def each(x):
    return lamina.each(one, x)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("looking"), APP)) as gateway:
        yield gateway


@pytest.mark.live
@pytest.mark.parametrize("workflow", ["chosen", "chosen_of_result", "each"])
def test_a_workflow_does_not_look_into_what_would_keep_the_loop(server: Gateway, workflow: str) -> None:
    """A request of 18 MB to a workflow with a `when`, or an `each`, kept all others waiting for 5 to 10 s."""

    async def ask() -> list[int]:
        path = f"/v1/workflows/{workflow}"
        return [(await ask_raw(server.port, request("POST", path, body))).status for body in (b'{"x":%s}' % MANY, b'{"x":[1]}')]  # type: ignore[union-attr]

    assert run(ask) == [422, 200]


def value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(11 if depth < 4 else 7)
    sizes = (0, 3, 15, 16, 40)
    match kind:
        case 0 | 1:
            return chance.choice([None, True, 0.5])
        case 2 | 3:
            return chance.choice([chance.randrange(-(2**63), 2**63), chance.randrange(-40, 200), 2**64 - 1])
        case 4:
            return "x" * chance.choice([0, 5, 31, 32, 300, 70_000])
        case 5:
            return b"y" * chance.choice([0, 5, 300, 70_000])
        case 6:
            return numpy.zeros(chance.choice([1, 100, 70_000]), "uint8")
        case 7 | 8:
            return [value(chance, depth + 1) for _ in range(chance.choice(sizes))]
    return {str(number): value(chance, depth + 1) for number in range(chance.choice(sizes))}


def parts(of: Any) -> int:
    if isinstance(of, dict):
        return 1 + sum(1 + parts(inner) for inner in of.values())
    return 1 + sum(map(parts, of)) if isinstance(of, list) else 1


@pytest.mark.parametrize("seed", range(50))
def test_parts_are_counted_as_they_are(seed: int) -> None:
    found = value(random.Random(seed))
    blob = encoding.encode(found)
    assert count_parts(blob, 2**60) == parts(found)
    assert count_parts(blob, 10) == min(11, parts(found))
    if isinstance(found, list):
        assert list_length(blob) == len(found)


def test_what_a_response_holds_counts_too() -> None:
    assert count_parts(encoding.encode(lamina.Response([1, 2, 3])), 100) > 7


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc9\x00\x00"])
def test_what_is_no_value_is_left_to_the_decoder(blob: bytes) -> None:
    assert count_parts(blob, 100) <= 101 and list_length(blob) in (0, 2**32 - 1)


def test_several_values_share_what_is_looked_into() -> None:
    half = encoding.encode([0] * (MAX_LOOKED_INTO // 2))
    left = looked_into(half)
    assert 0 < left < MAX_LOOKED_INTO
    with pytest.raises(BadValue, match="too many parts"):
        looked_into(half + half, looked_into(half, left) if left >= len(half) else 0)


def test_headers_of_a_function_s_response_are_few() -> None:
    """A process of a tenant need not make them as the SDK does: millions of them took seconds, only to see what status it has."""
    head = [200, "text/plain", {f"x-{number}": "1" for number in range(MAX_HEADERS + 1)}]
    blob = msgspec.msgpack.encode(msgspec.msgpack.Ext(RESPONSE, msgspec.msgpack.encode([*head, b"body"])))
    assert encoding.response_status(blob) == 500 and not encoding.is_flat_response(blob)
    with pytest.raises(BadValue):
        encoding.decode(blob)


def test_a_response_that_was_raised_is_short() -> None:
    blob = msgspec.msgpack.encode(ErrorInfo("Response", "m", response=bytes(2**20 + 1)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(blob, type=ErrorInfo)


def test_an_array_that_is_none_is_not_decoded_for_a_buffer(tmp_path: Path) -> None:
    assert encoding.tensor_parts(memoryview(encoding.encode([[]] * 10))) is None


def test_items_are_counted_before_anything_is_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ValueStorage.__new__(ValueStorage)
    blob = encoding.encode(list(range(20)))
    assert len(storage.list_items(blob, 20, [])) == 20
    monkeypatch.delattr(encoding, "list_items")
    with pytest.raises(BadValue, match="each over 20 items"):
        storage.list_items(blob, 19, [])
