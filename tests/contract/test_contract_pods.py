from __future__ import annotations

import pytest

from tests.kube_http import Client, Object

SPEC: Object = {"containers": [{"name": "c", "image": "i"}], "schedulerName": "nobody"}


@pytest.fixture
def pod(client: Client, pods: str) -> str:
    client.post(pods, {"metadata": {"name": "p"}, "spec": SPEC}).expect(201)
    return f"{pods}/p"


def test_a_pod_has_the_defaults_that_nodes_rely_on(client: Client, pod: str) -> None:
    found = client.get(pod).expect(200)
    spec = found["spec"]
    assert spec["restartPolicy"] == "Always"
    assert spec["terminationGracePeriodSeconds"] == 30
    assert spec["dnsPolicy"] == "ClusterFirst"
    assert spec["containers"][0]["imagePullPolicy"] == "Always"
    assert spec["containers"][0]["terminationMessagePath"] == "/dev/termination-log"
    assert found["status"]["phase"] == "Pending"
    assert found["status"]["qosClass"] == "BestEffort"
    tolerated = {item["key"]: item["tolerationSeconds"] for item in spec["tolerations"]}
    assert tolerated["node.kubernetes.io/unreachable"] == 300


def test_a_pod_without_containers_is_invalid(client: Client, pods: str) -> None:
    status = client.post(pods, {"metadata": {"name": "x"}, "spec": {"containers": []}}).expect(422, "Invalid")
    assert "spec.containers" in [cause["field"] for cause in status["details"]["causes"]]
    assert status["message"].startswith('Pod "x" is invalid: ')


def test_the_status_of_a_new_pod_is_not_the_users(client: Client, pods: str) -> None:
    item = {"metadata": {"name": "x"}, "spec": SPEC, "status": {"phase": "Running"}}
    assert client.post(pods, item).expect(201)["status"]["phase"] == "Pending"


def test_binding_puts_a_pod_on_a_node_once(client: Client, pod: str) -> None:
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p"},
        "target": {"kind": "Node", "name": "n"},
    }
    client.post(f"{pod}/binding", binding).expect(201)
    found = client.get(pod).expect(200)
    assert found["spec"]["nodeName"] == "n"
    conditions = {item["type"]: item["status"] for item in found["status"]["conditions"]}
    assert conditions["PodScheduled"] == "True"
    status = client.post(f"{pod}/binding", binding).expect(409, "Conflict")
    assert 'already assigned to node "n"' in status["message"]
    client.delete(pod, gracePeriodSeconds="0").expect(200)


@pytest.mark.stricter
def test_binding_needs_a_target(client: Client, pod: str) -> None:
    assert client.post(f"{pod}/binding", {"metadata": {"name": "p"}, "target": {}}).code in (400, 422)


def test_binding_needs_a_pod(client: Client, pod: str) -> None:
    missing = pod.replace("/p", "/q")
    answer = client.post(f"{missing}/binding", {"metadata": {"name": "q"}, "target": {"name": "n"}})
    assert answer.code == 404


def test_the_status_is_written_by_its_own_path(client: Client, pod: str) -> None:
    changed = client.patch(f"{pod}/status", {"status": {"phase": "Running", "podIP": "127.64.0.9"}}).expect(200)
    assert changed["status"]["podIP"] == "127.64.0.9"
    changed["status"]["message"] = "by put"
    changed["metadata"]["labels"] = {"a": "b"}
    changed["spec"]["restartPolicy"] = "Never"
    written = client.put(f"{pod}/status", changed).expect(200)
    assert written["status"]["message"] == "by put"
    assert written["spec"]["restartPolicy"] == "Always"
    client.patch(pod, {"status": {"phase": "Failed"}, "metadata": {"labels": {"x": "y"}}}).expect(200)
    found = client.get(f"{pod}/status").expect(200)
    assert found["status"]["phase"] == "Running"
    assert found["metadata"]["labels"]["x"] == "y"


def test_what_a_pod_runs_can_not_be_changed(client: Client, pod: str) -> None:
    status = client.patch(pod, {"spec": {"restartPolicy": "Never"}}).expect(422, "Invalid")
    assert "pod updates may not change fields other than" in status["message"]
    patch = {"spec": {"containers": [{"name": "c", "image": "other"}]}}
    changed = client.request("PATCH", pod, patch, content_type="application/strategic-merge-patch+json").expect(200)
    assert changed["spec"]["containers"][0]["image"] == "other"


@pytest.mark.since(22)
def test_eviction_deletes(client: Client, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
    client.post(f"{pod}/eviction", eviction).expect(201)
    client.get(pod).expect(404, "NotFound")
    client.post(f"{pod}/eviction", eviction).expect(404, "NotFound")


def test_logs_of_what_does_not_run_are_explained(client: Client, pods: str, pod: str) -> None:
    client.get(f"{pods}/none/log").expect(404, "NotFound")
    status = client.get(f"{pod}/log", container="other").expect(400, "BadRequest")
    assert "container other is not valid for pod p" in status["message"]
    two = {**SPEC, "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]}
    client.post(pods, {"metadata": {"name": "two"}, "spec": two}).expect(201)
    status = client.get(f"{pods}/two/log").expect(400, "BadRequest")
    assert "a container name must be specified for pod two, choose one of: [a b]" in status["message"]
    assert client.get(f"{pod}/log", tailLines="-3").code in (400, 422)


def test_unknown_subresources_are_not_found(client: Client, pod: str) -> None:
    client.get(f"{pod}/teapot").expect(404, "NotFound")


def test_a_quantity_must_be_one(client: Client, pods: str) -> None:
    container = {"name": "c", "image": "i", "resources": {"limits": {"cpu": "many"}}}
    answer = client.post(pods, {"metadata": {"name": "x"}, "spec": {"containers": [container]}})
    assert answer.code in (400, 422)
    container["resources"] = {"limits": {"huawei.com/Ascend910": "8", "cpu": "500m"}}
    made = client.post(pods, {"metadata": {"name": "x"}, "spec": {**SPEC, "containers": [container]}}).expect(201)
    assert made["spec"]["containers"][0]["resources"]["requests"]["huawei.com/Ascend910"] == "8"
