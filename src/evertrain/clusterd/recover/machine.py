"""A job's recovery: one event in, effects out. No clock, no network, no cluster.

`handle` takes what was seen or reported; `deadline` says when to come with a `Tick` if nothing happens before. What is
said about the job and its faults is a state and not a change: after each event the machine looks whether what it
waits for has come true, whichever event it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import state as kept
from evertrain.clusterd.recover import timing, view
from evertrain.clusterd.recover.config import Config
from evertrain.clusterd.recover.core import NEEDS_CLIENT
from evertrain.clusterd.recover.events import (
    Effect,
    Event,
    Failed,
    FaultsSeen,
    JobSeen,
    Lost,
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    PatchGroup,
    PatchPod,
    ProcessFault,
    ReplacePods,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    StressTested,
    Subscribed,
    SwitchNics,
    Tick,
    Unsubscribed,
)
from evertrain.clusterd.recover.flows_hotswitch import SWITCHING
from evertrain.clusterd.recover.flows_main import UNDECIDED
from evertrain.clusterd.recover.flows_om import ORDERED, Maintenance
from evertrain.clusterd.recover.state import Unreadable

_STEPS = 20
"""More than any way through the states that needs no event."""


class Recovery(Maintenance):
    # Kept.

    def dump(self) -> bytes:
        return kept.encode(self.data)

    @classmethod
    def load(cls, data: bytes, job: str, *, make_uuid: Callable[[], str]) -> Recovery:
        """Raises Unreadable."""
        return cls(job, make_uuid=make_uuid, data=kept.decode(data))

    @property
    def worth_keeping(self) -> bool:
        """Another ClusterD would do something else if it did not know this."""
        return self.data != kept.Data(clock=self.data.clock)

    # Events.

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        self._set_clock(now)
        self._take(event)
        self._settle()
        out, self._out = self._out, []
        if any(isinstance(effect, ReplacePods) for effect in out):
            # Pods are told to go before their agents are: one that fails and nobody wants to be gone fails the job,
            # unless that has the label fault-retry-times.
            out.sort(key=lambda effect: isinstance(effect, Signal))
        return out

    def _take(self, event: Event) -> None:
        match event:
            case JobSeen(job=None):
                self._gone()
            case JobSeen(job=job) if job is not None:
                self._see_job(job)
            case FaultsSeen():
                self._faults = event.faults
                self.data.handled &= {view.key(each) for each in event.faults.ranks}
            case Subscribed():
                self.listening = True
                self._come_back()
            case Unsubscribed():
                self.listening = False
            case ProcessFault():
                if faults := self._sensible(event.faults):
                    self._reported(faults)
                elif event.faults:
                    self._ignore(f"faults of ranks that the job does not have: {view.rank_list(event.faults)}")
            case StopComplete():
                self._on(_STOPPED, replace(event, faults=self._sensible(event.faults)))
            case Strategies():
                self._on(_OFFERED, replace(event, faults=self._sensible(event.faults)))
            case Status():
                self._on(_RESULT, event)
            case SwitchNics() | StressTest():
                self._order(event)
            case NicsSwitched():
                self._on({n.SWITCHING_NICS: "_on_nics_switched"}, event)
            case StressTested():
                self._on({n.STRESSING: "_on_stress_tested"}, event)
            case Failed():
                self._failed(event)
            case Lost():
                self._lost(event)
            case Tick():
                pass

    def _on(self, handlers: dict[str, str], event: Event) -> None:
        name = handlers.get(self.data.state)
        if name is None:
            self._ignore(f"a report ({type(event).__name__}) that nobody waits for")
        else:
            getattr(self, name)(event)

    def _gone(self) -> None:
        self.job = None
        self._faults = None
        if self.data.state != n.INIT:
            self._answer("the job is gone")
            self._note("closed", "the job is gone", outcome=n.FAILED, ok=False)
        self.config = Config()
        self.data = kept.Data(clock=self.now)

    def _lost(self, event: Lost) -> None:
        """Training may be stopped, and wait for a word that nobody knows. If a fault was seen since, that leads on."""
        if self.data.state == n.INIT and not self._has_ended:
            self._open(f"what was kept of the job's recovery can't be read: {event.why}")
            self._reschedule_job("nobody knows how far the recovery was")

    def _come_back(self) -> None:
        """A client listens again, or a new one: it may know nothing of what it was told."""
        data = self.data
        if data.released:
            self._signal(n.CONTINUE_START, n.DO_CONTINUE_START, again=False)
        if data.state in UNDECIDED:
            self._note("phase", "the client is back: training is stopped once more", phase=n.PHASES[n.STOPPED])
            self._stop()
        elif data.state == n.PAUSING:
            self._pause()
        elif self.job is not None and self._is_new_manager:
            self._note("ignored", "a client of the pod that has taken the manager's place: nothing is repeated")
        else:
            for signal in data.sent:
                self._do(signal)
            data.unheard = False
            data.returned = data.state != n.INIT
            if data.state in (n.RESCHEDULING, n.FAULT_RETRY):
                data.not_before = self.now + timing.TOLD
            if data.state in (n.SWITCHING_NICS, n.STRESSING):
                self._notify()

    @property
    def _is_new_manager(self) -> bool:
        """Signals that end things are not for those that have begun since."""
        data = self.data
        if data.state not in (n.RESCHEDULING, n.FAULT_RETRY, n.KILL_JOB, n.STOP_JOB) or 0 not in data.origin:
            return False
        return self.job is not None and 0 in self.job.pods and self.job.pods[0].uid != data.origin[0]

    def _failed(self, event: Failed) -> None:
        effect = event.effect
        if isinstance(effect, ReplacePods):
            text = f"pods that have to go can't be replaced yet, and are tried again: {event.why}"
            return self._note("rescheduling", text)
        self._note("ignored", f"{type(effect).__name__} could not be carried out: {event.why}")
        if isinstance(effect, PatchGroup) and effect.labels.get(n.ENABLE) == n.PAUSE:
            if self.data.state == n.FAULT_RETRY:
                self._kill("the scheduler could not be told to replace the job")
        elif isinstance(effect, PatchGroup) and effect.labels.get(n.ENABLE) == n.ON:
            self.data.label_at = self.now + timing.LABEL
        elif isinstance(effect, NotifyNics | NotifyStress):
            if self.data.state in (n.SWITCHING_NICS, n.STRESSING):
                self._not_notified()
        elif isinstance(effect, PatchPod) and self.data.state == n.NEW_POD:
            self.data.hot_off = f"the operator could not be asked for a backup: {event.why}"
            self._call_off(n.CANCELLED, f"{self.data.hot_off}: sub-health is ignored")

    # What has come true.

    def _settle(self) -> None:
        self._keep_label()
        self._watch_listener()
        for _ in range(_STEPS):
            if not (self._expire() or self._advance()):
                break
        self._watch_listener()

    def _keep_label(self) -> None:
        """The label is on pause only while the whole job is rescheduled."""
        data = self.data
        if data.state == n.FAULT_RETRY or (self.job is not None and not self.config.paused):
            data.label_at = None
        elif self.config.paused and data.label_at is None:
            data.label_at = self.now
        if data.label_at is not None and self.now >= data.label_at:
            self._do(PatchGroup(labels={n.ENABLE: n.ON}))
            data.label_at = self.now + timing.LABEL

    def _watch_listener(self) -> None:
        """A client whose pod does not run can't come; how long that may last is a matter of rescheduling."""
        data = self.data
        if self.listening or not self._needs_client:
            data.lonely = data.deserted = None
        elif data.lonely is None or data.deserted is None:
            data.lonely = data.deserted = self.now
        elif self._manager_is_away and self.now - data.deserted < self.config.reschedule_wait:
            data.lonely = self.now

    @property
    def _needs_client(self) -> bool:
        """A job that trains smaller needs nobody as long as all that it trains with is there. If something is not, only
        its client could say so."""
        if self.data.state != n.SCALED:
            return self.data.state in NEEDS_CLIENT
        return not view.away(self.job, self._faults) <= self.data.pods.keys()

    @property
    def _manager_is_away(self) -> bool:
        return self.job is not None and not (0 in self.job.pods and self.job.pods[0].running)

    def _expire(self) -> bool:
        """One limit that is over; False if none is."""
        data = self.data
        if (at := self._lonely_until) is not None and self.now >= at:
            data.lonely = data.deserted = None
            self._abandoned()
        elif data.state == n.RECOVER_STATUS and data.schedule_until is not None and self.now >= data.schedule_until:
            self._unscheduled()
        elif data.until is not None and self.now >= data.until:
            data.until = None
            getattr(self, _TIMEOUTS[data.state])()
        else:
            return False
        return True

    def _abandoned(self) -> None:
        if self.data.state in SWITCHING:
            return self._stop_job("nobody listens to what the training should do")
        if self.data.state in ORDERED:
            self._answer_abandoned()
        self._reschedule_job("nobody listens to what the training should do")

    def _report_timeout(self) -> None:
        self._reschedule_job("the training's report did not come")

    def _advance(self) -> bool:
        """One step that can be made without waiting; False if there is none."""
        if self.data.state not in _RENEW_THEMSELVES and view.renewed(self.job, self.data.origin):
            self._close(n.FELL_BACK, "the whole job was started again")
            return True
        if self.data.state != n.INIT and self.job is not None and self.job.status == "complete":
            self._close(n.CANCELLED, "the job has come to its end")
            return True
        if self.data.state != n.INIT and self.job is not None and self.job.ended:
            self._close(n.FAILED, "the job has failed")
            return True
        name = _ADVANCES.get(self.data.state)
        if name is not None and getattr(self, name)():
            return True
        before = self.data.state
        if before == n.INIT and self.data.later:
            later, self.data.later, self.data.later_pods = self.data.later, {}, {}
            self._reported(later)
            return True
        self._look_at_hardware()
        if self.data.state == n.INIT:
            self._look_at_sub_health()
        return self.data.state != before


_STOPPED = {n.STOPPED: "_on_stop_complete", n.PAUSING: "_on_pause_complete"}
_OFFERED = {
    n.OFFERS: "_on_strategies",
    n.NEW_POD: "_on_paused_for_switch",
    n.HOT_PAUSE: "_on_paused_for_switch",
}
_RESULT = {
    n.STOPPED: "_on_late_status",
    n.RETRY_STATUS: "_on_retry_status",
    n.RECOVER_STATUS: "_on_recover_status",
    n.DUMP_STATUS: "_on_dump_status",
    n.SCALE_IN_RANKS: "_on_scale_in_ranks",
    n.SCALE_IN_STATUS: "_on_scale_in_status",
    n.SCALE_OUT_STATUS: "_on_scale_out_status",
    n.SWITCHING_NICS: "_on_nic_status",
    n.STRESSING: "_on_stress_status",
    n.CONTINUING: "_on_continued",
    n.MIGRATING: "_on_migrated",
}
_TIMEOUTS = {
    n.FLUSHING: "_report_timeout",
    n.STOPPING: "_report_timeout",
    n.STOPPED: "_report_timeout",
    n.GLOBAL_FAULT: "_global_timeout",
    n.OFFERS: "_report_timeout",
    n.DECIDED: "_decided_timeout",
    n.RETRY_STATUS: "_report_timeout",
    n.RECOVER_STATUS: "_report_timeout",
    n.DUMP_STATUS: "_report_timeout",
    n.RESCHEDULING: "_rescheduling_timeout",
    n.FAULT_RETRY: "_job_timeout",
    n.KILL_JOB: "_kill_timeout",
    n.SCALE_IN_RANKS: "_scale_in_ranks_timeout",
    n.SCALE_IN_STATUS: "_report_timeout",
    n.SCALE_OUT_STATUS: "_report_timeout",
    n.PAUSING: "_pause_timeout",
    n.SWITCHING_NICS: "_nic_timeout",
    n.STRESSING: "_stress_timeout",
    n.CONTINUING: "_continue_timeout",
    n.NEW_POD: "_new_pod_timeout",
    n.HOT_PAUSE: "_hot_report_timeout",
    n.OLD_POD: "_old_pod_timeout",
    n.MIGRATING: "_hot_report_timeout",
    n.STOP_JOB: "_stop_job_timeout",
}
"""What happens when a state has lasted too long."""
_ADVANCES = {
    n.FLUSHING: "_advance_flushing",
    n.GLOBAL_FAULT: "_advance_global",
    n.DECIDED: "_advance_decided",
    n.RECOVER_STATUS: "_advance_recover",
    n.RESCHEDULING: "_advance_rescheduling",
    n.FAULT_RETRY: "_advance_job",
    n.SCALED: "_advance_scaled",
    n.STRESSING: "_advance_stressing",
    n.NEW_POD: "_advance_new_pod",
    n.HOT_PAUSE: "_advance_hot_pause",
    n.OLD_POD: "_advance_old_pod",
}
"""What a state waits for, besides reports."""
_RENEW_THEMSELVES = frozenset({n.INIT, n.RESCHEDULING, n.FAULT_RETRY})
"""States that know what to do when all pods are new."""

__all__ = ["Recovery", "Unreadable"]
