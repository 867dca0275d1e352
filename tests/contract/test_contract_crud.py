from __future__ import annotations

import re

from tests.kube_http import Client


def test_a_created_object_has_uid_time_and_version(client: Client, namespace: str, maps: str) -> None:
    made = client.post(maps, {"metadata": {"name": "one"}, "data": {"a": "1"}}).expect(201)
    assert (made["kind"], made["apiVersion"]) == ("ConfigMap", "v1")
    metadata = made["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("one", namespace)
    assert re.fullmatch(r"[0-9a-f-]{36}", metadata["uid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata["creationTimestamp"])
    assert int(metadata["resourceVersion"]) > 0
    assert client.get(f"{maps}/one").expect(200) == made


def test_a_name_can_be_taken_only_once(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "one"}}).expect(201)
    status = client.post(maps, {"metadata": {"name": "one"}}).expect(409, "AlreadyExists")
    assert status["message"] == 'configmaps "one" already exists'
    assert status["details"] == {"name": "one", "kind": "configmaps"}


def test_what_is_not_there_is_not_found(client: Client, maps: str) -> None:
    status = client.get(f"{maps}/none").expect(404, "NotFound")
    assert status["message"] == 'configmaps "none" not found'
    client.put(f"{maps}/none", {"metadata": {"name": "none"}}).expect(404, "NotFound")
    client.patch(f"{maps}/none", {"data": {}}).expect(404, "NotFound")
    client.delete(f"{maps}/none").expect(404, "NotFound")


def test_generate_name_makes_names_of_its_own(client: Client, maps: str) -> None:
    names = {
        client.post(maps, {"metadata": {"generateName": "made-"}}).expect(201)["metadata"]["name"] for _ in range(5)
    }
    assert len(names) == 5
    assert all(re.fullmatch(r"made-[a-z0-9]{5}", name) for name in names)


def test_generate_name_is_cut_so_that_the_name_fits(client: Client, maps: str) -> None:
    name = client.post(maps, {"metadata": {"generateName": "x" * 80}}).expect(201)["metadata"]["name"]
    assert len(name) == 63


def test_a_bad_name_is_refused_with_the_field(client: Client, maps: str) -> None:
    status = client.post(maps, {"metadata": {"name": "Not_A_Name"}}).expect(422, "Invalid")
    assert [cause["field"] for cause in status["details"]["causes"]] == ["metadata.name"]
    client.post(maps, {"data": {}}).expect(422, "Invalid")


def test_an_update_replaces_and_gets_a_new_version(client: Client, maps: str) -> None:
    made = client.post(maps, {"metadata": {"name": "one"}, "data": {"a": "1", "b": "2"}}).expect(201)
    made["data"] = {"a": "3"}
    changed = client.put(f"{maps}/one", made).expect(200)
    assert changed["data"] == {"a": "3"}
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]


def test_an_update_of_an_old_version_conflicts(client: Client, maps: str) -> None:
    old = client.post(maps, {"metadata": {"name": "one"}, "data": {"a": "1"}}).expect(201)
    client.put(f"{maps}/one", {**old, "data": {"a": "2"}}).expect(200)
    status = client.put(f"{maps}/one", {**old, "data": {"a": "3"}}).expect(409, "Conflict")
    assert "the object has been modified" in status["message"]
    assert client.get(f"{maps}/one").expect(200)["data"] == {"a": "2"}


def test_an_update_without_a_version_is_unconditional(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "one"}, "data": {"a": "1"}}).expect(201)
    changed = client.put(f"{maps}/one", {"metadata": {"name": "one"}, "data": {"a": "2"}}).expect(200)
    assert changed["data"] == {"a": "2"}


def test_an_update_that_changes_nothing_writes_nothing(client: Client, maps: str) -> None:
    made = client.post(maps, {"metadata": {"name": "one"}, "data": {"a": "1"}}).expect(201)
    same = client.put(f"{maps}/one", made).expect(200)
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_an_update_of_an_object_that_was_made_again_conflicts(client: Client, maps: str) -> None:
    old = client.post(maps, {"metadata": {"name": "one"}}).expect(201)
    client.delete(f"{maps}/one").expect(200)
    client.post(maps, {"metadata": {"name": "one"}}).expect(201)
    del old["metadata"]["resourceVersion"]
    client.put(f"{maps}/one", old).expect(409, "Conflict")


def test_body_and_url_must_agree(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "one"}}).expect(201)
    client.put(f"{maps}/one", {"metadata": {"name": "two"}}).expect(400, "BadRequest")
    client.post(maps, {"metadata": {"name": "x", "namespace": "default"}}).expect(400, "BadRequest")
    client.post(maps, {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "x"}}).expect(400, "BadRequest")
    client.post(maps, {"kind": "ConfigMap", "apiVersion": "v9", "metadata": {"name": "x"}}).expect(400, "BadRequest")


def test_identity_can_not_be_written(client: Client, maps: str) -> None:
    made = client.post(maps, {"metadata": {"name": "one", "uid": "mine", "creationTimestamp": None}}).expect(201)
    assert made["metadata"]["uid"] != "mine"
    made["metadata"]["creationTimestamp"] = "2001-01-01T00:00:00Z"
    made["data"] = {"a": "1"}
    changed = client.put(f"{maps}/one", made).expect(200)
    assert changed["metadata"]["creationTimestamp"] != "2001-01-01T00:00:00Z"


def test_a_dry_run_answers_and_stores_nothing(client: Client, maps: str) -> None:
    made = client.post(maps, {"metadata": {"name": "dry"}}, dryRun="All").expect(201)
    assert made["metadata"]["uid"]
    client.get(f"{maps}/dry").expect(404, "NotFound")
    client.post(maps, {"metadata": {"name": "wet"}, "data": {"a": "1"}}).expect(201)
    changed = client.patch(f"{maps}/wet", {"data": {"a": "2"}}, dryRun="All").expect(200)
    assert changed["data"] == {"a": "2"}
    client.delete(f"{maps}/wet", dryRun="All").expect(200)
    assert client.get(f"{maps}/wet").expect(200)["data"] == {"a": "1"}
    client.post(maps, {"metadata": {"name": "x"}}, dryRun="Some").expect(422, "Invalid")


def test_labels_must_be_labels(client: Client, maps: str) -> None:
    status = client.post(maps, {"metadata": {"name": "x", "labels": {"a": "not a value"}}}).expect(422, "Invalid")
    assert status["details"]["causes"][0]["field"].startswith("metadata.labels")


def test_objects_may_come_as_yaml(client: Client, maps: str) -> None:
    text = b"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: yaml\ndata:\n  a: '1'\n"
    made = client.request("POST", maps, text, content_type="application/yaml").expect(201)
    assert made["data"] == {"a": "1"}


def test_nothing_is_written_whose_answer_can_not_be_read(client: Client, maps: str) -> None:
    headers = {"Accept": "text/html"}
    client.request("POST", maps, {"metadata": {"name": "one"}}, headers=headers).expect(406, "NotAcceptable")
    client.get(f"{maps}/one").expect(404, "NotFound")


def test_empty_metadata_is_the_same_as_none(client: Client, maps: str) -> None:
    empty = {"labels": {}, "annotations": {}, "finalizers": [], "ownerReferences": []}
    made = client.post(maps, {"metadata": {"name": "one", **empty}}).expect(201)
    assert not empty.keys() & made["metadata"].keys()
    for answer in (
        client.patch(f"{maps}/one", {"metadata": empty}),
        client.put(f"{maps}/one", {**made, "metadata": {**made["metadata"], **empty}}),
    ):
        same = answer.expect(200)["metadata"]
        assert same["resourceVersion"] == made["metadata"]["resourceVersion"] and not empty.keys() & same.keys()
