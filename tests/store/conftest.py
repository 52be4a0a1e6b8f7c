"""Both store back ends, for real: PostgreSQL as a server of our own on a UNIX socket, if its programs are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.postgres import private_server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    pytest.importorskip("psycopg")
    with private_server() as url:
        if not url:
            pytest.skip("no PostgreSQL server is installed")
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.live)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a fresh store may be."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    import psycopg

    url: str = request.getfixturevalue("postgres_url")
    schema = "s" + tmp_path.name.encode().hex()[-40:]
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
    return f"{url}&options=-csearch_path%3D{schema}"
