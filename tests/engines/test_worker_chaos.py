"""Workers are killed under load: nothing accepted is lost, doubled or answered to the wrong client."""

from __future__ import annotations

import asyncio
import sys

import pytest
from benchmarks.chaos import torture
from benchmarks.servers import APPS, free_port, started, wait_for

pytestmark = pytest.mark.live


def test_nothing_is_lost_while_workers_die() -> None:
    """A short version of `python -m benchmarks chaos`, at a rate any machine can take, and with all the time one may need."""
    port = free_port()
    with started([sys.executable, "-m", "lamina", "serve", str(APPS / "nonce.py"), "--port", str(port), "--json"]) as server:
        wait_for(f"http://127.0.0.1:{port}/readyz", None, 60)
        history = asyncio.run(torture(server.pid, port, rate=60, seconds=4, every_s=0.5, seed=5, kills=6, deadline_s=60))
    assert history.kills >= 6
    assert history.sent > 200
    assert (history.lost, history.doubled, history.wrong) == (0, 0, 0)
    assert history.success >= 0.99, history.failures
