"""Numbers, axes and plots of the report."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from lamina.lab.experiment import Plot
from lamina.lab.numbers import format_number, format_tick, scale_for
from lamina.lab.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw_plot


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567, "1,234,567"),
        (1234.5, "1,234"),
        (99.95, "99.95"),
        (3.14159, "3.142"),
        (0.123456, "0.1235"),
        (0.000123, "0.00012"),
        (-12.5, "-12.5"),
        (100.0, "100"),
        (999.99, "1000"),
        (True, "yes"),
        (None, "-"),
        (math.nan, "-"),
        ("edf", "edf"),
    ],
)
def test_a_number_is_written_as_people_do(value: object, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.5, "0.5"), (2000, "2000"), (20_000, "20k"), (1.5e6, "1.5M"), (1e-5, "1e-05")]
)
def test_a_tick_is_short(value: float, text: str) -> None:
    assert format_tick(value) == text


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[5.0], [1.0, 2.0], [0.001, 1000.0], [1e-9, 1e9], [3.0, 3.0, 3.0]])
def test_every_value_lies_on_the_axis_and_there_are_ticks(values: list[float], log: bool) -> None:
    scale = scale_for(values, 10, 90, log=log, zero=False)
    assert all(10 <= scale.px(value) <= 90 for value in values)
    ticks = scale.ticks()
    assert len(ticks) >= 2
    assert all(10 - 1e-6 <= scale.px(value) <= 90 + 1e-6 for value in ticks)


def test_nothing_at_all_still_has_an_axis() -> None:
    assert scale_for([], 0, 1, log=True, zero=True).ticks()


@pytest.mark.parametrize("kind", ["line", "bar", "cdf"])
@pytest.mark.parametrize("names", [[1, 10, 100], ["a<b", "b", "c"]])
@pytest.mark.parametrize("log", [False, True])
def test_a_plot_is_well_formed_and_stays_inside_its_frame(kind: str, names: list[float | str], log: bool) -> None:
    series = {f"s&{n}": [(x, float(3**n * (at + 1))) for at, x in enumerate(names)] for n in range(10)}
    text = draw_plot(Plot(kind, "x<y", "y", series, log_x=log, log_y=log), "a title")  # type: ignore[arg-type]
    tree = ET.fromstring(text)
    for box in tree.iter("rect"):
        left, top = float(box.get("x", 0)), float(box.get("y", 0))
        assert left >= LEFT and left + float(box.get("width", 0)) <= WIDTH - RIGHT + 1
        assert top >= TOP - 1 and top + float(box.get("height", 0)) <= HEIGHT - BOTTOM + 1
    assert len(list(tree.iter("rect" if kind == "bar" else "path"))) >= 10


def test_values_that_are_no_numbers_are_left_out() -> None:
    text = draw_plot(Plot("line", "x", "y", {"a": [(1, math.nan), (2, 1.0), (3, math.inf)]}), "t")
    assert text.count("<circle") == 1


def test_a_plot_of_nothing_says_so() -> None:
    assert "Nothing to draw" in draw_plot(Plot("bar", "x", "y", {}), "t")
