"""Rectangle packing of time x units, against a grid on which every cell is counted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.published.has.rectangle_packing import Rectangle, RectanglePacking
from tests.properties import examples

WIDTH, HEIGHT = 10, 8

SIZES = st.tuples(st.integers(1, WIDTH), st.integers(1, HEIGHT))
STEPS = st.lists(st.one_of(SIZES, st.integers(0, 30)), max_size=40)
"""A size is put, a number gives one of those placed back."""


def cells(rect: Rectangle) -> set[tuple[int, int]]:
    return {(x, y) for x in range(rect.x, rect.right) for y in range(rect.y, rect.top)}


def empty_cells(packing: RectanglePacking) -> set[tuple[int, int]]:
    everything = cells(Rectangle(0, 0, packing.width, packing.height))
    return everything - {cell for rect in packing.taken.values() for cell in cells(rect)}


def maximal_by_brute_force(packing: RectanglePacking) -> set[Rectangle]:
    """Every empty rectangle there is, less those inside another."""
    empty = empty_cells(packing)
    found = [
        rect
        for x in range(packing.width)
        for y in range(packing.height)
        for width in range(1, packing.width - x + 1)
        for height in range(1, packing.height - y + 1)
        if cells(rect := Rectangle(x, y, width, height)) <= empty
    ]
    return {rect for rect in found if not any(other != rect and other.contains(rect) for other in found)}


def play(packing: RectanglePacking, steps: list[tuple[int, int] | int]) -> RectanglePacking:
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            packing.place(f"p{number}", *step)
        elif packing.taken:
            packing.release(sorted(packing.taken)[step % len(packing.taken)])
    return packing


@given(STEPS)
def test_nothing_overlaps_and_nothing_sticks_out(steps: list[tuple[int, int] | int]):
    packing = play(RectanglePacking(WIDTH, HEIGHT), steps)
    taken = [cell for rect in packing.taken.values() for cell in cells(rect)]
    assert len(taken) == len(set(taken))
    assert set(taken) <= cells(Rectangle(0, 0, WIDTH, HEIGHT))


@given(STEPS)
def test_the_free_rectangles_are_empty(steps: list[tuple[int, int] | int]):
    packing = play(RectanglePacking(WIDTH, HEIGHT), steps)
    assert all(cells(space) <= empty_cells(packing) for space in packing.free)


@examples(25)
@given(STEPS)
def test_restructured_the_free_space_is_every_maximal_rectangle(steps: list[tuple[int, int] | int]):
    packing = play(RectanglePacking(6, 5), [(min(6, s[0]), min(5, s[1])) if isinstance(s, tuple) else s for s in steps[:14]])
    packing.restructure()
    assert set(packing.free) == maximal_by_brute_force(packing)


@examples(25)
@given(st.lists(SIZES, max_size=10))
def test_splitting_alone_keeps_every_maximal_rectangle(sizes: list[tuple[int, int]]):
    packing = RectanglePacking(6, 5)
    for number, (width, height) in enumerate(sizes):
        packing.place(f"p{number}", min(6, width), min(5, height))
    assert set(packing.free) == maximal_by_brute_force(packing)


@given(STEPS)
def test_no_free_rectangle_lies_in_another(steps: list[tuple[int, int] | int]):
    free = play(RectanglePacking(WIDTH, HEIGHT), steps).free
    assert not any(a is not b and a.contains(b) for a in free for b in free)


@examples(50)
@given(STEPS, SIZES)
def test_a_pod_is_turned_away_only_if_it_fits_nowhere(steps: list[tuple[int, int] | int], size: tuple[int, int]):
    packing = play(RectanglePacking(WIDTH, HEIGHT), steps)
    empty = empty_cells(packing)
    possible = any(
        cells(Rectangle(x, y, *size)) <= empty for x in range(WIDTH - size[0] + 1) for y in range(HEIGHT - size[1] + 1)
    )
    assert (packing.fit(*size) is not None) == possible


@given(STEPS)
def test_aligned_pods_on_a_common_unit_stand_on_the_same_units(steps: list[tuple[int, int] | int]):
    taken = list(play(RectanglePacking(WIDTH, HEIGHT, aligned=True), steps).taken.values())
    assert all(a.has_same_rows(b) or a.has_disjoint_rows(b) for a in taken for b in taken)


def test_the_published_eight_pods_fit_on_one_gpu():
    """4 ResNet of 12 % x 40 %, 2 RNNT of 24 % x 40 % and 2 BERT of 50 % x 60 %, which had needed four GPUs."""
    packing = RectanglePacking(100, 100)
    wanted = [("bert", 60, 50)] * 2 + [("rnnt", 40, 24)] * 2 + [("resnet", 40, 12)] * 4
    assert all(packing.place(f"{name}{number}", width, height) for number, (name, width, height) in enumerate(wanted))


def test_a_hole_is_kept_for_the_next_pod_of_its_size():
    packing = RectanglePacking(10, 8)
    packing.place("a", 5, 8)
    middle = packing.place("b", 5, 4)
    packing.place("c", 5, 4)
    packing.release("b")
    assert packing.place("again", 5, 4) == middle


def test_two_holes_side_by_side_become_one_when_a_larger_pod_needs_them():
    packing = RectanglePacking(10, 8)
    for name in "abcd":
        packing.place(name, 5, 4)
    packing.release("a")
    neighbour = next(name for name in "bcd" if packing.taken[name].has_same_rows(Rectangle(0, 0, 5, 4)))
    packing.release(neighbour)
    assert packing.place("wide", 10, 4) == Rectangle(0, 0, 10, 4)


def test_the_tightest_place_is_taken():
    packing = RectanglePacking(10, 8)
    packing.occupy("wall", Rectangle(4, 0, 1, 8))
    assert packing.fit(4, 8) == Rectangle(0, 0, 4, 8)


def test_used_is_the_part_that_is_taken():
    packing = RectanglePacking(10, 8)
    packing.place("a", 5, 4)
    assert packing.utilisation == pytest.approx(0.25)


def test_the_same_pods_are_packed_the_same_way_every_time():
    rng = random.Random(3)
    sizes = [(rng.randint(1, 5), rng.randint(1, 4)) for _ in range(30)]
    steps: list[tuple[int, int] | int] = [*sizes]
    assert play(RectanglePacking(WIDTH, HEIGHT), steps).taken == play(RectanglePacking(WIDTH, HEIGHT), steps).taken
