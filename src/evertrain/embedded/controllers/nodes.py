"""The life cycle of nodes: one whose Lease is no longer renewed is not ready, is tainted, and loses its pods in time.

As on Kubernetes: the pods are marked for deletion when their tolerations run out, but are gone only when the node says
so or its object is deleted, for nobody else knows whether they still run.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timezone
from typing import Any

from evertrain import aio
from evertrain.embedded.controllers.kinds import slim
from evertrain.embedded.controllers.taints import eviction_delay, ready_status, unknown_conditions, wanted_taints
from evertrain.kube.cache import Cache
from evertrain.kube.port import LEASE, NODE, POD, ApiError, Conflict, Kube, NotFound, Object
from evertrain.kube.queue import WorkQueue
from evertrain.kube.times import parse_time

LEASES = "kube-node-lease"
GRACE_SECONDS = 40.0
logger = logging.getLogger(__name__)


def _pod_part(pod: Object) -> Object:
    """What is needed of a pod here."""
    spec, status, metadata = pod.get("spec") or {}, pod.get("status") or {}, pod["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
    return {
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "spec": {key: spec[key] for key in ("nodeName", "tolerations") if key in spec},
        "status": {"phase": status.get("phase"), "ready": _ready(status)},
    }


def _ready(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)


class NodeLifecycle:
    def __init__(self, kube: Kube, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._kube = kube
        self._grace = grace_seconds
        self._nodes = Cache(kube, NODE)
        self._leases = Cache(kube, LEASE, LEASES)
        self._pods = Cache(slim(kube, _pod_part), POD)
        self._pods.index("node", lambda pod: pod["spec"].get("nodeName"))
        self._queue: WorkQueue[tuple[str, str, str]] = WorkQueue(max_delay=5.0)
        self._renewed: dict[str, tuple[Any, float]] = {}
        """By node: what its Lease said last, and when that was news here. Clocks of others don't matter."""
        self._tainted: dict[tuple[str, str, str], datetime] = {}
        """By node, key and value: since when there is a taint that doesn't say it itself."""

    async def run(self) -> None:
        self._nodes.listen(self._node_changed)
        self._leases.listen(self._lease_changed)
        self._pods.listen(self._pod_changed)
        async with aio.TaskGroup() as group:
            for cache in (self._nodes, self._leases, self._pods):
                group.create_task(cache.run())
            for cache in (self._nodes, self._leases, self._pods):
                await cache.synced.wait()
            while True:
                key = await self._queue.get()
                try:
                    kind, namespace, name = key
                    await (self._look_at_node(name) if kind == "node" else self._look_at_pod(namespace, name))
                    self._queue.forget(key)
                except NotFound:
                    self._queue.forget(key)
                except (ApiError, OSError, TimeoutError) as error:
                    if not isinstance(error, Conflict):
                        logger.info("%s %s: %s; again later", kind, name, error)
                    self._queue.retry(key)
                finally:
                    self._queue.done(key)

    def _node_changed(self, before: Object | None, after: Object | None) -> None:
        name = (after or before or {})["metadata"]["name"]
        if after is None:
            self._renewed.pop(name, None)
        else:
            if before is None:  # a Lease may be older than its node
                self._renewed[name] = self._renewed.get(name, (None, 0.0))[0], asyncio.get_running_loop().time()
            self._queue.add(("node", "", name))
        taints_before = (before or {}).get("spec", {}).get("taints") or []
        taints_after = (after or {}).get("spec", {}).get("taints") or []
        there = {_identity(name, taint) for taint in taints_after}
        for taint in [taint for taint in self._tainted if taint[0] == name and taint not in there]:
            del self._tainted[taint]
        if after is None or taints_before != taints_after:
            for pod in self._pods.select("node", name):
                self._queue.add(("pod", pod["metadata"]["namespace"], pod["metadata"]["name"]))

    def _lease_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None:
            return
        name = after["metadata"]["name"]
        renewed = (after.get("spec") or {}).get("renewTime")
        if self._renewed.get(name, (None, 0.0))[0] != renewed:
            self._renewed[name] = renewed, asyncio.get_running_loop().time()
            node = self._nodes.get(name)
            if node is not None:
                # Whoever was taken for lost and is back says so itself; only the clock is wound up here.
                self._queue.add_after(("node", "", name), self._grace)

    def _pod_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None or not after["spec"].get("nodeName"):
            return
        if before is None or before["spec"] != after["spec"] or after["metadata"].get("deletionTimestamp"):
            self._queue.add(("pod", after["metadata"]["namespace"], after["metadata"]["name"]))

    async def _look_at_node(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            return
        silent = asyncio.get_running_loop().time() - self._renewed[name][1]
        if silent >= self._grace:
            conditions = unknown_conditions(node, _now())
            if conditions is not None:
                logger.warning("node %s has not renewed its lease for %.0f s: not ready", name, silent)
                node = {**node, "status": {**(node.get("status") or {}), "conditions": conditions}}
                node = await self._kube.replace_status(NODE, node)
        else:
            self._queue.add_after(("node", "", name), self._grace - silent)
        taints = wanted_taints(node, _now())
        if taints is not None:
            metadata = {"resourceVersion": node["metadata"]["resourceVersion"]}
            await self._kube.patch(NODE, name, None, {"metadata": metadata, "spec": {"taints": taints or None}})
        if ready_status(node) != "True":
            for pod in self._pods.select("node", name):
                if pod["status"]["ready"]:
                    await self._mark_not_ready(pod["metadata"]["namespace"], pod["metadata"]["name"])

    async def _mark_not_ready(self, namespace: str, name: str) -> None:
        """Nobody knows whether it still is."""
        pod = await self._kube.get(POD, name, namespace)
        for condition in pod["status"].get("conditions") or ():
            if condition.get("type") == "Ready" and condition.get("status") == "True":
                condition.update({"status": "False", "lastTransitionTime": _now()})
                await self._kube.replace_status(POD, pod)

    async def _look_at_pod(self, namespace: str, name: str) -> None:
        pod = self._pods.get(name, namespace)
        if pod is None:
            return
        node_name = pod["spec"]["nodeName"]
        node = self._nodes.get(node_name)
        if node is None:
            try:
                await self._kube.get(NODE, node_name)
            except NotFound:
                await self._collect(pod, node_name)
            return
        if pod["metadata"].get("deletionTimestamp"):
            return
        now = datetime.now(timezone.utc)

        def age(taint: Object) -> float:
            added = taint.get("timeAdded")
            since = parse_time(added) if added else self._tainted.setdefault(_identity(node_name, taint), now)
            return (now - since).total_seconds()

        left = eviction_delay(node, pod, age)
        if left is None:
            return
        if left > 0:
            self._queue.add_after(("pod", namespace, name), left)
            return
        logger.warning("pod %s/%s is evicted from node %s", namespace, name, node_name)
        await self._kube.delete(POD, name, namespace, uid=pod["metadata"]["uid"])

    async def _collect(self, pod: Object, node: str) -> None:
        """A pod on a node that was removed: it can't run, and nobody else will say so."""
        metadata = pod["metadata"]
        if pod["status"]["phase"] not in ("Succeeded", "Failed"):
            full = await self._kube.get(POD, metadata["name"], metadata["namespace"])
            full["status"].update(
                {"phase": "Failed", "reason": "NodeLost", "message": f"Node {node} of the pod was deleted"}
            )
            await self._kube.replace_status(POD, full)
        await self._kube.delete(POD, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace=0)


def _identity(node: str, taint: Object) -> tuple[str, str, str]:
    return node, str(taint.get("key", "")), str(taint.get("value") or "")


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
