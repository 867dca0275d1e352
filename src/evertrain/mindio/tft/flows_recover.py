"""From the first sign of a fault until training goes on, a checkpoint is saved, or everybody exits.

Collect, lock one step, agree on a strategy (with the platform, or alone), carry it out. A fault that comes in between
begins this anew: what was stopped and cleaned stays so, and a rank whose repair was cut short counts as bad.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from evertrain.mindio.tft import flows_common as do
from evertrain.mindio.tft import flows_elastic, replicas
from evertrain.mindio.tft.flows_common import Failed, NewFault
from evertrain.mindio.tft.messages import AnyMessage, Continue, RebuildGroup
from evertrain.mindio.tft.numbers import ControllerRepairType, FaultType, ReportCode, TrainState
from evertrain.mindio.tft.requests import Act, Flow, Over, Signal, Wait

if TYPE_CHECKING:
    from evertrain.mindio.tft.machine import Machine

log = logging.getLogger(__name__)

REPLACEMENT_ROUNDS = 8
"""New faults are taken into a replacement that is under way this often."""


def recover(m: Machine, dump_wanted: bool = False) -> Flow:
    while True:
        try:
            return (yield from _attempt(m, dump_wanted))
        except StartOver as error:
            log.warning("the recovery begins anew: %s", error)


class DumpWanted(Exception):
    """The platform does not want to talk about strategies: it wants a checkpoint, and then the end."""


class StartOver(Exception):
    """There is another fault, or the platform has begun a new conversation about them."""


def _attempt(m: Machine, dump_wanted: bool) -> Flow:
    m.state = "ABNORMAL"
    m.repair_id += 1
    yield from do.collect(m, m.roster.active)
    m.roster.take_faults()
    if any(member.left for member in m.roster.members.values()):
        raise Over("a rank is lost after others have finished")
    if not (m.roster.errors or dump_wanted or m.has_signal("stop") or _parked(m)):
        log.info("the fault has gone by itself")
        # Whoever is still held, by a pause or by a lock of a controller before this one, would be so for ever.
        yield Act(m.roster.healthy, lambda sn, _: Continue(sn=sn, unlock=True), m.settings.collect_limit, blame=False)
        return
    locked = yield from do.prelock(m)
    if dump_wanted:
        if not locked and not m.settings.platform:
            raise Over("the ranks could not be held at one step: the checkpoint that was asked for can't be saved")
        raise Over((yield from do.dump(m)))
    try:
        word = (yield from _negotiate(m, locked)) if m.settings.platform else _decide(m, locked)
    except DumpWanted:
        raise Over((yield from do.dump(m))) from None
    yield from _carry_out(m, word)


def _parked(m: Machine) -> bool:
    """Whether ranks wait for the end of a recovery: that of a controller whose place this one has taken."""
    return any(m.roster.members[rank].status.parked for rank in m.roster.active)


# --- which strategy --------------------------------------------------------------------------------------------------


def repair_type(m: Machine) -> ControllerRepairType:
    """The finest strategy that fits the faults."""
    errors = m.roster.errors
    if not errors and _parked(m):
        return ControllerRepairType.RETRY
    if FaultType.PROCESS in errors.values() or not errors:
        if do.arf(m):
            return ControllerRepairType.ARF
        return ControllerRepairType.DOWNGRADE if do.zit(m) else ControllerRepairType.DUMP
    hccl = FaultType.HCCL in errors.values()
    if hccl or all(member.uce for member in m.roster.members.values()):
        return ControllerRepairType.RETRY
    return ControllerRepairType.DUMP


def offer(m: Machine, locked: bool) -> list[str]:
    """What the platform may choose from."""
    offered = ["exit"]
    if not locked or not do.sane(m):
        return offered
    whole = m.settings.x1 or m.settings.mindspore
    if m.settings.mindspore and not _only_hccl(m) and not do.full_copy(m):
        return offered
    if not m.settings.x1 or do.full_copy(m):
        offered.append("dump")
    if m.roster.isolated:
        return offered
    possible = not whole or _only_hccl(m) or _repairable(m)
    match repair_type(m):
        case ControllerRepairType.RETRY if possible:
            offered += ["retry", *(["recover"] if do.arf(m) else [])]
        case ControllerRepairType.ARF if possible:
            offered += ["recover", *(["downgrade", "upgrade"] if do.zit(m) else [])]
        case ControllerRepairType.DOWNGRADE:
            offered += ["downgrade", "upgrade"]
    return offered


def _repairable(m: Machine) -> bool:
    return replicas.repair_plan(m.roster.kinds(), m.roster.copies(m.repair_step), m.settings.x1) is not None


def _only_hccl(m: Machine) -> bool:
    """A broken network harms no state, as long as every rank is at the common step."""
    errors, step = m.roster.errors, m.repair_step
    return all(kind == FaultType.HCCL for kind in errors.values()) and all(
        m.roster.members[rank].holds(step) and rank not in m.roster.dirty for rank in m.roster.active
    )


def _decide(m: Machine, locked: bool) -> Signal:
    """Without a platform."""
    if not locked or not do.sane(m) or (m.settings.mindspore and not _only_hccl(m) and not do.full_copy(m)):
        raise Over("the ranks could not be held at one step, or no whole copy of the state is left")
    retry = repair_type(m) is ControllerRepairType.RETRY and not m.roster.isolated
    return Signal("strategy", text="retry" if retry else "dump")


def _negotiate(m: Machine, locked: bool) -> Flow:
    """The conversation: faults, stop; stopped, faults; strategies, choice."""
    errors = m.roster.errors
    if m.unconfirmed is not None:
        _, strategy = m.unconfirmed
        m.unconfirmed = None
        yield from last_word(m, Failed(ReportCode.FAILED, do.LAST_REPAIR_FAILED, dump=locked), strategy)
    m.forget_choices()
    yield from do.tell(m, "report_fault_ranks", dict(errors), m.roster.codes(errors))
    yield from _expect(m, "stop", max(m.pause_limit, m.settings.platform_limit))
    if not m.roster.initialised():
        code, text = ReportCode.NOT_INITIALISED, "processors are not initialised"
        yield from do.tell(m, "report_stop_complete", int(code), text, dict(errors))
        raise Over(text)
    yield from do.tell(m, "report_stop_complete", int(ReportCode.SUCCESS), "stop complete", dict(errors))
    return (yield from _choice(m, locked))


def _choice(m: Machine, locked: bool) -> Flow:
    """From the platform's view of the faults to its choice."""
    word: Signal = yield from _expect(m, "global", m.settings.platform_limit)
    m.answer_limit = word.limit
    new = m.roster.take_faults()
    if new:
        yield from do.tell(m, "report_fault_ranks", dict(new), m.roster.codes(new))
    yield from do.strategies(m, offer(m, locked))
    limit = max(m.answer_limit, m.settings.platform_limit)
    word = yield Wait(lambda: m.pop_signal(("dump", "strategy", "invalid", "stop", "global")), limit)
    return Signal("strategy", text="dump") if word is not None and word.kind == "dump" else word


def _expect(m: Machine, kind: str, limit: float) -> Flow:
    word: Signal | None = yield from do.answer(m, limit)
    if word is not None and word.kind == "dump":
        raise DumpWanted
    if word is not None and word.kind == "stop" and kind != "stop":
        m.signals.appendleft(word)
        raise StartOver("the platform wants it")
    if word is None or word.kind != kind:
        raise Over(f"expected {kind!r} of the platform, got {word.kind if word else 'nothing'!r}")
    return word


def last_word(m: Machine, error: Failed, strategy: str) -> Flow:
    """A strategy failed. Tell, and let the platform choose between a checkpoint and the exit, or begin anew."""
    log.error("%s failed: %s", strategy or "the recovery", error)
    yield from do.result(m, error.code, str(error), strategy)
    word = yield from do.answer(m, max(m.answer_limit, m.settings.platform_limit))
    if word is not None and word.kind == "stop":
        m.signals.appendleft(word)
        raise StartOver("the platform wants it")
    if word is not None and (word.kind == "dump" or (word.text == "dump" and word.kind == "strategy")):
        if error.dump:
            yield from _free(m)
            yield from do.dump(m)
        else:
            yield from do.result(m, ReportCode.EXIT_ONLY, do.DUMP_FAILED, "dump")
    elif word is not None and word.kind == "invalid":
        yield from do.result(m, ReportCode.EXIT_ONLY, "invalid strategy", word.text)
    raise Over(f"{strategy or 'the recovery'} failed: {error}")


def _free(m: Machine) -> Flow:
    """Ranks whose part in the repair still waits for a peer that will not come: they could save only after that."""
    try:
        yield from do.env_clear(m, m.repair_type, sorted(do.usable(m)))
    except (Failed, NewFault) as error:
        log.warning("not every rank could be stopped before the checkpoint: %s", error)


# --- carrying it out -------------------------------------------------------------------------------------------------


def _carry_out(m: Machine, word: Signal | None) -> Flow:
    match word:
        case Signal("strategy", text="retry"):
            flow = _retry(m)
        case Signal("strategy", text="recover"):
            flow = _recover(m)
        case Signal("strategy", text="downgrade", param=param):
            flow = flows_elastic.shrink(m, param)
        case Signal("strategy", text="dump"):
            raise Over((yield from do.dump(m)))
        case Signal("strategy", text="exit"):
            raise Over("the platform chose the exit")
        case Signal("strategy" | "invalid"):
            yield from do.result(m, ReportCode.EXIT_ONLY, "invalid strategy", word.text)
            raise Over(f"the strategy {word.text!r} was not offered")
        case Signal("stop"):
            m.signals.appendleft(word)
            raise StartOver
        case _:
            raise Over("the platform chose no strategy")
    instead: Signal | None = None
    try:
        instead = yield from flow
    except Degraded as change:
        instead = Signal("strategy", text="downgrade", param=change.param)
    except NewFault as error:
        if not m.settings.platform:
            raise StartOver(str(error)) from None
        yield from last_word(m, Failed(ReportCode.FAILED, do.LAST_REPAIR_FAILED), word.text)
    except Failed as error:
        if not m.settings.platform:
            raise Over(str(error)) from None
        yield from last_word(m, error, word.text)
    if instead is not None:
        yield from _carry_out(m, instead)


def _stoppable(m: Machine) -> list[int]:
    """All ranks but those whose processes are given up."""
    return [rank for rank in m.roster.active if m.roster.errors.get(rank) != FaultType.PROCESS]


def _retry(m: Machine) -> Flow:
    """Repair in place: no process ends."""
    try:
        m.state = "ENV_CLEAR"
        yield from do.env_clear(m, ControllerRepairType.RETRY, _stoppable(m))
        do.take_late_faults(m)
        if FaultType.PROCESS in m.roster.errors.values():
            raise NewFault("a process that was to be repaired in place has failed")
        m.state = "REPAIR"
        if not _only_hccl(m):
            yield from do.repair(m, do.plan_repair(m, m.roster.untrusted()))
        yield from do.rollback(m, m.roster.active)
    except NewFault as error:
        if not do.arf(m):
            raise
        m.roster.take_faults()
        return (yield from _degrade(m, Failed(ReportCode.RETRY_FAILED, str(error))))
    except Failed as error:
        # Who could not be repaired is replaced, if that can be. Who could not be stopped is of no use for that either.
        if error.code != ReportCode.RETRY_FAILED and not (error.dump and do.arf(m)):
            raise
        return (yield from _degrade(m, Failed(ReportCode.RETRY_FAILED, str(error), error.dump)))
    yield from do.go_on(m, "retry", m.roster.active)
    return None


def _degrade(m: Machine, error: Failed) -> Flow:
    """The repair in place failed, be it for want of a process. The platform is asked whether to replace processes.

    Returns what is to be done instead.
    """
    yield from do.result(m, error.code, str(error), "retry")
    word: Signal | None = yield from _choice(m, locked=True)
    if word is not None and word.text == "recover" and word.kind == "strategy":
        return word
    if word is not None and word.text == "dump":
        if error.dump:
            yield from _free(m)
            return word
        yield from do.result(m, ReportCode.EXIT_ONLY, do.DUMP_FAILED, "dump")
    raise Over("the repair in place failed")


def _recover(m: Machine) -> Flow:
    """Faulty processes are replaced by the platform; everybody else waits for them."""
    for rank in m.roster.errors:
        m.roster.errors[rank] = int(FaultType.PROCESS)
    _give_up_processes(m)
    try:
        yield from _replace_until_done(m)
        yield from do.go_on(m, "recover", m.roster.active)
    except Failed as error:
        # Whatever follows, the processes that were to join are no part of it; replacing them anew may help.
        _give_up_processes(m, joining=True)
        raise Failed(ReportCode.RETRY_FAILED, str(error), error.dump) from None


def _give_up_processes(m: Machine, joining: bool = False) -> None:
    """What the faulty ranks' processes still do or say is of no matter, nor that they end. Not so for replacements."""
    roster = m.roster
    for rank in roster.errors:
        member = roster.members[rank]
        if joining or not member.fresh or member.lost:
            member.offline, member.fresh = True, False
            roster.heard.pop(rank, None)
            roster.grace.pop(rank, None)
            roster.judge(member)
    roster.news.difference_update(roster.errors)


def _replace_until_done(m: Machine) -> Flow:
    for _ in range(REPLACEMENT_ROUNDS):
        try:
            m.state = "ENV_CLEAR"
            yield from do.env_clear(m, ControllerRepairType.ARF, _stoppable(m))
            m.state = "REPAIR"
            return (yield from _replace(m))
        except NewFault as error:
            # The others are parked: the new victims are simply replaced as well.
            log.warning("another fault while processes are replaced: %s", error)
            new = dict.fromkeys(sorted(m.roster.news), int(FaultType.PROCESS))
            m.roster.take_faults()
            m.roster.errors.update(new)
            m.repair_id += 1
            _give_up_processes(m)
            yield from do.tell(m, "report_fault_ranks", new, m.roster.codes(new))
    raise Failed(ReportCode.FAILED, "one fault came after the other")


def _replace(m: Machine) -> Flow:
    roster, limit = m.roster, m.settings.replacement_limit
    gone = sorted(roster.errors)

    def joining(rank: int) -> bool:
        member = roster.members[rank]
        ready = (TrainState.INIT_FINISH, TrainState.PREREPAIR_FINISH)
        return member.fresh and not member.lost and member.status.run_status in ready

    def joined(rank: int) -> bool:
        return joining(rank) and roster.members[rank].status.run_status == TrainState.PREREPAIR_FINISH

    yield from _wait_ranks(m, gone, joining, limit)
    repair_id = m.repair_id

    def rebuild(sn: int, _: int) -> AnyMessage:
        return RebuildGroup(sn=sn, repair_id=repair_id, fault_ranks=gone)

    yield from do.act(m, roster.active, rebuild)
    yield from _wait_ranks(m, gone, joined, limit)
    yield from do.repair(m, do.plan_repair(m, distrust=False))
    yield from do.rollback(m, roster.active)


def _wait_ranks(m: Machine, ranks: list[int], fits: Callable[[int], bool], limit: float) -> Flow:
    """Wait for replacements. A new fault or another decision of the platform ends the wait."""
    ready = m.until_all(ranks, fits)

    def check() -> object:
        if m.roster.news:
            return "fault"
        return m.pop_signal(("dump", "strategy", "invalid")) or ready()

    found = yield Wait(check, limit)
    if found == "fault":
        raise NewFault(f"ranks {sorted(m.roster.news)}")
    if found is None:
        raise Failed(ReportCode.FAILED, f"not all of the ranks {ranks} were replaced in time")
    if isinstance(found, Signal):
        if found.kind == "strategy" and found.text == "downgrade":
            raise Degraded(found.param)
        chosen = "dump" if found.kind == "dump" else found.text
        kind = "strategy" if chosen in ("dump", "exit") else "invalid"
        yield from _carry_out(m, Signal(kind, text=chosen))


class Degraded(Exception):
    """The platform has no replacement: the job goes on with less."""

    def __init__(self, param: str) -> None:
        super().__init__(param)
        self.param = param
