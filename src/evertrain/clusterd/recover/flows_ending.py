"""The coarse end of the ladder: a checkpoint, all processes again, the whole job again. Pure.

However a recovery goes, it ends here or with a success; so nobody waits for ever for a word that does not come.
"""

from __future__ import annotations

from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing, view
from evertrain.clusterd.recover.core import Core
from evertrain.clusterd.recover.decide import Situation, decide
from evertrain.clusterd.recover.events import PatchGroup, Status


class Ending(Core):
    def _situation(self, after: str, *, spare: bool = False) -> Situation:
        data = self.data
        return Situation(
            config=self.config,
            offered=tuple(data.offered),
            retryable=self._mendable,
            in_place=data.in_place,
            first_pod=0 in data.pods,
            spare=spare,
            platform=data.platform,
            after=after,
            unscheduled=data.unscheduled,
        )

    def _fall_back(self, why: str) -> None:
        """From a strategy that came to nothing, where the client takes only a checkpoint or the end after it."""
        left = self.data.after or self.data.decided
        decision = decide(self._situation(left))
        left = self.data.decided or left
        self._note("fallback", f"{why}: {decision.strategy}", **{"from": left, "to": decision.strategy})
        self._coarse(decision.strategy, decision.explanation)

    def _coarse(self, strategy: str, explanation: str) -> None:
        data = self.data
        data.decided = strategy
        self._note("decision", explanation, strategy=strategy)
        mindspore = self.config.framework == "mindspore"
        if strategy == n.DUMP and not (data.nic_round and mindspore):
            self._step()
            self._tell(n.DUMP)
            self._enter(n.DUMP_STATUS, timing.REPORT, "a checkpoint is written")
        else:
            self._exit()

    def _tell(self, strategy: str) -> None:
        """Of a strategy that gives the pods at fault up. Those that were to stay have to leave, too."""
        data = self.data
        more: tuple[str, ...] = ()
        nodes = tuple(view.same_pods(self.job, data.pods))
        if data.in_place:
            staying = {pod: uid for pod, uid in data.pods.items() if pod not in data.must_exit}
            nodes, more = tuple(view.same_pods(self.job, staying)), (n.DO_EXIT_NODES,)
        faults = self._listed()
        data.in_place = False
        self._change(strategy, *more, faults=faults, nodes=nodes)

    def _on_dump_status(self, status: Status) -> None:
        if status.strategy != n.DUMP:
            return self._ignore(f"a result of {status.strategy!r}, not of the checkpoint")
        saved = status.code == n.OK
        self._result("dump-success" if saved else "dump-failed")
        if not saved:
            self._note("fallback", f"no checkpoint was written ({_why(status)})", **{"from": n.DUMP, "to": n.EXIT})
        self._step()
        self._dump_exit()
        self._await_restart("the checkpoint is written" if saved else "all start again")

    def _exit(self) -> None:
        self._step()
        self._tell(n.EXIT)
        self._result("exit-completed")
        self._await_restart("all start again")

    def _told(self) -> bool:
        """The last word is not forgotten before it is out: who dies in between has to say it again."""
        data = self.data
        if data.not_before is not None and self.now >= data.not_before:
            data.not_before = None
        return data.not_before is None

    def _dump_exit(self) -> None:
        nodes = tuple(view.same_pods(self.job, self.data.pods))
        self._change(n.EXIT, nodes=nodes, extra=n.DUMP_EXIT)

    def _await_restart(self, text: str) -> None:
        self._forget_later()
        if self.job is not None and not self.listening and not self.config.platform:
            # Pods that came before may wait for that word, too: only those that come now need it not.
            self.data.unheard = True
            self.data.origin = {rank: pod.uid for rank, pod in self.job.pods.items()}
        if 0 in self.data.pods:
            self._replace_all("all processes start again, and where they meet goes with the first pod")
        else:
            self._replace(self.data.pods, "all processes start again, and the pods at fault are replaced")
        self._enter(n.RESCHEDULING, self.config.reschedule_wait, f"{text}; the pods at fault are replaced")
        self.data.not_before = self.now + timing.TOLD

    def _forget_later(self) -> None:
        """All processes are started again: what was said of them is over."""
        self.data.later.clear()
        self.data.later_pods.clear()

    def _advance_rescheduling(self) -> bool:
        """Nobody waits any more who was stopped: they have been told, or are new."""
        if not self._told():
            return False
        told = self._are_told and (self.config.platform or view.back(self.job, self.data.pods))
        if not (told or view.renewed(self.job, self.data.origin)):
            return False
        self._restarted("all processes were started again" if told else "the whole job was started again")
        return True

    @property
    def _are_told(self) -> bool:
        """A manager in a new first pod is told nothing, and so tells the pods beside it nothing."""
        return self.listening and not self.data.unheard

    def _restarted(self, text: str) -> None:
        self._reset(n.RESTART_ALL)
        self._close(n.FELL_BACK, text)

    def _rescheduling_timeout(self) -> None:
        if view.running(self.job) and self._are_told:
            self._restarted("all processes were started again")
        else:
            self._reschedule_job("the pods at fault were not replaced in time")

    # The whole job.

    def _reschedule_job(self, why: str) -> None:
        """By the label that lets the scheduler replace all pods, and for a client that still listens by its word."""
        self._note("fallback", f"{why}: the whole job is rescheduled", to=n.JOB_LEVEL)
        self._forget_later()
        self._reset(n.CLEAR)
        self._step()
        self._do(PatchGroup(labels={n.ENABLE: n.PAUSE}))
        self._dump_exit()
        self._replace_all(why)
        self._enter(n.FAULT_RETRY, timing.JOB_RUNNING, "the whole job is rescheduled")
        self.data.not_before = self.now + timing.TOLD

    def _advance_job(self) -> bool:
        if not self._told():
            return False
        started = (self.config.platform and self.listening) or view.renewed(self.job, self.data.origin)
        if not (started and view.running(self.job)):
            return False
        self._label_on()
        self._close(n.FELL_BACK, "the whole job was started again")
        return True

    def _job_timeout(self) -> None:
        if view.running(self.job) and self.listening:
            self._label_on()
            self._close(n.FELL_BACK, "the job was started again")
        else:
            self._kill("the job does not run again")

    def _label_on(self) -> None:
        self._do(PatchGroup(labels={n.ENABLE: n.ON}))
        self.data.label_at = self.now + timing.LABEL

    def _kill(self, why: str) -> None:
        if self.data.state == n.FAULT_RETRY:
            self._label_on()
        self._note("fallback", f"{why}: the job is ended, to be started as a whole", to=n.KILL_MASTER)
        self._forget_later()
        self._step()
        self._signal(n.KILL_MASTER)
        self._replace_all(why)
        if self.config.platform:
            self._result("exit-completed")  # whether or not anybody heard the signal: the rest is the platform's
        self._enter(n.KILL_JOB, timing.KILLED, "the job's manager is told to end")

    def _kill_timeout(self) -> None:
        self._close(n.FAILED, "the job was ended, and its pods are not replaced yet")

    def _ignore(self, why: str) -> None:
        self._note("ignored", why)


def _why(status: Status) -> str:
    return f"{status.code} {status.info}".strip()


why = _why
