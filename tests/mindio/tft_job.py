"""A job of the callback interface without processes: a machine, ranks that answer by script, and a platform."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.machine import Machine
from evertrain.mindio.tft.numbers import Result, TrainState
from evertrain.mindio.tft.requests import (
    CallPlatform,
    Close,
    Event,
    FromLink,
    LinkLost,
    PlatformDone,
    Send,
    Signal,
    Tick,
)
from evertrain.mindio.tft.settings import Settings

PLATFORM_FAST: dict[str, list[Signal]] = {
    "report_fault_ranks": [Signal("stop")],
    "report_stop_complete": [Signal("global", limit=1)],
}


class Process:
    """One scripted rank. `answers` maps the name of an order to what happens instead of success."""

    def __init__(self, rank: int, link: int) -> None:
        self.rank, self.link = rank, link
        self.status = w.Status(step=5)
        self.lock = 0
        self.registered: w.Registered | None = None
        self.answers: dict[str, Callable[[Process, Any], w.Reply | None] | int | None] = {}
        self.orders: list[Any] = []
        self.welcome: Any = None

    def change(self, **changes: Any) -> w.Status:
        self.status = msgspec.structs.replace(self.status, **changes)
        return self.status

    def obey(self, order: Any) -> w.Reply | None:
        name = type(order).__name__
        self.orders.append(order)
        special = self.answers.get(name, 0)
        if callable(special):
            return special(self, order)
        if special is None:
            return None
        result, load = int(special), 0
        match order:
            case w.Prelock(step=step) if result == 0:
                if self.status.step > step:
                    result = Result.NEED_RETRY
                else:
                    self.change(step=step)
                    self.lock = step
            case w.Rollback(step=step):
                self.lock = step
            case w.NotifyNormal():
                self.change(step=self.lock, run_status=0, npu_status=0, data_status=0, parked=False, error_code="")
            case w.Pause(step=step):
                self.change(step=step)
            case w.Continue(leave=True):
                self.change(run_status=TrainState.STEP_FINISH)
        return w.Reply(sn=order.sn, result=int(result), status=self.status, load_step=load)


class Job:
    def __init__(
        self,
        world: int = 4,
        copies: int = 2,
        kinds: list[list[list[int]]] | None = None,
        platform: dict[str, list[Signal]] | None = None,
        shift: int = 0,
        uce: bool = True,
        report: bool = True,
        **settings: Any,
    ) -> None:
        self.kinds = kinds or [[list(range(world))]]
        self.own = [{rank: ranks for ranks in kind for rank in ranks} for kind in self.kinds]
        self.copies, self.shift, self.uce = copies, shift, uce
        self.script = {name: list(words) for name, words in (platform or {}).items()}
        self.machine = Machine(Settings(world_size=world, platform=platform is not None, **settings))
        self.now = 0.0
        self.ids = itertools.count(1)
        self.processes: dict[int, Process] = {}
        self.by_link: dict[int, Process] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.sent: list[tuple[int, Any]] = []
        self.closed: list[int] = []
        self.identities: dict[int, str] = {}
        """By which name the newest process of a rank is known."""
        self.broken: set[str] = set()
        """Callbacks of the platform that raise."""
        for rank in range(world):
            self.start(rank)
            if report:
                self.report(rank)
        self.sent.clear()

    # What processes and the platform do.

    def start(self, rank: int, *, replaces: bool = True, status: w.Status | None = None) -> Process:
        process = Process(rank, next(self.ids))
        if status is not None:
            process.status = status
        self.by_link[process.link] = process
        if replaces:
            self.identities[rank] = f"process {process.link}"
        name = self.identities.get(rank, "")
        self.feed(FromLink(process.link, w.Hello(version=w.VERSION, rank=rank, ip=f"10.0.0.{rank // 2}", process=name)))
        self.feed(FromLink(process.link, w.Register(status=process.status, replaces=replaces)))
        answer = process.registered
        if answer is not None and not answer.hot_switch and answer.result in (Result.OK, Result.REPAIR):
            self.processes[rank] = process
        return process

    def report(self, rank: int) -> None:
        groups = [
            w.ReplicaGroup(rank_list=own[rank], replica_cnt=self.copies, replica_shift=self.shift) for own in self.own
        ]
        flags = self.machine.settings
        message = w.InitReport(groups=groups, enable_uce=self.uce, enable_arf=flags.arf, enable_zit=flags.zit)
        self.feed(FromLink(self.processes[rank].link, message))

    def beat(self, rank: int, **changes: Any) -> None:
        process = self.processes[rank]
        self.feed(FromLink(process.link, w.Heartbeat(status=process.change(**changes))))

    def beat_all(self, **changes: Any) -> None:
        for rank in list(self.processes):
            self.beat(rank, **changes)

    def kill(self, rank: int, notice: bool = True) -> None:
        process = self.processes.pop(rank)
        del self.by_link[process.link]
        self.feed(LinkLost(process.link))
        if notice:
            self.wait(self.machine.settings.grace)

    def replace(self, rank: int, state: TrainState = TrainState.PREREPAIR_FINISH) -> Process:
        process = self.start(rank)
        process.status = w.Status()
        process.change(run_status=state)
        self.feed(FromLink(process.link, w.Heartbeat(status=process.status)))
        return process

    def signal(self, kind: str, **fields: Any) -> None:
        self.feed(Signal(kind, **fields))

    def strategy(self, text: str, param: str = "") -> None:
        self.signal("strategy", text=text, param=param)

    # Time.

    def wait(self, seconds: float) -> None:
        """Let time pass; the machine is called exactly when it asked for it."""
        end = self.now + seconds
        while (deadline := self.machine.deadline) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.feed(Tick())
        self.now = end
        self.feed(Tick())

    def idle(self, seconds: float) -> None:
        """Let time pass while every process shows that it lives."""
        end = self.now + seconds
        while self.now < end:
            self.beat_all()
            self.wait(min(1.0, end - self.now))

    # The machinery.

    def feed(self, event: Event) -> None:
        queue: list[Event] = [event]
        while queue:
            for action in self.machine.handle(queue.pop(0), self.now):
                match action:
                    case Send(links, message):
                        for link in links:
                            queue.extend(self._deliver(link, message))
                    case Close(link):
                        self.closed.append(link)
                    case CallPlatform(call, name, args):
                        self.calls.append((name, args))
                        words = self.script.get(name, [])
                        queue.extend(words)
                        queue.append(PlatformDone(call, name not in self.broken))

    def _deliver(self, link: int, message: Any) -> list[Event]:
        process = self.by_link.get(link)
        if process is None:
            return []
        self.sent.append((process.rank, message))
        if isinstance(message, w.Welcome | w.Refused):
            process.welcome = message
        elif isinstance(message, w.Registered):
            process.registered = message
        elif isinstance(message, w.Order):
            reply = process.obey(message)
            return [] if reply is None else [FromLink(link, reply)]
        return []

    # What the tests ask.

    def counts(self) -> dict[str, int]:
        """Orders by name, without questions and locks."""
        names = Counter(type(message).__name__ for _, message in self.sent)
        for name in ("Welcome", "Registered", "Standbys", "Collect", "Prelock", "Alive"):
            names.pop(name, None)
        return dict(names)

    def ranks(self, kind: type) -> list[int]:
        return sorted(rank for rank, message in self.sent if isinstance(message, kind))

    def order(self, rank: int, kind: type) -> Any:
        return [message for to, message in self.sent if to == rank and isinstance(message, kind)][-1]

    def units(self) -> dict[int, tuple[int, list[tuple[int, int]]]]:
        """For each rank in the last repair: the repair type and its (source, target) pairs."""
        found = {}
        for rank, message in self.sent:
            if isinstance(message, w.Repair):
                pairs = [(unit.src, unit.dst) for unit in message.units]
                found[rank] = (message.units[0].repair_type, pairs)
        return found

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def results(self) -> list[tuple[int, str, str]]:
        return [(args[0], args[1], args[3]) for name, args in self.calls if name == "report_result"]
