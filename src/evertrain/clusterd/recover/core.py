"""What every flow of a recovery needs: its data, its view of the job, signals, notes, and the end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from evertrain.clusterd.model import MEMORY, NETWORK, OTHER, Job, JobFaults, RankFault
from evertrain.clusterd.recover import config as configs
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing, view
from evertrain.clusterd.recover.config import Config
from evertrain.clusterd.recover.events import (
    Answer,
    Effect,
    Note,
    PatchGroup,
    PatchPod,
    ReplacePods,
    Signal,
    WriteReset,
)
from evertrain.clusterd.recover.state import Data, Fresh

NEEDS_CLIENT = frozenset(n.STATES) - {
    n.INIT, n.FLUSHING, n.GLOBAL_FAULT, n.DECIDED, n.RESCHEDULING, n.FAULT_RETRY, n.KILL_JOB, n.SCALED, n.NEW_POD,
    n.OLD_POD, n.STOP_JOB,
}  # fmt: skip
"""States that only a client's report leads out of. The others have a limit of their own, and go on without one, but for
a job that trains smaller."""


class Core:
    def __init__(self, job: str, *, make_uuid: Callable[[], str], data: Data | None = None) -> None:
        self.uid = job
        self.data = data if data is not None else Data()
        self._make_uuid = make_uuid
        self._resumed = data is not None
        self.job: Job | None = None
        self._faults: JobFaults | None = None
        self.listening = False
        self.now = self.data.clock
        self.config = Config()
        self._out: list[Effect] = []
        self._dismissed: set[str] = set()
        """Backups that the operator was told to delete."""
        self._cured: dict[int, float] = {}
        """By rank: when its step was run again with success. What is told later of a fault before that is over."""

    @property
    def state(self) -> str:
        return self.data.state

    # Time.

    def clock_set(self, by: float) -> None:
        """All that is counted from a time goes along."""
        data = self.data
        for name in ("until", "not_before", "lonely", "deserted", "label_at", "schedule_until"):
            at = getattr(data, name)
            setattr(data, name, at + by if at is not None else None)
        data.fault_at += by if data.fault_at else 0.0
        for fresh in data.fresh.values():
            fresh.born += by
        self._cured = {rank: at + by for rank, at in self._cured.items()}
        data.clock += by
        self.now = data.clock

    def _set_clock(self, now: float) -> None:
        """One that goes back, since another ClusterD kept its time, was set or is that of another machine."""
        data = self.data
        if now < data.clock:
            self.clock_set(now - data.clock)
        if self._resumed:
            least = now + timing.RESUMED
            data.until = max(data.until, least) if data.until is not None else None
            data.schedule_until = max(data.schedule_until, least) if data.schedule_until is not None else None
            data.lonely = data.deserted = None
            self._tell_again()
        self._resumed = False
        self.now = data.clock = now

    def _tell_again(self) -> None:
        """What was noted last may not have reached the timeline before ClusterD ended."""
        data = self.data
        if data.cause:
            self._note("opened", data.cause, faults=dict(sorted(data.faults.items())), began=data.began)
        if data.choice:
            self._note("decision", data.reason, strategy=data.choice)

    @property
    def _lonely_until(self) -> float | None:
        lonely = self.data.lonely
        return lonely + timing.SUBSCRIBER if lonely is not None else None

    @property
    def deadline(self) -> float | None:
        schedule = self.data.schedule_until if self.data.state == n.RECOVER_STATUS else None
        times = (self.data.until, self.data.not_before, self._lonely_until, self.data.label_at, schedule)
        return min((at for at in times if at is not None), default=None)

    # The job.

    def _see_job(self, job: Job) -> None:
        before, self.job = self.job, job
        self.config = configs.of(job)
        fresh = self.data.fresh
        if before is not None:
            for rank, pod in job.pods.items():
                old = before.pods.get(rank)
                if old is not None and old.uid != pod.uid:
                    fresh[rank] = Fresh(old.uid, self.now)
        for rank in [rank for rank, each in fresh.items() if self.now - each.born >= timing.POD_SETTLED]:
            if rank in job.pods and job.pods[rank].running:
                del fresh[rank]

    def _pod_at_fault(self, pod: int) -> str | None:
        """The uid of the pod that a report of just now is about."""
        if self.job is None or pod not in self.job.pods:
            return None
        return self.data.fresh[pod].before if pod in self.data.fresh else self.job.pods[pod].uid

    def _new_faults(self) -> list[RankFault]:
        found = view.relevant(self.job, self._faults)
        return [each for each in found if view.key(each) not in self.data.handled and not self._is_cured(each)]

    def _is_cured(self, fault: RankFault) -> bool:
        return fault.type in view.MENDABLE and fault.time_ms <= self._cured.get(fault.rank, 0.0) * 1000

    def _sensible(self, faults: Mapping[int, str]) -> dict[int, str]:
        """Of ranks that the job can have: a client would refuse to hear of others."""
        if self.job is None:
            return {rank: kind for rank, kind in faults.items() if rank >= 0}
        pods = max(self.job.replicas, max(self.job.pods, default=-1) + 1)
        return {rank: kind for rank, kind in faults.items() if rank >= 0 and self.job.pod_of(rank) < pods}

    # The round's faults.

    def _merge(self, faults: Mapping[int, str]) -> dict[int, str]:
        """Take them into this round; those that were news. What a step run again can't mend stays that."""
        data, news = self.data, {}
        for rank, kind in faults.items():
            kind = kind if kind in view.TYPES else OTHER
            known = data.faults.get(rank)
            if known in (kind, OTHER):
                continue
            data.faults[rank] = news[rank] = kind
            data.fault_at = self.now
        return news

    def _take_reported(self, faults: Mapping[int, str]) -> dict[int, str]:
        """Faults that the job itself reported: they may be mended by starting its processes again."""
        news = self._merge(faults)
        self.data.unreported -= faults.keys()
        if self.job is None:
            return news
        pods = {self.job.pod_of(rank) for rank in faults}
        label = n.RETRY_FAULT if set(self.data.faults.values()) <= set(view.MENDABLE) else n.SOFTWARE
        for pod in sorted(pods - self.data.pods.keys()):
            uid = self._pod_at_fault(pod)
            if uid is None:
                continue
            self.data.pods[pod] = uid
            if self.job.pods[pod].uid == uid:
                self.data.labelled[self.job.pods[pod].name] = uid
                self._do(PatchPod(self.job.pods[pod].name, uid, labels={n.FAULT_TYPE: label}))
        return news

    def _take_hardware(self, faults: Iterable[RankFault]) -> dict[int, str]:
        data = self.data
        found = list(faults)
        for each in found:
            data.handled.add(view.key(each))
            data.pods.setdefault(each.pod, each.pod_uid)
            data.hardware[each.pod] = data.hardware.get(each.pod, True) and each.in_place
            data.unreported.add(each.rank)
        return self._merge({each.rank: each.type for each in found})

    @property
    def _mendable(self) -> bool:
        """Only faults that running the step again may mend, and that is wanted and has not been tried."""
        if self.data.retry_over or not self.config.has(n.RETRY) or not view.mendable(self.data.faults.values()):
            return False
        return not (self.config.platform and self.data.platform not in ("", n.RETRY))

    # What to do.

    def _do(self, effect: Effect) -> None:
        self._out.append(effect)

    def _signal(
        self,
        kind: str,
        *actions: str,
        faults: Mapping[int, str] | None = None,
        strategy: str = "",
        timeout: int = 0,
        nodes: Iterable[int] = (),
        extra: str = "",
        uuid: str = "",
        again: bool = True,
    ) -> None:
        """`again`: it is repeated to a client that comes back."""
        signal = Signal(
            type=kind,
            uuid=uuid or self.data.uuid,
            actions=actions,
            faults=dict(faults or {}),
            strategy=strategy,
            timeout=timeout,
            nodes=tuple(nodes),
            extra=extra,
        )
        if again:
            self.data.sent.append(signal)
        if self.listening:
            self._do(signal)

    def _change(
        self,
        strategy: str,
        *more: str,
        faults: Mapping[int, str] | None = None,
        nodes: Iterable[int] = (),
        extra: str = "",
    ) -> None:
        self._signal(n.CHANGE_STRATEGY, n.DO_CHANGE, *more, strategy=strategy, faults=faults, nodes=nodes, extra=extra)
        self.data.tried.append(strategy)

    def _note(self, kind: str, text: str, **details: object) -> None:
        if kind == "decision":
            self.data.choice, self.data.reason = str(details["strategy"]), text
        if kind == "closed":  # with the essence of all: a ClusterD that was killed may not have written down the rest
            data = self.data
            details |= {"began": data.began, "cause": data.cause, "strategy": data.choice, "reason": data.reason}
        self._do(Note(kind, text, {"id": self.data.id, "state": self.data.state, **details}))

    def _enter(self, state: str, limit: float | None, text: str) -> None:
        self.data.state, self.data.waiting, self.data.not_before = state, "", None
        self.data.until = self.now + limit if limit is not None else None
        self._note("phase", text, phase=n.PHASES[state])

    def _put_off(self, faults: Mapping[int, str]) -> None:
        """Too late for this round: they begin another one, unless their pods are replaced meanwhile."""
        data = self.data
        news = {rank: kind for rank, kind in faults.items() if rank not in data.faults}
        for rank, kind in news.items():
            uid = self._pod_at_fault(self.job.pod_of(rank)) if self.job is not None else None
            if self.job is None or uid is None:
                continue
            data.later[rank] = OTHER if data.later.get(rank) == OTHER else kind
            data.later_pods[self.job.pod_of(rank)] = uid
        if news:
            self._note("fault", f"{view.ranks(news)} failed, too: that is for another round", faults=news)

    def _step(self) -> None:
        """What is sent from here on belongs to another step."""
        self.data.sent = []

    def _reset(self, operation: str) -> None:
        ranks: tuple[int, ...] = ()
        if operation == n.FAULT:
            ranks = tuple(sorted(self._listed()))
        in_place = operation == n.FAULT and self.data.in_place
        self._do(WriteReset(operation, ranks, restart_fault_process=in_place, recovery=self.data.id))

    def _annotate(self, **annotations: str | None) -> None:
        self._do(PatchGroup(annotations=annotations))

    def _result(self, text: str) -> None:
        self._do(PatchGroup(annotations={n.RECOVER_RESULT: text}))

    def _listed(self) -> dict[int, str]:
        """The round's faults as everybody is told: all ranks of a pod that can't stay."""
        job, data = self.job, self.data
        if job is None:
            return dict.fromkeys(sorted(data.faults), OTHER)
        if not data.in_place:
            return view.expanded(job, data.pods) | dict.fromkeys(sorted(data.faults), OTHER)
        staying = {rank: OTHER for rank in sorted(data.faults) if job.pod_of(rank) not in data.must_exit}
        return dict(sorted((view.expanded(job, data.must_exit) | staying).items()))

    def _replace(self, pods: Iterable[int], reason: str) -> None:
        """Pods that are still the ones at fault. A platform does it itself."""
        if self.job is None or self.config.platform:
            return
        data = self.data
        same = view.same_pods(self.job, {pod: data.pods[pod] for pod in pods if pod in data.pods})
        uids = tuple(data.pods[pod] for pod in same if data.pods[pod] not in data.replaced)
        if uids:
            data.replaced.update(uids)
            self._do(ReplacePods(uids, reason))

    def _replace_all(self, reason: str) -> None:
        if self.job is None or self.config.platform:
            return
        uids = tuple(pod.uid for _, pod in sorted(self.job.pods.items()))
        self.data.replaced.update(uids)
        self._do(ReplacePods(uids, reason, whole_job=True))

    def _answer(self, text: str) -> None:
        """Whoever ordered something hears of it once."""
        data = self.data
        if data.order and not data.answered:
            data.answered = True
            self._do(Answer(data.order, text))

    # Beginning and end.

    def _open(self, text: str, **details: object) -> None:
        self.data.id, self.data.began, self.data.cause = self._make_uuid(), self.now, text
        if self.job is not None:
            self.data.origin = {rank: pod.uid for rank, pod in self.job.pods.items()}
        self._note("opened", text, **details)

    def _has_joined(self, pod: int, fresh: Fresh, outcome: str) -> bool:
        """The training goes on with it: what it reports from now on is not about the pod before."""
        there = pod in self.data.pods or fresh.before in self.data.origin.values()
        return there and outcome in (n.RECOVERED, n.FELL_BACK)

    def _close(self, outcome: str, text: str) -> None:
        """Everything but what outlives a recovery is forgotten. Faults that came too late begin the next one."""
        old, job = self.data, self.job
        self._reset(n.CLEAR)
        self._answer(text)
        if outcome == n.RECOVERED and job is not None:
            there = {pod.uid for pod in job.pods.values()}
            for name, uid in sorted(old.labelled.items()):
                if uid in there:
                    self._do(PatchPod(name, uid, labels={n.FAULT_TYPE: None}))
        if old.confirmed:
            self._annotate(**{n.CONFIRM_FAULT: None})
        self._note("closed", text, outcome=outcome, ok=outcome != n.FAILED)
        self.data = Data(
            clock=old.clock,
            handled=old.handled,
            hot_off=old.hot_off,
            fresh={rank: each for rank, each in old.fresh.items() if not self._has_joined(rank, each, outcome)},
            label_at=old.label_at,
        )
        same = set(view.same_pods(job, old.later_pods))
        self.data.later = {rank: kind for rank, kind in old.later.items() if job and job.pod_of(rank) in same}
        self.data.later_pods = {pod: uid for pod, uid in old.later_pods.items() if pod in same}


def network(faults: Mapping[int, str]) -> bool:
    return NETWORK in faults.values()


__all__ = ["MEMORY", "NETWORK", "OTHER", "Core", "network"]
