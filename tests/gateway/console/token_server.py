"""A server on a public address of this machine, where the console asks for a token."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from lamina.access.admin_service import AdminService
from lamina.access.records import SCOPES, Identity
from lamina.gateway.deploy.admin_server import open_access
from lamina.store.open import open_store
from tests.gateway.console.emulated_fixture import console_server


@contextlib.contextmanager
def token_server(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def first_token() -> str:
        store = open_store(str(folder / "store.db"))
        made = await AdminService(await open_access(store)).perform(
            Identity(), "token/create", {"name": "op", "scopes": [*SCOPES]}
        )
        await store.close()
        return str(made["token"])

    token = do(first_token())
    opened = console_server(folder, admin_host="0.0.0.0")
    _, admin = do(opened.__aenter__())
    try:
        yield {"console_url": f"http://127.0.0.1:{admin.port}/console"}, token
    finally:
        do(opened.__aexit__(None, None, None))
        do(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
