"""Follows a job to its end: says what happens to it and its pods, and hands on what the pods print."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from evertrain.cli import manifest, printing, running
from evertrain.cli.connection import Connection, Refused, path_of
from evertrain.cli.objects import lines
from evertrain.kube.cache import Cache
from evertrain.kube.port import ASCEND_JOB, EVENT, POD, ApiError, Object

MANY_PODS = 16
"""Of a job with more pods only that of rank 0 is shown as it prints."""
LAST_LINES = 20
LOG_PATIENCE = 10.0
"""How long the last lines of the pods may take after the end of the job."""
WAITING_IS_NEWS = 1.0
FAILED, INVALID = 1, 2


class Follower:
    def __init__(self, kube: Connection, job: Object, document: manifest.Document) -> None:
        self._kube, self._document = kube, document
        metadata = job["metadata"]
        self.name, self.namespace, self._uid = metadata["name"], metadata["namespace"], metadata["uid"]
        self._created = str(metadata.get("creationTimestamp") or "")
        self._began = time.monotonic()
        self._jobs = Cache(kube, ASCEND_JOB, self.namespace, fields=f"metadata.name={self.name}")
        self._pods = Cache(kube, POD, self.namespace, labels=f"training.kubeflow.org/job-name={self.name}")
        self._jobs.listen(self._job_changed)
        self._pods.listen(self._pod_changed)
        self._events = Cache(kube, EVENT, self.namespace)
        self._events.listen(self._event_changed)
        self._said: dict[str, str] = {}
        self._logs: dict[tuple[str, int], asyncio.Task[None]] = {}
        """By uid of the pod and number of its restart."""
        self._deleted = False
        self._later: asyncio.TimerHandle | None = None

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", file=sys.stderr, flush=True)

    def say_how_to_end(self) -> None:
        place = "" if self.namespace == "default" else f" -n {self.namespace}"
        self.say(f"the job goes on; `evertrain delete{place} acjob {self.name}` ends it")

    def state(self) -> str:
        job = self._jobs.get(self.name, self.namespace)
        condition = printing.last_condition(job or {})
        return printing.condition_line(condition) if condition else "without a condition yet"

    async def follow(self) -> int:
        """The exit code."""
        self.say(f"acjob {self.name} created in namespace {self.namespace}")
        caches = [asyncio.create_task(cache.run()) for cache in (self._jobs, self._pods, self._events)]
        try:
            ended = asyncio.create_task(self._jobs.until(self._has_ended, float("inf")))
            await asyncio.wait([ended, *caches], return_when=asyncio.FIRST_COMPLETED)
            for task in (ended, *caches):
                if task.done():
                    task.result()
            return await self._report()
        finally:
            for task in [ended, *caches, *self._logs.values()]:
                task.cancel()
            await asyncio.gather(ended, *caches, *self._logs.values(), return_exceptions=True)

    def _has_ended(self) -> bool:
        job = self._jobs.get(self.name, self.namespace)
        return self._deleted or (job is not None and outcome(job) is not None)

    def _job_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None:
            self._deleted = before is not None and before["metadata"]["uid"] == self._uid
            return
        if self._later is not None:
            self._later.cancel()
        condition = printing.last_condition(after)
        if not condition:
            return
        line = printing.condition_line(condition)
        if str(condition.get("reason", "")).startswith("PodGroup"):
            # It waits for the scheduler: a moment, in most cases, and then not worth a word.
            self._later = asyncio.get_running_loop().call_later(WAITING_IS_NEWS, self._still_waits, line)
        else:
            self._tell("job", line)

    def _still_waits(self, line: str) -> None:
        if not len(self._pods):
            self._tell("job", line)

    def _pod_changed(self, before: Object | None, after: Object | None) -> None:
        pod = after or before
        assert pod is not None
        name = pod["metadata"]["name"]
        self._tell(name, f"pod {name}: {'deleted' if after is None else describe_pod(pod)}")
        container = _main_container(pod)
        started = {"running", "terminated"} & set(container.get("state") or {})
        run = pod["metadata"]["uid"], int(container.get("restartCount") or 0)
        if after is not None and started and run not in self._logs and self._is_shown(pod):
            self._logs[run] = asyncio.create_task(self._show_log(name))

    def _event_changed(self, before: Object | None, after: Object | None) -> None:
        """Warnings about the job's pods and pod group say why it doesn't go on."""
        about = (after or {}).get("involvedObject") or {}
        name = str(about.get("name", ""))
        if after is None or after.get("type") != "Warning" or not name.startswith(f"{self.name}-"):
            return
        if self._old(after):
            return
        subject = f"{about.get('kind', '')} {name}"
        self._tell(f"{subject} {after.get('reason')}", f"{subject}: {after.get('reason')}: {after.get('message')}")

    def _old(self, event: Object) -> bool:
        """Of an earlier job of the same name."""
        return str(event["metadata"].get("creationTimestamp") or "") < self._created

    def _is_shown(self, pod: Object) -> bool:
        few = len(self._pods) <= MANY_PODS
        return few or (pod["metadata"].get("annotations") or {}).get("hccl/rankIndex") == "0"

    def _tell(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self.say(text)

    async def _show_log(self, pod: str) -> None:
        path = path_of(POD, self.namespace, pod, "log")
        try:
            async with self._kube.follow(path, {"follow": "true"}) as pieces:
                async for line in lines(pieces):
                    print(f"[{pod}] {line.decode(errors='replace')}", flush=True)
        except (Refused, OSError) as error:
            self.say(f"the log of pod {pod} can't be followed: {error}")

    async def _report(self) -> int:
        ended = {pod["metadata"]["uid"] for pod in self._pods if pod["status"].get("phase") in ("Succeeded", "Failed")}
        if last := [task for (uid, _), task in self._logs.items() if uid in ended]:
            await asyncio.wait(last, timeout=LOG_PATIENCE)
        if self._deleted:
            self.say(f"acjob {self.name} was deleted")
            return FAILED
        job = self._jobs.get(self.name, self.namespace)
        assert job is not None
        condition = outcome(job)
        assert condition is not None
        if condition["type"] == "Succeeded":
            return 0
        message = str(condition.get("message", ""))
        if condition.get("reason") == "JobValidFailed":
            reason, _, what = message.partition(": ")
            field = manifest.blame(reason, what)
            return running.complain("run", str(self._document.refuse(field, message)), INVALID)
        for pod in self._pods:
            if (pod.get("status") or {}).get("phase") == "Failed":
                await self._show_failure(pod)
        print(f"evertrain run: acjob {self.name} {printing.condition_line(condition)}", file=sys.stderr, flush=True)
        return FAILED

    async def _show_failure(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        print(f"evertrain run: pod {name}: {describe_pod(pod)}; its last lines:", file=sys.stderr)
        try:
            text = await self._kube.log(name, self.namespace, tail=LAST_LINES)
        except (ApiError, OSError) as error:
            text = f"(not to be had: {error})"
        for line in text.splitlines() or ["(none)"]:
            print(f"    {line}", file=sys.stderr)


def outcome(job: Object) -> Object | None:
    """The condition with which a job ended; None as long as it goes on."""
    for condition in reversed((job.get("status") or {}).get("conditions") or []):
        if condition.get("type") in ("Succeeded", "Failed") and condition.get("status") == "True":
            found: Object = condition
            return found
    return None


def _main_container(pod: Object) -> Object:
    """The status of container `ascend`, else of the first one."""
    found: list[Object] = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return next((each for each in found if each.get("name") == "ascend"), found[0])


def describe_pod(pod: Object) -> str:
    """The phase, where it runs, and what explains it."""
    status: dict[str, Any] = pod.get("status") or {}
    parts = [str(status.get("phase") or "Pending")]
    if node := (pod.get("spec") or {}).get("nodeName"):
        parts.append(f"on {node}")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            parts.append(f"({condition.get('reason')}: {condition.get('message')})")
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        if ended := state.get("terminated"):
            if ended.get("exitCode") or ended.get("reason") not in (None, "Completed"):
                signal = f", signal {ended['signal']}" if ended.get("signal") else ""
                parts.append(f"({ended.get('reason')}, exit code {ended.get('exitCode')}{signal})")
        elif (waiting := state.get("waiting")) and waiting.get("message"):
            parts.append(f"({waiting.get('reason')}: {waiting['message']})")
        if container.get("restartCount"):
            parts.append(f"restarted {container['restartCount']}x")
    if status.get("reason"):
        parts.append(f"({status['reason']}: {status.get('message', '')})")
    return " ".join(parts)
