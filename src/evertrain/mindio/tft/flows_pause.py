"""Halting at a common step without aborting anything: pause and continue, and the exchange of processes there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from evertrain.mindio.tft import flows_common as do
from evertrain.mindio.tft.flows_common import Failed, NewFault
from evertrain.mindio.tft.messages import AnyMessage, Continue, Pause, RebuildGroup
from evertrain.mindio.tft.numbers import ControllerRepairType, ReportCode, Result, TrainState
from evertrain.mindio.tft.requests import Act, Flow, Outcome, Over, Signal, Wait

if TYPE_CHECKING:
    from evertrain.mindio.tft.machine import Machine

log = logging.getLogger(__name__)


PAUSE_LEADS = (1, 2, 4, 8, 16, 32, 64)
ENDING = "the training has come to its end"


def _pause_all(m: Machine) -> Flow:
    """Have every rank halt after the step that follows the newest one. True if all do.

    A rank may have done that step before the order came. Then the others, which halt at it, go on to a later one: where
    steps are shorter than the way of an order, it has to aim ahead. Where that is beyond the last step, nobody comes.
    """
    yield from do.collect(m, m.roster.active)
    for lead in PAUSE_LEADS:
        if _is_ending(m):
            return False  # those that are left could halt, and nobody would do so as well
        ranks = m.roster.active
        step = m.repair_step = m.roster.newest_step(ranks) + lead

        def order(sn: int, _: int, step: int = step) -> AnyMessage:
            return Pause(sn=sn, step=step)

        # Who waits for a faulty rank in a collective comes to no pause.
        outcome: Outcome = yield Act(ranks, order, m.settings.action_limit, healthy=True)
        if outcome.ok:
            return True
        past = not outcome.silent and all(reply.result == Result.NEED_RETRY for reply in outcome.failed.values())
        log.log(
            logging.INFO if past else logging.WARNING, "not all ranks have paused at step %d: %s", step, outcome.why()
        )
        if not past:
            break
    return False


def pause(m: Machine, wish: Signal) -> Flow:
    """Returns True if a recovery has to follow."""
    m.state = "PAUSE"
    m.pause_limit = wish.limit
    if not (yield from _pause_all(m)):
        if m.roster.news:
            return True  # the platform hears of the fault instead
        if _is_ending(m):
            yield from _let_go(m)
            yield from do.tell(m, "report_stop_complete", int(ReportCode.FAILED), ENDING, {})
            return False
        yield from do.tell(m, "report_stop_complete", int(ReportCode.EXIT_ONLY), "pause failed", {})
        raise Over("not all ranks could be paused")
    yield from do.tell(m, "report_stop_complete", int(ReportCode.SUCCESS), "pause complete", {})
    word = yield Wait(lambda: "fault" if m.roster.news and not m.has_signal("stop") else _decision(m), wish.limit)
    if isinstance(word, Signal) and word.kind == "stop":
        m.signals.appendleft(word)
        return True
    if word == "fault":
        m.roster.take_faults()
        yield from do.result(m, ReportCode.FAILED, "a fault during the pause", "continue")
        return True
    if word is None:
        # The platform is told, and may begin a recovery. If it stays silent, training goes on: nothing may hang.
        yield from do.result(m, ReportCode.FAILED, "the pause took too long", "continue")
        word = yield Wait(lambda: "fault" if m.roster.news else _decision(m), m.settings.platform_limit)
        if word == "fault" or (isinstance(word, Signal) and word.kind == "stop"):
            if isinstance(word, Signal):
                m.signals.appendleft(word)
            return True
    if isinstance(word, Signal) and word.text != "continue":
        raise Over(f"expected to continue, got {word.text or word.kind!r}")
    if (stuck := (yield from _let_go(m))) is not None:
        yield from do.result(m, ReportCode.EXIT_ONLY, "continue failed", "continue")
        raise Over(f"not all ranks could continue: {stuck}")
    yield from do.tell(m, "report_result", int(ReportCode.SUCCESS), do.REPAIR_OK, {}, "continue")
    return False


def _let_go(m: Machine) -> Flow:
    """End a pause. Returns why that failed, or None. A rank that has finished its training since has gone on, too."""
    outcome: Outcome = yield Act(m.roster.active, lambda sn, _: Continue(sn=sn), m.settings.action_limit)
    outcome.silent = {rank for rank in outcome.silent if not m.roster.members[rank].left}
    return None if outcome.ok else outcome.why()


def _decision(m: Machine) -> Signal | None:
    return m.pop_signal(("stop", "strategy", "invalid"))


# --- hot switch ------------------------------------------------------------------------------------------------------


def prepare(m: Machine, wish: Signal) -> None:
    """New processes for these ranks may register beside the running ones."""
    cancel(m)
    m.hot = {rank for rank in wish.faults if m.known(rank)}
    m.repair_id += 1


def cancel(m: Machine) -> None:
    for shadow in m.shadows.values():
        if shadow.link is not None:
            m.close(shadow.link, "the switch was cancelled")
    m.shadows.clear()
    m.hot.clear()


def prepared(m: Machine) -> bool:
    ready = TrainState.PREREPAIR_FINISH
    return bool(m.hot) and all(r in m.shadows and m.shadows[r].status.run_status == ready for r in m.hot)


def switch(m: Machine) -> Flow:
    """Exchange the prepared processes for the old ones between two steps. Until that begins it may be called off.

    It is, if the training has come to its end meanwhile: nobody needs the new processes, and nobody is left to give
    them a state. The platform sees the job end, and needs no word of it.
    """
    m.state = "STEP_FINISH"
    paused = yield from _pause_all(m)
    if m.pop_signal(("stop switch",)) or _is_ending(m):
        return (yield from _call_off(m, left=False))
    if paused:
        # Only now, when all have halted at one step: who has left the training function can't go on to another.
        yield Act(m.roster.active, lambda sn, _: Continue(sn=sn, leave=True), m.settings.action_limit)
        finished = m.until_all(m.roster.active, lambda rank: _finished(m, rank))
        paused = yield Wait(lambda: False if m.roster.news else finished(), m.settings.action_limit)
    yield from do.strategies(m, ["migration"] if paused else ["exit"])
    if m.settings.platform:
        # The old pod has to go first, and it may take its time.
        limit = m.settings.replacement_limit if paused else m.settings.platform_limit
        word = yield Wait(lambda: m.pop_signal(("stop switch",)) or _decision(m), limit)
        if word is not None and word.kind == "stop switch" and paused:
            return (yield from _call_off(m, left=True))
        migrate = paused and word is not None and word.kind == "strategy" and word.text == "migration"
    else:
        migrate = bool(paused)
    if not migrate or not prepared(m):
        raise Over("the switch to the new processes failed")
    try:
        yield from _migrate(m)
    except (Failed, NewFault) as error:
        yield from do.result(m, ReportCode.FAILED, str(error), "migration")
        word = (
            yield Wait(lambda: _decision(m), m.settings.platform_limit) if m.settings.platform else Wait(lambda: True)
        )
        if not m.settings.platform or (isinstance(word, Signal) and word.text == "dump"):
            yield from do.dump(m)
        raise Over(f"the switch to the new processes failed: {error}") from None


def _call_off(m: Machine, left: bool) -> Flow:
    """The old processes go on. If they have left the training function, they enter it again, in new groups."""
    cancel(m)
    try:
        if left:
            m.repair_type = ControllerRepairType.NONE
            yield from do.rollback(m, m.roster.active)
            yield from do.go_on(m, "migration", m.roster.active)
            m.unconfirmed = None  # nobody waits for the result
        else:
            yield from do.act(m, m.roster.active, lambda sn, _: Continue(sn=sn))
    except (Failed, NewFault) as error:
        if not m.roster.news and not _is_ending(m):
            raise Over(f"not all ranks could go on after a switch that was called off: {error}") from None


def _is_ending(m: Machine) -> bool:
    return any(member.left for member in m.roster.members.values())


def _finished(m: Machine, rank: int) -> bool:
    status = m.roster.members[rank].status
    return status.run_status == TrainState.STEP_FINISH and status.step >= m.repair_step


def _migrate(m: Machine) -> Flow:
    m.state, m.repair_type = "MIGRATION", ControllerRepairType.NONE
    roster, switched = m.roster, sorted(m.hot)
    for rank in switched:
        old, new = roster.members[rank], m.shadows[rank]
        new.groups, new.arf, new.uce, new.zit = old.groups, old.arf, old.uce, old.zit
        new.data_parallel = old.data_parallel
        if old.link is not None:
            m.close(old.link, "another process has taken this rank")
        roster.grace.pop(rank, None)
        roster.members[rank] = new
        roster.faulty.discard(rank)
        roster.hear(new, m.now)
        roster.judge(new)
        roster.news.discard(rank)
        m.standbys.gone(rank)
        m.standbys.missing.add(rank)
    m.shadows.clear()
    m.hot.clear()
    repair_id, ranks = m.repair_id, roster.active

    def rebuild(sn: int, _: int) -> AnyMessage:
        return RebuildGroup(sn=sn, repair_id=repair_id, fault_ranks=switched)

    yield from do.act(m, ranks, rebuild)
    yield from do.repair(m, do.plan_repair(m, distrust=False))
    yield from do.rollback(m, ranks)
    yield from do.go_on(m, "migration", ranks)
