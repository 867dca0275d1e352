"""One pod on a node: carries out what `lifecycle` decides, and reports what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain import aio
from evertrain.embedded.node import addresses, containers, lifecycle, logs, status, volumes
from evertrain.embedded.node.engine import Link
from evertrain.embedded.node.environment import ConfigError, Place
from evertrain.embedded.node.lifecycle import ContainerRun, Finish, Kill, Running, Start, Stop, Terminated, Waiting
from evertrain.embedded.node.probes import Prober
from evertrain.embedded.node.runtime import record
from evertrain.embedded.recorder import NORMAL, WARNING
from evertrain.embedded.sideprocess import Lost
from evertrain.kube.port import POD, ApiError, Conflict, NotFound, Object

if TYPE_CHECKING:
    from evertrain.embedded.node.node import VirtualNode

logger = logging.getLogger(__name__)

START_PATIENCE = 60.0
FIRST_RETRY, MAX_RETRY = 0.5, 30.0
START_ERROR_CODE = 128


class PodWorker:
    """`run()` is the life of the pod on its node; it ends when nothing of the pod runs any more."""

    def __init__(self, node: VirtualNode, pod: Object) -> None:
        self._node = node
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.name: str = pod["metadata"]["name"]
        self.namespace: str = pod["metadata"]["namespace"]
        self.folder: Path = node.pod_folder(self.uid)
        now = time.time()
        self.state = status.restore(pod, now=now, base_backoff=node.config.backoff, records=self._record)
        self._place = Place(node.name, node.address, "", node.allocatable)
        self._volumes: volumes.Prepared | None = None
        self._volumes_retry = FIRST_RETRY
        self._volumes_at = 0.0
        self._volume_complaint = ""
        self._network = -1
        """Descriptor of the pod's network namespace; -1 if it is in the machine's."""
        self._links: dict[str, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._executions: dict[str, asyncio.Future[int]] = {}
        self._written: Object = dict(pod.get("status") or {})
        self._written_as = _version(pod)
        self._changed = asyncio.Event()
        self.over = asyncio.Event()
        self._finished = False
        """The pod has come to its end; one whose node ends before it keeps its volumes."""
        self._gone = False
        """The object is no more: nobody is interested in the pod's status."""

    def _record(self, container: str, attempt: int) -> Object | None:
        return record.read(self.log_folder(container), containers.log_name(attempt))

    # --- what the node tells

    def update(self, pod: Object) -> None:
        before, self.pod = self.pod, pod
        if before["metadata"].get("annotations") != pod["metadata"].get("annotations") or (
            before["metadata"].get("labels") != pod["metadata"].get("labels")
        ):
            self.refresh()
        if _version(pod) > self._written_as and status.differs(pod.get("status") or {}, self._written):
            self._written = dict(pod.get("status") or {})  # somebody has written something else: it is put right
        self._changed.set()

    def vanished(self) -> None:
        """The object is gone without the node having agreed: by force."""
        self._gone = True
        self._changed.set()

    def refresh(self) -> None:
        """A ConfigMap or Secret of the pod has changed, or appeared."""
        if self._volumes is not None:
            volumes.refresh(self.pod, self.folder / "volumes", self._place, self._node.lookup)
        self._volumes_at = 0.0
        for container in self.state.containers:
            if isinstance(container.state, Waiting) and container.failures:
                container.not_before = 0.0
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    def end(self, grace: float) -> None:
        """The whole node ends in order; the pod doesn't come back by itself."""
        self.state.ending = lifecycle.Ending(
            lifecycle.SHUTDOWN, "", time.time(), min(grace, status.grace_period(self.pod))
        )
        self._changed.set()

    @property
    def _shut_down(self) -> bool:
        return self.state.ending is not None and self.state.ending.reason == lifecycle.SHUTDOWN

    # --- life

    async def run(self) -> None:
        try:
            await self._live()
        finally:
            for task in self._tasks:
                task.cancel()
            for link in self._links.values():
                self._node.engine.forget(link)
            self._links.clear()
            await self._leave_network()
            if self._finished:
                await self._drop_volumes()

    async def _live(self) -> None:
        while True:
            self._changed.clear()
            now = time.time()
            self._look_for_end(now)
            lifecycle.note_deadline(self.state, status.grace_period(self.pod), now)
            will_run = self.state.ending is None and not lifecycle.settled(self.state)
            delay = await self._prepare(now) if will_run and self._volumes is None else 0.0
            if will_run and self._volumes is None:
                await self._report()
                deadline = float("inf") if self.state.deadline is None else self.state.start_time + self.state.deadline
                await self._sleep(min(now + delay, deadline))
                continue
            plan = lifecycle.next_steps(self.state, status.grace_period(self.pod), now)
            for step in plan.steps:
                await self._do(step)
            for container in self.state.containers:
                lifecycle.note_backoff(self.state, container, f"{self.name}_{self.namespace}({self.uid})", time.time())
            if any(isinstance(step, Finish) for step in plan.steps):
                await self._leave_network()
                await self._report(insist=True)
                self._finished = not self._shut_down
                return
            if any(not isinstance(step, Finish) for step in plan.steps):
                self._changed.set()  # what was done may be reason for more
            if not self._changed.is_set() or plan.steps:
                await self._report()
            await self._sleep(plan.wake)

    async def _sleep(self, until: float | None) -> None:
        try:
            async with aio.timeout(None if until is None else max(0.0, until - time.time())):
                await self._changed.wait()
        except TimeoutError:
            return

    def _look_for_end(self, now: float) -> None:
        if self._gone:
            self.state.ending = lifecycle.Ending(lifecycle.DELETED, "", now, 0.0)
            return
        wish = status.ending(self.pod, now)
        if wish is None:
            return
        current = self.state.ending
        if current is None or current.reason != lifecycle.DELETED:
            self.state.ending = wish
            for container in self.state.containers:
                if isinstance(container.state, Running):
                    self._tell(NORMAL, "Killing", f"Stopping container {container.name}")
        elif wish.grace < current.grace:
            self.state.ending = lifecycle.Ending(current.reason, "", current.since, wish.grace)

    def _settle_address(self) -> None:
        spec = self.pod.get("spec") or {}
        if spec.get("hostNetwork"):
            address = self._node.address
        else:
            wishes = addresses.of_services(self.pod, self._node.machine.services)
            wishes += [str((self.pod.get("status") or {}).get("podIP") or "")]
            address = self._node.machine.addresses.take(self.uid, self._node.config.index, wishes)
        self._place = Place(self._node.name, self._node.address, address, self._node.allocatable)

    async def _join_network(self) -> None:
        fabric, index = self._node.fabric, self._node.config.index
        if fabric is None or self._network >= 0:
            return
        if (self.pod.get("spec") or {}).get("hostNetwork"):
            self._network = await fabric.enter_node(index)
            return
        own = self._node.machine.addresses.own(self.uid, index)
        self._network = await fabric.add_pod(self.uid, index, list(dict.fromkeys((own, self._place.pod_ip))))

    async def _leave_network(self) -> None:
        """Addresses are free again, and what is in the network alone is gone."""
        network, self._network = self._network, -1
        if network >= 0:
            os.close(network)
        if self._node.fabric is not None:
            with contextlib.suppress(OSError, Lost):
                await self._node.fabric.forget_pod(self.uid)
        self._node.machine.addresses.release(self.uid)

    async def connect(self, host: str, port: int, ssl: Any = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To a server in the pod. Raises OSError."""
        if self._node.fabric is None:
            return await asyncio.open_connection(host, port, ssl=ssl)
        try:
            made = await self._node.fabric.socket_of(self._node.config.index)
        except Lost as error:
            raise OSError(str(error)) from None
        try:
            await asyncio.get_running_loop().sock_connect(made, (host, port))
            return await asyncio.open_connection(sock=made, ssl=ssl, server_hostname=host if ssl else None)
        except BaseException:
            made.close()
            raise

    async def _prepare(self, now: float) -> float:
        """Address and volumes, once; how long to wait if they are not ready."""
        if now < self._volumes_at:
            return self._volumes_at - now
        folder = self.folder / "volumes"
        reason = "FailedCreatePodSandBox"
        try:
            if not self._place.pod_ip:
                self._settle_address()
            await self._join_network()
            reason = "FailedMount"
            folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "root").mkdir(exist_ok=True)
            prepared = volumes.prepare(self.pod, folder, self._place, self._node.lookup, self._node.config.host_paths)
            for tmpfs in prepared.tmpfs:
                await self._mount_memory(tmpfs)
            services = list(self._node.machine.services)
            (self.folder / "hosts").write_text(addresses.hosts(self.pod, self._place.pod_ip, services))
            if self._network >= 0:
                (self.folder / "resolv.conf").write_text(containers.NO_NAME_SERVER)
        except (volumes.VolumeError, addresses.Exhausted, OSError, Lost) as error:
            if str(error) != self._volume_complaint:
                self._volume_complaint = str(error)
                self._tell(WARNING, reason, str(error))
            delay, self._volumes_retry = self._volumes_retry, min(MAX_RETRY, self._volumes_retry * 2)
            self._volumes_at = now + delay
            return delay
        for note in prepared.notes:
            self._tell(NORMAL, "HostPathMissing", note)
        self._volumes = prepared
        return 0.0

    async def _mount_memory(self, tmpfs: volumes.Tmpfs) -> None:
        try:
            await self._node.engine.request({"do": "tmpfs", "path": str(tmpfs.path), "options": tmpfs.options})
        except OSError as error:
            # It stays a directory on the disk, which does as well.
            logger.info("pod %s/%s: no memory volume: %s", self.namespace, self.name, error)

    async def _drop_volumes(self) -> None:
        if self._volumes is not None and self._node.engine.runs:
            for tmpfs in self._volumes.tmpfs:
                with contextlib.suppress(OSError, Lost):
                    await self._node.engine.request({"do": "unmount", "path": str(tmpfs.path)})
        self._volumes = None
        await asyncio.to_thread(self._remove_all_but_logs)

    def _remove_all_but_logs(self) -> None:
        for name in ("volumes", "root"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in containers.NAME_FILES:
            (self.folder / name).unlink(missing_ok=True)

    # --- steps

    async def _do(self, step: lifecycle.Step) -> None:
        match step:
            case Start():
                await self._start(self.state.one(step.container))
            case Stop():
                container = self.state.one(step.container)
                container.stop_asked = time.time()
                self._task(self._stop(container))
            case Kill():
                container = self.state.one(step.container)
                container.killed = True
                if link := self._links.get(container.name):
                    link.send({"do": "kill"})

    async def _stop(self, container: ContainerRun) -> None:
        hook = ((container.spec.get("lifecycle") or {}).get("preStop") or {}).get("exec")
        if hook:
            await self.execute(container.name, [str(word) for word in hook.get("command") or []])
        if link := self._links.get(container.name):
            link.send({"do": "stop"})

    async def _start(self, container: ContainerRun) -> None:
        if isinstance(container.state, Terminated):
            container.last = container.state
        container.starting = True
        link: Link | None = None
        try:
            assert self._volumes is not None
            await self._node.engine.ready()
            spec = containers.specification(self._node, self.pod, container, self._place, self._volumes, self.folder)
            link = await self._node.engine.spawn(self._network)
            spec["no_mounts"] = self._node.engine.no_mounts
            link.send(spec)
            async with aio.timeout(START_PATIENCE):
                answer = await link.receive()
        except ConfigError as error:
            self._refused(container, "CreateContainerConfigError", str(error))
        except (OSError, Lost, TimeoutError) as error:
            self._refused(container, "CreateContainerError", str(error) or "the container did not start in time")
        else:
            self._note_start(container, link, answer or {"is": "refused", "message": "its init process has ended"})
            link = None
        finally:
            container.starting = False
            if link is not None:
                self._node.engine.forget(link)

    def _note_start(self, container: ContainerRun, link: Link, answer: dict[str, Any]) -> None:
        now = time.time()
        name = container.name
        if answer["is"] == "started":
            container.attempts += 1
            container.failures = 0
            container.state = Running(now, int(answer["pid"]))
            self._links[name] = link
            prober = Prober(self, container, self._place.pod_ip)
            container.ready = not prober.delays_ready
            self._task(self._watch(container, link))
            if prober.wanted:
                self._task(prober.run())
            self._tell(NORMAL, "Started", f"Started container {name}")
            hook = ((container.spec.get("lifecycle") or {}).get("postStart") or {}).get("exec")
            if hook:
                self._task(self._after_start(name, [str(word) for word in hook.get("command") or []]))
            return
        self._node.engine.forget(link)
        if answer.get("reason") == "StartError":
            container.attempts += 1
            message = str(answer.get("message") or "")
            self._tell(WARNING, "Failed", f"Error: {message}")
            ended = Terminated(START_ERROR_CODE, now, now, reason="StartError", message=message)
            lifecycle.note_exit(self.state, container, ended)
        else:
            self._refused(container, "CreateContainerError", str(answer.get("message") or ""))

    async def _after_start(self, name: str, argv: list[str]) -> None:
        code = await self.execute(name, argv)
        if code != 0 and name in self._links:
            self._tell(WARNING, "FailedPostStartHook", f"PostStartHook failed: exit code {code}")
            self.state.one(name).unhealthy = "FailedPostStartHook"
            self._changed.set()

    def _refused(self, container: ContainerRun, reason: str, message: str) -> None:
        """It will be tried again: what is missing may come."""
        before = container.state
        container.failures += 1
        container.not_before = time.time() + min(MAX_RETRY, FIRST_RETRY * 2 ** min(container.failures - 1, 10))
        container.state = Waiting(reason, message)
        if container.state != before:
            self._tell(WARNING, "Failed", f"Error: {message}")

    async def _watch(self, container: ContainerRun, link: Link) -> None:
        """Until the container has ended."""
        started = container.state
        assert isinstance(started, Running)
        code, number, message = 137, 9, "the container's init process was killed"
        while (news := await link.receive()) is not None:
            if news["is"] == "exited":
                code, number, message = int(news["code"]), int(news["signal"]), ""
                break
            if news["is"] == "done" and (waiting := self._executions.pop(str(news["id"]), None)) and not waiting.done():
                waiting.set_result(int(news["code"]))
        self._node.engine.forget(link)
        self._links.pop(container.name, None)
        for execution, result in self._executions.items():
            if execution.startswith(f"{container.name}/") and not result.done():
                result.set_result(-1)
        ended = Terminated(code, started.since, time.time(), signal=number, message=message)
        lifecycle.note_exit(self.state, container, ended)
        logs.wake(self.log_folder(container.name))
        if lifecycle.restarts(self.state, container) and container.not_before > time.time():
            full_name = f"{self.name}_{self.namespace}({self.uid})"
            self._tell(WARNING, "BackOff", f"Back-off restarting failed container {container.name} in pod {full_name}")
        self._changed.set()

    async def execute(self, container: str, argv: list[str]) -> int:
        """Runs a program in a container; its exit code, or -1 if the container ended first. It ends with the call."""
        link = self._links.get(container)
        if link is None or not argv:
            return -1
        number = f"{container}/{time.monotonic_ns()}"
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._executions[number] = waiting
        link.send({"do": "exec", "id": number, "argv": argv})
        try:
            return await waiting
        finally:
            self._executions.pop(number, None)
            if waiting.cancelled():
                link.send({"do": "end", "id": number})

    # --- reports

    def log_folder(self, container: str) -> Path:
        return containers.log_folder(self.folder, container)

    def unhealthy(self, container: ContainerRun, message: str) -> None:
        self._tell(WARNING, "Unhealthy", message)

    def tell_restart(self, container: ContainerRun) -> None:
        self._tell(NORMAL, "Killing", f"Container {container.name} failed liveness probe, will be restarted")

    def _tell(self, type: str, reason: str, message: str) -> None:
        about = {**self.pod, "kind": "Pod", "apiVersion": "v1"}
        self._node.machine.recorder.tell(about, type, reason, message, self._node.name)

    async def _report(self, insist: bool = False) -> None:
        """Writes the status if it has changed; what can't be written now is written with the next change."""
        delay = FIRST_RETRY
        while not self._gone and not self._shut_down:
            wanted = status.build(
                self.pod,
                self.state,
                host_ip=self._node.address,
                pod_ip=self._place.pod_ip,
                now=time.time(),
                before=self._written,
            )
            if all(self._written.get(key) == value for key, value in wanted.items()):
                return
            patch: Object = {"metadata": {"uid": self.uid}, "status": wanted}
            try:
                done = await self._node.kube.patch(POD, self.name, self.namespace, patch, status=True)
                self._written, self._written_as = wanted, _version(done)
                return
            except NotFound:
                self._gone = True
                return
            except (ApiError, OSError, TimeoutError) as error:
                if isinstance(error, Conflict):
                    self._gone = True  # another pod of the same name
                    return
                self._node.complain("status of pod %s/%s: %s", self.namespace, self.name, error)
                if not insist:
                    asyncio.get_running_loop().call_later(delay, self._changed.set)
                    return
                await asyncio.sleep(delay)
                delay = min(MAX_RETRY, delay * 2)

    def _task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _version(pod: Object) -> int:
    """Of the embedded API server, whose versions are numbers that grow."""
    return int(pod["metadata"].get("resourceVersion") or 0)
