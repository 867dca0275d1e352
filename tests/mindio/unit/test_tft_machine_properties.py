"""Whatever happens in whatever order: the controller always finds a way on, or out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.numbers import TrainState
from evertrain.mindio.tft.requests import FromLink, Signal
from tests.mindio.tft_job import PLATFORM_FAST, Job

WORLD = 4
ORDERS = [kind.__name__ for kind in w.Order.__args__]
LIMITS = {"replacement_limit": 60.0, "action_limit": 30.0, "dump_limit": 60.0}
REST = ("NORMAL", "DOWNGRADE")

ranks = st.integers(0, WORLD - 1)
faults = st.dictionaries(ranks, st.integers(0, 2), max_size=2)
texts = st.sampled_from(["retry", "recover", "downgrade", "upgrade", "dump", "exit", "migration", "continue"])
signals = st.one_of(
    st.builds(Signal, st.sampled_from(["stop", "global"]), faults=faults, limit=st.just(1.0)),
    st.builds(Signal, st.just("strategy"), text=texts, param=st.just("x")),
    st.builds(Signal, st.sampled_from(["pause", "dump", "invalid"]), limit=st.just(20.0)),
    st.builds(Signal, st.just("hot switch"), faults=faults),
    st.builds(Signal, st.just("stop switch")),
)
steps = st.one_of(
    st.tuples(st.just("npu"), ranks, st.sampled_from([2, 3, 4, 9, 12])),
    st.tuples(st.just("abnormal"), ranks, st.just(0)),
    st.tuples(st.just("kill"), ranks, st.booleans()),
    st.tuples(st.just("replace"), ranks, st.sampled_from([TrainState.INIT_FINISH, TrainState.PREREPAIR_FINISH])),
    st.tuples(st.just("step"), ranks, st.integers(1, 2)),
    st.tuples(st.just("bye"), ranks, st.just(0)),
    st.tuples(st.just("signal"), st.just(0), signals),
    st.tuples(st.just("answer"), ranks, st.tuples(st.sampled_from(ORDERS), st.sampled_from([0, 1, 4, 5, None]))),
    st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.1, 1.0, 5.0, 40.0])),
)
platforms = st.sampled_from([None, "retry", "recover", "downgrade", "dump", "exit", ""])


def play(job: Job, what: str, rank: int, detail: Any) -> None:
    process = job.processes.get(rank)
    if what == "signal":
        job.feed(detail)
    elif what == "wait":
        job.idle(detail)
    elif what == "replace":
        job.replace(rank, detail)
    elif process is None:
        return
    elif what == "npu":
        job.beat(rank, npu_status=detail)
    elif what == "abnormal":
        job.beat(rank, run_status=TrainState.ABNORMAL)
    elif what == "kill":
        job.kill(rank, notice=detail)
    elif what == "step":
        job.beat(rank, step=process.status.step + detail)
    elif what == "bye":
        job.feed(FromLink(process.link, w.Bye()))
    elif what == "answer":
        process.answers[detail[0]] = detail[1]


@settings(max_examples=150, deadline=None)
@given(platforms, st.booleans(), st.booleans(), st.sampled_from([1, 2]), st.lists(steps, max_size=14))
def test_there_is_always_a_way_out(
    platform: str | None, arf: bool, zit: bool, copies: int, script: list[tuple[str, int, Any]]
) -> None:
    words: dict[str, list[Signal]] | None = None
    if platform is not None:
        words = PLATFORM_FAST | {
            "report_strategies": [Signal("strategy", text=platform, param="x")] if platform else []
        }
    job = Job(WORLD, copies, platform=words, arf=arf, zit=zit, **LIMITS)
    for what, rank, detail in script:
        play(job, what, rank, detail)
    for process in job.processes.values():
        process.answers.clear()
    patience = 0
    while job.machine.ended is None and job.machine.state not in REST:
        assert job.machine.deadline is not None, f"nothing would ever happen in {job.machine.state}"
        job.idle(5)
        patience += 1
        assert patience < 300, f"no end of {job.machine.state}: {job.calls[-5:]}"
    sent = [m.sn for _, m in job.sent if isinstance(m, w.Order)]
    assert sent == sorted(sent), "serial numbers never fall"
    assert len(job.results()) <= 4 * (len(script) + 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ranks, st.booleans()), min_size=1, max_size=3), st.integers(1, 5))
def test_nobody_is_given_a_wrong_state(losses: list[tuple[int, bool]], ahead: int) -> None:
    """Whoever sends or saves holds exactly the locked step, and everybody else receives it."""
    job = Job(WORLD, 2, platform=PLATFORM_FAST | {"report_strategies": [Signal("strategy", text="recover")]}, arf=True)
    job.beat(0, step=5 + ahead)
    for rank, dies in losses:
        if rank not in job.processes:
            continue
        if dies:
            job.kill(rank)
        else:
            job.beat(rank, npu_status=TrainState.UCE_HIGH)
    for rank in sorted({rank for rank, _ in losses}):
        if job.machine.ended is None and job.machine.state == "REPAIR":
            job.replace(rank)
    holders = set(range(WORLD)) - {rank for rank, _ in losses}
    for rank, message in job.sent:
        if isinstance(message, w.Repair):
            for unit in message.units:
                assert unit.src in holders or unit.src == unit.dst
        if isinstance(message, w.SaveCheckpoint):
            assert rank in holders
    locked = {m.step for _, m in job.sent if isinstance(m, w.Rollback)}
    if locked and holders:
        assert max(locked) == max(job.processes[rank].status.step for rank in holders)


@pytest.mark.parametrize("world", [1_000, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_many_ranks(world: int) -> None:
    """No step of a recovery costs more than in proportion to the number of ranks; else this would take minutes."""
    size = 8
    kinds = [[list(range(first, first + size)) for first in range(0, world, size)]]
    job = Job(world, kinds=kinds)
    job.beat(777, npu_status=TrainState.UCE_HIGH)
    assert job.machine.state == "NORMAL" and job.ranks(w.Repair) == [777, 781]
    for rank in list(job.processes):  # all lose their links and come back
        job.kill(rank, notice=False)
        job.start(rank, replaces=False, status=w.Status(step=6))
    assert job.machine.state == "NORMAL" and job.machine.repair_id == 1
