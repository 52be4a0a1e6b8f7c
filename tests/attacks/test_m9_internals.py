"""Traces and paths of the server (M9): told to those that may deploy the code, and to no other caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina.access.authorization import sees_internals
from lamina.access.records import SCOPES, Identity
from lamina.gateway.routes.problems import make_problem, without_internals
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run, write_app

pytestmark = pytest.mark.live

PATHS = ("/secret/place", "app.py")


@pytest.mark.parametrize("ingress", [0, 1])
def test_m9_traces_and_paths_are_for_those_that_may_deploy(tmp_path: Path, ingress: int) -> None:
    async def work() -> dict[str, list[Any]]:
        said: dict[str, list[Any]] = {}
        async with managed(write_app(tmp_path), tmp_path / "kept", runs=True, ingress=ingress) as server:
            tokens = {
                "operator": await server.token("invoke", "read", "deploy"),
                "caller": await server.token("invoke", "read"),
                "tenant": await server.token("invoke", "read", "deploy", tenant="acme"),  # whose the function is not
                "local": "",
            }
            infer = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["7"]}]}
            for name, token in tokens.items():
                called = await server.call("/v1/functions/fail", 7, token)
                inferred = await server.call("/v2/models/fail/infer", infer, token)
                run_id = (await server.call("/v1/functions/fail", 7, token, prefer="respond-async")).json["id"]
                result = await server.call(f"/v1/runs/{run_id}/result?wait_ms=20000", token=token, method="GET")
                shown = await server.call(f"/v1/runs/{run_id}", token=token, method="GET")
                said[name] = [called.json, result.json, shown.json["problem"], inferred.json]
        return said

    said = run(work)
    for name, (*problems, inferred) in said.items():
        is_told = name in ("operator", "local")
        for problem in problems:
            assert problem["error"] == "ValueError" and "cannot take 7" in problem["detail"], (name, problem)
            assert ("trace" in problem) == is_told and ("/secret/place" in problem["detail"]) == is_told, (name, problem)
        assert ("/secret/place" in inferred["error"]) == is_told


def test_paths_are_cut_to_their_last_name_and_addresses_are_left() -> None:
    problem = make_problem(
        500, "no /var/lib/x.bin, see http://a.example/b/c or 1/2/3 and /tmp", hint="look at (/etc/lamina/conf.d/a)"
    )
    shown = without_internals(problem)
    assert shown.detail == "no x.bin, see http://a.example/b/c or 1/2/3 and /tmp"
    assert shown.hint == "look at (a)"


def test_the_scope_and_the_owner_decide() -> None:
    def caller(tenant: str, *scopes: Any) -> Identity:
        return Identity(tenant, "n", frozenset(scopes))

    assert sees_internals(caller("", *SCOPES), "acme") and sees_internals(caller("acme", "deploy"), "acme")
    for other in (caller("acme", "invoke", "read", "admin"), caller("evil", *SCOPES), caller("", "invoke", "read")):
        assert not sees_internals(other, "acme")
