"""Requests as people send them: curl, forms, base64, responses of one's own. Problems P4 and P5 of a newcomer's first hour, and
the small ones about status, content type and headers."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import encoding
from lamina.gateway.routes.http_codec import VALUE
from lamina.sdk.client import Client
from lamina.server.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    HTTP_1_1_REQUIRED,
    NO_ERROR,
    PREFACE,
    SETTINGS,
    frame,
)
from tests.serving import Answer, Browser, run, served, shared, write_app

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl sends these requests")

APP = """
import enum
from dataclasses import dataclass

import numpy as np

import lamina

app = lamina.App("newcomer")
WARM = lamina.Scale(min=1, max=1)
PNG = b"\\x89PNG\\r\\n\\x1a\\n" + bytes(range(256))


class Mode(enum.Enum):
    FAST = "fast"


@dataclass
class Box:
    x: int
    data: bytes = b""


@app.function(scale=WARM)
def thumb(image: bytes, width: int = 32, gray: bool = False, mode: Mode = Mode.FAST) -> dict:
    return {"size": len(image), "width": width, "gray": gray, "mode": mode.value}


@app.function(scale=WARM)
def one(text: str) -> str:
    return text.upper()


@app.function(scale=WARM)
def two(text: str, lang: str = "en") -> str:
    return f"{text}/{lang}"


@app.function(scale=WARM)
def boxed(box: Box, tags: list[int] | None = None) -> dict:
    return {"x": box.x, "size": len(box.data), "tags": tags}


@dataclass
class Size:
    width: int
    height: int = 9


@app.function(scale=WARM)
def sized(size: Size) -> Size:
    return size


@app.function(scale=WARM)
def twice(x: np.ndarray) -> np.ndarray:
    return x * 2


@app.function(scale=WARM)
def fails(x: int) -> int:
    raise KeyError(x)


@app.function(scale=WARM)
def files(pages: list[bytes]) -> list[int]:
    return [len(page) for page in pages]


@app.function(scale=WARM)
def answer(kind: str):
    if kind == "missing":
        raise lamina.Response({"error": "no such page"}, status=404, headers={"X-Why": "gone"})
    if kind == "broken":
        raise lamina.Response("cannot now", status=503, headers={"Retry-After": "7"})
    if kind == "created":
        return lamina.Response({"id": 7}, status=201, headers={"Location": "/things/7"})
    if kind == "html":
        return lamina.Response("<h1>é</h1>", content_type="text/html")
    if kind == "csv":
        return lamina.Response("a,b", content_type="text/csv")
    if kind == "split":
        return lamina.Response("x", headers={"x-a": "b\\r\\nx-evil: 1"})
    return PNG


@app.function(scale=WARM)
def pair(a: int, b: int) -> int:
    return a + b


@app.function(scale=WARM)
def same(x):
    return x


@app.workflow()
def flow(kind):
    return answer(kind)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with shared(write_app(tmp_path_factory.mktemp("newcomer"), APP)) as gateway:
        yield gateway.url


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "in.png"
    path.write_bytes(b"\x89PNG" + bytes(96))
    return path


def curl(url: str, *arguments: str) -> tuple[int, Any]:
    made = subprocess.run(["curl", "-s", "-w", "\n%{http_code}", *arguments, url], capture_output=True, check=True, timeout=60)
    body, _, status = made.stdout.rpartition(b"\n")
    return int(status), json.loads(body) if body else None


def test_p4_a_file_and_a_number_are_sent_with_a_form(url: str, png: Path):
    found = curl(f"{url}/v1/functions/thumb", "-F", f"image=@{png}", "-F", "width=64", "-F", "gray=true", "-F", "mode=fast")
    assert found == (200, {"size": 100, "width": 64, "gray": True, "mode": "fast"})


def test_p4_a_part_that_says_it_is_json_is_json(url: str, png: Path):
    status, found = curl(f"{url}/v1/functions/thumb", "-F", f"image=@{png}", "-F", "width=64;type=application/json")
    assert (status, found["width"]) == (200, 64)


def test_p4_bytes_in_json_are_base64(url: str):
    body = json.dumps({"image": base64.b64encode(b"12345").decode(), "width": 64})
    status, found = curl(f"{url}/v1/functions/thumb", "--json", body)
    assert (status, found["size"], found["width"]) == (200, 5, 64)


def test_p4_bytes_alone_are_the_body_beside_optional_parameters(url: str, png: Path):
    status, found = curl(f"{url}/v1/functions/thumb", "--data-binary", f"@{png}", "-H", "content-type: image/png")
    assert (status, found["size"]) == (200, 100)


def test_text_that_is_no_base64_is_refused_with_ways_out(url: str):
    status, found = curl(f"{url}/v1/functions/thumb", "--json", '{"image": "not base64!"}')
    assert status == 422
    assert "not base64" in found["detail"]
    assert "file in a form" in found["hint"]


def test_a_field_of_a_form_that_is_no_number_is_named(url: str, png: Path):
    status, found = curl(f"{url}/v1/functions/thumb", "-F", f"image=@{png}", "-F", "width=wide")
    assert status == 400
    assert found["detail"] == "width: must be a whole number, not 'wide'"


def test_urlencoded_forms_are_forms(url: str):
    assert curl(f"{url}/v1/functions/two", "-d", "text=hi+there", "-d", "lang=de") == (200, "hi there/de")
    assert curl(f"{url}/v1/functions/one", "--data-urlencode", "text=a&b") == (200, "A&B")


def test_repeated_fields_and_files_are_a_list(url: str, png: Path):
    assert curl(f"{url}/v1/functions/files", "-F", f"pages=@{png}", "-F", f"pages=@{png}") == (200, [100, 100])
    status, found = curl(f"{url}/v1/functions/boxed", "-F", 'box={"x": 3, "data": "aGk="}', "-F", "tags=1", "-F", "tags=2")
    assert (status, found) == (200, {"x": 3, "size": 2, "tags": [1, 2]})


@pytest.mark.parametrize(("target", "found"), [("one", "HI"), ("two", "hi/en")])
@pytest.mark.parametrize("body", ['"hi"', '{"text": "hi"}'])
def test_p5_an_optional_parameter_more_breaks_no_client(url: str, target: str, body: str, found: str):
    assert curl(f"{url}/v1/functions/{target}", "--json", body) == (200, found)


def test_p5_a_parameter_that_is_an_object_takes_it_bare_and_by_name(url: str):
    for body in ('{"x": 3}', '{"box": {"x": 3}}'):
        assert curl(f"{url}/v1/functions/boxed", "--json", body) == (200, {"x": 3, "size": 0, "tags": None})


def test_fields_that_a_dataclass_left_to_their_defaults_come_back(url: str):
    assert curl(f"{url}/v1/functions/sized", "--json", '{"width": 3}') == (200, {"width": 3, "height": 9})


def test_a_list_of_numbers_is_an_array_where_one_is_annotated(url: str):
    assert curl(f"{url}/v1/functions/twice", "--json", '{"x": [[1, 2], [3, 4]]}') == (200, [[2, 4], [6, 8]])
    status, found = curl(f"{url}/v1/functions/twice", "--json", '{"x": [[1], [2, 3]]}')
    assert (status, found["hint"]) == (422, "send nested lists of equal lengths")


def test_an_offer_of_http_2_is_passed_over(url: str):
    """curl --http2 and the client of Java's library offer it with their first request, and go on without."""
    offer = ("-H", "Connection: Upgrade, HTTP2-Settings", "-H", "Upgrade: h2c", "-H", "HTTP2-Settings: AAMAAABk")
    assert curl(f"{url}/v1/functions/one", *offer, "--json", '"hi"') == (200, "HI")
    assert curl(f"{url}/v1/functions/one", *offer)[0] == 200


def test_http_2_with_prior_knowledge_is_told_in_http_2_that_there_is_none(url: str):
    asked = frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x82\x84\x86\x41\x01a")  # GET / http, authority a
    for flight, status, code in ((asked, b"505", NO_ERROR), (b"", b"", HTTP_1_1_REQUIRED)):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + flight)
            found = b""
            while piece := connection.recv(65536):
                found += piece
        replies = {}
        while found:
            size, kind = int.from_bytes(found[:3], "big"), found[3]
            replies[kind], found = found[9 : 9 + size], found[9 + size :]
        assert list(replies) == ([SETTINGS, HEADERS, DATA, GOAWAY] if status else [SETTINGS, GOAWAY])
        assert status in replies.get(HEADERS, b"") and replies[GOAWAY][4:8] == code.to_bytes(4, "big")
        assert not status or json.loads(replies[DATA])["status"] == 505


def test_a_socket_at_the_path_of_a_function_is_told_the_right_one(url: str):
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    ask = (
        "-H",
        "Connection: Upgrade",
        "-H",
        "Upgrade: websocket",
        "-H",
        "Sec-WebSocket-Version: 13",
        "-H",
        f"Sec-WebSocket-Key: {key}",
    )
    status, problem = curl(f"{url}/v1/functions/one", *ask)
    assert status == 426 and "/v1/functions/one/ws" in problem["detail"]


def test_the_body_behind_an_offer_of_http_2_may_come_in_pieces(url: str):
    head = (
        b"POST /v1/functions/one HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 8\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as connection:
        for piece in (head[:40], head[40:], b'"he', b"llo", b'!"', b"GET / HTTP/1.1\r\n\r\n"):
            with contextlib.suppress(OSError):  # it may be answered, and closed, before the last
                connection.sendall(piece)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                found += piece
    assert found.startswith(b"HTTP/1.1 200") and found.endswith(b'"HELLO!"') and b"connection: close" in found.lower()


def test_text_alone_is_the_body_of_a_str(url: str):
    assert curl(f"{url}/v1/functions/one", "--data-binary", "hi there", "-H", "content-type: text/plain") == (200, "HI THERE")
    assert curl(f"{url}/v1/functions/one", "-d", "hi") == (200, "HI")


@pytest.mark.parametrize("body", ['{"size":', "{'width': 1}", '{"width": 1,}', "nonsense"])
def test_json_with_a_mistake_is_no_value_of_an_object(url: str, body: str):
    status, found = curl(f"{url}/v1/functions/sized", "-d", body)  # curl calls it a form
    assert status == 400 and found["detail"].startswith("body: not JSON")


@pytest.mark.parametrize("body", ['{"a": 1,}', "[1", '"open'])
def test_what_looks_like_json_with_a_mistake_is_refused_where_anything_is_taken(url: str, body: str):
    status, found = curl(f"{url}/v1/functions/same", "-d", body)
    assert status == 400 and found["detail"].startswith("body: not JSON")


@pytest.mark.parametrize("kind", ["image/png", "application/xml", "application/octet-stream"])
def test_bytes_are_no_number(url: str, png: Path, kind: str):
    status, found = curl(f"{url}/v1/functions/fails", "--data-binary", f"@{png}", "-H", f"content-type: {kind}")
    assert (status, found["hint"]) == (422, "send a number as JSON, with content-type: application/json")


def test_inputs_in_the_query_are_refused_and_other_names_are_not(url: str, png: Path):
    post = ("--data-binary", f"@{png}", "-H", "content-type: image/png")
    status, found = curl(f"{url}/v1/functions/thumb?width=64", *post)
    assert (status, found["detail"]) == (400, "width: given in the query")
    assert "a form with a field of that name" in found["hint"]
    assert curl(f"{url}/v1/functions/thumb?_=1700000000&utm", *post)[0] == 200


def test_every_field_that_does_not_fit_has_its_name_in_the_errors(url: str):
    status, found = curl(f"{url}/v1/functions/sized", "--json", '{"size": {"width": "wide"}}')
    assert status == 422
    assert found["errors"] == [{"field": "size.width", "message": "'wide' is text where a whole number is needed"}]


def test_no_answer_says_where_files_lie_on_the_server(url: str):
    status, found = curl(f"{url}/v1/functions/fails", "--json", "3")
    assert status == 500 and 'File "app.py", line' in found["trace"] and "/app.py" not in found["trace"]


def test_two_required_parameters_need_their_names(url: str, png: Path):
    status, found = curl(f"{url}/v1/functions/pair", "--json", "[1, 2]")
    assert (status, found["detail"]) == (400, "body: list given where an object is needed")
    status, found = curl(f"{url}/v1/functions/pair", "--data-binary", f"@{png}", "-H", "content-type: image/png")
    assert (status, found["detail"]) == (400, "content-type: 'image/png' carries one input; this takes 2")


# ------------------------------------------------------------------------------ responses


def asked(url: str, path: str, kind: str) -> Answer:
    async def work() -> Answer:
        async with Browser(int(url.rpartition(":")[2])) as browser:
            return await browser.post(path, kind)

    return run(work)


@pytest.mark.parametrize("path", ["/v1/functions/answer", "/v1/workflows/flow"])
def test_a_function_has_its_own_status_headers_and_content_type(url: str, path: str):
    created = asked(url, path, "created")
    assert (created.status, created.json, created.headers["location"]) == (201, {"id": 7}, "/things/7")
    missing = asked(url, path, "missing")
    assert (missing.status, missing.json, missing.headers["x-why"]) == (404, {"error": "no such page"}, "gone")
    broken = asked(url, path, "broken")
    assert (broken.status, broken.body, broken.headers["retry-after"]) == (503, b"cannot now", "7")
    csv = asked(url, path, "csv")
    assert (csv.headers["content-type"], csv.body) == ("text/csv", b"a,b")
    html = asked(url, path, "html")
    assert (html.headers["content-type"], html.body) == ("text/html; charset=utf-8", "<h1>é</h1>".encode())


def test_a_picture_comes_back_as_one(url: str):
    picture = asked(url, "/v1/functions/answer", "picture")
    assert (picture.status, picture.headers["content-type"]) == (200, "image/png")


def test_p18_a_raised_404_is_no_failure_of_the_service(url: str):
    def failures() -> str:
        text = subprocess.run(["curl", "-s", f"{url}/metrics"], capture_output=True, check=True).stdout.decode()
        return next(line for line in text.splitlines() if 'lamina_calls_total{outcome="failed",target="answer"}' in line)

    before = failures()
    assert asked(url, "/v1/functions/answer", "missing").status == 404
    assert failures() == before


def test_a_header_cannot_be_split(url: str):
    answer = asked(url, "/v1/functions/answer", "split")
    assert answer.status == 500
    assert "x-evil" not in answer.headers


def test_a_client_of_our_own_gets_the_response_as_a_value(url: str):
    with Client(url) as client:
        found = client.call("answer", {"kind": "created"})
        assert (found.status, found.body, found.headers) == (201, {"id": 7}, {"location": "/things/7"})


def test_no_client_makes_a_response(url: str):
    body = encoding.encode({"x": encoding.Response("mine", content_type="text/html")})

    async def work() -> Answer:
        async with Browser(int(url.rpartition(":")[2])) as browser:
            return await browser.ask("POST", "/v1/functions/same", body, VALUE.decode())

    assert run(work).status == 400


def test_all_of_it_passes_through_ingress_processes(tmp_path: Path, png: Path):
    async def work() -> list[Answer]:
        async with served(write_app(tmp_path, APP), ingress=1) as gateway, Browser(gateway.port) as browser:
            form = b"text=hi&lang=de"
            return [
                await browser.ask("POST", "/v1/functions/two", form, "application/x-www-form-urlencoded"),
                await browser.post("/v1/functions/answer", {"kind": "created"}),
                await browser.post("/v1/functions/answer", {"kind": "missing"}),
                await browser.post("/v1/functions/answer", {"kind": "picture"}),
            ]

    form, created, missing, picture = run(work)
    assert form.json == "hi/de"
    assert (created.status, created.headers["location"]) == (201, "/things/7")
    assert (missing.status, missing.headers["x-why"]) == (404, "gone")
    assert picture.headers["content-type"] == "image/png"
