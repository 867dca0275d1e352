"""Pod-level and job-level rescheduling through all parts: without process-level recovery, from the last checkpoint.

A process dies, which the operator counts (`fault-retry-times`); or a chip breaks, from which ClusterD moves pods away
(`fault-scheduling`). With `pod-rescheduling` only the pod at fault is replaced, and the processes of the
other one are started again in it; without, all pods are.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.clusterd.chain import NAME, PODS, running
from tests.clusterd.closing import assert_told, assert_whole
from tests.clusterd.e2e.test_chain import BROKEN_CHIP, FAULT_STEP
from tests.embedded.up import Watch, needs_kubectl
from tests.launch.harness import ROOT
from tests.taskd.e2e.test_chain import STEPS

pytestmark = needs_kubectl

SAVED = 5
RETRIES = '    fault-retry-times: "2"'


def conditions(watch: Watch) -> list[dict[str, Any]]:
    """What the job was, one after the other: its newest condition that holds."""
    holding = [
        [each for each in (job.get("status") or {}).get("conditions") or () if each["status"] == "True"]
        for job in watch.seen
    ]
    newest = [each[-1] for each in holding if each]
    return [next(group) for _, group in itertools.groupby(newest, lambda each: (each["type"], each["message"]))]


def assert_restarted(incidents: list[dict[str, Any]], level: str) -> None:
    """Once, until all pods ran again."""
    (incident,) = incidents
    assert_told(incident, f"{level}-rescheduling", set(), "rescheduled", all_phases=False)
    assert [phase["phase"] for phase in incident["phases"]] == ["detect", "start again"], incident


LEVELS = {"pod": RETRIES + '\n    pod-rescheduling: "on"', "job": RETRIES}


@pytest.mark.parametrize("level", ["pod", pytest.param("job", marks=pytest.mark.matrix)])
def test_a_process_dies(tmp_path: Path, level: str) -> None:
    with running(tmp_path, "", labels=LEVELS[level]) as chain:
        chain.start(f"--steps={STEPS}", f"--checkpoint-every={SAVED}", f"--fault={FAULT_STEP}:3:kill")
        with chain.up.watching("acjob", NAME) as watch:
            chain.to(FAULT_STEP)
            first = chain.uids()
            chain.pace.allow(STEPS)
            result = chain.ends()
            second = chain.uids()
            assert second[1] != first[1] and (second[0] == first[0]) == (level == "pod")
            incidents = chain.incidents()
            watch.until(lambda job: job["status"]["conditions"][-1]["type"] == "Succeeded")
    assert_whole(result, incidents, kept=[], again_from=SAVED + 1)
    assert_restarted(incidents, level)
    assert incidents[0]["cause"].startswith(f"pod-failed of pod {PODS[1]} on node "), incidents
    told = conditions(watch)[-4:]
    assert [each["type"] for each in told] == ["Running", "Restarting", "Running", "Succeeded"], told
    assert told[1]["reason"] == "jobRestarting"
    assert told[1]["message"] == f"Job default/{NAME} is unconditional retry job and remain retry times is <2>."


EXAMPLE = f"""\
script=$1 output=$3
shift 3
exec bash {ROOT}/examples/resumable/train_start.sh "$PWD" "$output" "$script" "$@"
"""
"""The script of the examples, called as the other one is."""


@pytest.mark.matrix
@pytest.mark.parametrize("pod", [0, 1], ids=["of the first pod", "of the second pod"])
def test_torchrun_is_killed(tmp_path: Path, pod: int) -> None:
    """It has not told the manager that it is over, and its pod ends all the same: the job starts again."""
    with running(tmp_path, "", labels=LEVELS["job"], start=EXAMPLE) as chain:
        chain.start(f"--steps={STEPS}", f"--checkpoint-every={SAVED}")
        chain.to(FAULT_STEP)
        first = chain.uids()
        with chain.up.watching("pod", PODS[pod]) as watch:
            watch.until(bool)  # the second pod is gone before a kubectl that is still starting would see it
            os.kill(chain.torchrun(pod), signal.SIGKILL)
            ended = watch.until(lambda it: it["metadata"]["uid"] == first[pod] and it["status"]["phase"] == "Failed")
        (container,) = ended["status"]["containerStatuses"]
        assert container["state"]["terminated"]["exitCode"] == 137, "it was ended because another pod had failed"
        chain.until_replaced(pod, first[pod])
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert not {*first} & {*chain.uids()}
    assert_whole(result, [], kept=[], again_from=SAVED + 1)


@pytest.mark.matrix
@pytest.mark.parametrize("level", LEVELS)
def test_a_chip_breaks(tmp_path: Path, level: str) -> None:
    with running(tmp_path, "", labels=LEVELS[level]) as chain:
        chain.start(f"--steps={STEPS}", f"--checkpoint-every={SAVED}")
        with chain.up.watching("acjob", NAME) as watch:
            chain.to(FAULT_STEP)
            first, node = chain.uids(), chain.node(1)
            chain.up.evertrain("inject", "chip", BROKEN_CHIP, "--node", node, "--chip", "1")
            chain.until_replaced(1, first[1])
            chain.pace.allow(STEPS)
            result = chain.ends()
            second = chain.uids()
            assert second[1] != first[1] and (second[0] == first[0]) == (level == "pod")
            assert node not in (chain.node(0), chain.node(1))
            incidents = chain.incidents()
            watch.until(lambda job: job["status"]["conditions"][-1]["type"] == "Succeeded")
    assert_whole(result, incidents, kept=[], again_from=SAVED + 1)
    assert_restarted(incidents, level)
    assert incidents[0]["cause"].startswith(f"CardUnhealthy of pod {PODS[1]} on node {node}"), incidents
    told = [each["type"] for each in conditions(watch)]
    assert "Restarting" not in told, f"pods that were taken away from a broken chip have not failed: {told}"
