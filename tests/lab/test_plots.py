"""Numbers and plots of the report."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from lamina.lab.experiment import Plot
from lamina.lab.plots import draw_plot
from lamina.lab.report_style import COLOURS
from lamina.lab.text_report import format_number


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


@pytest.mark.parametrize("kind", ["line", "bar", "cdf"])
@pytest.mark.parametrize("names", [[1, 10, 100], ["a<b", "b", "c"]])
@pytest.mark.parametrize("log", [False, True])
def test_a_plot_is_well_formed_and_has_a_mark_for_every_series(kind: str, names: list[float | str], log: bool) -> None:
    series = {f"s&{n}": [(x, float(3**n * (at + 1))) for at, x in enumerate(names)] for n in range(10)}
    text = draw_plot(Plot(kind, "x<y", "y", series, log_x=log, log_y=log), "a title")  # type: ignore[arg-type]
    tree = ET.fromstring(text)
    assert tree.get("role") == "img" and tree.get("aria-label") == "a title: y by x<y"
    assert not {"width", "height"} & set(tree.keys()) and tree.get("viewBox")
    written = {part.text for part in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"x<y", "y", *series} <= written
    for place in range(len(COLOURS)):
        assert f"var(--c{place})" in text
    assert not any(colour in text for colour in COLOURS), "colours are the page's, for light and for dark"


def test_values_that_are_no_numbers_are_left_out() -> None:
    text = draw_plot(Plot("line", "x", "y", {"a": [(1, math.nan), (2, 1.0), (3, math.inf)]}), "t")
    assert ET.fromstring(text) is not None
    assert text == draw_plot(Plot("line", "x", "y", {"a": [(2, 1.0)]}), "t")


def test_numbers_beside_the_axes_keep_their_digits() -> None:
    text = draw_plot(Plot("line", "x", "y", {"a": [(0.125, 1.0), (0.25, 2.0)], "12.3456": [(0.125, 2.0)]}), "t")
    assert ">12.3456<" in text and re.search(r">0\.\d\d<", text)


def test_the_same_plot_gives_the_same_bytes() -> None:
    plot = Plot("bar", "x", "y", {"a": [("u", 1.0), ("v", 2.0)], "b": [("u", 3.0)]})
    assert draw_plot(plot, "t") == draw_plot(plot, "t")


def test_a_plot_of_nothing_says_so() -> None:
    assert "Nothing to draw" in draw_plot(Plot("bar", "x", "y", {}), "t")
