"""Elastic training: go on without the ranks at fault, and with them again when their pods are back. Pure."""

from __future__ import annotations

from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing, view
from evertrain.clusterd.recover.events import ReplacePods, Status
from evertrain.clusterd.recover.flows_ending import Ending, why


class Elastic(Ending):
    def _scale_in(self) -> None:
        data = self.data
        data.decided = n.ELASTIC
        self._step()
        faults = self._listed()
        more: tuple[str, ...] = ()
        nodes = tuple(sorted(data.pods))
        if data.in_place:
            staying = {pod: uid for pod, uid in data.pods.items() if pod not in data.must_exit}
            nodes, more = tuple(view.same_pods(self.job, staying)), (n.DO_EXIT_NODES,)
        data.in_place = False
        self._change(n.DOWNGRADE, *more, faults=faults, nodes=nodes, extra=n.SCALE_IN)
        if more:
            self._replace(data.pods, "training goes on without them")
        self._enter(n.SCALE_IN_RANKS, timing.REPORT, "training shrinks: which ranks go on")

    def _on_scale_in_ranks(self, status: Status) -> None:
        if status.strategy != n.DOWNGRADE:
            return self._ignore(f"a result of {status.strategy!r}, not of the downgrade")
        if status.code == n.OK:
            return self._scaled()
        if status.code != n.ISOLATED:
            self.data.after = n.ELASTIC
            return self._fall_back(f"training could not go on smaller ({why(status)})")
        isolated = set()
        if self.job is not None:
            known = {self.job.pod_of(rank) for rank in status.isolate if rank >= 0} & self.job.pods.keys()
            isolated = known - self.data.pods.keys()
            for pod in isolated:
                self.data.pods[pod] = self.job.pods[pod].uid
        self._step()
        self._signal(n.NODES_EXIT, n.DO_EXIT_NODES, nodes=tuple(sorted(isolated)))
        self._replace(isolated, "training goes on without them")
        self._enter(n.SCALE_IN_STATUS, timing.REPORT, f"training shrinks without {view.ranks(status.isolate)}")

    def _scale_in_ranks_timeout(self) -> None:
        self.data.after = n.ELASTIC
        self._fall_back("nobody said which ranks go on")

    def _on_scale_in_status(self, status: Status) -> None:
        if status.strategy != n.DOWNGRADE or status.code == n.ISOLATED:
            return self._ignore(f"{status.strategy!r} {status.code}: not the result of the downgrade")
        if status.code == n.OK:
            return self._scaled()
        self.data.after = n.ELASTIC
        self._fall_back(f"training could not go on smaller ({why(status)})")

    def _scaled(self) -> None:
        self._step()
        self._reset(n.CLEAR)
        self._enter(n.SCALED, None, f"training goes on smaller, without {view.ranks(self._listed())}")

    def _advance_scaled(self) -> bool:
        data, job = self.data, self.job
        if job is None:
            return False
        bad = {each.pod_uid: each for each in view.relevant(job, self._faults) if each.pod in data.pods}
        again = tuple(uid for uid in sorted(bad) if uid not in data.replaced)
        if again and not self.config.platform:
            data.replaced.update(again)
            self._do(ReplacePods(again, "faulty again before it was of use"))
        if bad or not self.listening or not view.back(job, data.pods):
            return False
        self._step()
        self._change(n.UPGRADE, faults=self._listed(), nodes=tuple(sorted(data.pods)), extra=n.SCALE_OUT)
        self._enter(n.SCALE_OUT_STATUS, timing.REPORT, "the pods are back: training grows again")
        return True

    def _on_scale_out_status(self, status: Status) -> None:
        if status.strategy != n.UPGRADE:
            return self._ignore(f"a result of {status.strategy!r}, not of the upgrade")
        if status.code == n.OK:
            return self._close(n.RECOVERED, "training has all its ranks again")
        self.data.after = n.UPGRADE
        self._fall_back(f"training could not grow again ({why(status)})")
