"""Overload of the controller's process, in virtual time: it takes a tenth of a millisecond for a call, and ingress processes keep
to its level."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import SimpleNamespace

import pytest

from lamina.access.authorization import AccessRule
from lamina.access.records import Identity
from lamina.errors import Unauthorized
from lamina.gateway.ingress import throttle as throttle_module
from lamina.gateway.ingress.controller_link import MOST_LOOKUPS, ControllerLink
from lamina.gateway.ingress.messages import CallLevel, RequestHead, TenantFound, TenantLookup
from lamina.gateway.ingress.session import IngressSession
from lamina.gateway.ingress.throttle import (
    BURST,
    LEVEL_HOLDS_US,
    NO_LEVEL,
    UNKNOWN_TENANT,
    WINDOW_US,
    CallPacer,
    HostThrottle,
    TenantShare,
    water_level,
)
from lamina.planner.max_min import Demand
from lamina.server.exchange import HttpRequest

CALL_US = 100
CAPACITY = 1_000_000 / CALL_US
GOAL_US = 25_000
WARM_US = 300_000


@dataclass
class Host:
    """A controller that does nothing but take its time, and six ingress processes in front of it. A target is of the tenant that
    it begins with (`tenant/target`)."""

    goals_us: Mapping[bytes, int]
    cost_us: Callable[[int], int] = lambda now_us: CALL_US
    weights: Mapping[str, float] = field(default_factory=dict)
    throttle: HostThrottle = field(default_factory=HostThrottle)
    pacers: list[CallPacer] = field(default_factory=lambda: [CallPacer() for _ in range(6)])
    handled: Counter[bytes] = field(default_factory=Counter)  #: after it has settled
    shed: Counter[bytes] = field(default_factory=Counter)
    took_us: list[int] = field(default_factory=list)  #: until a call was handled
    now_us: int = 0
    cpu_us: int = 0

    def __post_init__(self) -> None:
        self.throttle.weight_of = lambda tenant: self.weights.get(tenant, 1.0)
        self.throttle.listeners += [lambda level, pacer=pacer: pacer.set_level(self.now_us, level) for pacer in self.pacers]

    def offer(self, rates: Mapping[bytes, float], seconds: float, seed: int = 1) -> Host:
        """Poisson arrivals of each target, at each ingress with equal odds."""
        rng = random.Random(seed)
        arrivals: list[tuple[int, int, bytes]] = []
        begin_us, end_us = self.now_us, self.now_us + int(seconds * 1e6)
        for target, rate in rates.items():
            at_us = float(begin_us)
            while (at_us := at_us + rng.expovariate(rate / 1e6)) < end_us:
                arrivals.append((int(at_us), rng.randrange(len(self.pacers)), target))
        arrivals.sort(reverse=True)
        unread: list[tuple[int, int, bytes, int]] = []  #: sent, ingress, target, arrived
        while arrivals or unread:
            if not unread or (arrivals and arrivals[-1][0] <= max(self.now_us, unread[0][0])):
                at_us, ingress, target = arrivals.pop()
                self._arrive(unread, at_us, ingress, target)
                continue
            sent_us, ingress, target, arrived_us = heappop(unread)
            self.now_us = max(self.now_us, sent_us)
            self.throttle.on_call(ingress, tenant_of(target), self.goals_us[target], self.now_us - sent_us)
            took_us = self.cost_us(self.now_us)
            self.now_us += took_us
            self.cpu_us += min(CALL_US, took_us)  # more is a pause
            if self.throttle.is_window_over(self.now_us):
                self.throttle.end_window(self.now_us, self.cpu_us)
            if arrived_us - begin_us > WARM_US:
                self.handled[target] += 1
                self.took_us.append(self.now_us - arrived_us)
        self.now_us = max(self.now_us, end_us)
        return self

    def _arrive(self, unread: list[tuple[int, int, bytes, int]], at_us: int, ingress: int, target: bytes) -> None:
        pacer = self.pacers[ingress]
        share = TenantShare(tenant := tenant_of(target), self.weights.get(tenant, 1.0))
        wait_us = pacer.wait_us(at_us, share, target.rpartition(b"/")[2], self.goals_us[target]) if pacer.level else 0
        if wait_us:
            self.throttle.on_held_back()
        if wait_us < 0:
            self.shed[target] += 1
        else:
            heappush(unread, (at_us + wait_us, ingress, target, at_us))

    def quantile_us(self, part: float) -> int:
        return sorted(self.took_us)[int(part * len(self.took_us))]


def tenant_of(target: bytes) -> str:
    return target.rpartition(b"/")[0].decode()


def five(total: float) -> dict[bytes, float]:
    return {b"%d" % number: total / 5 for number in range(5)}


GOALS_US = dict.fromkeys(five(1), GOAL_US)


@pytest.mark.parametrize("load", [1.2, 1.5, 1.75, 5])
def test_of_more_than_the_process_can_handle_it_handles_no_less_and_each_call_soon(load: float) -> None:
    host = Host(GOALS_US).offer(five(load * CAPACITY), 2.0)
    assert host.handled.total() / (2.0 - WARM_US / 1e6) >= 0.93 * CAPACITY
    assert host.quantile_us(0.99) < 0.35 * GOAL_US
    assert min(host.handled.values()) > 0.85 * max(host.handled.values())


@pytest.mark.parametrize("load", [0.3, 0.85])
def test_nothing_is_shed_of_what_it_can_handle(load: float) -> None:
    host = Host(GOALS_US).offer(five(load * CAPACITY), 1.5)
    assert not host.shed
    assert host.throttle.level == NO_LEVEL


def test_a_target_that_is_asked_for_less_than_its_share_loses_nothing() -> None:
    host = Host(GOALS_US).offer({**five(3 * CAPACITY), b"0": 0.1 * CAPACITY}, 2.0)
    assert host.shed[b"0"] <= 0.03 * host.handled[b"0"]  # of a burst
    assert all(host.shed[name] > host.handled[name] for name in (b"1", b"2", b"3", b"4"))


def test_calls_that_have_the_time_wait_and_are_not_refused() -> None:
    patient = {b"slow": 20_000_000}
    host = Host(patient).offer({b"slow": 1.5 * CAPACITY}, 1.0)
    assert not host.shed


def test_a_call_without_a_goal_waits_for_a_while() -> None:
    host = Host({b"any": 0}).offer({b"any": 1.3 * CAPACITY}, 1.0)
    assert not host.shed


def test_rejections_that_cost_little_let_more_calls_through() -> None:
    """What a call costs changes by the moment: nine of ten are rejected for a tenth of the time."""
    rng = random.Random(3)
    host = Host(GOALS_US, cost_us=lambda now_us: CALL_US if rng.random() < 0.1 else CALL_US // 10)
    host.offer(five(20 * CAPACITY), 1.5)
    mean_us = 0.1 * CALL_US + 0.9 * CALL_US // 10
    assert host.handled.total() / (1.5 - WARM_US / 1e6) >= 0.9 * 1e6 / mean_us


def test_a_pause_of_the_machine_does_not_close_it() -> None:
    """A process that was not run for 60 ms has a backlog, and no less capacity."""
    paused = iter([60_000])
    host = Host(GOALS_US, cost_us=lambda now_us: next(paused, CALL_US) if now_us > 600_000 else CALL_US)
    host.offer(five(0.8 * CAPACITY), 2.0)
    assert host.shed.total() < 0.06 * host.handled.total()


def test_first_calls_that_take_long_do_not_close_it() -> None:
    """Tables are built and modules imported by the first calls of a server: that is not what a call costs."""
    host = Host(GOALS_US)
    host.throttle.on_call(1, "", GOAL_US, 0)
    host.throttle.end_window(WINDOW_US, 15_000)
    host.now_us, host.cpu_us = WINDOW_US, 15_000
    host.offer(five(1.2 * CAPACITY), 1.0)
    assert host.handled.total() / (1.0 - WARM_US / 1e6) >= 0.93 * CAPACITY


def test_the_level_is_lifted_when_the_load_falls() -> None:
    host = Host(GOALS_US).offer(five(3 * CAPACITY), 1.0)
    assert host.throttle.level
    shed = host.shed.total()
    host.offer(five(0.4 * CAPACITY), 2.0)
    assert host.throttle.level == NO_LEVEL
    assert not any(pacer.level for pacer in host.pacers)
    assert host.shed.total() - shed < 0.02 * 0.4 * CAPACITY


def test_after_silence_nothing_is_left_of_it() -> None:
    host = Host(GOALS_US).offer(five(3 * CAPACITY), 0.5)
    host.now_us += 60_000_000
    pacer = host.pacers[0]
    assert pacer.wait_us(host.now_us, TenantShare(""), b"0", GOAL_US) == 0
    assert pacer.level == NO_LEVEL
    host.throttle.end_window(host.now_us, host.cpu_us)
    assert host.throttle.level == NO_LEVEL


def test_a_level_holds_for_a_while_without_word_from_the_controller() -> None:
    pacer = CallPacer()
    pacer.set_level(0, 1.0)
    waits_us = [pacer.wait_us(LEVEL_HOLDS_US, TenantShare(""), b"f", GOAL_US) for _ in range(5)]
    assert waits_us[:BURST] == [0] * BURST
    assert waits_us[BURST] == -1_000_000
    assert waits_us[BURST + 1] == waits_us[BURST], "one that is refused takes no place"


def test_a_process_that_others_keep_from_running_is_behind_for_a_while_before_there_is_a_level() -> None:
    """By its processor time it could do ten times as much, so a backlog may be that of a pause: not so in three windows."""
    throttle = HostThrottle()
    found = []
    for window in range(1, 5):
        for _ in range(100):
            throttle.on_call(1, "", GOAL_US, 5_000)
        throttle.end_window(window * WINDOW_US, window * WINDOW_US // 10)
        found.append(throttle.level)
    assert found[:2] == [NO_LEVEL, NO_LEVEL]
    assert 0 < found[3] <= found[2] == 100 / WINDOW_US * 1e6


@pytest.mark.parametrize(
    ("capacity", "rates", "level"), [(10, [2, 9, 9], 4), (30, [2, 9, 9], 19), (9, [3, 3, 3], 3), (0, [5], 1), (10, [4, 40], 6)]
)
def test_the_water_level(capacity: float, rates: list[float], level: float) -> None:
    assert water_level(capacity, map(Demand, rates)) == pytest.approx(level)


def test_the_water_level_counts_weights() -> None:
    assert water_level(40, [Demand(90, 3), Demand(90, 1)]) == 10
    assert water_level(40, [Demand(3, 3), Demand(90, 1)]) == 37
    assert water_level(40, [Demand(3, 3), Demand(10, 2)]) == 18.5  # 27 are left, beside what is asked for


# ----------------------------------------------------------------------------------- tenants


def tenants(rates: Mapping[bytes, float], seconds: float = 2.0, **weights: float) -> Host:
    return Host(dict.fromkeys(rates, GOAL_US), weights=weights).offer(
        {name: part * CAPACITY for name, part in rates.items()}, seconds
    )


def test_a_tenant_that_floods_a_target_has_no_call_of_another_tenant_to_it_shed() -> None:
    host = tenants({b"loud/f": 4, b"quiet/f": 0.1})
    assert host.shed[b"quiet/f"] <= 0.03 * host.handled[b"quiet/f"]  # of a burst
    assert host.shed[b"loud/f"] > 2 * host.handled[b"loud/f"]
    assert host.handled.total() / (2.0 - WARM_US / 1e6) >= 0.93 * CAPACITY


def test_a_tenant_that_floods_many_targets_gets_no_more_for_it() -> None:
    host = tenants({b"one/f": 2, **{b"many/%d" % number: 0.4 for number in range(10)}})
    many = sum(count for name, count in host.handled.items() if name.startswith(b"many/"))
    assert many == pytest.approx(host.handled[b"one/f"], rel=0.1)


def test_tenants_share_by_their_weights() -> None:
    host = tenants({b"heavy/f": 3, b"light/f": 3}, heavy=3.0)
    assert host.handled[b"heavy/f"] == pytest.approx(3 * host.handled[b"light/f"], rel=0.1)


def test_of_a_tenant_over_its_share_the_targets_that_are_asked_for_little_lose_nothing() -> None:
    host = tenants({b"one/f": 2, b"two/loud": 2, b"two/quiet": 0.05})
    assert host.shed[b"two/quiet"] <= 0.05 * host.handled[b"two/quiet"]
    two = host.handled[b"two/loud"] + host.handled[b"two/quiet"]
    assert two == pytest.approx(host.handled[b"one/f"], rel=0.1)


def test_a_pacer_keeps_no_more_flows_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle_module, "MOST_TENANTS", 5)
    monkeypatch.setattr(throttle_module, "MOST_FLOWS", 20)
    pacer = CallPacer()
    pacer.set_level(0, 1_000.0)
    for number in range(10_000):
        pacer.wait_us(0, TenantShare(f"t{number % 100}"), b"%d" % number, GOAL_US)
    kept = pacer._tenants
    assert len(kept) == 6 and UNKNOWN_TENANT.tenant in kept
    assert sum(len(tenant.by_target) for tenant in kept.values()) <= 20 + len(kept)
    for window in range(1, 40):
        pacer.set_level(window * 1_000_000, 1_000.0)
    assert not pacer._tenants and not pacer._flows, "what is not called any more is forgotten"


def linked() -> tuple[ControllerLink, list[object]]:
    """The link of an ingress, and what it has sent."""
    link, sent = ControllerLink.__new__(ControllerLink), []
    link.pacer, link._shares, link._lookups = CallPacer(), {}, 0
    link.send = sent.append  # type: ignore[method-assign]
    return link, sent


def test_an_ingress_learns_whose_a_token_is_while_there_is_a_level() -> None:
    link, sent = linked()
    link._on_message(CallLevel(100.0))
    assert link.share_of(b"Bearer x") == UNKNOWN_TENANT
    assert sent == [TenantLookup(b"Bearer x")]
    link._on_message(TenantFound(b"Bearer x", "acme", 2.0))
    assert link.share_of(b"Bearer x") == TenantShare("acme", 2.0)
    link._on_message(CallLevel(NO_LEVEL))
    assert not link._shares


def test_tokens_that_were_made_up_share_what_one_tenant_gets_and_cost_few_lookups() -> None:
    link, sent = linked()
    for _ in range(3):
        link._on_message(CallLevel(100.0))
        assert {link.share_of(b"Bearer %d" % number) for number in range(1_000)} == {UNKNOWN_TENANT}
    assert len(sent) == 3 * MOST_LOOKUPS


def test_a_controller_says_whose_a_token_is_and_nothing_of_an_invalid_one() -> None:
    def authorize(request: HttpRequest, rule: AccessRule) -> Identity:
        if request.headers.get(b"authorization") == b"Bearer x":
            return Identity(tenant="acme")
        raise Unauthorized("unknown token", hint="")

    session, sent = IngressSession.__new__(IngressSession), []
    session._router = SimpleNamespace(authorize=authorize)  # type: ignore[assignment]
    session._throttle = HostThrottle(weight_of=lambda tenant: 2.0)
    session.send = sent.append  # type: ignore[method-assign]
    session._on_tenant_lookup(TenantLookup(b"Bearer x"))
    session._on_tenant_lookup(TenantLookup(b"Bearer y"))
    assert sent == [TenantFound(b"Bearer x", "acme", 2.0)]
    session._heads, session._tenants = {}, {}
    session._on_head(RequestHead(0, "POST", b"/f", b"", {b"authorization": b"Bearer x"}, True))
    assert session._tenant_of(0) == "acme"
    session._on_head(RequestHead(0, "POST", b"/f", b"", {b"authorization": b"Bearer y"}, True))
    assert session._tenant_of(0) == UNKNOWN_TENANT.tenant, "a number may get another head"
