"""The fixed data of a controller of the callback interface."""

from __future__ import annotations

from dataclasses import dataclass

EPOCH_REPAIRS = 20_000
"""Repair ids of a controller that took over begin this much higher, so that no id is ever used twice."""
EPOCH_SERIALS = 1 << 40


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. Every wait of the controller is one of these at most."""

    world_size: int
    instance: str = ""
    """Names this controller among all that ever led the job."""
    rank: int = 0
    """The rank in whose process the controller lives; -1 for the platform's own process."""
    local_copy: bool = False
    arf: bool = False
    zit: bool = False
    mindspore: bool = False
    x1: bool = False
    """Replicas by `replica_shift`, see `replicas`."""
    platform: bool = False
    """All four callbacks of the platform are registered."""
    passive: bool = False
    """A standby: it leads nobody until half of the ranks have come to it."""
    epoch: int = 0
    action_limit: float = 180.0
    platform_limit: float = 30.0
    replacement_limit: float = 600.0
    dump_limit: float = 1800.0
    prelock_limit: float = 30.0
    collect_limit: float = 5.0
    grace: float = 0.5
    """A process whose link broke may come back within this time."""
    silence: float = 8.0
    """Without any sign of life for this long a rank counts as lost."""
    alive: float = 4.0
    """The controller shows itself to everybody this often, in a big job less."""
    settle: float = 1.0
    """After a failure that may have been caused by the death of a peer, the death becomes known within this time."""
    takeover: float = 4.0
    """After a take-over all ranks have found the new controller within this time, or are lost."""
    knock: float = 2.0
    """A standby lets a rank wait for this long before it sends it to look elsewhere."""

    @property
    def heartbeat(self) -> float:
        """Seconds between heartbeats. All of them together are a few hundred a second at most."""
        return max(1.0, self.world_size / 500)

    @property
    def longest_silence(self) -> float:
        return max(self.silence, 3.5 * self.heartbeat)

    @property
    def alive_every(self) -> float:
        return max(self.alive, self.world_size / 250)

    @property
    def patience(self) -> float:
        """For how long a processor may hear nothing of the controller."""
        return 3 * self.alive_every
