"""The operator's figures for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from evertrain.acjob.conditions import CREATED, FAILED, RESTARTING, RUNNING, SUCCEEDED
from evertrain.kube.metrics import Tally, counters, gauge, gauges, histogram, known, requests
from evertrain.operator.shell import TROUBLES, Operator

NEW = "New"
"""No condition yet."""
STATES = (NEW, CREATED, RUNNING, RESTARTING, SUCCEEDED, FAILED)
BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30)


class Figures:
    def __init__(self, operator: Operator, answers: Mapping[tuple[str, str], int]) -> None:
        self._operator, self._answers = operator, answers
        self._seconds = Tally(*BOUNDS)
        self._errors = Counter({(trouble,): 0 for trouble in TROUBLES})
        operator.looked = self._looked

    def _looked(self, seconds: float, trouble: str) -> None:
        self._seconds.add(seconds)
        if trouble:
            self._errors[trouble,] += 1

    def collect(self, leads: bool) -> Iterator[Metric]:
        yield gauge("evertrain_operator_leads", "1 if this operator acts, 0 if it stands by for another.", leads)
        text = "AscendJobs by state, which is their newest condition; New: they have none yet."
        yield gauges("evertrain_operator_jobs", text, ["state"], self._states())
        text = "Jobs that wait to be looked at."
        yield gauge("evertrain_operator_queue_length", text, self._operator.waiting)
        text = "Seconds that each look at a job took, with all that was done about it."
        yield histogram("evertrain_operator_reconcile_seconds", text, self._seconds)
        text = (
            "Looks at a job that did not get to their end and are repeated. unfinished: something was in the way,"
            " a quota say, or the job was changed meanwhile; api: the API server refused or did not answer;"
            " defect: an error in the operator, see its log."
        )
        yield counters("evertrain_operator_reconcile_errors_total", text, ["reason"], self._errors)
        yield requests(self._answers)

    def _states(self) -> Counter[tuple[str, ...]]:
        found: Counter[tuple[str, ...]] = Counter({(state,): 0 for state in STATES})
        for job in self._operator.observer.jobs:
            conditions = (job.get("status") or {}).get("conditions")
            found[known(conditions[-1].get("type", ""), STATES) if conditions else NEW,] += 1
        return found
