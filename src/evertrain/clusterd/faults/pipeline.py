"""The processors that a node's faults go through, in their order. Pure."""

from __future__ import annotations

from evertrain.clusterd.faults import inplace
from evertrain.clusterd.faults.cluster import Cluster
from evertrain.clusterd.faults.custom import SERVER, Filter, both
from evertrain.clusterd.faults.jobview import JobView
from evertrain.clusterd.faults.manual import Manual
from evertrain.clusterd.faults.public import PublicFaults
from evertrain.clusterd.faults.relations import Relations
from evertrain.clusterd.faults.retry import Reports, Retries
from evertrain.clusterd.faults.seen import NO_FAULT, YOUNG, Look, Seen
from evertrain.clusterd.faults.wellknown import STRESS_TEST, is_any
from evertrain.faultcodes.table import Codes
from evertrain.wire.faultinfo import ChipFault, DeviceInfo, SwitchFault


class Pipeline:
    def __init__(self, cluster: Cluster, codes: Codes) -> None:
        self._cluster = cluster
        self.reports = Reports()
        self.retries = Retries(self.reports)
        self.manual = Manual()
        self.relations = Relations()
        self.public = PublicFaults(codes)
        self.exposed: set[str] = set()
        """Pods (uids) for which restarting processes where they are was given up."""
        self.tested: dict[str, frozenset[str]] = {}
        """Nodes under a stress test, by job."""
        self.heard: frozenset[str] = frozenset()
        """MindIE services of whose faults somebody hears."""

    def filter_of(self, shown: JobView) -> Filter:
        return both(shown.filter, SERVER) if shown.serves and shown.serves in self.heard else shown.filter

    def concerns(self, name: str) -> bool:
        """More is known of the node than it publishes."""
        return name in self.public.state.nodes or name in self.manual.state.isolated or name in self.retries.memory

    def chips(self, look: Look, faults: list[ChipFault], device: DeviceInfo) -> list[Seen]:
        seen = [look.see(fault) for fault in faults]
        seen += [look.see(fault, added=True) for fault in self.public.on(look.node, device.type)]
        for each in seen:
            if each.view is not None and (filter := self.filter_of(each.view)):
                ms = filter.hides_for(each.fault.code, each.fault.level)
                if ms and look.until(each.fault.time_ms + ms):
                    each.hidden = YOUNG
        self.retries.accompany(look, seen)
        self.retries.apply(look, seen, lambda shown: self.relations.links_down(shown.uid))
        inplace.withhold(look, seen, self._cluster.levels_of, self.exposed)
        if any(look.node in nodes for nodes in self.tested.values()):
            for each in seen:
                if is_any(each.fault.code, STRESS_TEST):
                    each.hidden = NO_FAULT
        self.manual.see(look.node, seen, look.now)
        return seen + [look.see(fault, added=True) for fault in self.manual.faults(look.node)]

    def grown(self, look: Look, faults: tuple[SwitchFault, ...]) -> list[SwitchFault]:
        """The faults of a switch that no job on the node asks to be hidden for their age."""
        filters = [self.filter_of(shown) for shown in self._cluster.jobs_on(look.node)] if faults else []
        left = []
        for fault in faults:
            ms = max((each.hides_for(fault.code, fault.level) for each in filters), default=0)
            if not (ms and 0 < fault.time_ms <= look.now and look.until(fault.time_ms + ms)):
                left.append(fault)
        return left
