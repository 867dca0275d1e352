"""Environment, command, addresses and volumes of a pod."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from evertrain.embedded.network.plan import LOOPBACK
from evertrain.embedded.node import addresses, environment, volumes
from evertrain.embedded.node.environment import ConfigError, Place

Object = dict[str, Any]
PLACE = Place("node-0", "127.64.0.1", "127.64.0.2", {"cpu": "4", "memory": "1Gi"})
POD: Object = {
    "metadata": {
        "name": "p",
        "namespace": "default",
        "uid": "u",
        "labels": {"a": "1", "b": 'x"y'},
        "annotations": {"huawei.com/Ascend910": "Ascend910-0"},
    },
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1500m"}, "requests": {"memory": "10Mi"}}}]},
}
CONTAINER = POD["spec"]["containers"][0]
OBJECTS: dict[tuple[str, str], Object] = {
    ("ConfigMap", "map"): {"metadata": {"name": "map"}, "data": {"key": "value", "not a name!": "x"}},
    ("Secret", "secret"): {"metadata": {"name": "secret"}, "data": {"word": base64.b64encode(b"sesame").decode()}},
}


def lookup(kind: str, namespace: str, name: str) -> Object | None:
    return OBJECTS.get((kind, name)) if namespace == "default" else None


def build(env: list[Object], **container: Any) -> dict[str, str]:
    return environment.build(POD, {**CONTAINER, "env": env, **container}, PLACE, lookup, {"BASE": "b"})


def reference(**source: Any) -> list[Object]:
    return [{"name": "X", "valueFrom": source}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("$$(A)", "$(A)"),
        ("$(NO)", "$(NO)"),
        ("$A", "$A"),
        ("$$", "$"),
        ("$(A", "$(A"),
        ("x$(A)$(A)", "x11"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert environment.expand(text, {"A": "1"}) == expected


def test_variables_refer_to_earlier_ones_and_replace_those_of_sources() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(LATER)$(BASE)"}, {"name": "LATER", "value": "2"}]
    sources = [{"configMapRef": {"name": "map"}, "prefix": "M_"}, {"secretRef": {"name": "secret"}}]
    found = build([*env, {"name": "word", "value": "mine"}], envFrom=sources)
    assert found == {"BASE": "b", "M_key": "value", "word": "mine", "A": "1", "B": "1$(LATER)b", "LATER": "2"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "p"),
        ("metadata.namespace", "default"),
        ("metadata.uid", "u"),
        ("metadata.labels['a']", "1"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['huawei.com/Ascend910']", "Ascend910-0"),
        ("spec.nodeName", "node-0"),
        ("spec.serviceAccountName", "default"),
        ("status.hostIP", "127.64.0.1"),
        ("status.podIP", "127.64.0.2"),
    ],
)
def test_fields(path: str, expected: str) -> None:
    assert build(reference(fieldRef={"fieldPath": path}))["X"] == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"resource": "limits.cpu"}, "2"),
        ({"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.memory", "divisor": "1Mi"}, "1024"),
        ({"resource": "requests.memory"}, "10485760"),
        ({"resource": "requests.cpu"}, "2"),
        ({"resource": "requests.memory", "divisor": "1Mi", "containerName": "c"}, "10"),
    ],
)
def test_resources(source: Object, expected: str) -> None:
    assert build(reference(resourceFieldRef=source))["X"] == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"fieldRef": {"fieldPath": "status.phase"}}, "unsupported fieldPath: status.phase"),
        ({"configMapKeyRef": {"name": "no", "key": "k"}}, 'configmap "no" not found'),
        ({"configMapKeyRef": {"name": "map", "key": "k"}}, "couldn't find key k in ConfigMap default/map"),
        ({"secretKeyRef": {"name": "secret", "key": "k"}}, "couldn't find key k in Secret default/secret"),
        ({"resourceFieldRef": {"resource": "other.cpu"}}, "unsupported container resource : other.cpu"),
        ({"resourceFieldRef": {"resource": "limits.cpu", "containerName": "x"}}, "container x not found"),
    ],
)
def test_what_is_missing_or_wrong(source: Object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(reference(**source))
    assert str(error.value) == message


def test_what_is_optional_may_be_missing() -> None:
    optional = {"name": "no", "key": "k", "optional": True}
    assert "X" not in build(reference(configMapKeyRef=optional))
    assert build([], envFrom=[{"secretRef": {"name": "no", "optional": True}}]) == {"BASE": "b"}


def test_the_command() -> None:
    container = {"name": "c", "command": ["run", "$(A)"], "args": ["$$(A)"]}
    assert environment.command(container, {"A": "1"}) == ["run", "1", "$(A)"]
    with pytest.raises(ConfigError, match="has no command"):
        environment.command({"name": "c"}, {})


def test_addresses_are_given_once_and_not_again_at_once() -> None:
    book = addresses.Addresses()
    first, second = book.take("a", 1), book.take("b", 1)
    assert (first, second) == ("127.64.1.2", "127.64.1.3")
    assert book.take("c", 1, ["127.64.1.2", "10.0.0.1", "127.96.0.7"]) == "127.96.0.7"
    assert book.take("d", 1, ["127.96.0.7"]) == "127.64.1.4"
    book.release("a")
    assert book.take("e", 1) == "127.64.1.5"
    for number in range(194):
        book.take(f"more {number}", 1)
    assert book.take("one more", 1) == "127.64.1.2"
    with pytest.raises(addresses.Exhausted):
        book.take("too much", 1)


def test_addresses_of_nodes_and_chips_do_not_meet() -> None:
    assert LOOPBACK.host(0) == "127.64.0.1"
    assert LOOPBACK.host(300) == "127.65.44.1"
    assert LOOPBACK.chip(0, 7) == "127.64.0.207" and LOOPBACK.chip(0, 60) == ""
    assert LOOPBACK.pods(0)[-1] == "127.64.0.199"
    with pytest.raises(ValueError, match="at most"):
        LOOPBACK.host(8192)


def test_services_that_select_a_pod() -> None:
    def service(name: str, address: str, selector: Object | None, namespace: str = "default") -> Object:
        metadata = {"name": name, "namespace": namespace}
        return {"metadata": metadata, "spec": {"clusterIP": address, "selector": selector}}

    services = [
        service("z", "127.96.0.1", {"a": "1"}),
        service("b", "127.96.0.2", {"a": "1"}),
        service("other", "127.96.0.3", {"a": "2"}),
        service("elsewhere", "127.96.0.4", {"a": "1"}, "kube-system"),
        service("headless", "None", {"a": "1"}),
        service("none", "127.96.0.5", None),
    ]
    assert addresses.of_services(POD, services) == ["127.96.0.2", "None", "127.96.0.1"]
    text = addresses.hosts(POD, "127.64.0.2", services)
    assert "127.64.0.2\tp\n" in text
    assert "127.96.0.1\tz.default.svc.cluster.local z.default.svc z.default z\n" in text
    assert "headless" not in text


def pod_with(*given: Object) -> Object:
    return {**POD, "spec": {**POD["spec"], "volumes": list(given)}}


def test_volumes_of_files_change_all_at_once(tmp_path: Path) -> None:
    items = [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]
    pod = pod_with(
        {"name": "m", "configMap": {"name": "map", "items": [{"key": "key", "path": "deep/file", "mode": 0o600}]}},
        {"name": "d", "downwardAPI": {"items": items}},
        {"name": "p", "projected": {"sources": [{"secret": {"name": "secret"}}, {"downwardAPI": {"items": items}}]}},
    )
    prepared = volumes.prepare(pod, tmp_path, PLACE, lookup)
    file = prepared.paths["m"] / "deep/file"
    assert file.read_text() == "value"
    assert file.stat().st_mode & 0o777 == 0o600
    assert (prepared.paths["d"] / "labels").read_text() == 'a="1"\nb="x\\"y"'
    assert (prepared.paths["p"] / "word").read_bytes() == b"sesame"
    before = os.readlink(prepared.paths["m"] / "..data")
    volumes.refresh(pod, tmp_path, PLACE, lookup)
    assert os.readlink(prepared.paths["m"] / "..data") == before

    def changed(kind: str, namespace: str, name: str) -> Object | None:
        return {"metadata": {"name": name}, "data": {"key": "new"}} if kind == "ConfigMap" else None

    # A cluster was killed in the middle of an earlier change.
    os.symlink("..1", prepared.paths["m"] / "..next")
    (prepared.paths["m"] / "..1" / "deep").mkdir(parents=True)
    volumes.refresh(pod, tmp_path, PLACE, changed)
    assert file.read_text() == "new"
    assert (prepared.paths["p"] / "word").read_bytes() == b"sesame"
    assert len([name for name in os.listdir(prepared.paths["m"]) if name.startswith("..")]) == 2


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"nfs": {"server": "10.0.0.1", "path": "/"}}, "serves nfs volumes of 127.0.0.1 only"),
        ({"nfs": {"server": "127.0.0.1", "path": "/no/such"}}, "/no/such is not a directory"),
        ({"hostPath": {"path": "/etc/passwd", "type": "Directory"}}, "hostPath type check failed: /etc/passwd is not"),
        ({"hostPath": {"path": "relative"}}, "has to begin with /"),
        ({"persistentVolumeClaim": {"claimName": "x"}}, "type persistentVolumeClaim are not supported"),
        ({"secret": {"secretName": "no"}}, 'secret "no" not found'),
        ({"configMap": {"name": "map", "items": [{"key": "no", "path": "p"}]}}, "non-existent configmap key: no"),
        ({"configMap": {"name": "map", "items": [{"key": "key", "path": "../p"}]}}, "no path inside a volume"),
    ],
)
def test_volumes_that_can_not_be(tmp_path: Path, volume: Object, message: str) -> None:
    with pytest.raises(volumes.VolumeError) as error:
        volumes.prepare(pod_with({"name": "v", **volume}), tmp_path, PLACE, lookup)
    assert 'MountVolume.SetUp failed for volume "v" : ' in str(error.value)
    assert message in str(error.value)


def test_a_missing_host_path_is_an_empty_directory_and_said(tmp_path: Path) -> None:
    prepared = volumes.prepare(
        pod_with({"name": "v", "hostPath": {"path": "/no/such", "type": ""}}), tmp_path, PLACE, lookup
    )
    assert not list(prepared.paths["v"].iterdir())
    assert prepared.notes == ["/no/such does not exist on this machine: the pod sees an empty directory in its place"]
    assert not Path("/no").exists()


def test_directories_that_are_elsewhere(tmp_path: Path) -> None:
    pod = pod_with(
        {"name": "v", "hostPath": {"path": "/user/tables/default.job", "type": "Directory"}},
        {"name": "w", "hostPath": {"path": "/user/tables-of-others"}},
    )
    prepared = volumes.prepare(pod, tmp_path / "volumes", PLACE, lookup, {"/user/tables": tmp_path / "tables"})
    assert prepared.paths["v"] == tmp_path / "tables" / "default.job"
    assert prepared.paths["v"].is_dir()
    assert prepared.paths["w"] == tmp_path / "volumes" / "w"


def test_mounts(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    container = {
        "name": "c",
        "volumeMounts": [
            {"name": "v", "mountPath": "/a", "readOnly": True},
            {"name": "v", "mountPath": "/b", "subPath": "below/it"},
            {"name": "v", "mountPath": "/c", "subPathExpr": "$(RANK)"},
        ],
    }
    found = volumes.mounts(container, {"v": tmp_path / "volume"}, {"RANK": "7"}, [tmp_path / "hosts"])
    assert [(mount["source"].removeprefix(str(tmp_path)), mount["target"], mount["read_only"]) for mount in found] == [
        ("/hosts", "/etc/hosts", False),
        ("/volume", "/a", True),
        ("/volume/below/it", "/b", False),
        ("/volume/7", "/c", False),
    ]
    (tmp_path / "volume" / "link").symlink_to("/etc")
    for wrong in ({"subPath": "../x"}, {"subPath": "/etc"}, {"subPath": "link"}, {"mountPath": "relative"}):
        mount = {"name": "v", "mountPath": "/a", **wrong}
        with pytest.raises(ConfigError):
            volumes.mounts({"name": "c", "volumeMounts": [mount]}, {"v": tmp_path / "volume"}, {}, [])
    with pytest.raises(ConfigError, match="is not defined"):
        volumes.mounts({"name": "c", "volumeMounts": [{"name": "w", "mountPath": "/a"}]}, {}, {}, [])


def test_sources() -> None:
    pod = pod_with(
        {"name": "a", "configMap": {"name": "one"}},
        {"name": "b", "projected": {"sources": [{"secret": {"name": "two"}}, {"configMap": {"name": "three"}}]}},
        {"name": "c", "secret": {"secretName": "four"}},
    )
    pod["spec"] = {**pod["spec"], "containers": [{"name": "c", "env": reference(secretKeyRef={"name": "five"})}]}
    assert volumes.sources(pod) == {
        ("ConfigMap", "one"),
        ("Secret", "two"),
        ("ConfigMap", "three"),
        ("Secret", "four"),
        ("Secret", "five"),
    }
