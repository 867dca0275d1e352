"""The fault centre: what is published about nodes goes in, what is wrong with jobs and what schedulers see comes out.

The order of processors is that of the original: public faults, the job's own filter, what accompanies memory errors,
retries, restarts in place, stress tests, chips to be kept away from, isolation by hand; then, for each job, related
faults and the ranks that are hit.

Nothing is done for what has not changed: a change of a node leads to a look at that node, then at the jobs on it. Where
time alone changes something, `Result.next_ms` says when to come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from evertrain.clusterd.faults import public, state, view
from evertrain.clusterd.faults.cluster import Cluster, pods_at
from evertrain.clusterd.faults.inputs import KubeNode, NodeState
from evertrain.clusterd.faults.jobview import JobView, renewed_ranks
from evertrain.clusterd.faults.manual import Policy, read_policy
from evertrain.clusterd.faults.pipeline import Pipeline
from evertrain.clusterd.faults.ranks import NodeFaults, job_faults
from evertrain.clusterd.faults.relations import read_rules
from evertrain.clusterd.faults.result import Isolation, Result
from evertrain.clusterd.faults.retry import KEEP_REPORT_MS
from evertrain.clusterd.faults.seen import Look, Seen, number
from evertrain.clusterd.faults.timers import Timers
from evertrain.clusterd.model import NETWORK, Job, JobFaults
from evertrain.faultcodes.levels import HEALTHY
from evertrain.faultcodes.table import Codes, shipped
from evertrain.wire.faultinfo import ChipFault, DeviceInfo, NodeInfo, SwitchInfo

_NODE, _JOB, _REPORT = "node", "job", "report"
_NO_SWITCH, _NO_NODE = SwitchInfo(), NodeInfo()


class FaultCentre:
    def __init__(self, codes: Codes | None = None) -> None:
        self.codes = codes if codes is not None else shipped()
        self._cluster = Cluster()
        self._pipeline = Pipeline(self._cluster, self.codes)
        self._dirty_nodes: set[str] = set()
        self._dirty_jobs: set[str] = set()
        self._unjudged: dict[str, str] = {}
        """Nodes that could not be looked at, and why."""
        self._timers = Timers()
        self._complaints: list[str] = []
        self._faulty: dict[str, NodeFaults] = {}
        self._faults: dict[str, JobFaults] = {}
        self._devices: dict[str, DeviceInfo] = {}
        self._switches: dict[str, SwitchInfo] = {}
        self._infos: dict[str, NodeInfo] = {}
        self._isolated: dict[str, Isolation] = {}
        self._labels: dict[str, dict[str, str]] = {}
        """By job."""
        self._texts: tuple[int, int, Mapping[str, str], Mapping[str, str]] = (-1, -1, {}, {})

    def clock_set(self, by_ms: int) -> None:
        """The clock was set forward by so much, or back: nothing has become due, and all is as old as it was."""
        for node in self._cluster.nodes.values():
            node.clock_set(by_ms)
        self._timers.clock_set(by_ms)
        for each in (self._pipeline.retries, self._pipeline.manual, self._pipeline.relations, self._pipeline.public):
            each.clock_set(by_ms)
        self._dirty_nodes.update(self._cluster.nodes, self._pipeline.retries.memory)
        self._dirty_jobs.update(self._cluster.views)

    # What is published.

    def device(self, node: str, data: Mapping[str, str] | None) -> None:
        """mindx-dl-deviceinfo-<node>; None: it is gone."""
        self._read(node, self._cluster.read(node, data, NodeState.read_device))

    def node(self, node: str, data: Mapping[str, str] | None) -> None:
        """mindx-dl-nodeinfo-<node>; None: it is gone."""
        self._read(node, self._cluster.read(node, data, NodeState.read_node))

    def k8s_nodes(self, nodes: Mapping[str, KubeNode]) -> None:
        """All nodes of the cluster. From the first time on, one that is missing here has failed."""
        self._touch(self._cluster.set_kube(nodes))

    def k8s_node(self, name: str, node: KubeNode | None) -> None:
        """A change of one, after all were told."""
        if self._cluster.set_kube_node(name, node):
            self._touch({name})

    def jobs(self, jobs: Mapping[str, Job]) -> None:
        """All jobs, by uid."""
        known = self._cluster.jobs
        for uid in [uid for uid in known if uid not in jobs]:
            self.job(uid, None)
        for uid, job in jobs.items():
            if known.get(uid) is not job:
                self.job(uid, job)

    def job(self, uid: str, job: Job | None) -> None:
        """A change of one; None: it is gone."""
        before, after = self._cluster.set_job(uid, job)
        if before is not None and before == after:
            return
        self._dirty_jobs.add(uid)
        nodes = (before.nodes if before is not None else set()) | (after.nodes if after is not None else set())
        if before is not None:
            self._pipeline.exposed -= before.uids - (after.uids if after is not None else frozenset())
        if after is None:
            self._pipeline.tested.pop(uid, None)
            self._pipeline.relations.jobs.pop(uid, None)
            self._pipeline.reports.by_job.pop(uid, None)
            nodes |= self._pipeline.retries.forget(uid)
        elif before is not None:
            self._pipeline.reports.drop(uid, renewed_ranks(before, after))
        self._touch_troubled(nodes)

    def process_report(self, job: str, faults: Mapping[int, str], now_ms: int) -> None:
        """A training process reports faults of ranks, by type."""
        shown = self._cluster.views.get(job)
        if shown is None:
            return
        self._pipeline.reports.add(job, faults, now_ms)
        nodes = set(shown.pods)
        if NETWORK in faults.values():
            nodes |= self._pipeline.retries.forget(job)
        self._touch_troubled(nodes)
        self._dirty_jobs.add(job)
        self._timers.set((_REPORT, job), now_ms + KEEP_REPORT_MS)

    def public(self, message: object, now_ms: int) -> str:
        """A message of public faults. Empty if it is taken, else what is wrong with it."""
        wrong, left_out = self._pipeline.public.receive(message, self._cluster.serials.get, now_ms)
        self._complaints += [f"of a message of public faults: {each}" for each in left_out]
        return wrong

    def public_config_map(self, name: str, text: str, now_ms: int) -> None:
        """What a ConfigMap says of public faults."""
        wrong, left_out = self._pipeline.public.config_map(name, text, self._cluster.serials.get, now_ms)
        self._complaints += [f"public faults in {name}: {each}" for each in (*left_out, wrong) if each]

    def public_config_map_gone(self, name: str) -> None:
        """That is no news of faults."""
        self._pipeline.public.forget(name)

    def public_config_maps(self, names: Collection[str]) -> None:
        """These are all that there are."""
        self._pipeline.public.retain(names)

    # What is set.

    def set_codes(self, codes: Codes) -> None:
        self.codes = self._pipeline.public.codes = codes
        self._dirty_nodes.update(self._cluster.nodes)

    def manual_policy(self, text: str | None) -> None:
        """manually_separate_policy.conf; None: there is none."""
        policy: Policy | None = Policy()
        wrong: list[str] = []
        if text is not None:
            policy, wrong = read_policy(text)
        self._complaints += wrong
        if policy is None:
            return
        self._dirty_nodes |= self._pipeline.manual.set_policy(policy)
        self._touch_troubled(set(self._cluster.nodes))

    def manual_listed(self, data: Mapping[str, str] | None) -> None:
        """clusterd-manual-info-cm as it stands: chips that somebody has taken out of it are released."""
        self._dirty_nodes |= self._pipeline.manual.listed(data)

    def relation_rules(self, relations: str, durations: str) -> None:
        """relationFaultCustomization.json and faultDuration.json; empty: there is none."""
        self._pipeline.relations.rules, wrong = read_rules(relations, durations)
        self._complaints += wrong

    def stress_testing(self, job: str, nodes: Collection[str]) -> None:
        """Chips of these nodes are under test for the job; none: no longer."""
        touched = self._pipeline.tested.pop(job, frozenset()) | set(nodes)
        if nodes:
            self._pipeline.tested[job] = frozenset(nodes)
        self._touch_troubled(touched)

    def heard(self, services: Collection[str]) -> None:
        """These are the MindIE services of whose faults somebody hears."""
        before, self._pipeline.heard = self._pipeline.heard, frozenset(services)
        changed = before ^ self._pipeline.heard
        served = [shown for shown in self._cluster.views.values() if shown.serves in changed and shown.serves]
        self._touch_troubled({node for shown in served for node in shown.nodes})

    def expose(self, pods: Iterable[str]) -> None:
        """Restarting processes where they are was given up for these pods (uids): schedulers shall see their faults."""
        self._pipeline.exposed.update(pods)
        self._touch_troubled(set(self._cluster.nodes))

    # What comes out.

    def process(self, now_ms: int) -> Result:
        self._wake(now_ms)
        self._dirty_nodes |= self._unjudged.keys()
        news, changed = self._look_at_nodes(now_ms), self._look_at_jobs(now_ms)
        if self._dirty_nodes:  # what was put down to links that are no reason any more
            news, changed = news | self._look_at_nodes(now_ms), changed | self._look_at_jobs(now_ms)
        complaints, self._complaints = tuple(self._complaints), []
        manual, statistics = self._written()
        whens = (self._timers.next, self._pipeline.manual.next_ms(), self._pipeline.public.next_ms())
        return Result(
            jobs=MappingProxyType(self._faults),
            changed=changed,
            devices=MappingProxyType(self._devices),
            switches=MappingProxyType(self._switches),
            nodes=MappingProxyType(self._infos),
            news=news,
            isolated=MappingProxyType(self._isolated),
            labels={uid: label for labels in self._labels.values() for uid, label in labels.items()},
            manual=manual,
            statistics=statistics,
            complaints=complaints,
            next_ms=min((max(when, now_ms + 1) for when in whens if when is not None), default=None),
        )

    def super_pod(self, node: str) -> int | None:
        """Of a node, by its device-info; negative: in none. None: there is no device-info."""
        return self._cluster.super_pod(node)

    def dump(self, *, with_public: bool = True) -> bytes:
        """What must survive a restart; the rest is published again. Public faults may be too many to be kept."""
        views = self._cluster.views
        tables = {uid: shown.table for uid, shown in views.items()
                  if shown.table is not None and not self._cluster.jobs[uid].complete}  # fmt: skip
        return state.encode(
            state.State(
                reports=self._pipeline.reports.by_job,
                retries=self._pipeline.retries.memory,
                manual=self._pipeline.manual.dump(),
                relations=self._pipeline.relations.jobs,
                public=self._pipeline.public.state if with_public else public.State(),
                exposed=sorted(self._pipeline.exposed),
                tables=tables | {uid: table for uid, table in self._cluster.tables.items() if uid not in views},
            )
        )

    def load(self, data: bytes) -> None:
        """What was dumped, before anything else is told. Raises ValueError if it is something else."""
        kept = state.decode(data)
        self._pipeline.reports.by_job = kept.reports
        self._pipeline.retries.memory = kept.retries
        self._pipeline.manual.load(kept.manual)
        self._pipeline.relations.jobs = kept.relations
        self._pipeline.public.load(kept.public)
        self._pipeline.exposed = set(kept.exposed)
        self._cluster.tables = kept.tables
        self._dirty_nodes.update((*kept.retries, *kept.manual.isolated))
        for job, ranks in kept.reports.items():
            newest = max((then for types in ranks.values() for then in types.values()), default=0)
            self._timers.set((_REPORT, job), newest + KEEP_REPORT_MS)

    def forget_others(self) -> None:
        """All jobs were told after `load`: what is remembered of others is of no use."""
        views, pipeline = self._cluster.views, self._pipeline
        for memory in (self._cluster.tables, pipeline.relations.jobs, pipeline.reports.by_job):
            for uid in [uid for uid in memory if uid not in views]:
                del memory[uid]
        there = {pod.uid for job in self._cluster.jobs.values() for pod in (*job.pods.values(), *job.backups.values())}
        pipeline.exposed &= there.union(*(shown.uids for shown in views.values()))

    # Nodes.

    def _look_at_nodes(self, now: int) -> frozenset[str]:
        names, self._dirty_nodes = self._dirty_nodes, set()
        for name in list(names):
            with self._judging(name):
                names |= self._cluster.followers(name)
        known: dict[str, list[ChipFault]] = {}
        related: set[str] = set()
        for name in [name for name in names if name in self._cluster.nodes]:
            with self._judging(name):
                known[name] = self._cluster.nodes[name].faults(now)
                related |= self._relate(name, known[name], now)
        for node, memory in self._pipeline.retries.memory.items() if related else ():
            if node not in names and any(event.job in related for event in memory.values()):
                names.add(node)
                if node in self._cluster.nodes:
                    with self._judging(node):
                        known[node] = self._cluster.nodes[node].faults(now)
        names = {name for name in names if name in known or name not in self._cluster.nodes}  # others stay as they were
        news = set()
        for name in names:
            before = (self._devices.get(name), self._switches.get(name), self._infos.get(name))
            with self._judging(name):
                self._look(name, known.get(name, []), now)
                self._unjudged.pop(name, None)
            if before != (self._devices.get(name), self._switches.get(name), self._infos.get(name)):
                news.add(name)
            self._dirty_jobs |= self._cluster.on.get(name, set())
        return frozenset(news)

    @contextlib.contextmanager
    def _judging(self, name: str) -> Iterator[None]:
        """Whatever is wrong with a node, the faults of others must be seen. It is looked at again with the next
        news."""
        try:
            yield
        except Exception as error:
            text = f"node {name} can't be judged: {error!r}"
            if self._unjudged.get(name) != text:
                self._unjudged[name] = text
                self._complaints.append(text)

    def _relate(self, name: str, faults: list[ChipFault], now: int) -> set[str]:
        """Links that are down are known before any node is looked at. The jobs for which they are news."""
        node = self._cluster.nodes[name]
        found = set()
        for shown in self._cluster.jobs_on(name):
            places = shown.places.get(name, {})
            new = [self._pipeline.relations.see(shown.uid, name, fault.chip, fault.code, fault.time_ms, now)
                   for fault in faults if number(fault.chip) in places]  # fmt: skip
            if node.switch is not None and name in shown.pods:
                new += [self._pipeline.relations.see(shown.uid, name, "", fault.code, fault.time_ms, now)
                        for fault in node.switch.faults if fault.time_ms <= now]  # fmt: skip
            if any(new):
                found.add(shown.uid)
        return found

    def _look(self, name: str, faults: list[ChipFault], now: int) -> None:
        node = self._cluster.nodes.get(name)
        look = Look(name, now, self._cluster.owners(name) if faults or self._pipeline.concerns(name) else {})
        used, busy = self._cluster.used(name)
        seen: list[Seen] = []
        bad: frozenset[str] = frozenset()
        if node is not None and node.device is not None:
            seen = self._pipeline.chips(look, faults, node.device)
            device = self._devices[name] = view.device_view(node.device, seen, used, self.codes.network)
            bad = frozenset((*device.unhealthy, *device.network_unhealthy))
        else:
            self._devices.pop(name, None)
        whole = left = switch = _NO_SWITCH
        if node is not None and node.switch is not None:
            whole = node.switch
            left = view.switch_left(whole, self._pipeline.grown(look, whole.faults))
            switch = self._switches[name] = view.switch_view(left, busy)
        else:
            self._switches.pop(name, None)
        info = _NO_NODE
        if node is not None and node.node is not None:
            info = self._infos[name] = view.node_view(node.node, busy)
        else:
            self._infos.pop(name, None)
        isolation = view.isolation(node.node if node is not None and node.node else _NO_NODE, left, seen, bad)
        if isolation.node or isolation.chips:
            self._isolated[name] = isolation
        else:
            self._isolated.pop(name, None)
        kube, ready = self._cluster.kube_node(name), self._cluster.ready(name)
        healthy = not (seen or whole.faults or info.faults) and switch.status == info.status == HEALTHY
        if not healthy or (not ready and node is not None):
            self._faulty[name] = NodeFaults(name, kube.ip, kube.serial, ready, seen, bad, switch, whole, info)
        else:
            self._faulty.pop(name, None)
        if node is not None and node.empty:
            del self._cluster.nodes[name]
        self._timers.set((_NODE, name), min(look.wakes, default=None))

    # Jobs.

    def _look_at_jobs(self, now: int) -> dict[str, JobFaults]:
        uids, self._dirty_jobs = self._dirty_jobs, set()
        changed: dict[str, JobFaults] = {}
        for uid in uids:
            nothing = JobFaults(uid)
            try:
                found, wake = self._look_at_job(uid, now) if uid in self._cluster.views else (nothing, None)
            except Exception as error:  # whatever it is, the faults of other jobs must be seen
                self._complaints.append(f"job {uid} can't be judged: {error!r}")
                continue
            self._timers.set((_JOB, uid), wake)
            # Separate comes last, and wins.
            verdicts = sorted(self._pipeline.relations.verdicts(uid), key=lambda each: each.verdict, reverse=True)
            self._labels[uid] = {pod: each.verdict for each in verdicts for pod in each.pods}
            if not self._labels[uid]:
                del self._labels[uid]
            if self._faults.get(uid, nothing) != found:
                changed[uid] = self._faults[uid] = found
            if found == nothing:
                self._faults.pop(uid, None)
        return changed

    def _look_at_job(self, uid: str, now: int) -> tuple[JobFaults, int | None]:
        shown = self._cluster.views[uid]
        down = self._pipeline.relations.links_down(uid)
        self._judge(shown, now)
        if self._pipeline.relations.links_down(uid) != down:
            self._dirty_nodes |= self._pipeline.retries.nodes_of(uid)
        found, wake = job_faults(
            shown, self._faulty_node, self._pipeline.reports, self._pipeline.relations.verdicts(uid), now
        )
        later = self._pipeline.relations.next_ms(uid, now)
        return found, min((when for when in (wake, later) if when is not None), default=None)

    def _judge(self, shown: JobView, now: int) -> None:
        nodes = [self._faulty[name] for name in shown.pods if name in self._faulty]
        codes = {each.fault.code for node in nodes for each in node.seen
                 if not each.hidden and each.place is not None and each.place.job == shown.uid}  # fmt: skip
        self._pipeline.relations.judge(
            shown.uid,
            codes,
            self._cluster.present,
            lambda node, chip: pods_at(shown, node, chip),
            lambda node: _in_super_pod(self._cluster.super_pod(node)),
            shown.created_ms,
            now,
        )

    def _faulty_node(self, name: str) -> NodeFaults | None:
        found = self._faulty.get(name)
        if found is None and not self._cluster.ready(name):
            kube = self._cluster.kube_node(name)
            return NodeFaults(name, kube.ip, kube.serial, ready=False)
        return found

    # What is to be looked at.

    def _wake(self, now: int) -> None:
        for kind, name in self._timers.due(now):
            if kind == _NODE:
                self._dirty_nodes.add(name)
                continue
            self._dirty_jobs.add(name)
            if kind == _REPORT:
                self._pipeline.reports.prune(name, now)
                self._touch_troubled(set(self._cluster.views[name].pods) if name in self._cluster.views else set())
        self._pipeline.public.advance(now)
        self._dirty_nodes |= self._pipeline.public.changed
        self._pipeline.public.changed = set()
        self._dirty_nodes |= self._pipeline.manual.advance(now)

    def _read(self, name: str, read: tuple[bool, list[str]]) -> None:
        changed, wrong = read
        self._complaints += wrong
        if changed:
            self._dirty_nodes.add(name)

    def _touch(self, names: set[str]) -> None:
        """Kubernetes says something new of nodes."""
        for name in names:
            self._dirty_jobs |= self._cluster.on.get(name, set())
            if name in self._cluster.nodes:
                self._dirty_nodes.add(name)

    def _touch_troubled(self, names: Iterable[str]) -> None:
        """A job has changed: that matters to nodes that have faults."""
        for name in names:
            node = self._cluster.nodes.get(name)
            if (node is not None and node.troubled) or self._pipeline.concerns(name) or name in self._faulty:
                self._dirty_nodes.add(name)

    def _written(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        versions = (self._pipeline.manual.version, self._pipeline.public.version)
        if self._texts[:2] != versions:
            self._texts = (*versions, self._pipeline.manual.info(), self._pipeline.public.statistics())
        return self._texts[2], self._texts[3]


def _in_super_pod(number: int | None) -> bool:
    return number is not None and number >= 0
