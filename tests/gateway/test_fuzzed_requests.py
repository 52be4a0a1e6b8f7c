"""Fuzzed requests, ten thousand of them: nothing crashes, nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import statistics
from pathlib import Path

import pytest
from benchmarks import hostile
from benchmarks.hostile import Seen, rss_mib

from lamina.server.http1 import HttpLimits
from tests.serving import raw, request, run, served, write_app

pytestmark = pytest.mark.live

SEED = hostile.SEED


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


def test_ten_thousand_mutated_requests_do_no_harm(tmp_path: Path) -> None:
    """T0. A million of them: `python -m benchmarks.hostile`."""

    async def work() -> tuple[Seen, float]:
        async with served(write_app(tmp_path, hostile.APP), limits=HttpLimits(head_s=5, body_idle_s=5)) as gateway:
            while not gateway.router.is_ready():
                await asyncio.sleep(0.01)
            rng, seen = random.Random(hostile.SEED), Seen()
            await hostile.attack(gateway.port, rng, 1_000, seen)
            gc.collect()
            before_mib = rss_mib()
            await hostile.attack(gateway.port, rng, 9_000, seen)
            gc.collect()
            grown_mib = rss_mib() - before_mib
            state = gateway.driver.controller.state
            state.check()
            while state.runs or gateway.server.connections:
                await asyncio.sleep(0.01)
            assert not gateway.driver.data._runs, "values outlive their calls"
            return seen, grown_mib

    seen, grown_mib = run(work, 110)
    assert not seen.strange, f"seed {hostile.SEED}: {seen.statuses}"
    assert not seen.hangs
    assert seen.statuses.keys() >= {200, 400, 404}
    assert grown_mib <= 20, f"{grown_mib:.1f} MiB more after 9,000 requests"
    after_s, calm_s = statistics.median(seen.valid_s), statistics.median(seen.again_s)
    assert after_s <= max(2 * calm_s, 0.05), f"who behaves has to wait: {after_s:.4f} s instead of {calm_s:.4f}"


def test_two_hundred_ways_to_fail_tell_nothing_about_the_inside(app: Path) -> None:
    rng = random.Random(SEED)
    tries: list[bytes] = []
    for number in range(50):
        tries.append(request("POST", f"/v1/functions/{'x' * number}nope", b"1"))
        tries.append(request("POST", "/v1/functions/echo", b"{" * (number + 1)))
        tries.append(request("POST", "/v1/functions/fail", str(number).encode()))
        tries.append(request("POST", "/v1/functions/add", json.dumps({f"k{number}": rng.random()}).encode()))
    inside = re.compile(
        r"/secret|/tmp|/dev/shm|\.py|Traceback|0x[0-9a-f]{6}|<class|object at"
        r"|lamina\.(?!value)|\bline \d+|ValueError|site-packages"
    )

    async def work() -> None:
        async with served(app, full_errors=False) as gateway:
            ids = set()
            for data in tries:
                answer = await raw(gateway.port, data)
                assert answer is not None and answer.status >= 400
                assert not inside.search(answer.body.decode()), answer.body
                ids.add(answer.json["id"])
            assert len(ids) == len(tries)

    run(work)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../echo",
        "%2e%2e%2fecho",
        "%252e%252e%252fecho",
        "/etc/passwd",
        "C:\\echo",
        "e" * 300,
        "\N{CYRILLIC SMALL LETTER IE}cho",
        "echo/",
        "echo\x00",
        "ECHO",
        "con",
        "echo/../add",
        ".",
        "",
    ],
)
def test_a_name_is_not_a_path(app: Path, name: str) -> None:
    async def work() -> int:
        async with served(app) as gateway:
            data = b"POST /v1/functions/" + name.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n1"
            answer = await raw(gateway.port, data)
            assert answer is not None
            return answer.status

    assert run(work) in (400, 404)
