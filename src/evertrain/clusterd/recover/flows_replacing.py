"""While the training waits for replacements of processes: they come, or find no place, or fail themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evertrain.clusterd.model import OTHER
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing, view
from evertrain.clusterd.recover.decide import REASONS, Decision, decide
from evertrain.clusterd.recover.events import PatchPod
from evertrain.clusterd.recover.flows_elastic import Elastic


class Replacing(Elastic):
    def _leaving(self) -> dict[int, str]:
        """Pods that have to be replaced."""
        data = self.data
        return {pod: uid for pod, uid in data.pods.items() if not data.in_place or pod in data.must_exit}

    def _staying(self) -> dict[int, str]:
        """Pods whose processes start again where they are."""
        leaving = self._leaving()
        return {pod: uid for pod, uid in self.data.pods.items() if pod not in leaving}

    def _advance_recover(self) -> bool:
        if ended := self._ended():
            return self._ended_instead(ended)
        if silent := self._silent():
            return self._silent_instead(silent)
        if not self.data.scheduled and view.rescheduled(self.job, self._leaving()):
            self.data.scheduled, self.data.schedule_until = True, None
            self._reset(n.CLEAR)
            if self._leaving():
                self._note("phase", "the replacements have their places", phase=n.REBUILD)
        return False

    def _unscheduled(self) -> None:
        """Nobody has a place for the replacements."""
        text = "the replacements found no place"
        decision = self._without_replacements()
        if decision.strategy == n.EXIT:
            return self._reschedule_job(text)
        self._go_without(decision, text)

    def _without_replacements(self) -> Decision:
        """What a training can do that still waits for them."""
        self.data.schedule_until, self.data.unscheduled, self.data.after = None, True, n.RECOVER
        return decide(self._situation(n.RECOVER))

    def _go_without(self, decision: Decision, why: str) -> None:
        text = f"{why}: {decision.strategy}"
        self._note("fallback", text, **{"from": self.data.decided, "to": decision.strategy})
        if decision.strategy == n.ELASTIC:
            self._note("decision", decision.explanation, strategy=n.ELASTIC)
            self._scale_in()
        else:
            self._coarse(decision.strategy, decision.explanation)

    # Who fails before it is over.

    def _failed_meanwhile(self, faults: Mapping[int, str]) -> None:
        """The training waits for replacements of these ranks, too; those of pods that leave need no word.

        A process that was started again where it is and has failed again is not mended by that: its pod is replaced.
        Nor is one mended by that which has failed again in a new pod.
        """
        data, job = self.data, self.job
        if job is None or self.config.platform:
            return self._put_off(faults)
        leaving = self._leaving()
        # Of a rank that nothing was known of before, the first word may still be about the pod that has left.
        again = [rank for rank in faults if rank in data.faults and self._is_replaced(job.pod_of(rank))]
        self._merge({rank: kind for rank, kind in faults.items() if job.pod_of(rank) in leaving})
        if again:
            return self._replacements_failed(again)
        news = {rank: job.pod_of(rank) for rank in sorted(faults) if job.pod_of(rank) not in leaving}
        if not news:
            return
        moving = {pod for rank, pod in news.items() if rank in data.faults or pod not in data.pods}
        text = f"{view.ranks(news)} failed {'again' if news.keys() & data.faults.keys() else 'meanwhile'}"
        self._take_reported({rank: faults[rank] for rank in news})
        if not self.config.has(n.RECOVER):
            moving = set()
        if moving:
            self._move(moving, text)
        if here := {rank: pod for rank, pod in news.items() if pod not in moving}:
            self._note("fault", f"{text}: started again in place", faults={rank: faults[rank] for rank in here})
            nodes = view.same_pods(job, {pod: data.pods[pod] for pod in here.values() if pod in data.pods})
            self._signal(n.GLOBAL, n.DO_RESTART_NODES, faults=dict.fromkeys(here, OTHER), nodes=nodes)

    def _is_replaced(self, pod: int) -> bool:
        """It had to leave, and another one has its place."""
        uid = self._leaving().get(pod)
        return uid is not None and self.job is not None and pod in self.job.pods and self.job.pods[pod].uid != uid

    def _replacements_failed(self, ranks: Iterable[int]) -> None:
        """The new pods are at fault now."""
        data, job = self.data, self.job
        assert job is not None
        text = f"{view.ranks(ranks)} failed again in a new pod"
        for pod in {job.pod_of(rank) for rank in ranks}:
            data.pods[pod] = job.pods[pod].uid
            data.fresh.pop(pod, None)
        decision = self._without_replacements()
        self._go_without(decision, text)
        if decision.strategy == n.ELASTIC:
            self._replace(data.pods, "training goes on without them")

    def _move(self, pods: Iterable[int], text: str) -> None:
        """Pods that were to stay, or that nothing was known of, are replaced: the training need not hear of it."""
        data = self.data
        if self.job is not None:  # if others have their places meanwhile, it is those that are at fault now
            data.pods |= {pod: self.job.pods[pod].uid for pod in pods if pod in self.job.pods}
        data.must_exit.update(pods)
        data.scheduled, data.schedule_until = False, self.now + self.config.reschedule_wait
        self._note("fallback", text, **{"from": data.decided, "to": n.RECOVER})
        data.decided = n.RECOVER
        self._note("decision", f"{REASONS[n.RECOVER]} ({n.IN_PLACE}: {text})", strategy=n.RECOVER)
        nodes = view.same_pods(self.job, {pod: data.pods[pod] for pod in pods if pod in data.pods})
        self._signal(n.NODES_EXIT, n.DO_EXIT_NODES, nodes=nodes)
        self._replace(pods, "its faults can't be mended where it is")
        self._enter(n.RECOVER_STATUS, timing.REPORT, "pods at fault are replaced")

    def _ended(self) -> list[int]:
        """Pods that have ended instead of starting their processes again: they may do so only so often."""
        if self.job is None or self.config.platform:
            return []
        there = view.same_pods(self.job, self._staying())
        return [pod for pod in there if self.job.pods[pod].phase == "Failed"]

    def _silent(self) -> dict[int, str]:
        """Pods whose processes were to start again on nodes that do not answer."""
        if self.config.platform:
            return {}
        nodes = view.silent(self.job, self._faults)
        return {pod: nodes[pod] for pod in view.same_pods(self.job, self._staying()) if pod in nodes}

    def _silent_instead(self, pods: Mapping[int, str]) -> bool:
        text = f"node {', '.join(sorted(set(pods.values())))} does not answer"
        if self.config.has(n.RECOVER):
            self._move(pods, text)
        else:
            self.data.after = n.RECOVER
            self._fall_back(text)
        return True

    def _ended_instead(self, pods: list[int]) -> bool:
        """False: only the job itself can say what becomes of it."""
        assert self.job is not None
        names = [self.job.pods[pod].name for pod in pods]
        text = f"pod {', '.join(names)} has ended instead of starting its processes again"
        if self.config.has(n.RECOVER):
            self._move(pods, text)
            return True
        self.data.after = n.RECOVER
        if decide(self._situation(n.RECOVER)).strategy != n.EXIT:
            self._fall_back(text)
            return True
        for name in names:
            if uid := self.data.labelled.pop(name, ""):
                self._note("fault", f"{text}: that is a failure of the job")
                self._do(PatchPod(name, uid, labels={n.FAULT_TYPE: None}))
        return False
