"""A node loses its power and comes back: its pods go as the job's `fault-scheduling` says, and none is run twice."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from evertrain.embedded import power
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client as Kube
from evertrain.kube.port import ASCEND_JOB, NODE, POD, Object
from tests.clusterd.integration.test_hub_embedded import running
from tests.operator.acjobs import ascend_job, replica

PATIENCE = 60.0
NAMES = {"train-master-0": 0, "train-worker-0": 1}
GRACE = 3
"""Seconds that a pod of the job may take to end."""


def job(folder: Path, *, tolerations: Sequence[Object] = (), **labels: str) -> Object:
    """Each pod holds a lock of its rank while it runs: two at the same time would be told."""
    record, go = shlex.quote(str(folder / "record")), shlex.quote(str(folder / "go"))
    command = (
        f"exec 9>{record}.$RANK; flock -n 9 || echo twice >> {record}; echo $RANK >> {record}; "
        f"until [ -e {go} ]; do sleep 0.05; done"
    )
    more = {"terminationGracePeriodSeconds": GRACE, "tolerations": list(tolerations)}
    specs = {kind: replica(1, chips=2, **more) for kind in ("Master", "Worker")}
    for each in specs.values():
        each["template"]["spec"]["containers"][0]["command"] = ["bash", "-c", command]
    return ascend_job("train", labels={name.replace("_", "-"): value for name, value in labels.items()}, specs=specs)


def sentinel(node: str) -> Object:
    """A pod that nobody but this node can run."""
    container = {"name": "main", "image": "none", "command": ["true"]}
    spec = {"nodeName": node, "restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "sentinel", "namespace": "default"}, "spec": spec}


class Pods:
    """All states of the job's pods, in order."""

    def __init__(self, kube: Kube) -> None:
        self.cache = Cache(kube, POD, "default")
        self.seen: list[tuple[str, Object | None]] = []
        """By uid: the pod, or None when it was gone."""
        self.cache.listen(lambda before, after: self.seen.append((_uid(after or before or {}), after)))

    def get(self, name: str) -> Object:
        return self.cache.get(name, "default") or {}

    def phase(self, name: str) -> str:
        return str((self.get(name).get("status") or {}).get("phase"))

    async def until(self, name: str, phase: str, but: str = "") -> Object:
        """Until the pod is in this phase, another one than this."""
        there = await self.cache.until(lambda: self.phase(name) == phase and _uid(self.get(name)) != but, PATIENCE)
        assert there, f"{name} is not {phase}: {self.get(name)}"
        return self.get(name)

    def ends(self, uid: str) -> list[int]:
        """How long the pod was given when it was asked to go, each time."""
        asked = [pod["metadata"] for each, pod in self.seen if each == uid and pod is not None]
        found = [each["deletionGracePeriodSeconds"] for each in asked if each.get("deletionTimestamp")]
        return list(dict.fromkeys(found))


def _uid(pod: Object) -> str:
    return str((pod.get("metadata") or {}).get("uid"))


async def switch(kube: Kube, node: str, state: str) -> None:
    await kube.patch(NODE, node, None, {"metadata": {"annotations": {power.ORDER: state}}})


@contextlib.asynccontextmanager
async def training(folder: Path, made: Object) -> AsyncIterator[tuple[Kube, Pods, dict[str, Object]]]:
    """A job that runs on two nodes of three, and its pods."""
    async with running(folder / "data", nodes=3, npus=2, node_grace=2.0) as (_, kube):
        pods, nodes = Pods(kube), Cache(kube, NODE)
        watching = [asyncio.create_task(each.run()) for each in (pods.cache, nodes)]
        try:
            await kube.create(ASCEND_JOB, made)
            yield kube, pods, {name: await pods.until(name, "Running") for name in NAMES}
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


async def to_the_end(folder: Path, kube: Kube, pods: Pods, node: str, runs: Sequence[str]) -> None:
    """The node comes back and runs what it is told, and the job succeeds. `runs`: a rank for each time that one ran."""
    await switch(kube, node, power.ON)
    await kube.create(POD, sentinel(node))
    await pods.until("sentinel", "Succeeded")
    (folder / "go").touch()
    for name in NAMES:
        await pods.until(name, "Succeeded")
    assert sorted((folder / "record").read_text().split()) == runs


@pytest.mark.parametrize(("scheduling", "asked"), [("force", []), ("grace", [GRACE])])
async def test_the_pods_of_a_stopped_node(tmp_path: Path, scheduling: str, asked: list[int]) -> None:
    """With `force` at once, for nobody is there who could end them; with `grace` when the time for it is over."""
    made = job(tmp_path, fault_scheduling=scheduling, pod_rescheduling="on")
    async with training(tmp_path, made) as (kube, pods, before):
        lost = before["train-worker-0"]
        node, uid = lost["spec"]["nodeName"], _uid(lost)
        await switch(kube, node, power.OFF)
        again = await pods.until("train-worker-0", "Running", but=uid)
        assert again["spec"]["nodeName"] not in (node, before["train-master-0"]["spec"]["nodeName"])
        assert pods.ends(uid) == asked
        assert (uid, None) in pods.seen
        assert _uid(pods.get("train-master-0")) == _uid(before["train-master-0"])
        await to_the_end(tmp_path, kube, pods, node, ["0", "1", "1"])


async def test_all_pods_are_made_anew_without_pod_rescheduling(tmp_path: Path) -> None:
    async with training(tmp_path, job(tmp_path, fault_scheduling="force")) as (kube, pods, before):
        node = before["train-worker-0"]["spec"]["nodeName"]
        await switch(kube, node, power.OFF)
        for name in NAMES:
            again = await pods.until(name, "Running", but=_uid(before[name]))
            assert again["spec"]["nodeName"] != node
        await to_the_end(tmp_path, kube, pods, node, ["0", "0", "1", "1"])


@pytest.mark.parametrize("labels", [{"fault_scheduling": "off"}, pytest.param({}, marks=pytest.mark.matrix)])
async def test_without_fault_scheduling_a_pod_waits_for_its_node(tmp_path: Path, labels: dict[str, str]) -> None:
    """It is asked to go when its toleration is over, and is there until its node can say that it has ended."""
    keys = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    soon = [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0} for key in keys]
    async with training(tmp_path, job(tmp_path, tolerations=soon, **labels)) as (kube, pods, before):
        lost = before["train-worker-0"]
        node, uid = lost["spec"]["nodeName"], _uid(lost)
        await switch(kube, node, power.OFF)
        assert await pods.cache.until(lambda: bool(pods.ends(uid)), PATIENCE)
        assert not await pods.cache.until(lambda: (uid, None) in pods.seen, 2.0 * GRACE), "nobody has ended it"
        assert _uid(pods.get("train-master-0")) == _uid(before["train-master-0"])
        await switch(kube, node, power.ON)
        await pods.until("train-worker-0", "Running", but=uid)
        await to_the_end(tmp_path, kube, pods, node, ["0", "1", "1"])
