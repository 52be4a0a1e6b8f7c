"""Rendered Helm chart, and the rules that its objects keep.

Lint, schemas and types are checked by helm and kubernetes-validate. What breaks a cluster in practice passes all of those: an
update that finds no place, a Service whose port no pod has, a grace period shorter than what is to be done in it. Each of these
is a rule here: it takes all objects and yields what is wrong.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "lamina"
Object = dict[str, Any]
Rule = Callable[[list[Object]], Iterator[str]]
RULES: list[Rule] = []
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
PROVIDED = {"POD_NAME", "POD_IP", "NODE_NAME"}


def helm_binary() -> str | None:
    beside = Path(sys.executable).parent / "helm"
    return str(beside) if beside.exists() else shutil.which("helm")


def helm(*arguments: str, values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    binary = helm_binary()
    assert binary is not None
    given = json.dumps(values)  # JSON is YAML
    return subprocess.run([binary, *arguments, "-f", "-"], input=given, capture_output=True, text=True, check=False)


def render(values: Mapping[str, Any], *, apis: tuple[str, ...] = (), version: str = "1.37.0") -> list[Object]:
    """Objects of a release `shop` in the namespace `ml`. Rendered once for equal values: helm takes a third of a second."""
    return json.loads(_render(json.dumps(values, sort_keys=True), apis, version))


@functools.cache
def _render(values: str, apis: tuple[str, ...], version: str) -> str:
    extra = [part for api in apis for part in ("--api-versions", api)]
    done = helm("template", "shop", str(CHART), "--namespace", "ml", "--kube-version", version, *extra, values=json.loads(values))
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1] if not done.stderr else done.stderr)
    return json.dumps([one for one in yaml.safe_load_all(done.stdout) if one])


# --------------------------------------------------------------------------------------- what objects have


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Pod templates by the object they are of; of a RayCluster that of its head and one a group."""
    for one in objects:
        where = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] in ("StatefulSet", "Deployment", "DaemonSet", "Job"):
            yield where, one["spec"]["template"]
        elif one["kind"] == "RayCluster":
            yield f"{where}/head", one["spec"]["headGroupSpec"]["template"]
            for group in one["spec"]["workerGroupSpecs"]:
                yield f"{where}/{group['groupName']}", group["template"]


def containers(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    for where, template in pod_templates(objects):
        for one in template["spec"].get("initContainers", []) + template["spec"]["containers"]:
            yield f"{where}/{one['name']}", one, template["spec"]


def selected(objects: list[Object], labels: Mapping[str, str]) -> list[tuple[str, Object]]:
    """Templates of the pods that a selector finds. The role is a label that the leader sets at run time."""
    wanted = {key: value for key, value in labels.items() if key != "lamina.dev/role"}
    return [
        (where, template)
        for where, template in pod_templates(objects)
        if wanted.items() <= template["metadata"].get("labels", {}).items()
    ]


def ports_of(template: Object) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for one in template["spec"]["containers"]
        for port in one.get("ports", [])
        if "name" in port
    }


def number(quantity: Any) -> float:
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert found is not None, quantity
    return float(found[1]) * UNITS[found[2]]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def option(container: Object, name: str) -> str | None:
    """Value of an option of the container's command."""
    given = [one.partition("=")[2] for one in container.get("args", []) if one.startswith(f"--{name}=")]
    return given[-1] if given else None


# --------------------------------------------------------------------------------------------------- rules


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


@rule
def selectors_match(objects: list[Object]) -> Iterator[str]:
    """A Service, a PodDisruptionBudget, a NetworkPolicy and a workload's own selector find pods."""
    for one in objects:
        where, spec = f"{one['kind']}/{one['metadata']['name']}", one.get("spec", {})
        if one["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            selector = spec.get("podSelector", spec.get("selector"))
            if not selected(objects, selector.get("matchLabels", selector)):
                yield f"{where} selects no pod"
        elif one["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            labels = spec["template"]["metadata"]["labels"]
            if not spec["selector"]["matchLabels"].items() <= labels.items():
                yield f"{where} does not select its own pods"
            others = [other for other, _ in selected(objects, spec["selector"]["matchLabels"]) if other != where]
            if others:
                yield f"{where} also selects pods of {', '.join(others)}"


@rule
def ports_exist(objects: list[Object]) -> Iterator[str]:
    """Every port that a Service, a NetworkPolicy, an Ingress or a probe names is a port of the pods behind it."""
    for name, one in named(objects, "Service").items():
        for where, template in selected(objects, one["spec"]["selector"]):
            known = ports_of(template)
            for port in one["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                if target not in known and target not in known.values():
                    yield f"Service/{name}: {where} has no port {target!r}"
    for name, one in named(objects, "NetworkPolicy").items():
        found = selected(objects, one["spec"]["podSelector"]["matchLabels"])
        known = {key for _, template in found for pair in ports_of(template).items() for key in pair}
        for entry in one["spec"]["ingress"]:
            for port in entry.get("ports", []):
                if port["port"] not in known:
                    yield f"NetworkPolicy/{name}: no pod has port {port['port']!r}"
    services = named(objects, "Service")
    for name, one in named(objects, "Ingress").items():
        for entry in one["spec"]["rules"]:
            for path in entry["http"]["paths"]:
                backend = path["backend"]["service"]
                known = {port["name"] for port in services.get(backend["name"], {"spec": {"ports": []}})["spec"]["ports"]}
                if backend["port"]["name"] not in known:
                    yield f"Ingress/{name}: Service {backend['name']} has no port {backend['port']['name']!r}"
    for where, one, _ in containers(objects):
        known = {key for port in one.get("ports", []) for key in (port.get("name"), port["containerPort"])}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            for way in ("httpGet", "tcpSocket", "grpc"):
                port = one.get(kind, {}).get(way, {}).get("port")
                if port is not None and port not in known:
                    yield f"{where}: {kind} asks port {port!r}, which is not there"


@rule
def probes_ask_for_the_process_alone(objects: list[Object]) -> Iterator[str]:
    """No probe that ends a container, or takes all calls away, depends on a database or on other pods."""
    for where, one, _ in containers(objects):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = one.get(kind, {}).get("httpGet", {}).get("path", "/healthz")
            if path != "/healthz":
                yield f"{where}: {kind} asks {path}"
        startup, live = one.get("startupProbe"), one.get("livenessProbe")
        if live and not startup:
            yield f"{where}: a liveness probe without a startup probe ends what is still loading"
        if startup and startup["periodSeconds"] * startup["failureThreshold"] < 300:
            yield f"{where}: less than five minutes to start"
        if live and live["periodSeconds"] * live["failureThreshold"] < 30:
            yield f"{where}: ended after less than half a minute of silence"


@rule
def updates_find_a_place(objects: list[Object]) -> Iterator[str]:
    """A rolling update never needs a node, or a GPU, more than there is."""
    for one in objects:
        spec, where = one.get("spec", {}), f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] not in ("Deployment", "DaemonSet"):
            continue  # a StatefulSet replaces pods in their place
        update = spec.get("strategy" if one["kind"] == "Deployment" else "updateStrategy", {}).get("rollingUpdate", {})
        surge = update.get("maxSurge", 1 if one["kind"] == "Deployment" else 0)
        pod = spec["template"]["spec"]
        forbids = pod.get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        takes_gpus = any("gpu" in name for each in pod["containers"] for name in each.get("resources", {}).get("limits", {}))
        if surge and (forbids or takes_gpus):
            yield f"{where}: the pod more of an update has no place"
        if not surge and not update.get("maxUnavailable", 1):
            yield f"{where}: an update may neither add nor remove a pod"


@rule
def evictions_are_possible(objects: list[Object]) -> Iterator[str]:
    """A PodDisruptionBudget lets a node be drained, also when pods are unhealthy, and is of a workload that has a scale."""
    for name, one in named(objects, "PodDisruptionBudget").items():
        spec, where = one["spec"], f"PodDisruptionBudget/{name}"
        for found, _ in selected(objects, spec["selector"]["matchLabels"]):
            if found.split("/")[0] not in ("StatefulSet", "Deployment"):
                yield f"{where}: {found} has no scale, so every eviction would be refused"
            replicas = named(objects, found.split("/")[0])[found.split("/")[1]]["spec"].get("replicas", 1)
            if spec.get("maxUnavailable") in (0, "0%") or spec.get("minAvailable", -1) in (replicas, "100%"):
                yield f"{where} forbids every eviction"
        if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{where}: pods that never get healthy keep their node from being drained"


@rule
def grace_is_long_enough(objects: list[Object]) -> Iterator[str]:
    """The grace period is longer than preStop and what the process does after the signal."""
    for where, one, pod in containers(objects):
        command = one.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        needed = float(command[1]) + seconds(option(one, "drain") or "0s") + seconds(option(one, "grace") or "0s")
        if pod.get("terminationGracePeriodSeconds", 30) <= needed and one.get("args"):
            yield f"{where}: killed after {pod.get('terminationGracePeriodSeconds', 30)} s, needs more than {needed:g}"


def secrets_read(objects: list[Object]) -> Iterator[tuple[str, str, str]]:
    """Secrets that are read: where, name, key."""
    for where, one, pod in containers(objects):
        for variable in one.get("env", []):
            ref = variable.get("valueFrom", {}).get("secretKeyRef")
            if ref:
                yield where, ref["name"], ref["key"]
        for volume in pod.get("volumes", []):
            for item in volume.get("secret", {}).get("items", []):
                yield where, volume["secret"]["secretName"], item["key"]
    for name, one in named(objects, "ServiceMonitor").items():
        for endpoint in one["spec"]["endpoints"]:
            ref = endpoint["authorization"]["credentials"]
            yield f"ServiceMonitor/{name}", ref["name"], ref["key"]


@rule
def secrets_are_made_or_named(objects: list[Object]) -> Iterator[str]:
    """Every Secret that is read is made by the chart, with that key, or named by the values (`given-...` in the tests)."""
    made = {name: one["stringData"].keys() for name, one in named(objects, "Secret").items()}
    for where, name, key in secrets_read(objects):
        if not name.startswith("given-") and key not in made.get(name, ()):
            yield f"{where} reads {name}/{key}, which is neither made nor named"


@rule
def secrets_stay_out_of_plain_sight(objects: list[Object]) -> Iterator[str]:
    """No value of a Secret is in any other object."""
    values = [value for one in named(objects, "Secret").values() for value in one["stringData"].values()]
    for one in objects:
        if one["kind"] != "Secret" and any(value in json.dumps(one) for value in values):
            yield f"{one['kind']}/{one['metadata']['name']} shows a secret"


@rule
def images_are_pinned(objects: list[Object]) -> Iterator[str]:
    for where, one, _ in containers(objects):
        if not re.search(r"(@sha256:[0-9a-f]{64}|:[^/:]+)$", one["image"]) or one["image"].endswith(":latest"):
            yield f"{where}: {one['image']} is not pinned"


@rule
def pods_are_restricted(objects: list[Object]) -> Iterator[str]:
    """Kubernetes' restricted Pod Security Standard, and a read-only root file system."""
    for where, one, pod in containers(objects):
        inner, outer = one.get("securityContext", {}), pod.get("securityContext", {})
        if not outer.get("runAsNonRoot") or not outer.get("runAsUser"):
            yield f"{where} may run as root"
        if outer.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{where} has no seccomp profile"
        if inner.get("allowPrivilegeEscalation") is not False or inner.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{where} may gain privileges"
        if not inner.get("readOnlyRootFilesystem"):
            yield f"{where} can write to its image"
        if pod.get("hostNetwork") or pod.get("hostPID"):
            yield f"{where} shares a namespace with its node"


@rule
def there_are_places_to_write(objects: list[Object]) -> Iterator[str]:
    """/tmp, $HOME and /dev/shm are writable, the last in memory and within the container's limit; every mount has its volume."""
    for where, one, pod in containers(objects):
        mounts = {mount["mountPath"]: mount for mount in one.get("volumeMounts", [])}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for path, mount in mounts.items():
            if mount["name"] not in volumes:
                yield f"{where}: no volume {mount['name']} for {path}"
        home = next((each["value"] for each in one.get("env", []) if each["name"] == "HOME"), "")
        for path in ("/tmp", "/dev/shm", home):
            volume = volumes.get(mounts.get(path, {}).get("name", ""), {})
            if "emptyDir" not in volume or mounts[path].get("readOnly"):
                yield f"{where}: {path or '$HOME'} cannot be written"
        shm = volumes.get(mounts.get("/dev/shm", {}).get("name", ""), {}).get("emptyDir", {})
        limit = one.get("resources", {}).get("limits", {}).get("memory")
        if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
            yield f"{where}: /dev/shm is not memory of a known size"
        elif limit is not None and number(shm["sizeLimit"]) >= number(limit):
            yield f"{where}: /dev/shm counts as memory of the container, and may be all of it"
        apps = option(one, "apps")
        if apps is not None and apps not in mounts:
            yield f"{where}: --apps {apps} cannot be written"


@rule
def variables_and_files_of_commands_exist(objects: list[Object]) -> Iterator[str]:
    """$(NAME) in an argument is a variable of the container; a file of a Secret in an argument is mounted."""
    for where, one, pod in containers(objects):
        known = {each["name"] for each in one.get("env", [])}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for argument in one.get("args", []):
            for name in re.findall(r"\$\((\w+)\)", argument):
                if name not in known:
                    yield f"{where}: $({name}) is not set"
            path = Path(argument.partition("=")[2])
            if str(path).startswith("/etc/lamina"):
                mount = next((each for each in one["volumeMounts"] if each["mountPath"] == str(path.parent)), None)
                secret = volumes.get(mount["name"], {}).get("secret") if mount else None
                if secret is None or ("items" in secret and path.name not in [item["path"] for item in secret["items"]]):
                    yield f"{where}: {path} is not mounted"


@rule
def the_api_is_asked_for_what_the_role_allows(objects: list[Object]) -> Iterator[str]:
    """Pods with a service account's token have a Role by name; agents, which run users' code, have no token."""
    roles = named(objects, "Role")
    bound = {
        subject["name"]
        for one in named(objects, "RoleBinding").values()
        for subject in one["subjects"]
        if one["roleRef"]["name"] in roles
    }
    for name, one in roles.items():
        for entry in one["rules"]:
            if not entry.get("resourceNames") or "*" in entry["verbs"] + entry["resources"]:
                yield f"Role/{name} allows more than the objects of this release"
    for where, template in pod_templates(objects):
        pod = template["spec"]
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if pod.get("automountServiceAccountToken") is None:
            yield f"{where} does not say whether it has a token"
        if component == "agent" and pod["automountServiceAccountToken"]:
            yield f"{where} runs functions beside a token of the API"
        if component == "controller" and pod["automountServiceAccountToken"] and pod["serviceAccountName"] not in bound:
            yield f"{where} has a token without a role"
    allowed = {name for one in roles.values() for entry in one["rules"] for name in entry.get("resourceNames", [])}
    for where, one, _ in containers(objects):
        for name in (option(one, "role-label-pods") or "").split(","):
            if name and name not in allowed:
                yield f"{where} may not label {name}"
        for argument in one.get("args", []):
            found = re.fullmatch(r"--launcher=kubernetes:([^,]+).*", argument)
            if found and (found[1] not in allowed or found[1] not in named(objects, "StatefulSet")):
                yield f"{where} may not scale {found[1]}"


@rule
def names_are_unique_and_short(objects: list[Object]) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for one in objects:
        key = (one["kind"], one["metadata"]["name"])
        if key in seen:
            yield f"{'/'.join(key)} is there twice"
        seen.add(key)
        if len(key[1]) > (52 if key[0] in ("StatefulSet", "DaemonSet") else 63):  # a label of their pods has a hash more
            yield f"{'/'.join(key)} is too long"


def broken_rules(objects: list[Object]) -> list[str]:
    return [f"{check.__name__}: {what}" for check in RULES for what in check(objects)]
