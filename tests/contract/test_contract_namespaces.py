from __future__ import annotations

import secrets

import pytest

from tests.kube_http import Client


def test_a_namespace_is_active(client: Client, namespace: str) -> None:
    found = client.get(f"/api/v1/namespaces/{namespace}").expect(200)
    assert found["status"]["phase"] == "Active"
    assert found["spec"]["finalizers"] == ["kubernetes"]


@pytest.mark.since(21)
def test_a_namespace_is_labelled_with_its_name(client: Client, namespace: str) -> None:
    found = client.get(f"/api/v1/namespaces/{namespace}").expect(200)
    assert found["metadata"]["labels"]["kubernetes.io/metadata.name"] == namespace


def test_the_usual_namespaces_are_there(client: Client) -> None:
    names = {item["metadata"]["name"] for item in client.get("/api/v1/namespaces").expect(200)["items"]}
    assert {"default", "kube-system", "kube-public", "kube-node-lease"} <= names


def test_nothing_can_be_created_in_a_namespace_that_is_not_there(client: Client) -> None:
    path = "/api/v1/namespaces/not-there/configmaps"
    status = client.post(path, {"metadata": {"name": "a"}}).expect(404, "NotFound")
    assert status["message"] == 'namespaces "not-there" not found'
    assert client.get(path).expect(200)["items"] == []


def test_a_namespace_takes_its_objects_along(client: Client) -> None:
    name = f"contract-{secrets.token_hex(4)}"
    path = f"/api/v1/namespaces/{name}"
    client.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    client.post(f"{path}/configmaps", {"metadata": {"name": "held", "finalizers": ["example.com/hold"]}}).expect(201)
    client.post(f"{path}/secrets", {"metadata": {"name": "s"}}).expect(201)
    terminating = client.delete(path).expect(200)
    assert terminating["metadata"]["deletionTimestamp"]
    assert client.get(path).expect(200)["status"]["phase"] == "Terminating"
    client.until_gone(f"{path}/secrets/s")
    status = client.post(f"{path}/configmaps", {"metadata": {"name": "late"}}).expect(403, "Forbidden")
    assert "because it is being terminated" in status["message"]
    assert status["details"]["causes"][0]["reason"] == "NamespaceTerminating"
    client.patch(f"{path}/configmaps/held", {"metadata": {"finalizers": None}}).expect(200)
    client.until_gone(path)
    client.get(f"{path}/configmaps/held").expect(404, "NotFound")


def test_objects_of_other_namespaces_stay(client: Client, maps: str) -> None:
    name = f"contract-{secrets.token_hex(4)}"
    client.post(maps, {"metadata": {"name": "mine"}}).expect(201)
    client.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    client.post(f"/api/v1/namespaces/{name}/configmaps", {"metadata": {"name": "mine"}}).expect(201)
    client.delete(f"/api/v1/namespaces/{name}").expect(200)
    client.until_gone(f"/api/v1/namespaces/{name}")
    client.get(f"{maps}/mine").expect(200)


@pytest.mark.parametrize("name", ["default", "kube-system", "kube-public"])
def test_namespaces_that_everybody_counts_on_stay(client: Client, name: str) -> None:
    status = client.delete(f"/api/v1/namespaces/{name}").expect(403, "Forbidden")
    assert status["message"] == f'namespaces "{name}" is forbidden: this namespace may not be deleted'
