"""Link failover and stress test: training pauses, its workers do something, and it goes on. Pure.

Who ordered it is told how it went, once. If it goes wrong while training is paused, a recovery follows; if training
can't be paused or continued, the job is started as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from evertrain.clusterd.model import OTHER
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing, view
from evertrain.clusterd.recover.events import (
    Answer,
    IsolateNode,
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    Status,
    StopComplete,
    StressTest,
    StressTested,
    SwitchNics,
)
from evertrain.clusterd.recover.flows_hotswitch import HotSwitch

NIC, STRESS = "nic", "stress"
STRESS_CODES = frozenset({"80818C05", "80818C06"})
"""Faults that a stress test itself causes."""
FAULTY, HANGS, NO_VOLTAGE = "2", "3", "4"
_NAMES = {NIC: "switch nic", STRESS: "stress test"}
ORDERED = frozenset({n.PAUSING, n.SWITCHING_NICS, n.STRESSING, n.CONTINUING})


class Maintenance(HotSwitch):
    def may_start_om(self) -> bool:
        """Nothing goes on and nothing is about to: training may be paused for an order."""
        return self.data.state == n.INIT and not self.data.later

    @property
    def tested(self) -> list[int]:
        """The ranks of a stress test that goes on."""
        return list(self.data.stress)

    def _order(self, event: SwitchNics | StressTest) -> None:
        data = self.data
        order = NIC if isinstance(event, SwitchNics) else STRESS
        if not self.may_start_om():
            return self._ignore(f"the order {_NAMES[order]!r}: something else goes on")
        if not event.ops:
            return self._do(Answer(order, f"{_NAMES[order]} finish"))
        if not self.listening:
            return self._do(Answer(order, "pause train failed, job service not ready"))
        if isinstance(event, SwitchNics):
            data.nics = dict(event.ops)
        else:
            data.stress = dict(event.ops)
        data.order = order
        self._open(f"{_NAMES[order]} of {view.ranks(event.ops)} was ordered")
        self._pause()

    def _pause(self) -> None:
        data = self.data
        data.uuid = self._make_uuid()
        self._step()
        limit = timing.STRESS_PAUSE if data.order == STRESS else 0
        self._signal(n.STOP_TRAIN, n.DO_PAUSE, timeout=limit)
        self._enter(n.PAUSING, timing.REPORT, "training is paused")

    def _on_pause_complete(self, report: StopComplete) -> None:
        if report.code == n.ONLY_EXIT:
            self._answer("om failed, pause train failed")
            return self._kill("training could not be paused")
        if report.code == n.ONLY_DUMP:
            self._answer("om failed, pause train failed")
            return self._close(n.CANCELLED, "the training comes to its end: what was ordered was not done")
        self._take_reported(report.faults)
        self._step()
        if self.data.order == NIC:
            self._enter(n.SWITCHING_NICS, timing.REPORT, "links are switched")
        else:
            self._signal(n.PAUSE_START, n.DO_PAUSE_START)
            self._reset(n.FLUSH)
            self._enter(n.STRESSING, timing.REPORT, "the chips are tested")
        self._notify()

    def _notify(self) -> None:
        data = self.data
        self._do(NotifyNics(dict(data.nics)) if data.order == NIC else NotifyStress(dict(data.stress)))

    def _pause_timeout(self) -> None:
        self._answer("pause train timeout")
        self._kill("training was not paused in time")

    # The links.

    def _on_nics_switched(self, event: NicsSwitched) -> None:
        if event.ok:
            self.data.answer = "switch nic finish"
            return self._continue()
        self._answer("switch nic failed, switch nic failed")
        self._recover_instead("links could not be switched")

    def _on_nic_status(self, status: Status) -> None:
        if status.code == n.OK:
            return self._ignore("a success while links are switched")
        self._answer("switch nic failed, report error when switching nic")
        self._recover_instead("a fault while links were switched")

    def _nic_timeout(self) -> None:
        self._answer("switch nic failed, report switch nic timeout")
        self._recover_instead("links were not switched in time")

    # The stress test.

    def _on_stress_tested(self, event: StressTested) -> None:
        results = {rank: ops for rank, ops in event.results.items() if rank in self.data.stress}
        codes = {rank: {code for code, _ in ops.values()} for rank, ops in results.items()}
        faulty = {rank for rank, found in codes.items() if FAULTY in found}
        hanging = {rank for rank, found in codes.items() if found & {HANGS, NO_VOLTAGE}} - faulty
        self._stress_over()
        if faulty:
            self._isolate(faulty)
        if hanging:
            self._answer(f"stress test timeout fault, faultRank:{view.rank_list(hanging)}")
            self._blame(dict.fromkeys(sorted(hanging), OTHER))
        if faulty or hanging or self.data.spoilt:
            return self._recover_instead("the stress test has found faults" if faulty else "the stress test failed")
        self.data.answer = f"stress test finish, result:{self._stress_json(results)}"
        self._continue()

    def _stress_over(self) -> None:
        """Agents that want to start may."""
        self._reset(n.CLEAR)
        self.data.released = True
        self._signal(n.CONTINUE_START, n.DO_CONTINUE_START, again=False)

    def _isolate(self, ranks: set[int]) -> None:
        job = self.job
        found = {job.pods[job.pod_of(rank)].node for rank in ranks if job.pod_of(rank) in job.pods} if job else set()
        nodes = sorted(found - {""})
        self._answer(f"stress test find fault, isolate node:{','.join(nodes)}")
        for node in nodes:
            self._do(IsolateNode(node, "the stress test has found a fault"))
        pods = [pod for pod, each in job.pods.items() if each.node in nodes] if job else []
        self._blame((view.expanded(job, pods) if job else {}) | dict.fromkeys(sorted(ranks), OTHER))

    def _blame(self, faults: Mapping[int, str]) -> None:
        """Their chips are not to be used again, so that their pods can't stay."""
        self._take_reported(faults)
        if self.job is not None:
            for rank in faults:
                self.data.hardware[self.job.pod_of(rank)] = False

    def _stress_json(self, results: Mapping[int, Mapping[str, tuple[str, str]]]) -> str:
        """By node and device."""
        found: dict[str, dict[str, object]] = {}
        for rank, ops in sorted(results.items()):
            pod = self.job.pods.get(self.job.pod_of(rank)) if self.job is not None else None
            index = rank - self.job.ranks_of(pod.rank).start if self.job is not None and pod is not None else 0
            device = pod.devices[index].id if pod is not None and index < len(pod.devices) else str(index)
            result = {op: {"code": code, "result": text} for op, (code, text) in sorted(ops.items())}
            found.setdefault(pod.node if pod is not None else "", {})[device] = {"rankResult": result}
        return msgspec.json.encode(found).decode()

    def _on_stress_status(self, status: Status) -> None:
        """The workers still test: what has failed is dealt with when they are done."""
        if status.code == n.OK:
            return self._ignore("a success while chips are tested")
        self._spoil()

    def _spoil(self) -> None:
        self.data.spoilt = True
        self._answer("recv fault, when stressing test")

    def _stress_timeout(self) -> None:
        self._answer("stress test failed, report stress test timeout")
        self._stress_over()
        self._recover_instead("the stress test did not end in time")

    def _advance_stressing(self) -> bool:
        """Its own faults are no faults."""
        tested = {self.job.pod_of(rank) for rank in self.data.stress} if self.job is not None else set()
        for each in self._new_faults():
            if each.pod in tested and each.code.upper() in STRESS_CODES:
                self.data.handled.add(view.key(each))
        return False

    # Afterwards.

    def _continue(self) -> None:
        self._step()
        self._change(n.CONTINUE, faults=dict.fromkeys(sorted(self.data.faults), OTHER), nodes=sorted(self.data.pods))
        self._enter(n.CONTINUING, timing.REPORT, "training goes on")

    def _on_continued(self, status: Status) -> None:
        if status.strategy not in ("", n.CONTINUE):
            return self._ignore(f"a result of {status.strategy!r}, not of going on")
        if status.code == n.OK:
            self._answer(self.data.answer)
            outcome = n.RECOVERED if self.data.answer else n.CANCELLED
            return self._close(outcome, self.data.answer or "training goes on, what was ordered was not done")
        self._answer(f"{_NAMES[self.data.order]} failed, continue train failed")
        if status.code == n.ONLY_EXIT:
            return self._kill("training could not go on")
        self._recover_instead("a fault while training was about to go on")

    def _continue_timeout(self) -> None:
        self._answer(f"{_NAMES[self.data.order]} failed, continue train timeout")
        self._kill("training did not go on in time")

    def _recover_instead(self, text: str) -> None:
        self.data.nic_round = self.data.order == NIC
        self._note("fault", f"{text}: a recovery follows", faults=dict(self.data.faults))
        self._stop()

    def _reported(self, faults: Mapping[int, str]) -> None:
        state = self.data.state
        if state not in ORDERED:
            return super()._reported(faults)
        self._note("fault", f"{view.ranks(faults)} failed, as the training says", faults=dict(faults))
        self._take_reported(faults)
        if state == n.STRESSING:
            return self._spoil()
        self._answer(
            {
                n.PAUSING: "om failed, pause train failed",
                n.SWITCHING_NICS: "switch nic failed, report error when switching nic",
            }.get(state, f"{_NAMES[self.data.order]} failed, continue train failed")
        )
        self._recover_instead("a process failed while training was paused")

    def _answer_abandoned(self) -> None:
        what = _NAMES.get(self.data.order, "")
        text = {
            n.PAUSING: "pause train failed, job service not ready",
            n.CONTINUING: "continue train failed, job service not ready",
        }
        self._answer(text.get(self.data.state, f"{what} failed, job service not ready"))

    def _not_notified(self) -> None:
        """The workers could not be told: training goes on as it was."""
        self._answer(f"send {_NAMES[self.data.order]} signal failed, please check manually")
        if self.data.state == n.STRESSING:
            self._stress_over()
        self._continue()
