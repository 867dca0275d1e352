"""The requests of the API without HTTP, and the port for the parts inside the process."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from evertrain import aio
from evertrain.embedded.api import watching
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.deletion import DeleteOptions, marked
from evertrain.embedded.api.listing import ListOptions
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.api.paths import Path, parse
from evertrain.embedded.api.protobuf import NotReadable, read_protobuf
from evertrain.embedded.api.services import allocate
from evertrain.embedded.api.status import Expired
from evertrain.embedded.schema import Refused, Registry, Resource
from evertrain.embedded.store import Store
from evertrain.kube.port import CONFIG_MAP, NAMESPACE, POD, AlreadyExists, ApiError, Conflict, Gone, NotFound

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def make_api(**options: Any) -> Api:
    api = Api(Store(**options), Registry.builtin(), now=lambda: NOW)
    bootstrap(api)
    return api


def resource(api: Api, plural: str) -> Resource:
    found = api.registry.find("", "v1", plural)
    assert found is not None
    return found


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default"}, "data": data}


def pod(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/v1/pods", Path("", "v1", "pods")),
        ("/api/v1/namespaces/ns/pods/p/log", Path("", "v1", "pods", "ns", "p", "log")),
        ("/api/v1/namespaces/ns", Path("", "v1", "namespaces", None, "ns")),
        ("/api/v1/namespaces/ns/status", Path("", "v1", "namespaces", None, "ns", "status")),
        ("/api/v1/namespaces/ns/finalize", Path("", "v1", "namespaces", None, "ns", "finalize")),
        ("/apis/g/v1/namespaces/ns/things", Path("g", "v1", "things", "ns")),
        ("/apis/g/v1/things/t", Path("g", "v1", "things", None, "t")),
        ("/apis/g", None),
        ("/api/v1//pods", None),
        ("/api/v1/namespaces/ns/pods/p/log/more", None),
        ("/api/v1/nodes/n/proxy/stats/summary", Path("", "v1", "nodes", None, "n", "proxy", "stats/summary")),
        ("/other", None),
    ],
)
def test_paths_are_read(path: str, expected: Path | None) -> None:
    assert parse(path) == expected


def test_a_service_address_is_free_again_after_its_service() -> None:
    first: dict[str, Any] = {"spec": {}}
    second: dict[str, Any] = {"spec": {}}
    assert allocate(first, []) == [] and allocate(second, [first]) == []
    assert (first["spec"]["clusterIP"], second["spec"]["clusterIP"]) == ("127.96.0.1", "127.96.0.2")
    third: dict[str, Any] = {"spec": {}}
    allocate(third, [second])
    assert third["spec"]["clusterIP"] == "127.96.0.1"
    outside: dict[str, Any] = {"spec": {"clusterIP": "10.0.0.1"}}
    (error,) = allocate(outside, [])
    assert "not in the valid range" in error.message


def test_a_deletion_may_be_hastened_but_not_delayed() -> None:
    api = make_api()
    item = api.create(resource(api, "pods"), "default", pod("p")).object
    item["spec"]["nodeName"] = "n"
    first = marked(resource(api, "pods"), item, DeleteOptions(grace=20), NOW)
    assert first is not None and first["metadata"]["deletionTimestamp"] == "2026-01-02T03:04:25Z"
    later = NOW + timedelta(seconds=4)
    shorter = marked(resource(api, "pods"), first, DeleteOptions(grace=10), later)
    assert shorter is not None and shorter["metadata"]["deletionTimestamp"] == "2026-01-02T03:04:15Z"
    assert marked(resource(api, "pods"), shorter, DeleteOptions(grace=0), later) is None


def test_continue_tokens_of_a_forgotten_moment_offer_another() -> None:
    api = make_api(history_changes=5)
    maps = resource(api, "configmaps")
    for number in range(4):
        api.create(maps, "default", config_map(f"m{number}"))
    first = api.page(maps, "default", ListOptions(limit=2))
    for number in range(10):
        api.patch(maps, "default", "m3", {"data": {"n": str(number)}}, "application/merge-patch+json")
    with pytest.raises(Expired) as caught:
        api.page(maps, "default", ListOptions(limit=2, token=first.token))
    token = caught.value.status()["metadata"]["continue"]
    rest = api.page(maps, "default", ListOptions(limit=2, token=token))
    assert [record.name for record in rest.records] == ["m2", "m3"]


def test_definitions_are_served_again_after_a_restart() -> None:
    api = make_api()
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"kind": "Thing", "plural": "things"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
            ],
        },
    }
    definitions = api.registry.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    assert definitions is not None
    api.create(definitions, "", crd)
    again = Api(api.store, Registry.builtin())
    assert again.registry.find("example.com", "v1", "things") is not None


def test_a_slow_watcher_is_ended_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_PENDING", 3)

    async def scenario() -> list[Any]:
        api = make_api()
        watch = api.watch(resource(api, "configmaps"), None, version=str(api.store.version))
        for number in range(5):
            api.create(resource(api, "configmaps"), "default", config_map(f"m{number}"))
        return [batch async for batch in watch.batches()]

    assert aio.run(scenario()) == []


def test_a_long_list_at_the_beginning_makes_no_watcher_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_PENDING", 3)

    async def scenario() -> int:
        api = make_api()
        maps = resource(api, "configmaps")
        for number in range(10):
            api.create(maps, "default", config_map(f"m{number}"))
        watch = api.watch(maps, None)
        api.create(maps, "default", config_map("more"))
        return len(await anext(watch.batches()))

    assert aio.run(scenario()) == 11


def test_what_waits_for_a_slow_watcher_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_PENDING_BYTES", 100_000)

    async def scenario() -> tuple[int, list[Any]]:
        api = make_api()
        maps = resource(api, "configmaps")
        api.create(maps, "default", config_map("m", text="x" * 200_000))
        watch = api.watch(maps, None)  # what is there at the beginning may be any size
        for number in range(9):
            api.patch(maps, "default", "m", {"data": {"text": str(number) * 10_000}}, "application/merge-patch+json")
        fitting = len(await anext(watch.batches()))
        slow = api.watch(maps, None, version=str(api.store.version))
        for number in range(11):
            api.patch(maps, "default", "m", {"data": {"text": str(number) * 10_000}}, "application/merge-patch+json")
        return fitting, [batch async for batch in slow.batches()]

    assert aio.run(scenario()) == (10, [])


def test_a_watch_of_a_version_that_never_was_begins_anew() -> None:
    api = make_api()
    with pytest.raises(Expired, match="too large resource version"):
        api.watch(resource(api, "configmaps"), None, version=str(api.store.version + 1))


def test_a_long_list_of_changes_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PIECE_BYTES", 25_000)

    async def scenario() -> list[int]:
        api = make_api()
        maps = resource(api, "configmaps")
        watch = api.watch(maps, None, version=str(api.store.version), bookmarks=True)
        versions: list[int] = []
        for number in range(7):
            api.create(maps, "default", config_map(f"m{number}", text="x" * 10_000))
            versions.append(api.store.version)
        batches = [[event.record.version for event in batch] async for batch in watch.batches(0)]
        assert [version for batch in batches for version in batch] == [*versions, versions[-1]]  # and a bookmark
        return [len(batch) for batch in batches]

    assert aio.run(scenario()) == [3, 3, 2]


def test_a_watch_that_fails_takes_nobody_with_it() -> None:
    async def scenario() -> None:
        api = make_api()
        maps = resource(api, "configmaps")
        version = str(api.store.version)
        broken, sound = (api.watch(maps, None, labels="a", version=version) for _ in range(2))
        broken._matches = lambda item: bool(1 / 0)
        api.create(maps, "default", {"metadata": {"name": "m", "namespace": "default", "labels": {"a": "b"}}})
        assert [batch async for batch in broken.batches()] == []
        assert len(await anext(sound.batches())) == 1

    aio.run(scenario())


def test_a_watcher_whom_nothing_concerns_gets_bookmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BOOKMARK_CHANGES", 10)

    async def scenario() -> tuple[str, int]:
        api = make_api()
        maps = resource(api, "configmaps")
        watch = api.watch(maps, None, labels="mine", version=str(api.store.version), bookmarks=True)
        for number in range(10):
            api.create(maps, "default", config_map(f"m{number}"))
        async for events in watch.batches():
            watch.close()
            return events[-1].type, events[-1].record.version - api.store.version
        raise AssertionError("the watch ended")

    assert aio.run(scenario()) == ("BOOKMARK", 0)


def test_the_port_speaks_as_over_http() -> None:
    async def scenario() -> None:
        kube = LocalKube(make_api(history_changes=5))
        made = await kube.create(CONFIG_MAP, config_map("a", k="1"))
        with pytest.raises(AlreadyExists):
            await kube.create(CONFIG_MAP, config_map("a"))
        with pytest.raises(NotFound):
            await kube.get(CONFIG_MAP, "none", "default")
        changed = await kube.replace(CONFIG_MAP, {**made, "data": {"k": "2"}})
        with pytest.raises(Conflict):
            await kube.replace(CONFIG_MAP, {**made, "data": {"k": "3"}})
        with pytest.raises(Conflict):
            await kube.delete(CONFIG_MAP, "a", "default", uid="another")
        patched = await kube.patch(CONFIG_MAP, "a", "default", {"data": {"l": "4"}})
        assert patched["data"] == {"k": "2", "l": "4"}
        listing = await kube.list(CONFIG_MAP, "default")
        assert [item["metadata"]["name"] for item in listing.items] == ["a"]
        listing.items[0]["data"]["k"] = "changed by the reader"
        assert (await kube.get(CONFIG_MAP, "a", "default"))["data"]["k"] == "2"
        watch = kube.watch(CONFIG_MAP, "default", resource_version=changed["metadata"]["resourceVersion"])
        change = await anext(watch)
        assert (change.type, change.object["data"]) == ("MODIFIED", {"k": "2", "l": "4"})
        await watch.aclose()  # type: ignore[attr-defined]
        for number in range(10):
            await kube.patch(CONFIG_MAP, "a", "default", {"data": {"n": str(number)}})
        with pytest.raises(Gone):
            await anext(kube.watch(CONFIG_MAP, resource_version=made["metadata"]["resourceVersion"]))
        await kube.delete(CONFIG_MAP, "a", "default")
        with pytest.raises(ApiError) as refused:
            await kube.create(CONFIG_MAP, {"metadata": {"name": "A b", "namespace": "default"}})
        assert (refused.value.code, refused.value.reason) == (422, "Invalid")

    aio.run(scenario())


def test_the_port_binds_pods() -> None:
    async def scenario() -> None:
        kube = LocalKube(make_api())
        made = await kube.create(POD, pod("p"))
        await kube.bind(made, "node-1")
        assert (await kube.get(POD, "p", "default"))["spec"]["nodeName"] == "node-1"
        with pytest.raises(Conflict):
            await kube.bind(made, "node-2")
        await kube.delete(POD, "p", "default", grace=0)
        again = await kube.create(POD, pod("p"))
        with pytest.raises(Conflict):
            await kube.bind(made, "node-2")
        await kube.bind(again, "node-2")

    aio.run(scenario())


def test_a_namespace_goes_only_when_it_is_empty() -> None:
    async def scenario() -> None:
        kube = LocalKube(make_api())
        await kube.create(NAMESPACE, {"metadata": {"name": "ns"}})
        await kube.create(CONFIG_MAP, {"metadata": {"name": "a", "namespace": "ns"}})
        await kube.delete(NAMESPACE, "ns")
        with pytest.raises(Conflict):
            await kube.delete(NAMESPACE, "ns")
        await kube.delete(CONFIG_MAP, "a", "ns")
        await kube.delete(NAMESPACE, "ns")
        with pytest.raises(NotFound):
            await kube.get(NAMESPACE, "ns")

    aio.run(scenario())


def varint(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def envelope(api_version: str, kind: str, raw: bytes) -> bytes:
    return b"k8s\x00" + field(1, field(1, api_version.encode()) + field(2, kind.encode())) + field(2, raw)


def test_protobuf_of_a_config_map_is_read() -> None:
    metadata = field(1, b"name") + field(2, b"") + field(8, b"") + field(11, field(1, b"k") + field(2, b"v"))
    raw = field(1, metadata) + field(2, field(1, b"a") + field(2, b"1")) + field(3, field(1, b"b") + field(2, b"\xff"))
    assert read_protobuf(envelope("v1", "ConfigMap", raw)) == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "name", "labels": {"k": "v"}},
        "data": {"a": "1"},
        "binaryData": {"b": "/w=="},
    }


def test_protobuf_keeps_a_zero_that_is_meant() -> None:
    options = read_protobuf(envelope("v1", "DeleteOptions", field(1, 0) + field(4, b"Background")))
    assert options["gracePeriodSeconds"] == 0 and options["propagationPolicy"] == "Background"


def test_protobuf_of_other_kinds_is_not_read() -> None:
    with pytest.raises(NotReadable):
        read_protobuf(envelope("v1", "Pod", b""))


@pytest.mark.parametrize("cut", [b"\x0a", b"\x0a\xff", b"\xff" * 12, b"\x0a\x01", b"\x12\x05ab", b"\x08\x01"])
def test_broken_protobuf_is_a_bad_request(cut: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read_protobuf(envelope("v1", "ConfigMap", field(1, b"") + cut))
    assert refused.value.code == 400
    with pytest.raises(Refused):
        read_protobuf(b"k8s\x00" + b"\xff" * 20)
    with pytest.raises(Refused):
        read_protobuf(b"{}")
