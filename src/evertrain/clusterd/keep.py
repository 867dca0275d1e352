"""The state of a recovery, kept in a ConfigMap until the recovery is over.

It is written before anybody is told of what it led to. So a ClusterD that is killed at any point, or another one that
takes its place, goes on from there: with the state of the machine, and with what was decided but perhaps not yet
done. Where many recover at once they share ConfigMaps (`pages`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from evertrain.acjob import names
from evertrain.clusterd.model import Job
from evertrain.clusterd.pages import GROWN, LABEL, Page, Pages
from evertrain.clusterd.pages import PREFIX as PAGES
from evertrain.clusterd.pages import Overtaken as Overtaken
from evertrain.clusterd.recover import events
from evertrain.clusterd.recover.state import alike
from evertrain.kube.port import CONFIG_MAP, NAMESPACE, AlreadyExists, ApiError, Conflict, Kube, NotFound, Object

logger = logging.getLogger(__name__)

PREFIX = "clusterd-recovery-"
SELECTOR = f"{LABEL}=true"
TEXT, PACKED = "state.json", "state.z"
LARGE = 256 * 1024
"""Bytes from which on it is compressed: an object may have about 1 MiB."""
LARGEST = 64 * 1024 * 1024
VERSION = 1
FIRST_DELAY, MAX_DELAY = 0.05, 2.0
NEVER = (413, 422)
"""It is too large: no other try would help."""

KEPT_EFFECTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        events.WriteReset, events.PatchGroup, events.PatchPod, events.ReplacePods, events.IsolateNode, events.Note,
    )
}  # fmt: skip
"""Those that change the cluster, and the end of an incident. Signals are sent again when their listener is back."""


class Unreadable(Exception):
    """The first argument says why. The second, if there is one, is the state, which may be readable."""


class _Record(msgspec.Struct):
    version: int
    job: str
    state: msgspec.Raw
    effects: list[tuple[str, dict[str, Any]]] = []
    order: str = ""
    answers: list[str] = []
    written: int = 0
    """When, in nanoseconds. Of two of a job, which nobody has come to tidy up, the newer one counts."""


@dataclass(frozen=True, slots=True)
class Record:
    job: str
    """Its uid."""
    state: bytes
    """Of the machine: JSON."""
    effects: tuple[events.Effect, ...] = ()
    """Decided, perhaps not done."""
    order: str = ""
    """What a platform ordered: nic or stress; empty if nothing."""
    answers: tuple[str, ...] = ()
    lost: str = ""
    """Why it can't be read, if it can't; the state is then what is there instead."""

    def encode(self, written: int = 0) -> bytes:
        effects = [
            (type(each).__name__, msgspec.to_builtins(each, str_keys=True)) for each in self.effects if _is_kept(each)
        ]
        state = msgspec.Raw(self.state)
        answers = list(self.answers)
        return msgspec.json.encode(_Record(VERSION, self.job, state, effects, self.order, answers, written))


def decode(item: Object) -> Record:
    """Raises Unreadable."""
    return _decode(item)[1]


def _decode(item: Object) -> tuple[int, Record]:
    """When it was written, too."""
    try:
        packed = (item.get("binaryData") or {}).get(PACKED)
        if packed:
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(base64.b64decode(packed), LARGEST)
            if not unpacking.eof:
                raise Unreadable("it is too large, or only a part of it is there")
        else:
            content = str((item.get("data") or {})[TEXT]).encode()
        found = msgspec.json.decode(content, type=_Record)
        if found.version != VERSION:
            why = f"it is of version {found.version}; this ClusterD knows version {VERSION}"
            raise Unreadable(why, bytes(found.state))
        effects: tuple[events.Effect, ...] = tuple(
            msgspec.convert(fields, KEPT_EFFECTS[name], str_keys=True)
            for name, fields in found.effects
            if name in KEPT_EFFECTS
        )
    except (KeyError, ValueError, TypeError, RecursionError, zlib.error, msgspec.MsgspecError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    return found.written, Record(found.job, bytes(found.state), effects, found.order, tuple(found.answers))


def _fields(state: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(state)
    return found if isinstance(found, dict) else {"": found}


def config_map(job: Job, content: bytes) -> Object:
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {
            "name": PREFIX + job.uid,
            "namespace": job.namespace,
            "labels": {LABEL: "true"},
            "ownerReferences": [
                {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": job.name, "uid": job.uid}
            ],
        },
        **_content(content),
    }


def _content(content: bytes) -> Object:
    if len(content) < LARGE:
        return {"data": {TEXT: content.decode()}}
    return {"binaryData": {PACKED: base64.b64encode(zlib.compress(content, 1)).decode()}}


@dataclass(frozen=True, slots=True)
class _Said:
    fields: dict[str, Any]
    """Of the machine's state, without its time: that time goes on is no news."""
    effects: tuple[events.Effect, ...]
    about: tuple[str, tuple[str, ...]]
    """Order and answers."""


def _said(record: Record) -> _Said:
    return _Said(_fields(record.state) | {"clock": None}, record.effects, (record.order, record.answers))


def _same_for_others(kept: dict[str, Any], now: dict[str, Any]) -> bool:
    return kept == now or alike(kept, now)


def _version(item: Object) -> str:
    return str(item["metadata"].get("resourceVersion") or "")


class Keeper:
    """Of one job. Each write lasts until it has succeeded: what can't be kept must not be acted on. But what can never
    be kept is acted on nevertheless: better a recovery that a restart would lose than none."""

    def __init__(self, kube: Kube, job: Job, *, exists: bool = False, pages: Pages | None = None) -> None:
        self._kube, self._job = kube, job
        self._pages = Pages(kube) if pages is None else pages
        self._page: Page | None = self._pages.page_of(job.uid) if exists else None
        self.exists = exists
        """Is something kept?"""
        self._kept: _Said | None = None
        self._mine: tuple[str, Object] | None = None
        """Version and content of the ConfigMap as we have written it last, if we have."""
        self._abandoned = False

    def abandon(self) -> None:
        """The job is gone: nobody waits any more for what can't be written."""
        self._abandoned = True

    async def keep(self, record: Record, *, may_wait: bool = False) -> bool:
        """Whether it is kept. One that `may_wait`, and wants nothing done, is not if a ClusterD that finds what is kept
        now would do the same, but for work that is done and that it would do once more. Raises Overtaken."""
        said = _said(record)
        kept = self._kept if self.exists else None
        if said == kept:
            return True
        if may_wait and kept is not None and said.about == kept.about and _same_for_others(kept.fields, said.fields):
            return False
        content = record.encode(time.time_ns())
        if not self.exists:
            self._page = self._pages.place(self._job.uid, self._job.namespace, len(content))
        if self._page is not None and (len(content) > GROWN or self._page.is_too_large):
            self._page, self.exists = None, False
        with self._pages.writing():
            await self._until_done(lambda: self._write(content), "kept")
        if self._page is None:
            self._pages.forget(self._job.uid)
        self.exists, self._kept = True, said
        return True

    async def remove(self) -> None:
        if self._page is not None:
            self._pages.forget(self._job.uid)
        elif self.exists:
            await self._until_done(self._delete, "removed")
        self.exists, self._kept, self._mine, self._page = False, None, None, None

    async def _write(self, content: bytes) -> None:
        """One that was stopped for a while may not know that it leads no more. So it must not write over what another
        one has written since: then it does nothing either, for first comes the write."""
        if self._page is not None:
            await self._page.put(self._job.uid, content.decode())
            return
        item, wanted = config_map(self._job, content), _content(content)
        if not self.exists:
            try:
                self._mine = _version(await self._kube.create(CONFIG_MAP, item)), wanted
                return
            except AlreadyExists:
                pass
        patch: Object = {"data": None, "binaryData": None} | wanted
        if self._mine is not None:
            patch["metadata"] = {"resourceVersion": self._mine[0]}
        try:
            written = await self._kube.patch(CONFIG_MAP, item["metadata"]["name"], self._job.namespace, patch)
        except Conflict:
            await self._look(wanted)
            raise
        except NotFound:  # somebody tidied up
            written = await self._kube.create(CONFIG_MAP, item)
        self._mine = _version(written), wanted

    async def _look(self, wanted: Object) -> None:
        """Who has written it? We, if we were not told that we had, or somebody who has only labelled it."""
        item = await self._kube.get(CONFIG_MAP, PREFIX + self._job.uid, self._job.namespace)
        found = {name: item[name] for name in ("data", "binaryData") if item.get(name)}
        if found != wanted and (self._mine is None or found != self._mine[1]):
            raise Overtaken("another ClusterD leads the recovery of this job")
        self._mine = _version(item), found

    async def _delete(self) -> None:
        """Only what we have written ourselves: another one that leads by now would miss what it has."""
        version, content = self._mine or ("", {})
        with contextlib.suppress(NotFound):
            try:
                await self._kube.delete(CONFIG_MAP, PREFIX + self._job.uid, self._job.namespace, version=version)
            except Conflict:
                await self._look(content)
                raise

    async def _until_done(self, write: Any, what: str) -> None:
        delay = FIRST_DELAY
        while True:
            try:
                await write()
                return
            except (ApiError, OSError, TimeoutError) as error:
                if isinstance(error, ApiError) and error.code in (403, 404) and await self._is_gone():
                    logger.info("job %s: its namespace is going; the recovery is not %s", self._job.uid, what)
                    return
                if self._abandoned or (isinstance(error, ApiError) and error.code in NEVER):
                    logger.error("job %s: its recovery is not %s: %s", self._job.uid, what, error)
                    return
                logger.warning("job %s: its recovery is not %s yet: %s", self._job.uid, what, error)
            await asyncio.sleep(delay)
            delay = min(MAX_DELAY, delay * 2)

    async def _is_gone(self) -> bool:
        """A namespace that is being deleted takes nothing new: there, nothing has to be kept any more."""
        try:
            namespace = await self._kube.get(NAMESPACE, self._job.namespace)
        except NotFound:
            return True
        except (ApiError, OSError, TimeoutError):
            return False
        return bool(namespace["metadata"].get("deletionTimestamp"))


async def kept(kube: Kube, pages: Pages, jobs: Mapping[str, Job]) -> list[Record]:
    """All that is kept, also what can't be read. Pages that are found are used further. We keep it in the namespace of
    the job: who may write in another one has nothing to say about it."""
    found: dict[str, tuple[int, Record, Page | None]] = {}
    surplus: list[tuple[str, str, Page | None]] = []
    for item, page in _each(pages, (await kube.list(CONFIG_MAP, labels=SELECTOR)).items):
        try:
            written, record = _decode(item)
        except Unreadable as error:
            why, *state = error.args
            logger.error("ConfigMap %s can't be read, the recovery in it is lost: %s", item["metadata"]["name"], why)
            written, record = 0, Record(_job_of(item), b"".join(state), lost=why)
        job, place = jobs.get(record.job), item["metadata"]
        if job is not None and job.namespace != place["namespace"]:
            logger.error(
                "ConfigMap %s/%s is not in the namespace of job %s, and is passed over",
                place["namespace"], place["name"], job.uid,
            )  # fmt: skip
            continue
        this, other = (written, record, page), found.get(record.job)
        if other is not None:
            this, other = (this, other) if other[0] < written else (other, this)
            surplus.append((record.job, item["metadata"]["namespace"], other[2]))
        found[record.job] = this
        pages.found(record.job, this[2])
    for uid, namespace, page in surplus:
        if page is not None:
            page.drop(uid)
            continue
        with contextlib.suppress(ApiError, OSError, TimeoutError):
            await kube.delete(CONFIG_MAP, PREFIX + uid, namespace)
    return [record for _, record, _ in found.values()]


def _each(pages: Pages, items: Sequence[Object]) -> Iterator[tuple[Object, Page | None]]:
    """Records on pages as if each had a ConfigMap of its own."""
    for item in items:
        metadata = item["metadata"]
        if not metadata["name"].startswith(PAGES):
            yield item, None
            continue
        page = pages.adopt(item)
        for job, text in (item.get("data") or {}).items():
            yield {"metadata": metadata | {"name": f"{metadata['name']} ({job})"}, "data": {TEXT: text}}, page


def _job_of(item: Object) -> str:
    """Of a record that does not say it."""
    name = str(item["metadata"]["name"])
    return name.removeprefix(PREFIX) if not name.startswith(PAGES) else name.partition("(")[2].rstrip(")")


def changes_cluster(effects: Sequence[events.Effect]) -> bool:
    """Or its history, so that whoever takes over has to do it if we do not come to it."""
    return any(_is_kept(each) for each in effects)


def _is_kept(effect: events.Effect) -> bool:
    """Of notes only the last of an incident, which nobody would say again."""
    if isinstance(effect, events.Note):
        return effect.kind == "closed"
    return type(effect).__name__ in KEPT_EFFECTS
