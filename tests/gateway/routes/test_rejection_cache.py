"""Rejection cache: a rejection holds until something changes, and is repeated with another id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lamina.core.actions import Reject
from lamina.gateway.routes.rejection_cache import MAX_AGE_US, CachedRejection, RejectionCache

REJECTION = Reject("first", "deadline", retry_after_us=2_000_000, offer_us=5_000)


def test_a_rejection_given_again_differs_in_its_id_only():
    said: list[bytes] = []

    class Client:
        def respond(self, status: int, body: bytes, kind: bytes, extra: bytes) -> None:
            said.append(b"%d %s %s" % (status, body, extra))

    rejection = CachedRejection(1, 10, REJECTION)
    for name in ("call-1", "call-2"):
        rejection.respond(Client(), name)  # type: ignore[arg-type]
    assert b"call-1" in said[0] and b'"offer_ms":5.0' in said[0] and b"retry-after: 2" in said[0]
    assert said[1] == said[0].replace(b"call-1", b"call-2")


def cache() -> tuple[Any, RejectionCache]:
    driver: Any = SimpleNamespace(capacity_generation=1)
    found = RejectionCache(driver)
    found.store("f", "", 1_000, REJECTION)
    return driver, found


def test_it_holds_for_others_of_its_target_and_tenant():
    _, found = cache()
    assert found.find("f", "", 1_500) is not None
    assert found.find("f", "acme", 1_500) is None
    assert found.find("g", "", 1_500) is None


def test_that_of_a_tenant_is_not_the_operator_s():
    _, found = cache()
    found.cached.clear()
    found.store("f", "acme", 1_000, REJECTION)
    assert found.find("f", "acme", 1_500) is not None and found.find("f", "", 1_500) is None


def test_it_ends_with_its_time():
    _, found = cache()
    assert found.find("f", "", 1_000 + MAX_AGE_US) is None
    assert not found.cached


def test_when_something_ends_it_holds_for_half_of_the_time_that_the_call_was_late():
    driver, found = cache()
    driver.capacity_generation = 2
    assert found.find("f", "", 1_000 + MAX_AGE_US // 2 - 1) is not None
    assert found.find("f", "", 1_000 + MAX_AGE_US // 2) is None


def test_a_call_that_was_hardly_late_is_asked_about_again_as_soon_as_something_ends():
    driver, found = cache()
    found.store("f", "", 1_000, Reject("first", "deadline", retry_after_us=1_000, offer_us=5_000))
    assert found.find("f", "", 1_001) is not None
    driver.capacity_generation = 2
    assert found.find("f", "", 1_001) is None
