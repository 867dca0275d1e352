"""One contract for both ways to the API: inside the process, and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from evertrain import aio

pytest.importorskip("starlette")

from evertrain.embedded.api.bootstrap import bootstrap  # noqa: E402
from evertrain.embedded.api.core import Api  # noqa: E402
from evertrain.embedded.api.local import LocalKube  # noqa: E402
from evertrain.embedded.api.server import ApiServer  # noqa: E402
from evertrain.embedded.certificates import credentials, write_kubeconfig  # noqa: E402
from evertrain.embedded.schema import Registry  # noqa: E402
from evertrain.embedded.store import Store  # noqa: E402
from evertrain.kube.client import Client  # noqa: E402
from evertrain.kube.port import (  # noqa: E402
    CONFIG_MAP,
    LEASE,
    POD,
    AlreadyExists,
    ApiError,
    Change,
    Conflict,
    Gone,
    Kube,
    NotFound,
    Object,
)

Scenario = Callable[[Kube], Awaitable[None]]


@pytest.fixture(params=["local", "http"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    async def whole(scenario: Scenario) -> None:
        store = Store(history_changes=20)
        api = Api(store, Registry.builtin())
        bootstrap(api)
        if request.param == "local":
            await scenario(LocalKube(api))
        else:
            keys = credentials(tmp_path / "keys")
            server = ApiServer(api, keys)
            await server.start()
            write_kubeconfig(tmp_path / "kubeconfig", server.url, keys)
            client = Client.from_kubeconfig(tmp_path / "kubeconfig")
            try:
                await scenario(client)
            finally:
                await client.close()
                await server.stop()
        store.close()

    def start(scenario: Scenario) -> None:
        async def bounded() -> None:
            async with aio.timeout(30):
                await whole(scenario)

        aio.run(bounded())

    return start


def config_map(name: str, **data: str) -> Object:
    return {"metadata": {"name": name, "namespace": "default"}, "data": data}


def test_objects_are_made_changed_and_deleted(run: Callable[[Scenario], None]) -> None:
    async def scenario(kube: Kube) -> None:
        made = await kube.create(CONFIG_MAP, config_map("a", k="1"))
        assert made["metadata"]["uid"]
        with pytest.raises(AlreadyExists):
            await kube.create(CONFIG_MAP, config_map("a"))
        with pytest.raises(NotFound):
            await kube.get(CONFIG_MAP, "none", "default")
        await kube.replace(CONFIG_MAP, {**made, "data": {"k": "2"}})
        with pytest.raises(Conflict):
            await kube.replace(CONFIG_MAP, {**made, "data": {"k": "3"}})
        patched = await kube.patch(CONFIG_MAP, "a", "default", {"data": {"l": "4"}})
        assert patched["data"] == {"k": "2", "l": "4"}
        applied = await kube.apply(
            CONFIG_MAP, {**config_map("b", x="1"), "apiVersion": "v1", "kind": "ConfigMap"}, manager="m"
        )
        assert applied["data"] == {"x": "1"}
        with pytest.raises(Conflict):
            other = {**config_map("b", x="2"), "apiVersion": "v1", "kind": "ConfigMap"}
            await kube.apply(CONFIG_MAP, other, manager="n")
        with pytest.raises(Conflict):
            await kube.delete(CONFIG_MAP, "a", "default", uid="another")
        await kube.delete(CONFIG_MAP, "a", "default", uid=made["metadata"]["uid"])
        with pytest.raises(NotFound):
            await kube.delete(CONFIG_MAP, "a", "default")
        with pytest.raises(ApiError) as refused:
            await kube.create(CONFIG_MAP, {"metadata": {"name": "A b", "namespace": "default"}})
        assert (refused.value.code, refused.value.reason) == (422, "Invalid")

    run(scenario)


def test_lists_choose_and_watches_follow(run: Callable[[Scenario], None]) -> None:
    async def scenario(kube: Kube) -> None:
        for name, color in (("a", "red"), ("b", "blue")):
            item = config_map(name)
            item["metadata"]["labels"] = {"color": color}
            await kube.create(CONFIG_MAP, item)
        listing = await kube.list(CONFIG_MAP, "default", labels="color=red")
        assert [item["metadata"]["name"] for item in listing.items] == ["a"]
        assert [item["kind"] for item in listing.items] == ["ConfigMap"]
        by_name = await kube.list(CONFIG_MAP, fields="metadata.name=b")
        assert [item["metadata"]["name"] for item in by_name.items] == ["b"]
        seen: list[Change] = []

        async def follow() -> None:
            async for change in kube.watch(
                CONFIG_MAP, "default", resource_version=listing.resource_version, labels="color=red"
            ):
                if change.type != "BOOKMARK":
                    seen.append(change)
                if len(seen) == 3:
                    return

        following = asyncio.create_task(follow())
        await kube.patch(CONFIG_MAP, "b", "default", {"metadata": {"labels": {"color": "red"}}})
        await kube.patch(CONFIG_MAP, "a", "default", {"data": {"k": "1"}})
        await kube.delete(CONFIG_MAP, "a", "default")
        await following
        assert [(change.type, change.object["metadata"]["name"]) for change in seen] == [
            ("ADDED", "b"),
            ("MODIFIED", "a"),
            ("DELETED", "a"),
        ]

    run(scenario)


def test_a_watch_of_long_ago_is_gone(run: Callable[[Scenario], None]) -> None:
    async def scenario(kube: Kube) -> None:
        made = await kube.create(CONFIG_MAP, config_map("a"))
        for number in range(25):
            await kube.patch(CONFIG_MAP, "a", "default", {"data": {"n": str(number)}})
        with pytest.raises(Gone):
            async for _ in kube.watch(CONFIG_MAP, resource_version=made["metadata"]["resourceVersion"]):
                raise AssertionError("it remembers")

    run(scenario)


def test_pods_are_bound_and_report(run: Callable[[Scenario], None]) -> None:
    async def scenario(kube: Kube) -> None:
        spec = {"containers": [{"name": "c", "image": "i"}]}
        made = await kube.create(POD, {"metadata": {"name": "p", "namespace": "default"}, "spec": spec})
        await kube.bind(made, "node-1")
        with pytest.raises(Conflict):
            await kube.bind(made, "node-2")
        found = await kube.get(POD, "p", "default")
        assert found["spec"]["nodeName"] == "node-1"
        found["status"]["phase"] = "Running"
        written = await kube.replace_status(POD, found)
        assert written["status"]["phase"] == "Running"
        patched = await kube.patch(POD, "p", "default", {"status": {"podIP": "127.64.0.5"}}, status=True)
        assert (patched["status"]["phase"], patched["status"]["podIP"]) == ("Running", "127.64.0.5")
        await kube.delete(POD, "p", "default", grace=7)
        assert (await kube.get(POD, "p", "default"))["metadata"]["deletionGracePeriodSeconds"] == 7
        await kube.delete(POD, "p", "default", grace=0)
        with pytest.raises(NotFound):
            await kube.get(POD, "p", "default")

    run(scenario)


def test_of_two_that_renew_a_lease_one_wins(run: Callable[[Scenario], None]) -> None:
    async def scenario(kube: Kube) -> None:
        spec = {"holderIdentity": "", "leaseDurationSeconds": 15}
        made = await kube.create(LEASE, {"metadata": {"name": "l", "namespace": "default"}, "spec": spec})
        wishes = [{**made, "spec": {**spec, "holderIdentity": name}} for name in "abc"]
        results = await asyncio.gather(*(kube.replace(LEASE, wish) for wish in wishes), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Conflict", "Conflict", "dict"]

    run(scenario)
