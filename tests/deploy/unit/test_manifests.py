"""deploy/: what kubectl makes of it is complete, says what the code takes, and gives nobody more than is needed."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from evertrain import __version__
from evertrain.acjob import names
from evertrain.cli import credentials
from evertrain.clusterd import __main__ as clusterd
from evertrain.clusterd.leading import LEADS, TRUE
from evertrain.clusterd.shell import PORT
from evertrain.noded import __main__ as noded
from evertrain.operator import __main__ as operator
from tests.deploy.deployed import DEPLOY, LOADER, OVERLAYS, ROOT, Object, charted, kustomized, name_of, pods
from tests.kubectls import kubectls, marks

FOLDERS = ["", "base", *(f"overlays/{name}" for name in OVERLAYS)]
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "operator": operator.parser,
    "clusterd": clusterd.parser,
    "noded": noded.parser,
    "credentials": credentials.parser,
}
WHEN = marks(kubectls())
SERVED = {
    "v1", "apps/v1", "batch/v1", "rbac.authorization.k8s.io/v1", "networking.k8s.io/v1", "apiextensions.k8s.io/v1",
}  # fmt: skip
"""Groups and versions that both Kubernetes 1.20 and a current one have."""
THEIRS = {"overlays/cert-manager": "cert-manager.io/v1", "overlays/monitoring": "monitoring.coreos.com/v1"}
"""And those of what has to be installed for an overlay."""
MONITORED = "overlays/monitoring"


def each_container(folder: str) -> list[tuple[str, Object, Object]]:
    return [(name, spec, container) for name, spec in pods(folder).items() for container in spec["containers"]]


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_files_are_yaml(path: Path) -> None:
    if "chart/templates" not in str(path):
        assert [item for item in yaml.load_all(path.read_text(), LOADER) if item]


@pytest.mark.parametrize(
    "kubectl", [pytest.param(path, id=version, marks=WHEN[version]) for version, path in kubectls().items()]
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kubectl_renders_the_same(folder: str, kubectl: str) -> None:
    assert kustomized(folder, kubectl) == kustomized(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_objects_are_of_versions_that_old_and_new_clusters_have(folder: str) -> None:
    for item in kustomized(folder).values():
        assert item["apiVersion"] in {*SERVED, THEIRS.get(folder)}, name_of(item)


@pytest.mark.parametrize("folder", FOLDERS)
def test_whatever_is_named_is_there(folder: str) -> None:
    items = kustomized(folder)
    for (kind, namespace, _), item in items.items():
        if namespace and namespace != "kube-system":
            assert ("Namespace", "", namespace) in items
        if kind in ("RoleBinding", "ClusterRoleBinding"):
            role = item["roleRef"]
            assert (role["kind"], namespace if role["kind"] == "Role" else "", role["name"]) in items
            for subject in item["subjects"]:
                assert ("ServiceAccount", subject["namespace"], subject["name"]) in items
    for name, spec in pods(folder).items():
        assert ("ServiceAccount", "mindx-dl", spec["serviceAccountName"]) in items, name
    made = {credentials.TOKENS, credentials.AUTHORITY, credentials.SERVER, credentials.JOBS}
    mounted = {
        volume["secret"]["secretName"]
        for spec in pods(folder).values()
        for volume in spec.get("volumes") or ()
        if "secret" in volume
    }
    assert mounted == (set() if folder.endswith("insecure") else made - {credentials.AUTHORITY})


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_container_may_more_than_it_must(folder: str) -> None:
    for name, spec, container in each_container(folder):
        pod, own = spec["securityContext"], container["securityContext"]
        assert pod["runAsNonRoot"] is True and pod["runAsUser"] > 0 and pod["runAsGroup"] > 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert not spec.get("hostPID") and not spec.get("hostIPC"), name
        assert bool(spec.get("hostNetwork")) == (name == "noded")
        written = {mount["name"] for mount in container.get("volumeMounts") or () if not mount.get("readOnly")}
        assert written <= {"ranktable", "timeline"}, name
        hosts = {volume["name"] for volume in spec.get("volumes") or () if "hostPath" in volume}
        assert hosts <= {"noded": {"sys", "proc", "root"}}.get(name, {"ranktable"}), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_container_has_an_image_of_this_version_and_asks_for_what_it_needs(folder: str) -> None:
    for name, _, container in each_container(folder):
        assert container["image"] == f"evertrain-control-plane:{__version__}", name
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert container["resources"]["limits"].keys() == {"memory"}, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_command_lines_are_understood(folder: str) -> None:
    """And the ports in them are those that are probed and served."""
    for name, spec, container in each_container(folder):
        part, *arguments = container["args"]
        options = PARSERS[part]().parse_args(arguments)
        ports = {port["name"]: port["containerPort"] for port in container.get("ports") or ()}
        if part == "credentials":
            continue
        assert options.enable_healthz, name
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            port = probe["httpGet"]["port"]
            assert ports.get(port, port) == options.healthz_address, name
            if part == "noded" and folder == MONITORED:
                # The kubelet asks a pod at its address, which for one with the network of its node is that of the node.
                assert "host" not in probe["httpGet"] and options.healthz_host == "$(NODE_IP)"
                sources = {variable["name"]: variable["valueFrom"] for variable in container["env"]}
                assert sources["NODE_IP"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
                continue
            # Whoever has the network of a node shows its health to that node alone.
            assert probe["httpGet"].get("host", "0.0.0.0") == options.healthz_host, name
            assert (options.healthz_host == "127.0.0.1") == bool(spec.get("hostNetwork")), name
        if part != "noded":
            assert options.leader_elect, name
            variables = {variable["name"] for variable in container["env"]}
            assert {"POD_NAMESPACE"} <= variables
        if part == "clusterd":
            assert ports["grpc"] == PORT
            assert {"POD_IP", "POD_NAME"} <= variables
            assert options.insecure == folder.endswith("insecure")
        for option in ("token_secret", "tls_dir", "job_tls_dir"):
            if getattr(options, option, None):
                folders = {mount["mountPath"] for mount in container["volumeMounts"]}
                path = getattr(options, option)
                assert str(path if option.endswith("dir") else path.parent) in folders


@pytest.mark.parametrize("folder", FOLDERS)
def test_clusterd_keeps_its_timeline_where_it_may_write(folder: str) -> None:
    ((_, spec, container),) = [each for each in each_container(folder) if each[0] == "clusterd"]
    path = clusterd.parser().parse_args(container["args"][1:]).timeline
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == str(path.parent)]
    assert not mount.get("readOnly")
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == mount["name"]]
    if folder != "overlays/timeline-claim":
        assert volume.keys() == {"name", "emptyDir"} and volume["emptyDir"]["sizeLimit"]
        return
    assert volume == {"name": "timeline", "persistentVolumeClaim": {"claimName": "clusterd-timeline"}}
    items = kustomized(folder)
    claim = items["PersistentVolumeClaim", "mindx-dl", "clusterd-timeline"]["spec"]
    deployment = items["Deployment", "mindx-dl", "clusterd"]["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert deployment["replicas"] == 1 and deployment["strategy"] == {"type": "Recreate"}, "a volume for one at a time"


def test_two_of_each_with_a_lease() -> None:
    for name in ("clusterd", "ascend-operator-manager"):
        assert kustomized("base")["Deployment", "mindx-dl", name]["spec"]["replicas"] == 2


def test_jobs_find_the_clusterd_that_leads() -> None:
    service = kustomized("base")["Service", names.CLUSTERD_NAMESPACE, names.CLUSTERD_SERVICE]
    assert [port["port"] for port in service["spec"]["ports"]] == [PORT]
    selector = dict(service["spec"]["selector"])
    assert selector.pop(LEADS) == TRUE
    template = kustomized("base")["Deployment", "mindx-dl", "clusterd"]["spec"]["template"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert LEADS not in template["metadata"]["labels"], "who leads is not known before"


def test_clusterd_talks_to_pods_of_jobs_and_to_nobody_else() -> None:
    policies = [item["spec"] for name, item in kustomized("base").items() if name[0] == "NetworkPolicy"]
    closed = [policy for policy in policies if "ingress" not in policy]
    assert [policy["podSelector"]["matchLabels"] for policy in closed] == [{"app.kubernetes.io/part-of": "evertrain"}]
    (opened,) = [policy for policy in policies if "ingress" in policy]
    (rule,) = opened["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": PORT}]
    selected = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert {names.OPERATOR_NAME: names.CONTROLLER} in selected


def test_prometheus_is_told_of_all_parts_and_let_in() -> None:
    items = kustomized(MONITORED)
    monitor = items["PodMonitor", "mindx-dl", "evertrain"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    (chosen,) = monitor["selector"]["matchExpressions"]
    policy = items["NetworkPolicy", "mindx-dl", "evertrain-metrics"]["spec"]
    (rule,) = policy["ingress"]
    (guarded,) = policy["podSelector"]["matchExpressions"]
    assert all(each["namespaceSelector"] == {} and each["podSelector"]["matchLabels"] for each in rule["from"])
    workloads = [item for name, item in items.items() if name[0] in ("Deployment", "DaemonSet")]
    assert len(workloads) == 3
    ports = set()
    for item in workloads:
        template = item["spec"]["template"]
        label = template["metadata"]["labels"][chosen["key"]]
        assert label in chosen["values"]
        (container,) = template["spec"]["containers"]
        options = PARSERS[container["args"][0]]().parse_args(container["args"][1:])
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == endpoint["port"]]
        assert port == options.healthz_address
        if not template["spec"].get("hostNetwork"):
            assert label in guarded["values"]
            ports.add(port)
    assert {each["port"] for each in rule["ports"]} == ports, "and to nothing else"


def test_monitoring_changes_nothing_else() -> None:
    base, monitored = kustomized("base"), kustomized(MONITORED)
    assert {name[0] for name in monitored.keys() - base.keys()} == {"PodMonitor", "NetworkPolicy"}
    assert {name for name in base if base[name] != monitored[name]} == {("DaemonSet", "mindx-dl", "noded")}


def test_certificates_have_the_name_that_jobs_expect() -> None:
    certificates = kustomized("overlays/cert-manager")
    assert names.CLUSTERD_DOMAIN in certificates["Certificate", "mindx-dl", "clusterd"]["spec"]["dnsNames"]
    assert names.CLUSTERD_DOMAIN in credentials.HOSTS
    made = {item["spec"]["secretName"] for name, item in certificates.items() if name[0] == "Certificate"}
    assert made == {credentials.AUTHORITY, credentials.SERVER, credentials.JOBS}


def test_the_definition_of_jobs_can_be_applied() -> None:
    """`kubectl apply` keeps the whole object in an annotation, which has a limit."""
    (item,) = kustomized("crds").values()
    assert len(str(item)) < 262144


def test_nothing_names_a_machine_or_a_registry() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert str(ROOT) not in text, path
            assert not re.search(r"/home/|(?<!/host)/root\b|localhost:\d|image: ?[\w.-]+\.[a-z]+/", text), path


# The chart.


def test_the_chart_is_made_of_the_same_files() -> None:
    if not kubectls():
        pytest.skip("there is no kubectl")
    done = subprocess.run(
        [sys.executable, "-m", "tools.chart", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("base", {}),
        ("overlays/cert-manager", {"credentials": "cert-manager"}),
        ("overlays/insecure", {"credentials": "insecure"}),
        ("overlays/default-scheduler", {"gangScheduling": False}),
        ("overlays/monitoring", {"monitoring": True}),
    ],
)
def test_chart_and_kustomize_make_the_same_objects(folder: str, values: Object) -> None:
    assert charted(values) == kustomized(folder)


def test_values_of_the_chart_arrive() -> None:
    image = {"repository": "mine/evertrain", "tag": "7"}
    items = charted({"image": image, "clusterd": {"replicas": 3, "memoryLimit": "9Gi"}})
    found = items["Deployment", "mindx-dl", "clusterd"]
    assert found["spec"]["replicas"] == 3
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mine/evertrain:7"
    assert container["resources"] == {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "9Gi"}}
    for item in items.values():
        assert "evertrain-control-plane" not in str(item)
