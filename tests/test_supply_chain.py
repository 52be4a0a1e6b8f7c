"""Supply chain: the bill of materials is CycloneDX, and an audit fails for what it finds, and for nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "supply_chain.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supply_chain", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.live
def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    out = tmp_path / "sbom.json"
    subprocess.run([sys.executable, str(SCRIPT), "sbom", str(out)], check=True, timeout=120)
    bill = json.loads(out.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    names = {one["name"].lower() for one in bill["components"]}
    assert {"msgspec", "httptools", "click"} <= names
    assert all(one["purl"].startswith("pkg:pypi/") and one["version"] for one in bill["components"])


def test_a_report_is_read_finding_by_finding(script: ModuleType) -> None:
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    report = {"dependencies": [{"name": "a", "version": "1.0", "vulns": [flaw]}, {"name": "b", "version": "1", "vulns": []}]}
    assert script.findings(json.dumps(report)) == ["a 1.0: PYSEC-1, mended in 2.0"]
    assert script.findings(json.dumps({"dependencies": []})) == [] and script.findings("ConnectionError") is None


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X", "fix_versions": []}]}]}', 1, "1 known"),
        ('{"dependencies": []}', 0, "0 known"),
        ("", 0, "SKIPPED"),
    ],
)
def test_an_audit_fails_for_findings_and_is_skipped_without_a_registry(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], report: str, code: int, said: str
) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: object())
    done = subprocess.CompletedProcess([], 1, report, "ConnectionError: no route")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: done)
    assert script.audit() == code and said in capsys.readouterr().out
