"""Every timeout of a job, derived from one number: the detection bound.

The bound says how long a rank may give no sign of life before it counts as lost. Users of such systems spend days on
finding an order of five timeouts that works; here there is one knob and the order is checked at start.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

DEFAULT_BOUND = 2.0


class TimingError(ValueError):
    """The timeouts contradict each other, and the message says which."""


@dataclass(frozen=True, slots=True)
class Timing:
    """All waits of a job in seconds. Build one with `Timing.derive(bound)`; every field can be overridden by name."""

    bound: float
    """How long a rank or an agent may be silent, or a rank without progress, before it counts as faulty."""
    heartbeat: float
    """An agent tells the controller this often that it lives."""
    data_stall: float
    """How long a rank may wait for its own loader without any other sign of trouble."""
    busy_stall: float
    """How long a rank that visibly computes may take for one step that is longer than all steps before it."""
    first_step: float
    """How long the first step after a start may take: compilation, caches, a cold file system. Also how long a rank may
    take to the end of its step that is told to stop inside an update."""
    stop: float
    """How long a healthy rank may take to leave the training code once told to, or to say that it is in an update."""
    start: float
    """How long a new process may take from its start to the entry of the training function."""
    rebuild: float
    """How long a new generation of process groups may take to connect, on top of one second for each
    `DIGEST_BYTES_PER_SECOND` of state: the ranks hash their copies as well."""
    repair: float
    """How long a repair may take on top of one second for each `REPAIR_BYTES_PER_SECOND` of state."""
    silence: float
    """How long an agent or a controller on another node may say nothing before the other side gives it up."""
    takeover: float
    """How long a rank or an agent that has lost its controller looks for another one before it gives up."""
    group: float
    """The timeout given to the collective library itself: a last resort, never the detector."""
    grace: float
    """How long a termination may take, the dying-gasp checkpoint included, before processes are killed."""

    @classmethod
    def derive(cls, bound: float = DEFAULT_BOUND, nnodes: int = 1, **overrides: float) -> Timing:
        if not bound > 0:
            raise TimingError(f"the detection bound must be a positive number of seconds, not {bound}")
        heartbeat = overrides.get("heartbeat", max(bound / 4, nnodes / BEATS_PER_SECOND))
        silence = max(5 * bound, 10.0, 4 * heartbeat)
        values = dict(
            bound=bound,
            heartbeat=heartbeat,
            data_stall=5 * bound,
            busy_stall=30 * bound,
            first_step=max(150 * bound, 60.0),
            stop=max(bound, 1.0),
            start=max(150 * bound, 120.0),
            rebuild=max(5 * bound, 5.0),
            repair=max(10 * bound, 10.0),
            silence=silence,
            takeover=max(15 * bound, 30.0, 2 * silence),
            group=max(15 * bound, 30.0),
            grace=30.0,
        )
        names = {field.name for field in dataclasses.fields(cls)}
        for name, value in overrides.items():
            if name not in names:
                raise TimingError(f"there is no timeout called {name!r}; there are {', '.join(sorted(names))}")
            values[name] = value
        timing = cls(**values)
        timing.check()
        return timing

    def check(self) -> None:
        """Refuse an order of timeouts with which a healthy job would be taken for a faulty one."""
        for name in (field.name for field in dataclasses.fields(self)):
            if not getattr(self, name) > 0:
                raise TimingError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")
        for shorter, longer, why in (
            ("bound", "data_stall", "a loader gets at least the patience of any other code"),
            ("bound", "busy_stall", "a computing rank gets at least the patience of a silent one"),
            ("bound", "first_step", "a first step gets at least the patience of any other step"),
            ("heartbeat", "silence", "a healthy agent would count as lost between two heartbeats"),
            ("silence", "takeover", "who waits for a silent controller's successor would give up before it is there"),
            ("rebuild", "group", "the collective library would give up before the controller does"),
        ):
            if getattr(self, shorter) > getattr(self, longer):
                short, long = (f"{name} ({getattr(self, name):g} s)" for name in (shorter, longer))
                raise TimingError(f"{short} must not exceed {long}: {why}")

    def rebuild_time(self, state_bytes: int) -> float:
        return self.rebuild + state_bytes / DIGEST_BYTES_PER_SECOND

    def repair_time(self, state_bytes: int) -> float:
        return self.repair + state_bytes / REPAIR_BYTES_PER_SECOND


BEATS_PER_SECOND = 40
"""What a controller has to hear from all agents together; more would be a noticeable load on it. A broken link shows at
once whatever the heartbeat is; it is for agents that are stopped or frozen."""
REPAIR_BYTES_PER_SECOND = 50_000_000
DIGEST_BYTES_PER_SECOND = 500_000_000
"""A tenth of what one rank can hash; those of a node share its memory, and some have to fetch theirs from a device."""
