"""Frozen values that all layers share."""

from __future__ import annotations

import msgspec
import pytest

from lamina.types import Call, DeviceSpec, FunctionSpec, Slo, call_for

MS = 1_000


def test_a_late_answer_that_is_worth_nothing_expires_with_its_goal():
    call = call_for("c", "f", 5, Slo(latency_us=50 * MS))
    assert (call.deadline_us, call.expires_us) == (50 * MS + 5, 50 * MS + 5)


def test_a_late_answer_that_is_worth_something_is_served_until_the_timeout():
    call = call_for("c", "f", 5, Slo(latency_us=50 * MS, on_miss="serve", timeout_us=900 * MS))
    assert (call.deadline_us, call.expires_us) == (50 * MS + 5, 900 * MS + 5)


@pytest.mark.parametrize("on_miss", ["shed", "serve"])
def test_without_a_goal_the_timeout_is_the_goal(on_miss):
    call = call_for("c", "f", 5, Slo(on_miss=on_miss, timeout_us=900 * MS))
    assert (call.deadline_us, call.expires_us) == (900 * MS + 5, 900 * MS + 5)


def test_a_caller_may_set_its_own_deadline():
    call = call_for("c", "f", 5, Slo(latency_us=50 * MS), deadline_us=20 * MS)
    assert (call.deadline_us, call.expires_us) == (20 * MS, 20 * MS)


def test_a_deadline_beyond_the_timeout_is_kept():
    call = call_for("c", "f", 0, Slo(on_miss="serve", timeout_us=10 * MS), deadline_us=20 * MS)
    assert call.expires_us == 20 * MS


def test_the_price_of_a_device_is_spread_over_its_units():
    device = DeviceSpec(id="d", kind="k", units=4, memory_mib=1, price_per_s=8.0)
    assert device.unit_price() * 4 * 1_000_000 == pytest.approx(8.0)


@pytest.mark.parametrize(
    "value", [Call("c", "f", 5), FunctionSpec(name="f"), DeviceSpec(id="d", kind="k", units=1, memory_mib=1)]
)
def test_values_travel_as_json_and_cannot_be_changed(value: msgspec.Struct):
    assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    with pytest.raises(AttributeError):
        value.id = "other"  # type: ignore[attr-defined]
