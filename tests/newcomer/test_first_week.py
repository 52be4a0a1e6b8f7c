"""What a product engineer meets in the first week: errors field by field, readiness that names a function, drawings, buckets."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

import lamina
from lamina.errors import BadValue, NotFound
from lamina.testing import Server

pydantic = pytest.importorskip("pydantic")


def ask(server: Server, method: str, path: str, body: bytes = b"") -> tuple[int, Any, str]:
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    link.request(method, path, body, {"content-type": "application/json"})
    answer = link.getresponse()
    data, kind = answer.read(), answer.headers.get("content-type", "")
    link.close()
    return answer.status, json.loads(data) if "json" in kind and data else data, kind


class Item(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    name: str
    price: float
    tags: list[int] = []


def shop() -> lamina.App:
    app = lamina.App("shop")

    @app.function()
    def buy(item: Item) -> float:
        return item.price

    @app.function()
    def label(x: float) -> str:
        return f"{x} EUR"

    @app.workflow()
    def order(x: float) -> Any:
        return label(x)

    return app


def test_errors_of_a_pydantic_model_come_field_by_field_on_one_line() -> None:
    with Server(shop()) as server:
        status, problem, _ = ask(server, "POST", "/v1/functions/buy", b'{"item": {"price": "much", "tags": [1, "x"]}}')
    assert status in (400, 422)
    assert [one["field"] for one in problem["errors"]] == ["item.name", "item.price", "item.tags.1"]
    assert "\n" not in problem["detail"] and "https://" not in problem["detail"]


def test_a_workflow_is_drawn_in_a_notebook() -> None:
    bundle = shop().workflows["order"]._repr_mimebundle_()
    assert bundle["text/markdown"].startswith("```mermaid\n") and "label" in bundle["text/markdown"]


def test_readiness_names_a_function_that_cannot_be_loaded() -> None:
    app = lamina.App("broken")

    @app.function()
    class Model:
        def load(self) -> None:
            raise FileNotFoundError("/secret/weights.pt")

        def __call__(self, x: int) -> int:
            return x

    @app.function(scale=lamina.Scale(min=1))
    def fine(x: int) -> int:
        return x

    with Server(app) as server:
        with pytest.raises(lamina.errors.LaminaError):
            server.client.call("model", {"x": 1}, deadline="20s")
        server.gateway.drain()
        status, problem, _ = ask(server, "GET", "/readyz")
    assert status == 503
    assert "model (FileNotFoundError) cannot be loaded" in problem["detail"] and "secret" not in json.dumps(problem)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def test_objects_of_a_bucket_are_put_listed_read_and_deleted() -> None:
    with Server(shop()) as server:
        client = server.client
        client.put_object("photos", "2026/a.png", PNG)
        client.put_object("photos", "2026/b.bin", b"b")
        client.put_object("other", "a", b"1")
        assert [one["key"] for one in client.objects("photos", "2026/")] == ["2026/a.png", "2026/b.bin"]
        assert client.get_object("photos", "2026/a.png") == PNG
        assert ask(server, "GET", "/v1/buckets/photos/2026/a.png")[2] == "image/png"
        assert ask(server, "GET", "/v1/buckets")[1] == [{"bucket": "other", "objects": 1}, {"bucket": "photos", "objects": 2}]
        client.delete_object("photos", "2026/a.png")
        with pytest.raises(NotFound, match=r"no object '2026/a\.png' in bucket 'photos'"):
            client.get_object("photos", "2026/a.png")


@pytest.mark.parametrize(("key", "data"), [("../x", b"1"), ("a//b", b"1"), ("a", b"")])
def test_keys_and_contents_that_cannot_be_are_refused(key: str, data: bytes) -> None:
    with Server(shop()) as server, pytest.raises(BadValue):
        server.client.put_object("photos", key, data)
