"""A job without processes: simulated ranks and a simulated agent around the controller's machine.

Every link is a queue of messages in each direction that the test empties in any order it likes, so messages cross,
arrive late and get lost with their process exactly as they can in reality. A rank's state is a string that tells its
whole history; two states are equal only if they came about in the same way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from evertrain.mindio import protocol as p
from evertrain.mindio.controller.machine import (
    Action,
    AgentLost,
    CloseGeneration,
    Event,
    FromAgent,
    FromControl,
    FromRank,
    LinkLost,
    Machine,
    OpenGeneration,
    Send,
    Tick,
    ToAgent,
    ToControl,
)
from evertrain.mindio.timing import Timing

LOST_STATE = "lost"
STATE_BYTES = 1000


@dataclass
class Rank:
    rank: int
    incarnation: int
    steps: int
    """How many steps the training has."""
    shard: int = -1
    """If not negative, the state has a second part, shared with the ranks that have the same number here."""
    content: str = ""
    shard_content: str = ""
    reached: dict[int, int] = field(default_factory=dict)
    """By generation: the newest step that one of its members has completed; all ranks share it."""
    other: tuple[int, str] | None = None
    """Step and content of the shard's other version: an update that somebody completed and this rank did not."""
    step: int = 0
    clean: bool = True
    fresh: bool = True
    place: str = "boot"
    """boot, out, inside, held (does not know yet where to pause), paused, finished, leaving or dead."""
    members: tuple[int, ...] = ()
    pause: int = 0
    """Number of the pause that this rank has heard of; 0 for none."""
    newest_pause: int = 0
    pause_at: int = 0
    pause_agreed: bool = False
    taken: int = -1
    generation: int = 0
    resume_due: bool = False
    deaf: bool = False
    """Reads nothing any more, like a stopped process."""
    flips: bool = False
    """Its bits flip when it is next the source of a repair."""
    inbox: deque[p.Message] = field(default_factory=deque)
    outbox: deque[p.Message] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.content = f"init{self.rank}.{self.incarnation}"
        self.shard_content = f"shard{self.shard}of{self.content}" if self.shard >= 0 else ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (p.STATE,) if self.shard < 0 else (p.STATE, f"shard:{self.shard}")

    @property
    def digests(self) -> dict[str, str]:
        return dict(zip(self.parts, (self.content, self.shard_content), strict=False))

    @property
    def alive(self) -> bool:
        return self.place != "dead"

    def say(self, message: p.Message) -> None:
        self.outbox.append(message)

    def out(self, fault: p.Fault | None = None) -> None:
        self.say(
            p.Out(
                step=self.step, clean=self.clean, attempt=self.taken, fresh=self.fresh, fault=fault,
                fingerprint="same", state_bytes=STATE_BYTES, parts=self.parts,
                also=[(self.parts[1], self.other[0])] if self.other else [],
            )
        )  # fmt: skip

    def enter(self) -> None:
        self.place = "out"
        self.out()

    def complete_step(self) -> None:
        self.step += 1
        self.content, self.shard_content = (_after(text, self.step) for text in (self.content, self.shard_content))
        self.reached[self.generation] = max(self.step, self.reached.get(self.generation, 0))
        if self.resume_due:
            self.resume_due = False
            self.say(p.Resumed(generation=self.generation, step=self.step, elastic=self.shard < 0))
        self.after_step()

    def after_step(self) -> None:
        if self.pause and self.step >= self.pause_at:
            self.place = "paused" if self.pause_agreed else "held"
            if self.pause_agreed:
                self.say(p.Paused(generation=self.generation, step=self.step))
        elif self.step >= self.steps:
            self.finish()
        else:
            self.place = "inside"

    def finish(self) -> None:
        self.place, self.resume_due = "finished", False
        self.say(p.Finished(step=self.step))

    def leave(self) -> None:
        """Whoever completes a step with sharded state has gathered every shard, so the others have updated theirs."""
        if self.shard >= 0 and self.place == "inside" and self.reached.get(self.generation, 0) > self.step:
            self.other = self.step + 1, _after(self.shard_content, self.step + 1)

    def fail(self, kind: str, detail: str) -> None:
        """The training code raises."""
        if kind == "uce":
            self.clean, self.content, self.shard_content, self.other = False, LOST_STATE, LOST_STATE, None
        self.place, self.resume_due = "out", False
        self.out(p.Fault(kind=kind, rank=self.rank, detail=detail))

    def obey(self, cluster: Cluster) -> None:
        message = self.inbox.popleft()
        newest = max((m.attempt for m in self.inbox if isinstance(m, p.Stop)), default=-1)
        match message:
            case p.Stop():
                self.taken = message.attempt
                self.leave()
                self.place, self.resume_due = "out", False
                self.out()
            case p.Exit():
                cluster.end_process(self, 75)
            case p.Dump():
                self.switch(message.step)
                if p.STATE in message.parts:
                    cluster.dumps.append((self.step, self.content, self.clean))
                self.say(p.Dumped(ok=True, step=message.step, parts=message.parts, path="dump"))
            case p.Release():
                self.place = "leaving"
            case p.Join() if newest < 0:
                self.generation, self.members = message.generation, tuple(message.members)
                digests = self.digests if self.clean and self.step == message.step else {}
                if self.switch(message.step):
                    digests = {self.parts[1]: self.shard_content}
                self.say(p.Joined(generation=message.generation, digests=digests))
            case p.Repair() if newest < 0 and message.generation == self.generation:
                self._repair(message, cluster)
            case p.Go() if newest < 0 and message.generation == self.generation:
                assert self.step == message.step and self.clean, f"told to go with a stale state: {self}"
                self.fresh, self.resume_due, self.place, self.other = False, True, "inside", None
                if self.pause <= message.pauses:
                    self.pause = 0
                for part, content in self.digests.items():
                    cluster.gone.setdefault((message.generation, part), {})[self.rank] = content
                if self.step >= self.steps:
                    self.finish()
            case p.Pause():
                self.pause = self.newest_pause = message.number
                self.pause_at, self.pause_agreed = self.step + 1, False
                self.say(p.At(number=message.number, step=self.step))
            case p.PauseAt() if message.number == self.pause:
                self.pause_at, self.pause_agreed = message.step, True
                if self.place == "held":
                    self.after_step()
            case p.Continue() if self.pause <= message.number:
                self.pause = 0
                if self.place in ("held", "paused"):
                    self.after_step()
            case _:
                pass

    def switch(self, step: int) -> bool:
        """Make the shard's version of that step the present one, if it is the other one."""
        if self.other is None or self.other[0] != step:
            return False
        self.shard_content, self.other = self.other[1], None
        self.clean = False
        return True

    def _repair(self, message: p.Repair, cluster: Cluster) -> None:
        ok, source = True, -1
        for part, origin, digest in message.receives:
            peer = cluster.ranks[origin]
            self.clean = False
            if peer.flips and part == p.STATE:
                peer.flips, peer.content = False, "flipped bits"
            elif peer.flips:
                peer.flips, peer.shard_content = False, "flipped bits"
            if not peer.alive or peer.deaf or peer.generation != self.generation:
                ok = False
            elif peer.digests[part] != digest:
                ok, source = False, origin
            elif part == p.STATE:
                self.content, self.step = digest, message.step
            else:
                self.shard_content, self.other = digest, None
        self.clean = self.clean or (ok and bool(message.receives))
        self.say(p.Repaired(generation=message.generation, ok=ok, source=source, step=self.step))


class Cluster:
    """The machine, its agent and its ranks; time stands still unless the test moves it."""

    def __init__(self, world_size: int = 3, *, steps: int = 6, shards: int = 0, **options: Any) -> None:
        self.machine = Machine(world_size, Timing.derive(1.0), **options)
        self.now = 1000.0
        self.steps, self.shards = steps, shards
        self.reached: dict[int, int] = {}
        self.world_size = world_size
        self.ranks: dict[int, Rank] = {}
        self.shadows: dict[int, Rank] = {}
        self.answers: list[p.Answer] = []
        self.linked: set[tuple[int, int]] = set()
        self.agent_says: deque[p.Message] = deque()
        self.broken_links: deque[tuple[int, int]] = deque()
        self.ghosts: list[Rank] = []
        """Replaced incarnations; what they have said may still arrive."""
        self.spawns: list[tuple[int, int]] = []
        self.records: list[dict[str, Any]] = []
        self.sent: list[tuple[int, p.Message]] = []
        self.dumps: list[tuple[int, str, bool]] = []
        self.gone: dict[tuple[int, str], dict[int, str]] = {}
        """By generation and part: the state with which each rank was told to go."""
        self.open_generations: set[str] = set()
        self.end: p.End | None = None
        self.start_ranks = True
        """False: the agent does not start what it is told to."""

    # What happens.

    def feed(self, event: Event) -> list[Action]:
        over = self.machine.ended is not None
        actions = self.machine.handle(event, self.now)
        assert not (over and actions), "the machine acts after the end of the job"
        for action in actions:
            self._carry_out(action)
        return actions

    def hello(self) -> None:
        self.feed(FromAgent(p.Hello(version=p.VERSION, token="", role="agent", world_size=self.world_size)))

    def command(self, order: str, **more: Any) -> None:
        self.feed(FromControl(1, p.Command(request=len(self.answers) + 1, order=order, **more)))

    def end_process(self, rank: Rank, code: int) -> None:
        """The agent sees the exit at once; what the process said before it still arrives, then its link breaks."""
        if rank.place == "dead":
            return
        leaving = rank.place == "leaving"
        rank.place = "dead"
        rank.inbox.clear()
        if code == 0:
            self.agent_says.append(p.Ended(rank=rank.rank, incarnation=rank.incarnation))
        else:
            fault = p.Fault(
                kind="exit", rank=rank.rank, incarnation=rank.incarnation, exit_code=code, detail=f"leaving={leaving}"
            )
            self.agent_says.append(p.Observed(fault=fault))
        if (rank.rank, rank.incarnation) in self.linked:
            self.broken_links.append((rank.rank, rank.incarnation))

    def observe(self, rank: Rank, kind: str) -> None:
        """The agent sees a process that is alive but of no use."""
        rank.deaf = True
        fault = p.Fault(kind=kind, rank=rank.rank, incarnation=rank.incarnation, detail=kind)
        self.agent_says.append(p.Observed(fault=fault))

    # What is delivered.

    def from_agent(self) -> None:
        self.feed(FromAgent(self.agent_says.popleft()))

    def from_rank(self, rank: Rank) -> None:
        if rank.outbox:
            self.feed(FromRank(rank.rank, rank.incarnation, rank.outbox.popleft()))

    def break_link(self) -> None:
        rank, incarnation = self.broken_links.popleft()
        current = self.ranks.get(rank)
        while current is not None and current.incarnation == incarnation and current.outbox:
            self.from_rank(current)
            current = self.ranks.get(rank)
        self.linked.discard((rank, incarnation))
        self.feed(LinkLost(rank, incarnation))

    def tick(self) -> bool:
        """Jump to the machine's deadline; False if it has none."""
        deadline = self.machine.deadline
        if deadline is None:
            return False
        self.now = max(self.now, deadline)
        self.feed(Tick())
        return True

    def can_step(self, rank: Rank) -> bool:
        """All members of a generation complete a step together, so nobody is ahead by more than one."""
        return (
            rank.place == "inside"
            and not rank.deaf
            and all(
                peer.alive
                and not peer.deaf
                and peer.generation == rank.generation
                and ((peer.place == "inside" and peer.step >= rank.step) or (peer.step > rank.step))
                for peer in (self.ranks[member] for member in rank.members)
            )
        )

    def boot(self, rank: Rank) -> None:
        if rank.place == "boot" and not rank.deaf:
            self.linked.add((rank.rank, rank.incarnation))
            hello = p.Hello(version=p.VERSION, token="", role="rank", rank=rank.rank, incarnation=rank.incarnation)
            self.feed(FromRank(rank.rank, rank.incarnation, hello))
            rank.enter()

    # Everything that is due, until nothing is.

    def quiesce(self, *, train: bool = True, limit: int = 5_000) -> None:
        for _ in range(limit):
            if not self._one_thing(train):
                return
        raise AssertionError("the job does not come to rest")

    def settle(self, limit: int = 500) -> None:
        """The world behaves from here on, and time passes: the job must end."""
        for _ in range(limit):
            self.quiesce()
            if self.end is not None:
                break
            if not self.tick():
                stuck = [rank for rank in self.ranks.values() if rank.deaf and rank.alive]
                for rank in stuck:
                    self.observe(rank, "hang")
                if not stuck:
                    break
        assert self.end is not None, f"the job neither ends nor goes on: {self.machine.state}"

    def settle_for(self, seconds: float) -> None:
        """Time passes, and nobody completes a step."""
        end = self.now + seconds
        self.quiesce(train=False)
        while (deadline := self.machine.deadline) is not None and deadline <= end:
            self.tick()
            self.quiesce(train=False)
        self.now = end

    def _one_thing(self, train: bool) -> bool:
        if self.agent_says:
            self.from_agent()
            return True
        if self.broken_links:
            self.break_link()
            return True
        for rank in [*self.ranks.values(), *self.shadows.values()]:
            if rank.outbox:
                self.from_rank(rank)
            elif rank.place == "boot" and not rank.deaf:
                self.boot(rank)
            elif rank.alive and rank.inbox and not rank.deaf:
                rank.obey(self)
            elif train and self.can_step(rank):
                rank.complete_step()
            elif rank.place == "leaving":
                self.end_process(rank, 0)
            else:
                continue
            return True
        return False

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(number, incarnation, message):
                self.sent.append((number, message))
                rank = self.shadows.get(number)
                if rank is None or rank.incarnation != incarnation:
                    rank = self.ranks.get(number)
                linked = rank is not None and rank.alive and (number, incarnation) in self.linked
                if rank is not None and linked and rank.incarnation == incarnation:
                    rank.inbox.append(message)
            case ToAgent(p.Spawn(rank=number, incarnation=incarnation)):
                self.spawns.append((number, incarnation))
                self._forget(self.ranks.get(number))
                self.ranks[number] = self._rank(number, incarnation)
            case ToAgent(p.Prepare(rank=number, incarnation=incarnation)):
                assert number not in self.shadows, "two processes are prepared for one rank"
                self.shadows[number] = self._rank(number, incarnation)
            case ToAgent(p.Promote(rank=number, incarnation=incarnation)):
                self._forget(self.ranks.get(number))
                self.ranks[number] = self.shadows.pop(number)
                assert self.ranks[number].incarnation == incarnation
            case ToAgent(p.Kill(rank=number, incarnation=incarnation)):
                shadow = self.shadows.get(number)
                if shadow is not None and shadow.incarnation == incarnation:
                    self._forget(self.shadows.pop(number))
            case ToControl(_, p.Answer() as answer):
                self.answers.append(answer)
            case ToAgent(p.Incident(record=record)):
                self.records.append(record)
            case ToAgent(p.End() as end):
                assert self.end is None, "the job ends twice"
                self.end = end
            case OpenGeneration(prefix):
                assert not self.open_generations, "two generations are open"
                self.open_generations.add(prefix)
            case CloseGeneration(prefix):
                self.open_generations.remove(prefix)

    def _forget(self, old: Rank | None) -> None:
        if old is not None:
            self.ghosts.append(old)
            old.place = "dead"
            if (old.rank, old.incarnation) in self.linked:
                self.broken_links.append((old.rank, old.incarnation))

    def _rank(self, number: int, incarnation: int) -> Rank:
        shard = number % self.shards if self.shards else -1
        return Rank(number, incarnation, self.steps, shard, reached=self.reached, deaf=not self.start_ranks)

    # What a test asks.

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == "incident"]

    def said(self, kind: type[p.Message]) -> list[tuple[int, p.Message]]:
        return [(rank, message) for rank, message in self.sent if isinstance(message, kind)]

    def started(self) -> Cluster:
        self.hello()
        self.quiesce(train=False)
        self.train(2)
        self.quiesce(train=False)
        return self

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for rank in self.ranks.values():
                if self.can_step(rank):
                    rank.complete_step()


def _after(content: str, step: int) -> str:
    return content.split("+")[0] + f"+{step}"


__all__ = ["AgentLost", "Cluster", "Rank"]
