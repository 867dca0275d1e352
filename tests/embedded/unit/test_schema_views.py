"""What clients ask to see: tables, selectors, discovery, OpenAPI."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.embedded.schema import (
    FieldSelector,
    LabelSelector,
    Refused,
    Registry,
    Resource,
    aggregated_discovery,
    group_document,
    group_list,
    legacy_versions,
    openapi_v2,
    openapi_v2_protobuf,
    openapi_v3,
    openapi_v3_index,
    resource_list,
    table,
)
from evertrain.embedded.schema.ages import duration
from evertrain.embedded.schema.jsonpath import JSONPath
from tests.embedded.toys import definition

REGISTRY = Registry.builtin()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def kind(plural: str, group: str = "") -> Resource:
    found = REGISTRY.find(group, "v1", plural)
    assert found is not None
    return found


def ago(**span: float) -> str:
    return (NOW - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def cells(resource: Resource, item: dict[str, Any]) -> dict[str, Any]:
    made = table(resource, [item], now=NOW)
    names = [column["name"] for column in made["columnDefinitions"]]
    return dict(zip(names, made["rows"][0]["cells"], strict=True))


# --- tables -----------------------------------------------------------------------------------------------------


def test_a_running_pod() -> None:
    shown = cells(
        kind("pods"),
        {
            "metadata": {"name": "a", "creationTimestamp": ago(minutes=5)},
            "spec": {"containers": [{"name": "x"}, {"name": "y"}], "nodeName": "node-0"},
            "status": {
                "phase": "Running",
                "podIP": "127.64.0.3",
                "containerStatuses": [
                    {
                        "ready": True,
                        "restartCount": 2,
                        "state": {"running": {}},
                        "lastState": {"terminated": {"finishedAt": ago(seconds=90)}},
                    },
                    {"ready": False, "restartCount": 0, "state": {"running": {}}},
                ],
            },
        },
    )
    assert shown == {
        "Name": "a",
        "Ready": "1/2",
        "Status": "Running",
        "Restarts": "2 (90s ago)",
        "Age": "5m",
        "IP": "127.64.0.3",
        "Node": "node-0",
        "Nominated Node": "<none>",
        "Readiness Gates": "<none>",
    }


@pytest.mark.parametrize(
    ("status", "metadata", "word"),
    [
        ({"phase": "Pending"}, {}, "Pending"),
        (
            {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"reason": "Completed"}}}]},
            {},
            "Completed",
        ),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 3}}}]}, {}, "ExitCode:3"),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"signal": 9}}}]}, {}, "Signal:9"),
        ({"phase": "Failed", "reason": "NodeLost"}, {}, "NodeLost"),
        (
            {"phase": "Running", "containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            {},
            "CrashLoopBackOff",
        ),
        ({"phase": "Running"}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "Terminating"),
        ({"phase": "Running", "reason": "NodeLost"}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "Unknown"),
        ({"phase": "Pending", "initContainerStatuses": [{"state": {"running": {}}}]}, {}, "Init:0/1"),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [{"state": {"terminated": {"reason": "Error", "exitCode": 1}}}],
            },
            {},
            "Init:Error",
        ),
    ],
)
def test_the_word_for_a_pods_state(status: dict[str, Any], metadata: dict[str, Any], word: str) -> None:
    item = {"metadata": metadata, "spec": {"containers": [{}], "initContainers": [{}]}, "status": status}
    assert cells(kind("pods"), item)["Status"] == word


def test_nodes_services_and_events() -> None:
    node = cells(
        kind("nodes"),
        {
            "metadata": {"name": "n", "labels": {"node-role.kubernetes.io/worker": ""}},
            "spec": {"unschedulable": True},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.2"}],
                "nodeInfo": {"kubeletVersion": "v1", "osImage": "Linux"},
            },
        },
    )
    assert node["Status"] == "Ready,SchedulingDisabled" and node["Roles"] == "worker"
    assert (
        node["Internal-IP"] == "127.0.0.2" and node["External-IP"] == "<none>" and node["Kernel-Version"] == "<unknown>"
    )
    service = cells(
        kind("services"),
        {
            "metadata": {"name": "s"},
            "spec": {
                "clusterIP": "127.64.0.1",
                "ports": [{"port": 80}, {"port": 53, "protocol": "UDP"}],
                "selector": {"a": "b"},
            },
        },
    )
    assert (
        service["Port(s)"] == "80/TCP,53/UDP" and service["Selector"] == "a=b" and service["Cluster-IP"] == "127.64.0.1"
    )
    event = cells(
        kind("events"),
        {
            "metadata": {"name": "e"},
            "involvedObject": {"kind": "Pod", "name": "p"},
            "reason": "Scheduled",
            "type": "Normal",
            "message": "well\n",
            "firstTimestamp": ago(hours=1),
            "lastTimestamp": ago(seconds=3),
            "count": 4,
            "source": {"component": "volcano", "host": "h"},
        },
    )
    assert event == {
        "Last Seen": "3s",
        "Type": "Normal",
        "Reason": "Scheduled",
        "Object": "pod/p",
        "Subobject": "",
        "Source": "volcano, h",
        "Message": "well",
        "First Seen": "60m",
        "Count": 4,
        "Name": "e",
    }


def test_every_kind_shows_as_many_cells_as_columns() -> None:
    for resource in REGISTRY.all():
        made = table(resource, [{"metadata": {"name": "x"}}], now=NOW)
        assert len(made["rows"][0]["cells"]) == len(made["columnDefinitions"]) > 1, resource


def toys() -> tuple[Registry, Resource]:
    registry = Registry.builtin()
    return registry, registry.add_definition(definition())[0]


def test_the_columns_of_a_custom_resource() -> None:
    _, resource = toys()
    item = {
        "apiVersion": "example.com/v1",
        "kind": "Toy",
        "metadata": {"name": "t", "creationTimestamp": ago(days=3)},
        "spec": {"size": 3},
        "status": {"conditions": [{"type": "Created"}, {"type": "Running"}]},
    }
    assert cells(resource, item) == {"Name": "t", "State": "Running", "Size": 3, "All": "Created,Running", "Age": "3d"}
    empty = cells(resource, {"metadata": {"name": "t"}, "spec": {"size": "x"}})
    assert empty == {"Name": "t", "State": None, "Size": None, "All": None, "Age": None}
    assert table(resource, [item], now=NOW, include="Object")["rows"][0]["object"] == item
    assert table(resource, [item], now=NOW)["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    assert "object" not in table(resource, [item], now=NOW, include="None")["rows"][0]


def test_ages() -> None:
    shown = {
        0: "0s",
        59: "59s",
        119: "119s",
        120: "2m",
        130: "2m10s",
        600: "10m",
        3600 * 2: "120m",
        3600 * 3: "3h",
        3600 * 5 + 60: "5h1m",
        3600 * 47: "47h",
        3600 * 50: "2d2h",
        3600 * 24 * 9: "9d",
        3600 * 24 * 400: "400d",
        3600 * 24 * 365 * 3: "3y",
        3600 * 24 * 365 * 9: "9y",
        -1: "0s",
        -5: "<invalid>",
    }
    assert {seconds: duration(seconds) for seconds in shown} == shown


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (".a.b", [1]),
        ("{.a.b}", [1]),
        ("a.b", [1]),
        ("$.a.b", [1]),
        (".l[0].x", [1]),
        (".l[-1].x", [3]),
        (".l[-1:].x", [3]),
        (".l[:2].x", [1, 2]),
        (".l[0:3:2].x", [1, 3]),
        (".l[*].x", [1, 2, 3]),
        (".l[7].x", []),
        (".l[?(@.x==2)].y", ["two"]),
        ('.l[?(@.y=="two")].x', [2]),
        (".l[?(@.x>1)].x", [2, 3]),
        (".l[?(@.y)].x", [2]),
        (".d['k.e/y']", ["v"]),
        (r".d.k\.e/y", ["v"]),
        ("..x", [1, 2, 3]),
        (".none.at.all", []),
    ],
)
def test_json_paths(path: str, found: list[Any]) -> None:
    item = {"a": {"b": 1}, "l": [{"x": 1}, {"x": 2, "y": "two"}, {"x": 3}], "d": {"k.e/y": "v"}}
    assert JSONPath.parse(path).find(item) == found


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".a[",
        ".a[x]",
        ".a[?(x)]",
        ".a..",
        ".a[0:1:0]",
        ".a b",
        "{}",
        ".a[?(@" + r"\a" * 100 + " x)]",  # must not take longer than the universe lasts
        ".a[?(@==" + " " * 900 + "]",
        "." + "a" * 1000,
    ],
)
def test_paths_that_are_none(path: str) -> None:
    if path in (".a..",):
        assert JSONPath.parse(path)
    else:
        with pytest.raises(ValueError):
            JSONPath.parse(path)


# --- selectors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels", "matches"),
    [
        ("", {}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        ("a!=b", {}, True),
        ("a in (b, c)", {"a": "c"}, True),
        ("a in (b,)", {"a": ""}, True),
        ("a notin (b,c)", {"a": "c"}, False),
        ("a notin (b,c)", {}, True),
        ("a", {"a": ""}, True),
        ("!a", {"a": ""}, False),
        ("! a", {}, True),
        ("a=", {"a": ""}, True),
        ("a=,b=c", {"a": "", "b": "c"}, True),
        ("n>3", {"n": "4"}, True),
        ("n<3", {"n": "x"}, False),
        ("huawei.com/x=y,in=notin", {"huawei.com/x": "y", "in": "notin"}, True),
        ("a in (b),c,!d", {"a": "b", "c": "1"}, True),
    ],
)
def test_label_selectors(text: str, labels: dict[str, str], matches: bool) -> None:
    assert LabelSelector.parse(text).matches(labels) is matches


@pytest.mark.parametrize(
    "text",
    ["a=b,", "=b", "a in", "a in (b", "a in b", "a b", "a=b c", "/x=1", "a=b=c", "n>x", "a=$", "a in (b,$)", ","],
)
def test_label_selectors_that_are_none(text: str) -> None:
    with pytest.raises(Refused) as caught:
        LabelSelector.parse(text)
    assert caught.value.code == 400


_LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "x", "y"]), max_size=3)


@given(
    _LABELS,
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["=", "!=", "in", "notin", "", "!"]),
            st.sampled_from(["", "x", "y"]),
        ),
        max_size=4,
    ),
)
def test_a_selector_is_the_conjunction_of_its_terms(labels: dict[str, str], terms: list[tuple[str, str, str]]) -> None:
    texts, wanted = [], True
    for key, operator, value in terms:
        have = labels.get(key)
        texts.append(
            {
                "=": f"{key}={value}",
                "!=": f"{key} != {value}",
                "in": f"{key} in ({value},z)",
                "notin": f"{key} notin ({value},z)",
                "": key,
                "!": f"!{key}",
            }[operator]
        )
        wanted &= {
            "=": have == value,
            "in": have == value,
            "!=": have != value,
            "notin": have != value,
            "": have is not None,
            "!": have is None,
        }[operator]
    assert LabelSelector.parse(",".join(texts)).matches(labels) is wanted


def test_selectors_inside_objects() -> None:
    selector = LabelSelector.of(
        {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "NotIn", "values": ["d"]}]}
    )
    assert selector.matches({"a": "b"}) and not selector.matches({"a": "b", "c": "d"}) and not selector.matches({})


def test_field_selectors() -> None:
    pods = kind("pods")
    item = {"metadata": {"name": "a", "namespace": "d"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}
    for text, matches in (
        ("metadata.name=a", True),
        ("metadata.name==b", False),
        ("spec.nodeName=n,status.phase!=Succeeded", True),
        ("status.phase!=Running", False),
        ("spec.nodeName=", False),
        ("spec.hostNetwork=false", True),
        ("", True),
    ):
        assert FieldSelector.parse(text, pods).matches(item) is matches, text
    assert FieldSelector.parse("metadata.name=a", pods).required("metadata.name") == "a"
    for text in ("spec.image=x", "nonsense", "spec.replicas>3"):
        with pytest.raises(Refused) as caught:
            FieldSelector.parse(text, pods)
        assert caught.value.code == 400
    event = {"involvedObject": {"name": "x", "kind": "Pod"}, "source": {"component": "c"}, "metadata": {}}
    assert FieldSelector.parse("involvedObject.name=x,involvedObject.kind=Pod,source=c", kind("events")).matches(event)


# --- discovery and OpenAPI --------------------------------------------------------------------------------------


def test_discovery() -> None:
    registry, _ = toys()
    assert legacy_versions(registry)["versions"] == ["v1"]
    groups = {group["name"]: group["preferredVersion"]["groupVersion"] for group in group_list(registry)["groups"]}
    assert groups["example.com"] == "example.com/v1" and groups["coordination.k8s.io"] == "coordination.k8s.io/v1"
    assert group_document(registry, "example.com") is not None and group_document(registry, "nope") is None
    listed = resource_list(registry, "example.com", "v1")
    assert listed is not None
    assert [(entry["name"], entry["kind"]) for entry in listed["resources"]] == [
        ("toys", "Toy"),
        ("toys/status", "Toy"),
    ]
    assert listed["resources"][0]["shortNames"] == ["ty"] and listed["resources"][0]["singularName"] == "toy"
    assert resource_list(registry, "example.com", "v2") is None
    core = aggregated_discovery(registry, legacy=True)
    assert [item["metadata"].get("name") for item in core["items"]] == [None]
    pods = next(entry for entry in core["items"][0]["versions"][0]["resources"] if entry["resource"] == "pods")
    assert {sub["subresource"] for sub in pods["subresources"]} >= {"status", "log", "binding", "eviction"}
    others = aggregated_discovery(registry, legacy=False, version="v2beta1")
    assert others["apiVersion"] == "apidiscovery.k8s.io/v2beta1" and len(others["items"]) == len(groups)


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


def test_openapi_documents_point_nowhere_outside_themselves() -> None:
    registry, _ = toys()
    index = openapi_v3_index(registry)["paths"]
    assert "api/v1" in index and index["apis/example.com/v1"]["serverRelativeURL"].startswith(
        "/openapi/v3/apis/example.com/v1?hash="
    )
    for path in index:
        document = openapi_v3(registry, path)
        assert document is not None
        known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
        assert references(document) <= known
    v2 = openapi_v2(registry)
    assert references(v2) <= {f"#/definitions/{name}" for name in v2["definitions"]}
    assert openapi_v3(registry, "apis/nope/v1") is None


def test_openapi_tells_kubectl_how_to_validate_and_patch() -> None:
    registry, _ = toys()
    core, custom = openapi_v3(registry, "api/v1"), openapi_v3(registry, "apis/example.com/v1")
    assert core is not None and custom is not None
    patch = core["paths"]["/api/v1/namespaces/{namespace}/pods/{name}"]["patch"]
    assert patch["x-kubernetes-group-version-kind"] == {"group": "", "version": "v1", "kind": "Pod"}
    assert {"fieldValidation", "dryRun"} <= {parameter["name"] for parameter in patch["parameters"]}
    assert "application/strategic-merge-patch+json" in patch["requestBody"]["content"]
    patch = custom["paths"]["/apis/example.com/v1/namespaces/{namespace}/toys/{name}"]["patch"]
    assert "application/strategic-merge-patch+json" not in patch["requestBody"]["content"]
    spec = core["components"]["schemas"]["io.k8s.api.core.v1.PodSpec"]["properties"]
    assert spec["containers"]["x-kubernetes-patch-merge-key"] == "name"
    assert spec["volumes"]["x-kubernetes-patch-strategy"] == "merge,retainKeys"
    assert core["components"]["schemas"]["io.k8s.apimachinery.pkg.api.resource.Quantity"]["oneOf"]
    toy = custom["components"]["schemas"]["com.example.v1.Toy"]
    assert toy["x-kubernetes-group-version-kind"] == [{"group": "example.com", "version": "v1", "kind": "Toy"}]
    assert toy["properties"]["spec"]["properties"]["size"]["description"] == "How big it is."


def test_the_index_changes_with_the_kinds() -> None:
    registry, _ = toys()
    before = openapi_v3_index(registry)["paths"]
    changed = definition()
    changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = "Another toy."
    registry.add_definition(changed)
    after = openapi_v3_index(registry)["paths"]
    assert before["api/v1"] == after["api/v1"] and before["apis/example.com/v1"] != after["apis/example.com/v1"]


def fields(data: bytes) -> list[tuple[int, Any]]:
    """A protobuf message, read without its definition."""
    found: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
        elif key & 7 == 1:
            found.append((key >> 3, data[at : at + 8]))
            at += 8
        else:
            assert key & 7 == 2
            size = varint()
            found.append((key >> 3, data[at : at + size]))
            at += size
    return found


def test_openapi_v2_in_protobuf() -> None:
    registry, _ = toys()
    document = dict(fields(openapi_v2_protobuf(registry)))
    assert document[1] == b"2.0"
    definitions = {dict(fields(entry))[1].decode(): dict(fields(entry))[2] for _, entry in fields(document[9])}
    assert set(definitions) == set(openapi_v2(registry)["definitions"])
    toy = fields(definitions["com.example.v1.Toy"])
    assert (4, b"Something to play with.") in toy
    extensions = {
        dict(fields(value))[1]: dict(fields(dict(fields(value))[2]))[2] for number, value in toy if number == 31
    }
    assert json.loads(extensions[b"x-kubernetes-group-version-kind"]) == [
        {"group": "example.com", "version": "v1", "kind": "Toy"}
    ]
    paths = {dict(fields(entry))[1].decode() for number, entry in fields(document[8]) if number == 2}
    assert "/apis/example.com/v1/namespaces/{namespace}/toys/{name}" in paths
