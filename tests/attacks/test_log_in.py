"""Log-ins are open to all that reach the management port: guessing keeps no user out, fills no store, and takes no more than a
share of the cores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lamina.access.access_control import FREE_TRIES, MAX_TRIES
from lamina.errors import LaminaError, Refused, Unauthorized
from tests.access.test_access_control import PASSWORD, ROOT, opened

GUESSER, USER = "192.0.2.1", "192.0.2.2"


async def tried(access: Any, name: str, password: str, address: str) -> type[LaminaError] | None:
    try:
        await access.log_in(name, password, address)
    except LaminaError as error:
        return type(error)
    return None


@pytest.mark.slow
def test_guessing_from_one_address_keeps_no_user_out_at_another(tmp_path: Path):
    async def work() -> None:
        async with opened(tmp_path) as (access, desk):
            code = (await desk.perform(ROOT, "user/invite", {"name": "ada", "scopes": ["admin"]}))["code"]
            await access.sign_up("ada", PASSWORD, code)
            guesses = [await tried(access, "ada", "a wrong password", GUESSER) for _ in range(FREE_TRIES + 1)]
            assert guesses == [*[Unauthorized] * FREE_TRIES, Refused]
            assert await tried(access, "ada", PASSWORD, USER) is None
            assert await tried(access, "ada", PASSWORD, GUESSER) is Refused

    asyncio.run(work())


@pytest.mark.slow
def test_names_that_there_are_not_leave_nothing_in_the_store(tmp_path: Path):
    async def work() -> list[tuple[str, bool]]:
        async with opened(tmp_path) as (access, desk):
            code = (await desk.perform(ROOT, "user/invite", {"name": "ada", "scopes": ["admin"]}))["code"]
            await access.sign_up("ada", PASSWORD, code)
            for name in ("ada", "bob", "eve"):
                assert await tried(access, name, "a wrong password", GUESSER) is Unauthorized
            await access.write(lambda db: None)
            entries = await desk.perform(ROOT, "audit/list", {})
            return [(one["who"], one["ok"]) for one in entries if one["what"] == "log-in"]

    assert asyncio.run(work()) == [("ada", False)]


@pytest.mark.slow
def test_an_address_has_a_few_tries_at_a_time(tmp_path: Path):
    async def work() -> list[Any]:
        async with opened(tmp_path) as (access, _):
            tries = [tried(access, f"user-{number}", "a wrong password", GUESSER) for number in range(MAX_TRIES + 3)]
            found = await asyncio.gather(*tries, tried(access, "ada", "a wrong password", USER))
            assert await tried(access, "later", "a wrong password", GUESSER) is Unauthorized
            return found

    pytest.importorskip("argon2")
    found = asyncio.run(work())
    assert found == [*[Unauthorized] * MAX_TRIES, *[Refused] * 3, Unauthorized]
