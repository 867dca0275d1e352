"""Kill the operator between any two requests, before or after a request took effect, whatever the pods do: the next one
goes on, counts nothing twice, forgets nothing, and what has ended stays ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evertrain import aio
from evertrain.acjob.conditions import is_finished
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, EVENT, POD, Kind, Object
from evertrain.operator.carry import Again
from tests.operator.acjobs import chips_annotation
from tests.operator.bench import Bench

RETRIES = 2
BACKOFF = 4


class Killed(BaseException):
    """The operator is no more."""


@dataclass(frozen=True)
class Look:
    """The operator looks, and is killed at its n-th request: before it is answered, or before it is even served."""

    requests: int | None = None
    served: bool = False


@dataclass(frozen=True)
class Fate:
    pod: int
    phase: str


@dataclass(frozen=True)
class Removal:
    pod: int


@dataclass(frozen=True)
class Gate:
    phase: str


@dataclass(frozen=True)
class Gone:
    """Pods that were on their way out are out."""


Step = Look | Fate | Removal | Gate | Gone

steps = st.lists(
    st.one_of(
        st.builds(Look, st.one_of(st.none(), st.integers(0, 6)), st.booleans()),
        st.builds(Look, st.one_of(st.none(), st.integers(0, 6)), st.booleans()),
        st.builds(Fate, st.integers(0, 2), st.sampled_from(["Running", "Running", "Succeeded", "Failed"])),
        st.builds(Removal, st.integers(0, 2)),
        st.builds(Gate, st.sampled_from(["Pending", "Running", "Running"])),
        st.just(Gone()),
    ),
    max_size=30,
)


class World:
    def __init__(self, lingering: bool) -> None:
        self.bench = Bench()
        self.bench.kube.lingering = lingering
        self.created: Counter[tuple[str, str]] = Counter()
        self.removed: Counter[str] = Counter()
        self.incidents = 0
        self.end: Object | None = None
        self._budget: Look = Look()
        self._dead = False
        self.bench.kube.before = self._before
        self.bench.kube.after = self._after

    def _before(self, verb: str, kind: Kind, name: str) -> None:
        if self._dead:
            raise Killed
        if verb in ("list", "get") or self._budget.requests is None:
            return
        if self._budget.requests == 0 and not self._budget.served:
            self._dead = True
            raise Killed
        self._budget = Look(self._budget.requests - 1, self._budget.served)

    def _after(self, verb: str, kind: Kind, name: str) -> None:
        if verb == "create" and kind == POD:
            pod = self.bench.kube.find(POD, name)
            self.created[name, pod["metadata"]["labels"]["version"]] += 1
            assert self.end is None, "a job that has ended gets no new pods"
        if self._budget.requests == -1 and self._budget.served:
            self._dead = True
            raise Killed

    async def look(self, look: Look) -> None:
        self._budget, self._dead = look, False
        try:
            await self.bench.look()
        except Again:
            pass
        except Killed:
            self.bench.start_operator()
        self._budget, self._dead = Look(), False
        self.check()

    def pod(self, number: int) -> Object | None:
        pods = sorted(self.bench.pods().items())
        return pods[number % len(pods)][1] if pods else None

    async def step(self, step: Step) -> None:
        match step:
            case Look():
                await self.look(step)
            case Gate(phase):
                self.bench.admit(phase)
            case Gone():
                for name, pod in list(self.bench.pods().items()):
                    if pod["metadata"].get("deletionTimestamp"):
                        self.bench.kube.remove(POD, name)
            case Fate(number, phase):
                pod = self.pod(number)
                if pod is not None and pod["status"]["phase"] in ("Pending", "Running"):
                    self.incidents += phase == "Failed"
                    self.bench.phase(pod["metadata"]["name"], phase)
            case Removal(number):
                pod = self.pod(number)
                if pod is not None:
                    self.incidents += 1
                    self.removed[pod["metadata"]["name"]] += 1
                    self.bench.kube.remove(POD, pod["metadata"]["name"])

    def check(self) -> None:
        status = self.bench.job()["status"]
        conditions = status.get("conditions") or []
        if self.end is not None:
            assert conditions == self.end, "what has ended stays as it is"
        elif is_finished(conditions):
            self.end = conditions
        restarts = status.get("restarts") or {}
        assert restarts.get("count", 0) <= min(self.incidents, BACKOFF + 1), "each incident is one round at most"
        assert restarts.get("retries", 0) <= RETRIES
        for (name, version), times in self.created.items():
            assert times <= 1 + self.removed[name], f"{name} was created {times} times in round {version}"

    async def converge(self) -> None:
        """All goes well from now on."""
        for _ in range(60):
            self.bench.admit("Running")
            await self.step(Gone())
            for name, pod in self.bench.pods().items():
                if pod["status"]["phase"] in ("Pending", "Running"):
                    self.bench.phase(name, "Succeeded" if pod["status"]["phase"] == "Running" else "Running")
            await self.look(Look())
            if self.end is not None:
                break
        assert self.end is not None, f"no end: {self.bench.job()['status']}"
        for _ in range(3):
            await self.look(Look())
        assert not [group for group in self.bench.kube.objects if group[0].kind == "PodGroup"]


@settings(max_examples=100, deadline=None)
@given(steps, st.booleans(), st.booleans(), st.booleans())
@example([Fate(0, "Failed"), Look(0, True), Look(), Look()], True, False, True)
@example([Fate(2, "Failed"), Look(0, True), Look(), Removal(1), Look(1), Look()], True, True, True)
def test_any_history_ends_well(history: list[Step], begun: bool, single: bool, lingering: bool) -> None:
    async def test() -> None:
        world = World(lingering)
        labels = {"fault-retry-times": str(RETRIES), "pod-rescheduling": "on" if single else "off"}
        await world.bench.submit(workers=2, labels=labels, run_policy={"backoffLimit": BACKOFF})
        before: list[Step] = [Look(), Look(), Gate("Running"), Look(), Look()]
        before += [Look(), *(Fate(number, "Running") for number in range(3)), Look()]
        for step in [*(before if begun else ()), *history]:
            await world.step(step)
        await world.converge()
        assert len(world.bench.kube.items(ASCEND_JOB)) == 1

    aio.run(test())


class Mortal:
    """One life of a job, in which the operator dies once: before its n-th request, and so after the one before it."""

    def __init__(self, at: int | None) -> None:
        self.bench = Bench()
        self.requests = 0
        self.created: Counter[tuple[str, str]] = Counter()
        self._at = at
        self._dead = False
        self.bench.kube.before = self._before
        self.bench.kube.after = self._after

    def _before(self, verb: str, kind: Kind, name: str) -> None:
        if self._dead:
            raise Killed
        if verb == "list" or kind == EVENT:
            return
        self.requests += 1
        if self.requests == self._at:
            self._dead = True
            raise Killed

    def _after(self, verb: str, kind: Kind, name: str) -> None:
        if verb == "create" and kind == POD:
            pod = self.bench.kube.find(POD, name)
            self.created[name, pod["metadata"]["labels"]["version"]] += 1

    async def _others(self, request: Awaitable[Object]) -> None:
        """What the operator doesn't do."""
        self.bench.kube.before = self.bench.kube.after = lambda verb, kind, name: None
        await request
        self.bench.kube.before, self.bench.kube.after = self._before, self._after

    async def settle(self) -> Object:
        """What there is when nothing is left to do."""
        bench = self.bench
        for _ in range(30):
            before = len(bench.kube.calls)
            try:
                await bench.look()
                if len(bench.kube.calls) == before:
                    break
            except Again:
                pass
            except Killed:
                self._dead = False
                bench.start_operator()
        else:
            raise AssertionError("still busy")
        assert not [pod for pod, times in self.created.items() if times > 1], "a pod was made twice in one round"
        objects: Object = {}
        for (kind, _, name), item in sorted(bench.kube.objects.items(), key=str):
            if kind.kind in ("Pod", "PodGroup", "Service", "ConfigMap"):
                labels = item["metadata"].get("labels") or {}
                objects[f"{kind.kind} {name}"] = (labels.get("version"), item.get("data"))
        jobs = [item["status"] for item in bench.kube.items(ASCEND_JOB)]
        return {"status": jobs, "objects": objects}

    async def live(self) -> list[Object]:
        """Created, Running, a failed pod, a lost pod, fewer pods, Succeeded, cleaned up, deleted."""
        bench, seen = self.bench, []
        policy = {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 60}
        config = {"metadata": {"name": "rings-config-test-job", "namespace": "default"}, "data": {}}
        fewer = {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}}
        await self._others(bench.kube.create(CONFIG_MAP, config))
        await self._others(bench.submit(workers=2, labels={"fault-retry-times": "3"}, run_policy=policy))

        async def all_run() -> None:
            for number, name in enumerate(sorted(bench.pods())):
                bench.phase(name, "Running")
                bench.kube.set_status(POD, name, {"podIP": f"172.16.0.{number + 1}"})
                bench.kube.annotate(POD, name, chips_annotation(name, f"10.0.0.{number}", 8))
            seen.append(await self.settle())

        seen.append(await self.settle())
        bench.admit()
        seen.append(await self.settle())
        await all_run()
        bench.phase("test-job-worker-1", "Failed")
        seen.append(await self.settle())
        await all_run()
        bench.kube.remove(POD, "test-job-worker-0")
        seen.append(await self.settle())
        await all_run()
        await self._others(bench.kube.patch(ASCEND_JOB, "test-job", "default", fewer))
        seen.append(await self.settle())
        bench.all_pods("Succeeded")
        seen.append(await self.settle())
        bench.later(60)
        seen.append(await self.settle())
        return seen


@pytest.mark.parametrize("part", range(4))
def test_a_kill_at_any_request_changes_nothing_in_the_end(part: int) -> None:
    """Each request of a whole life once."""

    async def test() -> None:
        undisturbed = Mortal(None)
        wanted = await undisturbed.live()
        assert [each["status"][0]["conditions"][-1]["type"] for each in wanted[:-1]] == [
            *("Created", "Created", "Running", "Restarting", "Running", "Running", "Running", "Running", "Succeeded")
        ]
        assert (wanted[-2]["status"][0]["restarts"]["count"], wanted[-2]["status"][0]["restarts"]["retries"]) == (2, 1)
        left = {"ConfigMap rings-config-test-job"}
        assert set(wanted[-2]["objects"]) == set(wanted[-1]["objects"]) == left
        assert wanted[-1]["status"] == []
        assert undisturbed.requests > 40
        for at in range(1 + part, undisturbed.requests + 1, 4):
            assert await Mortal(at).live() == wanted, f"killed at request {at}"

    aio.run(test())
