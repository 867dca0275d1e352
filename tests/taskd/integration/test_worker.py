"""Workers in real processes under a manager that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.frames import Body
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from tests.ports import free_ports
from tests.taskd.orders import deliver

TRAINING = """
import signal, sys
from taskd.api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker
from evertrain.taskd.worker import operations

def switch(ranks, ops):
    print("switch", ranks, ops, flush=True)
    if ranks == [9]:
        raise RuntimeError("the link is down")
    return ranks != [8]

operations.register_nic_switch(switch)
assert init_taskd_worker(3) and start_taskd_worker()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if destroy_taskd_worker() else 1))
print("trains", flush=True)
while True:
    signal.pause()
"""
STUCK = (
    """
import threading
from evertrain.taskd.worker import operations, worker
worker.LIMITS[operations.AIC] = 1.5
operations.register_stress_test(lambda op: threading.Event().wait() if op == 0 else 0)
"""
    + TRAINING
)
WORKER = Position("Worker", "1", "3")


class Job:
    def __init__(self, folder: Path, training: str = TRAINING) -> None:
        self.folder = folder
        self._script = training
        self.port = free_ports(1)[0]
        self.manager = Node(Position("Mgr", "0"), listen="127.0.0.1:0")
        self._seen = frames.Seen()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Job]:
        await self.manager.start()
        proxy = Node(
            Position("Proxy", "1", "5"), listen=f"127.0.0.3:{self.port}", upstream=f"127.0.0.1:{self.manager.port}"
        )
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "3", "LOCAL_WORLD_SIZE": "2",
            "TASKD_DATATRACE_DIR": str(self.folder), "TASKD_STRESS_SECONDS": "1.5",
            "TASKD_PROFILING_DIR": str(self.folder / "timings"), "MINDX_TASK_ID": "job-1",
            "POD_IP": "127.0.0.3", "TASKD_PROXY_PORT": str(self.port), "TASKD_LOG_PATH": str(self.folder / "log"),
        }  # fmt: skip
        self.training = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self._script, env=environment, stdout=asyncio.subprocess.PIPE
        )
        try:
            await self.says("trains")  # before there is any proxy: nothing waits for the network
            await self.before_proxy()
            await proxy.start()
            registered = await self.hear()
            assert (registered.msg_type, registered.code) == ("REGISTER", 101)
            yield self
        finally:
            if self.training.returncode is None:
                self.training.kill()
            await self.training.wait()
            await proxy.close()
            await self.manager.close()

    async def before_proxy(self) -> None:
        pass

    def log(self) -> str:
        return (self.folder / "log" / "taskd-worker-3.log").read_text()

    async def says(self, text: str) -> None:
        assert self.training.stdout is not None
        while text not in (line := (await asyncio.wait_for(self.training.stdout.readline(), 90)).decode()):
            assert line, f"it ended without saying {text!r}"

    async def hear(self) -> Body:
        while self._seen.again((message := await asyncio.wait_for(self.manager.received.get(), 90)).header.uuid):
            pass
        return frames.decode(message.body)

    def nothing_more(self) -> bool:
        messages = [self.manager.received.get_nowait() for _ in range(self.manager.received.qsize())]
        return all(self._seen.again(message.header.uuid) for message in messages)

    async def order(self, code: int, uuid: str = "", **extension: str) -> None:
        await deliver(self.manager, WORKER, frames.body("ACTION", code, "", extension), uuid)


async def test_link_failover(tmp_path: Path) -> None:
    async with Job(tmp_path).running() as job:
        for number, (ranks, result) in enumerate(
            ((["0", "2"], "switchOK"), (["8"], "switchFail"), (["9"], "switchFail"))
        ):
            ops = json.dumps([True] * len(ranks))
            order = {"globalRankIDs": json.dumps(ranks), "globalOps": ops, "switchNicUUID": f"s{number}"}
            await job.order(204, **order)
            answer = await job.hear()
            assert (answer.code, answer.message, answer.extension) == (204, result, {"switchNicUUID": f"s{number}"})
        await job.says("switch [0, 2] [True, True]")


async def test_an_order_that_comes_twice_is_carried_out_once_and_nonsense_is_not(tmp_path: Path) -> None:
    async with Job(tmp_path).running() as job:
        good = {"globalRankIDs": '["0"]', "globalOps": "[true]", "switchNicUUID": "s"}
        for ranks, ops in (("x", "[true]"), ('["0"]', "[]"), ("7", "7"), ("[null]", "[true]"), ("[" * 99_999, "[]")):
            await job.order(204, globalRankIDs=ranks, globalOps=ops, switchNicUUID="bad")
            assert ((answer := await job.hear()).message, answer.extension) == ("switchFail", {"switchNicUUID": "bad"})
        await job.order(204)
        await job.order(999)
        for odd in ("[]", "7", '{"3": []}', '{"3": {"ops": 1}}', "[" * 99_999):
            await job.order(205, StressTestRankOPStr=odd, stressTestUUID="bad")
        await job.order(205, StressTestRankOPStr='{"3": {"ops": [7]}}', stressTestUUID="bad")
        await job.order(205, StressTestRankOPStr='{"1": {"ops": [0]}}', stressTestUUID="another rank's")
        for _ in range(2):
            await job.order(204, uuid="the same", **good)
        assert (await job.hear()).message == "switchOK"
        job.training.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(job.training.wait(), 90) == 0
        assert job.nothing_more()


async def test_a_stress_test_without_an_npu(tmp_path: Path) -> None:
    async with Job(tmp_path).running() as job:
        await job.order(205, StressTestRankOPStr='{"3": {"ops": [1, 0]}}', stressTestUUID="t")
        signs = 0
        while (answer := await job.hear()).msg_type == "KEEP_ALIVE":
            assert (answer.code, answer.message) == (0, "")
            signs += 1
        assert signs >= 4, "one each second while it runs, twice 1.5 seconds long"
        assert (answer.code, answer.extension) == (205, {"stressTestUUID": "t"})
        right = {"code": "0", "result": "OK"}
        assert json.loads(answer.message) == {"rankResult": {"0": right, "1": right}}


@pytest.mark.matrix
async def test_a_stress_test_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async with Job(tmp_path, STUCK).running() as job:
        await job.order(205, StressTestRankOPStr='{"3": {"ops": [0, 1]}}', stressTestUUID="t")
        while (answer := await job.hear()).msg_type == "KEEP_ALIVE":
            pass
        late, right = {"code": "3", "result": "exec timeout"}, {"code": "0", "result": "OK"}
        assert json.loads(answer.message) == {"rankResult": {"0": late, "1": right}}


async def test_profiling_is_switched_on_and_off(tmp_path: Path) -> None:
    async with Job(tmp_path).running() as job:
        for order, answer in ((710, 1410), (711, 1411), (700, 1400)):
            await job.order(order)
            body = await job.hear()
            assert (body.msg_type, body.code) == ("STATUS", answer)


class ReadsFile(Job):
    """Before it can register, the worker is told by the file which timings to write."""

    async def before_proxy(self) -> None:
        file = self.folder / "profilingSwitch"
        for values, result in (({"Step": "on"}, "1410"), ({"CommunicationOperator": "on"}, "1411")):
            file.write_text(json.dumps(dict.fromkeys(KINDS, "off") | values))
            await self.logs(f": {result}")
        file.write_text("no JSON")
        file.with_name("new").write_text("x" * (2 << 20))
        file.with_name("new").rename(file)

    async def logs(self, text: str) -> None:
        async with aio.timeout(90):
            while text not in self.log():
                await asyncio.sleep(0.05)


KINDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")


@pytest.mark.matrix
async def test_before_it_is_registered_a_file_says_which_timings_to_write(tmp_path: Path) -> None:
    async with ReadsFile(tmp_path).running() as job:
        body = await job.hear()
        assert (body.msg_type, body.code) == ("STATUS", 1411), "the manager hears what it does already"
        (tmp_path / "profilingSwitch").write_text(json.dumps(dict.fromkeys(KINDS, "off")))
        await job.order(710)
        assert (await job.hear()).code == 1410
        await asyncio.sleep(1.5)  # the file is not looked at any more: nothing to wait for
        await job.order(710)
        assert (await job.hear()).code == 1410 and job.manager.received.empty()
