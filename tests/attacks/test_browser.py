"""Web pages against a server (H6): DNS rebinding, cross-site calls, and what a page of an allowed origin may do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import BadValue
from lamina.gateway.bootstrap import Gateway
from lamina.server.exchange import PAGE_POLICY, Exchange
from lamina.server.http_server import HttpServer
from lamina.server.origins import OriginPolicy, OriginSettings, parse_origins
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import Answer, raw, run, shared, write_app

pytestmark = pytest.mark.live

REQUESTS = [
    ("GET", "/v1/state", b""),
    ("GET", "/v1/status", b""),
    ("GET", "/v1/functions", b""),
    ("GET", "/v2/models/echo", b""),
    ("POST", "/v1/functions/echo", b"1"),
    ("POST", "/v2/models/echo/infer", b"{}"),
    ("POST", "/v2/repository/models/echo/unload", b"{}"),
    ("POST", "/v2/repository/models/echo/load", b"{}"),
    ("PUT", "/v1/state/k", b"1"),
    ("DELETE", "/v1/state/k", b""),
]
EVIL = "http://evil.example"


def lines(method: str, path: str, body: bytes = b"", host: str = "127.0.0.1", **headers: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("app"))) as gateway:
        yield gateway


def ask(port: int, method: str, path: str, body: bytes = b"", host: str = "127.0.0.1", **headers: str) -> Answer:
    found = asyncio.run(raw(port, lines(method, path, body, host, **headers)))
    assert found is not None
    return found


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_h6_a_name_that_was_made_to_resolve_here_is_not_answered(gateway: Gateway, method: str, path: str, body: bytes) -> None:
    rebound = f"evil.example:{gateway.port}"
    answer = ask(gateway.port, method, path, body, rebound, origin=f"http://{rebound}", content_type="application/json")
    assert answer.status == 403 and "evil.example" in answer.json["detail"]


@pytest.mark.parametrize("authority", ["evil.example", "127.0.0.1@evil.example", "[127.0.0.1]evil.example", "127.0.0.1#evil"])
def test_h6_the_host_in_a_request_target_is_checked_and_not_the_one_of_the_header(gateway: Gateway, authority: str) -> None:
    answer = ask(gateway.port, "GET", f"http://{authority}/v1/status", b"", "127.0.0.1")
    assert answer.status in (400, 403)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"referer": f"{EVIL}/x"},
    ],
    ids=str,
)
def test_h6_a_page_from_elsewhere_starts_nothing(gateway: Gateway, headers: dict[str, str], kind: str) -> None:
    kinds = {"content_type": kind} if kind else {}
    before = gateway.metrics.totals()["answered"]
    assert ask(gateway.port, "POST", "/v1/functions/echo", b"1", **headers, **kinds).status == 403
    assert gateway.metrics.totals()["answered"] == before


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8700", "127.8.9.1", "[::1]", "[::1]:8700", "localhost.:1"]
)
def test_names_of_this_machine_are_answered(gateway: Gateway, host: str) -> None:
    assert ask(gateway.port, "GET", "/v1/functions", host=host).status == 200
    own = ask(gateway.port, "POST", "/v1/functions/echo", b"1", host, origin=f"http://{host}", sec_fetch_site="same-origin")
    assert own.status == 200


@pytest.mark.parametrize(
    "host", ["[127.0.0.1]evil.example", "127.0.0.1.evil.example", "localhost:80:80", "a b", "127.0.0.1@evil", "", "10.0.0.1"]
)
def test_low_nothing_else_passes_for_one(gateway: Gateway, host: str) -> None:
    assert ask(gateway.port, "GET", "/v1/functions", host=host).status in (400, 403)


def test_programs_send_no_origin_and_go_on_as_before(gateway: Gateway) -> None:
    """As curl does it: JSON under a form's type, multipart, plain text."""
    form = b'--x\r\nContent-Disposition: form-data; name="x"\r\n\r\nhi\r\n--x--\r\n'
    for body, kind in (
        (b"1", "application/x-www-form-urlencoded"),
        (form, "multipart/form-data; boundary=x"),
        (b"hi", "text/plain"),
    ):
        assert ask(gateway.port, "POST", "/v1/functions/echo", body, content_type=kind).status == 200
    assert asyncio.run(raw(gateway.port, b"GET /healthz HTTP/1.0\r\n\r\n")).status == 200  # type: ignore[union-attr]


def test_a_link_that_is_followed_may_lead_here_and_a_frame_or_a_form_may_not(gateway: Gateway) -> None:
    visit: dict[str, str] = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(gateway.port, "GET", "/", sec_fetch_dest="document", **visit).status == 200
    assert ask(gateway.port, "GET", "/", sec_fetch_dest="iframe", **visit).status == 403
    assert ask(gateway.port, "POST", "/v1/functions/echo", b"1", sec_fetch_dest="document", **visit).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
        {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"},  # a browser that says no more than that
    ],
)
def test_h6_a_link_starts_no_call(gateway: Gateway, headers: dict[str, str]) -> None:
    answer = ask(gateway.port, "GET", "/v1/functions/echo/events?x=1", **headers)
    assert answer.status == 400 and b"a link to it does not" in answer.body


@pytest.mark.parametrize("ingress", [0, 1])
def test_pages_of_an_allowed_origin_are_asked_about_and_let_in(tmp_path: Path, ingress: int) -> None:
    async def work() -> None:
        origins = OriginSettings(hosts=("models.example",), cors=("https://console.example",))
        async with managed(write_app(tmp_path), tmp_path / "kept", origins=origins, ingress=ingress, grpc_port=0) as server:
            port = server.gateway.port

            async def send(method: str, path: str, body: bytes = b"", to: int = port, **headers: str) -> Answer:
                found = await raw(to, lines(method, path, body, "models.example", **headers))
                assert found is not None
                return found

            mine = {"origin": "https://console.example", "sec_fetch_site": "cross-site"}
            wish = {
                "access_control_request_method": "POST",
                "access_control_request_headers": "authorization, lamina-deadline-ms",
            }
            preflight = await send("OPTIONS", "/v1/functions/echo", **mine, **wish)
            assert preflight.status == 204 and preflight.headers["access-control-allow-origin"] == mine["origin"]
            assert preflight.headers["access-control-allow-headers"] == "authorization, lamina-deadline-ms"
            assert (
                "POST" in preflight.headers["access-control-allow-methods"]
                and "access-control-allow-credentials" not in preflight.headers
            )
            called = await send("POST", "/v1/functions/echo", b"1", **mine)
            assert (called.status, called.headers["access-control-allow-origin"], called.headers["vary"]) == (
                200,
                mine["origin"],
                "origin",
            )
            assert (await send("OPTIONS", "/v1/functions/echo", origin=EVIL, **wish)).status == 403
            assert (
                await send("POST", "/v1/functions/echo", b"1", **{**mine, "origin": "https://console.example.evil"})
            ).status == 403
            assert "access-control-allow-origin" not in (await send("GET", "/v1/functions")).headers
            managing = await raw(server.admin.port, lines("GET", "/v1/apps", **mine))
            assert managing is not None and managing.status == 403  # calls are allowed, management is not

    run(work)


def test_grpc_is_checked_too(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")

    async def work() -> list[Any]:
        async with managed(write_app(tmp_path), tmp_path / "kept", grpc_port=0) as server:

            def live(authority: str, *metadata: tuple[str, str]) -> Any:
                options = [("grpc.default_authority", authority)] if authority else []
                with grpc.insecure_channel(f"127.0.0.1:{server.gateway.grpc_port}", options=options) as channel:
                    try:
                        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", metadata=metadata, timeout=10)
                    except grpc.RpcError as error:
                        return error.code().name
                return "OK"

            tries = [("",), ("localhost",), ("evil.example",), ("", ("origin", EVIL))]
            return [await asyncio.to_thread(live, *one) for one in tries]

    assert run(work) == ["OK", "OK", "PERMISSION_DENIED", "PERMISSION_DENIED"]


def test_pages_say_what_they_may_load_and_that_they_are_shown_in_no_frame() -> None:
    async def work() -> tuple[Answer, Answer]:
        def page(request: Any, exchange: Exchange) -> None:
            kind = b"text/html; charset=utf-8" if request.path == b"/page" else b"application/json"
            exchange.respond(200, b"<p>", kind)

        server = HttpServer(page, lambda *_: (b"", b""))
        port = await server.start("127.0.0.1", 0)
        found = [await raw(port, lines("GET", path)) for path in ("/page", "/data")]
        await server.stop()
        assert found[0] is not None and found[1] is not None
        return found[0], found[1]

    page, data = run(work)
    for name in ("content-security-policy", "referrer-policy", "x-frame-options"):
        assert name.encode() in PAGE_POLICY and name in page.headers and name not in data.headers
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == data.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("origin", ["*", "null", "https://a.example/path", "a.example", "ftp://a.example"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(BadValue, match="--cors-origin"):
        parse_origins((), (origin,))


@pytest.mark.parametrize("host", ["http://a.example", "a.example/x", "a b", ""])
def test_a_host_that_is_no_name_is_refused_at_start(host: str) -> None:
    with pytest.raises(BadValue, match="--allow-host"):
        parse_origins((host,), ())


@given(st.text(alphabet="alocht127.0:[]@/ e", max_size=24))
def test_whatever_a_host_header_says_only_this_machine_s_names_pass(text: str) -> None:
    policy = OriginPolicy("127.0.0.1")
    if policy.refusal("GET", {b"host": text.encode()}) is None:
        name = text.rpartition(":")[0] if text.count(":") == 1 else text
        assert (
            name.rstrip(".").lower() in ("localhost", "")
            or name.strip("[]").rstrip(".").startswith(("127.", ":"))
            or "]:" in text
        )


def test_on_a_public_address_any_address_is_a_name_of_the_server() -> None:
    policy = OriginPolicy("0.0.0.0", OriginSettings(hosts=("models.example",)))
    for host, passes in (("10.1.2.3:8700", True), ("[fd00::1]", True), ("Models.Example:443", True), ("other.example", False)):
        assert (policy.refusal("GET", {b"host": host.encode()}) is None) == passes, host
