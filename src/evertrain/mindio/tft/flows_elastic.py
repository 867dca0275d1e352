"""A job that goes on with fewer ranks, and grows back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evertrain.mindio.tft import flows_common as do
from evertrain.mindio.tft import replicas
from evertrain.mindio.tft.flows_common import Failed, NewFault
from evertrain.mindio.tft.messages import AnyMessage, DowngradeRebuild, RebuildGroup
from evertrain.mindio.tft.numbers import ControllerRepairType, FaultType, ReportCode, TrainState
from evertrain.mindio.tft.requests import Flow

if TYPE_CHECKING:
    from evertrain.mindio.tft.machine import Machine


def shrink(m: Machine, param: str) -> Flow:
    """Whole data-parallel indices leave; the survivors build smaller groups and go on from the common step."""
    roster = m.roster
    m.state = "ENV_CLEAR"
    stoppable = [rank for rank in roster.active if roster.errors.get(rank) != FaultType.PROCESS]
    yield from do.env_clear(m, ControllerRepairType.DOWNGRADE, stoppable)
    do.take_late_faults(m)  # these leave as well
    m.state = "DG_REPAIR"
    leaving = replicas.isolate(roster.kinds(), set(roster.errors), roster.data_parallel())
    if 0 in leaving:
        raise Failed(ReportCode.FAILED, "rank 0 can't leave the job")
    if not replicas.full_copy(roster.kinds(), do.usable(m) - leaving, m.settings.x1):
        raise Failed(ReportCode.EXIT_ONLY, "no whole copy of the state would be left")
    text = "isolate ranks " + ", ".join(map(str, sorted(leaving)))
    out = dict.fromkeys(sorted(leaving), int(FaultType.PROCESS))
    yield from do.tell(m, "report_result", int(ReportCode.ISOLATED), text, out, "downgrade")
    _isolate(m, leaving)
    survivors = [rank for rank in sorted(roster.active) if rank not in leaving]
    repair_id = m.repair_id

    def rebuild(sn: int, rank: int) -> AnyMessage:
        groups = [[peer for peer in group.ranks if peer not in leaving] for group in roster.members[rank].groups or ()]
        return DowngradeRebuild(sn=sn, repair_id=repair_id, world_ranks=survivors, groups=groups, param=param)

    yield from do.act(m, survivors, rebuild, same=False)
    yield from do.go_on(m, "downgrade", survivors)


def _isolate(m: Machine, leaving: set[int]) -> None:
    """Faulty processes are given up. Healthy ones that leave with them are parked and could come back as they are."""
    roster = m.roster
    for rank in leaving:
        member = roster.members[rank]
        if rank in roster.errors and not (member.fresh and not member.lost):
            member.offline, member.fresh = True, False
            roster.heard.pop(rank, None)
        roster.errors.pop(rank, None)
        roster.told.pop(rank, None)
    roster.isolated |= leaving
    for rank in leaving:
        roster.judge(roster.members[rank])
    roster.news -= leaving


def ready(m: Machine) -> bool:
    """Whether every rank that left is back: a new process, or the old one that was parked all the time."""
    for rank in m.roster.isolated:
        member = m.roster.members[rank]
        new = member.fresh and member.status.run_status == TrainState.PREREPAIR_FINISH
        if member.link is None or member.offline or member.lost or not (new or rank in m.cleaned):
            return False
    return True


def grow(m: Machine, param: str) -> Flow:
    """The ranks that had left come back and get their state."""
    roster = m.roster
    m.state = "UPGRADE"
    m.repair_id += 1
    back = sorted(roster.isolated)
    try:
        yield from do.collect(m, roster.active)
        roster.take_faults()
        if roster.errors or not (yield from do.prelock(m)):
            raise NewFault("the survivors could not be held at one step")
        m.state = "ENV_CLEAR"
        yield from do.env_clear(m, ControllerRepairType.UPGRADE, roster.active)
        m.state = "REPAIR"
        plan = do.plan_repair(m, m.roster.untrusted())
        roster.isolated.clear()
        everybody, repair_id = sorted(roster.active), m.repair_id

        def rebuild(sn: int, _: int) -> AnyMessage:
            return RebuildGroup(sn=sn, repair_id=repair_id, fault_ranks=back, upgrade=True, param=param)

        yield from do.act(m, everybody, rebuild)
        yield from do.repair(m, plan, upgrade=True, param=param)
        yield from do.rollback(m, everybody, upgrade=True, param=param)
        yield from do.go_on(m, "upgrade", everybody)
    except NewFault as error:
        raise Failed(ReportCode.FAILED, str(error)) from None
    except Failed as error:
        raise Failed(ReportCode.FAILED, str(error), error.dump) from None
