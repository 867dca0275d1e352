"""What the controller knows about the processes of a job, and which of them are faulty. No clock, no socket.

Costs are the same for ten ranks and for ten thousand: every message changes one record, the faulty ranks are a set that
is kept up to date, and the longest silent rank is the first of an ordered dictionary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from evertrain.mindio.tft.messages import DpReport, InitReport, Status
from evertrain.mindio.tft.numbers import DataStatus, FaultType, TrainState
from evertrain.mindio.tft.replicas import Copy, Group

_REBUILT = (TrainState.UCE_HIGH, TrainState.UCE_CORRUPTED)
_UNTRUSTED = (TrainState.UCE_CORRUPTED, TrainState.PRECISION_ERROR)


@dataclass(slots=True)
class Member:
    """One rank's process, as far as it is known."""

    rank: int
    link: int | None = None
    status: Status = Status()
    ip: str = ""
    process: str = ""
    """Which process this is, as it calls itself; empty if it has not said so."""
    lost: bool = False
    """Its link is gone, it is silent, or it did not answer."""
    mute: bool = False
    """It did not answer an order in time. It counts as lost until the end of the recovery, whatever it says later."""
    offline: bool = False
    """It is to be replaced: what the old process still says does not count."""
    fresh: bool = False
    """A replacement that does not take part in the training yet."""
    left: bool = False
    """Its training function returned."""
    groups: tuple[Group, ...] | None = None
    arf: bool = False
    uce: bool = False
    zit: bool = False
    data_parallel: tuple[int, ...] = ()

    def fault(self) -> FaultType | None:
        if self.left:
            return None
        if self.lost or self.mute or self.offline or self.fresh or self.status.run_status == TrainState.ABNORMAL:
            return FaultType.PROCESS
        match self.status.npu_status:
            case TrainState.NORMAL:
                return None
            case TrainState.HCCL_FAILED:
                return FaultType.HCCL
            case TrainState.UCE_HIGH | TrainState.UCE_LOW | TrainState.UCE_CORRUPTED | TrainState.PRECISION_ERROR:
                return FaultType.UCE
        return FaultType.PROCESS

    def holds(self, step: int) -> bool:
        """Whether its state is that of this step, and whole."""
        return self.status.data_status == DataStatus.UPDATED and self.status.step == step


@dataclass(slots=True)
class Roster:
    """All ranks of the job. `news` are those about which something bad was learnt since the last `take_faults`."""

    world_size: int
    members: dict[int, Member] = field(default_factory=dict)
    faulty: set[int] = field(default_factory=set)
    news: set[int] = field(default_factory=set)
    errors: dict[int, int] = field(default_factory=dict)
    """The faulty ranks of the recovery under way, with the type of their fault."""
    told: dict[int, int] = field(default_factory=dict)
    """Faults that the platform told."""
    isolated: set[int] = field(default_factory=set)
    """Ranks that the job goes on without, after it has shrunk."""
    dirty: set[int] = field(default_factory=set)
    """Ranks whose repair was begun and did not succeed."""
    heard: OrderedDict[int, float] = field(default_factory=OrderedDict)
    grace: dict[int, float] = field(default_factory=dict)
    """Ranks whose link broke, and until when they may come back."""
    reported: int = 0
    """How many ranks have reported their replica groups."""
    _groups: dict[tuple[object, ...], Group] = field(default_factory=dict)

    # What processes say.

    def hear(self, member: Member, now: float) -> None:
        if member.offline:
            return
        self.heard[member.rank] = now
        self.heard.move_to_end(member.rank)
        if member.lost and member.link is not None:
            member.lost = False
            self.judge(member)

    def update(self, member: Member, status: Status) -> None:
        if not member.offline and status != member.status:
            member.status = status
            self.judge(member)

    def judge(self, member: Member) -> None:
        """Note whether this rank is faulty. It is news when it becomes so, unless that is being dealt with."""
        fault = member.fault()
        if fault is None or member.rank in self.isolated:
            self.faulty.discard(member.rank)
            if member.rank not in self.told:
                self.news.discard(member.rank)
        elif member.rank not in self.faulty:
            self.faulty.add(member.rank)
            if self.errors.get(member.rank) != fault:
                self.news.add(member.rank)

    def lose(self, member: Member) -> None:
        """This process is gone, as far as one can tell."""
        self.grace.pop(member.rank, None)
        self.heard.pop(member.rank, None)
        if not member.left:
            member.lost = True
            self.judge(member)
            if member.rank not in self.isolated:
                self.news.add(member.rank)

    def report(self, member: Member, message: InitReport) -> str | None:
        """Note a rank's groups. Returns what is wrong with them, in which case they are not taken."""
        world = range(self.world_size)
        for group in message.groups:
            if member.rank not in group.rank_list or not all(rank in world for rank in group.rank_list):
                return f"rank {member.rank} reports a group that it is not in, or that is not of this job"
            if not 1 <= group.replica_cnt <= len(group.rank_list) or group.replica_shift < 0:
                return f"rank {member.rank} reports {group.replica_cnt} copies in {len(group.rank_list)} ranks"
        if not message.groups:
            return f"rank {member.rank} reports no groups"
        groups = tuple(self._group(g.rank_list, g.replica_cnt, g.replica_shift) for g in message.groups)
        self.reported += member.groups is None
        member.groups = groups
        member.arf, member.uce, member.zit = message.enable_arf, message.enable_uce, message.enable_zit
        return None

    def report_dp(self, member: Member, message: DpReport) -> None:
        if member.rank in message.ranks and len(message.ranks) <= self.world_size:
            member.data_parallel = tuple(sorted(message.ranks))

    def _group(self, ranks: list[int], copies: int, shift: int) -> Group:
        """Members of one group share one object: ten thousand lists of ten thousand ranks would not be bearable."""
        key = (tuple(ranks), copies, shift)
        if key not in self._groups:
            if len(self._groups) > 4 * self.world_size + 1000:  # nobody has that many; somebody makes them up
                self._groups.clear()
            self._groups[key] = Group.of(ranks, copies, shift)
        return self._groups[key]

    # What the flows ask.

    @property
    def active(self) -> list[int]:
        """Ranks that belong to the job at its present size and have not finished."""
        return [rank for rank, member in self.members.items() if rank not in self.isolated and not member.left]

    @property
    def healthy(self) -> list[int]:
        """Active ranks without a fault, so that orders make sense."""
        return [rank for rank in self.active if rank not in self.errors and rank not in self.faulty]

    @property
    def unaware(self) -> list[int]:
        """Ranks that train, although the platform knows of a fault of theirs that can be mended."""
        found = (rank for rank, kind in self.errors.items() if kind != FaultType.PROCESS and rank not in self.faulty)
        return [rank for rank in found if rank not in self.isolated and not self.members[rank].left]

    def take_faults(self) -> dict[int, int]:
        """Bring `errors` up to date. Returns what is new in it."""
        new: dict[int, int] = {}
        found = {rank: self.members[rank].fault() for rank in self.faulty if rank not in self.isolated}
        for source in (found, self.told):
            for rank, kind in source.items():
                known = self.errors.get(rank)
                if kind is None or known == FaultType.PROCESS or (known is not None and kind != FaultType.PROCESS):
                    continue
                self.errors[rank] = int(kind)
                new[rank] = int(kind)
        self.news.clear()
        return new

    def codes(self, ranks: Iterable[int]) -> dict[int, str]:
        return {rank: self.members[rank].status.error_code for rank in ranks if rank in self.members}

    def settle(self) -> None:
        """The recovery is over: what it dealt with is forgotten, what came meanwhile is news."""
        for rank in self.errors:
            self.told.pop(rank, None)
        self.errors.clear()
        self.dirty.clear()
        for member in self.members.values():
            if member.mute:
                member.mute = False
                self.judge(member)
        self.news = {rank for rank in self.faulty if rank not in self.isolated} | set(self.told)

    def initialised(self) -> bool:
        """Whether every rank has reported its replica groups, so that anything can be planned."""
        return self.reported >= self.world_size

    def kinds(self) -> list[list[Group]]:
        """All replica groups by kind."""
        layers: list[dict[Group, None]] = []
        for rank in sorted(self.members):
            for kind, group in enumerate(self.members[rank].groups or ()):
                while len(layers) <= kind:
                    layers.append({})
                layers[kind][group] = None
        return [list(layer) for layer in layers]

    def data_parallel(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(m.data_parallel for _, m in sorted(self.members.items()) if m.data_parallel))

    def copy(self, rank: int, step: int) -> Copy:
        """What this rank's state is worth if the job goes on from that step."""
        member = self.members.get(rank)
        if member is None:
            return Copy.BAD
        npu = member.status.npu_status
        if npu in _REBUILT and not member.fresh and not member.lost:
            return Copy.REBUILD
        whole = member.holds(step) and rank not in self.dirty
        if self.errors.get(rank) == FaultType.PROCESS or member.fault() == FaultType.PROCESS or not whole:
            return Copy.BAD
        if rank in self.isolated:
            return Copy.BAD
        if npu == TrainState.UCE_LOW:
            return Copy.KEEP
        # A broken network harms no state. It counts only beside faults that do, as one doesn't know which came first.
        harmed = rank in self.errors and any(kind != FaultType.HCCL for kind in self.errors.values())
        return Copy.BAD if harmed else Copy.USABLE

    def copies(self, step: int) -> dict[int, Copy]:
        return {rank: self.copy(rank, step) for rank in range(self.world_size)}

    def backed_up(self, step: int) -> set[int]:
        """Healthy ranks that can save this step from their local copy, or from what they were copying."""

        def held(status: Status) -> int:
            return status.step if status.data_status == DataStatus.COPYING else status.backup_step

        return {rank for rank in self.healthy if rank not in self.dirty and held(self.members[rank].status) == step}

    def untrusted(self) -> bool:
        """Whether replicas may all hold the same wrong state."""
        return any(self.members[rank].status.npu_status in _UNTRUSTED for rank in self.faulty)

    def newest_step(self, ranks: Iterable[int]) -> int:
        return max((self.members[rank].status.step for rank in ranks), default=0)
