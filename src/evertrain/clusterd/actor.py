"""One job's recovery at work: events one after the other into the machine, its state kept, then what it wants done.

What was reported is acknowledged when what it led to is kept, and only then anything is done about it. Whoever tells
the actor something and goes away has told it nevertheless.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from evertrain import aio
from evertrain.clusterd.clock import SteadyClock
from evertrain.clusterd.keep import Keeper, Record, changes_cluster
from evertrain.clusterd.lanes import Lanes, waits_for
from evertrain.clusterd.machines import Machine
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import (
    Answer,
    Effect,
    Event,
    Failed,
    FaultsSeen,
    IsolateNode,
    JobSeen,
    NotifyNics,
    NotifyStress,
    PatchPod,
    ReplacePods,
    Signal,
    StressTest,
    Subscribed,
    SwitchNics,
    Tick,
    Unsubscribed,
    WriteReset,
)
from evertrain.clusterd.reset import RESTART_ALL
from evertrain.clusterd.services.ports import Unavailable
from evertrain.clusterd.services.publisher import Everyone, Line, OneEach

logger = logging.getLogger(__name__)

LISTENER = ""
"""There is one for each kind."""
NIC, STRESS = "nic", "stress"
AT_ONCE = 8
"""Changes that nobody waits for, written at the same time."""
LONGEST_SLEEP = 3600.0
MOST_WAITING = 1000
"""Reports: while the API server is away none of them can be kept, and clients say them again and again."""
AGAIN, MOST_AGAIN = 5.0, 60.0
"""Seconds until what has to be done and could not be is tried again. Recoveries wait for pods, so these are tried as
often as at first; all else ever more seldom."""
SOON, LATEST = 0.5, 10.0
"""Seconds until what is done is no longer kept as to be done, and at most, where the API server is slow."""
MISSED = 60.0
"""Seconds for which the answer to an order can still be had when it is over."""
SETTLED = 15.0
"""Seconds after which a machine that does nothing but remembers something is shown the job once more: it may forget."""


@dataclass(slots=True)
class _Item:
    event: Event
    done: asyncio.Future[bool] | None = None
    """Gets True when the event is dealt with, False if it was not let in."""
    guarded: bool = False
    """Only if the machine does nothing."""


@dataclass(frozen=True, slots=True)
class _Missed:
    """Answers to an order that was over before anybody asked: who orders can only ask afterwards."""

    order: str = ""
    answers: tuple[str, ...] = ()
    until: float = 0.0


class Actor:
    def __init__(
        self,
        job: Job,
        machine: Machine,
        keeper: Keeper,
        carry: Callable[[Job, Effect], Awaitable[str]],
        *,
        left: Record | None = None,
        over: Callable[[Job], None] = lambda job: None,
        places: asyncio.Semaphore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`left` is what an earlier ClusterD has left. `over` hears when an order is. `places`, for what nobody waits
        for, are those of all jobs."""
        self.job = job
        self.machine = machine
        self._keeper, self._carry, self._over, self._clock = keeper, carry, over, SteadyClock(clock)
        self._items: deque[_Item] = deque()
        self._news = asyncio.Event()
        self._left = left.effects if left is not None else ()
        self._gone = False
        self._ticked: float | None = None
        """The deadline that the machine has last been told of."""
        self.order = left.order if left is not None else ""
        self._answers: list[str] = list(left.answers) if left is not None else []
        self._signals: OneEach[Signal] = OneEach(left=lambda _: self.put(Unsubscribed()))
        self._nics: OneEach[NotifyNics] = OneEach()
        self._stress: OneEach[NotifyStress] = OneEach()
        self._unheard: NotifyNics | NotifyStress | None = None
        """An order that nobody has listened to yet."""
        self._answering: Everyone[str] = Everyone()
        self._missed = _Missed()
        self._listened = False
        """To the answers of the last order."""
        self._beside: set[asyncio.Future[None]] = set()
        self._undone: list[Effect] = []
        """Tried again and again, and kept until it is done."""
        self._lanes = Lanes(self._do_beside, places or asyncio.Semaphore(AT_ONCE), self._lanes_are_idle)
        self._took = 0.0
        """Seconds, the last write of what is to be kept."""
        self._unsettled: float | None = None
        """When what is kept has to be as it should be."""
        self.uuid = ""
        """Of the last signal."""

    # What others call.

    @property
    def leads(self) -> bool:
        return LISTENER in self._signals or not self.machine.may_start_om()

    def put(self, event: Event) -> None:
        """Job and faults are states: of several that wait only the newest is looked at."""
        if isinstance(event, JobSeen) and event.job is None:
            self._keeper.abandon()
        if isinstance(event, JobSeen | FaultsSeen):
            for item in self._items:
                if type(item.event) is type(event) and item.done is None:
                    item.event = event
                    return
        self._append(_Item(event))

    async def tell(self, event: Event, *, guarded: bool = False) -> bool:
        """Returns when what the event led to is kept. False if it was guarded and the machine had something to do."""
        if len(self._items) >= MOST_WAITING:
            raise Unavailable("too much waits to be dealt with")
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._append(_Item(event, done, guarded))
        return await asyncio.shield(done)

    async def signals(self) -> Line[Signal]:
        line = self._signals.subscribe(LISTENER)
        try:
            await self.tell(Subscribed())
        except BaseException:
            line.close()
            raise
        return line

    def nic_orders(self) -> Line[NotifyNics]:
        unheard, self._unheard = self._unheard, None
        return self._nics.subscribe(LISTENER, [unheard] if isinstance(unheard, NotifyNics) else [])

    def stress_orders(self) -> Line[NotifyStress]:
        unheard, self._unheard = self._unheard, None
        return self._stress.subscribe(LISTENER, [unheard] if isinstance(unheard, NotifyStress) else [])

    def answers(self, about: str) -> Line[str] | None:
        """None: there is no such order, nor one whose end nobody has heard."""
        if self.order == about:
            self._listened = True
            return self._answering.subscribe(self._answers)
        if self._missed.order != about or self._now() > self._missed.until:
            return None
        line = Everyone[str]().subscribe(self._missed.answers)
        self._missed = _Missed()
        line.end()
        return line

    def _append(self, item: _Item) -> None:
        if self._gone:
            if item.done is not None:
                item.done.set_result(False)
            return
        self._items.append(item)
        self._news.set()

    # The work.

    async def run(self) -> None:
        """Until the job is gone."""
        try:
            for effect in self._left:
                why = await self._carry(self.job, effect)
                if why:  # the machine hears of it once it has seen the job
                    self._failed(effect)
                    self._items.append(_Item(Failed(effect, why)))
            self._left = ()
            while not self._gone:
                await self._deal_with(await self._next())
        finally:
            self._end()

    def _now(self) -> float:
        """A wall clock that is set takes the machine's deadlines along: set back, they would not come for as long; set
        forward, they would all be over."""
        by = self._clock.was_set()
        if by:
            logger.warning("job %s: the clock was set by %+.1f s", self.job.uid, by)
            self.machine.clock_set(by)
            self._ticked = None if self._ticked is None else self._ticked + by
        return self._clock.now()

    async def _next(self) -> _Item:
        while not self._items:
            if await self._unsettled_is_due():
                continue
            now, deadline = self._now(), self.machine.deadline
            if deadline is None and self._keeper.exists and self.machine.may_start_om():
                try:
                    self._news.clear()
                    async with aio.timeout(SETTLED):
                        await self._news.wait()
                    continue
                except TimeoutError:
                    return _Item(JobSeen(self.job))
            left = None if deadline is None else min(deadline - now, LONGEST_SLEEP)
            if left is not None and left <= 0 and deadline != self._ticked:
                self._ticked = deadline
                return _Item(Tick())
            if left is not None and left <= 0:
                logger.error("job %s: state %s has a deadline but no end", self.job.uid, self.machine.state)
                left = None
            self._news.clear()
            try:
                async with aio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                continue
        return self._items.popleft()

    async def _unsettled_is_due(self) -> bool:
        """After a wait for it, unless something happens before."""
        now, deadline = self._now(), self.machine.deadline
        if self._unsettled is None:
            return False
        left = self._unsettled - asyncio.get_running_loop().time()
        if deadline not in (None, self._ticked) and deadline - now < left:
            return False
        self._news.clear()
        try:
            async with aio.timeout_at(self._unsettled):
                await self._news.wait()
        except TimeoutError:
            await self._settle()
        return True

    async def _deal_with(self, item: _Item) -> None:
        event = item.event
        if item.guarded and not self.machine.may_start_om():
            self._acknowledge(item, False)
            return
        if isinstance(event, JobSeen):
            if event.job is None:
                self._gone = True
            else:
                self.job = event.job
        if isinstance(event, SwitchNics | StressTest):
            self.order = NIC if isinstance(event, SwitchNics) else STRESS
            self._answers.clear()
            self._missed, self._listened = _Missed(), False
        if isinstance(event, Subscribed):
            # What came between is for the one before, and this one is told all that it has to know now.
            self._signals.clear(LISTENER)
        try:
            effects = self.machine.handle(event, self._now())
        except Exception:
            # A defect: the other jobs, and the reports to come, must not suffer from it.
            logger.exception("job %s: %s in state %s", self.job.uid, type(event).__name__, self.machine.state)
            effects = []
        self._answers += [each.text for each in effects if isinstance(each, Answer)]
        self._undone = [each for each in self._undone if not _is_pointless(each, effects)]
        await self._keep(effects)
        self._acknowledge(item, True)
        for effect in effects:
            if not self._lanes.put(effect):
                await self._lanes.told(*waits_for(effect))
                await self._do(effect)
        if self._gone or self.machine.may_start_om():
            self._close_order()

    async def _keep(self, effects: Sequence[Effect]) -> None:
        """Before anybody hears of it. What a ClusterD that takes over would find out or do again itself is kept a
        little later, for mostly something else is to be kept by then: an API server has better to do."""
        if self._gone:
            await self._keeper.remove()
            return
        changes = changes_cluster(effects)
        if not changes and self._is_over and not self._keeper.exists:
            return
        record = self._record(effects if changes else ())
        loop = asyncio.get_running_loop()
        began = loop.time()
        kept = await self._keeper.keep(record, may_wait=not changes)
        if kept:
            self._took = max(loop.time() - began, self._took / 2)
        if not kept or changes or self._is_over:
            self._put_off()
        else:
            self._unsettled = None

    def _put_off(self) -> None:
        """For longer where the API server has so much to do that each write takes long."""
        delay = min(LATEST, max(SOON, (5 if self._is_over else 20) * self._took))
        due = asyncio.get_running_loop().time() + delay
        self._unsettled = due if self._unsettled is None else min(due, self._unsettled)

    async def _settle(self) -> None:
        """What was put off. Nothing is kept of a machine that does nothing and has nothing to remember."""
        self._unsettled = None
        if self._is_over:
            await self._keeper.remove()
        elif not self._lanes:  # else it is put off once more when they are through
            await self._keeper.keep(self._record(()))

    @property
    def _is_over(self) -> bool:
        undone = self._lanes or self._undone
        return not undone and self.machine.may_start_om() and not self.machine.worth_keeping

    def _record(self, effects: Sequence[Effect]) -> Record:
        undone = tuple(each for each in (*self._undone, *self._lanes.undone) if each not in effects)
        return Record(self.job.uid, self.machine.dump(), (*undone, *effects), self.order, tuple(self._answers))

    async def _do(self, effect: Effect) -> None:
        match effect:
            case Signal():
                self.uuid = effect.uuid
                self._signals.publish(LISTENER, effect)
            case NotifyNics():
                if not self._nics.publish(LISTENER, effect):
                    self._unheard = effect
            case NotifyStress():
                if not self._stress.publish(LISTENER, effect):
                    self._unheard = effect
            case Answer():
                self._answering.publish(effect.text)
            case _:
                why = await self._carry(self.job, effect)
                if why:
                    self._failed(effect)
                    self._items.appendleft(_Item(Failed(effect, why)))

    async def _do_beside(self, effect: Effect) -> None:
        why = await self._carry(self.job, effect)
        if why and not isinstance(effect, PatchPod):  # without a label the recovery is what it is
            self._failed(effect)
            self._append(_Item(Failed(effect, why)))

    def _failed(self, effect: Effect) -> None:
        """An API server that was away for a while must not cost a recovery its pods, leave the processes of a job that
        is told to start them all again waiting, or give a node that must not be used to the next job."""
        if isinstance(effect, ReplacePods | IsolateNode) or _restarts(effect):
            self._undone.append(effect)
            self._background(self._until_done(effect))

    async def _until_done(self, effect: Effect) -> None:
        delay = AGAIN
        while True:
            await asyncio.sleep(delay)
            if not any(each is effect for each in self._undone):
                return
            if not await self._carry(self.job, effect):
                break
            if not isinstance(effect, ReplacePods):
                delay = min(MOST_AGAIN, 2 * delay)
        self._undone = [each for each in self._undone if each is not effect]
        self._put_off()
        self._news.set()

    def _lanes_are_idle(self) -> None:
        self._put_off()
        self._news.set()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _close_order(self) -> None:
        if self.order:
            if not self._listened:
                self._missed = _Missed(self.order, tuple(self._answers), self._now() + MISSED)
            self.order, self._unheard = "", None
            self._answers.clear()
            self._answering.end()
            self._over(self.job)

    def _acknowledge(self, item: _Item, value: bool) -> None:
        if item.done is not None and not item.done.done():
            item.done.set_result(value)

    def _end(self) -> None:
        gone, self._gone = self._gone, True
        for task in self._beside:
            task.cancel()
        self._lanes.close()
        for item in self._items:
            if gone:
                self._acknowledge(item, False)
            elif item.done is not None and not item.done.done():
                item.done.set_exception(Unavailable("ClusterD ends; say it to the one after it"))
        self._items.clear()
        for line in (self._signals, self._nics, self._stress):
            line.end(LISTENER)
        self._answering.end()


def _restarts(effect: Effect) -> bool:
    return isinstance(effect, WriteReset) and effect.operation == RESTART_ALL


def _is_pointless(undone: Effect, effects: Sequence[Effect]) -> bool:
    """A recovery that has begun since leads all processes itself, and names ranks at fault in the same file."""
    if not isinstance(undone, WriteReset):
        return False
    return any(isinstance(each, WriteReset) and each.recovery not in ("", undone.recovery) for each in effects)
