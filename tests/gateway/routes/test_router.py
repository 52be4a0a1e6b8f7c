"""Router over real sockets and real workers."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import encoding
from lamina.core.actions import FailCall
from lamina.errors import NoCapacity
from lamina.gateway.routes.problems import failure_problem
from tests.serving import Answer, Browser, run, served, shared, write_app

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


@pytest.fixture(scope="module")
def port(app: Path) -> Iterator[int]:
    with shared(app) as gateway:
        yield gateway.port


Question = tuple[Any, ...]


async def answers(port: int, questions: tuple[Question, ...]) -> list[Answer]:
    """Asked one after another on one connection."""
    found = []
    async with Browser(port) as browser:
        for method, path, *rest in questions:
            body, kind, headers = [*rest, *(b"", "application/json", {})[len(rest) :]]
            found.append(await browser.ask(method, path, body, kind, **headers))
    return found


def asked(port: int, *questions: Question) -> list[Answer]:
    return list(run(lambda: answers(port, questions)))


def asked_of_another(app: Path, *questions: Question, **options: Any) -> list[Answer]:
    """Of a server of its own."""

    async def work() -> list[Answer]:
        async with served(app, **options) as gateway:
            return await answers(gateway.port, questions)

    return list(run(work))


def test_a_call_is_answered_with_its_value_and_what_it_took(port: int) -> None:
    (answer,) = asked(port, ("POST", "/v1/functions/echo", b'{"a": [1, 2.5, null]}'))
    assert answer.status == 200
    assert answer.json == {"a": [1, 2.5, None]}
    assert float(answer.headers["lamina-latency-ms"]) > 0
    assert answer.headers["lamina-batch"] == "1"
    assert re.fullmatch(r"cpu0/\d+", answer.headers["lamina-slice"])
    assert float(answer.headers["lamina-cost"]) > 0
    assert {"lamina-call-id", "lamina-queue-ms", "lamina-cold-start-ms", "lamina-retries"} <= answer.headers.keys()


def test_bodies_come_as_json_values_bytes_and_parts(port: int) -> None:
    form = b'--B\r\nContent-Disposition: form-data; name="x"; filename="f"\r\n\r\n\x00\xffraw\r\n--B--\r\n'
    encoded = encoding.encode({"x": b"\x00\xffraw"})
    as_bytes, as_value, as_parts, back = asked(
        port,
        ("POST", "/v1/functions/echo", b"\x00\xffraw", "image/png"),
        ("POST", "/v1/functions/echo", encoded, "application/vnd.lamina.value"),
        ("POST", "/v1/functions/echo", form, "multipart/form-data; boundary=B"),
        ("POST", "/v1/functions/echo", encoded, "application/vnd.lamina.value", {"Accept": "application/vnd.lamina.value"}),
    )
    assert [a.body for a in (as_bytes, as_value, as_parts)] == [b"\x00\xffraw"] * 3
    assert as_bytes.headers["content-type"] == "application/octet-stream"
    assert encoding.decode(back.body) == b"\x00\xffraw"


@pytest.mark.parametrize("ingress", [0, 1])
def test_packed_bodies_are_not_taken_for_what_they_hold(app: Path, ingress: int) -> None:
    """Bytes of any kind are one input: compressed ones would reach the function as they are, unnoticed."""
    path = "/v1/functions/echo"
    packed, unknown, plain = asked_of_another(
        app,
        ("POST", path, gzip.compress(b"raw"), "image/png", {"Content-Encoding": "gzip"}),
        ("POST", path, b"raw", "image/png", {"Content-Encoding": "br"}),
        ("POST", path, b"raw", "image/png", {"Content-Encoding": "Identity"}),
        ingress=ingress,
    )
    assert [packed.status, unknown.status, plain.status] == [415, 415, 200]
    assert "'gzip'" in packed.json["detail"] and packed.headers["accept-encoding"] == "identity"


def test_several_inputs_come_by_name_and_defaults_may_be_left_out(port: int) -> None:
    both, one, none = asked(
        port,
        ("POST", "/v1/functions/add", b'{"a": 1, "b": 2}'),
        ("POST", "/v1/functions/add", b'{"a": 1}'),
        ("POST", "/v1/functions/nothing"),
    )
    assert [both.json, one.json, none.json] == [3, 11, "done"]


@pytest.mark.parametrize(
    ("path", "body", "kind", "names"),
    [
        ("add", b'{"b": 2}', "application/json", "a"),
        ("add", b'{"a": 1, "c": 2}', "application/json", "c"),
        ("nothing", b"5", "application/json", "no input"),
        ("echo", b'{"a": 1', "application/json", "JSON"),
        ("echo", b"1e999", "application/json", "JSON"),
        ("echo", b"NaN", "application/json", "JSON"),
        ("echo", b'"\xff\xfe"', "application/json", "JSON"),
        ("echo", b'"\\ud800"', "application/json", "JSON"),
        ("echo", b"[" * 10_000 + b"]" * 10_000, "application/json", "nested"),
        ("echo", b"[" * 65 + b"]" * 65, "application/json", "nested"),
        ("echo", b"1" * 5_000, "application/json", ""),
        ("echo", b"\xc1", "application/vnd.lamina.value", "value"),
        ("nothing", encoding.encode([1]), "application/vnd.lamina.value", "no input"),
        ("echo", b"--B", "multipart/form-data; boundary=" + "B" * 10_000, "boundary"),
        ("echo", b"--B\r\n\r\nx\r\n--B--", "multipart/form-data; boundary=B", "part"),
    ],
)
def test_bad_bodies_are_refused_with_what_is_wrong(port: int, path: str, body: bytes, kind: str, names: str) -> None:
    (answer,) = asked(port, ("POST", f"/v1/functions/{path}", body, kind))
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json
    assert names in problem["detail"] + problem.get("hint", "")
    assert problem["id"] == answer.headers["lamina-call-id"]


@pytest.mark.parametrize(
    ("header", "value"),
    [("Lamina-Deadline-Ms", "soon"), ("Lamina-Deadline-Ms", "-1"), ("Lamina-Deadline-Ms", "nan"), ("Lamina-Priority", "99")],
)
def test_bad_wishes_are_named(port: int, header: str, value: str) -> None:
    (answer,) = asked(port, ("POST", "/v1/functions/echo", b"1", "application/json", {header: value}))
    assert answer.status == 400
    assert header.lower() in answer.json["detail"]


@pytest.mark.parametrize(
    ("header", "meant"),
    [
        ("Lamina-Deadline", "did you mean 'lamina-deadline-ms'?"),
        ("Lamina-Dedline-Ms", "did you mean 'lamina-deadline-ms'?"),
        ("LAMINA-PRIO", "did you mean 'lamina-priority'?"),
        ("lamina-cost", "it is one of answers; did you mean 'lamina-cost-limit'?"),
        ("Lamina-Tenant", "there are lamina-deadline-ms, lamina-priority, lamina-cost-limit, lamina-objective"),
    ],
)
def test_a_header_that_would_be_ours_and_is_not_is_named_with_the_one_meant(port: int, header: str, meant: str) -> None:
    (answer,) = asked(port, ("POST", "/v1/functions/echo", b"1", "application/json", {header: "50"}))
    assert (answer.status, answer.headers["content-type"]) == (400, "application/problem+json")
    assert (answer.json["detail"], answer.json["hint"]) == (f"{header.lower()!r} is no header of a request", meant)


@pytest.mark.parametrize("path", ["/v1/workflows/twice", "/v2/models/echo/infer", "/v1/status", "/nowhere"])
def test_a_misnamed_header_is_told_wherever_it_is_sent_and_the_next_request_is_served(port: int, path: str) -> None:
    wrong = ("POST", path, b"{}", "application/json", {"Lamina-Deadline": "50"})
    right = ("POST", "/v1/functions/echo", b"1", "application/json", {"Lamina-Deadline-Ms": "5000"})
    assert [answer.status for answer in asked(port, wrong, wrong, right)] == [400, 400, 200]


def test_the_server_as_a_whole_can_be_asked_for_its_options(port: int) -> None:
    whole, target, other = asked(port, ("OPTIONS", "*"), ("OPTIONS", "/v1/functions/echo"), ("GET", "*"))
    assert [whole.status, target.status, other.status] == [204, 405, 404]


def test_what_is_not_there_is_not_found_and_wrong_methods_are_told(port: int) -> None:
    unknown, workflow_as_function, deleted, posted = asked(
        port,
        ("POST", "/v1/functions/nope", b"1"),
        ("POST", "/v1/functions/twice", b"1"),
        ("DELETE", "/v1/functions/echo"),
        ("POST", "/healthz"),
    )
    assert [unknown.status, workflow_as_function.status, deleted.status, posted.status] == [404, 404, 405, 405]
    assert deleted.headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize("path", ["/v1/apps/shop", "/v1/logs", "/console/", "/v1/admin/token/list"])
def test_a_path_of_management_is_told_where_it_is_answered(port: int, path: str) -> None:
    """It was taken for the name of a function: `lamina deploy` to the port of the calls was told what can be called."""
    (answer,) = asked(port, ("GET", path))
    assert answer.status == 404 and "--admin-port" in answer.json["hint"] and "--admin-url" in answer.json["hint"]


def test_what_curl_sends_is_json_if_it_is_json_and_else_bytes(port: int) -> None:
    form = "application/x-www-form-urlencoded"
    text, raw, named, broken = asked(
        port,
        ("POST", "/v1/functions/echo", b'{"a": 1}', form),
        ("POST", "/v1/functions/echo", b"\x89PNG", form),
        ("POST", "/v1/functions/add", b'{"a": 1, "b": 2}', form),
        ("POST", "/v1/functions/add", b'{"a": 1, b: 2}', form),
    )
    assert (text.json, raw.body, named.json) == ({"a": 1}, b"\x89PNG", 3)
    assert broken.json["detail"].startswith("body: not JSON")  # bytes could not be two numbers


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/functions/ehco", "did you mean /v1/functions/echo?"),
        ("/v1/workflows/echo", "did you mean /v1/functions/echo?"),
        ("/v1/echo", "did you mean /v1/functions/echo?"),
        ("/v1/functions/echo/", "did you mean /v1/functions/echo?"),
        ("/functions/echo", "did you mean /v1/functions/echo?"),
        ("/echo", "did you mean /v1/functions/echo?"),
        ("/health", "did you mean /healthz?"),
        ("/v1/function", "did you mean /v1/functions?"),
        ("/documentation", "/openapi.json"),
        ("/v1/billing", "/openapi.json"),
        ("/v2x", "/openapi.json"),
    ],
)
def test_a_request_at_the_wrong_address_is_told_which_and_where_to_look(port: int, path: str, hint: str) -> None:
    (answer,) = asked(port, ("POST", path, b"1"))
    assert answer.status == 404
    assert path in answer.json["detail"] and hint in answer.json["hint"]


def test_a_client_that_puts_inputs_into_the_address_is_told_where_they_belong(port: int) -> None:
    (answer,) = asked(port, ("POST", "/v1/functions/add?a=1", b""))
    assert answer.status == 400
    assert "taken from the body, not from behind the ?" in answer.json["hint"]


def test_the_root_says_where_things_are_and_each_is_there(port: int) -> None:
    (index,) = asked(port, ("GET", "/"))
    places = [place for name, place in index.json.items() if name not in ("server", "runs")]  # this one keeps none
    answers = dict(zip(places, asked(port, *(("GET", place) for place in places)), strict=True))
    assert {place for place, answer in answers.items() if answer.status != 200} <= {"/readyz"}  # it may not be yet


def test_the_users_error_comes_back_whole_or_only_as_an_id(app: Path, port: int) -> None:
    (full,) = asked(port, ("POST", "/v1/functions/fail", b"7"))
    assert full.status == 500
    assert full.json["error"] == "ValueError"
    assert "cannot take 7" in full.json["detail"]
    assert "lamina" not in full.json["trace"].replace("lamina.", "")
    (plain,) = asked_of_another(app, ("POST", "/v1/functions/fail", b"7"), full_errors=False)
    assert plain.status == 500
    assert "secret" not in plain.body.decode() and "ValueError" not in plain.body.decode()


def test_what_a_function_says_about_its_input_reaches_the_caller(app: Path) -> None:
    (answer,) = asked_of_another(app, ("POST", "/v1/functions/picky", b"3"), full_errors=False)
    assert answer.status == 422
    assert (answer.json["detail"], answer.json["hint"]) == ("x: 3 is too small", "send more")


def test_a_workflow_runs_its_steps(port: int) -> None:
    (answer,) = asked(port, ("POST", "/v1/workflows/twice", b"21"))
    assert answer.json == 42


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_an_offer(app: Path) -> None:
    warm = ("POST", "/v1/functions/echo", b"1")
    *_, refused = asked_of_another(
        app, *[warm] * 5, ("POST", "/v1/functions/echo", b"1", "application/json", {"Lamina-Deadline-Ms": "0.01"})
    )
    assert refused.status == 429
    problem = refused.json
    assert problem["reason"] == "deadline"
    assert problem["offer_ms"] > 0.01
    assert "trying again does not help" in problem["hint"], "it takes longer on an idle server"
    assert "retry-after" not in refused.headers


def test_a_cost_limit_that_cannot_be_kept_is_refused(port: int) -> None:
    warm = ("POST", "/v1/functions/echo", b"1")
    *_, refused, taken = asked(
        port,
        *[warm] * 5,
        ("POST", "/v1/functions/echo", b"1", "application/json", {"Lamina-Cost-Limit": "1e-15"}),
        ("POST", "/v1/functions/echo", b"1", "application/json", {"Lamina-Cost-Limit": "1"}),
    )
    assert (refused.status, refused.json["reason"]) == (429, "cost")
    assert taken.status == 200


def test_a_cost_limit_that_is_found_too_low_when_its_turn_has_come_is_a_refusal_as_well() -> None:
    problem = failure_problem(FailCall("c1", "cost", "echo"), None, full=True)
    assert (problem.status, problem.code, problem.reason) == (429, "refused", "cost")


def test_listings_status_health_and_description(port: int) -> None:
    functions, workflows, about, status, health, ready, openapi = asked(
        port,
        *[("GET", path) for path in ("/v1/functions", "/v1/workflows", "/v1/functions/echo", "/v1/status", "/healthz")],
        ("GET", "/readyz"),
        ("GET", "/openapi.json"),
    )
    assert [f["name"] for f in functions.json] == ["echo", "add", "fail", "picky", "nothing"]
    assert workflows.json[0]["slo_ms"] == 5000
    assert about.json["doc"] == "Gives back what it gets."
    assert status.json["devices"][0]["kind"] == "cpu"
    assert health.json == {"status": "ok", "role": "leader"}
    assert ready.status in (200, 503)
    assert openapi.json["paths"]["/v1/functions/add"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "required"
    ] == ["a"]


def test_metrics_count_what_happened(app: Path) -> None:
    *_, metrics = asked_of_another(
        app,
        ("POST", "/v1/functions/echo", b"1"),
        ("POST", "/v1/functions/fail", b"1"),
        ("GET", "/metrics"),
    )
    text = metrics.body.decode()
    assert 'lamina_calls_total{outcome="met",target="echo"} 1.0' in text
    assert 'lamina_calls_total{outcome="failed",target="fail"} 1.0' in text
    assert 'lamina_batch_size_count{function="echo"} 1.0' in text
    assert 'lamina_units{device="cpu0"}' in text
    assert 'lamina_queue_jobs{function="echo"} 0.0' in text


def test_a_client_that_leaves_cancels_its_call(app: Path) -> None:
    async def work() -> int:
        async with served(app) as gateway:
            async with Browser(gateway.port) as browser:
                browser.writer.write(
                    b"POST /v1/functions/add HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\n" + b'{"a":1}'
                )
                await browser.writer.drain()
                while not gateway.driver.controller.state.runs:
                    await asyncio.sleep(0)
            while gateway.driver.controller.state.runs:
                await asyncio.sleep(0)
            return len(gateway.driver.data._runs)

    assert run(work) == 0


def test_shutdown_finishes_what_was_accepted_and_takes_nothing_new(tmp_path: Path) -> None:
    slow = "import time, lamina\napp = lamina.App('slow')\n@app.function()\ndef nap(s):\n    time.sleep(s)\n    return s\n"

    async def work() -> tuple[Answer, int, Answer | str]:
        async with served(write_app(tmp_path, slow)) as gateway, Browser(gateway.port) as first, Browser(gateway.port) as second:
            pending = asyncio.create_task(first.post("/v1/functions/nap", 0.3))
            while not gateway.driver.controller.state.batches:
                await asyncio.sleep(0.001)
            stopping = asyncio.create_task(gateway.stop(10))
            await asyncio.sleep(0)
            try:
                late: Answer | str = await second.post("/v1/functions/nap", 0)
            except (asyncio.IncompleteReadError, ConnectionError):
                late = "hung up"
            return await pending, await stopping, late

    answer, given_up, late = run(work)
    assert (answer.status, answer.json, given_up) == (200, 0.3, 0)
    assert late == "hung up" or (isinstance(late, Answer) and late.status == 503)


def test_only_this_machine_may_be_listened_on(app: Path) -> None:
    from lamina.errors import BadValue
    from lamina.gateway.bootstrap import check_host

    for host in ("0.0.0.0", "::", "192.0.2.1", "example"):
        with pytest.raises(BadValue, match=r"loopback.*without a store there are no tokens"):
            check_host(host)
    check_host("127.0.0.2")
    check_host("localhost")


def test_many_callers_get_their_own_answers(app: Path) -> None:
    async def work() -> list[bool]:
        async with served(app) as gateway:

            async def caller(number: int) -> bool:
                async with Browser(gateway.port) as browser:
                    answers = [await browser.post("/v1/functions/echo", [number, turn]) for turn in range(20)]
                    return [json.loads(a.body) for a in answers] == [[number, turn] for turn in range(20)]

            return await asyncio.gather(*(caller(number) for number in range(16)))

    assert all(run(work))


def test_many_refusals_in_a_row_are_all_counted_and_all_told_apart(tmp_path: Path) -> None:
    """Most of them are answered from the first: nothing has changed in between."""
    app = tmp_path / "hurried.py"
    app.write_text(
        "import time, lamina\napp = lamina.App('a')\n"
        "@app.function(slo='100us', scale=lamina.Scale(min=1))\ndef hurried(x):\n    time.sleep(0.01)\n    return x\n"
    )
    call = ("POST", "/v1/functions/hurried", b"1")
    *answers, metrics = asked_of_another(app, *[call] * 30, ("GET", "/metrics"))
    refused = [answer for answer in answers if answer.status == 429]
    assert len({answer.json["id"] for answer in refused}) == len(refused) >= 20
    assert f'lamina_refusals_total{{reason="deadline",target="hurried"}} {len(refused)}.0' in metrics.body.decode()


def test_more_standing_instances_than_there_are_slices_are_refused_at_the_start_with_the_best_offer(tmp_path: Path) -> None:
    app = write_app(
        tmp_path,
        "import lamina\napp = lamina.App('a')\n@app.function(scale=lamina.Scale(min=900, max=900))\ndef f(x): return x\n",
    )

    async def work() -> None:
        async with served(app):
            pass

    with pytest.raises(NoCapacity, match=r"no room for instance \d+ of 900 of 'f'") as refusal:
        run(work)
    assert re.fullmatch(r"best offer: min=\d+", refusal.value.hint)


def test_the_first_caller_of_a_function_waits_for_its_load_and_a_deadline_of_its_own_is_kept(tmp_path: Path) -> None:
    """How long a load takes is not known yet, so the SLO is no reason to drop the call; afterwards it is one to reject."""
    app = write_app(
        tmp_path,
        "import time, lamina\napp = lamina.App('a')\n@app.function(slo='50ms')\nclass f:\n"
        "    def load(self): time.sleep(1.5)\n    def __call__(self, x): return x\n",
    )
    call = ("POST", "/v1/functions/f", b"1", "application/json")
    own, first = asked_of_another(app, (*call, {"Lamina-Deadline-Ms": "1000"}), call)
    assert (own.status, first.status) == (504, 200)
    assert float(first.headers["lamina-cold-start-ms"]) > 50
