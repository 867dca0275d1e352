"""Nodes, chips and jobs for tests of the fault centre, on a clock of their own."""

from __future__ import annotations

from collections.abc import Mapping

from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.faults.result import Result
from evertrain.clusterd.model import Device, Job, Pod, RankFault
from evertrain.wire.faultinfo import (
    CARD,
    CARD_NETWORK,
    ChipFault,
    DeviceInfo,
    NodeInfo,
    SwitchFault,
    SwitchInfo,
    encode_device,
    encode_node,
    encode_switch,
)

S = 1000
START = 1_800_000_000_000


def chip(number: int, code: str, level: str, came: int = START, kind: str = CARD) -> ChipFault:
    return ChipFault(f"Ascend910-{number}", code, level, came, kind)


def link_down(number: int, came: int = START) -> ChipFault:
    return chip(number, "81078603", "NotHandleFault", came, CARD_NETWORK)


def make_job(
    uid: str = "job-uid-1",
    nodes: Mapping[int, str] | tuple[str, ...] = ("n0", "n1"),
    chips: int = 2,
    strategy: str = "",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    complete: bool = True,
    generation: str = "a",
    first_chip: int = 0,
    **more,
) -> Job:
    """A pod on each node, with the node's first chips."""
    placed = dict(enumerate(nodes)) if isinstance(nodes, tuple) else nodes
    devices = tuple(Device(str(first_chip + each)) for each in range(chips))
    pods = {
        rank: Pod(rank, f"{uid}-pod-{rank}-{generation}", f"{uid}-{rank}", node, host_ip=f"10.0.0.{rank}",
                  phase="Running", devices=devices)
        for rank, node in placed.items()
    }  # fmt: skip
    recovers = {"process-recover-enable": "on"} if strategy else {}
    return Job(
        uid=uid,
        name=uid,
        namespace="default",
        labels={**recovers, **(labels or {})},
        annotations={**({"recover-strategy": strategy} if strategy else {}), **(annotations or {})},
        replicas=len(placed),
        per_pod=max(1, chips),
        status="running",
        pods=pods,
        complete=complete,
        **more,
    )


def device_data(*faults: ChipFault, chips: int = 4, switch: SwitchInfo | None = None, **more) -> dict[str, str]:
    """As a device plugin publishes it: chips with severe faults are unhealthy."""
    severe = [each for each in faults if each.level not in ("NotHandleFault", "SubHealthFault")]
    unhealthy = tuple(dict.fromkeys(each.chip for each in severe if each.kind == CARD))
    cut_off = tuple(dict.fromkeys(each.chip for each in severe if each.kind == CARD_NETWORK))
    everyone = [f"Ascend910-{number}" for number in range(chips)]
    info = DeviceInfo(
        available=tuple(each for each in everyone if each not in unhealthy + cut_off),
        unhealthy=unhealthy,
        network_unhealthy=cut_off,
        faults=faults,
        update_time=START // 1000,
        **more,
    )
    data = {"DeviceInfoCfg": encode_device(info)}
    return data | ({"SwitchInfoCfg": encode_switch(switch)} if switch is not None else {})


def switch_info(code: str, level: str, status: str, came: int = START) -> SwitchInfo:
    fault = SwitchFault(code, level, came, chip=1, port=2, raised=came // 1000)
    return SwitchInfo((fault,), level, status, came // 1000)


def node_data(info: NodeInfo) -> dict[str, str]:
    return {"NodeInfo": encode_node(info)}


class World:
    def __init__(self, *jobs: Job, nodes: int = 3) -> None:
        self.centre = FaultCentre()
        self.now = START
        self.jobs: dict[str, Job] = {}
        for number in range(nodes):
            self.centre.device(f"n{number}", device_data())
        self.job(*jobs)
        self.result: Result = self.centre.process(self.now)

    def job(self, *jobs: Job) -> None:
        self.jobs = {**self.jobs, **{each.uid: each for each in jobs}}
        self.centre.jobs(self.jobs)

    def chips(self, node: str, *faults: ChipFault, **more) -> Result:
        self.centre.device(node, device_data(*faults, **more))
        return self.look()

    def look(self) -> Result:
        self.result = self.centre.process(self.now)
        assert self.result.next_ms is None or self.result.next_ms > self.now
        assert not any("can't be judged" in each for each in self.result.complaints), self.result.complaints
        return self.result

    def at(self, ms: int) -> Result:
        """The time is so much after the start. The centre is asked whenever it wants to be, and no more."""
        until, looks = START + ms, 0
        while self.result.next_ms is not None and self.result.next_ms < until:
            self.now, looks = self.result.next_ms, looks + 1
            self.look()
            assert looks < 1000, "it never rests"
        self.now = until
        if self.result.next_ms is not None and self.result.next_ms <= until:
            self.look()
        return self.result

    def set_clock(self, by: int) -> Result:
        self.centre.clock_set(by)
        self.now += by
        return self.look()

    def report(self, ranks: Mapping[int, str], job: str = "job-uid-1") -> Result:
        self.centre.process_report(job, ranks, self.now)
        return self.look()

    def restart(self) -> None:
        """Another process goes on with what was kept, and hears the rest again."""
        before, self.centre = self.centre, FaultCentre()
        self.centre.load(before.dump())
        self.centre.jobs(self.jobs)
        self.centre.forget_others()
        for name, state in before._cluster.nodes.items():
            data = dict(state._texts)
            if "DeviceInfoCfg" in data:
                self.centre.device(name, data)
            if data.get("NodeInfo"):
                self.centre.node(name, data)
        self.look()

    def ranks(self, job: str = "job-uid-1") -> list[RankFault]:
        found = self.result.jobs.get(job)
        return list(found.ranks) if found is not None else []

    def hit(self, job: str = "job-uid-1") -> list[tuple[int, str, str, str]]:
        """Rank, code, level and type."""
        return [(each.rank, each.code, each.level, each.type) for each in self.ranks(job)]

    def health(self, job: str = "job-uid-1") -> str:
        found = self.result.jobs.get(job)
        return found.health if found is not None else "Healthy"

    def told(self, job: str = "job-uid-1") -> list[tuple[str, str, str, str]]:
        """Node, device, type and code, as subscribers hear of them."""
        found = self.result.jobs.get(job)
        return [(each.node, each.device, each.type, each.code) for each in found.devices] if found is not None else []

    def codes(self, node: str) -> list[tuple[str, str]]:
        """Code and level of the faults that schedulers see."""
        return [(each.code, each.level) for each in self.result.devices[node].faults]
