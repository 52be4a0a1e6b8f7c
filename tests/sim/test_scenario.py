from __future__ import annotations

from pathlib import Path

import pytest

from lamina.errors import BadScenario, BadValue
from lamina.sim.scenario import Scenario, parse, read
from lamina.types import QuotaSpec, ScaleSpec, Slo

from .conftest import PAGES, SCENARIOS, SMALL


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_every_scenario_of_the_repository_can_be_read(file: Path):
    assert read(file).name == file.stem


def test_quantities_are_read_with_their_units(small: Scenario):
    a, b = small.functions
    assert (a.memory_mib, a.share, a.slo.latency_us, b.max_batch) == (1024, 0.25, 30_000, 4)
    assert small.duration_us == 2_000_000


def test_a_share_of_a_gpu_means_that_it_needs_one(small: Scenario):
    assert small.functions[0].gpu == "must"


def test_a_grid_becomes_points_by_batch_and_units(small: Scenario):
    points = [(p.batch, p.units, p.p50_us) for p in small.profiles[0].points]
    assert points == [(1, 4, 2000.0), (8, 4, 6000.0)]


def test_longer_forms_say_more():
    text = SMALL.replace('slo = "60ms"', 'slo = { latency = "60ms", target = 0.9, on_miss = "serve", timeout = "1s" }').replace(
        'load = "30ms"', 'load = "30ms"\nquota = { limit = 0.5, window = "20ms" }\nscale = { min = 2, max = 3, idle = "1s" }'
    )
    b = parse(text).functions[1]
    assert b.slo == Slo(latency_us=60_000, target=0.9, on_miss="serve", timeout_us=1_000_000)
    assert (b.quota, b.scale) == (QuotaSpec(limit=0.5, window_us=20_000), ScaleSpec(min=2, max=3, idle_us=1_000_000))


def test_devices_are_counted_through():
    devices = parse(SMALL.replace('kind = "h200"', 'kind = "h200"\ncount = 2\nprice = "3.6/h"')).devices
    assert [(d.id, d.units, d.price_per_s) for d in devices] == [("h200-0", 15, 0.001), ("h200-1", 15, 0.001)]


def test_options_of_the_policy_are_its_fields():
    scenario = parse(SMALL.replace('policy = "fifo"\n', '[policy]\nname = "fifo"\nlead_us = "1ms"\n'))
    assert (scenario.policy, scenario.options) == ("fifo", {"lead_us": "1ms"})


def fails(text: str, *, line: int, field: str, what: str, hint: str = "") -> None:
    with pytest.raises(BadScenario) as caught:
        parse(text, "my.toml")
    message = caught.value.message
    assert message.startswith(f"my.toml:{line}: {field}: "), message
    assert what in message
    assert hint in caught.value.hint
    assert caught.value.hint, "every complaint says what to do"


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


GAMMA = 'shape = "gamma"\nrate = 100\ncv = 2.0'
GRID_B = "[function.profile.h200]\nbatch = [1, 4]\np50_ms.8 = [4.0, 9.0]"
MISTAKES = {  # what was right, what is written instead; then line, field, and words of the complaint and of the hint
    "unknown key": ("max_batch = 8", "max_bach = 8", 12, "function[0].max_bach", "no such field", "mean 'max_batch'?"),
    "unknown section": ("[[device]]", "[[devise]]", 7, "devise", "no such field", "did you mean 'device'?"),
    "goal without a unit": ('slo = "30ms"', "slo = 30", 15, "function[0].slo", "30 has no unit", '"50ms"'),
    "time in a bad unit": ('"30ms"', '"30msec"', 15, "function[0].slo", "not a quantity", '"50ms"'),
    "time too short": ('"30ms"', '"0ms"', 15, "function[0].slo", "too short", "1us"),
    "time without a unit": ('"2s"', "2", 4, "scenario.duration", "2 has no unit", '"50ms"'),
    "memory without a unit": ('memory = "1GiB"', "memory = 1024", 14, "function[0].memory", "no unit", '"4GiB"'),
    "share above one": ('"1/4"', '"5/4"', 13, "function[0].share", "out of range", "at most 1"),
    "share that is none": ('"1/4"', '"a bit"', 13, "function[0].share", "not a share", '"25%"'),
    "text for a number": ("max_batch = 8", 'max_batch = "8"', 12, "function[0].max_batch", "a text", "a whole number"),
    "flag for a number": ("max_batch = 8", "max_batch = true", 12, "function[0].max_batch", "true or false", "whole"),
    "number too small": ("max_batch = 8", "max_batch = 0", 12, "function[0].max_batch", "too small", "at least 1"),
    "unknown target": ('target = "b"', 'target = "bb"', 38, "load[1].target", "workflow 'bb'", "did you mean 'b'?"),
    "unknown shape": ('"gamma"', '"gama"', 39, "load[1].shape", "'gama' is none of", "did you mean 'gamma'?"),
    "key of another shape": ("cv = 2.0", "speedup = 3", 41, "load[1].speedup", "nothing for a gamma load", "rate, cv"),
    "key a shape needs": ("cv = 2.0", "", 37, "load[1]", "cv is missing", "Poisson"),
    "rate of zero": ("rate = 400", "rate = 0", 35, "load[0].rate", "out of range", "above 0"),
    "rate that is none": ("rate = 400", 'rate = "fast"', 35, "load[0].rate", "not a rate", '"200/s"'),
    "rate without end": (
        "rate = 400",
        "rate = 1e300",
        35,
        "load[0].rate",
        "1e+300 is out of range",
        "at most 1,000,000 a second",
    ),
    "stage that is none": (
        GAMMA,
        'shape = "ramp"\nstages = [["1s", 5],\n["2s"]]',
        40,
        "load[1].stages[1]",
        "not a stage",
        "a rate",
    ),
    "stages of nothing": (GAMMA, 'shape = "steps"\nstages = [["1s", 0]]', 40, "load[1].stages", "above 0", "stages ="),
    "unknown device": ('"h200"', '"h900"', 7, "device[0]", "nothing is known about 'h900'", "units and memory"),
    "no device left": ('kind = "h200"', 'kind = "h200"\ncount = 0', 7, "device", "no device", "count"),
    "slice too large": ('kind = "h200"', 'kind = "h200"\nsizes = [4, 32]', 9, "device[0].sizes", "32 units", "has 15"),
    "two of a name": ('name = "b"', 'name = "a"', 23, "function[1].name", "two functions called 'a'", "different"),
    "no profile here": ("profile.h200]", "profile.v100]", 18, "function[0].profile", "none for 'h200'", "function.profile.h200"),
    "no profile": (GRID_B, "", 22, "function[1]", "profile is missing", "a file, or a table"),
    "too few times": ("[2.0, 6.0]", "[2.0]", 20, "function[0].profile.h200.p50_ms.4", "1 times for 2", "batch"),
    "units that are none": ("ms.4", "ms.four", 20, "function[0].profile.h200.p50_ms.four", "not a number of units", "p50_ms.4"),
    "too large": ('"1GiB"', '"1TiB"', 14, "function[0].memory", "fit on no device", "more memory"),
    "at home nowhere": ('share = "1/4"', "cores = 2", 10, "function[0]", "can run on no device", 'gpu = "may"'),
    "share of no GPU": ('share = "1/4"', 'share = "1/4"\ngpu = "no"', 13, "function[0].share", "does not use", 'gpu = "may"'),
    "scale upside down": ("min = 1", "min = 9", 16, "function[0].scale", "min 9 is above max 8", "lower"),
    "quota upside down": (
        'load = "20ms"',
        "quota = { request = 0.9, limit = 0.5 }",
        17,
        "function[0].quota",
        "0.9 is above",
        "lower",
    ),
    "unknown policy": ('"fifo"', '"fife"', 5, "scenario.policy", "no 'fife' in policies", "did you mean 'fifo'?"),
    "endless": ('duration = "2s"', "", 1, "scenario", "would never end", "duration"),
    "missing trace": (GAMMA, 'shape = "trace"\nfile = "none.csv"', 40, "load[1].file", "no file", "CSV"),
    "missing workload": (GAMMA, 'shape = "hasgpu"\nfile = "none.json"', 40, "load[1].file", "no file", "README"),
    "missing profile": (GRID_B, 'profile = "none.json"', 29, "function[1].profile", "none.json", "lamina profile"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_line_field_and_hint(mistake: str):
    right, wrong, line, field, what, hint = MISTAKES[mistake]
    assert right in SMALL
    fails(SMALL.replace(right, wrong, 1), line=line, field=field, what=what, hint=hint)


def test_an_option_the_policy_does_not_have_is_reported_where_it_stands():
    text = SMALL.replace('policy = "fifo"\n', '[policy]\nname = "fifo"\nled_us = 5\n')
    fails(text, line=7, field="policy.led_us", what="fifo has no such option", hint="did you mean 'lead_us'?")


def test_an_option_of_the_wrong_type_is_reported_where_it_stands():
    text = SMALL.replace('policy = "fifo"\n', '[policy]\nname = "fifo"\nlead_us = [5]\n')
    fails(text, line=7, field="policy.lead_us", what="Expected `int`", hint="its default is 100")


def test_broken_toml_is_reported_with_its_line():
    fails('[scenario]\nname = "x\n', line=2, field="syntax", what="", hint="TOML")


def test_toml_that_stops_short_is_reported_with_its_last_line():
    fails("[scenario]\nx = [1,\n", line=3, field="syntax", what="", hint="TOML")


@pytest.mark.parametrize("section", ["scenario", "device", "function", "load"])
def test_a_section_that_is_missing_is_named(section: str):
    text = "\n".join(f"[[{other}]]" for other in ("device", "function", "load") if other != section)
    text += "" if section == "scenario" else "\n[scenario]"
    fails(text, line=1, field="scenario", what=f"[{section}]", hint="quickstart")


def test_a_file_that_is_not_there_is_reported(tmp_path: Path):
    with pytest.raises(BadValue, match=r"no file '.*none\.toml'"):
        read(tmp_path / "none.toml")


def with_steps(steps: str) -> str:
    return SMALL + PAGES[: PAGES.index("[[workflow.step]]")] + steps


@pytest.mark.parametrize(
    ("steps", "field", "what", "hint"),
    [
        ('step = [{ function = "c" }]', "workflow[0].step[0].function", "no function 'c'", ""),
        ('step = [{ function = "a", after = ["aa"] }]', "workflow[0].step[0].after[0]", "no step 'aa'", ""),
        ('step = [{ function = "a" }, { function = "a" }]', "workflow[0].step[1]", "two steps called 'a'", "names"),
        ('step = [{ function = "a", each = {} }]', "workflow[0].step[0]", "function and each", "two steps"),
        ('step = [{ name = "x", each = { expect = 2 } }]', "workflow[0].step[0].each", "steps are missing", "each ="),
        ('step = [{ name = "x", choice = [{ odds = 0 }] }]', "workflow[0].step[0].choice", "no branch", "odds"),
        ('step = [{ name = "x", choice = [{ steps = [] }] }]', "workflow[0].step[0].choice[0]", "odds are missing", ""),
        ("step = [{ after = [] }]", "workflow[0].step[0]", "no name", "function"),
        ("step = []", "workflow[0].step", "no steps", "at least one"),
        (
            'step = [{ function = "a", after = ["b"] }, { function = "b", after = ["a"] }]',
            "workflow[0].step[0]",
            "a, b wait for each other",
            "after",
        ),
    ],
)
def test_a_mistake_in_a_workflow_is_reported_where_it_stands(steps: str, field: str, what: str, hint: str):
    text = with_steps(steps)
    fails(text, line=line_of(text, "step = "), field=field, what=what, hint=hint)


def test_a_workflow_may_not_be_called_like_a_function():
    text = with_steps('step = [{ function = "a" }]').replace('name = "page"', 'name = "a"')
    fails(text, line=line_of(text, "[[workflow]]") + 1, field="workflow[0].name", what="'a' is there already", hint="share")
