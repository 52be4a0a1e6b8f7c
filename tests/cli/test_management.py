"""Access and deployment from the command line: on a store alone, and through a server."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lamina.cli import root
from lamina.errors import LoadFailed
from tests.gateway.deploy.admin_fixture import Managed, managed

APP = """
import lamina

app = lamina.App("shop")


@app.function(scale=lamina.Scale(min=1, max=1))
def price(x):
    return x
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("LAMINA_TOKEN", raising=False)


def lamina(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(root, list(words), input=text, catch_exceptions=True)


def said(*words: str, text: str | None = None) -> str:
    result = lamina(*words, text=text)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def test_a_store_without_a_server_is_enough_for_the_first_token(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store.db"))
    said("tenant", "set", "acme", "--rate", "5", "--memory", "2GiB", *store)
    assert said("token", "create", "ci", "--tenant", "acme", "--scope", "invoke", *store).startswith("lmt_")
    assert said("user", "invite", "ada", *store).startswith("lmi_")
    said("secret", "set", "key", *store, text="hush\n")
    (tenant,) = json.loads(said("tenant", "list", "--json", *store))
    assert (tenant["rate_per_s"], tenant["memory_mib"]) == (5.0, 2048)
    (token,) = json.loads(said("token", "list", "--json", *store))
    said("token", "revoke", token["id"], *store)
    assert said("token", "list", *store) == "no tokens\n"
    audit = [row["what"] for row in json.loads(said("audit", "--json", *store))]
    assert audit == ["tenant/set", "token/create", "user/invite", "secret/set", "token/revoke"]
    assert "hush" not in said("secret", "list", *store) + said("audit", *store)


def test_what_is_wrong_is_said_with_an_exit_code(tmp_path: Path) -> None:
    from lamina.errors import NotFound, Unreachable

    store = ("--store", str(tmp_path / "store.db"))
    assert isinstance(lamina("token", "create", "t", "--tenant", "nobody", *store).exception, NotFound)
    assert isinstance(lamina("ls", "--admin-url", "http://127.0.0.1:9").exception, Unreachable)


class Serving:
    """A server on a thread of its own, so that commands can block."""

    def __init__(self, app: Path, folder: Path) -> None:
        self._app, self._folder = app, folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.server: Managed | None = None

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with managed(self._app, self._folder) as server:
            self.server = server
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(100) and self.server is not None
        return f"http://127.0.0.1:{self.server.admin.port}"

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.mark.live
def test_a_day_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "app.py"
    file.write_text(APP)
    with Serving(file, tmp_path / "kept") as url:
        monkeypatch.setenv("LAMINA_ADMIN_URL", url)
        assert "shop" in said("ls") and "price" in said("ls")
        assert said("deploy", str(file), "--app", "shop") == "shop version 1 serving: price\n"
        assert "served" in said("history", "shop")
        assert said("rollback", "shop") == "shop version 0 serving\n"
        assert said("scale", "price", "--max", "3") == "price: 1 to 3 instances\n"
        assert said("resize", "price", "--cores", "1") == "price: cores 1\n"
        for meant, words in (("shop", ("rollback", "shpo")), ("price", ("scale", "prise", "--max", "3"))):
            assert f"did you mean '{meant}'?" in str(lamina(*words).exception)
        code = said("user", "invite", "ada", "--scope", "read").strip()
        password = "long enough, surely"
        assert "logged in as ada" in said("login", "ada", "--sign-up", code, text=f"{password}\n{password}\n")
        assert "shop" in said("ls")
        refused = lamina("deploy", str(file), "--app", "shop")
        assert "may not deploy" in str(refused.exception)
        assert said("login", "--out") == "logged out\n"
        assert said("logs", "price", "--tail", "5") == ""


@pytest.mark.live
def test_a_first_deployment_that_cannot_be_loaded_fails_with_the_lines_that_did_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "app.py", tmp_path / "bank.py"
    file.write_text(APP)
    other.write_text(
        "import lamina\napp = lamina.App('bank')\n\n@app.function()\nclass rate:\n    def load(self):\n        1 / 0\n"
        "    def __call__(self, x):\n        return x\n"
    )
    with Serving(file, tmp_path / "kept") as url:
        monkeypatch.setenv("LAMINA_ADMIN_URL", url)
        failed = lamina("deploy", str(other))
        listed = lamina("ls")
    assert isinstance(failed.exception, LoadFailed) and failed.exit_code == 1
    assert "rate: ZeroDivisionError: division by zero" in str(failed.exception) and "line 7, in load" in str(failed.exception)
    assert "bank  0        halted" in listed.stdout and "version 1 was taken back" in listed.stderr
