"""Steps that several flows share: collecting, locking, stopping, reporting, saving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from evertrain.mindio.tft import replicas
from evertrain.mindio.tft.messages import (
    AnyMessage,
    Collect,
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    Prelock,
    Rename,
    Repair,
    RepairUnit,
    Rollback,
    SaveCheckpoint,
    SaveGroup,
)
from evertrain.mindio.tft.numbers import (
    ControllerRepairType,
    DataStatus,
    FaultType,
    RepairType,
    ReportCode,
    Result,
    TrainState,
)
from evertrain.mindio.tft.replicas import Copy
from evertrain.mindio.tft.requests import CONVERSATION, Act, Flow, Outcome, Over, Signal, Tell, Wait

if TYPE_CHECKING:
    from evertrain.mindio.tft.machine import Machine

log = logging.getLogger(__name__)

LOCK_ROUNDS = 3
REPAIR_OK = "Mindio do repair operation ok"
DUMP_OK = "do dump success"
DUMP_FAILED = "do dump failed"
LAST_REPAIR_FAILED = "last repair failed"


class NewFault(Exception):
    """Something went wrong because another rank was lost: the recovery has to take that into account."""


class Failed(Exception):
    """A strategy failed. `code` is what the platform is told."""

    def __init__(self, code: int, why: str, dump: bool = True) -> None:
        super().__init__(why)
        self.code, self.dump = code, dump


# --- telling the platform --------------------------------------------------------------------------------------------


def tell(m: Machine, name: str, *args: object) -> Flow:
    """Call the platform. What it said before it can know this is void, except in answer to a report of faults."""
    if name != "report_fault_ranks":
        m.forget_conversation()
    if not (yield Tell(name, args)):
        raise Over(f"the platform's {name} failed")


def result(m: Machine, code: int, text: str, strategy: str) -> Flow:
    yield from tell(m, "report_result", int(code), text, dict(m.roster.errors) if code else {}, strategy)


def answer(m: Machine, limit: float) -> Flow:
    """Wait for the platform's next word, whatever it is. None if it stays silent."""
    word: Signal | None = yield Wait(lambda: m.pop_signal(CONVERSATION | {"dump"}), limit)
    return word


def strategies(m: Machine, offered: list[str]) -> Flow:
    m.offered = offered
    yield from tell(m, "report_strategies", dict(m.roster.errors), list(offered))


# --- one common step -------------------------------------------------------------------------------------------------


def collect(m: Machine, ranks: Iterable[int]) -> Flow:
    """Learn how every rank is. Ranks at which something else went wrong at the same time say so here."""

    def worth_asking(rank: int) -> bool:
        member = m.roster.members[rank]
        if member.fresh or member.offline or member.status.run_status == TrainState.ABNORMAL:
            return False
        return member.link is not None or rank in m.roster.grace

    targets = [rank for rank in ranks if worth_asking(rank)]
    outcome: Outcome = yield Act(targets, lambda sn, _: Collect(sn=sn), m.settings.collect_limit)
    return outcome


def prelock(m: Machine) -> Flow:
    """Hold all healthy ranks at one step, the newest that one of them has finished. True if they are held.

    A rank of whose fault only the platform knows is held as well, so that it can be stopped. Where it got to does not
    matter: its state comes from others.
    """
    limit = m.settings.prelock_limit
    for _ in range(LOCK_ROUNDS):
        unaware = m.roster.unaware
        targets = [rank for rank in m.roster.healthy if not _spoilt(m, rank)]
        step = m.repair_step = m.roster.newest_step(targets or m.roster.active)

        def order(sn: int, _: int, step: int = step) -> AnyMessage:
            return Prelock(sn=sn, step=step, limit=limit)

        outcome: Outcome = yield Act([*targets, *unaware], order, limit + m.settings.collect_limit)
        outcome = outcome.of(targets)
        m.roster.take_faults()
        if not targets:
            # Nobody healthy trains. If the processes are there, what they hold or have saved may still do.
            return FaultType.PROCESS not in m.roster.errors.values() and not m.settings.mindspore
        if any(reply.result == Result.TIMEOUT for reply in outcome.replies.values()):
            log.error("step %d could not be locked: %s", step, outcome.why())
            return False
        if outcome.ok:
            return True
        log.warning("step %d is not locked yet: %s", step, outcome.why())
    return False


def _spoilt(m: Machine, rank: int) -> bool:
    """It waits with a half repaired state: it will come to no step by itself."""
    status = m.roster.members[rank].status
    return status.parked and status.data_status != DataStatus.UPDATED


# --- stop and clean --------------------------------------------------------------------------------------------------


def settle(m: Machine) -> Flow:
    """After a failure: the loss of a rank that may be its cause becomes known in a moment."""
    if not m.roster.news:
        yield Wait(lambda: m.roster.news or None, m.settings.settle)
    return bool(m.roster.news)


def env_clear(m: Machine, kind: ControllerRepairType, ranks: Iterable[int]) -> Flow:
    """Have the ranks stop what they do and clean up. Those that have done so in this recovery are spared.

    Raises `Failed` with the code for the platform, or `NewFault` if ranks were lost meanwhile.
    """
    ranks = list(ranks)
    limit = m.settings.action_limit
    m.repair_type = kind
    told = {rank for rank in m.roster.unaware if m.roster.errors[rank] == FaultType.UCE}

    def stop(sn: int, rank: int) -> AnyMessage:
        return DeviceStop(sn=sn, repair_type=int(kind), uce=rank in told)

    def clean(sn: int, _: int) -> AnyMessage:
        return DeviceClean(sn=sn, repair_type=int(kind))

    for done, make in ((m.stopped, stop), (m.cleaned, clean)):
        outcome: Outcome = yield Act([rank for rank in ranks if rank not in done], make, limit, same=not told)
        done.update(rank for rank, reply in outcome.replies.items() if reply.result == Result.OK)
        if outcome.ok:
            continue
        failed = outcome.failed
        if done is m.cleaned and failed and all(reply.result == Result.ERROR for reply in failed.values()):
            # These processes can't be cleaned, but they can be replaced.
            m.roster.errors.update(dict.fromkeys(failed, int(FaultType.PROCESS)))
            code = ReportCode.RETRY_FAILED if arf(m) else ReportCode.EXIT_ONLY
            raise Failed(code, f"clean failed: {outcome.why()}", dump=False)
        if (yield from settle(m)):
            raise NewFault(outcome.why())
        raise Failed(ReportCode.EXIT_ONLY, f"stop or clean failed: {outcome.why()}", dump=False)


def take_late_faults(m: Machine) -> None:
    """Once all are stopped: what ranks had run into by then, after a strategy was chosen for the others' faults.

    Not a broken network: that the others were stopped looks like one, and nobody has done a step since the lock.
    """
    errors, news = m.roster.errors, m.roster.news
    found = {rank: m.roster.members[rank].fault() for rank in sorted(news) if errors.get(rank) != FaultType.PROCESS}
    late = {rank: int(kind) for rank, kind in found.items() if kind not in (None, FaultType.HCCL)}
    if late:
        log.warning("ranks %s had faults of their own when they were stopped", list(late))
    errors.update(late)
    news.difference_update(late)


# --- repair ----------------------------------------------------------------------------------------------------------


def arf(m: Machine) -> bool:
    """Whether lost processes are replaced: the platform does it, and every rank is prepared for it."""
    return m.settings.platform and m.settings.arf and all(x.arf for x in m.roster.members.values())


def zit(m: Machine) -> bool:
    return m.settings.platform and m.settings.zit and all(x.zit for x in m.roster.members.values())


def sane(m: Machine) -> bool:
    reason = replicas.insane(m.roster.kinds(), m.settings.world_size, m.settings.x1)
    if reason is not None:
        log.error("%s", reason)
    return reason is None


def usable(m: Machine) -> set[int]:
    return {rank for rank, copy in m.roster.copies(m.repair_step).items() if copy is Copy.USABLE}


def full_copy(m: Machine) -> bool:
    return replicas.full_copy(m.roster.kinds(), usable(m), m.settings.x1)


def plan_repair(m: Machine, distrust: bool) -> replicas.Plan:
    """Who sends to whom, or, if no whole copy is left, that all load the last checkpoint."""
    kinds, copies = m.roster.kinds(), m.roster.copies(m.repair_step)
    plan = None if distrust else replicas.repair_plan(kinds, copies, m.settings.x1)
    if plan is None:
        if m.settings.mindspore:
            raise Failed(ReportCode.EXIT_ONLY, "no whole copy of the state is left")
        log.warning("no whole copy of the state is left: every rank loads the last checkpoint")
        plan = replicas.load_plan(kinds, {rank for rank, copy in copies.items() if copy is Copy.REBUILD})
    return plan


def act(m: Machine, ranks: Iterable[int], make: Callable[[int, int], AnyMessage], same: bool = True) -> Flow:
    """An order that has to succeed everywhere."""
    outcome: Outcome = yield Act(list(ranks), make, m.settings.action_limit, same=same, together=True)
    # What these are at may wait for a peer that will not come: being stopped again gets them out of it.
    m.stopped -= outcome.stranded
    m.cleaned -= outcome.stranded
    if not outcome.ok:
        if (yield from settle(m)):
            raise NewFault(outcome.why())
        raise Failed(ReportCode.EXIT_ONLY, outcome.why())
    return outcome


def repair(m: Machine, plan: replicas.Plan, upgrade: bool = False, param: str = "") -> Flow:
    if not plan:
        return
    ranks = replicas.participants(plan)
    targets = {rank for rank in ranks if plan[rank][0].repair_type != RepairType.RT_SEND}
    m.roster.dirty |= targets

    def order(sn: int, rank: int) -> AnyMessage:
        units = [
            RepairUnit(src=unit.source, dst=unit.target, kind=unit.kind, repair_type=unit.repair_type.value)
            for unit in plan[rank]
        ]
        return Repair(
            sn=sn,
            repair_id=m.repair_id,
            step=m.repair_step,
            units=units,
            rank_list=ranks,
            repair_type=int(m.repair_type),
            upgrade=upgrade,
            param=param,
        )

    yield from act(m, ranks, order, same=False)


def rollback(m: Machine, ranks: Iterable[int], upgrade: bool = False, param: str = "") -> Flow:
    """Everybody goes back to the common step."""
    step, repair_id, kind = m.repair_step, m.repair_id, int(m.repair_type)

    def order(sn: int, _: int) -> AnyMessage:
        return Rollback(sn=sn, repair_id=repair_id, step=step, upgrade=upgrade, param=param, repair_type=kind)

    yield from act(m, ranks, order)


def go_on(m: Machine, strategy: str, ranks: Iterable[int]) -> Flow:
    """Let the ranks train again. Success shows when one of them gets beyond the common step."""
    ranks = list(ranks)
    m.stopped.difference_update(ranks)
    m.cleaned.difference_update(ranks)
    outcome: Outcome = yield from act(m, ranks, lambda sn, _: NotifyNormal(sn=sn))
    for rank in ranks:
        member = m.roster.members[rank]
        member.fresh = False
        m.roster.judge(member)
    if outcome.load_step > 0:
        m.repair_step = outcome.load_step
    m.unconfirmed, m.proof = (m.repair_step, strategy), False
    m.forget_answered()
    m.roster.settle()
    m.standbys.stale = True


# --- the dying gasp --------------------------------------------------------------------------------------------------


def dump(m: Machine) -> Flow:
    """Save one copy of everything and tell the platform how it went. Returns it in words."""
    m.state = "DUMP"
    try:
        yield from _save(m)
    except Failed as error:
        log.error("no checkpoint could be written: %s", error)
        yield from result(m, ReportCode.EXIT_ONLY, DUMP_FAILED, "dump")
        return f"no checkpoint could be saved: {error}"
    yield from tell(m, "report_result", int(ReportCode.SUCCESS), DUMP_OK, {}, "dump")
    return f"a checkpoint of step {m.repair_step} is saved"


def _save(m: Machine) -> Flow:
    step, repair_id = m.repair_step, m.repair_id
    if step <= 0 or not sane(m):
        raise Failed(ReportCode.EXIT_ONLY, f"there is nothing to save at step {step}")
    if m.roster.untrusted():
        raise Failed(ReportCode.EXIT_ONLY, "the state is not trusted")
    gone: set[int] = set()
    while True:
        chosen = _savers(m, gone)
        if chosen is None:
            raise Failed(ReportCode.EXIT_ONLY, "no whole copy of the state is left")
        groups = {rank: [SaveGroup(kind=kind, ranks=ranks) for kind, ranks in own] for rank, own in chosen.items()}

        def order(sn: int, rank: int, groups: dict[int, list[SaveGroup]] = groups) -> AnyMessage:
            return SaveCheckpoint(sn=sn, repair_id=repair_id, step=step, groups=groups[rank])

        lost = yield from _together(m, list(chosen), order, m.settings.dump_limit)
        if not lost:
            writer = next((rank for rank in chosen if rank != 0), 0)
            lost = yield from _together(m, [writer], lambda sn, _: Rename(sn=sn, step=step), m.settings.action_limit)
        if not lost:
            return
        log.warning("ranks %s were lost while they saved: other holders of their shards do it", sorted(lost))
        gone |= lost


def _savers(m: Machine, gone: set[int]) -> replicas.Savers | None:
    kinds, whole = m.roster.kinds(), usable(m) - gone
    chosen = replicas.dump_choice(kinds, whole, m.settings.x1)
    if chosen is None and m.settings.local_copy:
        chosen = replicas.dump_choice(kinds, whole | m.roster.backed_up(m.repair_step) - gone, m.settings.x1)
    return chosen


def _together(m: Machine, ranks: list[int], make: Callable[[int, int], AnyMessage], limit: float) -> Flow:
    """Part of saving. Returns the ranks that were lost in it; the others may have failed only for their sake."""
    outcome: Outcome = yield Act(ranks, make, limit, same=False, together=True)
    if outcome.ok:
        return set()

    def lost() -> set[int] | None:
        found = m.roster.faulty.intersection(ranks)
        return {rank for rank in found if m.roster.members[rank].fault() == FaultType.PROCESS} or None

    found = yield Wait(lost, m.settings.settle)
    if not found:
        raise Failed(ReportCode.EXIT_ONLY, outcome.why())
    return found
