"""Kill the operator between any two requests, before or after a request took effect, whatever the pods do: the next one
goes on, counts nothing twice, forgets nothing, and what has ended stays ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from evertrain.acjob.conditions import is_finished
from evertrain.kube.port import ASCEND_JOB, POD, Kind, Object
from evertrain.operator.carry import Again
from operator_bench import Bench

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

    asyncio.run(test())
