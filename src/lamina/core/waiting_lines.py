"""Waiting lines: names in line for several places at once, by rank. For functions that wait for units of their devices."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator

Rank = tuple[int, int, int]
"""Place in a line, least first."""


class WaitingLines:
    """One line per place, kept sorted; a name has one rank, in all the lines it is in."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[Rank, str]]] = {}  #: by place, first in line first
        self._ranks: dict[str, tuple[Rank, list[str]]] = {}  #: by name: its rank, and the places it is in line for

    def add(self, name: str, rank: Rank, places: Iterable[str]) -> None:
        self._ranks[name] = (rank, list(places))
        for place in places:
            insort(self.lines.setdefault(place, []), (rank, name))

    def remove(self, name: str) -> None:
        """Out of all lines."""
        rank, places = self._ranks.pop(name)
        for place in places:
            line = self.lines[place]
            del line[bisect_left(line, (rank, name))]

    def names(self, place: str, without: Container[str]) -> Iterator[str]:
        """First in line first."""
        return (name for _, name in self.lines.get(place, ()) if name not in without)
