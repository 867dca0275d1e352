"""What each signal of ClusterD means: orders to the controller and to agents, in their order. Pure.

Signals are dealt with one by one as they come; none waits for another and none hides another. The same one again,
after a connection that broke, does nothing, but for the word that agents are to wait: it is true for longer then.
"""

from __future__ import annotations

from collections.abc import Callable

from evertrain.taskd.frames import Seen
from evertrain.taskd.manager import orders as o
from evertrain.taskd.manager.orders import Order, Signal, ToController
from evertrain.taskd.manager.stress import LIMIT

ONE_ACTION_EACH = frozenset({o.STOP_TRAIN, o.GLOBAL_FAULT, o.PRE_EXIT, o.FAULT_NODES_EXIT})
"""Types that mean what their actions say."""
PLAIN_STRATEGIES = frozenset({"retry", "dump", "continue", "migration"})
SCALING = frozenset({"downgrade", "upgrade"})
REPEATED = 5.0
"""Seconds that ClusterD has to say again, when it is there anew, that agents are to wait."""


class Signals:
    """`restart` makes the orders of a restart with the given nodes replaced: that is a matter of rescheduling."""

    def __init__(self, job: str, restart: Callable[[tuple[int, ...], Signal], list[Order]]) -> None:
        self._job, self._restart = job, restart
        self._seen = Seen(256)
        self.paused_until: float | None = None
        """Agents that want to start have to wait. No stress test takes longer."""

    @property
    def paused(self) -> bool:
        return self.paused_until is not None

    def subscribed(self, now: float) -> None:
        """ClusterD may have forgotten the pause, and will then never end it."""
        if self.paused_until is not None:
            self.paused_until = min(self.paused_until, now + REPEATED)

    def handle(self, signal: Signal, now: float) -> tuple[list[Order], str]:
        """The orders, and why there are none if there are none."""
        if signal.type == o.SIGNAL_ALIVE:
            return [], ""
        if signal.job and signal.job != self._job:
            return [], f"a signal for another job, {signal.job}"
        if signal.type in (o.PAUSE_START, o.CONTINUE_START):
            self.paused_until = now + LIMIT if signal.type == o.PAUSE_START else None
            return [], f"agents that start {'wait' if self.paused else 'go on'}"
        if signal.uuid and self._seen.again(repr(signal)):
            return [], f"the signal {signal.type} {signal.uuid} again"
        match signal.type:
            case o.KILL_MASTER:
                # ClusterD's ends the first pod. A manager that gives up by itself names all nodes, and says why.
                leaving = o.exit_agents(signal.nodes, signal) if signal.extra else o.exit_agents((0,))
                return [ToController("destroy_controller"), *leaving], ""
            case o.SAVE_AND_EXIT:
                return [ToController("save_and_exit"), *o.exit_agents(signal.nodes)], ""
            case o.HOT_SWITCH:
                return [ToController(action, signal.faults) for action in signal.actions], ""
            case o.CHANGE_STRATEGY:
                return self._strategy(signal)
            case kind if kind in ONE_ACTION_EACH:
                return self._actions(signal)
        return [], f"an unknown signal: {signal.type!r}"

    def _actions(self, signal: Signal) -> tuple[list[Order], str]:
        orders: list[Order] = []
        unknown = []
        for action in signal.actions:
            match action:
                case "stop_train" | "pause_train" | "on_global_rank":
                    orders.append(ToController(action, signal.faults, timeout=signal.timeout))
                case "change_strategy":
                    orders.append(ToController(action, strategy=signal.strategy, params=signal.extra))
                case o.FAULT_NODES_LEAVE:
                    orders += o.exit_agents(signal.nodes, signal)
                case "fault_nodes_restart":
                    orders += o.restart_workers(signal.nodes, signal.faults)
                case "pre exit process":
                    orders += o.stop_workers(signal.nodes, signal.faults)
                case _:
                    unknown.append(action)
        return orders, f"unknown actions: {', '.join(unknown)}" if unknown else ""

    def _strategy(self, signal: Signal) -> tuple[list[Order], str]:
        change = ToController("change_strategy", strategy=signal.strategy)
        if signal.strategy in PLAIN_STRATEGIES:
            return [change], ""
        if signal.strategy in SCALING:
            leaving = o.exit_agents(signal.nodes, signal) if o.FAULT_NODES_LEAVE in signal.actions else []
            return [ToController("change_strategy", strategy=signal.strategy, params=signal.extra), *leaving], ""
        if signal.strategy == "recover":
            if signal.extra == o.IN_PLACE:
                return [change, *o.restart_workers(signal.nodes, signal.faults)], ""
            return [*o.exit_agents(signal.nodes, signal), change], ""
        if signal.strategy == "exit":
            return [change, *self._restart(signal.nodes, signal)], ""
        return [], f"an unknown strategy: {signal.strategy!r}"
