"""What the manager is told and what it orders, as values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from evertrain.taskd import frames
from evertrain.taskd.codes import ACTION, Code
from evertrain.taskd.frames import Body

# Types of ClusterD's signals.
KILL_MASTER, STOP_TRAIN, GLOBAL_FAULT = "killMaster", "stopTrain", "globalFault"
CHANGE_STRATEGY, SAVE_AND_EXIT, SIGNAL_ALIVE = "changeStrategy", "saveAndExit", "keep-alive"
FAULT_NODES_EXIT, HOT_SWITCH, PRE_EXIT = "faultNodesExit", "hot-switch", "preExitProcess"
PAUSE_START, CONTINUE_START = "pauseStartAgent", "continueStartAgent"

IN_PLACE = "recover-in-place"
FAULT_NODES_LEAVE = "fault_nodes_exit"
"""An action."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Of ClusterD, or of the manager's own judgement where there is no ClusterD."""

    type: str
    uuid: str = ""
    job: str = ""
    actions: tuple[str, ...] = ()
    faults: Mapping[int, int] = field(default_factory=dict)
    """By rank: 0 memory, 1 anything else, 2 network."""
    strategy: str = ""
    timeout: int = 0
    nodes: tuple[int, ...] = ()
    extra: str = ""


@dataclass(frozen=True, slots=True)
class ToAgent:
    node: int
    body: Body


@dataclass(frozen=True, slots=True)
class ToWorker:
    rank: int
    body: Body


@dataclass(frozen=True, slots=True)
class ToController:
    """A call of the MindIO controller; which one is in `bridge`."""

    action: str
    faults: Mapping[int, int] = field(default_factory=dict)
    strategy: str = ""
    params: str = ""
    timeout: int = 0


@dataclass(frozen=True, slots=True)
class NicReply:
    job: str
    result: bool
    why: str = field(default="", compare=False)
    """In words, why not all could."""


@dataclass(frozen=True, slots=True)
class StressReply:
    job: str
    results: Mapping[str, Mapping[str, tuple[str, str]]]
    """By rank and operation: code and text."""


@dataclass(frozen=True, slots=True)
class End:
    """The job is over."""

    reason: str
    ok: bool = True


Order = ToAgent | ToWorker | ToController | NicReply | StressReply | End


def exit_agents(nodes: Iterable[int], signal: Signal | None = None) -> list[Order]:
    """Of the actions of a signal, a message has only that which it carries out."""
    extension = None
    if signal is not None:
        own = [action for action in signal.actions if action == FAULT_NODES_LEAVE]
        extension = {"SignalType": signal.type, "Actions": _texts(own or signal.actions)}
        if signal.type == KILL_MASTER:
            extension[frames.REASON] = signal.extra
    body = frames.body(ACTION, Code.EXIT_AGENT, "", extension)
    return [ToAgent(node, body) for node in nodes]


def restart_agents(nodes: Iterable[int], restarts: int) -> list[Order]:
    body = frames.body(ACTION, Code.RESTART_AGENT, str(restarts))
    return [ToAgent(node, body) for node in nodes]


def restart_workers(nodes: Iterable[int], ranks: Iterable[int]) -> list[Order]:
    body = frames.body(ACTION, Code.RESTART_WORKERS, frames.ranks_text(sorted(ranks)))
    return [ToAgent(node, body) for node in nodes]


def stop_workers(nodes: Iterable[int], ranks: Iterable[int]) -> list[Order]:
    body = frames.body(ACTION, Code.STOP_WORKERS, frames.ranks_text(sorted(ranks)))
    return [ToAgent(node, body) for node in nodes]


def start_agent(node: int, restarts: int, alive: int = 1, under_way: int = 0) -> Order:
    """`alive`: seconds in which it should say once that it is. `under_way`: nodes of the job that it joins."""
    extension = {frames.ALIVE_SECONDS: str(alive)} if alive > 1 else {}
    if under_way:
        extension[frames.UNDER_WAY] = str(under_way)
    return ToAgent(node, frames.body(ACTION, Code.START_AGENT, str(restarts), extension or None))


def _texts(items: Iterable[str]) -> str:
    return msgspec.json.encode(list(items)).decode()
