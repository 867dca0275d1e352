"""A virtual node: registers itself, renews its Lease, runs the pods that are bound to it.

When `run()` is cancelled the node drops dead: all its processes die at once and nobody says goodbye, as with a machine
that has lost its power. `stop()` is the orderly way. Either way the next `run()` finds pods in the API that this node
doesn't run: they are lost, and go the way of their restartPolicy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.embedded.network.fabric import Fabric
from evertrain.embedded.node import containers, logs, status
from evertrain.embedded.node.config import NodeConfig, base_environment, capacity, node_object, node_status
from evertrain.embedded.node.engine import Engine
from evertrain.embedded.node.lifecycle import Running, Waiting
from evertrain.embedded.node.machine import Machine
from evertrain.embedded.node.pod import PodWorker
from evertrain.embedded.node.reach import Reach
from evertrain.embedded.nodestats import summary
from evertrain.embedded.podlogs import LogRequest, LogsUnavailable
from evertrain.embedded.power import CUT, JOINED, NICS, SHARED, Cables
from evertrain.embedded.recorder import NORMAL, rfc3339_micro
from evertrain.kube.port import LEASE, NODE, POD, AlreadyExists, ApiError, Conflict, NotFound, Object

logger = logging.getLogger(__name__)

LEASES = "kube-node-lease"
FIRST_RETRY, MAX_RETRY = 0.2, 5.0
STATUS_SECONDS = 300.0
STOP_GRACE = 5.0


class VirtualNode:
    def __init__(
        self,
        machine: Machine,
        config: NodeConfig,
        daemons: Iterable[Callable[[], Coroutine[Any, Any, None]]] = (),
        reach: Reach | None = None,
    ) -> None:
        """`daemons` run on the node for as long as it has power, as those of a DaemonSet would; they never end.

        `reach`: their way to the API server, too."""
        self.machine = machine
        self._daemons = list(daemons)
        self.reach = reach or Reach()
        self.kube = self.reach.over(machine.kube)
        self.config = config
        self.name = config.name
        self.address = config.plan.host(config.index)
        self.allocatable = capacity(config)
        self.base_environment = base_environment(config)
        self.folder = machine.folder / config.name
        self.fabric = machine.fabric if config.isolate else None
        self.engine = Engine(self.folder, config.isolate, self.fabric.users if self.fabric is not None else -1)
        self.lookup = machine.lookup
        self._workers: dict[str, PodWorker] = {}
        self._finished: set[str] = set()
        """Pods that ran here to their end, until their objects are gone: the cache may show what they were before."""
        self._cables = JOINED
        self._has_network = False
        self._finalizing: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._status_wanted = asyncio.Event()
        self._stopping = False
        self._stopped = asyncio.Event()
        self._told_images = False

    def workers(self) -> Iterable[PodWorker]:
        return list(self._workers.values())

    def pod_folder(self, uid: str) -> Path:
        return self.folder / "pods" / uid

    async def run(self) -> None:
        """Until it is cancelled (drops dead) or stopped."""
        try:
            await self.machine.ready()
            if self.fabric is not None:
                await self.fabric.add_node(self.config.index)
                self._has_network = True
                try:
                    await self._plug(self.fabric)
                except OSError as error:  # the kernel is another one than when it was ordered
                    logger.warning("node %s: not %s: %s", self.name, self._cables, error.strerror or error)
            await self._insist(self._register)
            pods = self.machine.attach(self)
            self._clear_folders({pod["metadata"]["uid"] for pod in pods})
            for pod in pods:
                self.machine.hand_over(self, pod, pod)
            for daemon in self._daemons:
                self._task(daemon())
            keeping = [asyncio.create_task(work) for work in (self._heartbeat(), self._keep_status())]
            self._tasks.update(keeping)
            stopped = asyncio.create_task(self._stopped.wait())
            self._tasks.add(stopped)
            done, _ = await asyncio.wait([*keeping, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.machine.detach(self)
            self.engine.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._stopped.set()
            workers, self._workers = self.workers(), {}
            for worker in workers:
                for container in worker.state.containers:
                    logs.wake(worker.log_folder(container.name))

    async def stop(self, grace: float = STOP_GRACE) -> None:
        """Asks the processes of all pods to end, ends them after the grace period, and lets `run()` return."""
        self._stopping = True
        waiting = [asyncio.create_task(worker.over.wait()) for worker in self.workers()]
        for worker in self.workers():
            worker.end(grace)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=grace + 2)
            for task in late:
                task.cancel()
        self._stopped.set()

    async def plug(self, wanted: str) -> None:
        """CUT: nothing goes in or out any more, neither packets of pods nor requests of the node; what runs, runs on.
        Or something is wrong with its NICs, of which the node's own requests take no notice. JOINED: it catches up with
        what has happened."""
        if self.fabric is None:
            raise OSError(SHARED)
        self._cables = wanted
        if self._has_network:
            await self._plug(self.fabric)
        was_cut, self.reach.cut = self.reach.cut, wanted == CUT
        if not was_cut or self.reach.cut or not self._has_network:
            return
        there = {pod["metadata"]["uid"]: pod for pod in self.machine.pods.select("node", self.name)}
        for uid in {*self._workers, *self._finished, *there}:
            self.pod_changed(uid, there.get(uid))

    async def _plug(self, fabric: Fabric) -> None:
        cables = Cables.parse(self._cables) or Cables()
        pulled = [NICS.index(nic) for nic in sorted(cables.pulled)]
        delay, loss = cables.delay / 1000, cables.loss / 100
        await fabric.plug(self.config.index, joined=not cables.cut, pulled=pulled, delay=delay, loss=loss)

    def complain(self, message: str, *arguments: object) -> None:
        """Of a request of the node that failed. While it is cut off, that is no news."""
        if not self.reach.cut:
            logger.warning(message, *arguments)

    async def stats(self) -> Object:
        """What its NICs count. Raises OSError or Lost."""
        nics = await self.fabric.traffic(self.config.index) if self.fabric is not None else {}
        return summary(self.name, rfc3339_micro(time.time()), nics)

    # --- the node itself

    async def _register(self) -> None:
        item = node_object(self.config)
        try:
            node = await self.kube.create(NODE, item)
        except AlreadyExists:
            metadata = {"labels": item["metadata"]["labels"], "annotations": item["metadata"]["annotations"]}
            node = await self.kube.patch(NODE, self.name, None, {"metadata": metadata})
        wanted = node_status(self.config, time.time(), node.get("status"))
        await self.kube.patch(NODE, self.name, None, {"status": wanted}, status=True)
        await self._renew()

    async def _renew(self) -> None:
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": max(1, round(self.config.lease_seconds)),
            "renewTime": rfc3339_micro(time.time()),
        }
        try:
            await self.kube.patch(LEASE, self.name, LEASES, {"spec": spec})
        except NotFound:
            lease = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"name": self.name, "namespace": LEASES},
                "spec": spec,
            }
            await self.kube.create(LEASE, lease)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease_seconds / 4)
            await self._insist(self._renew)

    def own_object_changed(self, node: Object | None) -> None:
        conditions = ((node or {}).get("status") or {}).get("conditions") or []
        ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
        if not ready:
            self._status_wanted.set()

    async def _keep_status(self) -> None:
        """Says that the node is ready, when somebody thinks that it isn't and once in a while."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(STATUS_SECONDS):
                    await self._status_wanted.wait()
            self._status_wanted.clear()
            await self._insist(self._register)

    async def _insist(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Until it works. A refusal may be over with the next try."""
        delay = FIRST_RETRY
        while True:
            try:
                await work()
                return
            except (ApiError, OSError, TimeoutError) as error:
                self.complain("node %s: %s", self.name, error)
            await asyncio.sleep(delay)
            delay = min(MAX_RETRY, delay * 2)

    # --- pods

    def pod_changed(self, uid: str, pod: Object | None) -> None:
        if self.reach.cut:
            return  # it doesn't hear of it before it is joined again
        worker = self._workers.get(uid)
        if pod is None:
            self._finished.discard(uid)
            if worker is not None:
                worker.vanished()
            else:
                self._task(self._forget(uid))
        elif worker is not None:
            worker.update(pod)
        elif self._stopping:
            return
        elif uid in self._finished or status.finished(pod):
            if pod["metadata"].get("deletionTimestamp"):
                self._finalize(pod)
        else:
            self._tell_about_images(pod)
            worker = self._workers[uid] = PodWorker(self, pod)
            self._task(self._run(worker))

    async def _run(self, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:
            logger.exception("pod %s/%s on %s", worker.namespace, worker.name, self.name)
            await asyncio.sleep(1)
            failed = True
        else:
            failed = False
        finally:
            worker.over.set()
        self._workers.pop(worker.uid, None)
        current = self.machine.pods.get(worker.name, worker.namespace)
        if current is None or current["metadata"]["uid"] != worker.uid:
            await self._forget(worker.uid)
            return
        if not failed and not self._stopping:
            self._finished.add(worker.uid)
        self.pod_changed(worker.uid, current)

    def _finalize(self, pod: Object) -> None:
        """Nothing of the pod runs any more: its object may go."""
        uid = pod["metadata"]["uid"]
        if uid not in self._finalizing:
            self._finalizing.add(uid)
            self._task(self._delete(pod))

    async def _delete(self, pod: Object) -> None:
        metadata = pod["metadata"]
        delay = FIRST_RETRY
        try:
            while True:
                try:
                    await self.kube.delete(POD, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace=0)
                    return
                except (NotFound, Conflict):
                    return
                except (ApiError, OSError, TimeoutError) as error:
                    self.complain("removing pod %s: %s", metadata["name"], error)
                await asyncio.sleep(delay)
                delay = min(MAX_RETRY, delay * 2)
        finally:
            self._finalizing.discard(metadata["uid"])

    async def _forget(self, uid: str) -> None:
        self._finished.discard(uid)
        await asyncio.to_thread(shutil.rmtree, self.pod_folder(uid), ignore_errors=True)

    def _clear_folders(self, known: set[str]) -> None:
        folder = self.folder / "pods"
        if folder.is_dir():
            for entry in folder.iterdir():
                if entry.name not in known:
                    shutil.rmtree(entry, ignore_errors=True)

    def _tell_about_images(self, pod: Object) -> None:
        images = [c.get("image") for c in (pod.get("spec") or {}).get("containers") or [] if c.get("image")]
        node = self.machine.nodes.get(self.name)
        if images and node is not None and not self._told_images:
            self._told_images = True
            message = "Pods are processes of this machine here: container images are not used"
            about = {**node, "kind": "Node", "apiVersion": "v1"}
            self.machine.recorder.tell(about, NORMAL, "ImagesIgnored", message, self.name)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- logs

    async def log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
        """Pieces of the log of a container. Raises LogsUnavailable before the first one."""
        uid, name = pod["metadata"]["uid"], request.container
        folder = self.pod_folder(uid) / "logs" / name
        attempt = self._attempt(pod, name)
        if request.previous:
            attempt -= 1
            if attempt < 0 or not (folder / containers.log_name(attempt)).exists():
                raise LogsUnavailable(
                    f'previous terminated container "{name}" in pod "{pod["metadata"]["name"]}" not found'
                )
        if attempt < 0 or not folder.is_dir():
            reason = self._waiting_reason(uid, name)
            raise LogsUnavailable(
                f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: {reason}'
            )
        chosen = logs.Filter(request.since, request.timestamps, request.limit)
        if request.follow:
            ended = partial(self._has_ended, uid, name, attempt)
            async for piece in logs.follow(self.machine.watcher, folder, attempt, request.tail, chosen, ended):
                yield piece
            return
        for piece in logs.pieces(logs.last(logs.entries(logs.opened(folder, attempt)), request.tail), chosen):
            yield piece
            await asyncio.sleep(0)

    def _attempt(self, pod: Object, container: str) -> int:
        """The number of the newest run of a container; -1 if it has not run."""
        worker = self._workers.get(pod["metadata"]["uid"])
        if worker is not None:
            return max((c.attempts for c in worker.state.containers if c.name == container), default=0) - 1
        run = status.restore(pod, now=0.0, base_backoff=0.0)
        return max((c.attempts for c in run.containers if c.name == container), default=0) - 1

    def _has_ended(self, uid: str, container: str, attempt: int) -> bool:
        worker = self._workers.get(uid)
        return worker is None or not any(
            c.name == container and isinstance(c.state, Running) and c.attempts - 1 == attempt
            for c in worker.state.containers
        )

    def _waiting_reason(self, uid: str, container: str) -> str:
        worker = self._workers.get(uid)
        for c in worker.state.containers if worker is not None else ():
            if c.name == container and isinstance(c.state, Waiting):
                return c.state.reason
        return "ContainerCreating"
