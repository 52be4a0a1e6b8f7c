"""Types that web teams write: what the annotation and `/openapi.json` say is what is taken, and what does not fit is a 422 of the
caller's and no 500 of the function's. Forms as pages and their libraries send them."""

from __future__ import annotations

import base64
import collections
import datetime
import enum
import http.client
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import numpy as np
import pytest

import lamina
from lamina import encoding
from lamina.testing import Server

pydantic = pytest.importorskip("pydantic")

ID = "12345678-1234-5678-1234-567812345678"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    kind: Literal["cat"]
    meows: int


class Dog(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    kind: Literal["dog"]
    color: Color = Color.RED


class Order(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    order_id: UUID = pydantic.Field(alias="orderId")
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")] | None = None
    note: bytes = b""

    @pydantic.field_validator("note")
    @classmethod
    def is_short(cls, note: bytes) -> bytes:
        if len(note) > 9:
            raise ValueError("too long")
        return note


class Page(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    url: pydantic.HttpUrl
    secret: pydantic.SecretStr = pydantic.SecretStr("abc")
    raw: bytes = b""

    @pydantic.computed_field  # type: ignore[prop-decorator, untyped-decorator, unused-ignore]
    @property
    def host(self) -> str:
        return str(self.url.host)


class Filter(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    count: int
    tags: list[str] = []
    strict: bool = False
    since: datetime.date | None = None
    inner: Filter | None = None


class Row(TypedDict):
    a: int
    b: NotRequired[Color]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    app = lamina.App("types")

    @app.function()
    def order(order: Order) -> Order:
        return order

    @app.function()
    def orders(orders: list[Order]) -> int:
        return len(orders)

    @app.function()
    def pet(pet: Cat | Dog) -> str:
        return type(pet).__name__

    @app.function()
    def page(url: str, raw: bytes = b"") -> Page:
        return Page(url=url, raw=raw)

    @app.function()
    def filtered(filter: Filter) -> Filter:
        return filter

    @app.function()
    def row(row: Row) -> str:
        return type(row["a"]).__name__ + type(row.get("b")).__name__

    @app.function()
    def mode(mode: Literal["fast", "slow"], at: Annotated[int, msgspec.Meta(ge=0, le=10)] = 0) -> str:
        return mode

    @app.function()
    def positive(x: Annotated[int, pydantic.Field(gt=0)]) -> int:
        return x

    @app.function()
    def sizes(parts: list[bytes], name: str = "", limit: int = 7) -> list[Any]:
        return [name, limit, *map(len, parts)]

    @app.function()
    def keys(names: dict[int, str]) -> str:
        return names[1]

    @app.function()
    def whole(n: int, on: bool = False) -> list[Any]:
        return [n, type(n).__name__, on]

    @app.function()
    def arrays(many: list[np.ndarray], one: np.ndarray | None = None) -> list[Any]:
        return [many[0].shape[0], type(one).__name__]

    @app.function()
    def anything(x):  # type: ignore[no-untyped-def]
        return x

    with Server(app) as server:
        yield server


def send(server: Server, path: str, body: bytes, kind: str) -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    link.request("POST" if body or kind else "GET", path, body, {"content-type": kind})
    answer = link.getresponse()
    found = json.loads(answer.read())
    link.close()
    return answer.status, found


def call(server: Server, name: str, value: Any) -> tuple[int, Any]:
    return send(server, f"/v1/functions/{name}", json.dumps(value).encode(), "application/json")


def form(server: Server, name: str, fields: list[tuple[str, str]]) -> tuple[int, Any]:
    return send(server, f"/v1/functions/{name}", urlencode(fields).encode(), "application/x-www-form-urlencoded")


def files(server: Server, name: str, parts: list[tuple[str, bytes, bool]]) -> tuple[int, Any]:
    """A multipart form: name, content, and whether it is a file."""
    body = b""
    for field, content, is_file in parts:
        extra = '; filename="f"\r\ncontent-type: image/png' if is_file else ""
        body += f'--b\r\ncontent-disposition: form-data; name="{field}"{extra}\r\n\r\n'.encode() + content + b"\r\n"
    return send(server, f"/v1/functions/{name}", body + b"--b--\r\n", "multipart/form-data; boundary=b")


def test_a_model_comes_and_goes_by_its_aliases(server: Server) -> None:
    given = {"orderId": ID, "pet": {"kind": "dog", "color": "blue"}, "note": "hi"}
    assert call(server, "order", {"order": given}) == call(server, "order", given) == (200, given)


def test_a_model_may_be_passed_on_by_its_fields_in_a_workflow() -> None:
    app = lamina.App("steps")

    @app.function()
    def made(id: str) -> Order:
        return Order(orderId=id)

    @app.function()
    def read(order: Order, id: str) -> bool:
        return str(order.order_id) == id

    @app.workflow()
    def both(id: str) -> Any:
        order = made(id)
        return read(order, order.order_id)

    with Server(app) as server:
        assert server.client.call("both", {"id": ID}) is True


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("order", {"orderId": "x"}, "order.orderId: Input should be a valid UUID"),
        ("order", {"orderId": ID, "note": "much too long"}, "order.note: Value error, too long"),
        ("orders", [{"orderId": ID}, {"orderId": ID, "pet": {"kind": "cow"}}], "orders.1.pet: Input tag 'cow'"),
        ("pet", {"kind": "dog", "color": "green"}, "pet.Dog.color: Input should be 'red' or 'blue'"),
        ("positive", 0, "x: Input should be greater than 0"),
        ("row", {"b": "red"}, "row.a is missing"),
        ("row", {"a": 1, "b": "green"}, "row.b: Invalid enum value 'green'"),
        ("mode", {"mode": "medium"}, "mode: Invalid enum value 'medium'"),
        ("mode", {"mode": "fast", "at": 11}, "at: Expected `int` <= 10"),
        ("sizes", {"parts": ["%%%"]}, "parts.0: '%%%' is no base64"),
        ("keys", {"names": {"x": "y"}}, "names: its names: a value where a whole number is needed"),
        ("whole", 1.5, "n: 1.5 is no whole number"),
        ("whole", {"n": 1, "on": "true"}, "on: 'true' is text where true or false is needed"),
        ("arrays", {"many": ["x"]}, "many.0: 'x' is no array of numbers"),
        ("arrays", {"many": [[1]], "one": "x"}, "one: 'x' is no array of numbers"),
    ],
)
def test_what_does_not_fit_the_annotation_is_the_callers_mistake(server: Server, name: str, value: Any, said: str) -> None:
    status, problem = call(server, name, value)
    assert status == 422
    assert said in problem["detail"]


def test_values_have_the_type_that_the_annotation_says(server: Server) -> None:
    assert call(server, "pet", {"pet": {"kind": "cat", "meows": 2}}) == (200, "Cat")
    assert call(server, "row", {"a": 1, "b": "red"}) == (200, "intColor")
    assert call(server, "sizes", {"parts": [base64.b64encode(b"abc").decode()]}) == (200, ["", 7, 3])
    assert call(server, "keys", {"names": {"1": "one"}}) == (200, "one")
    assert call(server, "whole", 2.0) == (200, [2, "int", False])
    assert call(server, "arrays", {"many": [[1, 2], [3]]}) == (200, [2, "NoneType"])
    assert call(server, "arrays", {"many": [[1, 2]], "one": [1]}) == (200, [2, "ndarray"])


def test_a_literal_that_is_refused_says_what_there_is(server: Server) -> None:
    assert call(server, "mode", {"mode": "x"})[1]["hint"] == "send 'fast' or 'slow'"


def test_a_result_is_what_pydantic_sends(server: Server) -> None:
    found = {"url": "https://a.example/b", "secret": "**********", "raw": "", "host": "a.example"}
    assert call(server, "page", "https://a.example/b") == (200, found)
    picture = base64.b64encode(b"\x89\xff").decode()
    assert call(server, "page", {"url": "https://a.example/b", "raw": picture}) == (200, {**found, "raw": picture})


def test_the_document_says_the_same(server: Server) -> None:
    _, found = send(server, "/openapi.json", b"", "")
    schemas = found["components"]["schemas"]
    assert set(schemas) == {"Cat", "Dog", "Color", "Order", "Filter", "Row", "Problem", "Run"}
    text = json.dumps(found)
    assert "$defs" not in text
    post = found["paths"]["/v1/functions/order"]["post"]
    properties = post["requestBody"]["content"]["application/json"]["schema"]["properties"]["order"]["properties"]
    assert properties["pet"]["anyOf"][0]["discriminator"]["mapping"] == {
        "cat": "#/components/schemas/Cat",
        "dog": "#/components/schemas/Dog",
    }
    assert "orderId" in post["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
    page = found["paths"]["/v1/functions/page"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert page["properties"]["host"] == {"readOnly": True, "title": "Host", "type": "string"}
    parts = found["paths"]["/v1/functions/sizes"]["post"]["requestBody"]["content"]
    assert parts["multipart/form-data"]["schema"]["properties"]["parts"]["items"] == {"type": "string", "format": "binary"}


def test_fields_of_a_model_are_a_form_too(server: Server) -> None:
    told = {"count": 3, "tags": ["a", "b"], "strict": True, "since": None, "inner": None}
    assert form(server, "filtered", [("count", "3"), ("tags", "a"), ("tags", "b"), ("strict", "on")]) == (200, told)
    assert form(server, "filtered", [("filter", json.dumps(told))]) == (200, told)
    assert files(server, "filtered", [("count", b"3", False)])[1]["count"] == 3
    status, problem = form(server, "filtered", [("count", "x")])
    assert (status, problem["detail"]) == (400, "count: must be a whole number, not 'x'")
    assert form(server, "filtered", [("cuont", "1")])[1]["detail"] == "filter.count: Field required"


def test_lists_are_named_as_axios_names_them(server: Server) -> None:
    two = [("parts[]", b"abc", True), ("parts[]", b"de", True), ("name", b"x", False)]
    assert files(server, "sizes", two) == (200, ["x", 7, 3, 2])
    assert files(server, "sizes", two[:1]) == (200, ["", 7, 3])
    assert form(server, "filtered", [("count", "1"), ("tags[]", "a")])[1]["tags"] == ["a"]


def test_an_input_that_was_left_empty_has_its_default(server: Server) -> None:
    assert files(server, "sizes", [("parts", b"a", True), ("limit", b"", False), ("name", b"", False)]) == (200, ["", 7, 1])
    assert form(server, "filtered", [("count", "1"), ("since", ""), ("strict", "")])[1]["since"] is None
    assert form(server, "whole", [("n", "")])[1]["detail"] == "n: must be a whole number, not ''"


def test_json_may_have_a_byte_order_mark_and_a_type_of_its_own(server: Server) -> None:
    path = "/v1/functions/anything"
    assert send(server, path, b'\xef\xbb\xbf{"x": 1}', "application/json") == (200, 1)
    assert send(server, path, b'\xef\xbb\xbf{"x": 1}', "application/x-www-form-urlencoded") == (200, 1)
    assert send(server, path, b'{"x": 1}', "application/ld+json; charset=utf-8") == (200, 1)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b'{"x": [1, NaN]}', "send one JSON value, in UTF-8; JSON has no NaN and no Infinity: null"),
        ('"x"'.encode("utf-16"), "this is UTF-16: send one JSON value, in UTF-8"),
    ],
)
def test_what_is_nearly_json_is_refused_with_the_reason(server: Server, body: bytes, hint: str) -> None:
    status, problem = send(server, "/v1/functions/anything", body, "application/json")
    assert (status, problem["hint"]) == (400, hint)


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (np.array(["cat", "dog"]), r"dtype str\d* \(.tolist\(\) makes a list of it\)"),
        ((one for one in "ab"), "yield from it"),
        ({"a": 1}.keys(), r"list\(...\) makes a list of it"),
        (map(str, [1]), r"list\(...\) makes a list of it"),
        (collections.deque([1]), r"list\(...\) makes a list of it"),
        (2**70, r"below -2\*\*63 or from 2\*\*64 on\n  hint: send it as text"),
    ],
)
def test_results_that_cannot_be_sent_say_what_to_return_instead(value: object, way: str) -> None:
    with pytest.raises(lamina.errors.BadValue, match=way):
        encoding.encode(value)
