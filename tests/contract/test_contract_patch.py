from __future__ import annotations

import pytest

from tests.kube_http import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, Client


@pytest.fixture
def one(client: Client, maps: str) -> str:
    item = {"metadata": {"name": "one", "labels": {"x": "1"}}, "data": {"a": "1", "b": "2"}}
    client.post(maps, item).expect(201)
    return f"{maps}/one"


def test_a_merge_patch_changes_adds_and_removes(client: Client, one: str) -> None:
    patched = client.patch(one, {"data": {"a": "9", "b": None, "c": "3"}}).expect(200)
    assert patched["data"] == {"a": "9", "c": "3"}
    assert patched["metadata"]["labels"] == {"x": "1"}


def test_a_json_patch_runs_its_operations_in_order(client: Client, one: str) -> None:
    operations = [
        {"op": "test", "path": "/data/a", "value": "1"},
        {"op": "add", "path": "/data/c", "value": "3"},
        {"op": "move", "from": "/data/c", "path": "/data/d"},
        {"op": "copy", "from": "/data/a", "path": "/data/e"},
        {"op": "replace", "path": "/data/a", "value": "5"},
        {"op": "remove", "path": "/data/b"},
    ]
    assert client.patch(one, operations, JSON_PATCH).expect(200)["data"] == {"a": "5", "d": "3", "e": "1"}


def test_a_json_patch_whose_test_fails_changes_nothing(client: Client, one: str) -> None:
    operations = [
        {"op": "replace", "path": "/data/a", "value": "5"},
        {"op": "test", "path": "/data/b", "value": "not this"},
    ]
    client.patch(one, operations, JSON_PATCH).expect(422, "Invalid")
    assert client.get(one).expect(200)["data"]["a"] == "1"


def test_a_json_patch_of_what_is_not_there_is_refused(client: Client, one: str) -> None:
    for operation in (
        {"op": "remove", "path": "/data/zzz"},
        {"op": "replace", "path": "/nowhere/a", "value": 1},
        {"op": "fly", "path": "/data/a"},
        {"op": "add", "path": "no-slash", "value": 1},
    ):
        assert client.patch(one, [operation], JSON_PATCH).code in (400, 422), operation
    assert client.patch(one, {"op": "add"}, JSON_PATCH).code == 400


def test_a_strategic_patch_merges_lists_by_their_key(client: Client, pods: str) -> None:
    containers = [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]
    pod = {"metadata": {"name": "p"}, "spec": {"containers": containers, "schedulerName": "nobody"}}
    client.post(pods, pod).expect(201)
    patch = {"spec": {"containers": [{"name": "b", "image": "z"}]}}
    patched = client.patch(f"{pods}/p", patch, STRATEGIC_PATCH).expect(200)
    assert [(item["name"], item["image"]) for item in patched["spec"]["containers"]] == [("a", "x"), ("b", "z")]


def test_a_strategic_patch_can_delete_from_a_list(client: Client, one: str) -> None:
    owners = [
        {"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "u1"},
        {"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "u2"},
    ]
    client.patch(one, {"metadata": {"ownerReferences": owners}}, STRATEGIC_PATCH, dryRun="All").expect(200)
    patched = client.patch(one, {"metadata": {"finalizers": ["example.com/a", "example.com/b"]}}, STRATEGIC_PATCH)
    assert patched.expect(200)["metadata"]["finalizers"] == ["example.com/a", "example.com/b"]
    removal = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/a"]}}
    patched = client.patch(one, removal, STRATEGIC_PATCH)
    assert patched.expect(200)["metadata"]["finalizers"] == ["example.com/b"]
    client.patch(one, {"metadata": {"finalizers": None}}).expect(200)


def test_a_patch_may_name_the_version_that_it_is_for(client: Client, one: str) -> None:
    version = client.get(one).expect(200)["metadata"]["resourceVersion"]
    client.patch(one, {"metadata": {"resourceVersion": version}, "data": {"a": "2"}}).expect(200)
    old = {"metadata": {"resourceVersion": version}, "data": {"a": "3"}}
    client.patch(one, old).expect(409, "Conflict")


def test_a_patch_can_not_rename(client: Client, one: str) -> None:
    assert client.patch(one, {"metadata": {"name": "two"}}).code in (400, 422)


def test_unknown_kinds_of_patches_are_refused(client: Client, one: str) -> None:
    client.patch(one, {"data": {}}, "application/json").expect(415, "UnsupportedMediaType")
    client.patch(one, {"data": {}}, "text/plain").expect(415, "UnsupportedMediaType")


def test_apply_creates_then_changes_only_what_is_new(client: Client, maps: str) -> None:
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "1"}}
    made = client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="me").expect(201)
    (entry,) = made["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("me", "Apply")
    assert "f:k" in entry["fieldsV1"]["f:data"]
    again = client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="me").expect(200)
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_apply_removes_what_its_manager_no_longer_names(client: Client, maps: str) -> None:
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "1", "l": "2"}}
    client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="me").expect(201)
    client.patch(f"{maps}/a", {"data": {"other": "3"}}, MERGE_PATCH, fieldManager="somebody").expect(200)
    item["data"] = {"k": "1"}
    changed = client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="me").expect(200)
    assert changed["data"] == {"k": "1", "other": "3"}


def test_apply_conflicts_with_other_managers_unless_forced(client: Client, maps: str) -> None:
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "1"}}
    client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="first").expect(201)
    item["data"] = {"k": "2"}
    status = client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="second").expect(409, "Conflict")
    (cause,) = status["details"]["causes"]
    assert (cause["reason"], cause["field"]) == ("FieldManagerConflict", ".data.k")
    assert 'conflict with "first"' in cause["message"]
    forced = client.patch(f"{maps}/a", item, APPLY_PATCH, fieldManager="second", force="true").expect(200)
    assert forced["data"] == {"k": "2"}
    managers = {entry["manager"] for entry in forced["metadata"]["managedFields"]}
    assert managers == {"second"}


def test_apply_needs_a_manager(client: Client, maps: str) -> None:
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    assert client.patch(f"{maps}/a", item, APPLY_PATCH).code in (400, 422)


def test_writes_are_attributed_to_their_managers(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "m"}, "data": {"a": "1"}}, fieldManager="maker").expect(201)
    changed = client.patch(f"{maps}/m", {"data": {"b": "2"}}, fieldManager="changer").expect(200)
    owned = {
        entry["manager"]: set(entry["fieldsV1"]["f:data"]) - {"."} for entry in changed["metadata"]["managedFields"]
    }
    assert owned == {"maker": {"f:a"}, "changer": {"f:b"}}
