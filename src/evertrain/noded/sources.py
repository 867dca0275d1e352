"""What the API server knows that a node's daemon needs: its node and pods, what was injected, what was configured, and
what it has published itself.

One for all daemons of a process: with fifty virtual nodes there are still seven watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from evertrain import aio
from evertrain.faultcodes import overrides
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, NODE, POD, Kube, Object
from evertrain.noded import injected
from evertrain.wire import faultinfo

_CONSUMED = ",".join(f"{key}={value}" for key, value in faultinfo.LABELS.items())


class Daemon(Protocol):
    @property
    def node(self) -> str: ...

    def changed(self) -> None:
        """Something that may matter to the node is another."""
        ...

    def device_seen(self, item: Object | None) -> None: ...

    def node_seen(self, item: Object | None) -> None: ...


class Sources:
    """`run()` beside the daemons."""

    def __init__(self, kube: Kube, node: str = "") -> None:
        """With a node: only what is about that one."""

        def named(name: str) -> dict[str, str]:
            return {"fields": f"metadata.name={name}"} if node else {}

        self.nodes = Cache(kube, NODE, **named(node))
        self.pods = Cache(kube, POD, fields=f"spec.nodeName={node}" if node else "")
        self.pods.index("node", lambda pod: (pod.get("spec") or {}).get("nodeName"))
        device, info, put_in = faultinfo.DEVICE_PREFIX + node, faultinfo.NODE_PREFIX + node, injected.name_of(node)
        self.devices = Cache(kube, CONFIG_MAP, faultinfo.DEVICE_NAMESPACE, **named(device) or {"labels": _CONSUMED})
        self.infos = Cache(kube, CONFIG_MAP, faultinfo.NODE_NAMESPACE, **named(info) or {"labels": _CONSUMED})
        self.injected = Cache(
            kube, CONFIG_MAP, injected.NAMESPACE, **named(put_in) or {"labels": f"{injected.LABEL}=true"}
        )
        self.chip_config, self.node_config = (
            Cache(kube, CONFIG_MAP, namespace, fields=f"metadata.name={name}")
            for namespace, name in (overrides.CHIP_CONFIG, overrides.NODE_CONFIG)
        )
        self._daemons: dict[str, Daemon] = {}
        self.nodes.listen(lambda before, after: self._tell(_name(before, after), lambda daemon: daemon.changed()))
        self.pods.listen(self._pod)
        self.injected.listen(
            lambda before, after: self._tell(
                _name(before, after).removeprefix(injected.PREFIX), lambda daemon: daemon.changed()
            )
        )
        self.devices.listen(
            lambda before, after: self._tell(
                _name(before, after).removeprefix(faultinfo.DEVICE_PREFIX), lambda daemon: daemon.device_seen(after)
            )
        )
        self.infos.listen(
            lambda before, after: self._tell(
                _name(before, after).removeprefix(faultinfo.NODE_PREFIX), lambda daemon: daemon.node_seen(after)
            )
        )
        for config in (self.chip_config, self.node_config):
            config.listen(self._configured)

    @property
    def _caches(self) -> tuple[Cache, ...]:
        return (
            self.nodes, self.pods, self.devices, self.infos, self.injected, self.chip_config, self.node_config,
        )  # fmt: skip

    async def run(self) -> None:
        async with aio.TaskGroup() as tasks:
            for cache in self._caches:
                tasks.create_task(cache.run())

    async def ready(self) -> None:
        for cache in self._caches:
            await cache.synced.wait()

    def is_ready(self) -> bool:
        """What there is to know was known once; an API server that is away later is no reason to be restarted."""
        return all(cache.synced.is_set() for cache in self._caches)

    def attach(self, daemon: Daemon) -> None:
        self._daemons[daemon.node] = daemon

    def detach(self, daemon: Daemon) -> None:
        if self._daemons.get(daemon.node) is daemon:
            del self._daemons[daemon.node]

    def _tell(self, node: str, news: Callable[[Daemon], None]) -> None:
        daemon = self._daemons.get(node)
        if daemon is not None:
            news(daemon)

    def _pod(self, before: Object | None, after: Object | None) -> None:
        for node in {(item.get("spec") or {}).get("nodeName") or "" for item in (before, after) if item is not None}:
            self._tell(node, lambda daemon: daemon.changed())

    def _configured(self, before: Object | None, after: Object | None) -> None:
        for daemon in list(self._daemons.values()):
            daemon.changed()


def _name(before: Object | None, after: Object | None) -> str:
    return str((after or before or {})["metadata"]["name"])
