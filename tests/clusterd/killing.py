"""A recovery through which ClusterD is killed at a chosen moment, and another one goes on.

The training is the test, and so are its operator, its scheduler and its platform: ClusterD stays in a state until it is
answered, or until the world does what that state waits for, so each one is hit for certain. Killed is a process, by
SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from evertrain.clusterd.keep import PREFIX
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.timeline.incident import Incident
from evertrain.clusterd.timeline.store import Store
from evertrain.kube.port import POD, Object
from evertrain.wire.faultinfo import ChipFault
from tests.clusterd.client import Client, Signal
from tests.clusterd.hub import eventually, find, is_over
from tests.clusterd.process import Process, clusterd
from tests.clusterd.running import PATIENCE, STATUS, Running, Training
from tests.operator.cluster import background, cluster, until

OLD = "bert-worker-0"
NIC, STRESS = "nic", "stress"


@dataclass(frozen=True)
class Flow:
    """What happens to a job, what its training can do, and where ClusterD waits for whom."""

    states: tuple[str, ...] = ()
    """Those in which it waits for the training: it is killed before and after each answer."""
    strategies: str = "recover,dump"
    can: tuple[str, ...] = ("recover", "dump", "exit")
    kind: int = 1
    """Of the fault; rank 2, in pod 1, has it."""
    held: tuple[str, ...] = ()
    """Those in which it waits for anybody else, who does nothing before it was killed there."""
    only_held: bool = False
    """The rest of the flow is that of others."""
    pods: int = 2
    spares: int = 1000
    order: str = ""
    sick: bool = False
    ready: bool = True
    """The training has begun, and can be stopped."""
    deaf: bool = False
    """It reports its fault before it listens."""
    labels: dict[str, str] = field(default_factory=dict)
    group: dict[str, str] = field(default_factory=dict)
    """Annotations of the PodGroup."""

    @property
    def kills(self) -> frozenset[str]:
        """States in which it is killed for certain."""
        return frozenset(() if self.only_held else self.states) | frozenset(self.held)


HOT = {"subHealthyStrategy": "hotSwitch"}
FLOWS = {
    "retry": Flow(
        (n.STOPPED, n.OFFERS, n.RETRY_STATUS), "retry,recover,dump", ("retry", "recover", "dump", "exit"), kind=0
    ),
    "recover": Flow((n.STOPPED, n.OFFERS, n.RECOVER_STATUS)),
    "in place": Flow((n.STOPPED, n.OFFERS, n.RECOVER_STATUS), "recover-in-place,recover,dump"),
    "dump": Flow((n.DUMP_STATUS,), "dump", held=(n.RESCHEDULING,)),
    "exit": Flow((n.STOPPED, n.OFFERS), can=("exit",)),
    "elastic": Flow(
        (n.STOPPED, n.OFFERS, n.SCALE_IN_RANKS, n.SCALE_IN_STATUS, n.SCALE_OUT_STATUS),
        "elastic-training,dump",
        ("downgrade", "upgrade", "dump", "exit"),
        held=(n.SCALED,),
        pods=3,
        spares=0,
    ),
    "links": Flow((n.PAUSING, n.SWITCHING_NICS, n.CONTINUING), order=NIC),
    "stress test": Flow((n.PAUSING, n.STRESSING, n.CONTINUING), order=STRESS),
    "hot switch": Flow(
        (n.NEW_POD, n.HOT_PAUSE, n.MIGRATING), "recover", held=(n.OLD_POD,), spares=0, sick=True, labels=HOT
    ),
    "hot switch without a pause": Flow(
        (n.NEW_POD, n.HOT_PAUSE), "recover", ("exit",), held=(n.STOP_JOB,), spares=0, sick=True, labels=HOT
    ),
    "platform": Flow(
        (n.STOPPED, n.OFFERS, n.RECOVER_STATUS),
        held=(n.FLUSHING, n.GLOBAL_FAULT, n.DECIDED),
        group={n.PLATFORM_STRATEGY: ""},
    ),
    "not begun": Flow((n.STOPPED,), held=(n.KILL_JOB,), ready=False),
    "nobody listens": Flow(held=(n.STOPPING,), only_held=True, deaf=True),
    "no place": Flow(
        strategies="recover",
        can=("recover", "exit"),
        held=(n.FAULT_RETRY,),
        only_held=True,
        spares=0,
        group={n.RESCHEDULE_WAIT: "30"},
    ),
}
LINGERING = frozenset({n.RESCHEDULING, n.KILL_JOB, n.OLD_POD, n.STOP_JOB})
"""They are over when pods are gone: these stay until then."""
BEFORE, AFTER, IN = "before", "after", "in"


@dataclass
class Mortal(Running):
    """A ClusterD that can be killed."""

    process: Process | None = None
    lives: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    count: int = 0

    async def knows(self, job: str) -> bool:
        return True  # it starts when the job is there, and knows all when it serves

    def incidents(self, job: str) -> list[Incident]:
        with contextlib.closing(Store(self.folder / "timeline.db", read_only=True)) as store:
            return store.incidents(job)

    async def start(self) -> None:
        self.count += 1
        options = ("-listen", "127.0.0.1:0", "--insecure", "--timeline", str(self.folder / "timeline.db"))
        life = clusterd(self.cluster, *options, name=f"clusterd-{self.count}")
        self.process = await self.lives.enter_async_context(life)
        self.address = f"127.0.0.1:{await self.process.port()}"

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.code()


@contextlib.asynccontextmanager
async def mortal(folder: Path) -> AsyncIterator[Mortal]:
    folder.mkdir()
    async with cluster(folder) as server, contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as lives:
        yield Mortal(server, None, "", folder, stack, lives=lives)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Result:
    """What has to be the same."""

    status: str
    replaced: frozenset[int]
    strategies: tuple[str, ...]
    decision: str
    ok: bool


@dataclass
class Play:
    """The training, its operator, scheduler and platform, through one flow. `kill` says of each moment whether it is
    the one: before or after the answer to the signal with this number, or in a state that is held."""

    flow: Flow
    clusterd: Mortal
    training: Training
    kill: Callable[[str, int | str], bool]
    heard: list[Signal] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """In which it was killed."""
    began: bool = False
    let: set[str] = field(default_factory=set)
    """States in which the world has gone on."""

    async def run(self) -> Result:
        before = await self.training.uids()
        while not await self._life():
            pass
        client = self.clusterd.client(self.training.uid)
        await client.join()
        await eventually(self.clusterd.cluster.kube, PREFIX + self.training.uid, is_over)
        assert self.let == set(self.flow.held)
        incident = await self.training.ended()
        await self.training.reset_is(FaultFlushing=False, ranks=[])
        group = await self.training.group_now()
        assert group["metadata"]["labels"]["process-recover-enable"] == "on"
        now = await self.training.uids()
        strategies = [signal.strategy for signal in self.heard if signal.strategy]
        return Result(
            group["metadata"]["annotations"].get(STATUS, ""),
            frozenset(rank for rank in now if now[rank] != before.get(rank)),
            tuple(each for at, each in enumerate(strategies) if strategies[at - 1 : at] != [each]),
            incident.decision,
            incident.ok,
        )

    async def _life(self) -> bool:
        """Of one ClusterD. Whether all is over."""
        await self.clusterd.start()
        client = self.clusterd.client(self.training.uid)
        if self.flow.deaf and not self.let:
            assert ((await client.init())[0], (await client.register())[0]) == (0, 0)
            if not self.began:
                await self._begin(client)
            if await self._killed_in(await self._lasts()):
                return False
        signals = await client.join()
        if not self.began:
            await self._begin(client)
            if await self._killed(AFTER, 0):
                return False
        over = asyncio.ensure_future(eventually(self.clusterd.cluster.kube, PREFIX + self.training.uid, is_over))
        hearing, lasting = asyncio.ensure_future(signals.next()), asyncio.ensure_future(self._lasts())
        waits: list[asyncio.Future[Any]] = [over, hearing, lasting]
        try:
            async with self._orders(client):
                while True:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    if hearing.done():
                        if await self._has_heard(client, await hearing):
                            return False
                        hearing = waits[1] = asyncio.ensure_future(signals.next())
                    elif lasting.done():
                        if await self._killed_in(await lasting):
                            return False
                        lasting = waits[2] = asyncio.ensure_future(self._lasts())
                    else:
                        await over
                        return True
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _has_heard(self, client: Client, signal: Signal | None) -> bool:
        """Whether it was killed for it."""
        assert signal is not None
        self.heard.append(signal)
        number = len(self.heard)
        if await self._killed(BEFORE, number):
            return True
        await self._answer(client, signal)
        return await self._killed(AFTER, number)

    async def _killed(self, when: str, moment: int | str) -> bool:
        if not self.kill(when, moment):
            return False
        self.states.append(await self._state())
        await self.clusterd.kill()
        return True

    async def _killed_in(self, state: str) -> bool:
        """If not, the world goes on, and that state ends."""
        if await self._killed(IN, state):
            return True
        self.let.add(state)
        await self._go_on(state)
        return False

    async def _state(self) -> str:
        """As it is kept."""
        kept = await find(self.clusterd.cluster.kube, PREFIX + self.training.uid)
        return "" if kept is None else str(json.loads(kept["data"]["state.json"])["state"].get("state", ""))

    async def _lasts(self) -> str:
        """Until it is in a state that the world holds."""
        state = ""

        async def held() -> bool:
            nonlocal state
            state = await self._state()
            return state in self.flow.held and state not in self.let

        await until(held, 2 * PATIENCE)
        return state

    async def _go_on(self, state: str) -> None:
        """What such a state waits for."""
        training = self.training
        match state:
            case n.FLUSHING:
                await training.annotate_group(**{n.PLATFORM_STRATEGY: "recover"})
            case n.GLOBAL_FAULT:
                await training.annotate_group(**{n.RESULT_FAULT: "2:1,3:1"})
            case n.DECIDED:
                before = await training.uids()
                await training.end(await training.kube.get(POD, OLD, "default"))
                await training.replaced(before, 1)
                await training.annotate_group(**{n.TABLE_READY: "true"})
            case n.OLD_POD:
                await self._switch()
            case n.SCALED | n.FAULT_RETRY:
                training.spares = 10
            case n.RESCHEDULING | n.KILL_JOB | n.STOP_JOB:
                training.let_go, training.spares = True, 10
            case n.STOPPING:
                pass  # it listens from now on
            case _:
                raise AssertionError(state)

    async def _begin(self, client: Client) -> None:
        self.began = True
        if self.flow.order == NIC:
            assert (await client.switch_nics({"bert-node-1": {"1": True}}))[0] == 0
        elif self.flow.order == STRESS:
            assert (await client.stress_test({"bert-node-1": [0]}))[0] == 0
        elif self.flow.sick:
            fault = ChipFault("Ascend910-0", "81078603", "SubHealthFault", int(time.time() * 1000))
            await self.clusterd.devices("bert-node-1", fault)
            await eventually(self.clusterd.cluster.kube, PREFIX + self.training.uid, lambda item: not is_over(item))
        else:
            assert (await client.fault({2: self.flow.kind}))[0] == 0

    @contextlib.asynccontextmanager
    async def _orders(self, client: Client) -> AsyncIterator[None]:
        """Whoever carries them out."""
        method = {NIC: "SubscribeNotifySwitch", STRESS: "SubscribeNotifyExecStressTest"}.get(self.flow.order)

        async def obey() -> None:
            orders = client.stream(f"Recover/{method}", jobId=self.training.uid, role="taskd")
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):  # of one that was killed
                while await orders.next():
                    if self.flow.order == NIC:
                        await client.nics_switched(True)
                    else:
                        await client.stress_tested({2: {0: "0"}, 3: {0: "0"}})

        if method is None:
            yield
            return
        async with background(obey):
            yield

    async def _answer(self, client: Client, signal: Signal) -> None:
        match signal.type, signal.strategy:
            case "stopTrain", _ if not self.flow.ready:
                await client.stopped(404)
            case "stopTrain", _:
                await client.stopped(0, {} if self.flow.order else {2: self.flow.kind})
            case "globalFault", _:
                await client.can(*self.flow.can)
            case "saveAndExit", _:
                await client.went("dump")
            case "changeStrategy", "exit":
                pass
            case "changeStrategy", "downgrade":
                await client.went("downgrade", 201, isolate=[2, 3, 4, 5])
            case "changeStrategy", "recover" if not self.training.spares:
                pass
            case "changeStrategy", "recover" if self.flow.strategies.startswith("recover,"):
                await until(self._is_whole, PATIENCE)
                await client.went("recover")
            case "changeStrategy", strategy:
                await client.went(strategy)
            case "faultNodesExit", _:
                await client.went("downgrade")
            case "hot-switch", _ if signal.actions == ("hot switch",):
                await self._back_up()
            case "hot-switch", _:
                await client.can("migration" if n.OLD_POD in self.flow.held else "exit")
            case "killMaster", _:
                pass
            case "pauseStartAgent" | "continueStartAgent", _:
                pass
            case _:
                raise AssertionError(f"{signal}")

    async def _is_whole(self) -> bool:
        pods = await self.training.present()
        return len(pods) == self.flow.pods and not any(pod["metadata"].get("deletionTimestamp") for pod in pods)

    async def _back_up(self) -> None:
        """As the operator does, when it is told to."""
        old = await self._pod_is(lambda marks: marks.get("needOperatorOpe") == "create" or "backupNewPodName" in marks)
        if "backupNewPodName" in old["metadata"]["annotations"]:
            return
        marks = {"inHotSwitchFlow": "true", "podType": "backup", "backupSourcePodName": OLD}
        made = await self.training.pod(1, "bert-backup", "-hot-1234", **marks)
        patch = {"needOperatorOpe": None, "backupNewPodName": made["metadata"]["name"]}
        await self.training.kube.patch(POD, OLD, "default", {"metadata": {"annotations": patch}})

    async def _switch(self) -> None:
        """As the scheduler does."""
        old = await self._pod_is(lambda marks: marks.get("needVolcanoOpe") == "delete")
        await self.training.end(old)
        patch = {"podType": None, "backupSourcePodName": None}
        await self.training.kube.patch(POD, f"{OLD}-hot-1234", "default", {"metadata": {"annotations": patch}})
        self.training.let_go = True

    async def _pod_is(self, check: Callable[[dict[str, str]], bool]) -> Object:
        found: Object = {}

        async def done() -> bool:
            nonlocal found
            found = await self.training.kube.get(POD, OLD, "default")
            return check(found["metadata"]["annotations"])

        await until(done, PATIENCE)
        return found


async def play(folder: Path, flow: Flow, kill: Callable[[str, int | str], bool]) -> tuple[Result, Play]:
    async with mortal(folder) as clusterd:
        options: dict[str, Any] = {"pods": flow.pods, "strategies": flow.strategies, "labels": flow.labels}
        training = await clusterd.train(group_annotations=flow.group, **options)
        training.spares = flow.spares
        training.let_go = LINGERING.isdisjoint(flow.held)
        made = Play(flow, clusterd, training, kill)
        return await made.run(), made
