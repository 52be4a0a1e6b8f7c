"""Dashboard and alert rules: every metric they name exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lamina import policies
from lamina.core.actions import FailCall, Reject, Reply
from lamina.gateway.observability.gauges import CacheCounters
from lamina.gateway.observability.metrics import Metrics
from lamina.policies import new_controller
from lamina.predict.profile_table import ProfileTable

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\blamina_[a-z_]+")
FILES = {
    "dashboard": (DEPLOY / "grafana" / "lamina.json").read_text(),
    "rules": (DEPLOY / "prometheus" / "lamina.rules.yml").read_text(),
}


def existing() -> set[str]:
    metrics = Metrics(new_controller(policies.build("edf"), ProfileTable([])))
    names = {
        "lamina_runs",
        "lamina_store_up",
        "lamina_leader_term",
    }  # only there with a store: see gateway/observability/run_metrics.py
    metrics.registry.register(CacheCounters(lambda: (0, 0)))
    for family in metrics.registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("file", FILES)
def test_every_metric_it_names_exists(file: str) -> None:
    assert set(NAME.findall(FILES[file])) <= existing()


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set(NAME.findall(FILES["dashboard"]))
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in existing()} <= stems


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(FILES["dashboard"])["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("way", [("check", "rules", "lamina.rules.yml"), ("test", "rules", "lamina.tests.yml")])
def test_rules_and_alerts_are_what_prometheus_takes_and_say_what_they_should(way: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    said = subprocess.run([PROMTOOL, *way], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_metrics_have_names_and_units_as_prometheus_wants_them() -> None:
    assert PROMTOOL is not None
    metrics = Metrics(new_controller(policies.build("edf"), ProfileTable([])))
    metrics.on_call_ended("resize", Reply("c1", 1500, late=False, cost=0.5), "acme")
    metrics.on_call_ended("resize", Reject("c2", "deadline"), "acme")
    said = subprocess.run([PROMTOOL, "check", "metrics"], input=metrics.exposition(), capture_output=True, check=False)
    assert (said.returncode, said.stderr) == (0, b"")


def test_calls_beyond_a_limit_are_counted_for_their_tenant_however_they_were_refused():
    metrics = Metrics(new_controller(policies.build("edf"), ProfileTable([])))
    metrics.on_call_ended("f", Reject("c1", "quota"), "trial")
    metrics.on_rejected("f", "quota", "trial")  # from the cache of rejections
    metrics.on_call_ended("f", Reject("c2", "deadline"), "gallery")
    assert metrics.limited_by_tenant() == {"trial": 2}
    assert b'lamina_tenant_calls_total{outcome="refused",tenant="trial"} 2.0' in metrics.exposition()


def test_a_call_whose_client_left_is_no_failure() -> None:
    metrics = Metrics(new_controller(policies.build("edf"), ProfileTable([])))
    metrics.on_call_ended("f", FailCall("c1", "cancelled"), "acme")
    assert metrics.outcomes("f").offered == 0
    text = metrics.exposition()
    assert b'lamina_calls_total{outcome="cancelled",target="f"} 1.0' in text
    assert b'lamina_calls_total{outcome="failed",target="f"} 0.0' in text
    assert b'lamina_tenant_calls_total{outcome="cancelled",tenant="acme"} 1.0' in text
