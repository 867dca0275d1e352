"""Unmodified clients against the embedded API server: kubectl in all its versions, and lightkube."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from tests.embedded.api import EmbeddedApi, Running  # noqa: E402
from tests.kubectls import kubectls, marks  # noqa: E402

VERSIONS = kubectls()
MARKS = marks(VERSIONS)

OBJECTS = """
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}, annotations: {logs: "one\\ntwo\\nthree\\n"}}
spec:
  containers:
  - {name: c, image: busybox, command: [sleep, "5"]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: conf}
data: {a: "VALUE"}
"""
DEFINITION = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {kind: Widget, plural: widgets, singular: widget, shortNames: [wdg]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    additionalPrinterColumns:
    - {name: Size, type: integer, jsonPath: .spec.size}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties:
              size: {type: integer, description: How big it is.}
          status:
            type: object
            properties:
              conditions:
                type: array
                items:
                  type: object
                  properties: {type: {type: string}, status: {type: string}}
"""
WIDGET = """
apiVersion: example.com/v1
kind: Widget
metadata: {name: w}
spec: {size: SIZE}
"""

Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with EmbeddedApi(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture(params=[pytest.param(version, marks=MARKS[version], id=version) for version in VERSIONS])
def kubectl(request: pytest.FixtureRequest, running: Running, tmp_path: Path) -> Iterator[Kubectl]:
    """Runs kubectl in a namespace of the test's own; with `fails` it must."""
    config = running.kubeconfig(tmp_path / "kubeconfig")
    environment = {**os.environ, "KUBECONFIG": str(config), "HOME": str(tmp_path)}
    namespace = f"kubectl-{request.param.replace('.', '-')}-{os.urandom(3).hex()}"

    def run(*arguments: str, stdin: str = "", fails: bool = False) -> str:
        done = subprocess.run(
            [VERSIONS[request.param], "-n", namespace, *arguments],
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    run("create", "namespace", namespace)
    yield run
    run("delete", "namespace", namespace)


def test_objects_are_applied_shown_changed_and_deleted(kubectl: Kubectl) -> None:
    objects = OBJECTS.replace("VALUE", "1")
    assert kubectl("apply", "-f", "-", stdin=objects) == "pod/web created\nconfigmap/conf created\n"
    assert kubectl("apply", "-f", "-", stdin=objects) == "pod/web unchanged\nconfigmap/conf unchanged\n"
    changed = OBJECTS.replace("VALUE", "2")
    assert "configmap/conf configured" in kubectl("apply", "-f", "-", stdin=changed)
    assert kubectl("get", "cm", "conf", "-o", "jsonpath={.data.a}") == "2"
    applied = kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=objects)
    assert "configmap/conf serverside-applied" in applied
    header, row = kubectl("get", "pods").splitlines()
    assert header.split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert row.split()[:4] == ["web", "0/1", "Pending", "0"]
    assert "NOMINATED NODE" in kubectl("get", "pods", "-l", "app=web", "-o", "wide")
    assert kubectl("get", "pods", "-l", "app=other", "-o", "name") == ""
    described = kubectl("describe", "pod", "web")
    assert "Image:" in described and "Node-Selectors:" in described
    assert kubectl("logs", "web", "--tail", "2") == "two\nthree\n"
    assert kubectl("logs", "-f", "web").endswith("followed\n")
    kubectl("label", "pod", "web", "x=y")
    kubectl("annotate", "pod", "web", "n=1")
    assert json.loads(kubectl("get", "pod", "web", "-o", "json"))["metadata"]["labels"] == {"app": "web", "x": "y"}
    assert kubectl("patch", "cm", "conf", "-p", '{"data":{"b":"3"}}') == "configmap/conf patched\n"
    deleted = kubectl("delete", "-f", "-", stdin=objects)
    assert '"web" deleted' in deleted and '"conf" deleted' in deleted
    assert kubectl("get", "pod,cm", "-l", "app", "-o", "name") == ""


def test_what_kubectl_makes_itself_is_taken(kubectl: Kubectl) -> None:
    kubectl("create", "configmap", "c", "--from-literal", "a=b")
    kubectl("create", "secret", "generic", "s", "--from-literal", "k=v")
    kubectl("create", "service", "clusterip", "svc", "--tcp", "80:8080")
    assert kubectl("get", "secret", "s", "-o", "jsonpath={.data.k}") == "dg=="
    assert kubectl("get", "svc", "svc", "-o", "jsonpath={.spec.ports[0].targetPort}") == "8080"
    kubectl("run", "p", "--image", "busybox")
    kubectl("expose", "pod", "p", "--port", "99")
    names = kubectl("get", "all", "-o", "name").split()
    assert names == ["pod/p", "service/p", "service/svc"]
    assert kubectl("auth", "can-i", "delete", "pods") == "yes\n"


def test_a_kind_is_defined_explained_and_waited_for(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", stdin=DEFINITION)
    kubectl("wait", "--for=condition=Established", "crd/widgets.example.com", "--timeout=10s")
    assert kubectl("apply", "-f", "-", stdin=WIDGET.replace("SIZE", "3")) == "widget.example.com/w created\n"
    assert kubectl("get", "wdg").split() == ["NAME", "SIZE", "w", "3"]
    assert "How big it is." in kubectl("explain", "widget.spec.size")
    conditions = '{"status":{"conditions":[{"type":"Done","status":"True"}]}}'
    kubectl("patch", "widget", "w", "--subresource=status", "--type=merge", "-p", conditions)
    kubectl("wait", "--for=condition=Done", "widget/w", "--timeout=10s")
    assert "Done" in kubectl("describe", "widget", "w")
    wrong = kubectl("apply", "-f", "-", stdin=WIDGET.replace("size: SIZE", "sise: 3"), fails=True)
    assert 'unknown field "spec.sise"' in wrong
    wrong = kubectl("apply", "-f", "-", stdin=WIDGET.replace("SIZE", "big"), fails=True)
    assert "spec.size" in wrong
    kubectl("delete", "widget", "--all")
    kubectl("delete", "crd", "widgets.example.com")


def test_nodes_are_drained(kubectl: Kubectl, running: Running) -> None:
    node = f"node-{os.urandom(3).hex()}"
    manifest = f'{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"{node}"}}}}'
    kubectl("create", "-f", "-", stdin=manifest)
    pod = OBJECTS.split("---")[0].replace("spec:\n", f"spec:\n  nodeName: {node}\n  terminationGracePeriodSeconds: 0\n")
    kubectl("apply", "-f", "-", stdin=pod)
    kubectl("cordon", node)
    assert "SchedulingDisabled" in kubectl("get", "node", node)
    kubectl("drain", node, "--force", "--timeout=20s")
    assert kubectl("get", "pods", "-o", "name") == ""
    kubectl("uncordon", node)
    kubectl("delete", "node", node)


def test_lightkube_works_as_on_any_cluster(running: Running, tmp_path: Path) -> None:
    from lightkube import ApiError, Client, KubeConfig
    from lightkube.models.core_v1 import Container, PodSpec
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.core_v1 import ConfigMap, Pod

    config = KubeConfig.from_file(running.kubeconfig(tmp_path / "kubeconfig"))
    client = Client(config=config, namespace="default", field_manager="lightkube-test")  # type: ignore[call-overload]
    try:
        made = client.create(ConfigMap(metadata=ObjectMeta(name="lk"), data={"a": "1"}))
        assert made.metadata is not None and made.metadata.uid
        with pytest.raises(ApiError) as refused:
            client.create(ConfigMap(metadata=ObjectMeta(name="lk")))
        assert refused.value.status.reason == "AlreadyExists"
        client.patch(ConfigMap, "lk", {"data": {"b": "2"}})
        assert client.get(ConfigMap, "lk").data == {"a": "1", "b": "2"}
        spec = PodSpec(containers=[Container(name="c", image="i")])
        client.apply(Pod(metadata=ObjectMeta(name="lk", labels={"l": "k"}), spec=spec))
        (pod,) = client.list(Pod, labels={"l": "k"})
        assert pod.status is not None and pod.status.phase == "Pending"
        for kind, item in client.watch(ConfigMap, fields={"metadata.name": "lk"}):
            assert kind == "ADDED" and item.metadata is not None and item.metadata.name == "lk"
            break
        client.delete(Pod, "lk", grace_period=0)
        client.delete(ConfigMap, "lk")
    finally:
        client._client.close()
