from __future__ import annotations

from typing import Any

import pytest

from tests.kube_http import Answer, Client, Object

POD: Object = {"containers": [{"name": "c", "image": "i"}], "schedulerName": "nobody"}


def make(client: Client, maps: str, name: str, **metadata: Any) -> Object:
    made: Object = client.post(maps, {"metadata": {"name": name, **metadata}}).expect(201)
    return made


def owned_by(owner: Object, **more: Any) -> list[Object]:
    metadata = owner["metadata"]
    return [{"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"], **more}]


def test_a_deleted_object_is_gone_at_once(client: Client, maps: str) -> None:
    made = make(client, maps, "a")
    status = client.delete(f"{maps}/a").expect(200)
    assert (status["kind"], status["status"]) == ("Status", "Success")
    assert status["details"]["uid"] == made["metadata"]["uid"]
    client.get(f"{maps}/a").expect(404, "NotFound")


def test_a_finalizer_holds_an_object_until_it_is_removed(client: Client, maps: str) -> None:
    make(client, maps, "a", finalizers=["example.com/hold"])
    marked = client.delete(f"{maps}/a").expect(200)
    assert marked["metadata"]["deletionTimestamp"] and marked["metadata"]["deletionGracePeriodSeconds"] == 0
    held = client.get(f"{maps}/a").expect(200)
    assert held["metadata"]["finalizers"] == ["example.com/hold"]
    again = client.delete(f"{maps}/a").expect(200)
    assert again["metadata"]["deletionTimestamp"] == marked["metadata"]["deletionTimestamp"]
    client.patch(f"{maps}/a", {"metadata": {"finalizers": None}}).expect(200)
    client.get(f"{maps}/a").expect(404, "NotFound")


def test_no_finalizer_can_be_added_to_what_is_being_deleted(client: Client, maps: str) -> None:
    make(client, maps, "a", finalizers=["example.com/hold"])
    client.delete(f"{maps}/a").expect(200)
    more = {"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}}
    assert client.patch(f"{maps}/a", more).code in (403, 422)
    client.patch(f"{maps}/a", {"metadata": {"finalizers": None}}).expect(200)


def test_deletion_can_not_be_taken_back(client: Client, maps: str) -> None:
    make(client, maps, "a", finalizers=["example.com/hold"])
    client.delete(f"{maps}/a").expect(200)
    client.patch(f"{maps}/a", {"metadata": {"deletionTimestamp": None}, "data": {"k": "1"}}).expect(200)
    assert client.get(f"{maps}/a").expect(200)["metadata"]["deletionTimestamp"]
    client.patch(f"{maps}/a", {"metadata": {"finalizers": None}}).expect(200)


def test_preconditions_protect_a_namesake(client: Client, maps: str) -> None:
    made = make(client, maps, "a")
    other = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    client.delete(f"{maps}/a", other).expect(409, "Conflict")
    client.delete(f"{maps}/a", {"preconditions": {"resourceVersion": "1"}}).expect(409, "Conflict")
    client.get(f"{maps}/a").expect(200)
    client.delete(f"{maps}/a", {"preconditions": {"uid": made["metadata"]["uid"]}}).expect(200)


def test_a_pod_on_a_node_has_its_grace_period(client: Client, pods: str) -> None:
    spec = {**POD, "terminationGracePeriodSeconds": 17}
    client.post(pods, {"metadata": {"name": "p"}, "spec": spec}).expect(201)
    client.post(f"{pods}/p/binding", {"metadata": {"name": "p"}, "target": {"name": "nowhere"}}).expect(201)
    marked = client.delete(f"{pods}/p").expect(200)
    assert marked["kind"] == "Pod"
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 17
    shorter = client.delete(f"{pods}/p", {"gracePeriodSeconds": 5}).expect(200)
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 5
    longer = client.delete(f"{pods}/p", {"gracePeriodSeconds": 60}).expect(200)
    assert longer["metadata"]["deletionGracePeriodSeconds"] == 5
    client.delete(f"{pods}/p", gracePeriodSeconds="0").expect(200)
    client.get(f"{pods}/p").expect(404, "NotFound")


@pytest.mark.since(22)
def test_an_eviction_deletes_with_its_own_options(client: Client, pods: str) -> None:
    made = client.post(pods, {"metadata": {"name": "p"}, "spec": {**POD, "terminationGracePeriodSeconds": 17}}).expect(
        201
    )
    client.post(f"{pods}/p/binding", {"metadata": {"name": "p"}, "target": {"name": "nowhere"}}).expect(201)

    def evict(**options: Any) -> Answer:
        about = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
        return client.post(f"{pods}/p/eviction", {**about, "deleteOptions": options})

    evict(preconditions={"uid": "00000000-0000-0000-0000-000000000000"}).expect(409, "Conflict")
    evict(gracePeriodSeconds=3, preconditions={"uid": made["metadata"]["uid"]}).expect(201)
    assert client.get(f"{pods}/p").expect(200)["metadata"]["deletionGracePeriodSeconds"] == 3
    client.delete(f"{pods}/p", gracePeriodSeconds="0").expect(200)


def test_a_pod_that_runs_nowhere_goes_at_once(client: Client, pods: str) -> None:
    client.post(pods, {"metadata": {"name": "p"}, "spec": POD}).expect(201)
    client.delete(f"{pods}/p").expect(200)
    client.get(f"{pods}/p").expect(404, "NotFound")


def test_a_pod_that_has_ended_goes_at_once(client: Client, pods: str) -> None:
    client.post(pods, {"metadata": {"name": "p"}, "spec": POD}).expect(201)
    client.post(f"{pods}/p/binding", {"metadata": {"name": "p"}, "target": {"name": "nowhere"}}).expect(201)
    client.patch(f"{pods}/p/status", {"status": {"phase": "Succeeded"}}).expect(200)
    client.delete(f"{pods}/p").expect(200)
    client.get(f"{pods}/p").expect(404, "NotFound")


def test_dependents_go_with_their_owner(client: Client, maps: str) -> None:
    owner = make(client, maps, "owner")
    make(client, maps, "child", ownerReferences=owned_by(owner))
    client.delete(f"{maps}/owner", {"propagationPolicy": "Background"}).expect(200)
    client.until_gone(f"{maps}/child")


def test_dependents_of_an_owner_that_is_not_there_go_too(client: Client, maps: str) -> None:
    owner = make(client, maps, "owner")
    client.delete(f"{maps}/owner").expect(200)
    make(client, maps, "late", ownerReferences=owned_by(owner))
    client.until_gone(f"{maps}/late")


def test_a_dependent_with_another_owner_stays(client: Client, maps: str) -> None:
    first, second = make(client, maps, "first"), make(client, maps, "second")
    make(client, maps, "child", ownerReferences=owned_by(first) + owned_by(second))
    make(client, maps, "only", ownerReferences=owned_by(first))
    client.delete(f"{maps}/first").expect(200)
    client.until_gone(f"{maps}/only")
    # The two were looked at in this order or the other; either way the child loses only the reference.
    for _ in range(100):
        child = client.get(f"{maps}/child").expect(200)
        if len(child["metadata"]["ownerReferences"]) == 1:
            break
    assert [reference["name"] for reference in child["metadata"]["ownerReferences"]] == ["second"]


def test_foreground_waits_for_those_that_block(client: Client, maps: str) -> None:
    owner = make(client, maps, "owner")
    held = owned_by(owner, blockOwnerDeletion=True)
    make(client, maps, "child", ownerReferences=held, finalizers=["example.com/hold"])
    marked = client.delete(f"{maps}/owner", {"propagationPolicy": "Foreground"}).expect(200)
    assert "foregroundDeletion" in marked["metadata"]["finalizers"]
    with client.watch(maps, fieldSelector="metadata.name=child") as events:
        for event in events:
            if event["object"]["metadata"].get("deletionTimestamp"):
                break
    client.get(f"{maps}/owner").expect(200)
    client.patch(f"{maps}/child", {"metadata": {"finalizers": None}}).expect(200)
    client.until_gone(f"{maps}/owner")
    client.get(f"{maps}/child").expect(404, "NotFound")


def test_foreground_waits_for_nobody_else(client: Client, maps: str) -> None:
    owner = make(client, maps, "owner")
    make(client, maps, "child", ownerReferences=owned_by(owner), finalizers=["example.com/hold"])
    client.delete(f"{maps}/owner", {"propagationPolicy": "Foreground"}).expect(200)
    client.until_gone(f"{maps}/owner")
    client.get(f"{maps}/child").expect(200)
    client.patch(f"{maps}/child", {"metadata": {"finalizers": None}}).expect(200)
    client.until_gone(f"{maps}/child")


def test_orphans_are_released(client: Client, maps: str) -> None:
    owner = make(client, maps, "owner")
    make(client, maps, "child", ownerReferences=owned_by(owner))
    client.delete(f"{maps}/owner", {"propagationPolicy": "Orphan"}).expect(200)
    client.until_gone(f"{maps}/owner")
    assert "ownerReferences" not in client.get(f"{maps}/child").expect(200)["metadata"]


def test_a_policy_that_nobody_knows_is_refused(client: Client, maps: str) -> None:
    make(client, maps, "a")
    assert client.delete(f"{maps}/a", {"propagationPolicy": "Sideways"}).code in (400, 422)
    client.get(f"{maps}/a").expect(200)


def test_a_collection_can_be_deleted_by_labels(client: Client, maps: str) -> None:
    for name in ("a", "b", "c"):
        make(client, maps, name, labels={"kill": "yes" if name != "b" else "no"})
    client.delete(maps, labelSelector="kill=yes").expect(200)
    left = [item["metadata"]["name"] for item in client.get(maps, labelSelector="kill").expect(200)["items"]]
    assert left == ["b"]


@pytest.mark.since(35)
@pytest.mark.parametrize("body", [b"[]", b'{"gracePeriodSeconds": "soon"}', b"{", b'{"preconditions": 5}'])
def test_bad_options_delete_nothing(client: Client, maps: str, body: bytes) -> None:
    make(client, maps, "a")
    client.delete(f"{maps}/a", body).expect(400, "BadRequest")
    client.get(f"{maps}/a").expect(200)


def test_a_collection_is_deleted_in_one_namespace_only(client: Client, maps: str) -> None:
    make(client, maps, "a", labels={"kill": "everywhere"})
    client.delete("/api/v1/configmaps", labelSelector="kill=everywhere").expect(405, "MethodNotAllowed")
    client.get(f"{maps}/a").expect(200)
