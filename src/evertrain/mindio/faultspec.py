"""Injected faults in words: `kill@step=12,rank=1,phase=backward`.

Pure parsing; `evertrain.torch.inject` makes them happen.
"""

from __future__ import annotations

import msgspec

KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "exit": "the process calls exit(1)",
    "exception": "the training code raises",
    "uce": "an uncorrectable memory error: the rank's state is lost",
    "hccl": "a collective operation fails and its retries too",
    "gil": "C code that never returns holds the GIL",
    "segv": "segmentation fault",
    "hang": "blocked in a system call for ever",
    "term": "SIGTERM to the launcher, as a preemption does",
    "corrupt": "when this rank is next the source of a repair, bits flip in what it holds",
}
PHASES = ("data", "forward", "backward", "allreduce", "optimizer", "gather", "checkpoint", "repair", "start")
"""The phases of a step; `gather` is the exchange of the new weights of a sharded optimizer, `repair` the moment when a
rank sends or receives state, `start` that when a process has built its model and is about to enter the training
function."""


class FaultSpecError(ValueError):
    """The text of an injected fault could not be read; the message says what is allowed."""


class FaultSpec(msgspec.Struct, frozen=True):
    kind: str
    step: int
    rank: int
    phase: str = "forward"
    times: int = 1
    """How many incarnations or replays of the step it hits; more than one makes the replacement fail too."""

    def __str__(self) -> str:
        times = f",times={self.times}" if self.times != 1 else ""
        return f"{self.kind}@step={self.step},rank={self.rank},phase={self.phase}{times}"


def parse(text: str, world_size: int | None = None) -> FaultSpec:
    """Read one fault. Raises FaultSpecError with what is wrong and what would be right."""
    usage = f"expected KIND@step=N,rank=N[,phase=PHASE][,times=N], for example kill@step=12,rank=1; got {text!r}"
    kind, at, rest = text.strip().partition("@")
    if kind not in KINDS:
        raise FaultSpecError(f"unknown fault kind {kind!r}; kinds are {', '.join(KINDS)}. {usage}")
    if not at:
        raise FaultSpecError(usage)
    values: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in ("step", "rank", "phase", "times") or name in values:
            raise FaultSpecError(usage)
        values[name] = value
    try:
        step, rank = int(values["step"]), int(values["rank"])
        times = int(values.get("times", "1"))
    except (KeyError, ValueError):
        raise FaultSpecError(usage) from None
    phase = values.get("phase", "forward")
    if phase not in PHASES:
        raise FaultSpecError(f"unknown phase {phase!r}; phases are {', '.join(PHASES)}. {usage}")
    if step < 0 or times < 1:
        raise FaultSpecError(f"step must not be negative and times not below 1. {usage}")
    if rank < 0 or (world_size is not None and rank >= world_size):
        limit = "" if world_size is None else f" and below {world_size}"
        raise FaultSpecError(f"rank must not be negative{limit}. {usage}")
    return FaultSpec(kind, step, rank, phase, times)


def encode(faults: list[FaultSpec]) -> str:
    """For the environment of the training processes."""
    return msgspec.json.encode(faults).decode()


def decode(text: str) -> list[FaultSpec]:
    return msgspec.json.decode(text, type=list[FaultSpec])
