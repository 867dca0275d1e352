"""noded's figures for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from evertrain.kube.metrics import counters, gauges, requests
from evertrain.noded.daemon import NodeDaemon

DEVICE, NODE = "deviceinfo", "nodeinfo"


class Figures:
    def __init__(self, daemon: NodeDaemon, answers: Mapping[tuple[str, str], int]) -> None:
        self._daemon, self._answers = daemon, answers

    def collect(self) -> Iterator[Metric]:
        daemon = self._daemon
        text = "Faults in force on this node, of its chips, its switch or other parts (node), by their level."
        found = Counter((str(fault.key[0]), level) for fault, level in daemon.faults)
        yield gauges("evertrain_noded_faults", text, ["kind", "level"], found)
        sheets = {(DEVICE,): daemon.device, (NODE,): daemon.info}
        text = (
            "When this process last wrote or removed its ConfigMap of chips (deviceinfo, every 5 minutes) or of other"
            " parts (nodeinfo, every 30 minutes while there is a fault); missing if it had no reason to yet."
        )
        times = {name: sheet.written for name, sheet in sheets.items() if sheet.written is not None}
        yield gauges("evertrain_noded_last_publish_timestamp_seconds", text, ["configmap"], times)
        text = "Times that a ConfigMap could not be written; it is tried again."
        failures = {name: sheet.failures for name, sheet in sheets.items()}
        yield counters("evertrain_noded_publish_errors_total", text, ["configmap"], failures)
        text = "Times that a detector has failed and was started again; see the log."
        failed = {(name,): count for name, count in daemon.detector_failures.items()}
        yield counters("evertrain_noded_detector_failures_total", text, ["detector"], failed)
        yield requests(self._answers)
