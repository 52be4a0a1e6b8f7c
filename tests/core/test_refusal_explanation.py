"""A refusal in sentences: which figures it names, that they add up, and that any history gets some text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.refusal_explanation import explain_refusal, milliseconds, repeated_call, time_terms


def refused(reason: str, why: Any = None, **more: Any) -> dict[str, Any]:
    end = {"what": f"refused: {reason}", "at_ms": 0.0, "offer_ms": more.pop("offer_ms", None), "why": why}
    return {"call": "c1", "target": "resnet", "tenant": "", "goal_ms": 100.0, "unread_ms": 0.0, "steps": [], "end": end, **more}


WEIGHED = {"rule": "deadline", "expected_ms": 90.0, "margin": 0.1, "reserve_ms": 6.0, "allowed_ms": 100.0}


def test_a_call_that_would_be_late_says_by_how_much_and_what_of():
    said = " ".join(explain_refusal(refused("deadline", WEIGHED, offer_ms=105.0)))
    assert "It had 100 ms from its arrival to its answer." in said
    assert "It was expected to take 90.0 ms" in said
    assert "A promise needs 15.0 ms to spare" in said
    assert "Together that is 105 ms, 5.0 ms too late." in said


def test_the_terms_add_up_to_what_was_compared_with_the_deadline():
    terms = time_terms(refused("deadline", WEIGHED, unread_ms=4.0))
    assert [term.name for term in terms] == ["unread", "expected", "margin", "reserve"]
    assert sum(term.ms for term in terms) == pytest.approx(4 + 90 + 9 + 6)


def test_time_that_a_request_lay_unread_is_named():
    said = explain_refusal(refused("deadline", WEIGHED | {"expected_ms": 10.0}, unread_ms=95.0))
    assert "95.0 ms of that had passed when the server read it" in " ".join(said)


def test_load_shedding_speaks_of_shares():
    said = explain_refusal(refused("deadline", {"rule": "load shedding", "expected_ms": 0.0}, offer_ms=300.0))
    assert said[0].startswith("More is asked for than the devices can do") and "300 ms" in said[-1]


def test_a_limit_names_its_tenant_and_itself():
    assert explain_refusal(refused("quota", "20 calls a second", tenant="acme"))[0] == (
        "Tenant acme may have 20 calls a second, and had reached that."
    )


def test_a_repeated_rejection_names_the_call_that_was_decided_about():
    told = refused("deadline", "like call 5e8c-1 a moment before, and nothing has ended since (rejection cache)")
    assert repeated_call(told) == "5e8c-1" and "call 5e8c-1" in explain_refusal(told)[0]


def test_a_call_that_was_not_refused_needs_no_explanation():
    assert explain_refusal({"end": {"what": "in time"}}) == [] == explain_refusal({})
    assert time_terms({"end": {"what": "in time"}}) == []


@given(
    reason=st.sampled_from(
        ["deadline", "quota", "share", "cost", "queue-full", "overloaded", "no-capacity", "bad-value", "unknown", "mine"]
    ),
    why=st.none() | st.text() | st.dictionaries(st.sampled_from(["rule", "because", "note"]), st.text()) | st.just(WEIGHED),
    tenant=st.text(max_size=8),
    goal_ms=st.none() | st.floats(0.001, 1e7),
    offer_ms=st.none() | st.floats(0.001, 1e7),
    unread_ms=st.floats(0, 1e6),
)
def test_every_refusal_has_sentences(reason, why, tenant, goal_ms, offer_ms, unread_ms):
    """Also those of policies of others, with reasons of their own."""
    told = refused(reason, why, tenant=tenant, goal_ms=goal_ms, offer_ms=offer_ms, unread_ms=unread_ms)
    said = explain_refusal(told)
    assert said and all(isinstance(one, str) and one for one in said)


@pytest.mark.parametrize(("ms", "text"), [(0.25, "250 µs"), (1.5, "1.5 ms"), (120.4, "120 ms"), (12_340, "12.3 s")])
def test_times_have_a_unit_that_fits(ms, text):
    assert milliseconds(ms) == text
