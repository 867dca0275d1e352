"""From a fault to a strategy and its result: retry, in place, recover. Pure.

    fault -> (platform) -> stop -> stopped -> (chips mend, platform) -> global fault -> offers -> decision -> result

Faults that become known before the global fault is told are part of it. Those that the training itself reports until
it has said what it can do are part of the decision. All others wait for the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evertrain.clusterd.model import OTHER
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import platform, timing, view
from evertrain.clusterd.recover.core import network
from evertrain.clusterd.recover.decide import Decision, decide, only_dump
from evertrain.clusterd.recover.events import Status, StopComplete, Strategies
from evertrain.clusterd.recover.flows_ending import why
from evertrain.clusterd.recover.flows_replacing import Replacing

GATHERING = frozenset({n.FLUSHING, n.STOPPING, n.STOPPED, n.GLOBAL_FAULT})
"""All faults that come are part of the round."""
UNDECIDED = frozenset({n.STOPPING, n.STOPPED, n.GLOBAL_FAULT, n.OFFERS, n.DECIDED})
"""A client that comes back has to be stopped once more."""

MEND, CONFIRM, WISH, TABLE, SPARE, ROUTES = "mend", "confirm", "wish", "table", "spare", "routes"
"""What a step may wait for."""


class Main(Replacing):
    # Faults.

    def _reported(self, faults: Mapping[int, str]) -> None:
        """The job itself says that ranks have failed."""
        data = self.data
        if data.state == n.INIT and self._has_ended:
            self._ignore(f"{view.ranks(faults)} failed: the job has ended")
        elif data.state == n.INIT:
            self._open(f"{view.ranks(faults)} failed, as the training says", faults=dict(faults))
            self._take_reported(faults)
            self._begin()
        elif data.state in GATHERING or data.state == n.OFFERS:
            news = self._take_reported(faults)
            if news:
                self._note("fault", f"{view.ranks(news)} failed, too", faults=news)
        elif data.state == n.SCALED:
            self._note("fault", f"{view.ranks(faults)} failed while training was smaller", faults=dict(faults))
            self._next_round()
            self._take_reported(faults)
            self._begin()
        elif data.state in (n.KILL_JOB, n.STOP_JOB):
            self._ignore(f"{view.ranks(faults)} failed: the whole job is about to be started again")
        elif data.state in (n.RETRY_STATUS, n.RECOVER_STATUS) and self._is_told_anew(faults):
            self._begin_anew(faults)
        elif data.state == n.RECOVER_STATUS:
            self._failed_meanwhile(faults)
        else:
            self._put_off(faults)

    def _is_told_anew(self, faults: Mapping[int, str]) -> bool:
        """By a client that came back, or is about to, of ranks that are being dealt with."""
        return (self.data.returned or not self.listening) and not self.data.faults.keys().isdisjoint(faults)

    def _begin_anew(self, faults: Mapping[int, str]) -> None:
        """It was decided, and who was told is gone: the training's new manager knows of faults only."""
        self._take_reported(faults)
        self._forget_later()
        self._note("fallback", "the training has a new manager: all over again", **{"from": self.data.decided})
        anew = n.RETRY if self.data.decided == n.RETRY else n.RECOVER
        self._stop()
        self.data.anew = anew

    def _on_late_status(self, status: Status) -> None:
        """The manager is the old one after all, and has done what it was told before."""
        if status.code != n.OK or not self.data.anew or status.strategy != self.data.anew:
            return self._ignore(f"a result of {status.strategy!r}, which is not waited for")
        self._result(f"{status.strategy}-success")
        self._close(n.RECOVERED, "it had not to be begun anew: training goes on")

    def _look_at_hardware(self) -> None:
        """New faults of the cluster, where the state allows to take them up."""
        data = self.data
        if not self.config.enabled or self._sub_healthy or self._over:
            return
        news = self._new_faults()
        if data.state == n.SCALED:
            news = [each for each in news if each.pod not in data.pods]
        if not news or data.state not in GATHERING | {n.INIT, n.SCALED}:
            return
        first = news[0]
        text = f"{first.code} ({first.level}) on node {first.node}: {view.ranks(each.rank for each in news)}"
        if data.state in GATHERING:
            self._note("fault", text, faults=news)
            ranks = self._take_hardware(news)
            if data.state in (n.STOPPED, n.GLOBAL_FAULT):
                self._pre_exit(ranks)
            return
        if data.state == n.INIT:
            self._open(text, faults=news)
        else:
            self._note("fault", f"while training was smaller: {text}", faults=news)
            self._next_round()
        self._take_hardware(news)
        self._begin()

    @property
    def _over(self) -> bool:
        return self.job is None or self.job.status in ("complete", "failed")

    @property
    def _has_ended(self) -> bool:
        """Its processes go, one after the other, and those that are left miss the others."""
        return self.job is not None and (self.job.ended or self.job.status == "complete")

    @property
    def _sub_healthy(self) -> bool:
        return self._faults is not None and self._faults.health == "SubHealthy"

    def _next_round(self) -> None:
        """More faults in a training that is smaller already: those before are still there."""
        data = self.data
        data.after = data.decided = data.platform = ""
        data.offered, data.tried = [], []
        data.in_place = data.mended = data.scheduled = data.unscheduled = data.confirmed = False
        data.must_exit = set()

    # Stop.

    def _begin(self) -> None:
        data = self.data
        if self.config.platform:
            data.platform = platform.strategy(self.job)
            if not data.platform:
                self._enter(n.FLUSHING, timing.PLATFORM, "the platform has to say what it wants")
                return
        if only_dump(self.config, data.platform):
            self._save_and_exit()
            return
        self._reset(n.FLUSH)
        self._stop()

    def _advance_flushing(self) -> bool:
        if not self.config.platform or platform.strategy(self.job):
            self._begin()
            return True
        return False

    def _stop(self) -> None:
        data = self.data
        data.offered = []
        data.in_place = data.mended = data.confirmed = False
        data.decided, data.must_exit, data.returned, data.anew = "", set(), False, ""
        data.scheduled, data.schedule_until = False, None
        self._step()
        if not self.listening:
            self._enter(n.STOPPING, None, "nobody listens who could stop the training")
            return
        data.uuid = self._make_uuid()
        self._pre_exit(data.unreported)
        self._signal(n.STOP_TRAIN, n.DO_STOP, faults=dict(sorted(data.faults.items())))
        self._enter(n.STOPPED, timing.REPORT, "training is stopped")

    def _pre_exit(self, ranks: Iterable[int]) -> None:
        """Processes on hardware that is known to be faulty are stopped first, unless their step may be run again."""
        if self.job is None or self._mendable:
            return
        ranks = sorted(ranks)
        pods = {pod: uid for pod, uid in self.data.pods.items() if pod in {self.job.pod_of(rank) for rank in ranks}}
        nodes = tuple(view.same_pods(self.job, pods))
        if nodes:
            self._signal(
                n.PRE_EXIT,
                n.DO_PRE_EXIT,
                again=False,
                uuid=self._make_uuid(),
                faults=dict.fromkeys(ranks, OTHER),
                nodes=nodes,
            )

    def _save_and_exit(self) -> None:
        data = self.data
        data.uuid, data.decided, data.offered = self._make_uuid(), n.DUMP, [n.DUMP]
        self._note("decision", "a checkpoint is written, nothing finer is wanted", strategy=n.DUMP)
        self._step()
        self._reset(n.FAULT)
        self._signal(n.SAVE_AND_EXIT, n.DO_SAVE, nodes=tuple(sorted(data.pods)))
        data.tried.append(n.DUMP)
        self._enter(n.DUMP_STATUS, timing.REPORT, "a checkpoint is written")

    def _on_stop_complete(self, report: StopComplete) -> None:
        if report.code == n.NOT_READY:
            return self._kill("training has not begun")
        self._take_reported(report.faults)
        if report.code:
            self._note("fault", f"not everybody could be stopped ({report.code})")
        self._global_fault()

    # Tell everybody of all faults.

    def _wait(self, state: str, what: str, limit: float, text: str) -> None:
        if (self.data.state, self.data.waiting) != (state, what):
            self._enter(state, limit, text)
            self.data.waiting = what

    def _global_fault(self) -> None:
        """Comes back here until nothing is in the way."""
        data = self.data
        self._plan_in_place()
        if not self._mendable and data.in_place and not data.mended:
            if sick := self._sick():
                text = f"the chips of pod {view.rank_list(sick)} are given the time to mend"
                return self._wait(n.GLOBAL_FAULT, MEND, timing.MENDING, text)
            data.mended = True
        if self.config.platform:
            if not data.confirmed:
                data.confirmed = True
                self._annotate(**{n.CONFIRM_FAULT: platform.faults_text(data.faults)})
            known = platform.result(self.job)
            if known is None:
                return self._wait(n.GLOBAL_FAULT, CONFIRM, timing.PLATFORM, "the platform has to confirm the faults")
            self._take_reported(known)
            wish = platform.strategy(self.job, platform.CONFIRMED)
            if not wish:
                return self._wait(n.GLOBAL_FAULT, WISH, timing.PLATFORM, "the platform has to say what it wants")
            data.platform = wish
            self._plan_in_place()
        self._tell_global()

    def _plan_in_place(self) -> None:
        """Which pods stay. If processes of several pods ended and no chip is to blame, none does."""
        data = self.data
        silent = view.silent(self.job, self._faults)
        staying = {pod for pod in data.pods if data.hardware.get(pod, True) and pod not in silent}
        software = not (data.hardware.keys() & data.pods.keys())
        data.in_place = self.config.has(n.IN_PLACE) and bool(staying) and not (software and len(data.pods) > 1)
        data.in_place = data.in_place and not self._mendable and not data.in_place_over
        data.must_exit = set(data.pods) - staying if data.in_place else set()

    def _sick(self) -> list[int]:
        """Pods that could stay if only their chip was well again."""
        faulty = {each.pod for each in view.relevant(self.job, self._faults) if not each.reported}
        return [pod for pod in sorted(self.data.pods) if self.data.hardware.get(pod) and pod in faulty]

    def _advance_global(self) -> bool:
        before = self.data.waiting
        self._global_fault()
        return (self.data.state, self.data.waiting) != (n.GLOBAL_FAULT, before)

    def _global_timeout(self) -> None:
        data = self.data
        if data.waiting != MEND:
            return self._reschedule_job("the platform said nothing")
        for pod in self._sick():
            data.hardware[pod] = False
        data.mended = True
        self._global_fault()

    def _tell_global(self) -> None:
        data = self.data
        self._step()
        wait = int(timing.ROUTES) + timing.RETRY_GRACE if network(data.faults) else 0
        if self._mendable:
            self._signal(n.GLOBAL, n.DO_GLOBAL, faults=dict(sorted(data.faults.items())), timeout=wait)
        else:
            leaving = self._leaving()
            self._reset(n.FAULT)
            action, nodes, limit = n.DO_EXIT_NODES, tuple(view.same_pods(self.job, leaving)), 0
            if self.config.platform and view.mendable(data.faults.values()) and self.config.has(n.RETRY):
                limit, nodes = wait, tuple(sorted(data.pods))
                action = n.DO_RESTART_NODES if data.in_place else action
            self._signal(n.GLOBAL, n.DO_GLOBAL, action, faults=self._listed(), nodes=nodes, timeout=limit)
            self._replace(leaving, "its faults can't be mended where it is")
        data.schedule_until = self.now + self.config.reschedule_wait
        self._enter(n.OFFERS, timing.REPORT, "everybody knows the faults; training says what it can do")

    # Decide.

    def _on_strategies(self, report: Strategies) -> None:
        self._take_reported(report.faults)
        self.data.offered = list(dict.fromkeys(report.strategies))
        self._choose()

    def _choose(self, *, spare: bool = False, probed: bool = False) -> None:
        data = self.data
        if self._mendable and decide(self._situation(data.after)).strategy != n.RETRY:
            data.retry_over = True
            self._reset(n.FAULT)
        self._plan_in_place()
        decision = decide(self._situation(data.after, spare=spare))
        match decision.strategy:
            case n.RETRY:
                self._retry(decision)
            case n.IN_PLACE | n.RECOVER:
                self._recover(decision)
            case n.ELASTIC:
                if self.config.reschedules and not probed and not data.unscheduled:
                    text = "before training goes on smaller: is there a spare node?"
                    return self._wait(n.DECIDED, SPARE, self.config.elastic_probe, text)
                self._note("decision", decision.explanation, strategy=n.ELASTIC)
                self._scale_in()
            case _:
                self._coarse(decision.strategy, decision.explanation)

    def _retry(self, decision: Decision) -> None:
        data, left = self.data, self.data.fault_at + timing.ROUTES - self.now
        if network(data.faults) and left > 0 and data.waiting != ROUTES:
            return self._wait(n.DECIDED, ROUTES, min(left, timing.ROUTES), "routes of the network have to converge")
        data.decided = n.RETRY
        self._note("decision", decision.explanation, strategy=n.RETRY)
        self._step()
        faults = dict(sorted(data.faults.items()))
        self._change(n.RETRY, faults=faults, nodes=tuple(sorted(data.pods)))
        self._enter(n.RETRY_STATUS, timing.REPORT, "the step is run again")

    def _recover(self, decision: Decision) -> None:
        data = self.data
        if self.config.platform and (ready := platform.table_ready(self.job)) is not True:
            if ready is None:
                return self._wait(n.DECIDED, TABLE, timing.PLATFORM, "the platform has to write the rank table")
            return self._no_table("the platform has no rank table")
        data.decided = decision.strategy
        self._note("decision", decision.explanation, strategy=decision.strategy)
        self._step()
        if decision.strategy == n.IN_PLACE:
            staying = {pod: uid for pod, uid in data.pods.items() if pod not in data.must_exit}
            nodes = tuple(view.same_pods(self.job, staying))
            faults = self._listed()
            self._change(n.RECOVER, n.DO_RESTART_NODES, faults=faults, nodes=nodes, extra=n.IN_PLACE)
        else:
            self._tell(n.RECOVER)
        self._replace(self._leaving(), "its faults can't be mended where it is")
        text = "processes start again in place" if decision.strategy == n.IN_PLACE else "pods at fault are replaced"
        self._enter(n.RECOVER_STATUS, timing.REPORT, text)

    def _no_table(self, text: str) -> None:
        self.data.platform = platform.strategy(self.job, platform.CONFIRMED)
        self.data.after = n.RECOVER
        self._fall_back(text)

    def _advance_decided(self) -> bool:
        match self.data.waiting:
            case "spare" if view.rescheduled(self.job, self.data.pods):
                self._choose(spare=True)
            case "table" if platform.table_ready(self.job) is not None or not self.config.platform:
                self._choose()
            case _:
                return False
        return True

    def _decided_timeout(self) -> None:
        if self.data.waiting == TABLE:
            self._no_table("the platform wrote no rank table")
        else:
            self._choose(probed=True)

    # Results.

    def _on_retry_status(self, status: Status) -> None:
        data = self.data
        if status.strategy != n.RETRY:
            return self._ignore(f"a result of {status.strategy!r}, not of retry")
        self._result("retry-success" if status.code == n.OK else "retry-failed")
        if status.code == n.OK:
            self._cured = dict.fromkeys(data.faults, self.now)
            return self._close(n.RECOVERED, "the step was run again, training goes on")
        data.after, data.retry_over = n.RETRY, True
        self._note("fallback", f"running the step again did not help ({why(status)})", **{"from": n.RETRY})
        if status.code == n.RETRY_FAILED:
            return self._global_fault()
        gone = {n.RECOVER, n.DUMP} if status.code == n.ONLY_EXIT else {n.RECOVER}
        data.offered = [each for each in data.offered if each not in gone]
        self._plan_in_place()
        self._reset(n.FAULT)
        self._choose()

    def _on_recover_status(self, status: Status) -> None:
        if status.strategy != n.RECOVER:
            return self._ignore(f"a result of {status.strategy!r}, not of recover")
        if status.code == n.OK:
            self._result("recover-success")
            return self._close(n.RECOVERED, "the ranks at fault were replaced, training goes on")
        self._result("recover-failed")
        text = f"the ranks at fault could not be replaced ({why(status)})"
        if status.code == n.RETRY_FAILED and self._may_move:
            return self._recover_anew(text)
        self.data.after = n.RECOVER
        self._fall_back(text)

    @property
    def _may_move(self) -> bool:
        """Processes were started again where they are, and their pods may be replaced instead."""
        return self.data.decided == n.IN_PLACE and self.config.has(n.RECOVER) and not self.config.platform

    def _recover_anew(self, text: str) -> None:
        """The training can begin the recovery anew. All pods at fault are replaced: their processes count no more."""
        data, job = self.data, self.job
        self._note("fallback", f"{text}: {n.RECOVER}", **{"from": n.IN_PLACE, "to": n.RECOVER})
        data.in_place_over = True
        if job is not None:
            data.pods = {pod: job.pods[pod].uid if pod in job.pods else uid for pod, uid in data.pods.items()}
        self._stop()
