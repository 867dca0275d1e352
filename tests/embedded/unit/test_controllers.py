"""The controllers on the port, against the embedded API without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from evertrain import aio
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.deletion import DeleteOptions
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.controllers import EventExpiry, GarbageCollector, NodeLifecycle, Removal
from evertrain.embedded.controllers.events import last_seen
from evertrain.embedded.controllers.garbage import Owners, verdict
from evertrain.embedded.controllers.taints import eviction_delay, tolerates, unknown_conditions, wanted_taints
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store
from evertrain.kube.port import (
    CONFIG_MAP,
    CUSTOM_RESOURCE_DEFINITION,
    EVENT,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    SECRET,
    Kind,
    NotFound,
    Object,
)

NOW = "2026-01-02T03:04:05Z"
UNREACHABLE = "node.kubernetes.io/unreachable"


def make_kube() -> LocalKube:
    api = Api(Store(), Registry.builtin())
    bootstrap(api)
    return LocalKube(api)


def run(scenario: Callable[[LocalKube], Awaitable[None]], *parts: Callable[[LocalKube], Any]) -> None:
    async def whole() -> None:
        kube = make_kube()
        tasks = [asyncio.create_task(part(kube).run()) for part in parts]
        try:
            async with aio.timeout(20):
                await scenario(kube)
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    aio.run(whole())


async def until(
    kube: LocalKube, kind: Kind, name: str, namespace: str | None, holds: Callable[[Object], bool]
) -> Object:
    """Waits for a change that makes it true."""
    async for change in kube.watch(kind, namespace, resource_version="0", fields=f"metadata.name={name}"):
        if change.type in ("ADDED", "MODIFIED") and holds(change.object):
            return change.object
    raise AssertionError("the watch ended")


async def until_gone(kube: LocalKube, kind: Kind, name: str, namespace: str | None) -> None:
    try:
        found = await kube.get(kind, name, namespace)
    except NotFound:
        return
    version = found["metadata"]["resourceVersion"]
    async for change in kube.watch(kind, namespace, resource_version=version, fields=f"metadata.name={name}"):
        if change.type == "DELETED":
            return


def thing(name: str, *owners: Object, **metadata: Any) -> Object:
    references = [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        for owner in owners
    ]
    return {"metadata": {"name": name, "namespace": "default", "ownerReferences": references, **metadata}}


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        (Owners(), "keep"),
        (Owners(solid=("a",)), "keep"),
        (Owners(unknown=("a",)), "keep"),
        (Owners(gone=("a",)), "delete"),
        (Owners(waiting=("a",)), "delete"),
        (Owners(gone=("a",), waiting=("b",)), "delete"),
        (Owners(solid=("a",), gone=("b",)), "release"),
        (Owners(solid=("a",), waiting=("b",)), "release"),
        (Owners(unknown=("a",), waiting=("b",)), "keep"),
    ],
)
def test_an_object_goes_when_no_owner_is_left(owners: Owners, expected: str) -> None:
    assert verdict(owners)[0] == expected


def test_a_chain_of_owners_goes_link_by_link() -> None:
    async def scenario(kube: LocalKube) -> None:
        first = await kube.create(CONFIG_MAP, {"metadata": {"name": "first", "namespace": "default"}})
        second = await kube.create(CONFIG_MAP, thing("second", first))
        await kube.create(CONFIG_MAP, thing("third", second))
        await kube.delete(CONFIG_MAP, "first", "default")
        await until_gone(kube, CONFIG_MAP, "third", "default")
        await until_gone(kube, CONFIG_MAP, "second", "default")

    run(scenario, GarbageCollector)


def test_objects_that_lost_their_owner_while_nobody_looked_go_too() -> None:
    async def scenario(kube: LocalKube) -> None:
        owner = await kube.create(CONFIG_MAP, {"metadata": {"name": "owner", "namespace": "default"}})
        await kube.create(CONFIG_MAP, thing("child", owner))
        await kube.delete(CONFIG_MAP, "owner", "default")
        await kube.create(CONFIG_MAP, {"metadata": {"name": "owner", "namespace": "default"}})
        task = asyncio.create_task(GarbageCollector(kube).run())
        await until_gone(kube, CONFIG_MAP, "child", "default")
        assert await kube.get(CONFIG_MAP, "owner", "default")
        task.cancel()

    run(scenario)


def definition(group: str) -> Object:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": "Thing", "plural": "things"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def test_custom_objects_own_and_are_owned() -> None:
    kind = Kind("example.com/v1", "Thing", "things")

    async def scenario(kube: LocalKube) -> None:
        await kube.create(CUSTOM_RESOURCE_DEFINITION, definition("example.com"))
        owner = await kube.create(kind, {"metadata": {"name": "owner", "namespace": "default"}})
        await kube.create(POD, {**thing("child", owner), "spec": {"containers": [{"name": "c", "image": "i"}]}})
        # Only a collector that follows the new kind can tell that the owner is there, and later that it is gone.
        await kube.create(kind, thing("grandchild", await kube.get(POD, "child", "default")))
        await kube.delete(kind, "owner", "default")
        await until_gone(kube, POD, "child", "default")
        await until_gone(kube, kind, "grandchild", "default")

    run(scenario, GarbageCollector)


def test_a_namespace_waits_for_what_ends_in_it() -> None:
    async def scenario(kube: LocalKube) -> None:
        await kube.create(NAMESPACE, {"metadata": {"name": "ns"}})
        spec = {"containers": [{"name": "c", "image": "i"}], "nodeName": "node-0"}
        await kube.create(POD, {"metadata": {"name": "p", "namespace": "ns"}, "spec": spec})
        await kube.create(CONFIG_MAP, {"metadata": {"name": "c", "namespace": "ns"}})
        await kube.delete(NAMESPACE, "ns")
        await until(kube, POD, "p", "ns", lambda pod: bool(pod["metadata"].get("deletionTimestamp")))
        await until_gone(kube, CONFIG_MAP, "c", "ns")
        assert (await kube.get(NAMESPACE, "ns"))["status"]["phase"] == "Terminating"
        await kube.delete(POD, "p", "ns", grace=0)
        await until_gone(kube, NAMESPACE, "ns", None)

    run(scenario, Removal)


def test_a_definition_waits_for_its_objects() -> None:
    kind = Kind("example.com/v1", "Thing", "things")

    async def scenario(kube: LocalKube) -> None:
        await kube.create(CUSTOM_RESOURCE_DEFINITION, definition("example.com"))
        held = {"name": "held", "namespace": "default", "finalizers": ["example.com/hold"]}
        await kube.create(kind, {"metadata": held})
        await kube.delete(CUSTOM_RESOURCE_DEFINITION, "things.example.com")
        await until(kube, kind, "held", "default", lambda item: bool(item["metadata"].get("deletionTimestamp")))
        assert await kube.get(CUSTOM_RESOURCE_DEFINITION, "things.example.com")
        await kube.patch(kind, "held", "default", {"metadata": {"finalizers": None}})
        await until_gone(kube, CUSTOM_RESOURCE_DEFINITION, "things.example.com", None)
        with pytest.raises(NotFound):
            await kube.list(kind)

    run(scenario, Removal)


def node(ready: str, taints: list[Object] | None = None, **spec: Any) -> Object:
    conditions = [{"type": "Ready", "status": ready}, {"type": "MemoryPressure", "status": "False"}]
    return {"metadata": {"name": "n"}, "spec": {"taints": taints or [], **spec}, "status": {"conditions": conditions}}


def test_taints_follow_the_ready_condition() -> None:
    own = {"key": "mine", "effect": "NoSchedule"}
    silent = wanted_taints(node("Unknown", [own]), NOW)
    assert silent == [
        own,
        {"key": UNREACHABLE, "effect": "NoSchedule", "timeAdded": NOW},
        {"key": UNREACHABLE, "effect": "NoExecute", "timeAdded": NOW},
    ]
    assert wanted_taints(node("Unknown", silent), "later") is None
    assert wanted_taints(node("True", silent), NOW) == [own]
    assert wanted_taints(node("True", [own]), NOW) is None
    broken = wanted_taints(node("False", silent), NOW) or []
    assert {taint["key"] for taint in broken} == {"mine", "node.kubernetes.io/not-ready"}
    assert wanted_taints(node("True", unschedulable=True), NOW) == [
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "timeAdded": NOW}
    ]


def test_a_silent_node_knows_nothing_about_itself() -> None:
    conditions = unknown_conditions(node("True"), NOW)
    assert conditions is not None
    assert {item["status"] for item in conditions} == {"Unknown"}
    assert conditions[0]["reason"] == "NodeStatusUnknown" and conditions[0]["lastTransitionTime"] == NOW
    assert unknown_conditions({"metadata": {}, "status": {"conditions": conditions}}, NOW) is None


@pytest.mark.parametrize(
    ("tolerations", "expected"),
    [
        ([], 0.0),
        ([{"operator": "Exists"}], None),
        ([{"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7}], 7.0),
        ([{"key": UNREACHABLE, "operator": "Exists", "effect": "NoSchedule"}], 0.0),
        ([{"key": "other", "operator": "Exists"}], 0.0),
        ([{"operator": "Exists"}, {"key": UNREACHABLE, "operator": "Exists", "tolerationSeconds": 3}], 3.0),
    ],
)
def test_a_pod_stays_as_long_as_it_tolerates(tolerations: list[Object], expected: float | None) -> None:
    tainted = node("Unknown", [{"key": UNREACHABLE, "effect": "NoExecute"}])
    assert eviction_delay(tainted, {"spec": {"tolerations": tolerations}}) == expected


def test_a_toleration_of_a_value_is_for_that_value() -> None:
    taint = {"key": "k", "value": "v", "effect": "NoExecute"}
    assert tolerates({"key": "k", "operator": "Equal", "value": "v"}, taint)
    assert not tolerates({"key": "k", "value": "w"}, taint)


async def make_node(kube: LocalKube, name: str = "node-0") -> None:
    made = await kube.create(NODE, {"metadata": {"name": name}})
    made["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    await kube.replace_status(NODE, made)
    spec = {"holderIdentity": name, "renewTime": "2026-01-02T03:04:05.000000Z"}
    await kube.create(LEASE, {"metadata": {"name": name, "namespace": "kube-node-lease"}, "spec": spec})


def ready(item: Object) -> str:
    return {condition["type"]: condition["status"] for condition in item["status"]["conditions"]}["Ready"]


async def make_pod(kube: LocalKube, name: str, seconds: int) -> None:
    toleration = {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    spec = {"containers": [{"name": "c", "image": "i"}], "nodeName": "node-0", "tolerations": [toleration]}
    made = await kube.create(POD, {"metadata": {"name": name, "namespace": "default"}, "spec": spec})
    made["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await kube.replace_status(POD, made)


def test_a_silent_node_loses_its_pods_and_gets_well_again() -> None:
    async def scenario(kube: LocalKube) -> None:
        await make_node(kube)
        await make_pod(kube, "patient", 300)
        await make_pod(kube, "hasty", 0)
        await until(kube, NODE, "node-0", None, lambda item: ready(item) == "Unknown")
        tainted = await until(kube, NODE, "node-0", None, lambda item: bool((item.get("spec") or {}).get("taints")))
        assert {taint["effect"] for taint in tainted["spec"]["taints"]} == {"NoSchedule", "NoExecute"}
        await until(kube, POD, "hasty", "default", lambda pod: bool(pod["metadata"].get("deletionTimestamp")))
        patient = await until(kube, POD, "patient", "default", lambda pod: ready(pod) == "False")
        assert "deletionTimestamp" not in patient["metadata"]
        # It is back: it renews its lease and says that it is ready.
        beat = {"spec": {"renewTime": "2026-01-02T03:05:05.000000Z"}}
        await kube.patch(LEASE, "node-0", "kube-node-lease", beat)
        conditions = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await kube.patch(NODE, "node-0", None, conditions, status=True)
        await until(kube, NODE, "node-0", None, lambda item: not (item.get("spec") or {}).get("taints"))

    run(scenario, lambda kube: NodeLifecycle(kube, grace_seconds=0.3))


def test_a_node_that_renews_its_lease_stays_ready() -> None:
    async def scenario(kube: LocalKube) -> None:
        await make_node(kube, "silent")
        await make_node(kube, "node-0")

        async def beat() -> None:
            for number in range(100):
                renewed = {"spec": {"renewTime": f"2026-01-02T03:05:05.{number:06}Z"}}
                await kube.patch(LEASE, "node-0", "kube-node-lease", renewed)
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(beat())
        await until(kube, NODE, "silent", None, lambda item: ready(item) == "Unknown")
        assert ready(await kube.get(NODE, "node-0")) == "True"
        beating.cancel()

    run(scenario, lambda kube: NodeLifecycle(kube, grace_seconds=0.4))


def test_pods_of_a_node_that_was_removed_are_lost() -> None:
    async def scenario(kube: LocalKube) -> None:
        await make_node(kube)
        await make_pod(kube, "p", 300)
        seen: list[Object] = []

        async def follow() -> None:
            version = (await kube.list(POD)).resource_version
            async for change in kube.watch(POD, resource_version=version):
                seen.append(change.object)
                if change.type == "DELETED":
                    return

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)
        await kube.delete(NODE, "node-0")
        await following
        assert (seen[-1]["status"]["phase"], seen[-1]["status"]["reason"]) == ("Failed", "NodeLost")

    run(scenario, NodeLifecycle)


def test_old_events_go_and_new_ones_stay() -> None:
    def event(name: str, last: str) -> Object:
        about = {"kind": "Pod", "name": "p", "namespace": "default"}
        metadata = {"name": name, "namespace": "default"}
        return {"metadata": metadata, "involvedObject": about, "lastTimestamp": last, "reason": "R", "type": "Normal"}

    async def scenario(kube: LocalKube) -> None:
        await kube.create(EVENT, event("old", "2020-01-01T00:00:00Z"))
        await kube.create(EVENT, event("new", "2099-01-01T00:00:00Z"))
        later = datetime.now(timezone.utc).timestamp() + 7200
        assert await EventExpiry(kube, now=lambda: later).sweep() == 1
        assert [item["metadata"]["name"] for item in (await kube.list(EVENT)).items] == ["new"]

    run(scenario)


def test_an_event_was_last_seen_at_its_latest_time() -> None:
    created = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    seen = last_seen({"metadata": created, "series": {"lastObservedTime": "2026-01-02T00:00:00.000001Z"}})
    assert seen == datetime(2026, 1, 2, 0, 0, 0, 1, tzinfo=timezone.utc).timestamp()
    assert last_seen({"metadata": {}, "lastTimestamp": "nonsense"}) == 0.0


def test_dependents_go_with_an_owner_whose_kind_goes_too() -> None:
    kind = Kind("example.com/v1", "Thing", "things")

    async def scenario(kube: LocalKube) -> None:
        await kube.create(CUSTOM_RESOURCE_DEFINITION, definition("example.com"))
        owner = await kube.create(kind, {"metadata": {"name": "owner", "namespace": "default"}})
        names = [f"child-{number}" for number in range(20)]
        for name in names:
            await kube.create(CONFIG_MAP, thing(name, owner))
        await kube.delete(CUSTOM_RESOURCE_DEFINITION, "things.example.com")
        for name in names:
            await until_gone(kube, CONFIG_MAP, name, "default")

    run(scenario, GarbageCollector, Removal)


def test_an_owner_may_be_named_by_another_version_of_its_kind() -> None:
    kind = Kind("example.com/v1", "Thing", "things")

    async def scenario(kube: LocalKube) -> None:
        made = definition("example.com")
        made["spec"]["versions"].append({**made["spec"]["versions"][0], "name": "v2", "storage": False})
        await kube.create(CUSTOM_RESOURCE_DEFINITION, made)
        owner = await kube.create(kind, {"metadata": {"name": "owner", "namespace": "default"}})
        owner["apiVersion"] = "example.com/v2"
        await kube.delete(kind, "owner", "default")
        await kube.create(CONFIG_MAP, thing("child", owner))
        await until_gone(kube, CONFIG_MAP, "child", "default")

    run(scenario, GarbageCollector)


class Behind:
    """A port whose watches of one kind have nothing to say until they are let go."""

    def __init__(self, kube: LocalKube, kind: Kind) -> None:
        self._kube = kube
        self._kind = kind
        self.watched = asyncio.Event()
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    async def watch(self, kind: Kind, *given: Any, **options: Any) -> Any:
        if kind == self._kind:
            self.watched.set()
        async for change in self._kube.watch(kind, *given, **options):
            if kind == self._kind:
                await self.go.wait()
            yield change


def test_a_collector_that_is_behind_deletes_no_orphans() -> None:
    async def scenario(kube: LocalKube) -> None:
        behind = Behind(kube, CONFIG_MAP)
        collecting = asyncio.create_task(GarbageCollector(behind).run())  # type: ignore[arg-type]
        await behind.watched.wait()
        owner = await kube.create(SECRET, {"metadata": {"name": "owner", "namespace": "default"}})
        await kube.create(CONFIG_MAP, thing("child", owner))
        secrets = kube._resource(SECRET)
        kube._api.delete(secrets, "default", "owner", DeleteOptions(policy="Orphan"))
        await until_gone(kube, SECRET, "owner", "default")
        child = await kube.get(CONFIG_MAP, "child", "default")
        assert "ownerReferences" not in child["metadata"]
        behind.go.set()
        last = await kube.create(CONFIG_MAP, thing("last", owner))
        await until_gone(kube, CONFIG_MAP, last["metadata"]["name"], "default")  # it has seen all the others before
        assert await kube.get(CONFIG_MAP, "child", "default")
        collecting.cancel()

    run(scenario)


def test_a_taint_of_the_users_own_has_its_time_too() -> None:
    async def scenario(kube: LocalKube) -> None:
        await make_node(kube)
        spec = {
            "containers": [{"name": "c", "image": "i"}],
            "nodeName": "node-0",
            "tolerations": [{"key": "mine", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}],
        }
        await kube.create(POD, {"metadata": {"name": "p", "namespace": "default"}, "spec": spec})
        await kube.patch(NODE, "node-0", None, {"spec": {"taints": [{"key": "mine", "effect": "NoExecute"}]}})
        await until(kube, POD, "p", "default", lambda pod: bool(pod["metadata"].get("deletionTimestamp")))

    run(scenario, NodeLifecycle)
