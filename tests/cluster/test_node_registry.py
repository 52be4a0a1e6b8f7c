"""The registry of nodes, in virtual time: what is believed of each machine, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster.node_registry import LOOK_US, LOST_US, NODE_TRANSITIONS, OPEN, SUSPECT_US, NameTaken, NodePhase, NodeRegistry
from tests.properties import examples

MS = 1_000


class Watched:
    """A registry that is looked at as often as it asks for."""

    def __init__(self) -> None:
        self.registry = NodeRegistry()
        self.now_us = 0
        self.changes: list[str] = []
        self.registry.look(0)

    def do(self, event: str, *args: object) -> object:
        found = getattr(self.registry, event)(self.now_us, *args)
        incarnation, changes = found if isinstance(found, tuple) else (None, found)
        self.changes += [change.after.value for change in changes]
        return incarnation

    def join(self, name: str = "a", boot_us: int = 1) -> int:
        incarnation = self.do("hello", name, boot_us)
        assert isinstance(incarnation, int)
        self.do("opened", name, incarnation)
        return incarnation

    def wait(self, us: int) -> None:
        until_us = self.now_us + us
        while self.now_us < until_us:
            self.now_us = min(until_us, self.now_us + LOOK_US)
            self.do("look")


def test_silence_makes_a_node_suspect_then_lost_then_gone():
    world = Watched()
    world.join()
    world.wait(SUSPECT_US - LOOK_US)
    assert world.changes == ["joining", "live"]
    world.wait(LOOK_US)
    assert world.changes[2:] == ["suspect"]
    world.wait(LOST_US - SUSPECT_US)
    assert world.changes[3:] == ["lost"]
    world.wait(60_000_000)
    assert world.changes[4:] == ["gone"] and not world.registry.nodes


def test_a_beat_makes_a_suspect_node_live_again():
    world = Watched()
    first = world.join()
    world.wait(500 * MS)
    world.do("beat", "a", first, 250, 7)
    assert world.changes == ["joining", "live", "suspect", "live"]
    assert (world.registry.nodes["a"].rtt_us, world.registry.nodes["a"].lag_us) == (250, 7)


def test_a_node_that_hears_nothing_is_as_good_as_silent():
    world = Watched()
    first = world.join()
    for unheard_us in range(100 * MS, 1_300 * MS, 100 * MS):
        world.wait(100 * MS)
        world.do("beat", "a", first, 0, 0, unheard_us)
    assert world.changes[2:] == ["suspect", "lost"]  # long before its own fence


def test_a_node_that_was_deaf_for_a_moment_is_live_again():
    world = Watched()
    first = world.join()
    for unheard_us in (100 * MS, 300 * MS, 550 * MS, 100 * MS):
        world.wait(150 * MS)
        world.do("beat", "a", first, 0, 0, unheard_us)
    assert world.changes[2:] == ["suspect", "live"]


def test_a_node_whose_event_loop_stands_still_gets_nothing_new_and_is_lost_in_the_end():
    world = Watched()
    first = world.join()
    for lag_us in range(0, 12_000 * MS, 100 * MS):
        world.wait(100 * MS)
        world.do("beat", "a", first, 250, lag_us)
    assert world.changes[2:] == ["suspect", "lost"]
    assert world.registry.nodes["a"].phase is NodePhase.LOST


def test_a_node_whose_event_loop_was_late_for_a_moment_is_live_again():
    world = Watched()
    first = world.join()
    for lag_us in (500 * MS, 1_200 * MS, 2_000 * MS, 10 * MS):
        world.wait(100 * MS)
        world.do("beat", "a", first, 250, lag_us)
    assert world.changes[2:] == ["suspect", "live"]


def test_nothing_that_a_closed_incarnation_says_counts():
    world = Watched()
    first = world.join()
    world.do("lose", "a", first, "its connection has ended")
    second = world.join()
    assert second > first and world.registry.is_current("a", second) and not world.registry.is_current("a", first)
    before = list(world.changes)
    for event in ("beat", "opened", "leave"):
        world.do(event, "a", first)
    world.do("lose", "a", first, "late")
    assert world.changes == before
    world.wait(400 * MS)
    world.do("beat", "a", first)
    assert world.registry.nodes["a"].phase is NodePhase.SUSPECT


def test_a_newer_agent_of_the_same_name_replaces_the_older_at_once():
    world = Watched()
    world.join(boot_us=5)
    world.join(boot_us=6)
    assert world.changes == ["joining", "live", "lost", "joining", "live"]
    with pytest.raises(NameTaken, match="another agent serves as node 'a'"):
        world.join(boot_us=5)


def test_the_same_agent_may_say_hello_again():
    world = Watched()
    world.join(boot_us=5)
    world.join(boot_us=5)
    assert world.registry.nodes["a"].phase is NodePhase.LIVE


def test_a_leader_that_was_frozen_blames_no_node():
    world = Watched()
    first = world.join()
    world.now_us += 10_000_000  # it could not look, and read no beats
    world.do("look")
    assert world.changes == ["joining", "live"]
    world.do("beat", "a", first)
    world.wait(200 * MS)
    assert world.changes == ["joining", "live"]
    world.wait(2_000 * MS)
    assert world.changes[2:] == ["suspect", "lost"]


def test_a_draining_node_that_falls_silent_is_lost():
    world = Watched()
    world.join()
    world.do("drain", "a")
    world.do("drain", "a")
    world.wait(LOST_US)
    assert world.changes == ["joining", "live", "draining", "lost"]


def test_a_node_that_is_told_to_leave_while_it_joins_is_drained_when_it_has():
    world = Watched()
    first = world.do("hello", "a", 1)
    world.do("drain", "a")
    world.do("opened", "a", first)
    assert world.changes == ["joining", "live", "draining"]
    world.do("leave", "a", first)
    world.join(boot_us=2)  # started again by somebody, to stay
    assert world.changes[3:] == ["gone", "joining", "live"]


def test_a_node_that_was_being_drained_when_it_was_lost_is_drained_when_it_is_back():
    world = Watched()
    first = world.join()
    world.do("drain", "a")
    world.do("lose", "a", first, "cut")
    world.join()
    assert world.changes == ["joining", "live", "draining", "lost", "joining", "live", "draining"]


NAMES = ("a", "b")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from(NAMES), st.integers(1, 3)),
        st.tuples(st.just("beat"), st.sampled_from(NAMES), st.integers(0, 6)),
        st.tuples(st.just("lose"), st.sampled_from(NAMES), st.integers(0, 6)),
        st.tuples(st.just("leave"), st.sampled_from(NAMES), st.integers(0, 6)),
        st.tuples(st.just("drain"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 1_500)),
    ),
    max_size=40,
)


@examples(300)
@given(EVENTS)
def test_whatever_happens_moves_are_those_of_the_table_and_times_are_kept(events: list[tuple[str, str, int]]):
    registry, now_us, opened = NodeRegistry(), 0, 0
    phases = dict.fromkeys(NAMES, NodePhase.GONE)
    heard = dict.fromkeys(NAMES, 0)
    current = dict.fromkeys(NAMES, -1)

    def check(changes: list) -> None:
        for change in changes:
            assert change.before is phases[change.node]
            assert change.after in NODE_TRANSITIONS[change.before].values()
            phases[change.node] = change.after
            silent_us = now_us - heard[change.node]
            if change.reason == "silent":
                assert silent_us >= (LOST_US if change.after is NodePhase.LOST else SUSPECT_US)
        for name, phase in phases.items():
            if phase in OPEN:
                assert registry.is_current(name, current[name])
                assert now_us - heard[name] < LOST_US + 2 * LOOK_US
                if phase is NodePhase.LIVE:
                    assert now_us - heard[name] < SUSPECT_US + 2 * LOOK_US

    for what, name, number in events:
        if what == "wait":
            for _ in range(number * MS // LOOK_US):
                now_us += LOOK_US
                check(registry.look(now_us))
        elif what == "join":
            try:
                incarnation, changes = registry.hello(now_us, name, number)
            except NameTaken:
                assert phases[name] in OPEN
                continue
            assert incarnation > opened
            opened = current[name] = incarnation
            heard[name] = now_us
            check(changes + registry.opened(now_us, name, incarnation))
        elif what == "drain":
            check(registry.drain(now_us, name))
        else:
            is_current = phases[name] in OPEN and number == current[name]
            if is_current and what == "beat":
                heard[name] = now_us
            changes = (
                registry.lose(now_us, name, number, "x") if what == "lose" else getattr(registry, what)(now_us, name, number)
            )
            assert is_current or not changes
            check(changes)
