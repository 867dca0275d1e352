"""Link failover through a whole ClusterD: its process, `evertrain switch-nic` as the one who orders, and a TaskD that
follows a script. With real links and a training: `tests/features/e2e/test_links.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.clusterd.client import Client, Signal, Signals, Stream
from tests.clusterd.killing import Mortal, mortal
from tests.clusterd.running import PATIENCE, Training
from tests.embedded.up import environment, evertrain
from tests.operator.cluster import background

PAUSE = Signal("stopTrain", ("pause_train",))
CONTINUE = Signal("changeStrategy", ("change_strategy",), "continue")
LOST = {"2": "1", "3": "1"}


@dataclass
class TaskD:
    """Of one job: pauses, has its workers switch, goes on; and recovers, if it comes to that."""

    client: Client
    signals: Signals
    orders: Stream
    can_switch: bool = True
    ordered: list[dict[int, bool]] = field(default_factory=list)

    async def follows_signals(self) -> None:
        while (signal := await self.signals.next(2 * PATIENCE)) is not None:
            match signal.type, signal.strategy:
                case "stopTrain", _:
                    await self.client.stopped(0, {} if signal == PAUSE else {2: 1})
                case "globalFault", _:
                    await self.client.can("recover", "dump", "exit")
                case "changeStrategy", strategy:
                    await self.client.went(strategy)
                case _:
                    raise AssertionError(f"{signal}")

    async def carries_out_orders(self) -> None:
        while (order := await self.orders.next(2 * PATIENCE)) is not None:
            self.ordered.append(dict(zip(map(int, order.rankID), order.op, strict=True)))
            assert await self.client.nics_switched(self.can_switch) == (0, "reply success")


@contextlib.asynccontextmanager
async def trained(folder: Path) -> AsyncIterator[tuple[Mortal, Training, TaskD]]:
    async with mortal(folder) as clusterd:
        training = await clusterd.train(strategies="recover,dump")
        await clusterd.start()
        client, signals = await training.join()
        orders = client.stream("Recover/SubscribeNotifySwitch", jobId=training.uid, role="taskd")
        taskd = TaskD(client, signals, orders)
        async with background(taskd.follows_signals, taskd.carries_out_orders):
            yield clusterd, training, taskd


async def switch(clusterd: Mortal, *options: str) -> tuple[int, str]:
    kubeconfig = clusterd.folder / f"kubeconfig-{clusterd.cluster.server.port}"
    command = evertrain("switch-nic", "bert", "--kubeconfig", kubeconfig, "--clusterd", clusterd.address, *options)
    process = await asyncio.create_subprocess_exec(
        *command, env=environment(clusterd.folder),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode()


async def test_all_links_of_a_job_change_and_one_changes_back(tmp_path: Path) -> None:
    async with trained(tmp_path / "clusterd") as (clusterd, training, taskd):
        before = await training.uids()
        code, said = await switch(clusterd, "--op", "true")
        assert code == 0 and "switch nic finish" in said, said
        assert "bert-node-1: device 0, 1 to the backup link" in said
        assert taskd.signals.transcript == [PAUSE, CONTINUE]
        assert taskd.ordered == [{0: True, 1: True, 2: True, 3: True}]
        incident = await training.ended(True)
        assert [phase for phase, _ in incident.durations] == ["detect", "pause", "switch links", "continue"]

        code, said = await switch(clusterd, "--node", "bert-node-1", "--dev", "1", "--op", "false")
        assert code == 0 and "switch nic finish" in said, said
        assert taskd.signals.transcript == [PAUSE, CONTINUE] * 2
        assert taskd.ordered[1:] == [{3: False}]
        assert await training.uids() == before, "nobody was replaced"


async def test_links_that_do_not_change_end_in_a_recovery_and_can_be_tried_again(tmp_path: Path) -> None:
    async with trained(tmp_path / "clusterd") as (clusterd, training, taskd):
        before = await training.uids()
        taskd.can_switch = False
        code, said = await switch(clusterd, "--op", "true")
        assert code == 1 and "switch nic failed, switch nic failed" in said, said
        await training.replaced(before, 1)
        await training.reported("recover-success")
        await training.ended(True)
        pause, stop, everybody, decision = taskd.signals.transcript
        assert (pause, stop) == (PAUSE, Signal("stopTrain", ("stop_train",)))
        assert (everybody.type, everybody.faults) == ("globalFault", LOST)
        assert (decision.strategy, decision.faults) == ("recover", LOST)

        taskd.can_switch = True
        while True:
            code, said = await switch(clusterd, "--node", "bert-node-0", "--op", "true")
            if "is not running" not in said:  # ClusterD has yet to see the new pod
                break
        assert code == 0 and "switch nic finish" in said, said
        assert taskd.ordered[-1] == {0: True, 1: True}
