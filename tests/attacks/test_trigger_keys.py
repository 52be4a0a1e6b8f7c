"""Keys of triggers: a caller that may only call cannot use up the idempotency key of a start to come."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lamina.state.trigger_starts import KEY_PREFIX
from tests.attacks.gateways import emulated
from tests.serving import Browser, run


@pytest.mark.parametrize(("key", "status"), [("2026-11-20T00:00:00Z", 400), ("mine", 202)])
def test_a_key_that_a_trigger_would_start_a_run_with_is_refused(tmp_path: Path, key: str, status: int) -> None:
    digest = hashlib.blake2b(f"nightly/{key}".encode(), digest_size=16).hexdigest()
    sent = KEY_PREFIX + digest if status == 400 else f"{KEY_PREFIX}{key}"

    async def work() -> None:
        async with emulated(str(tmp_path / "runs.db")) as gateway, Browser(gateway.port) as browser:
            answer = await browser.ask("POST", "/v1/functions/echo", b"1", Prefer="respond-async", Idempotency_Key=sent)
            assert answer.status == status

    run(work)
