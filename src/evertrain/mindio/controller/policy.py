"""What to do about a fault: the finest strategy that has a chance, and the reason in words. Pure.

The strategies, finest first: `retry` (the step is run again, nobody restarts), `recover-in-place` (only the faulty
process is replaced), `elastic-training` (the same, but the others go on without it until its replacement is there),
`restart` (all processes are, after a checkpoint was written if that is possible) and `exit`. `hot-switch` is no answer
to a fault: a process is exchanged on request.

Each one is tried a few times before the next. "Again" means: the same rank without progress of the job in between; a
fault at a later step starts from the top, so that a long job with rare faults never uses up anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from evertrain.mindio.protocol import Fault

RETRY, HOT_SWITCH, RECOVER_IN_PLACE, ELASTIC, RESTART, EXIT = STRATEGIES = (
    "retry",
    "hot-switch",
    "recover-in-place",
    "elastic-training",
    "restart",
    "exit",
)

PROCESS_LOST = frozenset({"exit", "stopped", "hang", "unresponsive", "disconnected", "start", "agent"})
"""Kinds after which the process is of no more use. After all others it is alive and can run the step again."""

MAX_RETRIES = 2
MAX_REPLACEMENTS = 2
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Decision:
    strategy: str
    explanation: str
    script: bool = False
    """The script is to blame, whatever was tried before."""

    @property
    def severity(self) -> int:
        return STRATEGIES.index(self.strategy)


@dataclass(frozen=True, slots=True)
class Situation:
    """What else matters when a fault is judged."""

    step: int
    """The step that the fault belongs to, as far as known: faults at the same one are repetitions."""
    starting: bool
    """The process had not reached the training function."""
    trained: bool
    """The job has trained since it was started."""
    protected: bool
    """The script uses Evertrain: some rank has introduced itself."""
    released: bool
    """The training is over; the ranks were leaving."""
    world_size: int
    restarts_used: int
    max_restarts: int
    spare: bool = False
    """A replacement would be there at once."""
    others: int = 0
    """Ranks that could go on without this one, if they may; 0 if they may not."""
    completed: bool = True
    """The job has completed a step since it was started."""
    asked: bool = True
    """Somebody has said how many restarts there may be; otherwise it is the default."""


@dataclass(slots=True)
class History:
    """How often each rank failed without progress in between."""

    retried: Counter[tuple[int, int]] = field(default_factory=Counter)
    replaced: Counter[tuple[int, int]] = field(default_factory=Counter)
    failed_starts: Counter[int] = field(default_factory=Counter)
    raised: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """The exceptions of a rank at a step."""

    def note(self, fault: Fault, situation: Situation, decision: Decision) -> None:
        if fault.kind == "exception":
            self.raised.setdefault((fault.rank, situation.step), set()).add(describe(fault))
        if situation.starting:
            self.failed_starts[fault.rank] += 1
        elif decision.strategy == RETRY:
            self.retried[fault.rank, situation.step] += 1
        else:
            # After a full restart the fault is as old as it was before it: it must not earn all retries once more.
            self.replaced[fault.rank, situation.step] += 1

    def forgive(self, rank: int, step: int) -> None:
        """A retry that turned out to be caused by somebody else's death."""
        if self.retried[rank, step] > 0:
            self.retried[rank, step] -= 1

    def only_raised(self, rank: int, step: int, text: str) -> bool:
        """Every exception of the rank at this step was this one, and there was one."""
        return self.raised.get((rank, step)) == {text}

    def reached_training(self, rank: int) -> None:
        del self.failed_starts[rank]


def decide(fault: Fault, situation: Situation, history: History) -> Decision:
    """The strategy for this fault, given what was tried before."""
    who = f"rank {fault.rank}"
    if situation.released:
        return fallback(f"{who} failed after the end of the training ({describe(fault)})", situation)
    by_itself = fault.kind == "exit" and (fault.exit_code or 0) >= 0
    if not situation.protected and by_itself and not situation.asked:
        why = f"{who} ended before any rank came to a training of Evertrain ({describe(fault)})"
        return Decision(EXIT, f"{why}: an error of the script; --max-restarts N restarts it nevertheless", script=True)
    if not situation.protected:
        return fallback(f"{who} failed ({describe(fault)}) and the script has no training to recover", situation)
    if situation.starting and not situation.trained and by_itself:
        why = f"{who} ended before its first step ({describe(fault)}): an error of the script"
        return Decision(EXIT, why, script=True)
    if fault.kind == "script":
        return Decision(EXIT, f"{who}: {fault.detail.strip()}", script=True)
    if fault.kind == "exception" and _of_the_script(fault, situation, history):
        why = f"{who}: the same error at step {situation.step} again and again: an error of the script"
        return Decision(EXIT, f"{why} ({describe(fault)})", script=True)
    if situation.starting:
        failed = history.failed_starts[fault.rank]
        if failed < MAX_REPLACEMENTS:
            if situation.others and not situation.spare:
                return _without(f"the start of {who} failed ({describe(fault)}) and is tried again", situation)
            return Decision(RECOVER_IN_PLACE, f"the start of {who} failed ({describe(fault)}); start it again")
        return fallback(f"the start of {who} failed {failed + 1} times ({describe(fault)})", situation)

    key = (fault.rank, situation.step)
    retried, replaced = history.retried[key], history.replaced[key]
    if fault.kind not in PROCESS_LOST:
        if retried < MAX_RETRIES and not replaced:
            again = f" for the {_ordinal(retried + 1)} time at step {situation.step}" if retried else ""
            lost = "; its state comes from another rank" if fault.kind == "uce" else ""
            return Decision(RETRY, f"{who} lives and failed{again} ({describe(fault)}); run the step again{lost}")
        if situation.world_size == 1:
            return fallback(f"{who} fails at step {situation.step} again and again ({describe(fault)})", situation)
    if replaced < MAX_REPLACEMENTS:
        why = "retries did not help" if retried else "its process is lost"
        if situation.others and not situation.spare:
            return _without(f"{who} is replaced: {why} ({describe(fault)}); no warm spare is ready", situation)
        return Decision(RECOVER_IN_PLACE, f"{who} is replaced: {why} ({describe(fault)})")
    return fallback(f"{who} fails at step {situation.step} even after {replaced} replacements", situation)


def _of_the_script(fault: Fault, situation: Situation, history: History) -> bool:
    """Is it of no use to try again, because everything that could make a difference was tried?"""
    step, text = situation.step, describe(fault)
    key = (fault.rank, step)
    if not history.only_raised(fault.rank, step, text):
        return False
    if not situation.completed:
        return history.retried[key] > 0
    if history.replaced[key]:
        return True
    # A new process helps if one of them is broken; if all say the same, it costs the state and changes nothing.
    everybody = all(history.only_raised(rank, step, text) for rank in range(situation.world_size))
    return everybody and history.retried[key] >= MAX_RETRIES


def in_background(fault: Fault, history: History) -> Decision:
    """A process that the others go on without has failed: nobody is interrupted for that."""
    who, failed = f"rank {fault.rank}", history.failed_starts[fault.rank]
    if failed <= MAX_REPLACEMENTS:
        return Decision(RECOVER_IN_PLACE, f"{who} failed before it could join ({describe(fault)}); start it again")
    return Decision(ELASTIC, f"{who} failed {failed} times before it could join ({describe(fault)}); go on without it")


def node_lost(fault: Fault, situation: Situation, mode: str, patience: float, remaining: int) -> Decision:
    """The agent of a node is gone, and with it all processes of the node. `remaining` ranks may go on without it."""
    if mode == "exit":
        return Decision(EXIT, f"{fault.detail}; a lost node ends the job (--ft-node-loss exit)")
    if situation.released or not situation.protected:
        return fallback(fault.detail, situation)
    if remaining:
        return Decision(ELASTIC, f"{fault.detail}; {remaining} of {situation.world_size} ranks go on meanwhile")
    return Decision(RECOVER_IN_PLACE, f"{fault.detail}; wait up to {patience:g} s for it to come back")


def after_failed_attempt(attempts: int, detail: str, situation: Situation) -> Decision:
    """A recovery did not get through although no process failed."""
    if attempts < MAX_ATTEMPTS:
        return Decision(RETRY, f"recovery attempt {attempts} failed ({detail}); another attempt")
    return fallback(f"{attempts} recovery attempts failed, the last because {detail}", situation)


def fallback(why: str, situation: Situation) -> Decision:
    """Nothing finer is left: restart everything, or give up when that was done often enough."""
    used, allowed = situation.restarts_used, situation.max_restarts
    if used < allowed:
        return Decision(RESTART, f"{why}; restart {used + 1} of {allowed}")
    spent = f"all {allowed} restarts are used" if allowed else "no restarts are allowed"
    return Decision(EXIT, f"{why}; {spent}")


def describe(fault: Fault) -> str:
    """A fault in a few words."""
    detail = fault.detail.strip().splitlines()[0][:200] if fault.detail.strip() else ""
    if not detail and fault.exit_code is not None:
        detail = f"signal {-fault.exit_code}" if fault.exit_code < 0 else f"exit code {fault.exit_code}"
    return f"{fault.kind}: {detail}" if detail else fault.kind


def _without(why: str, situation: Situation) -> Decision:
    return Decision(ELASTIC, f"{why}; {situation.others} of {situation.world_size} ranks go on meanwhile")


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def rank_list(ranks: list[int]) -> str:
    """`0-3, 6`, from ranks in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
