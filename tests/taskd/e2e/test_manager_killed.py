"""The manager, and with it the MindIO controller, is killed: another one is started and takes the job over."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from evertrain import aio
from tests.taskd.e2e.led import LIMIT, led
from tests.taskd.e2e.test_chain import STEPS, assert_same_end
from tests.taskd.jobs import Result, TwoPods
from tests.taskd.paced import paced

pytestmark = pytest.mark.matrix


def processes(pods: TwoPods, script: bytes) -> list[int]:
    """Of this job, by the script that they run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if os.path.basename(command[-1]) == script and os.readlink(entry / "cwd") == str(pods.folder):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def managers(pods: TwoPods) -> list[int]:
    return processes(pods, b"manager.py")


async def kill_manager(pods: TwoPods) -> int:
    """Returns the process id of the next one."""
    (old,) = managers(pods)
    os.kill(old, signal.SIGKILL)
    return await next_manager(pods, old)


async def next_manager(pods: TwoPods, old: int) -> int:
    async with aio.timeout(LIMIT):
        while not (new := [pid for pid in managers(pods) if pid != old]):
            await asyncio.sleep(0.05)
    return new[0]


def assert_recovered_in_place(result: Result) -> None:
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1, 2)), "they kept their processes"


async def test_a_new_manager_takes_over_and_recovers_a_process_in_place(tmp_path: Path) -> None:
    """No ClusterD. A second death of the manager does as little."""
    pods = TwoPods(tmp_path / "job")
    pace = paced(pods)
    try:
        for node in (0, 1):
            pods.start(node, f"--steps={STEPS}", "--fault=9:3:kill")
        await pace.to(3)
        await kill_manager(pods)
        await pace.to(6)  # nobody waits for the manager
        await kill_manager(pods)
        await pace.to(9)
        pace.allow(STEPS)
        result = await asyncio.to_thread(pods.wait)
    finally:
        pods.end()
    assert_recovered_in_place(result)


async def test_training_goes_on_while_there_is_no_manager(tmp_path: Path) -> None:
    """And what fails after that is recovered by the one that comes then."""
    pods = TwoPods(tmp_path / "job")
    pace = paced(pods)
    try:
        for node in (0, 1):
            pods.start(node, f"--steps={STEPS}", "--fault=9:3:kill")
        await pace.to(3)
        (old,), (successor,) = managers(pods), processes(pods, b"successor.py")
        os.kill(successor, signal.SIGSTOP)
        os.kill(old, signal.SIGKILL)
        await pace.to(7)
        assert not managers(pods)
        os.kill(successor, signal.SIGCONT)
        await next_manager(pods, old)
        await pace.to(9)
        pace.allow(STEPS)
        result = await asyncio.to_thread(pods.wait)
    finally:
        pods.end()
    assert_recovered_in_place(result)


async def test_clusterd_leads_the_new_manager(tmp_path: Path) -> None:
    async with led(tmp_path / "job") as job:
        pace = paced(job.pods)
        await job.begins("--fault=6:3:kill")
        await pace.to(3)
        await kill_manager(job.pods)
        await job.expect("Init")
        await job.expect("Register")
        await pace.to(6)
        pace.allow(STEPS)
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_killed_in_the_middle_of_a_recovery(tmp_path: Path) -> None:
    """After stopTrain, before changeStrategy: the recovery begins anew."""
    async with led(tmp_path / "job") as job:
        pace = paced(job.pods)
        await job.begins("--fault=6:3:kill")
        await pace.to(6)
        pace.allow(STEPS)
        await job.stops({3: 1})
        await kill_manager(job.pods)
        await job.expect("Init")
        await job.expect("Register")
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)


async def test_killed_while_a_process_is_replaced(tmp_path: Path) -> None:
    """After changeStrategy. Whoever comes first to the new controller, the recovery begins anew."""
    async with led(tmp_path / "job") as job:
        pace = paced(job.pods)
        await job.begins("--fault=6:3:kill")
        await pace.to(6)
        pace.allow(STEPS)
        await job.stops({3: 1})
        job.clusterd.say("globalFault", "on_global_rank", faults={3: 1})
        await job.offered({3: 1})
        job.replaces_in_place()
        agent = job.pods.folder / "log1" / "agent-1.log"
        await job.until(lambda: "receive 209 command" in agent.read_text(), "the order to replace it")
        await kill_manager(job.pods)
        await job.expect("Init")
        await job.expect("Register")
        await job.recovers_in_place()
        result = await job.ends()
    assert_recovered_in_place(result)
