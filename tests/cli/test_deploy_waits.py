"""`lamina deploy --traffic` returns when the candidate is loaded, has failed, or takes too long."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lamina import cli
from lamina.cli._admin_client import until_divided
from lamina.errors import DeadlineExceeded, LoadFailed


class Management:
    """The management API, as far as the traffic of one app goes: each state for one answer, the last one for good."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.url = ""

    def answer(self) -> dict[str, Any]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"stable": "1", "weights": {"1": 90, "2": 10}, "rolled_back": {}, **state}


@pytest.fixture
def management() -> Iterator[Management]:
    found = Management()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(found.answer()).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            about = {"app": "shop", "version": 1, "state": "serving", "functions": [{"name": "price"}], "workflows": []}
            body = json.dumps(about).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()


def test_it_waits_until_the_calls_are_divided(management: Management, capsys: pytest.CaptureFixture[str]) -> None:
    management.states = [{"state": "loading"}, {"state": "loading"}, {"state": "divided"}]
    assert until_divided("shop", management.url)["state"] == "divided"
    assert capsys.readouterr().err == "loading version 2; until then all calls go to version 1\n"


def test_a_candidate_that_cannot_be_loaded_is_an_error_with_the_reason(management: Management) -> None:
    management.states = [{"state": "loading"}, {"state": "loading", "rolled_back": {"2": "ImportError: no module named 'cv9'"}}]
    with pytest.raises(LoadFailed, match="version 2 of 'shop' gets no calls: ImportError: no module named 'cv9'"):
        until_divided("shop", management.url)


def test_a_load_that_takes_too_long_is_told_with_a_way_to_look(management: Management) -> None:
    management.states = [{"state": "loading"}]
    with pytest.raises(DeadlineExceeded, match=r"version 2 of 'shop' is not loaded after 0 s") as told:
        until_divided("shop", management.url, within_s=0)
    assert "lamina traffic shop" in told.value.hint


@pytest.mark.parametrize(
    ("state", "options", "told"),
    [
        ({"state": "divided"}, [], "shop version 2 serving beside version 1, for 10% of the calls: lamina traffic shop\n"),
        (
            {"state": "loading"},
            ["--no-wait"],
            "shop version 2 loading beside version 1, for 10% of the calls once it is loaded: lamina traffic shop\n",
        ),
        ({"state": "whole", "weights": {"1": 100}}, [], "shop version 1 serving: price\n"),
    ],
)
def test_the_version_that_was_deployed_is_told_with_its_share(
    management: Management, tmp_path: Path, state: dict[str, Any], options: list[str], told: str
) -> None:
    management.states = [state]
    (tmp_path / "app.py").write_text('import lamina\napp = lamina.App("shop")\n')
    words = ["deploy", str(tmp_path / "app.py"), "--traffic", "10", "--admin-url", management.url, *options]
    result = CliRunner().invoke(cli.root, words, standalone_mode=False)
    assert result.return_value == 0 and result.stdout == told
    assert ("all calls go to version 1" in result.stderr) == ("weights" in state)
