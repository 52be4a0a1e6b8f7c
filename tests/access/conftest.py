"""Stores of both back ends."""

from __future__ import annotations

from tests.store.conftest import place as place
from tests.store.conftest import postgres_url as postgres_url
