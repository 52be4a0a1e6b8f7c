"""The field's words: what an engineer of the field would search for is found by file or class name, and means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.source_trees import SRC, all_files, nodes_of, tree_of

DOCS = SRC.parent.parent / "docs"
TESTS = SRC.parent.parent / "tests"

WHERE = {
    "admission": "core/scheduling/admission.py",
    "scheduling": "core/scheduling/__init__.py",
    "slots": "core/scheduling/slots.py",
    "lease": "core/scheduling/leases.py",
    "cluster": "core/scheduling/cluster.py",
    "rolling update": "core/rolling_update.py",
    "token bucket": "core/token_bucket.py",
    "journal": "core/workflow/journal.py",
    "critical path": "core/workflow/critical_path.py",
    "fair share": "core/tenancy/fair_share.py",
    "batching": "planner/batching.py",
    "autoscaler": "policies/frontier/autoscaler.py",
    "load shedding": "policies/frontier/load_shedding.py",
    "rejection cache": "gateway/routes/rejection_cache.py",
    "driver": "drivers/realtime.py",
    "engine": "engines/cpu.py",
    "supervisor": "gpu/supervisor.py",
    "hot standby": "gpu/hot_standby.py",
    "graph capture": "gpu/graph_capture.py",
    "hang detector": "gpu/hang_detector.py",
    "weight cache": "gpu/weight_cache.py",
    "evict": "kernels/buffer_cache.py",
    "recovery": "durable/recovery.py",
    "triggers": "state/triggers.py",
    "router": "gateway/routes/router.py",
    "auth": "gateway/auth.py",
    "rate limiter": "gateway/observability/rate_limiter.py",
    "cold start": "gateway/routes/cold_start_grace.py",
    "metrics": "gateway/observability/metrics.py",
    "rollout": "gateway/deploy/rollout.py",
    "group commit": "store/group_commit.py",
    "interference": "planner/interference.py",
    "agent": "cluster/agent.py",
    "node registry": "cluster/node_registry.py",
    "leadership": "store/leadership.py",
    "kernel graph": "kernels/graph.py",
    "segment": "gpu/segments.py",
    "memory budget": "server/memory_budget.py",
    "quarantine": "durable/runs.py",
    "traffic": "gateway/deploy/traffic.py",
    "console": "gateway/console/routes.py",
    "isolation": "engines/isolation.py",
    "completion estimator": "policies/frontier/estimate.py",
    "blocking": "planner/blocking.py",
    "max min": "planner/max_min.py",
    "forecast": "planner/device_forecast.py",
    "predictor": "predict/online.py",
    "profile table": "predict/profile_table.py",
    "environments": "engines/app_environments.py",
    "shadow batches": "engines/shadow_batches.py",
    "outbox": "store/outbox.py",
    "volume": "sdk/volume.py",
    "throttle": "gateway/ingress/throttle.py",
    "scenario": "sim/scenario.py",
    "slo check": "planner/slo_check.py",
}
"""What a newcomer searches for, and the file that must be among what a search by name finds."""

PEOPLE = {"who", "whom", "whose", "whoever", "whomever", "nobody", "somebody", "everybody", "anybody", "someone", "anyone"}
SUBJECTS = PEOPLE - {"whose"}
"""In a sentence "whose" may be said of a batch."""

PEOPLE_IN_TEXT = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
ONE_NAME_PER_PLUGIN = {"Policy"}
"""The file name tells these apart: `policies/edf.py` has `Policy`."""


def product() -> list[Path]:
    return [path for path in all_files() if path.relative_to(SRC).parts[0] not in ("published", "lab")]


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: tree_of(path) for path in all_files()}


def words(name: str) -> str:
    """`GraphCaptureQueue` and `graph_capture_queue` are both `graph capture queue`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower().strip()


@pytest.fixture(scope="module")
def names(trees: dict[Path, ast.Module]) -> dict[str, str]:
    """What a file of the product offers to a search by name: its own name, and those of its classes and functions."""
    found = {}
    for path in product():
        own = [path.stem if path.stem != "__init__" else path.parent.name]
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        own += [node.name for node in nodes_of(trees[path]) if isinstance(node, kinds)]
        found[str(path.relative_to(SRC))] = " | ".join(words(name) for name in own)
    return found


@pytest.mark.parametrize("term", WHERE)
def test_a_search_by_the_fields_term_finds_the_module(term: str, names: dict[str, str]) -> None:
    assert WHERE[term] in {file for file, offered in names.items() if term in offered}


def test_a_public_class_name_has_one_meaning(trees: dict[Path, ast.Module]) -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SRC)))
    assert {name: where for name, where in homes.items() if len(where) > 1 and name not in ONE_NAME_PER_PLUGIN} == {}


def test_no_name_speaks_of_people(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        names = [path.stem]
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.append(node.target.id)
        wrong += [f"{path.relative_to(SRC)}: {name}" for name in names if PEOPLE & set(words(name).split())]
    assert wrong == []


def test_no_test_is_named_after_people() -> None:
    """A report of a run lists them: of calls, clients and batches it says what failed, of somebody it does not."""
    names = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert [name for name in names if SUBJECTS & set(name.partition(": ")[2].split("_"))] == []


def test_first_lines_of_docstrings_speak_of_requests_and_batches_and_not_of_people(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if PEOPLE_IN_TEXT.search(first):
                    wrong.append(f"{path.relative_to(SRC)}: {first}")
    assert wrong == []


def test_the_glossary_names_files_that_exist_and_every_term_searched_for() -> None:
    page = (DOCS / "glossary.md").read_text()
    files = set(re.findall(r"`([a-z0-9_/]+\.py)`", page))
    assert sorted(file for file in files if not (SRC / file).exists()) == []
    assert sorted(file for file in set(WHERE.values()) if f"`{file}`" not in page) == []
