"""Supply chain: `sbom FILE` writes what is installed as CycloneDX; `audit` looks for known vulnerabilities in it.

    python scripts/supply_chain.py sbom out/sbom.json
    python scripts/supply_chain.py audit

The audit asks the registry of vulnerabilities. Where that cannot be reached, or `pip-audit` is not installed, it is skipped, and
says so: a check that needs the network must not stop work without one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

AUDIT_S = 300


def bill_of_materials(inspected: dict[str, Any]) -> dict[str, Any]:
    """A CycloneDX document from the report of `pip inspect`."""
    components = [_component(one) for one in inspected["installed"]]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "pip", "version": inspected["pip_version"]}]},
            "component": {"type": "application", "name": "lamina"},
            "properties": [{"name": "python", "value": inspected["environment"]["python_full_version"]}],
        },
        "components": sorted(components, key=lambda one: one["purl"]),
    }


def _component(installed: dict[str, Any]) -> dict[str, Any]:
    about = installed["metadata"]
    name, version = about["name"], about["version"]
    found: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
    }
    licence = about.get("license_expression") or next(
        (one.rpartition(" :: ")[2] for one in about.get("classifier", []) if one.startswith("License :: ")),
        about.get("license", ""),
    )
    if licence:
        found["licenses"] = [{"license": {"name": licence.splitlines()[0][:200]}}]
    return found


def findings(report: str) -> list[str] | None:
    """Vulnerable packages in the report of `pip-audit`, a line each; None if it is no report."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    return [
        f"{one['name']} {one['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'no version'}"
        for one in packages
        for flaw in one.get("vulns", [])
    ]


def audit() -> int:
    if importlib.util.find_spec("pip_audit") is None:
        return _skip("pip-audit is not installed")
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S, check=False)
    except subprocess.TimeoutExpired:
        return _skip(f"no answer within {AUDIT_S} s")
    found = findings(done.stdout)
    if found is None:
        return _skip((done.stderr.strip().splitlines() or ["no report"])[-1][:300])
    for line in found:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"audit: {len(found)} known vulnerabilities\n")
    return 1 if found else 0


def _skip(why: str) -> int:
    sys.stdout.write(f"audit: SKIPPED, {why}\n")
    return 0


def main(arguments: list[str]) -> int:
    match arguments:
        case ["sbom", path]:
            inspected = json.loads(subprocess.check_output([sys.executable, "-m", "pip", "inspect"], text=True))
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(bill_of_materials(inspected), indent=1) + "\n", encoding="utf-8")
            return 0
        case ["audit"]:
            return audit()
    sys.stderr.write("usage: supply_chain.py sbom FILE | audit\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
