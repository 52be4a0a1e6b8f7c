"""Rectangle packing of pods on a GPU: time quota wide and units high.

The free space is kept as *maximal rectangles*: every empty rectangle that cannot grow in any direction, so they overlap.
A place is taken in three steps, as FaST-GShare describes them:

- split: a free rectangle that the new one cuts leaves up to four smaller ones, left, right, below and above of it;
- intersection update: the same is done to every free rectangle the new one touches, not only the one it was put into;
- redundant removal: what lies inside another free rectangle is forgotten.

What is given back is at first *kept* as it was, a hole of just the size some pod had and another will want. Only when a
pod does not fit is the free space *restructured*: worked out afresh from what is taken, so that holes side by side become
one. Nothing that is placed ever moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Rectangle:
    """Whole numbers: percent points of time to the right, units upwards."""

    x: int
    y: int
    width: int
    height: int

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def top(self) -> int:
        return self.y + self.height

    @property
    def area(self) -> int:
        return self.width * self.height

    def overlaps(self, other: Rectangle) -> bool:
        return self.x < other.right and other.x < self.right and self.y < other.top and other.y < self.top

    def contains(self, other: Rectangle) -> bool:
        return self.x <= other.x and other.right <= self.right and self.y <= other.y and other.top <= self.top

    def has_same_rows(self, other: Rectangle) -> bool:
        return self.y == other.y and self.height == other.height

    def has_disjoint_rows(self, other: Rectangle) -> bool:
        """No unit in common."""
        return self.top <= other.y or other.top <= self.y

    def without(self, taken: Rectangle) -> list[Rectangle]:
        """The largest rectangles of it that `taken` leaves empty; itself if it leaves all."""
        if not self.overlaps(taken):
            return [self]
        parts = (
            Rectangle(self.x, self.y, taken.x - self.x, self.height),
            Rectangle(taken.right, self.y, self.right - taken.right, self.height),
            Rectangle(self.x, self.y, self.width, taken.y - self.y),
            Rectangle(self.x, taken.top, self.width, self.top - taken.top),
        )
        return [part for part in parts if part.width > 0 and part.height > 0]


@dataclass(slots=True)
class RectanglePacking:
    """One GPU. `aligned`: two pods on a common unit must stand on exactly the same units, because a device shares a slice
    among several but never cuts two different slices out of the same units."""

    width: int
    height: int
    aligned: bool = False
    taken: dict[str, Rectangle] = field(default_factory=dict)
    free: list[Rectangle] = field(default_factory=list)
    _has_holes: bool = False  #: holes have come back since the free space was last worked out

    def __post_init__(self) -> None:
        self.restructure()

    @property
    def utilisation(self) -> float:
        """Part of the whole that is taken."""
        return sum(rect.area for rect in self.taken.values()) / (self.width * self.height)

    def fit(self, width: int, height: int) -> Rectangle | None:
        """The tightest place for it: least of a free rectangle's shorter side left over, then least area, then lowest."""
        found = self._fit(width, height)
        if found is None and self._has_holes:
            self.restructure()
            found = self._fit(width, height)
        return found

    def place(self, name: str, width: int, height: int) -> Rectangle | None:
        """Find a place and occupy it; None if there is none."""
        place = self.fit(width, height)
        if place is not None:
            self.occupy(name, place)
        return place

    def occupy(self, name: str, rect: Rectangle) -> None:
        assert Rectangle(0, 0, self.width, self.height).contains(rect), f"{rect} is not on this GPU"
        assert not any(rect.overlaps(other) for other in self.taken.values()), f"{rect} is taken already"
        self.taken[name] = rect
        self.free = _largest(part for space in self.free for part in space.without(rect))

    def release(self, name: str) -> Rectangle:
        """Keep the hole as it is, ready for the next pod of this size."""
        hole = self.taken.pop(name)
        self.free = _largest([*self.free, hole])
        self._has_holes = True
        return hole

    def restructure(self) -> None:
        """All maximal empty rectangles, from nothing but what is taken."""
        self.free = [Rectangle(0, 0, self.width, self.height)]
        for rect in self.taken.values():
            self.free = _largest(part for space in self.free for part in space.without(rect))
        self._has_holes = False

    def _fit(self, width: int, height: int) -> Rectangle | None:
        best: tuple[int, int, int, int] | None = None
        place: Rectangle | None = None
        for space in self.free:
            if space.width < width or space.height < height:
                continue
            short, left = min(space.width - width, space.height - height), space.area - width * height
            for y in {space.y: None, space.top - height: None}:
                rect = Rectangle(space.x, y, width, height)
                score = (short, left, y, space.x)
                if (best is None or score < best) and self._is_aligned(rect):
                    best, place = score, rect
        return place

    def _is_aligned(self, rect: Rectangle) -> bool:
        return not self.aligned or all(
            rect.has_same_rows(other) or rect.has_disjoint_rows(other) for other in self.taken.values()
        )


def _largest(spaces: Iterable[Rectangle]) -> list[Rectangle]:
    """Those that lie in no other; sorted, so that runs repeat."""
    several = sorted(set(spaces), key=lambda rect: (-rect.area, rect))
    kept: list[Rectangle] = []
    for space in several:  # the larger first: only a larger one can contain it
        if not any(other.contains(space) for other in kept):
            kept.append(space)
    return kept
