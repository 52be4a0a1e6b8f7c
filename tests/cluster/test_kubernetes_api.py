"""Kubernetes API client and role labels, against a fake API server over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest

from lamina.cluster import kubernetes_api
from lamina.cluster.kubernetes_api import KubernetesApi, KubernetesError, ReplicaScale, RoleLabels
from lamina.errors import BadValue
from tests.cluster.kubernetes_server import FakeKubernetes

pytestmark = pytest.mark.live


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    with contextlib.closing(FakeKubernetes()) as found:
        found.pods = {f"c-{i}": {} for i in range(2)}
        found.scales = {"agents": {"wanted": 1, "there": 1}}
        yield found


def client(cluster: FakeKubernetes, token: Callable[[], str] | None = None) -> KubernetesApi:
    return KubernetesApi(cluster.url, "ml", token or (lambda: cluster.token))


def test_a_scale_is_read_and_set(cluster: FakeKubernetes) -> None:
    api = client(cluster)
    api.set_scale("agents", 3)
    assert api.read_scale("agents") == ReplicaScale(wanted=3, there=1)


def test_a_token_that_was_rotated_is_read_anew(cluster: FakeKubernetes) -> None:
    api = client(cluster)
    api.read_scale("agents")
    cluster.token = "rotated"
    assert api.read_scale("agents").wanted == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda cluster: setattr(cluster, "allowed", set()), "403 .*forbidden.*\n.*Role does not allow"),
        (lambda cluster: cluster.scales.clear(), "404 agents not found"),
        (lambda cluster: cluster.close(), "refused"),
    ],
)
def test_what_the_api_does_not_grant_is_said(spoil: Callable[[FakeKubernetes], None], said: str) -> None:
    cluster = FakeKubernetes()
    cluster.scales = {"agents": {"wanted": 1, "there": 1}}
    api = client(cluster)
    spoil(cluster)
    with pytest.raises(KubernetesError, match=said):
        api.read_scale("agents")
    with contextlib.suppress(OSError):
        cluster.close()


def test_outside_of_a_pod_there_is_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadValue, match="no Kubernetes service account"):
        KubernetesApi.of_this_pod()


# ------------------------------------------------------------------------------------------------ roles


class Servers:
    """Two servers and the roles they believe they have."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self.roles = {"c-0": "leader", "c-1": "standby"}
        self.cluster = cluster

    async def play(self, *steps: Callable[[], None]) -> None:
        """Run both; after each step wait until the labels say what the steps wait for."""
        api = client(self.cluster)
        tasks = [
            asyncio.create_task(RoleLabels(api, own, tuple(self.roles)).follow(lambda own=own: self.roles[own]))  # type: ignore[misc]
            for own in self.roles
        ]
        for step in steps:
            await asyncio.to_thread(step)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def labelled(self, *roles: str) -> None:
        self.cluster.until(lambda: tuple(pod.get("lamina.dev/role") for pod in self.cluster.pods.values()) == roles)


def test_the_leader_is_labelled_and_a_new_one_takes_the_label_over(cluster: FakeKubernetes) -> None:
    servers = Servers(cluster)
    asyncio.run(
        servers.play(
            lambda: servers.labelled("leader", "standby"),
            lambda: servers.roles.update({"c-0": "standby", "c-1": "leader"}),
            lambda: servers.labelled("standby", "leader"),
        )
    )


def test_a_leader_that_is_frozen_loses_its_label_to_the_next_one(cluster: FakeKubernetes) -> None:
    cluster.pods["c-0"]["lamina.dev/role"] = "leader"  # it says nothing any more
    api = client(cluster)

    async def play() -> None:
        task = asyncio.create_task(RoleLabels(api, "c-1", ("c-0", "c-1")).follow(lambda: "leader"))
        await asyncio.to_thread(cluster.until, lambda: cluster.pods["c-0"].get("lamina.dev/role") == "standby")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())
    assert cluster.pods["c-1"]["lamina.dev/role"] == "leader"


def test_a_label_that_was_lost_or_refused_is_written_again(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "RENEW_S", 0.05)
    monkeypatch.setattr(kubernetes_api, "RETRY_S", 0.05)
    servers = Servers(cluster)
    cluster.allowed = set()
    asyncio.run(
        servers.play(
            lambda: cluster.until(lambda: len(cluster.asked) > 3),
            lambda: setattr(cluster, "allowed", None),
            lambda: servers.labelled("leader", "standby"),
            lambda: cluster.pods["c-0"].clear(),  # the pod was made anew
            lambda: servers.labelled("leader", "standby"),
        )
    )


def test_a_pod_labels_only_a_set_that_it_is_of(cluster: FakeKubernetes) -> None:
    with pytest.raises(BadValue, match="--role-label-pods: 'x-0', this pod"):
        RoleLabels(client(cluster), "x-0", ("c-0", "c-1"))
