"""ClusterD is killed in every state that waits for something, and another one goes on: all ends as if nothing had been.

The training is the test: ClusterD stays in a state until it is answered, so each one is hit for certain. Killed is a
process, by SIGKILL.
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
import pytest

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

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1200)]

OLD = "bert-worker-0"
NIC, STRESS = "nic", "stress"


@dataclass(frozen=True)
class Flow:
    """What happens to a job, what its training can do, and where ClusterD waits for it."""

    states: tuple[str, ...]
    strategies: str = "recover,dump"
    can: tuple[str, ...] = ("recover", "dump", "exit")
    kind: int = 1
    """Of the fault; rank 2, in pod 1, has it."""
    pods: int = 2
    spares: int = 1000
    order: str = ""
    sick: bool = False
    labels: dict[str, str] = field(default_factory=dict)


FLOWS = {
    "retry": Flow(
        (n.STOPPED, n.OFFERS, n.RETRY_STATUS), "retry,recover,dump", ("retry", "recover", "dump", "exit"), kind=0
    ),
    "recover": Flow((n.STOPPED, n.OFFERS, n.RECOVER_STATUS)),
    "in place": Flow((n.STOPPED, n.OFFERS, n.RECOVER_STATUS), "recover-in-place,recover,dump"),
    "dump": Flow((n.DUMP_STATUS,), "dump"),
    "exit": Flow((n.STOPPED, n.OFFERS), can=("exit",)),
    "elastic": Flow(
        (n.STOPPED, n.OFFERS, n.SCALE_IN_RANKS, n.SCALE_IN_STATUS, n.SCALE_OUT_STATUS),
        "elastic-training,dump",
        ("downgrade", "upgrade", "dump", "exit"),
        pods=3,
        spares=0,
    ),
    "links": Flow((n.PAUSING, n.SWITCHING_NICS, n.CONTINUING), order=NIC),
    "stress test": Flow((n.PAUSING, n.STRESSING, n.CONTINUING), order=STRESS),
    "hot switch": Flow(
        (n.NEW_POD, n.HOT_PAUSE, n.MIGRATING), "recover", sick=True, labels={"subHealthyStrategy": "hotSwitch"}
    ),
}


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
    """The training, its operator and its scheduler, through one flow. `kill` says of each moment whether it is the one:
    before the answer to the signal with this number, or after it."""

    flow: Flow
    clusterd: Mortal
    training: Training
    kill: Callable[[int, str], bool]
    heard: list[Signal] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    began: bool = False

    async def run(self) -> Result:
        before = await self.training.uids()
        while not await self._life():
            pass
        client = self.clusterd.client(self.training.uid)
        await client.join()
        await eventually(self.clusterd.cluster.kube, PREFIX + self.training.uid, is_over)
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
        signals = await client.join()
        if not self.began:
            self.began = True
            await self._begin(client)
            if self.kill(0, "after"):
                await self._kill()
                return False
        over = asyncio.ensure_future(eventually(self.clusterd.cluster.kube, PREFIX + self.training.uid, is_over))
        try:
            async with self._orders(client):
                while True:
                    hearing = asyncio.ensure_future(signals.next())
                    await asyncio.wait({hearing, over}, return_when=asyncio.FIRST_COMPLETED)
                    if not hearing.done():
                        hearing.cancel()
                        await asyncio.gather(hearing, return_exceptions=True)
                        await over
                        return True
                    signal = await hearing
                    assert signal is not None
                    self.heard.append(signal)
                    number = len(self.heard)
                    if self.kill(number, "before"):
                        await self._kill()
                        return False
                    await self._answer(client, signal)
                    if self.kill(number, "after"):
                        await self._kill()
                        return False
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    async def _kill(self) -> None:
        kept = await find(self.clusterd.cluster.kube, PREFIX + self.training.uid)
        self.states.append("" if kept is None else json.loads(kept["data"]["state.json"])["state"].get("state", ""))
        await self.clusterd.kill()

    async def _begin(self, client: Client) -> None:
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
            case "changeStrategy", "recover" if self.flow.strategies.startswith("recover,"):
                await until(self._is_whole, PATIENCE)
                await client.went("recover")
            case "changeStrategy", strategy:
                await client.went(strategy)
            case "faultNodesExit", _:
                await client.went("downgrade")
                self.training.spares = 10
            case "hot-switch", _ if signal.actions == ("hot switch",):
                await self._back_up()
            case "hot-switch", _:
                await client.can("migration")
                await self._switch()
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
        self.training.let_go = False
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


async def play(folder: Path, flow: Flow, kill: Callable[[int, str], bool]) -> tuple[Result, Play]:
    async with mortal(folder) as clusterd:
        options: dict[str, Any] = {"pods": flow.pods, "strategies": flow.strategies, "labels": flow.labels}
        training = await clusterd.train(**options)
        training.spares = flow.spares if not flow.sick else 0
        made = Play(flow, clusterd, training, kill)
        return await made.run(), made


REST = {"in place", "exit"}
"""Their states are those of `recover`, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in REST else []) for name in FLOWS]
)
async def test_killed_in_every_state(tmp_path: Path, name: str) -> None:
    flow = FLOWS[name]
    expected, undisturbed = await play(tmp_path / "undisturbed", flow, lambda number, when: False)
    assert expected.ok, expected
    states: set[str] = set()
    moments = [(0, "after")] + [(at + 1, when) for at in range(len(undisturbed.heard)) for when in ("before", "after")]
    for moment in moments:
        left = [moment]

        def kill(number: int, when: str, left: list[tuple[int, str]] = left) -> bool:
            return (number, when) in left and not left.clear()

        result, played = await play(tmp_path / f"killed-{moment[0]}-{moment[1]}", flow, kill)
        assert result == expected, f"killed {moment[1]} the answer to {moment[0]}, in {played.states}"
        assert len(played.states) == 1
        states.update(played.states)
    assert states >= set(flow.states)
