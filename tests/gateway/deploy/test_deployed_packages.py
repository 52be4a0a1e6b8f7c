"""Deployed apps with packages of their own: versions side by side, failures that change nothing, tenants behind walls."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from lamina.engines.composite import CompositeEngine
from tests.engines.wheels import make_wheel
from tests.gateway.deploy.admin_fixture import Managed, managed
from tests.serving import run

pytestmark = pytest.mark.live

OWN = 'import lamina\napp = lamina.App("own")\n\n@app.function()\ndef idle(x):\n    return x\n'
APP = """
import lamina
import tiny
app = lamina.App("{name}")

@app.function(scale=lamina.Scale(min=1, max=1))
def {name}_version():
    return tiny.version
"""
WALLS = pytest.mark.skipif(os.geteuid() != 0, reason="tenants have users of their own where the server is root")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "tiny", version)
    return tmp_path / "wheels"


async def served(server: Managed, app: str, token: str = "") -> dict[str, object]:
    while True:
        about = next(one for one in (await server.ask("GET", "/v1/apps", token=token)).json if one["app"] == app)
        if about["state"] != "rolling":
            return dict(about)
        await asyncio.sleep(0.02)


def test_two_apps_with_conflicting_versions_of_a_package_are_served_side_by_side(own: Path, wheels: Path, tmp_path: Path) -> None:
    async def work() -> list[object]:
        async with managed(own, tmp_path / "kept", wheelhouse=wheels) as server:
            for name, version in (("old", "1.0"), ("new", "2.0")):
                answer = await server.deploy(name, APP.format(name=name), requirements__txt=f"tiny=={version}\n")
                assert answer.status == 200, answer.body
                assert (await served(server, name))["state"] == "serving"
            return [(await server.call(f"/v1/functions/{name}_version", {})).json for name in ("old", "new")]

    assert run(work) == ["1.0", "2.0"]


def test_packages_that_cannot_be_installed_leave_the_version_before_served(own: Path, wheels: Path, tmp_path: Path) -> None:
    async def work() -> tuple[int, str, object]:
        async with managed(own, tmp_path / "kept", wheelhouse=wheels) as server:
            await server.deploy("shop", APP.format(name="shop"), requirements__txt="tiny==1.0\n")
            await served(server, "shop")
            failed = await server.deploy("shop", APP.format(name="shop"), requirements__txt="tiny==7.0\n")
            return failed.status, failed.body.decode(), (await server.call("/v1/functions/shop_version", {})).json

    status, message, version = run(work)
    assert status >= 400 and version == "1.0" and "tiny==7.0" in message


def test_an_app_with_packages_is_served_again_after_a_restart(own: Path, wheels: Path, tmp_path: Path) -> None:
    async def first() -> None:
        async with managed(own, tmp_path / "kept", wheelhouse=wheels) as server:
            await server.deploy("shop", APP.format(name="shop"), requirements__txt="tiny==2.0\n")
            await served(server, "shop")

    async def second() -> object:
        async with managed(own, tmp_path / "kept") as server:  # without a wheelhouse: nothing is installed again
            return (await server.call("/v1/functions/shop_version", {})).json

    run(first)
    assert run(second) == "2.0"


@pytest.mark.parametrize("gpu", ["no", "null"])
def test_functions_that_share_a_gpu_are_refused_with_packages_of_their_own(
    own: Path, wheels: Path, tmp_path: Path, gpu: str
) -> None:
    own.write_text(OWN.replace("@app.function()", '@app.function(gpu="1/4")'))
    source = APP.format(name="shop").replace("scale=", 'gpu=lamina.GPU("1/4"), scale=')

    async def work() -> tuple[int, str]:
        async with managed(own, tmp_path / "kept", wheelhouse=wheels, gpu=gpu) as server:
            answer = await server.deploy("shop", source, requirements__txt="tiny==1.0\n")
            return answer.status, answer.body.decode()

    status, message = run(work)
    assert status == 400 and "share one process" in message and "isolated=True" in message


def test_isolated_functions_on_a_gpu_have_the_packages_of_their_app(own: Path, wheels: Path, tmp_path: Path) -> None:
    own.write_text(OWN.replace("@app.function()", '@app.function(gpu="1/4", scale=lamina.Scale(min=1, max=1))'))
    alone = 'gpu=lamina.GPU("1/4", required=True, isolated=True), scale='

    async def work() -> tuple[list[object], set[object], bool]:
        async with managed(own, tmp_path / "kept", wheelhouse=wheels, gpu="null") as server:
            for name, version in (("old", "1.0"), ("new", "2.0")):
                source = APP.format(name=name).replace("scale=", alone)
                answer = await server.deploy(name, source, requirements__txt=f"tiny=={version}\n")
                assert answer.status == 200, answer.body
                assert (await served(server, name))["state"] == "serving"
            said = [(await server.call(f"/v1/functions/{name}_version", {})).json for name in ("old", "new")]
            engine = server.gateway.driver.engine
            assert isinstance(engine, CompositeEngine)
            functions = server.gateway.driver.controller.state.functions
            each = [one for name in ("old", "new") for one in functions[f"{name}_version"].instances.values()]
            devices = {one.device for one in each}
            return said, devices, {one.id for one in each} <= set(engine.cpu.pids)

    versions, devices, have_processes = run(work)
    assert versions == ["1.0", "2.0"] and devices == {"null0"} and have_processes


@WALLS
def test_code_in_a_wheel_of_a_tenant_runs_as_the_tenant_and_cannot_change_the_environment(own: Path, tmp_path: Path) -> None:
    """A `.pth` file runs when an interpreter starts: before that one's first line, the walls stand."""
    report = "import os, sys; os.environ.setdefault('SEEN', f'{os.getuid()} {os.access(sys.prefix, os.W_OK)}')\n"
    make_wheel(tmp_path / "wheels", "tiny", "1.0", spy__pth=report)
    source = APP.format(name="shop").replace("return tiny.version", "import os; return os.environ['SEEN']")

    async def work() -> object:
        async with managed(own, tmp_path / "kept", wheelhouse=tmp_path / "wheels", trusts_deployers=False) as server:
            token = await server.token("deploy", "read", "invoke", tenant="acme")
            answer = await server.deploy("shop", source, token, requirements__txt="tiny==1.0\n")
            if answer.status == 403:
                pytest.skip(f"no walls here: {answer.json}")
            assert answer.status == 200, answer.body
            await served(server, "shop", token)
            return (await server.call("/v1/functions/shop_version", {}, token)).json

    user, can_write = str(run(work)).split()
    assert int(user) >= 200_000 and can_write == "False"
