from __future__ import annotations

import base64

import pytest

from tests.kube_http import Client

PORTS = [{"port": 80}]


@pytest.fixture
def services(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/services"


def test_each_service_gets_an_address_of_its_own(client: Client, services: str) -> None:
    made = [
        client.post(services, {"metadata": {"name": f"s{number}"}, "spec": {"ports": PORTS}}).expect(201)
        for number in range(3)
    ]
    addresses = {item["spec"]["clusterIP"] for item in made}
    assert len(addresses) == 3
    spec = made[0]["spec"]
    assert spec["clusterIPs"] == [spec["clusterIP"]]
    assert spec["type"] == "ClusterIP" and spec["sessionAffinity"] == "None"
    assert spec["ports"] == [{"port": 80, "protocol": "TCP", "targetPort": 80}]


def test_a_headless_service_has_none(client: Client, services: str) -> None:
    item = {"metadata": {"name": "s"}, "spec": {"clusterIP": "None", "ports": PORTS}}
    assert client.post(services, item).expect(201)["spec"]["clusterIPs"] == ["None"]


def test_an_address_can_be_used_once(client: Client, services: str) -> None:
    made = client.post(services, {"metadata": {"name": "s"}, "spec": {"ports": PORTS}}).expect(201)
    item = {"metadata": {"name": "t"}, "spec": {"clusterIP": made["spec"]["clusterIP"], "ports": PORTS}}
    status = client.post(services, item).expect(422, "Invalid")
    assert "provided IP is already allocated" in status["message"]
    client.delete(f"{services}/s").expect(200)
    client.post(services, item).expect(201)


@pytest.mark.since(23)  # 1.20 wants it all from the client
def test_an_address_stays_through_updates(client: Client, services: str) -> None:
    made = client.post(services, {"metadata": {"name": "s"}, "spec": {"ports": PORTS}}).expect(201)
    item = {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 81}]}}
    changed = client.put(f"{services}/s", item).expect(200)
    assert changed["spec"]["clusterIP"] == made["spec"]["clusterIP"]
    status = client.patch(f"{services}/s", {"spec": {"clusterIP": "10.0.0.99"}}).expect(422, "Invalid")
    assert "may not change once set" in status["message"]


def test_a_node_port_is_allocated(client: Client, services: str) -> None:
    item = {"metadata": {"name": "s"}, "spec": {"type": "NodePort", "ports": PORTS}}
    port = client.post(services, item).expect(201)["spec"]["ports"][0]["nodePort"]
    assert 30000 <= port <= 32767


def test_a_secret_takes_text_and_keeps_bytes(client: Client, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    item = {"metadata": {"name": "s"}, "stringData": {"a": "text"}, "data": {"b": base64.b64encode(b"x").decode()}}
    made = client.post(path, item).expect(201)
    assert made["type"] == "Opaque" and "stringData" not in made
    assert base64.b64decode(made["data"]["a"]) == b"text"
    changed = client.patch(f"{path}/s", {"stringData": {"b": "y"}}).expect(200)
    assert {key: base64.b64decode(value) for key, value in changed["data"].items()} == {"a": b"text", "b": b"y"}
    assert client.post(path, {"metadata": {"name": "t"}, "data": {"a": "not base64!"}}).code in (400, 422)


def test_the_type_of_a_secret_can_not_be_changed(client: Client, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    client.post(path, {"metadata": {"name": "s"}}).expect(201)
    client.patch(f"{path}/s", {"type": "example.com/other"}).expect(422, "Invalid")


def test_an_event_is_found_by_its_object(client: Client, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/events"
    about = {"kind": "Pod", "namespace": namespace, "name": "p", "uid": "u"}
    event = {
        "metadata": {"generateName": "p."},
        "involvedObject": about,
        "reason": "Started",
        "message": "it runs",
        "type": "Normal",
        "count": 1,
        "firstTimestamp": "2026-01-02T03:04:05Z",
        "lastTimestamp": "2026-01-02T03:04:05Z",
        "source": {"component": "test"},
    }
    client.post(path, event).expect(201)
    selector = f"involvedObject.name=p,involvedObject.namespace={namespace},involvedObject.uid=u"
    (found,) = client.get(path, fieldSelector=selector).expect(200)["items"]
    assert found["message"] == "it runs"
    assert client.get(path, fieldSelector="involvedObject.name=q").expect(200)["items"] == []


def test_a_lease_is_renewed_by_one_holder(client: Client, namespace: str) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-01-02T03:04:05.000000Z"}
    made = client.post(path, {"metadata": {"name": "l"}, "spec": spec}).expect(201)
    first, second = ({**made, "spec": {**spec, "holderIdentity": name}} for name in ("b", "c"))
    client.put(f"{path}/l", first).expect(200)
    client.put(f"{path}/l", second).expect(409, "Conflict")
    assert client.get(f"{path}/l").expect(200)["spec"]["holderIdentity"] == "b"
