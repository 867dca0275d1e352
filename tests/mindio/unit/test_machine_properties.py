"""Faults, messages, timers and broken links in any order: what holds in every job, however unlucky.

The simulated ranks do what real ones do, but messages wait in their queues until Hypothesis delivers them, so that
anything can cross with anything. At the end of every run the world starts to behave, and the job has to end by itself.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evertrain.mindio import protocol as p
from evertrain.mindio.controller.policy import PROCESS_LOST
from evertrain.mindio.controller.roster import Place
from evertrain.mindio.controller.states import FromAgent, FromRank, LinkLost
from tests.mindio.simulated_ranks import Cluster, Rank

numbers = st.integers(0, 3)


class Job(RuleBasedStateMachine):
    @initialize(
        world_size=st.sampled_from([1, 2, 3, 3, 4, 4]),
        max_restarts=st.integers(0, 2),
        can_dump=st.booleans(),
        head_start=st.booleans(),
        least=st.integers(0, 2),
        sharded=st.booleans(),
    )
    def begin(
        self, world_size: int, max_restarts: int, can_dump: bool, head_start: bool, least: int, sharded: bool
    ) -> None:
        least = min(least, world_size)
        shards = 2 if sharded and world_size == 4 else 0
        self.job = Cluster(world_size, shards=shards, max_restarts=max_restarts, can_dump=can_dump, elastic=least)
        self.faults = self.asked = 0
        self.expected: Counter[tuple[int, int]] = Counter()
        self.job.hello()
        if head_start:
            self.job.quiesce(train=False)
            self.job.train(2)

    def pick(self, number: int) -> Rank:
        return self.job.ranks[number % self.job.world_size]

    def name(self, what: str) -> str:
        self.faults += 1
        return f"{what}#{self.faults}"

    # The world goes on.

    @rule(number=numbers, times=st.integers(1, 12))
    def a_few_things_happen(self, number: int, times: int) -> None:
        """Progress, beginning with this rank; without it most runs would consist of faults only."""
        for offset in range(times):
            self.a_rank_boots(number + offset)
            self.a_rank_speaks(number + offset)
            self.a_rank_obeys(number + offset)
            self.a_rank_trains(number + offset)

    @rule(number=numbers)
    def a_rank_speaks(self, number: int) -> None:
        self.job.from_rank(self.pick(number))

    @rule(number=numbers)
    def a_rank_obeys(self, number: int) -> None:
        rank = self.pick(number)
        if rank.alive and rank.inbox and not rank.deaf:
            rank.obey(self.job)

    @rule(number=numbers)
    def a_rank_boots(self, number: int) -> None:
        self.job.boot(self.pick(number))

    @rule(number=numbers)
    def a_rank_trains(self, number: int) -> None:
        rank = self.pick(number)
        if self.job.can_step(rank):
            rank.complete_step()

    @rule()
    def the_agent_speaks(self) -> None:
        if self.job.agent_says:
            message = self.job.agent_says[0]
            if isinstance(message, p.Observed | p.Ended):
                self.expect(message.fault if isinstance(message, p.Observed) else message)
            self.job.from_agent()

    def expect(self, seen: p.Fault | p.Ended) -> None:
        """The end of a current process in a living job must be found in exactly one incident."""
        member = self.job.machine._roster[seen.rank]
        current = self.job.machine.ended is None and member.incarnation == seen.incarnation
        if current and isinstance(seen, p.Fault) and member.place not in (Place.LEAVING, Place.LOST):
            self.expected[seen.rank, seen.incarnation] = 1

    @rule()
    def a_link_breaks(self) -> None:
        if self.job.broken_links:
            self.job.break_link()

    @rule()
    def time_passes(self) -> None:
        self.job.tick()

    @rule(seconds=st.floats(0.01, 2.0))
    def a_little_time_passes(self, seconds: float) -> None:
        self.job.now += seconds

    @rule()
    def everything_due_happens(self) -> None:
        self.job.quiesce(train=False)

    # Faults.

    @rule(number=numbers, loses=st.booleans(), code=st.sampled_from([-9, -9, -11, 1, 0]))
    @precondition(lambda self: self.job.machine._trained or self.faults > 8)
    def a_process_ends(self, number: int, loses: bool, code: int) -> None:
        rank = self.pick(number)
        self.faults += 1
        if loses:
            rank.outbox.clear()
        self.job.end_process(rank, code)

    @rule(number=numbers, kind=st.sampled_from(["stopped", "hang"]))
    @precondition(lambda self: self.job.machine._protected)
    def a_process_freezes(self, number: int, kind: str) -> None:
        rank = self.pick(number)
        if rank.alive:
            self.job.observe(rank, kind)

    @rule(number=numbers, cut=st.booleans())
    @precondition(lambda self: self.job.machine._protected)
    def a_rank_stops_listening(self, number: int, cut: bool) -> None:
        rank = self.pick(number)
        rank.deaf = True
        link = (rank.rank, rank.incarnation)
        if cut and link in self.job.linked and link not in self.job.broken_links:
            self.job.broken_links.append(link)

    @rule(number=numbers, kind=st.sampled_from(["exception", "uce", "hccl", "link"]))
    def the_training_code_raises(self, number: int, kind: str) -> None:
        rank = self.pick(number)
        if rank.place == "inside" and not rank.deaf:
            rank.fail(kind, self.name(kind))

    @rule(number=numbers)
    def an_update_is_torn(self, number: int) -> None:
        rank = self.pick(number)
        if rank.place == "inside" and not rank.deaf:
            rank.clean = False
            rank.fail("exception", self.name("torn"))

    @rule(number=numbers)
    def a_rank_fails_to_join(self, number: int) -> None:
        rank = self.pick(number)
        if rank.inbox and isinstance(rank.inbox[0], p.Join) and not rank.deaf:
            rank.say(p.Joined(generation=rank.inbox.popleft().generation, error="no way"))

    @rule(number=numbers)
    def bits_will_flip(self, number: int) -> None:
        self.pick(number).flips = True

    # What happens on purpose, and what becomes of it.

    @rule(ready=st.integers(0, 2))
    def spares_are_counted(self, ready: int) -> None:
        self.job.feed(FromAgent(p.Spares(ready=ready)))

    @rule(
        order=st.sampled_from(["pause", "pause", "continue", "hot-switch", "hot-switch", "cancel-switch", "status"]),
        number=numbers,
        timeout=st.sampled_from([0.0, 1.0, 50.0]),
        exit_after=st.sampled_from([False, False, False, True]),
    )
    @precondition(lambda self: self.job.end is None)
    def somebody_wants_something(self, order: str, number: int, timeout: float, exit_after: bool) -> None:
        self.asked += 1
        self.job.command(order, rank=number % self.job.world_size, timeout=timeout, exit_after=exit_after)

    @rule(number=numbers, times=st.integers(1, 3))
    def a_prepared_process_gets_on(self, number: int, times: int) -> None:
        shadow = self.job.shadows.get(number)
        if shadow is not None and shadow.alive:
            for _ in range(times):
                self.job.boot(shadow)
                self.job.from_rank(shadow)

    @rule(number=numbers, code=st.sampled_from([-9, 1, 0]))
    def a_prepared_process_ends(self, number: int, code: int) -> None:
        if (shadow := self.job.shadows.get(number)) is not None:
            self.job.end_process(shadow, code)

    # What should not impress anybody.

    @rule(pick=st.randoms(use_true_random=False))
    def a_ghost_speaks(self, pick) -> None:
        ghosts = [ghost for ghost in self.job.ghosts if ghost.outbox]
        if ghosts:
            self.job.from_rank(pick.choice(ghosts))

    @rule(number=numbers)
    def an_old_exit_is_reported_again(self, number: int) -> None:
        rank = self.pick(number)
        fault = p.Fault(kind="exit", rank=rank.rank, incarnation=rank.incarnation - 1, exit_code=-9)
        self.job.feed(FromAgent(p.Observed(fault=fault)))
        self.job.feed(LinkLost(rank.rank, rank.incarnation - 1))

    @rule(number=numbers)
    def an_answer_to_an_old_question_comes(self, number: int) -> None:
        rank, old = self.pick(number), self.job.machine.generation - 1
        for message in (
            p.Updating(attempt=self.job.machine._attempt - 1),
            p.Joined(generation=old, digests={"state": "old"}),
            p.Repaired(generation=old, ok=False),
            p.Resumed(generation=old, step=1),
            p.Dumped(ok=True, step=1),
        ):
            if not isinstance(message, p.Dumped) or type(self.job.machine.state).__name__ != "Dumping":
                self.job.feed(FromRank(rank.rank, rank.incarnation, message))

    @rule(grace=st.floats(0.5, 30.0))
    @precondition(lambda self: self.faults > 3)
    def the_job_is_terminated(self, grace: float) -> None:
        self.job.agent_says.append(p.Terminate(reason="SIGTERM", grace=grace))

    # What always holds.

    @invariant()
    def nobody_went_on_with_another_state(self) -> None:
        for generation, contents in self.job.gone.items():
            assert len(set(contents.values())) == 1, f"generation {generation} began with different states: {contents}"

    @invariant()
    def nobody_is_forgotten(self) -> None:
        machine = self.job.machine
        if type(machine.state).__name__ in ("Building", "Repairing", "Running"):
            assert sorted([*machine._active, *(machine._aside - set(machine._active))]) == [*range(machine.world_size)]

    @invariant()
    def budgets_are_kept(self) -> None:
        assert self.job.machine.restarts <= self.job.machine.max_restarts
        restarts = sum(record["event"] == "decision" and record["decision"] == "restart" for record in self.job.records)
        assert restarts <= self.job.machine.max_restarts

    @invariant()
    def one_generation_is_open_while_it_is_used(self) -> None:
        state = type(self.job.machine.state).__name__
        if state in ("Building", "Repairing", "Running"):
            assert len(self.job.open_generations) == 1
        elif state in ("Gathering", "Closing", "Dumping", "Over"):
            assert not self.job.open_generations

    @invariant()
    def who_waits_has_a_deadline(self) -> None:
        state = type(self.job.machine.state).__name__
        if state in ("Building", "Repairing", "Closing", "Dumping"):
            assert self.job.machine.deadline is not None
        if state == "Gathering" and self.job.machine._protected:
            assert self.job.machine.deadline is not None

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        while self.job.agent_says:
            self.the_agent_speaks()
        self.job.settle()
        self.budgets_are_kept()
        self.nobody_went_on_with_another_state()
        assert self.job.machine.deadline is None
        assert not self.job.shadows, "a prepared process is left"
        assert len(self.job.answers) == self.asked, "a command without an answer, or with two"
        assert self.job.feed(FromAgent(p.Terminate(reason="late", grace=1.0))) == []

        listed: Counter[tuple[str, int, int]] = Counter()
        lost: Counter[tuple[int, int]] = Counter()
        for incident in self.job.incidents:
            for fault in incident["faults"]:
                listed[incident["id"], fault["rank"], fault["incarnation"]] += 1
                if fault["kind"] in PROCESS_LOST:
                    lost[fault["rank"], fault["incarnation"]] += 1
        told = Counter(
            (record["incident"], record["rank"], record["incarnation"])
            for record in self.job.records
            if record["event"] == "fault" and not record.get("update")
        )
        assert listed == told, "a fault is in no closed incident, or in two"
        assert all(count == 1 for count in lost.values()), f"one death, two faults: {lost}"
        assert not self.expected - lost, f"deaths in no incident: {self.expected - lost}"
        numbers = [incident["id"] for incident in self.job.incidents]
        assert len(numbers) == len(set(numbers))
        for incident in self.job.incidents:
            assert sum(incident["phases_ms"].values()) == pytest.approx(incident["total_ms"], abs=0.1)


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
