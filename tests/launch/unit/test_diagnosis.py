"""Who is suspected, how long each may take, and what the evidence means."""

import math
from collections import Counter

import pytest

from evertrain.launch.diagnosis import Evidence, Sample, StepClock, diagnose, limit, main_thread, suspects
from evertrain.mindio import board
from evertrain.mindio.timing import Timing

TIMING = Timing.derive(1.0)


def sample(activity=board.COMPUTE, marked_at=0.0, steps_done=5, step=5, slow=False):
    return Sample(activity, step, steps_done, marked_at, slow)


def ranks_suspected(samples, now, longest=0.0, alarms=None, awake_since=0.0):
    found = suspects(samples, now, TIMING, longest, alarms or Counter(), awake_since)
    return [(suspicion.rank, suspicion.collective) for suspicion in found]


@pytest.mark.parametrize(
    "which, seconds",
    [
        (sample(), 1.0),
        (sample(board.UPDATE), 1.0),
        (sample(board.DATA), TIMING.data_stall),
        (sample(steps_done=0), TIMING.first_step),
        (sample(board.DATA, steps_done=0), TIMING.first_step),
        (sample(slow=True), math.inf),
        (sample(board.BOOT), math.inf),
        (sample(board.OUTSIDE), math.inf),
        (sample(board.FINISHED), math.inf),
    ],
)
def test_patience(which, seconds):
    assert limit(which, TIMING, longest=0.0) == seconds


def test_patience_grows_with_the_longest_step_and_with_alarms():
    assert limit(sample(), TIMING, longest=0.1) == 1.0
    assert limit(sample(), TIMING, longest=2.0) == 10.0
    assert limit(sample(), TIMING, longest=2.0, alarms=2) == 40.0


def test_only_the_rank_that_does_not_wait_for_others_is_suspected():
    samples = {0: sample(board.COLLECTIVE), 1: sample(), 2: sample(board.COLLECTIVE)}
    assert ranks_suspected(samples, now=0.9) == []
    assert ranks_suspected(samples, now=1.1) == [(1, False)]


def test_all_ranks_in_a_collective_are_nobodys_fault_but_one_is_named():
    samples = {rank: sample(board.COLLECTIVE, marked_at=rank / 10) for rank in (2, 0, 1)}
    assert ranks_suspected(samples, now=1.15) == [], "the last one arrived less than a bound ago"
    assert ranks_suspected(samples, now=1.3) == [(0, True)]


def test_waiting_for_a_rank_that_has_finished_counts_as_waiting_for_ever():
    samples = {0: sample(board.FINISHED), 1: sample(board.COLLECTIVE)}
    assert ranks_suspected(samples, now=5.0) == [(1, True)]


def test_a_collective_during_recovery_is_left_to_the_controller():
    samples = {0: sample(board.OUTSIDE), 1: sample(board.COLLECTIVE)}
    assert ranks_suspected(samples, now=5.0) == []


def test_an_alarm_at_a_step_doubles_its_time_only():
    alarms = Counter({5: 1})
    assert ranks_suspected({0: sample()}, now=1.5, alarms=alarms) == []
    assert ranks_suspected({0: sample()}, now=2.5, alarms=alarms) == [(0, False)]
    assert ranks_suspected({0: sample(step=6)}, now=1.5, alarms=alarms) == [(0, False)]


def test_time_in_which_nobody_watched_does_not_count():
    assert ranks_suspected({0: sample()}, now=100.0, awake_since=99.5) == []


def test_step_clock_learns_from_ordinary_steps_only():
    clock = StepClock()
    clock.feed(1, sample(steps_done=0), 0.0)
    clock.feed(1, sample(steps_done=1), 30.0)
    assert clock.longest == 30.0, "nothing else is known yet"
    clock.feed(1, sample(steps_done=1), 31.0)
    clock.feed(1, sample(steps_done=2), 33.0)
    assert clock.longest == 3.0, "the first step of a process is not typical"
    clock.feed(1, sample(board.OUTSIDE, steps_done=2), 34.0)
    clock.feed(1, sample(steps_done=3), 60.0)
    assert clock.longest == 3.0, "a recovery is not a long step"
    clock.feed(1, sample(steps_done=3, slow=True), 61.0)
    clock.feed(1, sample(steps_done=4), 90.0)
    assert clock.longest == 3.0, "nor is a section announced as slow"
    clock.feed(1, sample(steps_done=24), 100.0)
    assert clock.longest == 0.5, "several steps between two samples count by their mean, and one outlier does not count"
    clock.feed(1, sample(steps_done=25), 103.0)
    assert clock.longest == 3.0, "two of them do"


def evidence(states="SSS", cpu=0.0, process=None, answered=True, stacks=("a", "a"), children=0.0):
    return Evidence(states, 0.1, cpu, cpu if process is None else process, answered, stacks, children)


@pytest.mark.parametrize(
    "seen, kind, patient",
    [
        (evidence("TTT", answered=False, stacks=("", "")), "frozen", False),
        (evidence("SST", answered=True), "frozen", False),
        (evidence("DDD", answered=True, stacks=("", "")), "frozen", False),
        (evidence("SSS", answered=False, stacks=("", "")), "frozen", False),
        (evidence("RRR", answered=False, stacks=("", "")), "busy", True),
        (evidence("RRR", 0.005, answered=False), "busy", True),
        (evidence("RRR", 0.005, answered=True), "busy", True),
        (evidence("RRR", 0.1, answered=False), "gil", False),
        (evidence("SSS", answered=False), "gil", False),
        (evidence("RRR", 0.1, answered=False, stacks=("Thread 1\n f", "Thread 1\n g")), "gil", True),
        (evidence("SSS"), "syscall", False),
        (evidence("SSS", children=0.1), "syscall", True),
        (evidence("SSS", process=0.1), "busy", True),
        (evidence("RRR", 0.1), "busy", True),
        (evidence("RSR", 0.02), "busy", True),
    ],
)
def test_verdicts(seen, kind, patient):
    verdict = diagnose(seen)
    assert (verdict.kind, verdict.patient) == (kind, patient), verdict.words


def test_the_main_thread_is_the_last_in_a_dump():
    dump = (
        'Thread 0x1 (most recent call first):\n  File "a"\n\nCurrent thread 0x2 (most recent call first):\n  File "b"\n'
    )
    assert main_thread(dump) == 'File "b"' or main_thread(dump) == '  File "b"'
    assert main_thread("") == ""
