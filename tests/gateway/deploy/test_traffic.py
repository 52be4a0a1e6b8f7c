"""Traffic between versions: weights, headers, shadows, and a canary that is rolled back by itself."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import BadValue
from lamina.gateway.deploy.traffic import RollbackRule, TrafficRules, parse_rules
from lamina.gateway.observability.metrics import CallOutcomes
from lamina.gateway.routes.targets import CallTarget, TrafficSplit
from lamina.types import Slo
from tests.gateway.deploy.admin_fixture import Managed, managed
from tests.properties import examples
from tests.serving import run

APP = """
import lamina
app = lamina.App("shop")

@app.function(slo=lamina.SLO("50s"))
def price(x):
    {body}
    return ["{version}", x]

@app.workflow(slo="50s")
def quote(x):
    return price(x)
"""


def source(version: str, body: str = "") -> str:
    return APP.format(version=version, body=body or "pass")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(source("v0"))
    return path


async def traffic(server: Managed, body: dict[str, Any] | None = None) -> dict[str, Any]:
    method, data = ("GET", b"") if body is None else ("PUT", json.dumps(body).encode())
    answer = await server.ask(method, "/v1/apps/shop/traffic", data)
    assert answer.status == 200, answer.json
    return dict(answer.json)


async def divided(server: Managed) -> dict[str, Any]:
    while (found := await traffic(server))["state"] == "loading":
        await asyncio.sleep(0.02)
    return found


async def answers(server: Managed, count: int, path: str = "/v1/functions/price", **headers: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        answer = await server.call(path, 1, **headers)
        found[answer.json[0] if answer.status == 200 else str(answer.status)] += 1
    return found


async def audited(server: Managed) -> list[str]:
    return await server.admin.access.read(lambda db: [str(row) for row in db.rows("SELECT value FROM state")])


@pytest.mark.live
@pytest.mark.parametrize("ingress", [0, 1])
def test_calls_are_divided_by_weight_and_by_header_and_all_go_to_the_version_that_is_promoted(
    app: Path, tmp_path: Path, ingress: int
) -> None:
    async def work() -> list[Any]:
        said: list[Any] = []
        async with managed(app, tmp_path / "kept", ingress=ingress) as server:
            await server.deploy("shop", source("v1"))
            headers = [{"name": "X-Cohort", "value": "b", "version": 1}]
            await traffic(server, {"weights": {"0": 75, "1": 25}, "headers": headers})
            await divided(server)
            said.append(await answers(server, 20))
            said.append(await answers(server, 8, "/v1/workflows/quote"))
            said.append(await answers(server, 3, x_cohort="b"))
            said.append({version: one["in_time"] for version, one in (await traffic(server))["counts"].items()})
            await traffic(server, {"weights": {"1": 100}})
            while (await server.call("/v1/functions/price", 1)).json[0] != "v1":
                await asyncio.sleep(0.02)
            said.append((await traffic(server))["state"])
        return said

    weighted, flows, cohort, counts, state = run(work)
    assert weighted == {"v0": 15, "v1": 5} and flows == {"v0": 6, "v1": 2} and cohort == {"v1": 3}
    assert counts == {"0": 21, "1": 10} and state == "whole"


@pytest.mark.live
def test_a_canary_that_fails_loses_its_traffic_and_the_rest_never_notices(app: Path, tmp_path: Path) -> None:
    async def work() -> tuple[dict[str, Any], Counter[str]]:
        async with managed(app, tmp_path / "kept") as server:
            assert (await server.deploy_beside("shop", source("v1", "1 / 0"), 50)).status == 200
            rules = {"weights": {"0": 50, "1": 50}, "rollback_if": {"errors_above": 0.1, "after_calls": 5}}
            await traffic(server, rules)
            await divided(server)
            await answers(server, 10)
            while not (found := await traffic(server))["rolled_back"]:
                await asyncio.sleep(0.02)
            while not any("traffic-rolled-back" in row for row in await audited(server)):
                await asyncio.sleep(0.02)
            return found, await answers(server, 6)

    found, after = run(work)
    assert found["stable"] == "0" and "failed" in found["rolled_back"]["1"]
    assert found["counts"]["1"]["failed"] == found["counts"]["1"]["offered"] == 5
    assert after == {"v0": 6}


@pytest.mark.live
def test_a_rollback_without_a_version_takes_the_calls_of_a_canary_and_then_goes_back(app: Path, tmp_path: Path) -> None:
    async def work() -> list[Any]:
        async with managed(app, tmp_path / "kept") as server:
            await server.deploy("shop", source("v1"))
            await server.deploy_beside("shop", source("v2"), 90)
            await divided(server)
            before = await answers(server, 10)
            first = await server.ask("POST", "/v1/apps/shop/rollback", b"{}")
            after = await answers(server, 10)
            second = await server.ask("POST", "/v1/apps/shop/rollback", b"{}")
            return [before, first.json["version"], after, second.json["version"]]

    assert run(work) == [{"v1": 1, "v2": 9}, 1, {"v1": 10}, 0]


@pytest.mark.live
def test_a_canary_that_cannot_be_loaded_gets_no_call(app: Path, tmp_path: Path) -> None:
    broken = source("v1").replace(
        "def price(x):\n    pass", "class price:\n    def load(self):\n        1 / 0\n    def __call__(self, x):\n        pass"
    )

    async def work() -> tuple[dict[str, Any], Counter[str]]:
        async with managed(app, tmp_path / "kept") as server:
            await server.deploy_beside("shop", broken.replace('    return ["v1"', '        return ["v1"'), 50)
            while not (found := await traffic(server))["rolled_back"]:
                await asyncio.sleep(0.02)
            return found, await answers(server, 4)

    found, after = run(work)
    assert "ZeroDivisionError" in found["rolled_back"]["1"] and after == {"v0": 4}


@pytest.mark.live
def test_a_shadow_gets_a_copy_of_every_call_and_its_failures_reach_no_client(app: Path, tmp_path: Path) -> None:
    async def work() -> tuple[Counter[str], dict[str, Any]]:
        async with managed(app, tmp_path / "kept") as server:
            await server.deploy_beside("shop", source("v1", "1 / 0"), 0)
            await traffic(server, {"weights": {"0": 100}, "shadow": "1"})
            await divided(server)
            seen = await answers(server, 5)
            while (counts := (await traffic(server))["counts"])["1"]["failed"] < 5:
                await asyncio.sleep(0.02)
            return seen, counts

    seen, counts = run(work)
    assert seen == {"v0": 5} and counts["0"]["in_time"] == 5 and counts["1"]["offered"] == 5


@pytest.mark.live
def test_the_division_survives_a_restart_and_ends_with_the_next_deployment(app: Path, tmp_path: Path) -> None:
    async def work() -> list[Any]:
        said: list[Any] = []
        async with managed(app, tmp_path / "kept") as server:
            await server.deploy_beside("shop", source("v1"), 50)
        async with managed(app, tmp_path / "kept") as server:
            await divided(server)
            said.append(await answers(server, 4))
            await server.deploy("shop", source("v2"))
            said.append((await traffic(server))["weights"])
            while (await server.call("/v1/functions/price", 1)).json[0] != "v2":
                await asyncio.sleep(0.02)
            said.append(await answers(server, 4))
        return said

    assert run(work) == [{"v0": 2, "v1": 2}, {"2": 100.0}, {"v2": 4}]


# ------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "weights"),
        ({"weights": {"1": 50, "2": 40}}, "weights: they add up to 90"),
        ({"weights": {"9": 100}}, "weights.9: no version 9"),
        ({"weights": {"x": 100}}, "weights.x"),
        ({"weights": {"1": "all"}}, "weights.1"),
        ({"weights": {"1": 100}, "shadow": 1}, "shadow: version 1 has a weight"),
        ({"weights": {"1": 100}, "headers": [{"name": "authorization", "value": "x", "version": 2}]}, "headers[0].name"),
        ({"weights": {"1": 100}, "headers": [{"name": "x"}]}, "headers[0]"),
        ({"weights": {"1": 100}, "rollback_if": {"errors_above": 2}}, "rollback_if.errors_above"),
        ({"weights": {"1": 100}, "rollback_if": {"after": 2}}, "rollback_if"),
        ({"weights": {"1": 100}, "canary": 1}, "canary"),
    ],
)
def test_rules_that_make_no_sense_are_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadValue) as refused:
        parse_rules(body, [1, 2])
    assert field in refused.value.message and refused.value.hint


def target(name: str) -> CallTarget:
    return CallTarget(name, "function", (), Slo())


@examples(50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_of_any_round_of_calls_each_version_gets_exactly_its_weight(weights: list[int]) -> None:
    arms = [(target(f"v{index}"), float(weight)) for index, weight in enumerate(weights)]
    split = TrafficSplit(arms[0][0], arms)
    for _ in range(3):
        seen = Counter(split.choose({}).name for _ in range(sum(weights)))
        assert [seen[arm.name] for arm, _ in arms] == weights


def test_an_asynchronous_run_stays_with_the_stable_version() -> None:
    split = TrafficSplit(target("a"), [(target("b"), 100.0)])
    assert split.choose({b"prefer": b"respond-async"}).name == "a" and split.choose({}).name == "b"


@given(*[st.integers(0, 200)] * 4, st.floats(0, 1), st.floats(0, 1), st.integers(1, 300))
def test_a_breach_is_told_when_a_share_is_over_its_limit_and_never_on_too_few_calls(
    met: int, late: int, refused: int, failed: int, attainment: float, errors: float, after: int
) -> None:
    seen = CallOutcomes(met, late, refused, failed)
    rule = RollbackRule(attainment_below=attainment, errors_above=errors, after_calls=after)
    total = met + late + refused + failed
    expected = total >= after and (failed / total > errors or met / total < attainment)
    assert bool(rule.breach(seen)) == expected


def test_the_active_version_stays_stable_while_it_has_weight() -> None:
    assert TrafficRules(weights={1: 10, 2: 90}).stable(1) == 1
    assert TrafficRules(weights={2: 40, 3: 60}).stable(1) == 3
