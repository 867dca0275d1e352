"""ClusterD's figures for Prometheus.

A recovery is counted by the ClusterD that sees its end, with all of its time, also if another one saw its beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from evertrain.clusterd.recover import names as n
from evertrain.clusterd.resched.shell import RESCHEDULED, START_AGAIN
from evertrain.clusterd.shell import ClusterD
from evertrain.clusterd.timeline.incident import ABANDONED, FIRST_PHASE, JOB_GONE, Incident
from evertrain.kube.metrics import OTHER, Tally, counters, gauge, gauges, histograms, known, requests, summaries

NONE = "none"
"""Nothing was decided: it was over before, or it was an order."""
DECISIONS = (*n.LADDER, n.HOT_SWITCHES, n.JOB_LEVEL, n.POD_LEVEL, NONE, OTHER)
OUTCOMES = (n.RECOVERED, n.FELL_BACK, n.FAILED, n.CANCELLED, RESCHEDULED, ABANDONED, JOB_GONE, OTHER)
PHASES = (FIRST_PHASE, *dict.fromkeys(n.PHASES.values()), n.REBUILD, START_AGAIN, OTHER)
BOUNDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class Figures:
    def __init__(self, answers: Mapping[tuple[str, str], int]) -> None:
        self._answers = answers
        self._ended = Counter({(decision, outcome): 0 for decision in DECISIONS for outcome in OUTCOMES})
        self._seconds = {decision: Tally(*BOUNDS) for decision in DECISIONS}
        self._phases = {phase: Tally() for phase in PHASES}

    def follow(self, clusterd: ClusterD) -> None:
        """From now on; what those before it have counted stays."""
        self._clusterd = clusterd
        clusterd.timeline.closed = self._closed

    def _closed(self, incident: Incident) -> None:
        decision = known(incident.decision or NONE, DECISIONS)
        self._ended[decision, known(incident.outcome, OUTCOMES)] += 1
        if incident.outcome == n.RECOVERED:
            self._seconds[decision].add(incident.total_ms / 1000)
        for name, duration in incident.durations:
            self._phases[known(name, PHASES)].add(duration / 1000)

    def collect(self, leads: bool) -> Iterator[Metric]:
        clusterd = self._clusterd
        yield gauge("evertrain_clusterd_leads", "1 if this ClusterD acts, 0 if it stands by for another.", leads)
        text = "Jobs whose TaskD has registered: those that ClusterD can lead through a recovery."
        yield gauge("evertrain_clusterd_registered_jobs", text, clusterd.hub.registrations)
        text = "Recoveries under way."
        yield gauge("evertrain_clusterd_open_incidents", text, clusterd.timeline.open)
        text = (
            "Faults in force of chips, nodes and switches, by their level, as schedulers see them. Those that a job"
            " is mending by itself are not among them."
        )
        yield gauges("evertrain_clusterd_faults", text, ["kind", "level"], clusterd.faults.in_force())
        text = (
            "Recoveries that have ended, by what was decided last and how it ended; the words are those of"
            " `evertrain timeline`. Decision none: it was over before anything was decided, or it was an order."
        )
        yield counters("evertrain_clusterd_recoveries_total", text, ["decision", "outcome"], self._ended)
        text = "Seconds from the first sign of a fault until the job trained again, of recoveries that succeeded."
        yield histograms("evertrain_clusterd_recovery_seconds", text, "decision", self._seconds)
        text = "Seconds that recoveries, however they ended, have spent in each phase."
        yield summaries("evertrain_clusterd_recovery_phase_seconds", text, "phase", self._phases)
        yield requests(self._answers)
