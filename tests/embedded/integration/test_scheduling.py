"""The scheduler at work on a real API, with nodes whose pods are processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.embedded.scheduler.decide import decide
from evertrain.embedded.scheduler.shell import Scheduler
from evertrain.kube.port import EVENT, NODE, POD, POD_GROUP, Change, Object
from tests.embedded.nodes import SmallCluster, pod, small_cluster

CHIP = "huawei.com/Ascend910"


def run(work: Any) -> None:
    aio.run(asyncio.wait_for(work, 60))


def member(name: str, group: str, chips: int, *command: str, **spec: Any) -> Object:
    container = {"resources": {"limits": {CHIP: str(chips)}}}
    metadata = {"annotations": {"scheduling.k8s.io/group-name": group}}
    return pod(name, *command, container=container, metadata=metadata, schedulerName="volcano", **spec)


async def group(cluster: SmallCluster, name: str, members: int, chips: int) -> None:
    spec = {"minMember": members, "queue": "default", "minResources": {CHIP: str(chips)}}
    item = {
        "apiVersion": POD_GROUP.api_version,
        "kind": POD_GROUP.kind,
        "metadata": {"name": name, "namespace": "default"},
    }
    await cluster.kube.create(POD_GROUP, {**item, "spec": spec})


async def group_phase(cluster: SmallCluster, name: str, phase: str) -> Object:
    async with aio.timeout(15):
        listing = await cluster.kube.list(POD_GROUP)
        for item in listing.items:
            if item["metadata"]["name"] == name and (item.get("status") or {}).get("phase") == phase:
                return item
        version = listing.resource_version
        async for change in cluster.kube.watch(POD_GROUP, resource_version=version):
            item = change.object
            if item["metadata"]["name"] == name and (item.get("status") or {}).get("phase") == phase:
                return item
    raise AssertionError(f"{name} is not {phase}")


def test_a_gang_from_its_group_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, nodes=2, npus=2) as cluster:
            await group(cluster, "g", 2, 4)
            await group_phase(cluster, "g", "Inqueue")
            script = "test -e /tmp/no-such-file || exit 0"
            await cluster.create(member("a", "g", 2, "sh", "-c", script))
            await asyncio.sleep(0.1)
            assert "nodeName" not in cluster.pod("a")["spec"]  # it waits for the other
            await cluster.create(member("b", "g", 2, "sh", "-c", script))
            done = [await cluster.phase(name, "Succeeded") for name in "ab"]
            assert {item["spec"]["nodeName"] for item in done} == {"node-0", "node-1"}
            assert [item["metadata"]["annotations"][CHIP] for item in done] == ["Ascend910-0,Ascend910-1"] * 2
            completed = await group_phase(cluster, "g", "Completed")
            assert completed["status"]["succeeded"] == 2
            words = [condition["type"] for condition in completed["status"]["conditions"]]
            assert words[-1] == "Scheduled"

    run(main())


def test_a_group_that_is_too_large_waits_and_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, npus=4) as cluster:
            await cluster.create(member("other", "x", 4, "sleep", "600"))
            await group(cluster, "x", 1, 4)
            await cluster.phase("other", "Running")
            await group(cluster, "g", 1, 4)
            pending = await group_phase(cluster, "g", "Pending")
            (condition,) = pending["status"]["conditions"]
            assert condition["type"] == "Unschedulable"
            assert condition["reason"] == "NotEnoughResources"
            assert condition["message"] == f"resource in cluster is overused: Insufficient {CHIP}"
            told = f"Unschedulable: {condition['message']}"
            async with aio.timeout(15):
                while told not in await cluster.events("g"):
                    await asyncio.sleep(0.02)
            # The place of a pod that is gone is kept for the next one of its group, so the group has to go, too.
            await cluster.kube.delete(POD_GROUP, "x", "default")
            await cluster.kube.delete(POD, "other", "default", grace=1)
            await group_phase(cluster, "g", "Inqueue")

    run(main())


def test_an_unschedulable_pod_is_explained_and_placed_when_it_can_be(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.machine.nodes.until(lambda: cluster.machine.nodes.get("node-0") is not None, 10)
            await cluster.create(pod("a", "true", nodeSelector={"disk": "fast"}))

            def complaint(item: Object) -> str:
                conditions = (item.get("status") or {}).get("conditions") or []
                return next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")

            text = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            waiting = await cluster.until("a", lambda item: complaint(item) == text)
            assert waiting["status"]["phase"] == "Pending"
            async with aio.timeout(10):
                while f"FailedScheduling: {text}" not in await cluster.events("a"):
                    await asyncio.sleep(0.02)
            await cluster.kube.patch(NODE, "node-0", None, {"metadata": {"labels": {"disk": "fast"}}})
            done = await cluster.phase("a", "Succeeded")
            assert complaint(done) == ""

    run(main())


def test_what_was_decided_counts_before_it_is_seen(tmp_path: Path) -> None:
    """The caches lag behind: a pod that was just bound is still shown as waiting, and its chips as free."""

    async def main() -> None:
        async with small_cluster(tmp_path, scheduler=False, npus=2) as cluster:
            assert await cluster.machine.nodes.until(
                lambda: bool((cluster.machine.nodes.get("node-0") or {}).get("status", {}).get("allocatable")), 20
            )
            scheduler = Scheduler(cluster.kube)
            container = {"resources": {"limits": {CHIP: "1"}}}
            await cluster.create(pod("first", "sleep", "600", container=container))
            for cache in (scheduler._pods, scheduler._nodes, scheduler._groups, scheduler._queues):
                await cache.refresh()
            assert not await scheduler._carry_out(decide(scheduler._world(), 1))
            assert decide(scheduler._world(), 2).bindings == []
            second = await cluster.create(pod("second", "sleep", "600", container=container))
            scheduler._pods._apply(Change("ADDED", second))
            (binding,) = decide(scheduler._world(), 3).bindings
            assert (binding.pod.name, binding.chips) == ("second", {CHIP: (1,)})

    run(main())


def test_no_chip_is_ever_given_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, nodes=2, npus=3) as cluster:
            mistakes: list[str] = []

            def check(before: Object | None, after: Object | None) -> None:
                held: dict[tuple[str, str], str] = {}
                for item in cluster.machine.pods:
                    if (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                        continue
                    for chip in (item["metadata"].get("annotations") or {}).get(CHIP, "").split(","):
                        node = item["spec"].get("nodeName")
                        if (
                            chip
                            and node
                            and held.setdefault((node, chip), item["metadata"]["name"]) != item["metadata"]["name"]
                        ):
                            mistakes.append(f"{node} {chip}: {held[node, chip]} and {item['metadata']['name']}")

            cluster.machine.pods.listen(check)
            names = [f"g{number}" for number in range(8)]
            for name in names:
                await group(cluster, name, 2, 2)
                for index in range(2):
                    await cluster.create(member(f"{name}-{index}", name, 1 + index, "true"))
            for name in names:
                for index in range(2):
                    await cluster.phase(f"{name}-{index}", "Succeeded")
            assert not mistakes
            events = (await cluster.kube.list(EVENT)).items
            assert sum(event["reason"] == "Scheduled" for event in events) <= 16

    run(main())


def test_jobs_that_listen_on_the_same_port_of_a_shared_network_run_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            for name in ("one", "two"):
                await group(cluster, name, 1, 0)
                item = member(name, name, 0, "sh", "-c", f"until [ -e {tmp_path / name} ]; do sleep 0.02; done")
                item["spec"]["containers"][0]["ports"] = [{"containerPort": 2222}]
                await cluster.create(item)
                if name == "one":
                    await cluster.phase("one", "Running")
            told = "FailedScheduling: port 2222 is that of pod default/one of another job"
            async with aio.timeout(60):
                while not any(each.startswith(told) for each in await cluster.events("two")):
                    await asyncio.sleep(0.02)
            assert not cluster.pod("two")["spec"].get("nodeName")
            (tmp_path / "one").touch()
            await cluster.phase("one", "Succeeded")
            await cluster.phase("two", "Running")
            (tmp_path / "two").touch()
            await cluster.phase("two", "Succeeded")

    run(main())
