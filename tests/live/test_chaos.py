"""Workers are killed under load: nothing accepted is lost, doubled or given to somebody else."""

from __future__ import annotations

import asyncio
import sys

import pytest
from benchmarks.chaos import torture
from benchmarks.servers import APPS, free_port, started, wait_for

pytestmark = pytest.mark.live


def test_nothing_is_lost_while_workers_die() -> None:
    """A short version of `python -m benchmarks chaos`, at a rate any machine can take."""
    port = free_port()
    with started([sys.executable, "-m", "lamina", "serve", str(APPS / "nonce.py"), "--port", str(port), "--json"]) as server:
        wait_for(f"http://127.0.0.1:{port}/readyz", None)
        history = asyncio.run(torture(server.pid, port, rate=100, seconds=10, every_s=1.0, seed=5))
    assert history.kills >= 7
    assert history.sent > 800
    assert (history.lost, history.doubled, history.wrong) == (0, 0, 0)
    assert history.success >= 0.99, history.failures
