"""The blocking rule: a batch leaves every other function a way to start within its tolerance."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Batch, FunctionState
from lamina.core.unit_blocks import aligned_starts
from lamina.core.workflow.flow import Flow, Task
from lamina.planner import blocking
from lamina.planner.blocking import PEER, TURN, BlockingRule, Claim, DeviceClaims, Holding, is_pressed, keep_units
from lamina.planner.function_goals import LATELY_US
from lamina.policies import frontier
from lamina.types import NEVER_US, DeviceSpec, SliceLimits, Slo
from tests.script import Script, a_function

UNITS = 6
EVERYTHING = (1 << UNITS) - 1
LONG_US = 1_000

masks = st.integers(0, EVERYTHING)
claim = st.builds(Claim, st.integers(0, LONG_US), st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 2), st.just(0))
claims = st.lists(claim, min_size=1, max_size=3).map(sorted)
held = st.lists(st.builds(Holding, st.sampled_from([0b1, 0b110, 0b111000, 0b10000]), st.integers(0, 2 * LONG_US)), max_size=3)


def blocks(size: int, aligned: bool) -> list[int]:
    starts = aligned_starts(size, UNITS) if aligned else range(UNITS - size + 1)
    return [((1 << size) - 1) << start for start in starts]


def available(claim: Claim, holdings: list[Holding]) -> int:
    busy = 0
    for one in holdings:
        if one.until_us > claim.tolerance_us:
            busy |= one.mask
    return EVERYTHING & ~busy


def can_all_start(wanted: list[Claim], holdings: list[Holding], allowed: int, aligned: bool) -> bool:
    """By brute force: disjoint blocks for every claim, each where it is free in time, among the allowed units."""
    choices = []
    for claim in wanted:
        left = available(claim, holdings) & allowed
        fitting = [block for block in blocks(claim.units, aligned) if left & block == block]
        choices += [fitting] * claim.blocks
    for combination in product(*choices):
        together = 0
        for block in combination:
            if together & block:
                break
            together |= block
        else:
            return True
    return False


@given(claims, held, masks, st.booleans())
def test_what_is_kept_lets_all_of_them_start_whenever_anything_does(wanted, holdings, free, aligned):
    """The batch takes everything but what is kept; if all could start without it, they still can."""
    kept = keep_units(UNITS, aligned, holdings, wanted, free, 0)
    if can_all_start(wanted, holdings, EVERYTHING, aligned):
        assert can_all_start(wanted, holdings, kept, aligned)


@given(claims, held, masks, st.booleans())
def test_no_more_is_kept_than_is_claimed_and_all_of_it_in_whole_blocks(wanted, holdings, free, aligned):
    kept = keep_units(UNITS, aligned, holdings, wanted, free, 0)
    useful = 0
    for claim in wanted:
        for block in blocks(claim.units, aligned):
            if kept & block == block:
                useful |= block
    assert kept & ~useful == 0
    assert kept.bit_count() <= sum(claim.units * claim.blocks for claim in wanted)


@given(claim, held, masks, st.booleans())
def test_what_is_not_free_in_time_is_kept_where_it_is_free_first(one, holdings, free, aligned):
    """Else long batches that end one after another would leave no whole block for ever."""
    one = one._replace(blocks=1)
    kept = keep_units(UNITS, aligned, holdings, [one], free, 0)

    def free_at_us(block: int) -> int:
        return max((held.until_us for held in holdings if held.mask & block), default=0)

    soonest_us = min(free_at_us(block) for block in blocks(one.units, aligned))
    assert free_at_us(kept) <= max(soonest_us, one.tolerance_us)


def test_units_that_will_be_free_in_time_are_kept_before_free_ones():
    soon = Holding(0b000111, until_us=100)
    assert keep_units(UNITS, False, [soon], [Claim(200, "f", 2, 1)], free=0b111000, at_us=0) == 0b000110


def test_units_held_for_longer_than_the_tolerance_are_of_no_use():
    late = Holding(0b000111, until_us=300)
    assert keep_units(UNITS, False, [late], [Claim(200, "f", 2, 1)], free=0b111000, at_us=0) == 0b110000


def test_where_nothing_is_free_in_time_the_block_that_is_free_first_is_not_taken_again():
    left, right = Holding(0b000111, until_us=300), Holding(0b110000, until_us=900)
    assert keep_units(UNITS, False, [left, right], [Claim(200, "f", 3, 1)], free=0b001000, at_us=0) == 0b000111


def test_claims_are_placed_anew_where_the_first_one_took_the_place_of_the_last():
    """One unit at the end of six that start at multiples of their size, then three and two: two would be left out."""
    wanted = [Claim(1_000, "f", 1, 1), Claim(2_000, "g", 3, 1), Claim(2_000, "h", 2, 1)]
    assert keep_units(6, True, (), wanted, 0b111111, 0) == 0b111111


def test_a_home_is_kept_as_it_is():
    assert keep_units(UNITS, False, [], [Claim(200, "f", 2, 1, home=0b11)], free=EVERYTHING, at_us=0) == 0b11


def test_more_than_a_device_of_a_hundred_units_has_is_asked_for_and_answered_at_once():
    """Units that nothing holds are fewer than what is claimed, and scattered: to try all ways would take for ever."""
    scattered = [Holding(0b11 << start, until_us=99) for start in range(0, 60, 4)]
    wanted = [Claim(10, "a", 1, 33), Claim(20, "b", 2, 33), Claim(30, "c", 3, 10)]
    kept = keep_units(100, False, scattered, wanted, (1 << 100) - 1, 0)
    assert kept.bit_count() >= 33  # all of the first, and what is left of the others


def test_what_is_booked_behind_a_batch_holds_its_units_too(script: Script):
    """Long work runs on one of two units, and more of it is booked behind. With what is booked, that unit is not free within the
    tolerance of the short function, so the other one is kept for it."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=2, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    short = a_function("short", share=0.5, slo=Slo(latency_us=100_000))
    long = a_function("long", share=0.5)
    script.given(short, long, devices=[device], takes={"short": 10_000, "long": 50_000})
    script.at(0).arrives("l1", target="long")
    function, host = script.controller.state.functions["long"], script.controller.state.devices["gpu0"]
    [instance] = function.instances.values()
    rule, view = BlockingRule(), script.controller.view
    free = host.all_units & ~host.busy
    assert rule.kept_units(view, function, host, free, script.now_us, 200_000) & free == 0, "its unit is free after 50 ms"
    running = next(iter(script.controller.state.batches.values()))
    follower = Batch(99, instance, host, running.mask, running.jobs, 100_000)
    follower.book_behind(running)
    host.expect_return(running.id, running.expected_end_us + follower.predicted_us)
    assert rule.kept_units(view, function, host, free, script.now_us, 200_000) & free == free


def beside_two(script: Script) -> tuple[FunctionState, Device]:
    """Long work beside two functions of 10 ms on a device of eight units, one of which tolerates three times as much."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    hasty, calm = (a_function(name, share=0.25, slo=Slo(latency_us=us)) for name, us in (("hasty", 50_000), ("calm", 150_000)))
    takes = {"hasty": 10_000, "calm": 10_000, "long": 300_000}
    script.given(hasty, calm, a_function("long", share=0.25), devices=[device], takes=takes)
    script.at(0).arrives("l", target="long")
    return script.controller.state.functions["long"], script.controller.state.devices["gpu0"]


def test_a_function_tolerates_what_its_slo_leaves_beside_its_own_time_and_a_margin(script: Script):
    _, host = beside_two(script)
    claims = BlockingRule().claims(script.controller.view, host)
    assert [(claim.function, claim.tolerance_us) for claim in claims] == [("hasty", 37_500), ("calm", 132_500)]


def test_what_is_kept_follows_the_demand_of_a_function_and_is_one_block_at_least(script: Script):
    _, host = beside_two(script)
    view, rule = script.controller.view, BlockingRule()
    assert [claim.blocks for claim in rule.claims(view, host)] == [1, 1]
    for number in range(40):
        script.at((1 + number) * 5_000).arrives(f"h{number}", target="hasty")
    blocks = {claim.function: claim.blocks for claim in rule.claims(view, host)}
    assert blocks == {"hasty": 3, "calm": 1}, "10 ms every 5 ms, and half as much again"
    view.advance(script.now_us + 1_000_000)
    assert {claim.blocks for claim in rule.claims(view, host)} == {1}, "none has come for a while"


def test_a_function_that_fits_beside_nothing_starts_once_it_has_left_the_device_alone(script: Script):
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    hasty, whole = a_function("hasty", share=0.25, slo=Slo(latency_us=50_000)), a_function("whole")
    script.given(hasty, whole, devices=[device], takes={"hasty": 10_000, "whole": 100_000})
    state, view = script.controller.state, script.controller.view
    [instance] = state.functions["whole"].instances.values()
    instance.last_used_us = view.now_us
    rule, host = BlockingRule(), state.devices["gpu0"]
    kept = []
    for after_us in (0, TURN * 100_000 - 1, TURN * 100_000):
        view.advance(instance.last_used_us + after_us)
        kept.append(rule.kept_units(view, state.functions["whole"], host, host.all_units, view.now_us, 100_000).bit_count())
    assert kept == [2, 2, 0]


def test_what_takes_longer_on_the_units_that_are_left_and_then_leaves_none_takes_turns_too(script: Script):
    """On the whole device it is over before the calm one minds, and beside the hasty one there is half of it. But on that half it
    takes twice as long, and the calm one wants the other half then: it would never start, on an idle device."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    slos = {"hasty": Slo(latency_us=30_000), "calm": Slo(latency_us=150_000), "wide": Slo(latency_us=60_000_000)}
    takes = {"hasty": 2_000, "calm": 20_000, "wide": lambda batch, units: 720_000 // units}
    functions = [a_function(name, share=0.5, slo=slo) for name, slo in slos.items()]
    script.given(*functions, devices=[device], takes=takes, policy=frontier.Policy())
    script.at(100_000).arrives("w", target="wide", within_us=60_000_000)
    assert script.at(100_000 + TURN * 90_000 + 20_000).batches, "by the time it takes on the whole device, not on half of it"


def test_a_step_of_a_workflow_has_its_part_of_the_slo_beside_all_that_are_no_steps_of_it(script: Script):
    """Steps of 1 and 100 ms, and 1.2 s for both; before the first call nothing is kept for them."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    page = Flow("page", {"a": Task("a", "first", ("b",)), "b": Task("b", "second")}, ("a",), Slo(latency_us=1_200_000))
    names = {"first": 1_000, "second": 100_000, "long": 2_000_000}
    script.given(*(a_function(name, share=0.25) for name in names), flows=[page], devices=[device], takes=names)
    state, view, host = script.controller.state, script.controller.view, script.controller.state.devices["gpu0"]
    before, rule = BlockingRule(), BlockingRule()
    assert not before.claims(view, host)
    rule.step_goals.on_call_arrived(view, page)
    claims = {claim.function: claim.tolerance_us for claim in rule.claims(view, host)}
    assert claims == {"first": 10_286, "second": 1_028_712}
    kept = {
        name: rule.kept_units(view, state.functions[name], host, host.all_units, view.now_us, names[name]).bit_count()
        for name in ("long", "second")
    }
    assert kept == {"long": 2, "second": 0}, "a run is at one step at a time, and does not wait for itself"
    view.advance(LATELY_US + 1)
    assert not rule.claims(view, host), "it has not been called for long"


def test_nothing_is_kept_for_what_is_shed_but_a_home_is(script: Script):
    long, host = beside_two(script)
    view, free = script.controller.view, host.all_units & ~host.busy
    of_all = BlockingRule().kept_units(view, long, host, free, script.now_us, 200_000)
    of_one = BlockingRule(lambda device: {"calm"}).kept_units(view, long, host, free, script.now_us, 200_000)
    assert (of_all.bit_count(), of_one.bit_count()) == (4, 2)
    assert BlockingRule(lambda device: view.functions).kept_units(view, long, host, free, script.now_us, 200_000) == 0
    [instance] = script.controller.state.functions["hasty"].instances.values()
    host.reserve(instance.id, 0b11 << 6, lend=True)
    kept = BlockingRule(lambda device: view.functions).kept_units(view, long, host, free, script.now_us, 200_000)
    assert kept == 0b11 << 6, "a home is a guarantee"


def test_what_asks_for_more_than_its_share_does_not_insist_on_what_is_kept_for_others(script: Script):
    """It loses calls whatever it takes; those for which units are kept need lose none."""
    long, host = beside_two(script)
    view = script.controller.view
    assert BlockingRule().may_insist(view, long, host, 1_000)
    assert not BlockingRule(lambda device: {long.spec.name}).may_insist(view, long, host, 1_000)


@pytest.mark.parametrize("home", [False, True])
def test_no_batch_insists_on_a_home_for_longer_than_its_owner_can_wait(script: Script, home: bool):
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    owner = a_function("owner", share=0.5, slo=Slo(latency_us=50_000), home=home)
    script.given(owner, a_function("long", share=0.25), devices=[device], takes={"owner": 10_000, "long": 60_000})
    script.at(0).arrives("o", target="owner")
    state = script.controller.state
    assert BlockingRule().may_insist(script.controller.view, state.functions["long"], state.devices["gpu0"], 60_000) != home


def test_the_longer_a_batch_the_more_it_leaves_and_no_limit_is_left_out(script: Script):
    """Up to each limit it blocks the same functions: none of them, the hasty one, both."""
    long, host = beside_two(script)
    rule, view = BlockingRule(), script.controller.view
    limits = rule.limits_us(view, long, host, 20_000, 400_000)
    assert limits == sorted(limits, reverse=True) and limits[0] == 400_000 and len(limits) == 3
    kept = [rule.kept_units(view, long, host, host.all_units, script.now_us, us).bit_count() for us in limits]
    assert kept == [4, 2, 0]
    assert rule.limits_us(view, long, host, 60_000, 100_000) == [100_000], "what it could not use is not tried"


def beside_many(script: Script, count: int) -> tuple[FunctionState, Device]:
    """Long work beside so many functions of two units on a device of eight, each more patient than the one before."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    names = [f"f{number}" for number in range(count)]
    short = [a_function(name, share=0.25, slo=Slo(latency_us=50_000 + 1_000 * at)) for at, name in enumerate(names)]
    takes = dict.fromkeys(names, 1_000) | {"long": 300_000}
    script.given(*short, a_function("long", share=0.25), devices=[device], takes=takes)
    return script.controller.state.functions["long"], script.controller.state.devices["gpu0"]


@pytest.mark.parametrize("count", [8, 30])
def test_of_many_claims_those_are_looked_into_that_there_is_room_for(script: Script, monkeypatch: pytest.MonkeyPatch, count: int):
    long, host = beside_many(script, count)
    looked_into, counts = list[str](), blocking._Relevance.__call__
    monkeypatch.setattr(
        blocking._Relevance, "__call__", lambda relevance, claim: looked_into.append(claim.function) or counts(relevance, claim)
    )
    rule, view = BlockingRule(), script.controller.view
    assert rule.kept_units(view, long, host, host.all_units, script.now_us, 300_000) == host.all_units
    assert looked_into == ["f0", "f1", "f2", "f3"]


def test_claims_are_placed_anew_only_for_times_at_which_others_are_placed(script: Script, monkeypatch: pytest.MonkeyPatch):
    """Of thirty functions four take all units, whatever the time is that blocks them and most others."""
    long, host = beside_many(script, 30)
    rule, view = BlockingRule(), script.controller.view
    limits = rule.limits_us(view, long, host, 10_000, 300_000)
    each = [host.all_units & ~rule.kept_units(view, long, host, host.all_units, script.now_us, us) for us in limits]
    placed, keep = list[int](), blocking.keep_units
    monkeypatch.setattr(blocking, "keep_units", lambda *args, **more: placed.append(1) or keep(*args, **more))
    spared = list(rule.spared_units(view, long, host, host.all_units, script.now_us, 10_000, 300_000))
    assert len(limits) == 8 and len(placed) <= 2
    known = {us: units for units, us in spared}
    for us, units in zip(limits, each, strict=True):
        assert known[min(at for at in known if at >= us)] == units


def test_a_claim_that_could_not_be_kept_even_alone_blocks_nothing(script: Script):
    """Its only way to be in time would be to take less time than it does: long work does not wait for turns beside it."""
    device = DeviceSpec(id="gpu0", kind="gpu", units=2, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    hopeless = a_function("hopeless", share=0.5, slo=Slo(latency_us=5_000))
    tight = a_function("tight", share=0.5, slo=Slo(latency_us=31_000))
    script.given(hopeless, tight, a_function("long"), devices=[device], takes={"hopeless": 30_000, "tight": 30_000})
    claims = BlockingRule().claims(script.controller.view, script.controller.state.devices["gpu0"])
    assert [claim.function for claim in claims] == ["tight"]


def test_claims_of_many_functions_are_worked_out_a_part_at_a_time_and_all_of_them_are(script: Script):
    names = [f"f{number}" for number in range(80)]
    device = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))
    functions = [a_function(name, share=1 / 8, slo=Slo(latency_us=100_000)) for name in names]
    script.given(*functions, devices=[device], takes=dict.fromkeys(names, 1_000))
    rule, view, host = BlockingRule(), script.controller.view, script.controller.state.devices["gpu0"]
    found = []
    for step in range(4):
        view.advance(20_000 * step)
        found.append(len(rule.claims(view, host)))
    assert found == [32, 64, 80, 80]


def test_a_job_is_pressed_when_a_second_batch_like_its_own_would_be_late():
    assert not is_pressed(left_us=25, time_us=10, way_us=5)
    assert is_pressed(left_us=24, time_us=10, way_us=5)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.integers(0, 4), st.booleans()), max_size=30))
def test_claims_in_order_name_the_same_as_all_of_them_looked_at(changes: list[tuple[str, int, int, bool]]):
    """However they came and went: those that a batch of a time may block, and the times at which it blocks more."""
    known, kept = DeviceClaims(), dict[str, Claim]()
    for name, tolerance_us, own_us, stays in changes:
        claim = Claim(tolerance_us, name, 1, 1, 0, own_us) if stays else None
        known.replace(name, claim)
        kept.pop(name, None)
        if claim is not None:
            kept[name] = claim
    assert known.found == sorted(kept.values())
    assert known.harmless_us == min([max(one.tolerance_us, PEER * one.own_us) for one in kept.values()], default=NEVER_US)
    for time_us in range(14):
        assert known.tolerating_less(time_us) == sorted(claim for claim in kept.values() if claim.tolerance_us < time_us)
        limits = {max(claim.tolerance_us, PEER * claim.own_us) for claim in kept.values() if claim.function != "a"}
        assert known.limits_us("a", 2, time_us) == sorted(us for us in limits if 2 < us < time_us)
