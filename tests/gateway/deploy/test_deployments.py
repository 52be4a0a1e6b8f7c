"""Deployments: apps are deployed, take over, and are rolled back, while calls go on."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from lamina.gateway.deploy import app_package, app_versions
from lamina.gateway.deploy.admin_server import open_access
from lamina.store.open import open_store
from tests.gateway.deploy.admin_fixture import Managed, managed, zipped
from tests.serving import Browser, run

pytestmark = pytest.mark.live

APP = """
import lamina
app = lamina.App("shop")

@app.function(scale=lamina.Scale(min=1, max=2), slo=lamina.SLO("50s"))
def price(x):
    return ["{version}", x]
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP.format(version="v0"))
    return path


async def settled(server: Managed) -> dict[str, object]:
    while True:
        (about,) = (await server.ask("GET", "/v1/apps")).json
        if about["state"] == "serving":
            return dict(about)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("ingress", [0, 2])
def test_a_rolling_update_under_load_loses_no_call(app: Path, tmp_path: Path, ingress: int) -> None:
    async def work() -> tuple[list[tuple[int, str]], dict[str, object]]:
        async with managed(app, tmp_path / "kept", ingress=ingress) as server:
            answers: list[tuple[int, str]] = []
            done = asyncio.Event()

            async def load() -> None:
                async with Browser(server.gateway.port) as browser:
                    while not done.is_set():
                        answer = await browser.post("/v1/functions/price", 1)
                        answers.append((answer.status, answer.json[0] if answer.status == 200 else str(answer.json)))
                        await asyncio.sleep(0.002)  # the new version needs a core to load on

            clients = [asyncio.create_task(load()) for _ in range(4)]
            while not answers:
                await asyncio.sleep(0.01)
            for version in ("v1", "v2"):
                assert (await server.deploy("shop", APP.format(version=version))).status == 200
                about = await settled(server)
                while answers[-1][1] != version:
                    await asyncio.sleep(0.01)
            done.set()
            await asyncio.gather(*clients)
            return answers, about

    answers, about = run(work)
    assert {status for status, _ in answers} == {200}
    seen = list(dict.fromkeys(version for _, version in answers))
    assert seen == ["v0", "v1", "v2"] and about["version"] == 2


def test_a_version_can_be_taken_back_and_another_server_finds_what_was_served_last(
    app: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> list[object]:
        said: list[object] = []
        async with managed(app, tmp_path / "kept") as server:
            for version in ("v1", "v2"):
                await server.deploy("shop", APP.format(version=version))
                await settled(server)
            history = (await server.ask("GET", "/v1/apps/shop/history")).json
            said.append([(one["number"], one["current"]) for one in history])
            await server.ask("POST", "/v1/apps/shop/rollback", b"{}")
            await settled(server)
            said.append((await server.call("/v1/functions/price", 1)).json)
        async with managed(app, tmp_path / "kept") as server:
            said.append((await server.call("/v1/functions/price", 1)).json)
        return said

    assert run(work) == [[(2, True), (1, False)], ["v1", 1], ["v1", 1]]
    (told,) = [one.getMessage() for one in caplog.records if "as deployed" in one.getMessage()]
    assert told == (  # only the server that was started again has another version than that of its file
        f"app shop is served in version 1, as deployed, not as in {app.name}: lamina rollback shop --to 0 goes back to it"
    )


def test_rollback_goes_back_to_what_was_served_before_and_not_to_a_canary_that_was_rolled_back(app: Path, tmp_path: Path) -> None:
    """Version 1 serves, canary 2 loses its traffic, 3 takes over: back is 1, and from there the file of the start."""

    async def rolled_back(server: Managed) -> tuple[int, object]:
        answer = await server.ask("POST", "/v1/apps/shop/rollback", b"{}")
        if answer.status == 200:
            await settled(server)
        return answer.status, answer.json.get("version")

    async def work() -> list[object]:
        async with managed(app, tmp_path / "kept") as server:
            await server.deploy("shop", APP.format(version="v1"))
            await settled(server)
            await server.deploy_beside("shop", APP.format(version="v2"), 10)
            await server.ask("PUT", "/v1/apps/shop/traffic", b'{"weights": {"1": 100}}')
            await server.deploy("shop", APP.format(version="v3"))
            await settled(server)
            return [await rolled_back(server) for _ in range(3)]

    assert run(work) == [(200, 1), (200, 0), (404, None)]


@pytest.mark.parametrize(
    ("acts", "served"),
    [
        ([(1, None), (3, None)], [0, 1, 3]),
        ([(1, None), (3, None), (1, 3)], [0, 1]),  # back: what was left is no version to go back to
        ([(1, None), (3, None), (2, 3)], [0, 1, 2]),  # rollback --to one that has never served
        ([(1, None), (2, None), (3, None), (1, None)], [0, 1]),  # an old one is promoted again
    ],
)
def test_versions_to_go_back_to_are_those_that_served_and_were_not_left(
    tmp_path: Path, acts: list[tuple[int, int | None]], served: list[int]
) -> None:
    async def work() -> list[int]:
        store = open_store(str(tmp_path / "store.db"))
        try:
            access = await open_access(store)
            for number, leaves in acts:
                await access.write(partial(app_versions.make_current, app="shop", number=number, now_us=1, leaves=leaves))
            return await access.read(lambda db: app_versions.served(db, "shop"))
        finally:
            await store.close()

    assert run(work) == served


def test_a_version_that_cannot_be_loaded_is_taken_back_by_itself(app: Path, tmp_path: Path) -> None:
    broken = APP.format(version="v1").replace(
        "def price(x):\n", "class price:\n    def load(self):\n        1 / 0\n    def __call__(self, x):\n"
    )

    async def work() -> tuple[dict[str, object], object]:
        async with managed(app, tmp_path / "kept") as server:
            while (await server.call("/readyz", method="GET")).status != 200:
                await asyncio.sleep(0.02)
            await server.deploy("shop", broken.replace('return ["v1", x]', '    return ["v1", x]'))
            while not (about := (await server.ask("GET", "/v1/apps")).json[0])["failed"]:
                await asyncio.sleep(0.02)
            return about, (await server.call("/v1/functions/price", 1)).json

    about, answer = run(work)
    assert about["version"] == 0 and "ZeroDivisionError" in str(about["failed"])
    assert answer == ["v0", 1]


BROKEN = """
import lamina
app = lamina.App("bank")

@app.function(scale=lamina.Scale(min={least}, max=2), slo=lamina.SLO("50s"))
class rate:
    def load(self):
        self.open_the_weights()
    def open_the_weights(self):
        {does}
    def __call__(self, x):
        return ["{version}", x]
"""


async def tried(server: Managed, source: str) -> dict[str, object]:
    """What is said of the app once it is known whether it can be loaded."""
    answer = await server.deploy("bank", source)
    assert answer.status == 200, answer.body
    about = answer.json
    while about["state"] == "rolling":
        await asyncio.sleep(0.02)
        about = next(one for one in (await server.ask("GET", "/v1/apps")).json if one["app"] == "bank")
    return dict(about)


@pytest.mark.parametrize("least", [0, 1])
def test_a_first_version_that_cannot_be_loaded_is_not_served_and_the_next_may_be(app: Path, tmp_path: Path, least: int) -> None:
    """Also where nothing must stand, and so nothing would have been loaded before the first call."""

    async def work() -> list[object]:
        async with managed(app, tmp_path / "kept") as server:
            said: list[object] = []
            for version, does in enumerate(("1 / 0", "1 / 0", "pass"), start=1):
                about = await tried(server, BROKEN.format(least=least, does=does, version=version))
                status = (await server.call("/v1/functions/rate", 1)).status
                said.append((about["state"], about["version"], status))
                if does != "pass":
                    assert "ZeroDivisionError" in str(about["failed"]) and "in open_the_weights" in str(about["failed"])
            current = [(one["number"], one["current"]) for one in (await server.ask("GET", "/v1/apps/bank/history")).json]
            return [*said, current]

    current = [(3, True), (2, False), (1, False)]
    assert run(work) == [("halted", 0, 404), ("halted", 0, 404), ("serving", 3, 200), current]


def test_what_the_code_of_a_failed_version_said_is_for_deployers(app: Path, tmp_path: Path) -> None:
    async def work() -> dict[str, str]:
        async with managed(app, tmp_path / "kept") as server:
            await tried(server, BROKEN.format(least=1, does="raise OSError('no /srv/key.pem')", version=1))
            told = {}
            for scope in ("read", "deploy"):
                answer = await server.ask("GET", "/v1/apps", token=await server.token("read", scope))
                told[scope] = next(one["failed"] for one in answer.json if one["app"] == "bank")
            return told

    told = run(work)
    assert told["read"] == "version 1 was taken back: rate: OSError"
    assert "no /srv/key.pem" in told["deploy"] and 'File "app.py", line' in told["deploy"]


def test_a_function_that_scales_to_zero_is_tried_and_keeps_its_terms(app: Path, tmp_path: Path) -> None:
    async def work() -> tuple[list[int], set[int]]:
        async with managed(app, tmp_path / "kept") as server:
            while (await server.call("/readyz", method="GET")).status != 200:
                await asyncio.sleep(0.02)
            trial = asyncio.create_task(tried(server, BROKEN.format(least=0, does="pass", version=1)))
            ready = set()
            while not trial.done():
                ready.add((await server.call("/readyz", method="GET")).status)
            (rate,) = (await server.ask("GET", "/v1/apps")).json[1]["functions"]
            return [rate["ready"], rate["min"]], ready

    assert run(work) == ([1, 0], {200})


def test_a_new_version_takes_over_on_a_gpu_too(app: Path, tmp_path: Path) -> None:
    """On the null twin of a device: the same executor process, without one."""
    source = APP.replace("slo=", "gpu=lamina.GPU(0.5), slo=")
    app.write_text(source.format(version="v0"))

    async def work() -> list[object]:
        async with managed(app, tmp_path / "kept", gpu="null") as server:
            before = (await server.call("/v1/functions/price", 1)).json
            assert (await server.deploy("shop", source.format(version="v1"))).status == 200
            await settled(server)
            answer = await server.call("/v1/functions/price", 1)
            return [before, answer.json, answer.headers["lamina-slice"].split("/")[0]]

    assert run(work) == [["v0", 1], ["v1", 1], "null0"]


def test_a_second_app_comes_beside_the_first(app: Path, tmp_path: Path) -> None:
    other = APP.replace('"shop"', '"bank"').replace("price", "rate").format(version="b")

    async def work() -> list[object]:
        async with managed(app, tmp_path / "kept") as server:
            assert (await server.deploy("bank", other)).status == 200
            clash = await server.deploy("third", other.replace('"bank"', '"third"'))
            return [(await server.call("/v1/functions/rate", 2)).json, clash.status, clash.json["detail"]]

    assert run(work) == [["b", 2], 400, "'rate' belongs to the app 'bank'"]


def test_what_cannot_fit_is_refused_with_what_is_missing_and_the_best_offer(app: Path, tmp_path: Path) -> None:
    huge = APP.format(version="v1").replace("slo=", 'cpu=lamina.CPU(1, memory="900TiB"), slo=')

    async def work() -> dict[str, object]:
        async with managed(app, tmp_path / "kept") as server:
            answer = await server.deploy("shop", huge)
            return dict(answer.json)

    problem = run(work)
    assert problem["code"] == "no-capacity"
    assert "MiB on one device" in str(problem["detail"]) and "best offer: memory up to" in str(problem["hint"])


def test_management_and_state_take_no_packed_bodies(app: Path, tmp_path: Path) -> None:
    async def work() -> list[int]:
        async with managed(app, tmp_path / "kept") as server:
            terms = await server.ask("POST", "/v1/functions/price/terms", b'{"max": 2}', content_encoding="gzip")
            state = await server.call("/v1/state/key", 1, method="PUT", content_encoding="gzip")
            return [terms.status, state.status]

    assert run(work) == [415, 415]


def test_functions_are_scaled_where_they_stand(app: Path, tmp_path: Path) -> None:
    async def work() -> list[object]:
        async with managed(app, tmp_path / "kept") as server:
            await server.ask("POST", "/v1/functions/price/terms", b'{"min": 2}')
            while (await settled(server))["functions"][0]["ready"] < 2:  # type: ignore[index]
                await asyncio.sleep(0.02)
            wrong = await server.ask("POST", "/v1/functions/price/terms", b'{"min": 9}')
            return [wrong.status, wrong.json["detail"]]

    assert run(work) == [400, "scale: min 9 and max 2 make no sense"]


@pytest.mark.parametrize(
    ("name", "body", "headers", "says"),
    [
        ("shop", b"not a zip", {}, "not a zip"),
        ("shop", zipped({"app.py": b"x"})[:-30], {}, "not a zip"),
        ("shop", zipped({"app.py": b"1 / 0"}), {}, "ZeroDivisionError"),
        ("shop", zipped({"app.py": b"import os; os._exit(3)"}), {}, "ended its process"),
        ("shop", zipped({"app.py": b"x"}), {"lamina_sha256": "0" * 64}, "another hash"),
        ("shop", zipped({"app.py": b"x"}), {"lamina_entry": "../app.py"}, "no Python file"),
        ("shop", zipped({"app.py": b"x"}), {"lamina_entry": "main.py"}, "no 'main.py'"),
        ("..", zipped({"app.py": b"x"}), {}, "cannot be used"),
        ("%2e%2e%2fshop", zipped({"app.py": b"x"}), {}, "cannot be used"),
        ("UPPER", zipped({"app.py": b"x"}), {}, "cannot be used"),
        ("a" * 64, zipped({"app.py": b"x"}), {}, "cannot be used"),
        ("other", zipped({"app.py": APP.format(version="v").encode()}), {}, "not 'other'"),
    ],
)
def test_bad_packages_change_nothing(
    app: Path, tmp_path: Path, name: str, body: bytes, headers: dict[str, str], says: str
) -> None:
    async def work() -> tuple[int, dict[str, object], object]:
        async with managed(app, tmp_path / "kept") as server:
            given = {"lamina_sha256": app_package.sha256_hex(body), "lamina_entry": "app.py", **headers}
            answer = await server.ask("PUT", f"/v1/apps/{name}", body, **given)
            return answer.status, dict(answer.json), (await server.call("/v1/functions/price", 1)).json

    status, problem, after = run(work)
    assert status in (400, 503) and says in json.dumps(problem), problem
    assert after == ["v0", 1]
    assert not [path for path in (tmp_path / "kept" / "apps").rglob("*") if path.is_dir() and path.name.isdecimal()]
