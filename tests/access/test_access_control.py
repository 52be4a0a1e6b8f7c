"""Access control: users, tokens, tenants, secrets and the audit log, on a store."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lamina.access.access_control import SESSION_S, AccessControl
from lamina.access.admin_service import AdminService
from lamina.access.records import Identity
from lamina.access.vault import KEY_VARIABLE
from lamina.errors import BadValue, Conflict, Forbidden, LaminaError, NotFound, Refused, Unauthorized
from lamina.store.open import open_store

ROOT = Identity()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is elsewhere has no place for one."""
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(bytes(32)).decode())


PASSWORD = "correct horse battery"


class Clock:
    now_us = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


@contextlib.asynccontextmanager
async def opened(at: Path | str, clock: Clock | None = None) -> AsyncIterator[tuple[AccessControl, AdminService]]:
    store = open_store(at if isinstance(at, str) else str(at / "store.db"))
    access = AccessControl(store, clock or Clock())
    await access.load()
    try:
        yield access, AdminService(access)
    finally:
        await store.close()


def test_a_token_opens_what_its_scopes_say_and_is_shown_once(place: str) -> None:
    async def work() -> None:
        async with opened(place) as (access, desk):
            made = await desk.perform(ROOT, "token/create", {"name": "ci", "scopes": ["deploy"], "expires": "1h"})
            assert access.authenticate(made["token"]).scopes == {"deploy"}
            listed = await desk.perform(ROOT, "token/list", {})
            assert made["token"] not in str(listed) and "digest" not in str(listed)

    asyncio.run(work())


def test_tokens_survive_a_restart_and_only_their_hashes_are_on_disk(tmp_path: Path) -> None:
    async def work() -> str:
        async with opened(tmp_path) as (_, desk):
            token: str = (await desk.perform(ROOT, "token/create", {"name": "t"}))["token"]
        async with opened(tmp_path) as (access, _):
            assert access.authenticate(token).tenant == ""
        return token

    token = asyncio.run(work())
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.encode() not in written and token.removeprefix("lmt_").encode() not in written


def test_expired_revoked_and_unknown_tokens_are_unauthorized(tmp_path: Path) -> None:
    async def work() -> None:
        clock = Clock()
        async with opened(tmp_path, clock) as (access, desk):
            short = await desk.perform(ROOT, "token/create", {"name": "short", "expires": "1h"})
            gone = await desk.perform(ROOT, "token/create", {"name": "gone"})
            await desk.perform(ROOT, "token/revoke", {"id": gone["id"]})
            clock.now_us += 3_600_000_001
            for token in (short["token"], gone["token"], "lmt_made-up", ""):
                with pytest.raises(Unauthorized):
                    access.authenticate(token)

    asyncio.run(work())


def test_an_invited_user_signs_up_once_logs_in_and_the_session_ends_after_a_while(place: str) -> None:
    async def work() -> None:
        clock = Clock()
        async with opened(place, clock) as (access, desk):
            code = (await desk.perform(ROOT, "user/invite", {"name": "ada", "scopes": ["admin"]}))["code"]
            with pytest.raises(Unauthorized):
                await access.sign_up("ada", PASSWORD, "lmi_wrong")
            await access.sign_up("ada", PASSWORD, code)
            with pytest.raises(Unauthorized):
                await access.sign_up("ada", PASSWORD + "!", code)
            token, _ = await access.log_in("ada", PASSWORD)
            assert access.authenticate(token).name == "ada"
            clock.now_us += SESSION_S * 1_000_000
            with pytest.raises(Unauthorized):
                access.authenticate(token)
            assert access.people["ada"].password.startswith("$argon2id$")

    asyncio.run(work())


def test_wrong_passwords_make_the_next_try_wait_whether_the_name_exists_or_not(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (access, _):
            for _ in range(5):
                with pytest.raises(Unauthorized):
                    await access.log_in("nobody", PASSWORD)
            with pytest.raises(Refused) as refused:
                await access.log_in("nobody", PASSWORD)
            assert refused.value.retry_after_s == 1

    asyncio.run(work())


@pytest.mark.parametrize("password", ["short", "x" * 257])
def test_passwords_have_bounds(tmp_path: Path, password: str) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (access, desk):
            code = (await desk.perform(ROOT, "user/invite", {"name": "ada"}))["code"]
            with pytest.raises(BadValue):
                await access.sign_up("ada", password, code)

    asyncio.run(work())


def test_an_administrator_of_a_tenant_manages_that_tenant_alone(place: str) -> None:
    async def work() -> None:
        async with opened(place) as (_, desk):
            for name in ("acme", "other"):
                await desk.perform(ROOT, "tenant/set", {"name": name, "rate_per_s": 10.0})
            await desk.perform(ROOT, "secret/set", {"name": "key", "value": "v", "tenant": "other"})
            boss = Identity("acme", "boss", frozenset({"admin"}))
            made = await desk.perform(boss, "token/create", {"name": "t"})
            assert made["tenant"] == "acme"
            with pytest.raises(Forbidden):
                await desk.perform(boss, "token/create", {"name": "t", "tenant": "other"})
            with pytest.raises(Forbidden):
                await desk.perform(boss, "tenant/set", {"name": "acme", "rate_per_s": 1e6})
            assert await desk.perform(boss, "secret/list", {}) == []
            assert [one["name"] for one in await desk.perform(boss, "tenant/list", {})] == ["acme"]

    asyncio.run(work())


def test_without_the_scope_nothing_is_administered(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (_, desk):
            caller = Identity("", "c", frozenset({"invoke", "deploy", "read"}))
            for deed in desk.actions:
                with pytest.raises(Forbidden):
                    await desk.perform(caller, deed, {})

    asyncio.run(work())


def test_secrets_go_in_and_never_come_out(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (_, desk):
            await desk.perform(ROOT, "secret/set", {"name": "key", "value": "swordfish"})
            told = [await desk.perform(ROOT, deed, {}) for deed in ("secret/list", "audit/list", "token/list")]
            assert "swordfish" not in str(told) and "key" in str(told)

    asyncio.run(work())


def test_the_audit_log_has_callers_and_actions_in_order(place: str) -> None:
    async def work() -> None:
        clock = Clock()
        async with opened(place, clock) as (access, desk):
            await desk.perform(ROOT, "tenant/set", {"name": "acme"})
            clock.now_us += 1
            await desk.perform(Identity("acme", "boss"), "token/create", {"name": "t"})
            clock.now_us += 1
            await desk.perform(ROOT, "user/invite", {"name": "ada"})
            clock.now_us += 1
            with pytest.raises(Unauthorized):
                await access.log_in("ada", PASSWORD)
            await access.write(lambda db: None)
            deeds = await desk.perform(ROOT, "audit/list", {})
            assert [(deed["who"], deed["what"], deed["ok"]) for deed in deeds] == [
                ("local", "tenant/set", True),
                ("boss", "token/create", True),
                ("local", "user/invite", True),
                ("ada", "log-in", False),
            ]
            later = await desk.perform(ROOT, "audit/list", {"after": deeds[0]["key"], "limit": 1})
            assert [deed["what"] for deed in later] == ["token/create"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("deed", "given", "error"),
    [
        ("token/create", {"name": "../x"}, BadValue),
        ("token/create", {"name": "t", "scopes": ["root"]}, BadValue),
        ("token/create", {"name": "t", "scopes": []}, BadValue),
        ("token/create", {"name": "t", "expires": "never"}, BadValue),
        ("token/create", {"name": "t", "tenant": "unheard-of"}, NotFound),
        ("token/revoke", {"id": "0"}, NotFound),
        ("tenant/set", {"name": "a", "rate_per_s": "many"}, BadValue),
        ("tenant/set", {"name": "a", "weight": 0}, BadValue),
        ("tenant/set", {"name": "a", "concurrent": -1}, BadValue),
        ("user/invite", {"name": 7}, BadValue),
        ("secret/set", {"name": "k", "value": ""}, BadValue),
        ("secret/remove", {"name": "k"}, NotFound),
        ("audit/list", {"limit": 10**9}, BadValue),
        ("no/such", {}, NotFound),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, deed: str, given: dict[str, Any], error: type[LaminaError]) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (_, desk):
            with pytest.raises(error):
                await desk.perform(ROOT, deed, given)

    asyncio.run(work())


def test_a_name_is_given_once_and_a_removed_tenant_takes_its_tokens_along(place: str) -> None:
    async def work() -> None:
        async with opened(place) as (access, desk):
            await desk.perform(ROOT, "tenant/set", {"name": "acme"})
            await desk.perform(ROOT, "user/invite", {"name": "ada", "tenant": "acme"})
            with pytest.raises(Conflict):
                await desk.perform(ROOT, "user/invite", {"name": "ada"})
            token = (await desk.perform(ROOT, "token/create", {"name": "t", "tenant": "acme"}))["token"]
            await desk.perform(ROOT, "tenant/remove", {"name": "acme"})
            with pytest.raises(Unauthorized):
                access.authenticate(token)
            assert not access.people

    asyncio.run(work())


def test_the_operators_token_is_good_without_a_store_entry_and_cannot_be_revoked_there(tmp_path: Path) -> None:
    async def work() -> None:
        store = open_store(str(tmp_path / "store.db"))
        access = AccessControl(store, Clock(), operator_token="0123456789abcdefghij")
        assert access.usable_tokens() == 1  # before the store has been read
        await access.load()
        assert access.authenticate("0123456789abcdefghij").scopes == {"invoke", "read", "deploy", "admin"}
        with pytest.raises(BadValue, match="not in the store"):
            await AdminService(access).perform(ROOT, "token/revoke", {"id": "operator"})
        await store.close()
        with pytest.raises(Unauthorized):
            access.authenticate("0123456789abcdefghi")

    asyncio.run(work())


@pytest.mark.parametrize("text", ["short", "with a space in between", "umläut" * 5])
def test_an_operators_token_that_is_short_or_no_header_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadValue, match="operator's token"):
        AccessControl(open_store(str(tmp_path / "store.db")), operator_token=text)
