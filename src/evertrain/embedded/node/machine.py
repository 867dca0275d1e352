"""What all virtual nodes of a process share: one view of the cluster, one list of addresses, one voice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain import aio
from evertrain.embedded import kernel
from evertrain.embedded.network.fabric import Fabric
from evertrain.embedded.network.plan import LOOPBACK, Plan
from evertrain.embedded.node import logs, volumes
from evertrain.embedded.node.addresses import Addresses
from evertrain.embedded.recorder import Recorder
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, NODE, POD, SECRET, SERVICE, Kube, Object

if TYPE_CHECKING:
    from evertrain.embedded.node.node import VirtualNode

logger = logging.getLogger(__name__)


class Machine:
    """`run()` beside the nodes, for as long as any of them runs."""

    def __init__(self, kube: Kube, folder: Path, plan: Plan = LOOPBACK, fabric: Fabric | None = None) -> None:
        """`fabric`: the pods' own network, if they have one."""
        self.kube = kube
        self.folder = folder
        self.fabric = fabric
        self.addresses = Addresses(plan, lambda uid: bool(self.pods.select("uid", uid)))
        self.watcher = logs.Watcher()
        self.recorder = Recorder(kube, "kubelet")
        self.pods = Cache(kube, POD)
        self.nodes = Cache(kube, NODE)
        self.services = Cache(kube, SERVICE)
        self._config_maps = Cache(kube, CONFIG_MAP)
        self._secrets = Cache(kube, SECRET)
        self._running: dict[str, VirtualNode] = {}
        self.pods.index("node", lambda pod: (pod.get("spec") or {}).get("nodeName"))
        self.pods.index("uid", lambda pod: pod["metadata"]["uid"])
        self.pods.listen(self._pod_changed)
        self.nodes.listen(self._node_changed)
        self._config_maps.listen(lambda before, after: self._source_changed("ConfigMap", before, after))
        self._secrets.listen(lambda before, after: self._source_changed("Secret", before, after))

    async def run(self) -> None:
        kernel.raise_limit_of_descriptors()  # a container costs one
        caches = (self.pods, self.nodes, self.services, self._config_maps, self._secrets)
        async with aio.TaskGroup() as tasks:
            for cache in caches:
                tasks.create_task(cache.run())
            tasks.create_task(self.recorder.run())

    async def ready(self) -> None:
        for cache in (self.pods, self.nodes, self.services, self._config_maps, self._secrets):
            await cache.synced.wait()

    def attach(self, node: VirtualNode) -> list[Object]:
        """From now on the node hears of its pods; those that it has already are returned."""
        self._running[node.name] = node
        return self.pods.select("node", node.name)

    def detach(self, node: VirtualNode) -> None:
        if self._running.get(node.name) is node:
            del self._running[node.name]

    def lookup(self, kind: str, namespace: str, name: str) -> Object | None:
        return (self._secrets if kind == "Secret" else self._config_maps).get(name, namespace)

    def _pod_changed(self, before: Object | None, after: Object | None) -> None:
        item = after or before or {}
        node = self._running.get((item.get("spec") or {}).get("nodeName") or "")
        if node is not None:
            self.hand_over(node, item, after)

    def hand_over(self, node: VirtualNode, pod: Object, now: Object | None) -> None:
        """Tells the node about its pod: what it is `now`, None if it is gone."""
        try:
            node.pod_changed(pod["metadata"]["uid"], now)
        except Exception:  # one pod that can't be understood is no reason to fail all
            logger.exception("pod %s/%s", pod["metadata"].get("namespace"), pod["metadata"].get("name"))

    def _node_changed(self, before: Object | None, after: Object | None) -> None:
        item = after or before or {}
        node = self._running.get(item["metadata"]["name"])
        if node is not None:
            node.own_object_changed(after)

    def _source_changed(self, kind: str, before: Object | None, after: Object | None) -> None:
        """Pods that have it as a volume, or wait for it, look again."""
        if after is None:
            return
        name, namespace = after["metadata"]["name"], after["metadata"].get("namespace")
        for node in self._running.values():
            for worker in node.workers():
                if worker.namespace == namespace and (kind, name) in volumes.sources(worker.pod):
                    worker.refresh()
