"""Encryption of secrets at rest: sealed, each for its owner, under a key that is not in the store."""

from __future__ import annotations

import asyncio
import base64
import stat
from pathlib import Path

import pytest

from lamina.access.vault import KEY_FILE, KEY_VARIABLE, Vault
from lamina.errors import BadValue
from tests.access.test_access_control import ROOT, opened

KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_what_is_sealed_opens_for_its_owner_alone(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    sealed = vault.seal("acme/key", "swordfish")
    assert vault.open("acme/key", sealed) == "swordfish"
    with pytest.raises(BadValue, match="another key"):
        vault.open("other/key", sealed)


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    sealed = Vault(tmp_path).seal("a/b", "x")
    assert Vault(tmp_path).open("a/b", sealed) == "x"
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_the_same_secret_never_looks_the_same(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    assert vault.seal("a/b", "x") != vault.seal("a/b", "x")


def test_a_key_in_the_environment_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert Vault(None).open("a/b", Vault(tmp_path).seal("a/b", "x")) == "x"
    assert not (tmp_path / KEY_FILE).exists()


def test_a_database_elsewhere_has_no_place_for_a_key() -> None:
    with pytest.raises(BadValue, match=KEY_VARIABLE) as refusal:
        Vault(None).seal("a/b", "x")
    assert "openssl rand -base64 32" in refusal.value.hint


@pytest.mark.parametrize("key", ["short", base64.b64encode(bytes(16)).decode(), "ä" * 44])
def test_a_key_of_another_form_is_no_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(BadValue, match="32 bytes in base64"):
        Vault(None).seal("a/b", "x")


@pytest.mark.parametrize("sealed", ["swordfish", "aesgcm1:", "aesgcm1:????", "aesgcm1:" + base64.b64encode(bytes(40)).decode()])
def test_what_was_not_sealed_here_does_not_open(tmp_path: Path, sealed: str) -> None:
    vault = Vault(tmp_path)
    vault.seal("a/b", "x")
    with pytest.raises(BadValue):
        vault.open("a/b", sealed)


def test_a_copy_of_the_store_holds_no_secret_and_a_lost_key_costs_the_secrets_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> tuple[dict[str, str], dict[str, str]]:
        async with opened(tmp_path) as (access, desk):
            await desk.perform(ROOT, "secret/set", {"name": "api-key", "value": "swordfish"})
            known = access.environment("")
        (tmp_path / KEY_FILE).unlink()
        async with opened(tmp_path) as (access, desk):
            return known, access.environment("")

    known, lost = asyncio.run(work())
    assert (known, lost) == ({"LAMINA_SECRET_API_KEY": "swordfish"}, {})
    assert "cannot be read" in caplog.text
    assert not any(b"swordfish" in path.read_bytes() for path in tmp_path.iterdir())
