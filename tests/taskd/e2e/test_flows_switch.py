"""Hot switching (reference 7.8): a second pod is prepared while the first one trains on, and takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.taskd.e2e.led import Led, assert_controlled, end_of, led, start_of
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = pytest.mark.matrix

BACKUP = 9
"""Its address."""


async def prepares(job: Led, *args: str) -> None:
    """Until the processes of the backup pod are ready, and those of the job are to halt for them."""
    # All of them: who waits in a collective for one that holds gives up after minutes.
    await job.begins(*(f"--fault=5:{rank}:hold" for rank in range(4)), *args)
    await job.done(5)
    job.clusterd.say("hot-switch", "hot switch", faults={2: 1, 3: 1})
    job.start(1, address=BACKUP)
    await job.heard("Mgr orders Agent 1: 210 32767", times=2)
    output = job.pods.folder / "pod1.out"
    ready = [f"rank {rank} is ready to join" for rank in (2, 3)]
    await job.until(lambda: all(line in output.read_text() for line in ready), "the backup pod's processes")
    await job.told_to_halt(6)


async def test_the_backup_pod_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async with led(tmp_path / "job", HIGH_AVAILABILITY="recover") as job:
        await prepares(job)
        old = job.pods._all[1]
        job.clusterd.say("hot-switch", "new pod running")
        job.go()
        assert await job.offered({}) == ["migration"]
        job.pods.delete(old)
        job.clusterd.say("changeStrategy", "change_strategy", changeStrategy="migration")
        await job.succeeded("migration")
        result = await job.ends()
    assert_same_end(result)
    job.story.assert_order(
        "ClusterD says hot-switch hot switch",
        *start_of(1),
        "ClusterD says hot-switch new pod running",
        "ClusterD hears ReportRecoverStrategy",
        "ClusterD says changeStrategy migration change_strategy",
        "ClusterD hears ReportRecoverStatus migration 0",
    )
    for node, starts in ((0, 1), (1, 2)):
        assert job.story.of(f"Agent {node}") == [*start_of(node) * starts, end_of(node)], "nothing else"
    for rank in range(4):
        assert len({pid for _, pid in result.events[rank]}) == (1 if rank < 2 else 2)
    assert_controlled(job, "hot switch {2: 1, 3: 1}", "new pod running", "change_strategy migration")
    assert all("rebuild_group" in dict(result.events[rank]) for rank in range(4))


async def test_a_switch_that_is_given_up_leaves_the_first_pod_in_charge(tmp_path: Path) -> None:
    """The backup pod is ready, but too late for ClusterD; the cluster deletes it. Later a process fails."""
    async with led(tmp_path / "job", HIGH_AVAILABILITY="recover") as job:
        await prepares(job, f"--fault={STEPS - 4}:3:kill")
        old, backup = job.pods._all[1:]
        job.clusterd.say("hot-switch", "stop switch")
        await job.until(lambda: "do action stop switch finish" in job.pods.manager_log(), "the controller to hear it")
        job.pods.delete(backup)
        job.pods.pods[1] = old
        job.go()
        await job.recovers_in_place()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1, 2)), "they kept their processes"
    job.story.assert_order(
        "ClusterD says hot-switch stop switch",
        'Mgr orders Agent 1: 209 ["3"]',
        "Agent 1 confirms 209",
        "ClusterD hears ReportRecoverStatus recover 0",
    )
    assert_controlled(
        job, "hot switch {2: 1, 3: 1}", "stop switch", "stop_train {3: 1}", "on_global_rank {3: 1}",
        "change_strategy recover",
    )  # fmt: skip
