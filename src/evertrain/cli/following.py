"""Follows a job to its end: says what happens to it and its pods, and hands on what the pods print."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque

from evertrain import aio
from evertrain.cli import manifest, printing, running
from evertrain.cli.connection import Connection, path_of
from evertrain.cli.objects import lines
from evertrain.cli.pods import describe_pod, main_container, main_status, obstacle, together
from evertrain.cli.running import CommandError
from evertrain.kube.cache import Cache
from evertrain.kube.port import ASCEND_JOB, EVENT, POD, ApiError, Object

MANY_PODS = 16
"""Of a job with more pods only that of rank 0 is shown as it prints."""
LAST_LINES = 20
LOG_PATIENCE = 10.0
"""How long the last lines of the pods may take after the end of the job."""
WAITING_IS_NEWS = 1.0
STUCK = 20.0
"""With none of its pods running and no news for so long, a job that has a reason to wait won't start by itself."""
ASK_EVERY, SILENCE = 2.0, 20.0
"""How often the cluster is asked whether it is there, and how long it may not be: it may be started again."""
FAILED, INVALID = 1, 2


class Follower:
    command = "run"
    """Who complains."""

    def __init__(self, kube: Connection, job: Object, document: manifest.Document, *, alone: bool = False) -> None:
        """`alone`: the cluster is there for this job, nobody else will change anything on it."""
        self._kube, self._document, self._alone = kube, document, alone
        metadata = job["metadata"]
        self.name, self.namespace, self._uid = metadata["name"], metadata["namespace"], metadata["uid"]
        self._began = time.monotonic()
        self._selector = f"training.kubeflow.org/job-name={self.name}"
        self._jobs = Cache(kube, ASCEND_JOB, self.namespace, fields=f"metadata.name={self.name}")
        self._pods = Cache(kube, POD, self.namespace, labels=self._selector)
        self._jobs.listen(self._job_changed)
        self._pods.listen(self._pod_changed)
        self._events = Cache(kube, EVENT, self.namespace)
        self._events.listen(self._event_changed)
        self._outcome: Object | None = None
        self._said: dict[str, str] = {}
        self._news = asyncio.Event()
        self._warnings: dict[str, str] = {}
        """The last one, by uid of the object."""
        self._failures: dict[str, Object] = {}
        """Pods that have failed, by name, also those that are gone by now."""
        self._tails: dict[str, deque[str]] = {}
        """The last lines of each pod that is shown."""
        self._logs: dict[tuple[str, int], asyncio.Task[None]] = {}
        """By uid of the pod and number of its restart."""
        self._later: asyncio.TimerHandle | None = None

    def say(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the job goes on
            print(f"{time.monotonic() - self._began:7.1f} s  {text}", file=sys.stderr, flush=True)

    def hand_on(self, pod: str, line: str) -> None:
        """What a pod has printed."""
        print(f"[{pod}] {line}", flush=True)

    def say_how_to_end(self) -> None:
        place = "" if self.namespace == "default" else f" -n {self.namespace}"
        self.say(f"the job goes on; `evertrain delete{place} acjob {self.name}` ends it")

    def state(self) -> str:
        """What it waits for, else how it is."""
        if found := self._obstacles():
            return found
        condition = printing.last_condition(self._jobs.get(self.name, self.namespace) or {})
        pods = self._own_pods()
        if pods and (not condition or _waits_for_gang(condition)):
            return together([(pod["metadata"]["name"], describe_pod(pod)) for pod in pods])
        return printing.condition_line(condition) if condition else "without a condition yet"

    async def follow(self) -> int:
        """The exit code."""
        self.say(f"acjob {self.name} created in namespace {self.namespace}")
        ended = asyncio.create_task(self._jobs.until(self._has_ended, None))
        stuck = asyncio.create_task(self._until_stuck())
        work = [asyncio.create_task(cache.run()) for cache in (self._jobs, self._pods, self._events)]
        work.append(asyncio.create_task(self._keep_asking()))
        try:
            await asyncio.wait([ended, stuck, *work], return_when=asyncio.FIRST_COMPLETED)
            for task in (ended, stuck, *work):
                if task.done():
                    task.result()
            if not ended.done():
                return running.complain(self.command, f"acjob {self.name} can't go on: {self._obstacles()}", FAILED)
            return await self._report()
        finally:
            tasks = [ended, stuck, *work, *self._logs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_asking(self) -> None:
        """Raises when the cluster is gone. The caches alone would wait for it without end."""
        silent_since = None
        while True:
            await asyncio.sleep(ASK_EVERY)
            try:
                await self._kube.ask("GET", "/version")
            except (ApiError, OSError) as error:
                if silent_since is None:
                    silent_since = time.monotonic()
                    self.say(f"the cluster doesn't answer ({error}); waiting {SILENCE:g} s for it")
                elif time.monotonic() - silent_since > SILENCE:
                    raise CommandError(f"the cluster is gone, and what became of the job is unknown: {error}") from None
                continue
            if silent_since is not None:
                silent_since = None
                self.say("the cluster answers again")

    async def _until_stuck(self) -> None:
        """Ends if the job will never start. Where others may help it, that is only said."""
        while True:
            self._news.clear()
            waits = self._obstacles() and not any(_runs(pod) for pod in self._own_pods())
            try:
                async with aio.timeout(STUCK if waits else None):
                    await self._news.wait()
            except TimeoutError:
                if self._alone:
                    return
                self.say(f"none of its pods runs: {self._obstacles()}")
                self.say_how_to_end()
                await self._news.wait()

    def _has_ended(self) -> bool:
        return self._outcome is not None or (self._jobs.synced.is_set() and self._job() is None)

    def _job(self) -> Object | None:
        """None once it is deleted, even if there is another one of that name."""
        job = self._jobs.get(self.name, self.namespace)
        return job if job is not None and job["metadata"]["uid"] == self._uid else None

    def _own_pods(self) -> list[Object]:
        return [pod for pod in self._pods if self._owns(pod)]

    def _owns(self, pod: Object) -> bool:
        """Not those that an earlier job of the same name has left."""
        return any(owner.get("uid") == self._uid for owner in pod["metadata"].get("ownerReferences") or [])

    def _obstacles(self) -> str:
        pods = self._own_pods()
        found = [
            (pod["metadata"]["name"], text)
            for pod in pods
            if (text := obstacle(pod, self._warnings.get(pod["metadata"]["uid"], "")))
        ]
        condition = printing.last_condition(self._job() or {})
        if not pods and _waits_for_gang(condition):
            return self._warnings.get(self._gang, "") or printing.condition_line(condition)
        return together(found)

    @property
    def _gang(self) -> str:
        """The name of the job's PodGroup."""
        return f"{self.name}-{self._uid}"

    def _job_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None or after["metadata"]["uid"] != self._uid:
            return
        # Noted here: the next change may be that it is deleted, and come in the same breath.
        self._outcome = outcome(after)
        if self._later is not None:
            self._later.cancel()
        condition = printing.last_condition(after)
        if not condition:
            return
        line = printing.condition_line(condition)
        if _waits_for_gang(condition):
            # It waits for the scheduler: a moment, in most cases, and then not worth a word.
            self._later = asyncio.get_running_loop().call_later(WAITING_IS_NEWS, self._still_waits, line)
        else:
            self._tell("job", line)

    def _still_waits(self, line: str) -> None:
        if not self._own_pods():
            self._tell("job", line)

    def _pod_changed(self, before: Object | None, after: Object | None) -> None:
        pod = after or before
        assert pod is not None
        if not self._owns(pod):
            return
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self._tell(name, f"pod {name}: {'deleted' if after is None else describe_pod(pod)}")
        if before is None:
            for event in self._events:
                if _about(event).get("uid") == uid:
                    self._event_changed(None, event)
        if (pod.get("status") or {}).get("phase") == "Failed":
            self._failures[name] = pod
        container = main_status(pod)
        started = {"running", "terminated"} & set(container.get("state") or {})
        run = uid, int(container.get("restartCount") or 0)
        if after is not None and started and run not in self._logs and self._is_shown(pod):
            self._logs[run] = asyncio.create_task(self._show_log(name, main_container(pod)))

    def _event_changed(self, before: Object | None, after: Object | None) -> None:
        """Warnings about the job, its pods and its pod group say why it doesn't go on."""
        if after is None or after.get("type") != "Warning":
            return
        about = _about(after)
        name, uid = str(about.get("name")), str(about.get("uid"))
        text = f"{after.get('reason')}: {after.get('message')}"
        if about.get("kind") == "PodGroup" and name == self._gang:
            self._warnings[name] = text
            self._tell("pod group", f"pod group: {text}")
        elif uid == self._uid:
            if str(after.get("message")) not in self._said.get("job", ""):
                self._tell("warning", text)
        elif any(pod["metadata"]["uid"] == uid for pod in self._own_pods()):
            self._warnings[uid] = text
            if str(after.get("message")) not in self._said.get(name, ""):
                self._tell(f"{name} {after.get('reason')}", f"pod {name}: {text}")

    def _is_shown(self, pod: Object) -> bool:
        few = len(self._pods) <= MANY_PODS
        return few or (pod["metadata"].get("annotations") or {}).get("hccl/rankIndex") == "0"

    def _tell(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self._news.set()
            self.say(text)

    async def _show_log(self, pod: str, container: str) -> None:
        path = path_of(POD, self.namespace, pod, "log")
        tail = self._tails[pod] = deque[str](maxlen=LAST_LINES)
        try:
            async with self._kube.follow(path, {"follow": "true", "container": container}) as pieces:
                async for line in lines(pieces):
                    text = line.decode(errors="replace")
                    tail.append(text)
                    self.hand_on(pod, text)
        except BrokenPipeError:
            pass  # the reader, `head` for example, has seen enough; the job goes on
        except (ApiError, OSError) as error:
            self.say(f"the log of pod {pod} can't be followed: {error}")

    async def _report(self) -> int:
        pods = await self._pods_at_the_end()
        for pod in pods:
            self._pod_changed(pod, pod)
        ended = {pod["metadata"]["uid"] for pod in pods if pod["status"].get("phase") in ("Succeeded", "Failed")}
        if last := [task for (uid, _), task in self._logs.items() if uid in ended]:
            await asyncio.wait(last, timeout=LOG_PATIENCE)
        condition = self._outcome
        if condition is None:
            return running.complain(self.command, f"acjob {self.name} was deleted before its end", FAILED)
        if condition["type"] == "Succeeded":
            return 0
        message = str(condition.get("message", ""))
        if condition.get("reason") == "JobValidFailed":
            reason, _, what = message.partition(": ")
            field = manifest.blame(reason, what)
            return running.complain(self.command, str(self._document.refuse(field, message)), INVALID)
        failed = {pod["metadata"]["name"]: pod for pod in pods if pod["status"].get("phase") == "Failed"}
        if not failed:
            there = {pod["metadata"]["name"] for pod in pods}
            failed = {name: pod for name, pod in self._failures.items() if name not in there}
        for pod in list(failed.values())[:MANY_PODS]:
            await self._show_last_lines(pod)
        line = f"acjob {self.name} {printing.condition_line(condition)}"
        why = together([(name, describe_pod(pod)) for name, pod in failed.items()])
        return running.complain(self.command, f"{line} ({why})" if why else line, FAILED)

    async def _pods_at_the_end(self) -> list[Object]:
        """As they are now: the cache of pods may be behind that of jobs."""
        try:
            listing = await self._kube.list(POD, self.namespace, labels=self._selector)
        except (ApiError, OSError):
            return self._own_pods()
        return [pod for pod in listing.items if self._owns(pod)]

    async def _show_last_lines(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        path = path_of(POD, self.namespace, name, "log")
        parameters = {"tailLines": str(LAST_LINES), "container": main_container(pod)}
        try:
            async with self._kube.follow(path, parameters) as pieces:
                found = [line.decode(errors="replace") async for line in lines(pieces)]
        except (ApiError, OSError) as error:
            # The pod may be gone by now.
            found = list(self._tails.get(name, [])) or [f"(not to be had: {error})"]
        print(f"evertrain {self.command}: pod {name}: {describe_pod(pod)}; its last lines:", file=sys.stderr)
        for line in found or ["(none)"]:
            print(f"    {line}", file=sys.stderr)


def outcome(job: Object) -> Object | None:
    """The condition with which a job ended; None as long as it goes on."""
    for condition in reversed((job.get("status") or {}).get("conditions") or []):
        if condition.get("type") in ("Succeeded", "Failed") and condition.get("status") == "True":
            found: Object = condition
            return found
    return None


def _waits_for_gang(condition: Object) -> bool:
    return str(condition.get("reason", "")).startswith("PodGroup")


def _about(event: Object) -> Object:
    found: Object = event.get("involvedObject") or {}
    return found


def _runs(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"
