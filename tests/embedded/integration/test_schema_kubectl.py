"""An unmodified kubectl reads our documents, and its users see what they know from Kubernetes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from tests.embedded.api import EmbeddedApi  # noqa: E402
from tests.embedded.toys import definition, toy  # noqa: E402
from tests.kubectls import kubectls, marks  # noqa: E402


def pod(name: str, **container: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "train:1", **container}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": containers}}


VERSIONS = kubectls()
MARKS = marks(VERSIONS)


@dataclass
class Answer:
    code: int
    out: str
    err: str


Kubectl = Callable[..., Answer]


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedApi(folder) as running:
        yield running.kubeconfig(folder / "config")


@pytest.fixture(params=[pytest.param(path, id=version, marks=MARKS[version]) for version, path in VERSIONS.items()])
def kubectl(request: pytest.FixtureRequest, kubeconfig: Path, tmp_path: Path) -> Iterator[Kubectl]:
    namespace = Path(request.param).name.replace(".", "-") + "-" + tmp_path.name.replace("_", "-")[:30].strip("-")

    def run(*arguments: str, send: Any = None, cache: str = "cache") -> Answer:
        places = ["--kubeconfig", str(kubeconfig), f"--cache-dir={tmp_path / cache}"]
        done = subprocess.run(
            [request.param, *places, "-n", namespace, *arguments],
            input=json.dumps(send) if send is not None else None,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    made = run("create", "namespace", namespace, cache="before")
    assert made.code == 0, made
    # What kubectl has read about the kinds before there was a new one, it goes on believing for a while.
    made = run("apply", "-f", "-", send=definition(), cache="before")
    assert made.code == 0, made
    yield run
    run("delete", "namespace", namespace, "--wait=false")


def rows(answer: Answer) -> list[list[str]]:
    assert answer.code == 0, answer
    return [line.split() for line in answer.out.splitlines()]


def test_explain(kubectl: Kubectl) -> None:
    shown = kubectl("explain", "ty.spec")
    assert shown.code == 0, shown
    assert "What is wanted." in shown.out and "size" in shown.out and "How big it is." in shown.out
    assert "<integer>" in shown.out
    shown = kubectl("explain", "pod.spec.containers.ports.protocol")
    assert "<string>" in shown.out and "UDP, TCP, or SCTP" in shown.out, shown
    shown = kubectl("explain", "pods", "--recursive")
    assert "terminationGracePeriodSeconds" in shown.out, shown
    assert kubectl("explain", "ty.spec.weight").code == 1


def test_an_unknown_field_is_told_where_it_stands(kubectl: Kubectl) -> None:
    item = toy("a", size=1, foo=2, parts=[{"name": "x", "colour": "red"}])
    refused = kubectl("apply", "-f", "-", send=item)
    assert refused.code == 1
    assert "strict decoding error: unknown field" in refused.err
    assert '"spec.foo"' in refused.err and '"spec.parts[0].colour"' in refused.err
    warned = kubectl("apply", "--validate=warn", "-f", "-", send=item)
    assert warned.code == 0 and 'Warning: unknown field "spec.foo"' in warned.err, warned
    quiet = kubectl("apply", "--validate=ignore", "-f", "-", send={**item, "metadata": {"name": "b"}})
    assert quiet.code == 0 and "unknown" not in quiet.err, quiet
    refused = kubectl("create", "-f", "-", send=pod("p", imagePullPolcy="Never"))
    assert 'unknown field "spec.containers[0].imagePullPolcy"' in refused.err, refused


def test_an_invalid_object_is_told_field_by_field(kubectl: Kubectl) -> None:
    refused = kubectl("create", "-f", "-", send=toy("a", size=0, parts=[{}]))
    assert refused.code == 1
    assert 'The Toy "a" is invalid:' in refused.err
    assert "* spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1" in refused.err
    assert "* spec.parts[0].name: Required value" in refused.err


def test_apply_merges_on_the_clients_side(kubectl: Kubectl) -> None:
    first = pod("p", env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}])
    assert kubectl("apply", "-f", "-", send=first).code == 0
    again = kubectl("apply", "-f", "-", send=first)
    assert again.out.strip() == "pod/p unchanged" and again.err == "", again
    first["metadata"]["labels"] = {"x": "y"}
    first["spec"]["containers"][0]["image"] = "train:2"
    changed = kubectl("apply", "-f", "-", send=first)
    assert changed.out.strip() == "pod/p configured" and changed.err == "", changed
    image = kubectl("get", "pod", "p", "-o", "jsonpath={.spec.containers[0].image} {.metadata.labels.x}")
    assert image.out == "train:2 y"
    first["spec"]["containers"][0]["env"] = []
    refused = kubectl("apply", "-f", "-", send=first)
    assert "pod updates may not change fields other than" in refused.err

    assert kubectl("apply", "-f", "-", send=toy("t", size=1, parts=[{"name": "a"}])).code == 0
    changed = kubectl("apply", "-f", "-", send=toy("t", parts=[{"name": "b"}]))
    assert changed.out.strip() == "toy.example.com/t configured" and changed.err == "", changed
    spec = json.loads(kubectl("get", "toy", "t", "-o", "jsonpath={.spec}").out)
    assert "size" not in spec and spec["parts"] == [{"name": "b"}]


def test_apply_on_the_servers_side(kubectl: Kubectl) -> None:
    done = kubectl("apply", "--server-side", "-f", "-", send=toy("t", size=1, parts=[{"name": "a", "color": "red"}]))
    assert done.code == 0 and "serverside-applied" in done.out, done
    other = ("apply", "--server-side", "--field-manager=other", "-f", "-")
    added = kubectl(*other, send=toy("t", parts=[{"name": "b"}]))
    assert added.code == 0, added
    refused = kubectl(*other, send=toy("t", size=2, parts=[{"name": "b"}]))
    assert refused.code == 1
    assert 'Apply failed with 1 conflict: conflict with "kubectl": .spec.size' in refused.err
    assert "--force-conflicts" in refused.err
    assert kubectl(*other, "--force-conflicts", send=toy("t", size=2, parts=[{"name": "b"}])).code == 0
    assert kubectl("apply", "--server-side", "-f", "-", send=toy("t")).code == 0
    spec = json.loads(kubectl("get", "toy", "t", "-o", "jsonpath={.spec}").out)
    assert (spec["size"], spec["parts"]) == (2, [{"name": "b"}])
    unknown = kubectl("apply", "--server-side", "-f", "-", send=toy("t", foo=1))
    assert unknown.code == 1 and ".spec.foo: field not declared in schema" in unknown.err, unknown


def test_from_the_clients_to_the_servers_side(kubectl: Kubectl) -> None:
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c"},
        "data": {"a": "1", "b": "2"},
    }
    assert kubectl("apply", "-f", "-", send=config).code == 0
    moved = kubectl("apply", "--server-side", "-f", "-", send={**config, "data": {"a": "3"}})
    assert moved.code == 0, moved
    item = json.loads(kubectl("get", "cm", "c", "-o", "json", "--show-managed-fields").out)
    assert item["data"] == {"a": "3"}, "what is no longer applied goes away, though the client's side had made it"
    managers = [(entry["manager"], entry["operation"]) for entry in item["metadata"]["managedFields"]]
    assert ("kubectl", "Apply") in managers and not [name for name, _ in managers if "client-side" in name]
    back = kubectl("apply", "-f", "-", send={**config, "data": {"a": "4"}})
    assert back.code == 0, back
    assert json.loads(kubectl("get", "cm", "c", "-o", "json").out)["data"] == {"a": "4"}


def test_tables(kubectl: Kubectl) -> None:
    assert kubectl("apply", "-f", "-", send=toy("t", size=7)).code == 0
    status = json.dumps({"status": {"conditions": [{"type": "Created"}, {"type": "Running"}]}})
    done = kubectl("patch", "toy", "t", "--subresource=status", "--type=merge", "-p", status)
    assert done.code == 0, done
    header, row = rows(kubectl("get", "ty"))
    assert header == ["NAME", "STATE", "AGE"] and row[:2] == ["t", "Running"]
    header, row = rows(kubectl("get", "ty", "-o", "wide"))
    assert header == ["NAME", "STATE", "SIZE", "ALL", "AGE"] and row[:4] == ["t", "Running", "7", "Created,Running"]
    assert kubectl("apply", "-f", "-", send=pod("p")).code == 0
    header, row = rows(kubectl("get", "pods"))
    assert header == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"] and row[:4] == ["p", "0/1", "Pending", "0"]
    assert kubectl("get", "pods", "-o", "wide").out.splitlines()[0].split("  ")[-1].strip() == "READINESS GATES"
    assert rows(kubectl("get", "pods", "--show-labels"))[0][-1] == "LABELS"
    assert rows(kubectl("get", "pods", "--no-headers", "-o", "custom-columns=N:.metadata.name")) == [["p"]]
    for name in ("nodes", "services", "events", "configmaps", "secrets", "namespaces", "leases", "crd", "all"):
        shown = kubectl("get", name, "-o", "wide", "-A")
        assert shown.code == 0, shown


def test_patches_and_dry_runs(kubectl: Kubectl) -> None:
    assert kubectl("create", "configmap", "c", "--from-literal=a=1").code == 0
    for kind, patch in (
        ("strategic", {"data": {"b": "2"}}),
        ("merge", {"data": {"a": None}}),
        ("json", [{"op": "replace", "path": "/data/b", "value": "3"}]),
    ):
        done = kubectl("patch", "cm", "c", f"--type={kind}", "-p", json.dumps(patch))
        assert done.code == 0, done
    assert json.loads(kubectl("get", "cm", "c", "-o", "jsonpath={.data}").out) == {"b": "3"}
    assert kubectl("label", "cm", "c", "x=y").code == 0
    assert kubectl("annotate", "cm", "c", "x=y").code == 0
    dry = kubectl("apply", "--dry-run=server", "-o", "jsonpath={.spec.dnsPolicy}", "-f", "-", send=pod("dry"))
    assert (dry.code, dry.out) == (0, "ClusterFirst"), dry
    assert kubectl("get", "pod", "dry").code == 1
    refused = kubectl("patch", "toy", "none", "--type=strategic", "-p", "{}")
    assert refused.code == 1
