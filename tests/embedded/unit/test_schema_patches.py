"""JSON, merge and strategic merge patches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.embedded.schema import Refused, Registry, Resource, patched
from evertrain.embedded.schema.patches import (
    APPLY_PATCH,
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    json_patch,
    merge_patch,
)
from evertrain.embedded.schema.strategic import strategic_merge
from tests.embedded.toys import definition

REGISTRY = Registry.builtin()


def kind(plural: str) -> Resource:
    found = REGISTRY.find("", "v1", plural)
    assert found is not None
    return found


PODS = kind("pods")


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "spec": {"containers": list(containers), **spec}}


def merge(old: dict[str, Any], patch: dict[str, Any], resource: Resource = PODS) -> dict[str, Any]:
    before = copy.deepcopy(old)
    made = patched(resource, old, patch, STRATEGIC_MERGE_PATCH)
    assert old == before
    return made


def test_lists_merge_by_their_key() -> None:
    old = pod({"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b", "image": "2"})
    made = merge(
        old,
        {"spec": {"containers": [{"name": "b", "image": "3"}, {"name": "a", "env": [{"name": "Y", "value": "2"}]}]}},
    )
    assert made["spec"]["containers"] == [
        {"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]},
        {"name": "b", "image": "3"},
    ]


def test_new_items_come_last_and_atomic_lists_are_replaced() -> None:
    made = merge(
        pod({"name": "a", "command": ["x", "y"]}),
        {"spec": {"containers": [{"name": "c", "image": None}, {"name": "a", "command": ["z"]}]}},
    )
    assert made["spec"]["containers"] == [{"name": "a", "command": ["z"]}, {"name": "c"}]


def test_directives() -> None:
    old = pod({"name": "a"}, {"name": "b"}, nodeSelector={"x": "1", "y": "2"})
    made = merge(old, {"spec": {"containers": [{"name": "a", "$patch": "delete"}]}})
    assert made["spec"]["containers"] == [{"name": "b"}]
    made = merge(old, {"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}})
    assert made["spec"]["containers"] == [{"name": "z"}]
    made = merge(old, {"spec": {"nodeSelector": {"$patch": "replace", "z": "3"}}})
    assert made["spec"]["nodeSelector"] == {"z": "3"}
    made = merge(old, {"spec": {"nodeSelector": {"x": None}}})
    assert made["spec"]["nodeSelector"] == {"y": "2"}
    made = merge(old, {"spec": {"nodeSelector": {"$patch": "delete"}}})
    assert "nodeSelector" not in made["spec"]
    with pytest.raises(Refused):
        merge(old, {"spec": {"$patch": "explode"}})


def test_order_of_elements() -> None:
    old = pod({"name": "a"}, {"name": "server"}, {"name": "b"})
    order = [{"name": "c"}, {"name": "b"}, {"name": "a"}]
    made = merge(old, {"spec": {"$setElementOrder/containers": order, "containers": [{"name": "c"}]}})
    names = [container["name"] for container in made["spec"]["containers"]]
    assert [name for name in names if name != "server"] == ["c", "b", "a"]
    assert sorted(names) == ["a", "b", "c", "server"]
    made = merge(old, {"spec": {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}})
    assert [c["name"] for c in made["spec"]["containers"] if c["name"] != "server"] == ["b", "a"]


def test_values_out_of_a_list_of_texts() -> None:
    old = {"metadata": {"finalizers": ["a/1", "a/2", "a/3"]}}
    made = merge(
        old,
        {
            "metadata": {
                "$deleteFromPrimitiveList/finalizers": ["a/2"],
                "$setElementOrder/finalizers": ["a/4", "a/1", "a/3"],
                "finalizers": ["a/4"],
            }
        },
    )
    assert made["metadata"]["finalizers"] == ["a/4", "a/1", "a/3"]


def test_a_volume_changes_its_kind() -> None:
    old = pod(volumes=[{"name": "v", "emptyDir": {}}])
    patch = {"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}]}}
    assert merge(old, patch)["spec"]["volumes"] == [{"name": "v", "hostPath": {"path": "/x"}}]


def test_items_without_their_key_are_refused() -> None:
    with pytest.raises(Refused, match="does not contain declared merge key: name"):
        merge(pod({"name": "a"}), {"spec": {"containers": [{"image": "x"}]}})


_TEXT = st.sampled_from("abcd")
_CONTAINER = st.fixed_dictionaries(
    {"name": _TEXT}, optional={"image": _TEXT, "command": st.lists(_TEXT, max_size=2), "workingDir": _TEXT}
)
_PODS = st.builds(
    lambda containers, selector: {"spec": {"containers": containers, "nodeSelector": selector}},
    st.lists(_CONTAINER, max_size=4, unique_by=lambda container: container["name"]),
    st.dictionaries(_TEXT, _TEXT, max_size=3),
)


@given(_PODS, _PODS)
def test_a_patch_made_of_an_object_puts_all_of_it_in(old: dict[str, Any], new: dict[str, Any]) -> None:
    made = strategic_merge(PODS, old, new)
    containers = {container["name"]: container for container in made["spec"]["containers"]}
    assert len(containers) == len(made["spec"]["containers"])
    for container in new["spec"]["containers"]:
        assert container.items() <= containers[container["name"]].items()
    assert set(containers) == {c["name"] for c in (*old["spec"]["containers"], *new["spec"]["containers"])}
    assert made["spec"]["nodeSelector"] == {**old["spec"]["nodeSelector"], **new["spec"]["nodeSelector"]}
    assert strategic_merge(PODS, made, new) == made


# --- merge patch and JSON patch ---------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=10,
)


def _difference(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch = {key: None for key in old if key not in new}
    patch |= {
        key: _difference(old.get(key), value) for key, value in new.items() if key not in old or old[key] != value
    }
    return patch


def _no_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _no_nulls(item) for key, item in value.items() if item is not None}
    return value


@given(_JSON, _JSON)
def test_a_merge_patch_leads_from_one_value_to_another(old: Any, new: Any) -> None:
    old, new = _no_nulls(old), _no_nulls(new)
    if isinstance(new, dict):
        assert merge_patch(old, _difference(old, new)) == new


def test_merge_patch_follows_the_standard() -> None:
    for target, patch, wanted in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ):
        assert merge_patch(target, patch) == wanted


@given(st.dictionaries(_TEXT, _JSON, max_size=3), _TEXT, _JSON)
def test_a_json_patch_adds_tests_and_removes(old: dict[str, Any], key: str, value: Any) -> None:
    operations: list[dict[str, Any]] = [
        {"op": "add", "path": f"/{key}", "value": value},
        {"op": "test", "path": f"/{key}", "value": value},
        {"op": "copy", "from": f"/{key}", "path": "/copy"},
        {"op": "move", "from": "/copy", "path": "/moved"},
        {"op": "test", "path": "/moved", "value": value},
        {"op": "remove", "path": f"/{key}"},
    ]
    made = json_patch(old, operations)
    assert made == {**{k: v for k, v in old.items() if k != key}, "moved": value}


def test_json_patch_in_lists_and_with_odd_keys() -> None:
    old = {"a": [1, 2, 3], "b/c": {"~": 1}}
    made = json_patch(
        old,
        [
            {"op": "add", "path": "/a/-", "value": 4},
            {"op": "add", "path": "/a/0", "value": 0},
            {"op": "replace", "path": "/a/1", "value": "one"},
            {"op": "remove", "path": "/a/2"},
            {"op": "replace", "path": "/b~1c/~0", "value": 2},
        ],
    )
    assert made == {"a": [0, "one", 3, 4], "b/c": {"~": 2}}
    assert old == {"a": [1, 2, 3], "b/c": {"~": 1}}


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/x"},
        {"op": "replace", "path": "/x", "value": 1},
        {"op": "add", "path": "/x/y", "value": 1},
        {"op": "add", "path": "/l/7", "value": 1},
        {"op": "remove", "path": "/l/x"},
        {"op": "remove", "path": "/l/--1"},
        {"op": "remove", "path": "/l/²"},
        {"op": "remove", "path": "/l/٠"},
        {"op": "remove", "path": "/l/00"},
        {"op": "remove", "path": "/l/9999999999999999999999"},
        {"op": "copy", "path": "/m"},
        {"op": "copy", "from": "/x", "path": "/m"},
        {"op": "test", "path": "/l/0", "value": True},
        {"op": "move", "from": "/l", "path": "/l/0"},
        {"op": "add", "path": "l", "value": 1},
        {"op": "add", "path": "/l"},
        {"op": "dance", "path": "/l"},
        {},
    ],
)
def test_json_patches_that_cannot_be_done(operation: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        json_patch({"l": [1]}, [operation])
    assert caught.value.code == 422


def test_patches_make_no_monsters() -> None:
    old = {"metadata": {"name": "a"}, "data": {"x": "y" * 1000}}
    bomb = [{"op": "copy", "from": "/data", "path": f"/data/{number}"} for number in range(40)]
    with pytest.raises(Refused, match="the copies are larger") as caught:
        patched(PODS, old, bomb, JSON_PATCH)
    assert caught.value.code == 422
    assert patched(PODS, old, bomb[:3], JSON_PATCH)["data"]["2"]["1"]["0"] == old["data"]
    deep: Any = 1
    for _ in range(150):
        deep = {"a": deep}
    there = patched(PODS, old, {"data": deep}, MERGE_PATCH)
    with pytest.raises(Refused, match="nested more than 200 levels") as caught:
        patched(PODS, there, [{"op": "add", "path": "/data" + "/a" * 100, "value": deep}], JSON_PATCH)
    assert caught.value.code == 400
    large = "x" * (2 << 20)
    there = patched(PODS, old, {"data": {"one": large}}, MERGE_PATCH)
    for patch, content_type in (
        ({"data": {"two": large}}, MERGE_PATCH),
        ({"data": {"two": large}}, STRATEGIC_MERGE_PATCH),
        ([{"op": "add", "path": "/data/two", "value": large}], JSON_PATCH),
    ):
        with pytest.raises(Refused, match="Request entity too large") as caught:
            patched(PODS, there, patch, content_type)
        assert caught.value.code == 413


def test_bodies_that_are_no_patch() -> None:
    for patch, content_type, code in (
        ({}, JSON_PATCH, 400),
        ([1], JSON_PATCH, 400),
        ([{"op": "test", "path": "/metadata/name", "value": "a"}] * 10_001, JSON_PATCH, 413),
        ([], MERGE_PATCH, 400),
        ({}, "text/plain", 415),
        ({}, APPLY_PATCH, 415),
        ([{"op": "replace", "path": "", "value": 1}], JSON_PATCH, 422),
    ):
        with pytest.raises(Refused) as caught:
            patched(PODS, {"metadata": {"name": "a"}}, patch, content_type)
        assert caught.value.code == code


def test_custom_resources_know_no_strategic_merge() -> None:
    registry = Registry.builtin()
    registry.add_definition(definition())
    toys = registry.find("example.com", "v1", "toys")
    assert toys is not None
    with pytest.raises(Refused, match="unknown format") as caught:
        patched(toys, {}, {}, STRATEGIC_MERGE_PATCH)
    assert caught.value.code == 415
    assert patched(toys, {"a": 1}, {"b": 2}, MERGE_PATCH + "; charset=utf-8") == {"a": 1, "b": 2}
