"""The operator's real shell on an API in memory, one look at a time and with a clock that stands still."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from evertrain.kube.port import ASCEND_JOB, POD, POD_GROUP, QUEUE, Object
from evertrain.operator.carry import Again
from evertrain.operator.shell import Operator
from tests.kube.fake import FakeKube
from tests.operator.acjobs import ascend_job

NOW = datetime(2026, 1, 1, 10, tzinfo=timezone.utc)


class Bench:
    def __init__(self, *, gang: bool = True, rank_tables: Path = Path("/nonexistent")) -> None:
        self.kube = FakeKube()
        self.now = NOW
        self.gang = gang
        self.rank_tables = rank_tables
        self.start_operator()

    def start_operator(self) -> None:
        """A new one, that knows nothing."""
        self.operator = Operator(self.kube, gang=self.gang, clock=lambda: self.now, rank_tables=self.rank_tables)

    async def submit(self, item: Object | None = None, **fields: Any) -> Object:
        if (QUEUE, "", "default") not in self.kube.objects:
            await self.kube.create(QUEUE, {"metadata": {"name": "default"}})
        return await self.kube.create(ASCEND_JOB, item if item is not None else ascend_job(**fields))

    async def look(self, name: str = "test-job") -> None:
        for cache in self.operator.observer.caches:
            await cache.refresh()
        await self.operator.look(("default", name))

    async def settle(self, name: str = "test-job", looks: int = 20) -> None:
        """Looks until there is nothing more to do."""
        for _ in range(looks):
            before = len(self.kube.calls)
            try:
                await self.look(name)
            except Again:
                continue
            if len(self.kube.calls) == before:
                return
        raise AssertionError(f"still busy after {looks} looks: {self.kube.calls[-5:]}")

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # What others in the cluster do.

    def admit(self, phase: str = "Running") -> None:
        for group in self.kube.items(POD_GROUP):
            self.kube.set_status(POD_GROUP, group["metadata"]["name"], {"phase": phase})

    def phase(self, pod: str, phase: str, exit_code: int | None = None) -> None:
        status: Object = {"phase": phase}
        if exit_code is not None:
            state = {"terminated": {"exitCode": exit_code}}
            status["containerStatuses"] = [{"name": "ascend", "state": state}]
        self.kube.set_status(POD, pod, status)

    def all_pods(self, phase: str) -> None:
        for pod in self.kube.items(POD):
            self.phase(pod["metadata"]["name"], phase)

    async def running(self, **fields: Any) -> None:
        """A job whose pods run."""
        await self.submit(**fields)
        await self.settle()
        self.admit()
        await self.settle()
        self.all_pods("Running")
        await self.settle()

    # What is to be seen.

    def job(self, name: str = "test-job") -> Object:
        return self.kube.find(ASCEND_JOB, name)

    def conditions(self) -> list[tuple[str, str, str]]:
        return [(each["type"], each["status"], each["reason"]) for each in self.job()["status"]["conditions"]]

    @property
    def last(self) -> Object:
        condition: Object = self.job()["status"]["conditions"][-1]
        return condition

    @property
    def state(self) -> str:
        return str(self.last["type"])

    def pods(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.kube.items(POD)}

    def versions(self) -> dict[str, str]:
        return {name: pod["metadata"]["labels"]["version"] for name, pod in sorted(self.pods().items())}

    def events(self) -> list[tuple[str, str]]:
        return [
            (each["type"], each["reason"]) for (kind, _, _), each in self.kube.objects.items() if kind.kind == "Event"
        ]
