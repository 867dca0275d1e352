"""Feeds the fault centre with what is published in the cluster, and tells everybody what comes out of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from evertrain import aio
from evertrain.clusterd.clock import SteadyClock
from evertrain.clusterd.faults import manual, outputs, public
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.faults.faultlog import FaultLog
from evertrain.clusterd.faults.inputs import KubeNode
from evertrain.clusterd.faults.result import Result
from evertrain.clusterd.model import Job, JobFaults
from evertrain.clusterd.observe import SYSTEM, Observer
from evertrain.clusterd.publish import Publisher, config_map
from evertrain.clusterd.services.publisher import Everyone, Line
from evertrain.faultcodes import overrides
from evertrain.kube.port import CONFIG_MAP, Kube, NotFound, Object
from evertrain.wire import faultinfo

logger = logging.getLogger(__name__)

LEAST_PAUSE = 0.02
"""Seconds between two looks at all faults: what changes meanwhile is looked at together."""
FAILED_PAUSE = 1.0
KEEP_EVERY = 5.0
"""Seconds between two writes of what the centre remembers, if nobody waits for it."""
KEEP_PAUSE = 0.1
MEMORY, MEMORY_KEY, MEMORY_LARGEST = "clusterd-fault-memory", "state.z", 900 * 1024
RELATIONS, DURATIONS = Path("/home/hwMindX/relationFaultCustomization.json"), Path("/home/hwMindX/faultDuration.json")
PUBLIC_CODES = (
    Path("/user1/mindx-dl/clusterd/publicCustomization.json"),
    Path("/home/hwMindX/publicFaultConfiguration.json"),
)
SERIAL = "product-serial-number"


class Faults:
    def __init__(self, kube: Kube, centre: FaultCentre, observer: Observer, *, clock: Callable[[], float] = time.time):
        self._kube, self._centre, self._observer, self._clock = kube, centre, observer, SteadyClock(clock)
        # One worker, so that a node that moves to another page is there before it has left.
        self._cluster_info = Publisher(kube, rate=5.0, burst=5, workers=1)
        self._others = Publisher(kube, rate=5.0, burst=20, workers=2)
        self._info = outputs.ClusterInfo()
        self._everyone: Everyone[JobFaults] = Everyone(key=lambda each: each.job)
        self._some: dict[str, set[Line[JobFaults]]] = {}
        """By job: who wants to hear of that one."""
        self._listeners: list[Callable[[JobFaults], None]] = []
        self._label_listeners: list[Callable[[Mapping[str, str]], None]] = []
        self._labels: Mapping[str, str] = {}
        self._services: Counter[str] = Counter()
        """MindIE services, by how many hear of their faults."""
        self.now: Mapping[str, JobFaults] = {}
        """By job, of those that have any."""
        self._result: Result | None = None
        self._log = FaultLog()
        self._news = asyncio.Event()
        self._codes = centre.codes
        """Those that are shipped, without what administrators say of public ones."""
        self._files = ("", "", "")
        self._hurry = asyncio.Event()
        self._unkept: list[asyncio.Future[None]] = []
        """Who waits for what the centre remembers to be kept."""

    # What others ask, and tell.

    def listen(self, changed: Callable[[JobFaults], None], labels: Callable[[Mapping[str, str]], None]) -> None:
        """Hear of the faults of jobs that have changed, and of what pods shall be labelled with (fault-type by uid)."""
        self._listeners.append(changed)
        self._label_listeners.append(labels)

    def of(self, job: str) -> JobFaults | None:
        return self.now.get(job)

    def subscribe(self, jobs: Collection[str] | None = None) -> Line[JobFaults]:
        if jobs is None:
            return self._everyone.subscribe(self.now.values())
        wanted = frozenset(jobs)
        line: Line[JobFaults] = Line(key=lambda each: each.job, limit=None, left=lambda line: self._leave(line, wanted))
        for job in wanted:
            self._some.setdefault(job, set()).add(line)
            if job in self.now:
                line.put(self.now[job])
        return line

    def _leave(self, line: Line[JobFaults], jobs: Collection[str]) -> None:
        for job in jobs:
            lines = self._some.get(job, set())
            lines.discard(line)
            if not lines:
                self._some.pop(job, None)

    def in_force(self) -> Counter[tuple[str, str]]:
        """How many faults schedulers see, by kind and level."""
        found: Counter[tuple[str, str]] = Counter()
        if self._result is not None:
            found.update(("chip", fault.level) for info in self._result.devices.values() for fault in info.faults)
            found.update(("switch", fault.level) for info in self._result.switches.values() for fault in info.faults)
            found.update(("node", fault.level) for info in self._result.nodes.values() for fault in info.faults)
        return found

    def job(self, uid: str, job: Job | None) -> None:
        self._centre.job(uid, job)
        self._news.set()

    def process_report(self, job: str, faults: Mapping[int, str]) -> None:
        self._centre.process_report(job, faults, self._now_ms())
        self._news.set()

    def stress_testing(self, job: str, nodes: Collection[str]) -> None:
        self._centre.stress_testing(job, nodes)
        self._news.set()

    def heard(self, service: str, more: int) -> None:
        """By how many more a MindIE service's faults are heard of."""
        before = set(self._services)
        self._services[service] += more
        if self._services[service] <= 0:
            del self._services[service]
        if before != set(self._services):
            self._centre.heard(set(self._services))
            self._news.set()

    def expose(self, pods: Iterable[str]) -> None:
        self._centre.expose(pods)
        self._news.set()

    def super_pod(self, node: str) -> int | None:
        return self._centre.super_pod(node)

    def report_seen(self, before: Object | None, after: Object | None) -> None:
        """What schedulers read of us, as it is: somebody may have deleted or changed it."""
        metadata = (after or before or {})["metadata"]
        self._cluster_info.seen(metadata["namespace"], metadata["name"], after)

    def public_resources(self) -> frozenset[str]:
        return self._centre.codes.resources

    async def public_fault(self, message: Mapping[str, object]) -> str:
        """Empty if it is taken, else what is wrong with it. Nobody publishes it again: so it is kept before who sent it
        is told that it is taken."""
        wrong = self._centre.public(message, self._now_ms())
        self._news.set()
        if not wrong:
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._unkept.append(told)
            self._hurry.set()
            await told
            await self._others.until_written(SYSTEM, MEMORY)
        return wrong

    def job_info(self, job: Job, faults: JobFaults, now: int) -> str:
        """For fault-job-info."""
        nodes = {pod.node for pod in job.pods.values()}
        return outputs.fault_job_info(job, faults, {node: self.super_pod(node) for node in nodes}, now)

    # The work.

    async def remember(self) -> None:
        """What another ClusterD has kept, before anything is told."""
        try:
            item = await self._kube.get(CONFIG_MAP, MEMORY, SYSTEM)
            content = zlib.decompress(base64.b64decode((item.get("data") or {})[MEMORY_KEY]))
            self._centre.load(content)
        except NotFound:
            return
        except (KeyError, ValueError, zlib.error) as error:
            logger.error("what was remembered of faults can't be read: %s", error)

    async def start(self) -> None:
        """With all that is known, before anybody is told anything. The caches are filled, and all jobs are told."""
        observer, centre = self._observer, self._centre
        centre.forget_others()
        self._read_files()
        names = [item["metadata"]["name"] for item in await self._written_before()]
        self._info.found(names)
        there = {f"{item['metadata'].get('namespace')}/{item['metadata']['name']}" for item in observer.public}
        centre.public_config_maps(there)
        for item in (*observer.news, *observer.public):
            self._config_map(None, item)
        policy, listed = (observer.settings.get(name, SYSTEM) for name in (manual.CONFIG_MAP, manual.INFO_CONFIG_MAP))
        if policy is not None:
            self._config_map(None, policy)
        centre.manual_listed(None if listed is None else listed.get("data") or {})
        centre.k8s_nodes({item["metadata"]["name"]: read_node(item) for item in observer.nodes})
        observer.nodes.listen(self._node)
        for cache in (observer.news, observer.public, observer.settings):
            cache.listen(self._config_map)
        self._process()

    async def run(self) -> None:
        async with aio.TaskGroup() as tasks:
            tasks.create_task(self._cluster_info.run())
            tasks.create_task(self._others.run())
            tasks.create_task(self._keeping())
            due = self._process()
            while True:
                left = None if due is None else max(0.0, (due - self._now_ms()) / 1000)
                with contextlib.suppress(TimeoutError):
                    async with aio.timeout(left):
                        await self._news.wait()
                due = self._process()
                await asyncio.sleep(LEAST_PAUSE)

    def _process(self) -> int | None:
        """One look; when to look again though nothing changed."""
        self._news.clear()
        try:
            result = self._centre.process(self._now_ms())
            self._tell(result)
            return result.next_ms
        except Exception:
            # Whatever somebody has published that brings this about, the next news may be better.
            logger.exception("the faults can't be worked out")
            return self._now_ms() + int(FAILED_PAUSE * 1000)

    def _tell(self, result: Result) -> None:
        for complaint in result.complaints:
            logger.warning("%s", complaint)
        self._result, self.now = result, result.jobs
        for faults in result.changed.values():
            self._everyone.publish(faults)
            for line in list(self._some.get(faults.job, ())):
                line.put(faults)
            for listener in self._listeners:
                listener(faults)
        for faults in result.changed.values():
            for text in self._log.update(faults):
                logger.info("%s", text)
        if result.labels != self._labels:
            self._labels = dict(result.labels)
            for tell in self._label_listeners:
                tell(self._labels)
        for name, text in self._info.update(result, self._now_ms()).items():
            self._cluster_info.put(config_map(outputs.NAMESPACE, name, {name: text}, outputs.LABELS))
        statistics = config_map(SYSTEM, public.STATISTICS, dict(result.statistics), public.STATISTICS_LABELS)
        self._others.put(statistics)
        if result.manual:
            self._others.put(config_map(SYSTEM, manual.INFO_CONFIG_MAP, dict(result.manual)))
        elif self._observer.settings.get(manual.INFO_CONFIG_MAP, SYSTEM) is not None:
            self._others.remove(SYSTEM, manual.INFO_CONFIG_MAP)

    # What is published.

    def _node(self, before: Object | None, after: Object | None) -> None:
        item = after or before or {}
        self._centre.k8s_node(item["metadata"]["name"], None if after is None else read_node(after))
        self._news.set()

    def _config_map(self, before: Object | None, after: Object | None) -> None:
        item = after or before or {}
        metadata = item["metadata"]
        name, namespace = metadata["name"], metadata.get("namespace")
        data = None if after is None else after.get("data") or {}
        if name.startswith(faultinfo.DEVICE_PREFIX) and namespace == faultinfo.DEVICE_NAMESPACE:
            self._centre.device(name.removeprefix(faultinfo.DEVICE_PREFIX), data)
        elif name.startswith(faultinfo.NODE_PREFIX) and namespace == faultinfo.NODE_NAMESPACE:
            self._centre.node(name.removeprefix(faultinfo.NODE_PREFIX), data)
        elif (metadata.get("labels") or {}).get(public.LABEL) == "true":
            if data is not None and public.DATA_KEY in data:
                self._centre.public_config_map(f"{namespace}/{name}", data[public.DATA_KEY], self._now_ms())
            elif data is None:
                self._centre.public_config_map_gone(f"{namespace}/{name}")
        elif (namespace, name) == (SYSTEM, manual.CONFIG_MAP):
            self._centre.manual_policy(None if data is None else data.get(manual.POLICY_KEY))
        elif (namespace, name) == (SYSTEM, manual.INFO_CONFIG_MAP):
            self._centre.manual_listed(data)
        else:
            return
        self._news.set()

    def _read_files(self) -> None:
        """What administrators have put beside us, if it is other than it was."""
        relations, durations = _text(RELATIONS), _text(DURATIONS)
        codes = next((found for path in PUBLIC_CODES if (found := _text(path))), "")
        before, self._files = self._files, (relations, durations, codes)
        if before[:2] != (relations, durations):
            self._centre.relation_rules(relations, durations)
        if before[2] != codes:
            known, wrong = overrides.public(self._codes, codes) if codes else (self._codes, [])
            for each in wrong:
                logger.warning("%s", each)
            self._centre.set_codes(known)
        if before != self._files:
            self._news.set()

    async def _written_before(self) -> list[Object]:
        labels = ",".join(f"{name}={value}" for name, value in outputs.LABELS.items())
        return (await self._kube.list(CONFIG_MAP, outputs.NAMESPACE, labels=labels)).items

    # What must survive a restart.

    async def _keeping(self) -> None:
        """Now and then, and soon if somebody waits for it."""
        kept = b""
        while True:
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(KEEP_EVERY):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                content = self._centre.dump()
                if content != kept:
                    self._put_memory(content)
                    kept = content
                unkept, self._unkept = self._unkept, []
                for told in unkept:
                    if not told.done():
                        told.set_result(None)
                self._read_files()  # files of ConfigMaps are exchanged as a whole, which no watch of a file survives
            except Exception:
                # Who waits for it is told to come again.
                logger.exception("what is known of faults can't be kept")
            await asyncio.sleep(KEEP_PAUSE)

    def _put_memory(self, content: bytes) -> None:
        text = _packed(content)
        if len(text) > MEMORY_LARGEST:
            logger.warning("there are too many public faults to be kept: after a restart they have to be sent again")
            text = _packed(self._centre.dump(with_public=False))
        if len(text) > MEMORY_LARGEST:
            logger.warning("there are too many faults for what is remembered of them to survive a restart")
        else:
            self._others.put(config_map(SYSTEM, MEMORY, {MEMORY_KEY: text}))

    def _now_ms(self) -> int:
        """A wall clock that is set takes along what waits for its time: set back, it would not come for as long; set
        forward, it would all be over."""
        by = self._clock.was_set()
        if by:
            logger.warning("faults: the clock was set by %+.1f s", by)
            self._centre.clock_set(int(by * 1000))
        return int(self._clock.now() * 1000)


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 1)).decode()


def read_node(item: Object) -> KubeNode:
    status = item.get("status") or {}
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    addresses = {each.get("type"): str(each.get("address") or "") for each in status.get("addresses") or ()}
    serial = (item["metadata"].get("annotations") or {}).get(SERIAL) or ""
    return KubeNode(ready, addresses.get("InternalIP", ""), str(serial))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
