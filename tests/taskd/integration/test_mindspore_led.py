"""Two pods of MindSpore under a real manager, led by a ClusterD that follows a script: what is said, one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.e2e.led import end_of, start_of
from tests.taskd.integration.test_manager import Job, environment, until
from tests.taskd.integration.test_mindspore import AGENT
from tests.taskd.integration.test_msrun_plugin import PLUGIN
from tests.taskd.msrun import Launcher
from tests.taskd.tap import Story, Tap

__all__ = ["environment"]
pytestmark = pytest.mark.usefixtures("environment")

SUBSCRIPTIONS = [
    "SubscribeProcessManageSignal",
    "SubscribeNotifySwitch",
    "SubscribeNotifyExecStressTest",
    "SubscribeDataTraceSwitch",
]


@dataclass
class Pods:
    launchers: list[Launcher]
    story: Story
    tap: Tap
    job: Job

    async def pids(self) -> dict[int, int]:
        return {rank: pid for node in (0, 1) for rank, pid in (await self.of(node)).items()}

    async def of(self, node: int) -> dict[int, int]:
        return await self.launchers[node].pids(2 * node, 2 * node + 1)


@contextlib.asynccontextmanager
async def pods(folder: Path, code: str) -> AsyncIterator[Pods]:
    """Their launchers do what `code` says, with msrun's callbacks."""
    story = Story()
    clusterd, tap = ScriptedClusterD(story.tell), Tap(story)
    await clusterd.start()
    front, *proxies = free_ports(3)
    job = Job(folder, clusterd)
    launchers = [
        Launcher(
            folder / str(node), code, node, POD_IP=f"127.0.0.{2 + node}", MS_SCHED_HOST="127.0.0.2",
            TASKD_MANAGER_PORT=str(front), TASKD_PROXY_PORT=str(proxies[node]), TASKD_RESET_DIR=str(folder),
            TASKD_RANK_TABLE_DIR=str(folder),
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        async with job.running(members=0), contextlib.AsyncExitStack() as running:
            await tap.start(f"127.0.0.2:{front}", f"127.0.0.1:{job.manager.port}")
            for launcher in launchers:
                launcher.folder.mkdir()
                await running.enter_async_context(launcher.running())
            yield Pods(launchers, story, tap, job)
    finally:
        await tap.stop()
        await clusterd.stop()


def heard_by_clusterd(story: Story) -> Counter[str]:
    return Counter(line.removeprefix("ClusterD hears ") for line in story.of("ClusterD hears"))


async def test_a_job_starts(tmp_path: Path) -> None:
    """Reference 7.0. An agent of MindSpore has one restart, whatever is left of it."""
    async with pods(tmp_path, AGENT) as job:
        pids = await job.pids()
        await until(lambda: all(job.tap.alive[f"Agent {node}"] >= 2 for node in (0, 1)))
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        assert [await launcher.ended() for launcher in job.launchers] == [0, 0]
        assert (await asyncio.wait_for(job.job.task, 90)).ok
    for node in (0, 1):
        told = [*start_of(node, 1, given=1), end_of(node)]
        assert job.story.of(f"Agent {node}") == told, "nothing else was said"
        job.story.assert_order(f"Proxy {node} registers", f"Proxy {node} listens", *told)
    assert heard_by_clusterd(job.story) == Counter(["Init", "Register", *SUBSCRIPTIONS])


async def test_the_schedulers_graceful_end_is_for_msruns_plugin_alone(tmp_path: Path) -> None:
    """Reference 7.12, without `dump`: the scheduler writes it into a file, and neither ClusterD nor the manager has
    anything to say about it."""
    async with pods(tmp_path, PLUGIN) as job:
        await job.pids()
        for node in (0, 1):
            await job.story.until(f"Proxy {node} listens", 90)
        end_gracefully(tmp_path)
        assert [await launcher.ended() for launcher in job.launchers] == [1, 1], "the cluster starts them elsewhere"
    for node in (0, 1):
        saved = [(tmp_path / str(node) / f"rank{rank}.saved").exists() for rank in (2 * node, 2 * node + 1)]
        assert saved == [True, True]
    assert not job.tap.messages
    assert heard_by_clusterd(job.story) == Counter(["Init", "Register", *SUBSCRIPTIONS])


async def test_the_schedulers_graceful_end_is_not_for_an_agent(tmp_path: Path) -> None:
    """Reference 7.12: it does not read that file."""
    async with pods(tmp_path, AGENT) as job:
        pids = await job.pids()
        end_gracefully(tmp_path)
        for launcher in job.launchers:
            await launcher.looked()
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        assert [await launcher.ended() for launcher in job.launchers] == [0, 0]
    for node in (0, 1):
        assert job.story.of(f"Agent {node}") == [*start_of(node, 1, given=1), end_of(node)]


def end_gracefully(folder: Path) -> None:
    (folder / "next").write_text(json.dumps({"RankList": [], "GracefulExit": 1, "RetryTime": 0}))
    (folder / "next").rename(folder / "reset.json")
