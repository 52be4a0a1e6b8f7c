"""The buffer cache against the rule written down plainly, and its books."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.kernels.buffer_cache import BufferCache, NoBufferRoom


@dataclass
class PlainCache:
    """The rule by brute force: all that may go, sorted anew each time."""

    capacity: int
    level: float = 0.0
    arrivals: int = 0
    held: dict[str, dict[str, float]] = field(default_factory=dict)

    def idle(self) -> list[str]:
        return sorted(
            (key for key, one in self.held.items() if not one["busy"]),
            key=lambda key: (self.held[key]["credit"], self.held[key]["arrived"]),
        )

    def place(self, key: str, size: int, cost_us: float) -> list[str] | None:
        need, gone = sum(one["size"] for one in self.held.values()) + size - self.capacity, []
        for victim in self.idle():
            if need <= 0:
                break
            gone.append(victim)
            need -= self.held[victim]["size"]
        if need > 0:
            return None
        for victim in gone:
            self.level = max(self.level, self.held.pop(victim)["credit"])
        self.arrivals += 1
        self.held[key] = {
            "size": size, "cost": cost_us, "uses": 0, "busy": 0, "credit": self.level, "arrived": self.arrivals,
        }  # fmt: skip
        return gone

    def pin(self, key: str) -> None:
        one = self.held[key]
        one["uses"] += 1
        one["busy"] += 1
        one["credit"] = self.level + one["uses"] * one["cost"] / max(1, one["size"])


Step = tuple[int, int, int, str]
steps = st.lists(
    st.tuples(
        st.integers(0, 11),
        st.integers(1, 40) | st.just(101),
        st.integers(1, 1_000),
        st.sampled_from(["use", "pin", "pin", "next", "drop"]),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(steps)
def test_it_evicts_what_the_rule_says_and_keeps_its_books(script: list[Step]):
    cache, plain = BufferCache(100), PlainCache(100)
    pinned: list[str] = []
    for number, size, cost_us, what in script:
        key = f"k{number}"
        if key not in cache:
            try:
                gone = cache.place(key, size, cost_us)
            except NoBufferRoom:
                assert plain.place(key, size, cost_us) is None
                if pinned:
                    last = pinned.pop()
                    cache.unpin(last)
                    plain.held[last]["busy"] -= 1
                continue
            assert gone == plain.place(key, size, cost_us)
        if what == "next":
            able = [one for one in plain.idle() if one != key]
            found = cache.evict_next(key)
            assert found == (able[0] if able else None)
            if found is not None:
                plain.level = max(plain.level, plain.held.pop(found)["credit"])
        elif what == "drop" and not plain.held[key]["busy"]:
            cache.remove(key)
            del plain.held[key]
        else:
            cache.pin(key)
            plain.pin(key)
            if what == "use":
                cache.unpin(key)
                plain.held[key]["busy"] -= 1
            else:
                pinned.append(key)
        cache.check()
        assert dict.fromkeys(plain.held, cache.used) == {one: sum(x["size"] for x in plain.held.values()) for one in plain.held}
        assert all((one in cache) == (one in plain.held) for one in (f"k{n}" for n in range(12)))
        assert cache.level == plain.level


def test_an_entry_used_ten_thousand_times_leaves_no_trail():
    cache = BufferCache(10)
    cache.place("a", 1, 1)
    for _ in range(10_000):
        cache.pin("a")
        cache.unpin("a")
    assert len(cache._order) < 100


def test_one_large_entry_takes_the_place_of_very_many_small_ones_in_one_pass():
    """It took each of those found so far off the heap again for the next: 47 s for 8,000 of them."""
    count = 20_000
    cache = BufferCache(count)
    for number in range(count):
        cache.place(str(number), 1, 1)
        cache.pin(str(number))
        cache.unpin(str(number))
    assert len(cache.place("large", count, 1)) == count and cache.used == count
    cache.check()


def test_what_cannot_be_placed_changes_nothing():
    cache = BufferCache(10)
    for name in "abc":
        cache.place(name, 3, 1)
    cache.pin("b")
    for _ in range(3):
        with pytest.raises(NoBufferRoom):
            cache.place("large", 8, 1)
        cache.check()
    assert cache.place("small", 4, 1) == ["a"]
