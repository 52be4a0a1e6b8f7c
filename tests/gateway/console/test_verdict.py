"""The verdict: each cause is named where its figures say so, and figures of clients' own making are no fault of the server."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.gateway.console.verdict import DeviceLoad, ServerFigures, ShortTarget, judge

FULL, HALF = DeviceLoad("gpu0", "h200", 0.96), DeviceLoad("gpu0", "h200", 0.4)


def short(**more: Any) -> ShortTarget:
    given = {"name": "resnet", "attainment": 0.8, "late": 0, "failed": 0, "refused": 20, "slo_us": 100_000, "busiest": HALF}
    return ShortTarget(**(given | more))


def figures(worst: ShortTarget | None, **more: Any) -> ServerFigures:
    return ServerFigures(**({"span_s": 60, "met": 80, "offered": 100, "short": 1, "worst": worst, "busiest": HALF} | more))


def test_without_calls_it_says_so():
    assert judge(ServerFigures(span_s=4)).state == "idle"


def test_everything_in_time_needs_nothing():
    verdict = judge(figures(None, met=100))
    assert verdict.state == "good" and verdict.in_time == "Yes: 100.0 % of 100 calls in the last minute."
    assert verdict.help == "Nothing is needed."


def test_the_time_that_was_looked_at_is_said():
    assert "in the last 5 s" in judge(figures(None, span_s=5.2)).in_time


def test_calls_beyond_a_tenants_limit_are_no_shortage():
    verdict = judge(figures(None, met=100, limited=30, limited_tenant="globex"))
    assert verdict.state == "good" and "30 more were refused by limits of tenant globex" in verdict.in_time
    assert "unless tenant globex should have more" in verdict.help


def test_a_full_device_is_the_bottleneck_and_another_would_help():
    verdict = judge(figures(short(busiest=FULL)))
    assert verdict.state == "refusing" and verdict.bottleneck.startswith("gpu0: 96 %")
    assert verdict.more_of == "h200" and "One more h200" in verdict.help


def test_a_goal_below_the_time_of_one_call_is_the_cause_even_on_a_full_device():
    assert judge(figures(short(busiest=FULL, alone_us=140_000))).bottleneck == (
        "The SLO of resnet: one call alone takes 140 ms, and has 100 ms."
    )


def test_a_server_that_reads_late_is_the_cause():
    assert judge(figures(short(), lag_us=56_000)).bottleneck.startswith(
        "The server's own process: requests lay unread for up to 56.0 ms"
    )


def test_a_long_way_is_the_cause():
    assert judge(figures(short(way_us=60_000))).bottleneck.startswith("The way to a device and back: 60.0 ms")


def test_a_wrong_profile_is_the_cause():
    verdict = judge(figures(short(stale=("encode", 2.2))))
    assert "encode takes 2.2 times" in verdict.bottleneck and "lamina profile encode" in verdict.help


def test_a_function_that_is_loading_is_the_cause():
    assert "encode has no instance" in judge(figures(short(loading="encode"))).bottleneck


def test_code_that_fails_comes_before_everything_else():
    verdict = judge(figures(short(failed=50, refused=1, busiest=FULL, loading="encode")))
    assert verdict.state == "failing" and verdict.bottleneck.startswith("The code")


@given(
    worst=st.none()
    | st.builds(
        short,
        late=st.integers(0, 9),
        failed=st.integers(0, 9),
        refused=st.integers(0, 9),
        slo_us=st.integers(0, 10**6),
        alone_us=st.integers(0, 10**6),
        loading=st.sampled_from(["", "encode"]),
        busiest=st.none() | st.builds(DeviceLoad, st.just("gpu0"), st.just("h200"), st.floats(0, 2)),
        way_us=st.integers(0, 10**6),
    ),
    met=st.integers(0, 100),
    limited=st.integers(0, 5),
    lag_us=st.integers(0, 10**6),
    span_s=st.floats(0, 60),
)
def test_every_state_of_a_server_gets_three_answers(worst, met, limited, lag_us, span_s):
    verdict = judge(figures(worst, met=met, limited=limited, lag_us=lag_us, span_s=span_s))
    assert all(text.endswith(".") for text in (verdict.in_time, verdict.bottleneck, verdict.help))
    assert (verdict.state == "good") == (worst is None)
