"""The virtual nodes of a cluster: which of them run, and who has the log of a pod.

A node is switched off and on by an annotation (see power.py). That order is kept with the node, so one that was off
when the cluster ended is off when it starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from evertrain.embedded.nodestats import StatsUnavailable
from evertrain.embedded.podlogs import LogRequest, LogsUnavailable
from evertrain.embedded.power import (
    CUT,
    JOINED,
    NETWORK_ORDER,
    NETWORK_REFUSED,
    NETWORK_STATE,
    OFF,
    ON,
    ORDER,
    STATE,
    VIRTUAL,
    Cables,
)
from evertrain.embedded.sideprocess import Lost
from evertrain.kube.cache import Cache
from evertrain.kube.port import NODE, ApiError, Kube, NotFound, Object

logger = logging.getLogger(__name__)

READY_PATIENCE = 30.0
END_PATIENCE = 20.0
"""Longer than any pod gets to end itself."""
AGAIN = 1.0


class VirtualNode(Protocol):
    """What is asked of a node."""

    async def run(self) -> None:
        """Until it is cancelled, which is the loss of its power."""
        ...

    async def stop(self) -> None:
        """End the pods in order."""
        ...

    async def plug(self, wanted: str) -> None:
        """Its cables, as an order for the network says. Raises OSError or Lost."""
        ...

    async def stats(self) -> Object:
        """What it counts (see nodestats.py). Raises OSError or Lost."""
        ...

    def log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]: ...


class Fleet:
    """Used as a context: inside of it those nodes run that are not switched off."""

    def __init__(self, kube: Kube, names: Iterable[str], make: Callable[[str], VirtualNode]) -> None:
        self._kube = kube
        self._make = make
        self._objects = Cache(kube, NODE)
        self._changed = {name: asyncio.Event() for name in names}
        self._orders: dict[str, str] = {}
        self._cables: dict[str, str] = {}
        """By node: what is wanted of them, if anything."""
        self._plugged: dict[str, str] = {}
        """What of them is so, for nodes that run."""
        self._refused: dict[str, tuple[str, str]] = {}
        """The last that could not be done, and why."""
        self._running: dict[str, VirtualNode] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    async def __aenter__(self) -> Fleet:
        self._objects.listen(self._look)
        self._tasks.append(asyncio.create_task(self._objects.run()))
        await self._objects.synced.wait()
        await self._remove_others()
        self._tasks += [asyncio.create_task(self._keep(name), name=name) for name in self._changed]
        if not await self._objects.until(self._all_ready, READY_PATIENCE):
            logger.warning("not all nodes are ready after %g s", READY_PATIENCE)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        for changed in self._changed.values():
            changed.set()
        ending = [asyncio.create_task(node.stop()) for node in self._running.values()]
        if ending:
            await asyncio.wait(ending, timeout=END_PATIENCE)
        for task in (*ending, *self._tasks):
            task.cancel()
        await asyncio.gather(*ending, *self._tasks, return_exceptions=True)

    def log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
        """Of a pod on any node, for the API server."""
        name = (pod.get("spec") or {}).get("nodeName") or ""
        node = self._running.get(name)
        return _unavailable(name) if node is None else node.log(pod, request)

    async def stats(self, node: str) -> Object:
        """Of any node, for the API server."""
        running = self._running.get(node)
        if running is None:
            raise StatsUnavailable(f"node {node} does not run")
        try:
            return await running.stats()
        except (OSError, Lost) as error:
            raise StatsUnavailable(f"node {node}: {error}") from None

    async def _remove_others(self) -> None:
        """Nodes of an earlier start with more of them. Their pods are collected then."""
        for item in self._objects:
            name = item["metadata"]["name"]
            ours = _annotation(item, STATE) or (item["metadata"].get("labels") or {}).get(VIRTUAL)
            if name not in self._changed and ours:
                with contextlib.suppress(NotFound):
                    await self._kube.delete(NODE, name)

    def _look(self, before: Object | None, after: Object | None) -> None:
        name = (after or before or {})["metadata"]["name"]
        if name not in self._changed:
            return
        # A node that is off stays off when somebody deletes its object.
        if after is not None:
            self._orders[name] = OFF if _annotation(after, ORDER) == OFF else ON
            wanted = _annotation(after, NETWORK_ORDER)
            self._cables[name] = str(Cables.parse(wanted) or Cables())
        self._changed[name].set()

    def _wanted(self, name: str) -> str:
        """ON or OFF."""
        return self._orders.get(name, ON)

    def _all_ready(self) -> bool:
        return all(
            self._wanted(name) == OFF or self._cables.get(name) == CUT or _is_ready(self._objects.get(name))
            for name in self._changed
        )

    async def _keep(self, name: str) -> None:
        """One node through its ons and offs."""
        changed = self._changed[name]
        while not self._ending:
            if self._wanted(name) == ON:
                await self._run(name)
            if self._ending:
                return
            await self._note(name)
            if self._wanted(name) == OFF:
                changed.clear()
                if self._wanted(name) == OFF and not self._ending:
                    await changed.wait()

    async def _run(self, name: str) -> None:
        """Until the node is switched off or fails."""
        node = self._running[name] = self._make(name)
        running = asyncio.create_task(node.run())
        try:
            while self._wanted(name) == ON:
                changed = self._changed[name]
                changed.clear()
                await self._plug(name, node)
                await self._note(name)
                news = asyncio.create_task(changed.wait())
                await asyncio.wait([running, news], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if running.done():
                    await running
                    if self._ending:
                        return
                    logger.error("node %s has ended by itself; it is started again", name)
                    return
        except Exception:
            logger.exception("node %s has failed; it is started again", name)
            await asyncio.sleep(AGAIN)
        finally:
            running.cancel()
            with contextlib.suppress(BaseException):
                await running
            self._running.pop(name, None)
            self._plugged.pop(name, None)
            self._refused.pop(name, None)

    async def _plug(self, name: str, node: VirtualNode) -> None:
        """Cut the node off, or join it again, if that is wanted."""
        wanted = self._cables.get(name, JOINED)
        if wanted == self._plugged.get(name, JOINED):
            return
        try:
            await node.plug(wanted)
        except (OSError, Lost) as error:
            reason = getattr(error, "strerror", None) or error
            self._refused[name] = wanted, f"{wanted} is not possible: {reason}"
            logger.warning("network of node %s: %s is not possible: %s", name, wanted, reason)
        else:
            self._plugged[name] = wanted
            self._refused.pop(name, None)

    async def _note(self, name: str) -> None:
        """Write down whether the node is on and joined, if that isn't what is written there. A node that is new comes
        later."""
        states = {STATE: ON if name in self._running else OFF, NETWORK_STATE: self._plugged.get(name)}
        refused, states[NETWORK_REFUSED] = self._refused.get(name, ("", None))
        if refused and refused == self._cables.get(name):
            # An order that can't be obeyed doesn't stay, to be obeyed some day when nobody thinks of it any more.
            states[NETWORK_ORDER] = self._plugged.get(name)
        item = self._objects.get(name)
        if item is None or all(_annotation(item, key) == (state or "") for key, state in states.items()):
            return
        try:
            await self._kube.patch(NODE, name, None, {"metadata": {"annotations": states}})
        except (ApiError, OSError) as error:
            logger.warning("whether node %s is on could not be written down: %s", name, error)


async def _unavailable(node: str) -> AsyncIterator[bytes]:
    raise LogsUnavailable(f"node {node} does not run" if node else "the pod is not on a node yet")
    yield b""


def _annotation(item: Object | None, key: str) -> str:
    return str(((item or {"metadata": {}})["metadata"].get("annotations") or {}).get(key, ""))


def _is_ready(item: Object | None) -> bool:
    conditions = ((item or {}).get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
