"""Tells the parts of MindIE services who is in them, whenever that changes."""

from __future__ import annotations

import asyncio
import logging

from evertrain.acjob import names
from evertrain.clusterd.jobs import globaltable
from evertrain.clusterd.jobs.table import owner_uid
from evertrain.clusterd.observe import Observer
from evertrain.clusterd.services.publisher import Line
from evertrain.kube.port import Object

logger = logging.getLogger(__name__)

SERVICE = "service"


class RankTables:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lines: dict[str, dict[str, set[Line[str]]]] = {}
        """By service, and by namespace where only one is meant."""
        self._told: dict[tuple[str, str], str] = {}
        """The same, of those that somebody listens to."""
        self._dirty: set[str] = set()
        self._complaints: dict[str, str] = {}
        """By service, the last one: nobody wants to read it again at each change."""
        observer.news.index(SERVICE, globaltable.service_of)
        observer.jobs.index(SERVICE, _service_of_job)
        observer.news.listen(self._config_map)
        observer.jobs.listen(self._job)
        observer.pods.listen(self._pod)

    def subscribe(self, service: str, namespace: str = "") -> Line[str]:
        """The newest, at once if there is one; in that namespace, or in the only one that has it."""
        line: Line[str] = Line(key=lambda _: "", limit=None, left=lambda line: self._leave(service, namespace, line))
        self._lines.setdefault(service, {}).setdefault(namespace, set()).add(line)
        table = self.table(service, namespace) if service else None
        if table is not None:
            self._told[service, namespace] = table
            line.put(table)
        return line

    def table(self, service: str, namespace: str = "") -> str | None:
        observer = self._observer
        jobs = sorted(observer.jobs.select(SERVICE, service), key=lambda job: str(job["metadata"]["name"]))
        jobs = [job for job in jobs if namespace in ("", job["metadata"].get("namespace"))]
        controllers = [job for job in jobs if _app(job) == globaltable.CONTROLLER]
        if not controllers:
            return None
        # One service has one namespace; others may use the same name elsewhere.
        namespace = controllers[0]["metadata"].get("namespace")

        def pods(app: str) -> list[Object]:
            return [
                pod
                for job in jobs
                if _app(job) == app and job["metadata"].get("namespace") == namespace
                for pod in observer.pods.select("job", str(job["metadata"].get("uid")))
            ]

        tables, wrong = [], []
        for item in observer.news.select(SERVICE, service):
            if item["metadata"].get("namespace") != namespace:
                continue
            try:
                found = globaltable.read_table(item)
            except globaltable.BadTable as error:
                wrong.append(str(error))
                continue
            if found is not None:
                tables.append(found)
        self._complain(service, "; ".join(sorted(wrong)))
        return globaltable.assemble(pods(globaltable.COORDINATOR), pods(globaltable.CONTROLLER), tables)

    def _leave(self, service: str, namespace: str, line: Line[str]) -> None:
        places = self._lines.get(service, {})
        lines = places.get(namespace, set())
        lines.discard(line)
        if not lines:
            places.pop(namespace, None)
            self._told.pop((service, namespace), None)
        if not places:
            self._lines.pop(service, None)
            self._complaints.pop(service, None)

    def _complain(self, service: str, wrong: str) -> None:
        if wrong and self._complaints.get(service) != wrong:
            logger.warning("service %s: rank tables are left out: %s", service, wrong)
        self._complaints[service] = wrong

    # What changes.

    def _config_map(self, before: Object | None, after: Object | None) -> None:
        for item in (before, after):
            self._changed(None if item is None else globaltable.service_of(item))

    def _job(self, before: Object | None, after: Object | None) -> None:
        for item in (before, after):
            self._changed(None if item is None else _service_of_job(item))

    def _pod(self, before: Object | None, after: Object | None) -> None:
        for item in (before, after):
            uid = None if item is None else owner_uid(item)
            for job in self._observer.jobs.select("uid", uid) if uid else ():
                self._changed(_service_of_job(job))

    def _changed(self, service: str | None) -> None:
        """What changes at the same time is looked at together."""
        if service in self._lines and service is not None:
            if not self._dirty:
                asyncio.get_running_loop().call_soon(self._tell)
            self._dirty.add(service)

    def _tell(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for service in dirty & self._lines.keys():
            for namespace, lines in list(self._lines[service].items()):
                table = self.table(service, namespace)
                if table is None or self._told.get((service, namespace)) == table:
                    continue
                self._told[service, namespace] = table
                for line in list(lines):
                    line.put(table)


def _service_of_job(item: Object) -> str | None:
    return (item["metadata"].get("labels") or {}).get(names.JOB_ID) or None


def _app(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(names.APP) or "")
