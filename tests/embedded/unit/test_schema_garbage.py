"""Whatever is sent, the answer is an object or a refusal with a code: never an exception that nobody expects."""

from __future__ import annotations

import contextlib
import copy
import json
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evertrain.embedded.schema import (
    FieldSelector,
    LabelSelector,
    Refused,
    Registry,
    applied,
    patched,
    prepare_create,
    prepare_update,
    table,
    tracked,
)
from evertrain.embedded.schema.jsonpath import JSONPath
from tests.embedded.toys import definition

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
META = {
    "name": "x",
    "namespace": "d",
    "labels": {"a": "b"},
    "finalizers": ["a/b"],
    "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u", "controller": True}],
}
CRD = definition()
REGISTRY = Registry.builtin()
REGISTRY.add_definition(CRD)
OBJECTS: list[dict[str, Any]] = [
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": META,
        "spec": {
            "containers": [
                {
                    "name": "c",
                    "image": "i",
                    "command": ["a"],
                    "ports": [{"containerPort": 1, "name": "p"}],
                    "env": [{"name": "E", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                    "resources": {"limits": {"cpu": "1", "huawei.com/Ascend910": 1}, "requests": {"cpu": 1}},
                    "livenessProbe": {"httpGet": {"port": 1}},
                }
            ],
            "initContainers": [{"name": "i", "image": "i"}],
            "volumes": [{"name": "v", "configMap": {"name": "c"}}],
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}],
            "terminationGracePeriodSeconds": 1,
        },
        "status": {"phase": "Running", "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": True}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": META,
        "spec": {
            "ports": [{"port": 1, "name": "a", "targetPort": "x"}, {"port": 2, "name": "b"}],
            "selector": {"a": "b"},
        },
    },
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": META, "data": {"a": "b"}, "immutable": True},
    {"apiVersion": "v1", "kind": "Secret", "metadata": META, "data": {"a": "YQ=="}, "stringData": {"b": "c"}},
    {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": "a", "effect": "NoExecute"}]},
        "status": {"capacity": {"cpu": 1}, "conditions": [{"type": "Ready", "status": "True"}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": "d"},
        "involvedObject": {"kind": "Pod", "namespace": "d", "name": "p"},
        "lastTimestamp": "2026-01-02T03:04:05Z",
        "count": 1,
    },
    {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "l", "namespace": "d"},
        "spec": {"leaseDurationSeconds": 1, "renewTime": "2026-01-02T03:04:05.000000Z"},
    },
    CRD,
    {"apiVersion": "example.com/v1", "kind": "Toy", "metadata": META, "spec": {"size": 1, "items": [{"name": "a"}]}},
]
_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "A b", "1Gi", "-1", "x" * 300, "é", "\x00", "2026-01-02T03:04:05Z"]),
    st.just([]),
    st.just({}),
    st.just([None]),
    st.just([[]]),
    st.just([{}]),
    st.just({"a": None}),
    st.just({"name": 1}),
    st.just([{"name": "c"}, {"name": "c"}]),
    st.just({"$patch": "delete"}),
    st.just([{"$patch": "replace"}, 1]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            found += places(value[index], (*path, index))
    return found


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """An object, and the same with one to three places filled with junk."""
    good = draw(st.sampled_from(OBJECTS))
    bad = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(bad)))
        if path in (("kind",), ("apiVersion",)):
            continue
        value: Any = bad
        for part in path[:-1]:
            value = value[part]
        value[path[-1]] = copy.deepcopy(draw(_JUNK))
    return good, bad


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spoiled())
def test_junk_in_any_place(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    good, bad = pair
    resource = REGISTRY.of(good)
    assert resource is not None
    old = prepare_create(resource, good).object
    before = json.dumps(old)
    with contextlib.suppress(Refused):
        made = prepare_create(resource, bad).object
        json.dumps(made)
        tracked(resource, None, made, manager="m", now=NOW)
        if resource.kind == "CustomResourceDefinition":
            registry = Registry.builtin()
            registry.add_definition(made)
    for subresource in ("", "status"):
        with contextlib.suppress(Refused):
            made = prepare_update(resource, bad, old, subresource=subresource).object
            tracked(resource, old, made, manager="m", now=NOW, subresource=subresource)
    with contextlib.suppress(Refused):
        made = applied(resource, old, bad, manager="m", now=NOW, force=True)
        prepare_update(resource, made, old)
    for kind in ("merge-patch+json", "strategic-merge-patch+json", "json-patch+json"):
        with contextlib.suppress(Refused):
            made = patched(resource, old, bad, f"application/{kind}")
            prepare_update(resource, made, old)
    assert json.dumps(old) == before, "what is stored isn't touched"


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="a=!,()<> in/.-_$[]'*?@:0", max_size=12))
def test_junk_as_selector_or_path(text: str) -> None:
    pods = REGISTRY.find("", "v1", "pods")
    assert pods is not None
    with contextlib.suppress(Refused):
        LabelSelector.parse(text).matches({"a": "b"})
    with contextlib.suppress(Refused):
        FieldSelector.parse(text, pods).matches({})
    with contextlib.suppress(ValueError):
        JSONPath.parse(text).find({"a": [1, {"b": 2}]})


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item["kind"])
def test_the_objects_themselves_are_good(item: dict[str, Any]) -> None:
    resource = REGISTRY.of(item)
    assert resource is not None
    made = prepare_create(resource, item, field_validation="Strict")
    assert made.warnings == []
    assert len(table(resource, [made.object], now=NOW)["rows"]) == 1
