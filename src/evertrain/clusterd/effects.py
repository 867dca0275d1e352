"""Carries out what a job's recovery wants to be changed in the cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from evertrain.clusterd import reset
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import (
    Effect,
    IsolateNode,
    Note,
    PatchGroup,
    PatchPod,
    ReplacePods,
    WriteReset,
)
from evertrain.kube.port import (
    ASCEND_JOB,
    CONFIG_MAP,
    NODE,
    POD,
    POD_GROUP,
    ApiError,
    Conflict,
    Kube,
    NotFound,
    Object,
)

logger = logging.getLogger(__name__)

DELAYS = (0.1, 0.5, 2.0)
"""Seconds before each further try."""
MOST_RESETS = 2000
NODE_STATUS, UNHEALTHY = "NodeHealthyStatus", "UnHealthy"


class Replaces(Protocol):
    async def replace(self, job: Job, effect: ReplacePods) -> None: ...


class Notes(Protocol):
    def note(self, job: Job, note: Note, now: float) -> None: ...


class Failure(Exception):
    """It can't be done; the text says why. Another try would not help."""


class Carrier:
    def __init__(
        self,
        kube: Kube,
        rescheduler: Replaces,
        timeline: Notes,
        seen: Callable[[str, str], Object | None] = lambda name, namespace: None,
    ) -> None:
        """`seen` gives a reset file as a watch has told of it, perhaps an old one."""
        self._kube = kube
        self._rescheduler = rescheduler
        self._timeline = timeline
        self._seen = seen
        self._resets: OrderedDict[tuple[str, str], Object] = OrderedDict()
        """As they were written last, the newest last: nobody else writes them but now and then a device plugin."""

    async def carry(self, job: Job, effect: Effect) -> str:
        """Why it could not be done; empty if it was."""
        if isinstance(effect, Note):
            logger.info("job %s: %s: %s", job.uid, effect.kind, effect.text)
            try:
                self._timeline.note(job, effect, time.time())
            except Exception:  # it only informs
                logger.exception("job %s: the timeline can't take this", job.uid)
            return ""
        work = self._work(job, effect)
        if work is None:
            return ""
        error: Exception = Failure()
        for delay in (0.0, *DELAYS):
            await asyncio.sleep(delay)
            try:
                await work()
                return ""
            except Failure as failure:
                error = failure
                break
            except (ApiError, OSError, TimeoutError) as refused:
                error = refused
            except Exception as defect:  # the job has to go on somehow, and so have all others
                logger.exception("job %s: %s", job.uid, effect)
                error = defect
                break
        why = str(error) or type(error).__name__
        logger.warning("job %s: %s: %s", job.uid, type(effect).__name__, why)
        return why

    def _work(self, job: Job, effect: Effect) -> Callable[[], Awaitable[None]] | None:
        match effect:
            case WriteReset():
                return lambda: self._reset(job, effect)
            case PatchGroup():
                return lambda: self.patch_group(job, effect)
            case PatchPod():
                return lambda: self._patch_pod(job, effect)
            case ReplacePods():
                return lambda: self._rescheduler.replace(job, effect)
            case IsolateNode():
                return lambda: self._isolate(effect)
        return None

    async def _reset(self, job: Job, order: WriteReset) -> None:
        name = reset.PREFIX + job.name
        ours = self._resets.pop((job.namespace, name), None)
        known = ours or self._seen(name, job.namespace)
        if known is not None:
            try:
                return await self._write_reset(known, order, certain=ours is not None)
            except (Conflict, NotFound, Failure):
                pass  # it is another one meanwhile
        try:
            item = await self._kube.get(CONFIG_MAP, name, job.namespace)
        except NotFound:
            # Who wrote no such ConfigMap into the job's YAML has no agents that would read it.
            logger.debug("job %s has no ConfigMap %s", job.uid, name)
            return
        await self._write_reset(item, order)  # Conflict: read it again

    async def _write_reset(self, item: Object, order: WriteReset, *, certain: bool = True) -> None:
        metadata = item["metadata"]
        try:
            data = reset.renewed(item.get("data") or {}, order, int(time.time()))
        except reset.Refused as refusal:
            raise Failure(f"{metadata['name']}: {refusal}") from None
        if certain and order.operation == reset.CLEAR and reset.same(item.get("data") or {}, data):
            written = item  # nobody has to be told that there is nothing, once more
        else:
            written = await self._kube.replace(CONFIG_MAP, item | {"data": data})
        self._resets[metadata["namespace"], metadata["name"]] = written
        if len(self._resets) > MOST_RESETS:
            self._resets.popitem(last=False)

    async def patch_group(self, job: Job, effect: PatchGroup) -> None:
        patch = _metadata(effect.labels, effect.annotations)
        if job.group:
            try:
                await self._kube.patch(POD_GROUP, job.group, job.namespace, patch)
                return
            except NotFound:
                pass
        try:
            await self._kube.patch(ASCEND_JOB, job.name, job.namespace, _with_uid(patch, job.uid))
        except NotFound:
            raise Failure(f"job {job.name} is gone") from None

    async def _patch_pod(self, job: Job, effect: PatchPod) -> None:
        try:
            patch = _with_uid(_metadata(effect.labels, effect.annotations), effect.uid)
            await self._kube.patch(POD, effect.name, job.namespace, patch)
        except (NotFound, Conflict):
            return  # replaced or gone meanwhile, and with it what was to be said of it
        except ApiError as error:
            if error.code == 422:
                raise Failure(error.message) from None
            raise

    async def _isolate(self, effect: IsolateNode) -> None:
        try:
            await self._kube.patch(NODE, effect.node, None, _metadata({}, {NODE_STATUS: UNHEALTHY}))
        except NotFound:
            logger.info("node %s is gone, there is nothing to isolate", effect.node)


def _metadata(labels: Mapping[str, str | None], annotations: Mapping[str, str | None]) -> Object:
    found: Object = {}
    if labels:
        found["labels"] = dict(labels)
    if annotations:
        found["annotations"] = dict(annotations)
    return {"metadata": found}


def _with_uid(patch: Object, uid: str) -> Object:
    """The server refuses it if the name belongs to another object by now."""
    return {"metadata": patch["metadata"] | {"uid": uid}}
