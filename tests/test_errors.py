"""Errors: one root, and each says which side is at fault and what to do."""

from __future__ import annotations

import pytest

from lamina import errors
from lamina.errors import LaminaError, Refused

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LaminaError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_a_status_a_code_and_a_reason_to_exist(kind: type[LaminaError]):
    assert 400 <= kind.status < 600
    assert kind.code == kind.code.lower()
    assert kind.__doc__


def test_codes_are_not_shared():
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes)


def test_the_hint_comes_after_the_message():
    assert str(LaminaError("what was wrong", hint="what to do")) == "what was wrong\n  hint: what to do"
    assert str(LaminaError("what was wrong")) == "what was wrong"


def test_a_refusal_carries_its_offer():
    refused = Refused("too late", reason="deadline", retry_after_s=0.5, offer_ms=20.0)
    assert (refused.reason, refused.retry_after_s, refused.offer_ms) == ("deadline", 0.5, 20.0)
