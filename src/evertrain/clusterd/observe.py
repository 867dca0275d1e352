"""Watches what ClusterD has to know of the cluster, and says which job is to be looked at again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial

from evertrain.acjob import names
from evertrain.clusterd.jobs.table import owner_uid
from evertrain.kube.cache import Cache
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, POD_GROUP, ApiError, Kube, NotFound, Object

JOB_PATIENCE = 3.0
"""Seconds in which a job that is not known may become so."""
GROUPS_AGAIN = 60.0
"""Seconds between two looks whether there are PodGroups now."""
OURS = f"{names.OPERATOR_NAME}={names.CONTROLLER}"
SYSTEM = "cluster-system"
"""The namespace of ClusterD's settings, and of most of what it writes."""
NODE_NEWS, PUBLIC_FAULTS, SWITCHES = "mx-consumer-cim=true", "mc-consumer-publicfault=true", "reset=true"


class Observer:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.jobs = Cache(kube, ASCEND_JOB)
        self.pods = Cache(kube, POD, labels=OURS)
        self.groups = Cache(kube, POD_GROUP)
        self.nodes = Cache(kube, NODE)
        self.news = Cache(kube, CONFIG_MAP, labels=NODE_NEWS)
        """What nodes publish of their faults, and rank tables of inference services."""
        self.public = Cache(kube, CONFIG_MAP, labels=PUBLIC_FAULTS)
        self.settings = Cache(kube, CONFIG_MAP, SYSTEM)
        """What administrators set, and what ClusterD itself has written for them."""
        self.switches = Cache(kube, CONFIG_MAP, labels=SWITCHES)
        """Which timings jobs write."""
        self.jobs.index("uid", lambda item: str(item["metadata"].get("uid")))
        self.pods.index("job", owner_uid)
        self.groups.index("job", owner_uid)

    async def large(self) -> list[Cache]:
        """To be run, and waited for, also by who only stands by: most of the time to begin is what these take.
        PodGroups are not among them where there is no such kind."""
        found = [self.jobs, self.pods, self.nodes, self.news]
        return [*found, self.groups] if await self._has_groups() else found

    def small(self) -> list[Cache]:
        """Those that hold what ClusterD itself writes and reads when it begins. To be run from then on, so that nothing
        is missed that another one has written last."""
        return [self.public, self.settings, self.switches]

    async def catch_up(self) -> None:
        """Until every job that there is is known: what is kept of one that isn't would be thrown away. Raises
        TimeoutError if the watch is that far behind."""
        for _ in range(2):  # one that is gone by now never comes
            listed = (await self._kube.list(ASCEND_JOB)).items
            if await self.jobs.until(partial(self._know, listed), JOB_PATIENCE):
                return
        raise TimeoutError(f"the watch of AscendJobs is more than {JOB_PATIENCE:g} s behind")

    def _know(self, jobs: Iterable[Object]) -> bool:
        return all(self.jobs.select("uid", str(item["metadata"].get("uid"))) for item in jobs)

    async def pods_labelled(self, name: str, value: str) -> list[Object]:
        """As it is now, whatever the watch has told so far."""
        return (await self._kube.list(POD, labels=f"{OURS},{name}={value}")).items

    async def _has_groups(self) -> bool:
        try:
            await self._kube.list(POD_GROUP, labels="evertrain.dev/is-there=nothing")
        except NotFound:
            return False
        return True

    async def run_groups(self) -> None:
        """Where there was no such kind at the start: Volcano may come later."""
        while True:
            await asyncio.sleep(GROUPS_AGAIN)
            with contextlib.suppress(ApiError, OSError, TimeoutError):
                if await self._has_groups():
                    break
        await self.groups.run()

    def listen(self, changed: Callable[[str], None]) -> None:
        """Calls with the uid of each job that may be other than before."""

        def by(uid: Callable[[Object], str | None]) -> Callable[[Object | None, Object | None], None]:
            def listener(before: Object | None, after: Object | None) -> None:
                for item in (before, after):
                    found = None if item is None else uid(item)
                    if found:
                        changed(found)

            return listener

        self.jobs.listen(by(lambda item: str(item["metadata"].get("uid") or "")))
        self.pods.listen(by(owner_uid))
        self.groups.listen(by(owner_uid))

    def job(self, uid: str) -> tuple[Object, Object | None, list[Object]] | None:
        """The AscendJob, its PodGroup and its pods."""
        found = self.jobs.select("uid", uid)
        if not found:
            return None
        groups = sorted(self.groups.select("job", uid), key=lambda item: str(item["metadata"]["name"]))
        return found[0], groups[0] if groups else None, self.pods.select("job", uid)

    async def until_job(self, uid: str, seconds: float = JOB_PATIENCE) -> None:
        """A pod may have started, and call, before the watch has told us of its job."""
        await self.jobs.until(lambda: bool(self.jobs.select("uid", uid)), seconds)
        await asyncio.sleep(0)
