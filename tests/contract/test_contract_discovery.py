from __future__ import annotations

import pytest

from tests.kube_http import Client


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz"])
def test_health_is_told_in_one_word(client: Client, path: str) -> None:
    answer = client.get(path)
    assert (answer.code, answer.body) == (200, b"ok")


def test_the_version_is_one_that_clients_can_compare(client: Client) -> None:
    version = client.get("/version").expect(200)
    assert version["major"] == "1" and version["minor"].rstrip("+").isdigit()
    assert version["gitVersion"].startswith("v1.")


@pytest.mark.since(27)
def test_the_version_is_one_that_current_clients_accept(minor: int) -> None:
    assert minor >= 27


def test_a_request_without_or_with_a_wrong_token_is_refused(server: tuple[str, str, str | None]) -> None:
    url, token, authority = server
    stranger = Client(url, "not-the-token", authority)
    for path in ("/api/v1/namespaces", "/api/v1/namespaces/default", "/api", "/openapi/v2", "/nothing"):
        stranger.get(path).expect(401, "Unauthorized")
        for header in ("", "Bearer", "Bearer ", f"Basic {token}", token):
            answer = stranger.request("GET", path, headers={"Authorization": header})
            # Some servers let strangers in as anonymous, who may do nothing.
            assert answer.code in (401, 403), (path, header)
    stranger.close()


def test_core_resources_are_listed_with_verbs_and_short_names(client: Client) -> None:
    resources = {item["name"]: item for item in client.get("/api/v1").expect(200)["resources"]}
    assert resources["pods"]["kind"] == "Pod" and resources["pods"]["namespaced"] is True
    assert resources["pods"]["shortNames"] == ["po"]
    assert {"create", "delete", "get", "list", "patch", "update", "watch"} <= set(resources["pods"]["verbs"])
    assert resources["namespaces"]["namespaced"] is False
    assert {"pods/status", "pods/log", "pods/binding", "pods/eviction"} <= set(resources)
    assert resources["pods/eviction"]["group"] == "policy"


def test_groups_name_their_preferred_version(client: Client) -> None:
    assert client.get("/api").expect(200)["versions"] == ["v1"]
    groups = {group["name"]: group for group in client.get("/apis").expect(200)["groups"]}
    assert groups["coordination.k8s.io"]["preferredVersion"]["groupVersion"] == "coordination.k8s.io/v1"
    single = client.get("/apis/apiextensions.k8s.io").expect(200)
    assert single["kind"] == "APIGroup" and single["versions"][0]["version"] == "v1"
    names = [item["name"] for item in client.get("/apis/apiextensions.k8s.io/v1").expect(200)["resources"]]
    assert "customresourcedefinitions" in names


@pytest.mark.since(30)
def test_aggregated_discovery_has_everything_in_one_answer(client: Client) -> None:
    wanted = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    headers = {"Accept": f"{wanted},application/json"}
    answer = client.request("GET", "/apis", headers=headers)
    assert answer.headers["content-type"] == wanted
    found = answer.expect(200)
    assert (found["kind"], found["apiVersion"]) == ("APIGroupDiscoveryList", "apidiscovery.k8s.io/v2")
    groups = {item["metadata"]["name"]: item for item in found["items"]}
    (leases,) = [
        resource
        for resource in groups["coordination.k8s.io"]["versions"][0]["resources"]
        if resource["resource"] == "leases"
    ]
    assert leases["responseKind"]["kind"] == "Lease" and leases["scope"] == "Namespaced"
    core = client.request("GET", "/api", headers=headers).expect(200)
    resources = {resource["resource"]: resource for resource in core["items"][0]["versions"][0]["resources"]}
    assert "log" in [item["subresource"] for item in resources["pods"]["subresources"]]


@pytest.mark.since(24)
def test_openapi_v3_has_a_document_for_each_group_version(client: Client) -> None:
    paths = client.get("/openapi/v3").expect(200)["paths"]
    assert {"api/v1", "apis/coordination.k8s.io/v1"} <= set(paths)
    document = client.get("/openapi/v3/api/v1").expect(200)
    assert document["openapi"].startswith("3.")
    pod = document["components"]["schemas"]["io.k8s.api.core.v1.Pod"]
    assert pod["x-kubernetes-group-version-kind"] == [{"group": "", "kind": "Pod", "version": "v1"}]
    assert "spec" in pod["properties"]


def test_unknown_paths_are_not_found(client: Client) -> None:
    for path in (
        "/api/v1/teapots",
        "/api/v1/namespaces/default/teapots/x",
        "/apis/nowhere.example.com/v1",
        "/api/v2",
        "/apis/a/b/c/d/e/f/g/h",
    ):
        answer = client.get(path)
        assert answer.code == 404, path


def test_methods_that_make_no_sense_are_not_allowed(client: Client, maps: str) -> None:
    client.put(maps, {}).expect(405, "MethodNotAllowed")
    client.post("/api/v1/configmaps", {"metadata": {"name": "x"}}).expect(405, "MethodNotAllowed")


def test_the_administrator_may_do_everything(client: Client) -> None:
    question = {
        "kind": "SelfSubjectAccessReview",
        "apiVersion": "authorization.k8s.io/v1",
        "spec": {"resourceAttributes": {"verb": "create", "resource": "pods", "namespace": "default"}},
    }
    answer = client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", question).expect(201)
    assert answer["status"]["allowed"] is True
