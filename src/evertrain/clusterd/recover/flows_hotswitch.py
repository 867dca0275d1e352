"""Hot switch: replace a sub-healthy node while training runs. Pure.

A backup of the pod is started beside it; when its processes are ready, training pauses between two steps, the old pod
is deleted, and the backup's processes go on in its ranks. Until training has paused it can be called off at no cost,
and is: when the node is well again, when no backup comes to run (there is no spare) or it ends before it is ready, when
a real fault comes in between.
"""

from __future__ import annotations

from collections.abc import Mapping

from evertrain.clusterd.model import HEALTHY, RankFault
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import platform, timing, view
from evertrain.clusterd.recover.config import FRAMEWORKS
from evertrain.clusterd.recover.decide import only_dump
from evertrain.clusterd.recover.events import PatchPod, ReplacePods, Status, Strategies
from evertrain.clusterd.recover.flows_ending import why
from evertrain.clusterd.recover.flows_main import Main

CANCELLABLE = frozenset({n.NEW_POD, n.HOT_PAUSE})
SWITCHING = CANCELLABLE | {n.OLD_POD, n.MIGRATING}


class HotSwitch(Main):
    # Whether.

    def _look_at_sub_health(self) -> None:
        """In INIT only."""
        if self._faults is not None and self._faults.health == HEALTHY:
            self.data.hot_off = ""
        self._dismiss_backups()
        if not self._sub_healthy or self._over:
            return
        news = self._new_faults()
        if not news:
            return
        if self.config.grace_exit and only_dump(self.config, platform.strategy(self.job)):
            first = news[0]
            self._open(f"sub-health {first.code} on node {first.node}: a checkpoint, then elsewhere", faults=news)
            self._take_hardware(news)
            self._begin()
        elif self.config.hot_switch and not self.data.hot_off and self.listening:
            self._admit(news)

    def _admit(self, news: list[RankFault]) -> None:
        movable = [each for each in news if each.pod != 0]
        pods = {each.pod for each in movable}
        if self.config.framework not in FRAMEWORKS:
            return self._refuse(news, f"hot switch is not for the framework {self.config.framework or '(none)'!r}")
        if len(pods) > timing.MAX_HOT_PODS:
            return self._refuse(news, f"{len(pods)} pods are sub-healthy, too many for a hot switch")
        if first := [each for each in news if each.pod == 0]:
            self.data.handled |= {view.key(each) for each in first}
            self._leave(first, f"sub-health {first[0].code} in the first pod, which is never switched")
        if movable:
            self._switch(min(pods), [each for each in movable if each.pod == min(pods)])

    def _refuse(self, news: list[RankFault], text: str) -> None:
        self.data.hot_off = text
        self._leave(news, text)

    def _leave(self, news: list[RankFault], text: str) -> None:
        """As an incident that is over at once: of a note that belongs to none nobody but the log hears."""
        self._open(text, faults=news)
        self._note("closed", f"{text}: sub-health is ignored", outcome=n.CANCELLED, ok=True)
        self.data.id, self.data.origin = "", {}

    # The flow.

    def _switch(self, pod: int, faults: list[RankFault]) -> None:
        data, job = self.data, self.job
        assert job is not None
        self._open(f"sub-health {faults[0].code} on node {faults[0].node}: pod {pod} is switched", faults=faults)
        data.handled |= {view.key(each) for each in faults}
        data.uuid = self._make_uuid()
        old = job.pods[pod]
        data.hot_pod, data.hot_name, data.hot_uid = pod, old.name, old.uid
        self._note("decision", "the node still works: its pod is replaced while training runs", strategy=n.HOT_SWITCHES)
        self._step()
        self._signal(n.HOT_SWITCH, n.DO_HOT_SWITCH, faults=view.expanded(job, [pod]))
        self._do(PatchPod(old.name, old.uid, annotations={n.IN_FLOW: n.TRUE, n.OPERATOR: n.CREATE}))
        self._enter(n.NEW_POD, timing.NEW_POD, f"a backup of pod {pod} is started")

    def _advance_new_pod(self) -> bool:
        data, job = self.data, self.job
        if job is None:
            return False
        if self._is_needless():
            return True
        backup = job.backups.get(data.hot_name)
        if backup is None or not backup.running:
            return False
        data.backup_name, data.backup_uid = backup.name, backup.uid
        self._step()
        self._signal(n.HOT_SWITCH, n.DO_POD_RUNS)
        self._enter(n.HOT_PAUSE, timing.REPORT, "the backup runs; training pauses when its processes are ready")
        return True

    def _advance_hot_pause(self) -> bool:
        data, job = self.data, self.job
        if job is None:
            return False
        if self._is_needless():
            return True
        backup = job.backups.get(data.hot_name)
        if backup is not None and backup.uid == data.backup_uid and backup.running:
            return False
        data.hot_off = f"the backup {data.backup_name} ended before it was ready"
        self._call_off(n.CANCELLED, f"{data.hot_off}: sub-health is ignored")
        return True

    def _is_needless(self) -> bool:
        """Whether there is no reason for the switch any more; then it is called off."""
        data, job = self.data, self.job
        assert job is not None
        if self._real_fault():
            return True
        if data.hot_uid not in {pod.uid for pod in job.pods.values()}:
            self._call_off(n.CANCELLED, "the sub-healthy pod is gone already")
            return True
        if self._faults is not None and not self._still_sub_healthy():
            self._call_off(n.CANCELLED, "the node is well again: the switch is called off")
            return True
        return False

    def _still_sub_healthy(self) -> bool:
        data = self.data
        return self._faults is not None and any(
            each.pod == data.hot_pod and each.pod_uid == data.hot_uid for each in self._faults.ranks
        )

    def _real_fault(self) -> bool:
        """Something worse than sub-health: the switch is called off, and the fault is dealt with."""
        if not self.config.enabled or self._sub_healthy or not self._new_faults():
            return False
        self._call_off(n.CANCELLED, "a worse fault comes first: the switch is called off")
        return True

    def _new_pod_timeout(self) -> None:
        self.data.hot_off = f"no backup ran within {timing.NEW_POD:g} s; there may be no spare node"
        self._call_off(n.CANCELLED, f"{self.data.hot_off}: sub-health is ignored")

    def _call_off(self, outcome: str, text: str) -> None:
        self._signal(n.HOT_SWITCH, n.DO_STOP_SWITCH, again=False)
        self._roll_back()
        self._close(outcome, text)

    def _roll_back(self) -> None:
        data = self.data
        nothing = {n.IN_FLOW: None, n.BACKUP_NAME: None, n.OPERATOR: None}
        self._do(PatchPod(data.hot_name, data.hot_uid, annotations=nothing))
        self._dismiss_backups()

    def _dismiss_backups(self) -> None:
        """The operator deletes backups that nobody needs; also one that came after the switch was called off."""
        if self.job is None:
            return
        for backup in self.job.backups.values():
            if backup.uid not in self._dismissed and backup.annotations.get(n.OPERATOR) != n.DELETE:
                self._dismissed.add(backup.uid)
                self._do(PatchPod(backup.name, backup.uid, annotations={n.OPERATOR: n.DELETE}))

    def _on_paused_for_switch(self, report: Strategies) -> None:
        """May come before the cluster has told that the backup runs."""
        data = self.data
        if set(report.strategies) <= {n.EXIT}:
            return self._stop_job("training could not pause for the switch")
        labels, marks = {n.FAULT_TYPE: n.SUB_HEALTH}, {n.VOLCANO: n.DELETE}
        self._do(PatchPod(data.hot_name, data.hot_uid, labels=labels, annotations=marks))
        if not self.config.platform:
            data.replaced.add(data.hot_uid)
            self._do(ReplacePods((data.hot_uid,), "its backup takes over"))
        self._enter(n.OLD_POD, timing.OLD_POD, "training has paused; the old pod is deleted")

    def _advance_old_pod(self) -> bool:
        if self.job is None or self.data.hot_uid in {pod.uid for pod in self.job.pods.values()}:
            return False
        self._step()
        self._change(n.MIGRATION)
        self._enter(n.MIGRATING, timing.REPORT, "the backup's processes take over")
        return True

    def _on_migrated(self, status: Status) -> None:
        data = self.data
        if status.strategy != n.MIGRATION:
            return self._ignore(f"a result of {status.strategy!r}, not of the migration")
        if status.code != n.OK:
            return self._stop_job(f"the backup could not take over ({why(status)})")
        new = self.job.pods.get(data.hot_pod) if self.job is not None else None
        if new is not None:
            self._do(PatchPod(new.name, new.uid, annotations={n.IN_FLOW: None}))
        self._close(n.RECOVERED, "the sub-healthy node was replaced, training goes on")

    # When it goes wrong after training has paused.

    def _stop_job(self, text: str) -> None:
        data = self.data
        data.hot_off = text
        self._note("fallback", f"{text}: the whole job is rescheduled", **{"from": n.HOT_SWITCHES, "to": n.JOB_LEVEL})
        self._forget_later()
        self._step()
        first = self.job.pods.get(0) if self.job is not None else None
        if first is not None:
            labels, marks = {n.FAULT_TYPE: n.SUB_HEALTH}, {n.VOLCANO: n.DELETE}
            self._do(PatchPod(first.name, first.uid, labels=labels, annotations=marks))
        self._roll_back()
        self._replace_all(text)
        self._enter(n.STOP_JOB, timing.JOB_RUNNING, "the whole job is rescheduled")

    def _stop_job_timeout(self) -> None:
        self._kill("the job was not rescheduled")

    def _hot_report_timeout(self) -> None:
        self._stop_job("the training's report did not come")

    def _old_pod_timeout(self) -> None:
        self._stop_job("the old pod was not deleted")

    def _reported(self, faults: Mapping[int, str]) -> None:
        data, job = self.data, self.job
        if data.state in CANCELLABLE:
            self._call_off(n.CANCELLED, "a process failed: the switch is called off")
        elif data.state in SWITCHING and job is not None:
            # Its processes end with the old pod: that is the purpose.
            own = {rank: kind for rank, kind in faults.items() if job.pod_of(rank) == data.hot_pod}
            if own:
                self._ignore(f"{view.ranks(own)} ended with the old pod")
            faults = {rank: kind for rank, kind in faults.items() if rank not in own}
            if not faults:
                return
        super()._reported(faults)
