"""What is accepted, what is refused and in which words, and what an accepted object becomes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from evertrain.embedded.schema import (
    Refused,
    Registry,
    Resource,
    converted,
    decode,
    prepare_create,
    prepare_update,
)

REGISTRY = Registry.builtin()


def kind(plural: str, group: str = "") -> Resource:
    found = REGISTRY.find(group, "v1", plural)
    assert found is not None
    return found


POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "namespace": "default"},
    "spec": {"containers": [{"name": "ascend", "image": "train:1"}]},
}


def pod(**spec: Any) -> dict[str, Any]:
    made = copy.deepcopy(POD)
    made["spec"] |= spec
    return made


def refused(resource: Resource, item: dict[str, Any], **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        prepare_create(resource, item, **options)
    return caught.value


def test_a_pod_gets_the_defaults_that_kubernetes_gives_it() -> None:
    item = pod(
        volumes=[{"name": "code", "configMap": {"name": "c"}}, {"name": "scratch"}],
        containers=[
            {
                "name": "ascend",
                "image": "train",
                "ports": [{"containerPort": 2222}],
                "resources": {"limits": {"huawei.com/Ascend910": 8}},
                "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            }
        ],
    )
    made = prepare_create(kind("pods"), item).object
    container = made["spec"]["containers"][0]
    assert container["ports"] == [{"containerPort": 2222, "protocol": "TCP"}]
    assert container["resources"] == {
        "limits": {"huawei.com/Ascend910": "8"},
        "requests": {"huawei.com/Ascend910": "8"},
    }
    assert container["imagePullPolicy"] == "Always"
    assert container["env"][0]["valueFrom"]["fieldRef"]["apiVersion"] == "v1"
    assert made["spec"]["volumes"] == [
        {"name": "code", "configMap": {"name": "c", "defaultMode": 420}},
        {"name": "scratch", "emptyDir": {}},
    ]
    assert made["spec"]["restartPolicy"] == "Always"
    assert made["spec"]["terminationGracePeriodSeconds"] == 30
    assert {t["key"]: t["tolerationSeconds"] for t in made["spec"]["tolerations"]} == {
        "node.kubernetes.io/not-ready": 300,
        "node.kubernetes.io/unreachable": 300,
    }
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    assert prepare_create(kind("pods"), POD).object["spec"]["containers"][0]["imagePullPolicy"] == "IfNotPresent"


def test_preparing_twice_changes_nothing() -> None:
    made = prepare_create(kind("pods"), POD).object
    assert prepare_update(kind("pods"), made, made).object == made


def test_unknown_fields_are_refused_reported_or_ignored() -> None:
    item = pod(foo=1)
    item["spec"]["containers"][0]["imagee"] = "x"
    error = refused(kind("pods"), item, field_validation="Strict", duplicates=["spec.containers"])
    assert error.code == 400 and error.reason == "BadRequest"
    assert error.message == (
        'Pod in version "v1" cannot be handled as a Pod: strict decoding error: duplicate field "spec.containers", '
        'unknown field "spec.containers[0].imagee", unknown field "spec.foo"'
    )
    ready = prepare_create(kind("pods"), item, field_validation="Warn")
    assert ready.warnings == ['unknown field "spec.containers[0].imagee"', 'unknown field "spec.foo"']
    assert "foo" not in ready.object["spec"] and "imagee" not in ready.object["spec"]["containers"][0]
    ready = prepare_create(kind("pods"), item, field_validation="Ignore")
    assert ready.warnings == [] and "foo" not in ready.object["spec"]
    assert refused(kind("pods"), POD, field_validation="strict").code == 400


def test_a_wrong_type_in_a_builtin_kind_is_refused_by_the_decoder() -> None:
    error = refused(kind("pods"), pod(terminationGracePeriodSeconds="soon"))
    assert error.code == 400
    assert error.message == (
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal string into Go struct field '
        "Pod.spec.terminationGracePeriodSeconds of type integer"
    )
    for item in (pod(containers="x"), pod(containers=["x"]), {**POD, "metadata": []}, {**POD, "spec": 1}):
        assert refused(kind("pods"), item).code == 400


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (pod(containers=[]), "spec.containers: Required value"),
        ({**POD, "spec": {}}, "spec.containers: Required value"),
        (pod(restartPolicy="Sometimes"), "spec.restartPolicy: Unsupported value"),
        (pod(containers=[{"name": "A", "image": "x"}]), 'spec.containers[0].name: Invalid value: "A": a lowercase'),
        (pod(containers=[{"name": "a"}]), "spec.containers[0].image: Required value"),
        (
            pod(containers=[{"name": "a", "image": "x"}, {"name": "a", "image": "x"}]),
            'spec.containers[1].name: Duplicate value: "a"',
        ),
        (
            pod(containers=[{"name": "a", "image": "x", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]),
            'spec.containers[0].volumeMounts[0].name: Not found: "v"',
        ),
        (
            pod(containers=[{"name": "a", "image": "x", "ports": [{"containerPort": 70000}]}]),
            "spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
        ),
        (
            pod(containers=[{"name": "a", "image": "x", "resources": {"limits": {"cpu": "many"}}}]),
            'spec.containers[0].resources.limits.cpu: Invalid value: "many": quantities must match',
        ),
        (
            pod(
                containers=[
                    {"name": "a", "image": "x", "resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}}
                ]
            ),
            'resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1500m',
        ),
        (
            pod(containers=[{"name": "a", "image": "x", "resources": {"limits": {"huawei.com/Ascend910": "1.5"}}}]),
            "must be an integer",
        ),
        (
            pod(containers=[{"name": "a", "image": "x", "env": [{"name": "A", "value": "1", "valueFrom": {}}]}]),
            'spec.containers[0].env[0].valueFrom: Invalid value: "": may not be specified when `value` is not empty',
        ),
        (pod(volumes=[{"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}]), "may not specify more than 1 volume"),
        (
            {**POD, "metadata": {"name": "Big", "namespace": "default"}},
            'metadata.name: Invalid value: "Big": a lowercase',
        ),
        (
            {**POD, "metadata": {"namespace": "default"}},
            "metadata.name: Required value: name or generateName is required",
        ),
        (
            {**POD, "metadata": {"name": "a", "namespace": "default", "labels": {"a": "b c"}}},
            'metadata.labels: Invalid value: "b c": a valid label must be',
        ),
        (
            {**POD, "metadata": {"name": "a", "namespace": "default", "labels": {"a": "b" * 64}}},
            "must be no more than 63 bytes",
        ),
        (
            pod(
                volumes=[{"name": "v"}, {"name": "w"}],
                containers=[
                    {
                        "name": "a",
                        "image": "i",
                        "volumeMounts": [{"name": "v", "mountPath": "/x"}, {"name": "w", "mountPath": "/x"}],
                    }
                ],
            ),
            'spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/x": must be unique',
        ),
        (
            {**POD, "metadata": {"name": "a", "namespace": "default", "labels": {"/a": "b"}}},
            'metadata.labels: Invalid value: "/a": prefix part must be non-empty',
        ),
    ],
)
def test_what_makes_a_pod_invalid(item: dict[str, Any], message: str) -> None:
    error = refused(kind("pods"), item)
    assert (error.code, error.reason) == (422, "Invalid")
    assert message in error.message
    assert error.message.startswith(f'Pod "{item["metadata"].get("name", "")}" is invalid: ')
    assert error.details["causes"][0]["field"]


def test_several_errors_come_together() -> None:
    error = refused(kind("pods"), pod(containers=[{"name": "a"}, {"name": "b"}]))
    assert error.message == (
        'Pod "a" is invalid: [spec.containers[0].image: Required value, spec.containers[1].image: Required value]'
    )
    assert [cause["field"] for cause in error.details["causes"]] == [
        "spec.containers[0].image",
        "spec.containers[1].image",
    ]


def test_null_means_not_given_in_builtin_kinds() -> None:
    item = pod(nodeName=None, volumes=None)
    item["metadata"]["creationTimestamp"] = None
    made = prepare_create(kind("pods"), item, field_validation="Strict").object
    assert "nodeName" not in made["spec"] and "creationTimestamp" not in made["metadata"]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"priority": 2**31 - 1}, {"priority": 2**31}),
        ({"terminationGracePeriodSeconds": 2**31}, {"terminationGracePeriodSeconds": 2**63}),
        (
            {"containers": [{"name": "a", "image": "i", "livenessProbe": {"httpGet": {"port": 1}}}]},
            {"containers": [{"name": "a", "image": "i", "livenessProbe": {"httpGet": {"port": 2**31}}}]},
        ),
    ],
)
def test_numbers_that_clients_in_go_cannot_read_are_refused(good: dict[str, Any], bad: dict[str, Any]) -> None:
    """One such pod, and no kubectl describes the node that it is on."""
    prepare_create(kind("pods"), pod(**good))
    assert "in body must be of type int" in refused(kind("pods"), pod(**bad)).message


def test_a_pod_hardly_changes() -> None:
    old = prepare_create(kind("pods"), POD).object
    new = copy.deepcopy(old)
    new["spec"]["containers"][0]["image"] = "train:2"
    made = prepare_update(kind("pods"), new, old).object
    assert made["spec"]["containers"][0]["image"] == "train:2"
    assert made["metadata"]["generation"] == 2
    for change in ({"nodeName": "n"}, {"restartPolicy": "Never"}, {"tolerations": [{"operator": "Exists"}]}):
        new = copy.deepcopy(old)
        new["spec"] |= change
        with pytest.raises(Refused, match="pod updates may not change|toleration can not be modified"):
            prepare_update(kind("pods"), new, old)


def test_status_and_spec_have_their_own_doors() -> None:
    old = prepare_create(kind("pods"), POD).object
    old["metadata"] |= {"uid": "u", "creationTimestamp": "2026-01-02T03:04:05Z"}
    new = copy.deepcopy(old)
    new["status"] = {"phase": "Running"}
    del new["metadata"]["uid"], new["metadata"]["creationTimestamp"]
    assert prepare_update(kind("pods"), new, old).object == old
    new["spec"]["nodeName"] = "elsewhere"
    made = prepare_update(kind("pods"), new, old, subresource="status").object
    assert made == {**old, "status": {"phase": "Running"}}


def test_another_uid_is_a_conflict() -> None:
    old = prepare_create(kind("pods"), POD).object
    old["metadata"]["uid"] = "one"
    new = copy.deepcopy(old)
    new["metadata"]["uid"] = "two"
    with pytest.raises(
        Refused, match="Precondition failed: UID in precondition: two, UID in object meta: one"
    ) as caught:
        prepare_update(kind("pods"), new, old)
    assert caught.value.code == 409


def test_the_wrong_kind_or_version_is_refused() -> None:
    assert "cannot be handled as a Service" in refused(kind("services"), POD).message
    error = refused(kind("pods"), {**POD, "apiVersion": "v2"})
    assert "does not match the expected API version (v1)" in error.message and error.code == 400


def service(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "s", "namespace": "default"}, "spec": {"ports": [{"port": 80}], **spec}}


def test_services() -> None:
    made = prepare_create(kind("services"), service()).object
    assert made["spec"]["ports"] == [{"port": 80, "protocol": "TCP", "targetPort": 80}]
    assert made["spec"]["type"] == "ClusterIP" and made["apiVersion"] == "v1"
    made["spec"]["clusterIP"] = "127.64.0.1"
    assert prepare_update(kind("services"), service(), made).object["spec"]["clusterIP"] == "127.64.0.1"
    with pytest.raises(Refused, match="may not change once set"):
        prepare_update(kind("services"), service(clusterIP="127.64.0.2"), made)
    assert "spec.ports: Required value" in refused(kind("services"), service(ports=[])).message
    assert prepare_create(kind("services"), service(ports=[], clusterIP="None"))
    both = refused(kind("services"), service(ports=[{"port": 80}, {"port": 81}])).message
    assert "spec.ports[0].name: Required value" in both
    assert "DNS-1035" in refused(kind("services"), {**service(), "metadata": {"name": "1s", "namespace": "d"}}).message


def test_config_maps_and_secrets() -> None:
    item = {"metadata": {"name": "c", "namespace": "d"}, "data": {"a b": "x"}}
    assert "data[a b]: Invalid value" in refused(kind("configmaps"), item).message
    item = {"metadata": {"name": "c", "namespace": "d"}, "data": {"a": "x" * 2**21}}
    assert "Too long: may not be more than 1048576 bytes" in refused(kind("configmaps"), item).message
    old = prepare_create(
        kind("configmaps"), {"metadata": {"name": "c", "namespace": "d"}, "data": {"a": "b"}, "immutable": True}
    ).object
    with pytest.raises(Refused, match="data: Forbidden: field is immutable when `immutable` is set"):
        prepare_update(kind("configmaps"), {**old, "data": {"a": "c"}}, old)
    secret = prepare_create(
        kind("secrets"), {"metadata": {"name": "s", "namespace": "d"}, "stringData": {"a": "secret"}}
    ).object
    assert secret["data"] == {"a": "c2VjcmV0"} and secret["type"] == "Opaque" and "stringData" not in secret
    changed = prepare_update(kind("secrets"), {**secret, "stringData": {"b": "x"}}, secret).object
    assert changed["data"] == {"a": "c2VjcmV0", "b": "eA=="} and "stringData" not in changed
    lines = {"metadata": {"name": "s", "namespace": "d"}, "data": {"a": "c2Vj\ncmV0\n"}}
    assert prepare_create(kind("secrets"), lines), "as `base64` writes it"
    assert "in body must be of type byte" in refused(kind("secrets"), {**lines, "data": {"a": "c2V j"}}).message
    with pytest.raises(Refused, match="type: Invalid value"):
        prepare_update(kind("secrets"), {**secret, "type": "other"}, secret)
    wrong = {"metadata": {"name": "s", "namespace": "d"}, "data": {"a": "%%%"}}
    assert "must be of type byte" in refused(kind("secrets"), wrong).message


def test_events_have_two_faces() -> None:
    core = prepare_create(
        kind("events"),
        {
            "metadata": {"name": "e", "namespace": "d"},
            "involvedObject": {"kind": "Pod", "name": "a", "namespace": "d"},
            "message": "hello",
            "count": 3,
            "source": {"component": "x"},
        },
    ).object
    new = converted(core, kind("events", "events.k8s.io"))
    assert (new["apiVersion"], new["note"], new["deprecatedCount"]) == ("events.k8s.io/v1", "hello", 3)
    assert new["regarding"]["name"] == "a"
    assert converted(new, kind("events")) == core
    other = {"metadata": {"name": "e", "namespace": "d"}, "involvedObject": {"kind": "Pod", "namespace": "x"}}
    assert "does not match event.namespace" in refused(kind("events"), other).message


def test_times_with_microseconds_have_six_digits_after_the_point() -> None:
    """Clients in Go read no others: kubectl describes no node whose Lease has been renewed at a full second."""

    def lease(when: str) -> dict[str, Any]:
        return {"metadata": {"name": "l", "namespace": "d"}, "spec": {"renewTime": when}}

    leases = kind("leases", "coordination.k8s.io")
    for given, kept in (
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000000Z"),
        ("2026-01-02T03:04:05.5+08:00", "2026-01-02T03:04:05.500000+08:00"),
        ("2026-01-02T03:04:05.123456789Z", "2026-01-02T03:04:05.123456Z"),
    ):
        assert prepare_create(leases, lease(given)).object["spec"]["renewTime"] == kept
    assert "date-time" in refused(leases, lease("2026-01-02t03:04:05z")).message


def test_finalizers_of_an_object_that_goes_away() -> None:
    old = prepare_create(kind("configmaps"), {"metadata": {"name": "c", "namespace": "d"}}).object
    old["metadata"] |= {"deletionTimestamp": "2026-01-02T03:04:05Z", "finalizers": ["a/b"]}
    new = copy.deepcopy(old)
    del new["metadata"]["finalizers"], new["metadata"]["deletionTimestamp"]
    made = prepare_update(kind("configmaps"), new, old).object
    assert "finalizers" not in made["metadata"] and made["metadata"]["deletionTimestamp"]
    new["metadata"]["finalizers"] = ["a/b", "c/d"]
    with pytest.raises(Refused, match="no new finalizers can be added"):
        prepare_update(kind("configmaps"), new, old)


def test_owners() -> None:
    item = {"metadata": {"name": "c", "namespace": "d", "ownerReferences": [{"apiVersion": "v1", "kind": "Pod"}]}}
    assert "metadata.ownerReferences[0]" in refused(kind("configmaps"), item).message
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": True}
    item["metadata"]["ownerReferences"] = [owner, {**owner, "uid": "w"}]
    assert "Only one reference can have Controller set to true" in refused(kind("configmaps"), item).message


# --- what comes over the wire -----------------------------------------------------------------------------------


def test_decoding_finds_keys_given_twice() -> None:
    found = decode(b'{"spec": {"a": 1, "b": [{"c": 1, "c": 2}], "a": 2}, "spec2": {}}')
    assert found.value["spec"]["a"] == 2
    assert found.duplicates == ["spec.a", "spec.b[0].c"]
    assert decode(b"{spec: {a: 1}}", "application/yaml").value == {"spec": {"a": 1}}, "YAML may look like JSON"
    found = decode(b"spec:\n  a: 1\n  a: 2\n  when: 2026-01-02\n  1: x\n", "application/apply-patch+yaml")
    assert found.duplicates == ["spec.a"]
    assert found.value["spec"] == {"a": 2, "when": "2026-01-02", "1": "x"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"1",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": [{"b": 1' + b"0" * 400 + b"}]}",
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_read_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        decode(body)
    assert caught.value.code == 400


def test_numbers_are_written_so_that_every_client_reads_them() -> None:
    made = decode(b'{"a": 3.0, "b": [1e3, -2.5, 1e30, 18446744073709551615], "c": "\xc3\xa9 \\ud83d\\ude00"}').value
    assert json.dumps(made["b"]) == "[1000, -2.5, 1e+30, 18446744073709551615]" and json.dumps(made["a"]) == "3"
    assert made["c"] == "é 😀"
    assert json.dumps(decode(b"a: 3.0\nb: 2.5", "application/yaml").value) == '{"a": 3, "b": 2.5}'


@pytest.mark.parametrize(
    "body",
    [
        b"a: [",
        b"a: &x 1\nb: *x",
        b"? [1, 2]\n: 3",
        b"a: !!python/object:os.system x",
        b"a: .inf",
        b"a: .nan",
        b'a: "\\ud800"',
    ],
)
def test_yaml_that_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        decode(body, "application/yaml")
    assert caught.value.code == 400
