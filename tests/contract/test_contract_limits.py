"""Bad input of every kind: a clear answer, and the server lives."""

from __future__ import annotations

import http.client
import random
import socket
import ssl
from urllib.parse import urlsplit

import pytest

from tests.kube_http import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, Client


def lives(client: Client) -> None:
    assert client.get("/readyz").body == b"ok"
    client.get("/api/v1/namespaces/default").expect(200)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        pytest.param(b"null", marks=pytest.mark.stricter),
        b"5",
        b'"text"',
        b"[1, 2]",
        b"\xff\xfe\x00",
        b'{"metadata": {"name": "x"}',
        b'{"metadata": {"name": "x"}} more',
        b'{"metadata": {"name": NaN}}',
        b"key: [unclosed",
    ],
)
def test_what_is_no_object_is_a_bad_request(client: Client, maps: str, body: bytes) -> None:
    client.request("POST", maps, body).expect(400, "BadRequest")
    lives(client)


@pytest.mark.parametrize(
    "item",
    [
        {"metadata": []},
        {"metadata": "x"},
        {"metadata": {"name": 5}},
        {"metadata": {"name": {"a": 1}}},
        {"metadata": {"name": "x", "labels": []}},
        {"metadata": {"name": "x", "labels": {"a": 5}}},
        {"metadata": {"name": "x", "annotations": {"a": {}}}},
        {"metadata": {"name": "x", "finalizers": "a"}},
        {"metadata": {"name": "x", "ownerReferences": [5]}},
        {"metadata": {"name": "x", "ownerReferences": {}}},
        {"metadata": {"name": "x"}, "data": []},
        {"metadata": {"name": "x"}, "data": {"a": 5}},
        {"metadata": {"name": "x"}, "data": {"a/b": "c"}},
        {"metadata": {"name": "x"}, "kind": 7},
        {"metadata": {"name": "x"}, "apiVersion": ["v1"]},
        {"metadata": {"name": "x", "generateName": 5}},
        {"metadata": {"name": "x", "resourceVersion": 5}},
        {"metadata": {"name": "x" * 300}},
        {"metadata": {"name": "../../etc/passwd"}},
        {"metadata": {"name": "x", "annotations": {"a": "y" * (300 << 10)}}},
        {"metadata": {"name": "x"}, "data": {"a": "y" * (1 << 20) + "z"}},
    ],
)
def test_wrong_types_are_told_with_a_4xx(client: Client, maps: str, item: object) -> None:
    answer = client.post(maps, item)
    assert answer.code in (400, 422), answer.body[:500]
    assert answer.json["kind"] == "Status" and answer.json["message"]
    lives(client)


def test_a_body_of_4_mib_is_too_large(client: Client, maps: str) -> None:
    item = {"metadata": {"name": "x"}, "data": {"a": "y" * (4 << 20)}}
    status = client.post(maps, item).expect(413, "RequestEntityTooLarge")
    assert "limit is 3145728" in status["message"]
    lives(client)


@pytest.mark.parametrize("depth", [500, 100_000])
@pytest.mark.parametrize("opening", ["object", "list"])
def test_an_object_nested_without_end_is_refused(client: Client, maps: str, depth: int, opening: str) -> None:
    before, after = (b'{"a":', b"}") if opening == "object" else (b"[", b"]")
    body = b'{"metadata":{"name":"x"},"data":' + before * depth + b"1" + after * depth + b"}"
    answer = client.request("POST", maps, body)
    assert 400 <= answer.code < 500, answer.body[:500]
    for media in (APPLY_PATCH, MERGE_PATCH, JSON_PATCH, STRATEGIC_PATCH):
        answer = client.request("PATCH", f"{maps}/x", body, content_type=media, fieldManager="m")
        assert 400 <= answer.code < 500, (media, answer.body[:500])
    lives(client)


def test_yaml_that_unfolds_without_end_is_refused(client: Client, maps: str) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    body = "\n".join(["kind: ConfigMap", "metadata: {name: x}", *lines]).encode()
    answer = client.request("POST", maps, body, content_type="application/yaml")
    assert 400 <= answer.code < 500
    lives(client)


def test_an_unknown_media_type_is_refused(client: Client, maps: str) -> None:
    client.request("POST", maps, b"<xml/>", content_type="application/xml").expect(415, "UnsupportedMediaType")
    answer = client.request("POST", maps, b"k8s\x00\x0a\xff\xff", content_type="application/vnd.kubernetes.protobuf")
    assert 400 <= answer.code < 500


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "many"},
        pytest.param({"limit": "-1"}, marks=pytest.mark.stricter),
        {"watch": "true", "timeoutSeconds": "soon"},
        pytest.param({"watch": "true", "resourceVersion": "x"}, marks=pytest.mark.stricter),
        {"labelSelector": "a" * 5000 + "("},
        pytest.param({"fieldSelector": "=,=,="}, marks=pytest.mark.stricter),
        {"continue": "%00%ff"},
        pytest.param({"resourceVersion": "-5"}, marks=pytest.mark.stricter),
    ],
)
def test_bad_queries_are_told_with_a_4xx(client: Client, maps: str, query: dict[str, str]) -> None:
    answer = client.get(maps, **query)
    assert answer.code in (400, 422), answer.body[:500]
    lives(client)


@pytest.mark.stricter
def test_random_bodies_never_break_the_server(client: Client, maps: str, pods: str) -> None:
    chance = random.Random(7)
    values: list[object] = [None, 0, -1, 1.5, True, "", "x", [], {}, [[]], {"a": None}, [None], "9" * 50, 10**30]

    def anything(depth: int) -> object:
        if depth == 0 or chance.random() < 0.3:
            return chance.choice(values)
        if chance.random() < 0.5:
            return [anything(depth - 1) for _ in range(chance.randrange(3))]
        keys = ["metadata", "spec", "status", "name", "labels", "containers", "data", "ports", "$patch", "a", ""]
        return {chance.choice(keys): anything(depth - 1) for _ in range(chance.randrange(4))}

    client.post(pods, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}).expect(201)
    for _ in range(60):
        item = {"metadata": {"name": "x"}, "spec": anything(4), "data": anything(2), "status": anything(3)}
        answers = [
            client.post(pods, item, dryRun="All"),
            client.post(maps, anything(4), dryRun="All"),
            client.put(f"{pods}/p/status", item, dryRun="All"),
            client.patch(f"{pods}/p", anything(4), STRATEGIC_PATCH, dryRun="All"),
            client.patch(f"{pods}/p", anything(4), MERGE_PATCH, dryRun="All"),
            client.patch(f"{pods}/p", [anything(2)], JSON_PATCH, dryRun="All"),
            client.patch(f"{pods}/p", {"spec": anything(4)}, APPLY_PATCH, dryRun="All", fieldManager="m"),
            client.delete(f"{pods}/q", anything(3)),
        ]
        for answer in answers:
            assert answer.code < 500, (item, answer.body[:1000])
    lives(client)


def test_garbage_instead_of_http_hurts_nobody(client: Client, server: tuple[str, str, str | None]) -> None:
    parts = urlsplit(server[0])
    chance = random.Random(3)
    for encrypted in (False, True):
        for _ in range(5):
            with socket.create_connection((parts.hostname or "", parts.port or 443), timeout=10) as connection:
                wire: socket.socket = connection
                if encrypted and server[2]:
                    wire = ssl.create_default_context(cafile=server[2]).wrap_socket(
                        connection, server_hostname=parts.hostname
                    )
                wire.sendall(chance.randbytes(2000) + b"\r\n\r\n")
                wire.close()
    lives(client)


def test_a_client_that_leaves_in_the_middle_hurts_nobody(client: Client, server: tuple[str, str, str | None]) -> None:
    url, token, authority = server
    parts = urlsplit(url)
    for _ in range(3):
        connection = http.client.HTTPSConnection(
            parts.netloc, context=ssl.create_default_context(cafile=authority), timeout=10
        )
        connection.putrequest("POST", "/api/v1/namespaces/default/configmaps")
        connection.putheader("Authorization", f"Bearer {token}")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        connection.send(b'{"metadata":')
        connection.close()
    with client.watch("/api/v1/configmaps"):
        pass
    lives(client)
