"""Volumes: folders that functions of an app share, over versions and restarts; those of tenants are apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import lamina
from lamina.errors import BadValue, NoCapacity
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run, write_app

OWN = 'import lamina\napp = lamina.App("own")\n\n@app.function()\ndef idle(x):\n    return x\n'
APP = """
import lamina
app = lamina.App("{name}")
box = app.volume("box", size="1MiB")

@app.function(scale=lamina.Scale(max=1))
def {name}_put(text):
    (box.path / "note").write_text(text)
    return str(box.path)

@app.function(scale=lamina.Scale(max=1))
def {name}_get():
    return (box.path / "note").read_text()

@app.function(scale=lamina.Scale(max=1))
def {name}_peek(path):
    try:
        return open(path + "/note").read()
    except OSError as error:
        return type(error).__name__
# {version}
"""
WALLS = pytest.mark.skipif(os.geteuid() != 0, reason="tenants have users of their own where the server is root")


@pytest.mark.live
def test_functions_share_a_volume_over_versions_and_restarts(tmp_path: Path) -> None:
    own, kept = write_app(tmp_path, OWN), tmp_path / "kept"

    async def first() -> None:
        async with managed(own, kept, buffers=tmp_path / "beside") as server:
            await server.deploy("desk", APP.format(name="desk", version=1))
            assert (await server.call("/v1/functions/desk_put", {"text": "hello"})).status == 200
            assert (await server.call("/v1/functions/desk_get", {})).json == "hello"

    async def second() -> object:
        async with managed(own, kept, buffers=tmp_path / "beside") as server:
            await server.deploy("desk", APP.format(name="desk", version=2))
            return (await server.call("/v1/functions/desk_get", {})).json

    run(first)
    assert run(second) == "hello"
    assert (tmp_path / "beside" / "volumes" / "operator" / "desk" / "box" / "note").read_text() == "hello"


@pytest.mark.live
@WALLS
def test_a_volume_of_a_tenant_is_closed_to_others(tmp_path: Path) -> None:
    async def work() -> tuple[int, object]:
        own = write_app(tmp_path, OWN)
        async with managed(own, tmp_path / "kept", buffers=tmp_path / "beside", trusts_deployers=False) as server:
            tokens = {name: await server.token("deploy", "read", "invoke", tenant=name) for name in ("acme", "evil")}
            for name, token in tokens.items():
                answer = await server.deploy(name, APP.format(name=name, version=1), token)
                if answer.status == 403:
                    pytest.skip(f"no walls here: {answer.json}")
                assert answer.status == 200, answer.body
            put = await server.call("/v1/functions/acme_put", {"text": "secret"}, tokens["acme"])
            assert put.status == 200, put.body
            seen = (await server.call("/v1/functions/evil_peek", {"path": put.json}, tokens["evil"])).json
            return os.stat(put.json).st_uid, seen

    user, seen = run(work)
    assert user >= 200_000 and seen in ("PermissionError", "FileNotFoundError")


def test_a_volume_refuses_its_path_while_it_is_over_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_VOLUMES", str(tmp_path))
    box = lamina.App("desk").volume("box", size="100KiB")
    (box.folder / "big").write_bytes(os.urandom(200_000))
    with pytest.raises(NoCapacity, match="'box' has"):
        _ = box.path
    (box.folder / "big").unlink()
    assert box.path == tmp_path / "box"


def test_where_there_are_no_volumes_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_VOLUMES", "")
    with pytest.raises(BadValue, match="none where this function runs"):
        _ = lamina.App("desk").volume("box").path


def test_a_name_that_leads_elsewhere_is_refused() -> None:
    with pytest.raises(BadValue):
        lamina.App("desk").volume("../etc")
