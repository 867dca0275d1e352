"""What the cluster orders of training processes: link failover, stress test, timings; a scripted ClusterD leads."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.taskd.e2e.led import Led, assert_controlled, led, reported_ranks
from tests.taskd.e2e.test_chain import STEPS, assert_same_end
from tests.taskd.jobs import Result

LINKS = "127.0.1.2,127.0.2.2"
ALL = ["0", "1", "2", "3"]
KINDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
"""Of timings."""
TRAININGS = Path(__file__).with_name("trainings")


class Workers(Led):
    """The training is held at the end of a step (see `trainings/gate.py`) but for what a test wants of it."""

    held = 2

    async def train(self, *args: str) -> None:
        """Until every rank trains and its worker is known."""
        await self.begins(*args)
        await self.trains()

    async def trains(self) -> None:
        await self.done(self.held)
        await self.until(lambda: len(self.registered()) == 4, "all workers")

    def hold_at(self, step: int) -> None:
        self.held = step
        new = self.pods.folder / "gate.new"
        new.write_text(str(step))
        new.rename(self.pods.folder / "gate")

    def registered(self) -> set[str]:
        texts = [file.read_text() for file in self.pods.folder.glob("log*/taskd-worker-*.log")]
        return {rank for rank in ALL for text in texts if f"worker {rank} register manager success" in text}

    async def pauses(self, **fields: Any) -> None:
        await self.done(self.held)
        self.clusterd.say("stopTrain", "pause_train", uuid=os.urandom(4).hex(), **fields)
        await self.told_to_halt(self.held + 1)
        self.hold_at(self.held + 2)
        paused = await self.expect("ReportStopComplete")
        assert (paused.status.code, paused.status.info) == (0, "pause complete")

    async def goes_on(self) -> None:
        self.clusterd.say("changeStrategy", "change_strategy", uuid=os.urandom(4).hex(), changeStrategy="continue")
        await self.succeeded("continue")

    async def ends(self) -> Result:
        self.hold_at(STEPS + 1)
        return await super().ends()

    async def switches(self, ranks: list[str], ops: list[bool]) -> bool:
        self.clusterd.switch(ranks, ops)
        return bool((await self.expect("ReplySwitchNicResult")).result)

    def networks(self, rank: int, *, at_most: int = 1) -> Any:
        """Whether the connections of this rank are in so many of the networks of LINKS, and in which."""
        found = connected(self.pods.result([]).events[rank][-1][1]) & {"127.0.1", "127.0.2"}
        return len(found) <= at_most and found


def connected(pid: int) -> set[str]:
    """The networks (three numbers of an address) in which a process has connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ends = [end for line in lines if line[9] in inodes and line[3] == "01" for end in line[1:3]]
    return {".".join(str(number) for number in bytes.fromhex(end[2:8])[::-1]) for end in ends}


@contextlib.asynccontextmanager
async def workers(folder: Path, script: str = "example.py", **environment: str) -> AsyncIterator[Workers]:
    settings = {"TASKD_PROFILING_DIR": str(folder / "timings"), "GATE": str(folder / "gate"), **environment}
    async with led(folder, script=TRAININGS / script, **settings) as job:
        yield Workers(job.pods, job.clusterd, job.story, job.tap)


def worker(rank: int) -> str:
    return f"Worker {rank // 2}/{rank}"


def registration(rank: int) -> list[str]:
    return [f"the path to {worker(rank)} leads over Proxy {rank // 2}", f"{worker(rank)} says REGISTER 101"]


def ordered(rank: int, code: int, *extension: str) -> str:
    return " ".join([f"Mgr orders {worker(rank)}: {code}", *extension])


def confirmed(rank: int, code: int) -> str:
    return f"{worker(rank)} confirms {code}"


# --- link failover and switchback (reference 7.9) --------------------------------------------------------------------


@pytest.mark.matrix
async def test_all_links_there_and_back(tmp_path: Path) -> None:
    async with workers(tmp_path / "job", TASKD_NICS=LINKS) as job:
        await job.train("--taskd")
        for ops, network in ((True, "127.0.2"), (False, "127.0.1")):
            await job.pauses()
            assert await job.switches(ALL, [ops] * 4)
            for rank in range(4):
                await job.until(lambda rank=rank: job.networks(rank), f"rank {rank} to leave its old link")
                assert job.networks(rank) == {network}
            await job.goes_on()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in range(4)), "nobody restarted"
    for rank in range(4):
        said: list[str] = []
        for op, uuid in (("true", "#1"), ("false", "#2")):
            order = [
                ordered(rank, 204, '["0","1","2","3"]', f"[{op},{op},{op},{op}]", uuid), confirmed(rank, 204),
                f"{worker(rank)} says ACTION 204 switchOK {uuid}",
            ]  # fmt: skip
            said += order
            job.story.assert_order("ClusterD hears ReportStopComplete 0", order[0], order[2],
                                   "ClusterD hears ReplySwitchNicResult",
                                   "ClusterD says changeStrategy continue change_strategy",
                                   "ClusterD hears ReportRecoverStatus continue 0")  # fmt: skip
        assert job.story.of(worker(rank)) == [*registration(rank), *said]
    assert_controlled(job, *["pause_train", "change_strategy continue"] * 2)


@pytest.mark.matrix
async def test_a_link_that_is_down_leaves_everybody_on_the_old_one(tmp_path: Path) -> None:
    nowhere = f"{LINKS};127.0.1.3,240.0.0.1"  # the backup of the second process of each pod
    async with workers(tmp_path / "job", TASKD_NICS=nowhere) as job:
        await job.train("--taskd")
        await job.pauses()
        assert not await job.switches(ALL, [True] * 4)
        assert all(job.networks(rank) == {"127.0.1"} for rank in range(4))
        await job.goes_on()
        await job.pauses()
        assert await job.switches(["0", "2"], [True, True]), "those two have a backup"
        await job.goes_on()
        result = await job.ends()
    assert_same_end(result)


@pytest.mark.matrix
async def test_after_a_switch_that_failed_clusterd_has_the_training_recover(tmp_path: Path) -> None:
    async with workers(tmp_path / "job", TASKD_NICS=f"{LINKS};127.0.1.3,240.0.0.1") as job:
        await job.train("--taskd")
        await job.pauses()
        assert not await job.switches(ALL, [True] * 4)
        job.clusterd.say("stopTrain", "stop_train", uuid="stop")
        assert not (await job.expect("ReportProcessFault")).faultRanks
        await job.stopped({})
        job.clusterd.say("globalFault", "on_global_rank", uuid="global")
        assert "recover" in await job.offered({})
        job.clusterd.say("changeStrategy", "change_strategy", uuid="change", changeStrategy="recover")
        await job.succeeded("recover")
        result = await job.ends()
    assert_same_end(result)
    assert_controlled(job, "pause_train", "stop_train", "on_global_rank", "change_strategy recover")
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in range(4)), "nobody restarted"


@pytest.mark.matrix
@pytest.mark.exhaustive
async def test_a_training_without_workers_pauses_and_goes_on(tmp_path: Path) -> None:
    async with workers(tmp_path / "job") as job:
        await job.begins()
        await job.pauses()
        assert not await job.switches(["0"], [True])
        await job.goes_on()
        result = await job.ends()
    assert_same_end(result)


@pytest.mark.matrix
async def test_who_is_not_paused_does_not_move(tmp_path: Path) -> None:
    async with workers(tmp_path / "job", TASKD_NICS=LINKS) as job:
        await job.train("--taskd")
        assert not await job.switches(ALL, [True] * 4)
        result = await job.ends()
    assert_same_end(result)


@pytest.mark.matrix
@pytest.mark.exhaustive
async def test_a_training_on_groups_of_torch_itself(tmp_path: Path) -> None:
    ends: list[Any] = []
    for name, moves in (("stays", []), ("moves", [True, False]), ("is timed", [])):
        async with workers(tmp_path / name, "plain_groups.py", TASKD_NICS=LINKS) as job:
            if name == "is timed":
                job.clusterd.trace(**dict.fromkeys(KINDS, "on"))
            await job.train()
            for ops in moves:
                await job.pauses()
                assert await job.switches(ALL, [ops] * 4)
                assert f"127.0.{2 if ops else 1}" in job.networks(0, at_most=2)
                await job.goes_on()
            result = await job.ends()
        assert result.codes == [0, 0], result.explain()
        ends.append((result.steps, result.results))
    assert ends[0] == ends[1] == ends[2] and len(ends[0][1]) == 4


# --- online stress test (reference 7.10) -----------------------------------------------------------------------------


def codes(reply: Any) -> dict[str, dict[str, tuple[str, str]]]:
    results = reply.stressResult.items()
    return {rank: {op: (each.code, each.result) for op, each in ops.rankResult.items()} for rank, ops in results}


TESTED = ('{"0":{"ops":[1,0]},"3":{"ops":[0]}}', "#1")


@pytest.mark.matrix
async def test_a_stress_test_that_finds_nothing(tmp_path: Path) -> None:
    """An agent that starts meanwhile has to wait; here it is one of the job's first."""
    async with workers(tmp_path / "job") as job:
        args = (f"--steps={STEPS}", "--taskd")
        job.pods.start(0, *args)
        for method in ("Init", "Register"):
            await job.expect(method)
        job.clusterd.say("pauseStartAgent", "pause_start_agent", uuid="h1")
        await job.until(lambda: "agents that start wait" in job.pods.manager_log(), "the manager to hear it")
        job.pods.start(1, *args)
        await job.until(lambda: "agent 1 waits for its start" in job.pods.manager_log(), "the agent")
        assert not any(job.pods.result([]).steps.values())
        job.clusterd.say("continueStartAgent", "continue_start_agent", uuid="g1")
        await job.trains()
        await job.pauses(timeout=900)
        job.clusterd.say("pauseStartAgent", "pause_start_agent", uuid="h2")
        job.clusterd.stress({"0": [1, 0], "3": [0]})
        reply = await job.expect("ReplyStressTestResult")
        assert (reply.jobId, codes(reply)) == (
            "job-1",
            {"0": {"0": ("0", "OK"), "1": ("0", "OK")}, "3": {"0": ("0", "OK")}},
        )
        job.clusterd.say("continueStartAgent", "continue_start_agent", uuid="g2")
        await job.goes_on()
        result = await job.ends()
    assert_same_end(result)
    for rank in range(4):
        said = job.story.of(worker(rank))
        if rank in (1, 2):
            assert said == registration(rank), "only those that are named are told"
            continue
        *before, told = said
        assert before == [*registration(rank), ordered(rank, 205, *TESTED), confirmed(rank, 205)]
        assert told.endswith("}} #1")
        assert told.startswith(f'{worker(rank)} says ACTION 205 {{"rankResult"') and job.tap.alive[worker(rank)] >= 1
    job.story.assert_order(
        "ClusterD says pauseStartAgent pause_start_agent", "Agent 1 says STATUS 201 32767",
        "ClusterD says continueStartAgent continue_start_agent", "Mgr orders Agent 1: 210 32767",
        "ClusterD says stopTrain pause_train", "ClusterD hears ReportStopComplete 0",
        ordered(0, 205, *TESTED), "ClusterD hears ReplyStressTestResult",
        "ClusterD says changeStrategy continue change_strategy", "ClusterD hears ReportRecoverStatus continue 0",
    )  # fmt: skip
    assert_controlled(job, "pause_train 900", "change_strategy continue")


@pytest.mark.matrix
async def test_a_stress_test_that_finds_a_fault_and_the_node_is_replaced(tmp_path: Path) -> None:
    """Ranks 0 to 3 come to the codes 0, 4, 3 and 2. The pod of the last two is replaced."""
    async with workers(tmp_path / "job", "broken_devices.py") as job:
        await job.train("--taskd")
        await job.pauses(timeout=900)
        job.clusterd.say("pauseStartAgent", "pause_start_agent", uuid="hold")
        job.clusterd.stress({rank: [0] for rank in ALL})
        assert codes(await job.expect("ReplyStressTestResult")) == {
            "0": {"0": ("0", "OK")},
            "1": {"0": ("4", "voltage recovery failed")},
            "2": {"0": ("3", "exec timeout")},
            "3": {"0": ("2", "find fault rank")},
        }
        job.clusterd.say("continueStartAgent", "continue_start_agent", uuid="go")
        faults = {2: 1, 3: 1}
        job.clusterd.say("stopTrain", "stop_train", uuid="stop", faults=faults)
        assert reported_ranks(await job.expect("ReportProcessFault")) == faults, "they are news to MindIO"
        await job.stopped(faults)
        job.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodeRankIds=["1"])
        await job.exits(1)
        assert "recover" in await job.offered(faults)
        job.pods.start(1, f"--steps={STEPS}", "--taskd", address=9)
        job.clusterd.say("changeStrategy", "change_strategy", uuid="change", changeStrategy="recover")
        await job.succeeded("recover")
        result = await job.ends()
    assert_same_end(result)
    assert [len({pid for _, pid in result.events[rank]}) for rank in range(4)] == [1, 1, 2, 2]


# --- timings (reference 7.13) ----------------------------------------------------------------------------------------


def timings(folder: Path, rank: str) -> list[dict[str, Any]]:
    (file,) = (folder / "timings" / "job-1" / rank).iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_timed(lines: list[dict[str, Any]], expected: set[tuple[str, str]]) -> None:
    """That these, by domain and name, have begun and ended."""
    found = {(line["Domain"], line["Name"].split()[0], line["Flag"]) for line in lines}
    assert {(*each, flag) for each in expected for flag in (2, 4)} <= found


@pytest.mark.matrix
async def test_timings_are_switched_on_and_off(tmp_path: Path) -> None:
    async with workers(tmp_path / "job") as job:
        job.clusterd.trace(**dict.fromkeys(KINDS, "on"))
        await job.train("--taskd", "--checkpoint-every=4", *(f"--fault={STEPS - 2}:{rank}:hold" for rank in ALL))
        job.hold_at(STEPS + 1)
        held = [job.pods.work / f"fault.{STEPS - 2}.{rank}.hold" for rank in ALL]
        await job.until(lambda: all(file.exists() for file in held), "all ranks in the middle of a step")
        job.clusterd.trace(**dict.fromkeys(KINDS, "off"))
        for rank in range(4):
            await job.heard(f"{worker(rank)} says STATUS 1400")
        off = time.time_ns()
        job.go()
        result = await job.ends()
    assert result.codes == [0, 0], result.explain()
    for rank in range(4):
        switched = [[ordered(rank, 700 + each), confirmed(rank, 700 + each)] for each in (11, 0)]
        assert [line for line in job.story.of(worker(rank)) if "STATUS" not in line] == [
            *registration(rank), *switched[0], *switched[1],
        ]  # fmt: skip
        job.story.assert_order(ordered(rank, 711), f"{worker(rank)} says STATUS 1411", ordered(rank, 700))
    for rank in ALL:
        lines = timings(tmp_path / "job", rank)
        expected = {("default", "step"), ("default", "forward"), ("communication", "allreduce")}
        if rank in "01":
            expected.add(("default", "save_checkpoint"))
        assert_timed(lines, expected)
        assert max(line["Timestamp"] for line in lines) < off, "off is off"


@pytest.mark.matrix
async def test_timings_of_a_training_with_ddp_and_a_loader_of_data(tmp_path: Path) -> None:
    async with workers(tmp_path / "job", "plain_groups.py") as job:
        job.clusterd.trace(**dict.fromkeys(KINDS, "on"))
        await job.train()
        for rank in range(4):
            await job.heard(f"{worker(rank)} says STATUS 1411")
        result = await job.ends()
    assert result.codes == [0, 0], result.explain()
    for rank in ALL:
        expected = {("default", "step"), ("default", "forward"), ("default", "dataloader")}
        expected |= {("communication", "all_reduce"), ("communication", "ddp_all_reduce")}
        assert_timed(timings(tmp_path / "job", rank), expected)
