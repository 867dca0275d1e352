"""Hot switching through all parts: the pod of a sub-healthy node is replaced while its job trains.

`subHealthyStrategy: hotSwitch` as in the documents; the script of the job is theirs, too. Every test ends with the
weights of a run without faults, and no step is lost or done twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusterd.chain import PODS, Chain, running
from tests.clusterd.closing import assert_adds_up, assert_kept_processes, assert_told
from tests.clusterd.e2e.test_chain import FAULT_STEP, begin
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = needs_kubectl

MASTER, WORKER = PODS
LABEL = '    subHealthyStrategy: "hotSwitch"'
MEANWHILE = FAULT_STEP + 3
"""The step to which training comes while the backup starts."""


def pods(chain: Chain) -> dict[str, dict[str, Any]]:
    """Of the job, with backups, by their names."""
    found = chain.up.get("pods", "-l", "job-name=train")["items"]
    return {each["metadata"]["name"]: each for each in found}


def sicken(chain: Chain, pod: int = 1) -> str:
    """The node of a pod; its name."""
    node = chain.node(pod)
    chain.up.evertrain("inject", "sub-health", "--node", node)
    return node


def trains_beside_its_backup(chain: Chain) -> str:
    """The processes of the backup are there, and not yet ready. Its name."""
    chain.until(lambda: chain.pace.joining(2) and chain.pace.joining(3), "the processes of the backup")
    chain.to(MEANWHILE)
    names = pods(chain).keys()
    assert names > {MASTER, WORKER}, names
    (backup,) = names - {MASTER, WORKER}
    return backup


def halting(chain: Chain) -> int:
    """How many ranks have been told to."""
    return sum(file.read_text().count(": Pause\n") for file in chain.job.folder.glob("ttp-log/*"))


def assert_undisturbed(chain: Chain, before: list[str]) -> None:
    """To its end, in its own pods and processes."""
    chain.pace.allow(STEPS)
    result = chain.ends()
    chain.until(lambda: pods(chain).keys() == {MASTER, WORKER}, "the end of the backup")
    assert chain.uids() == before
    assert_same_end(result)
    assert not any(result.events.values()), f"nobody was stopped or paused: {result.events}"


def assert_called_off(incident: dict[str, Any]) -> None:
    assert (incident["outcome"], incident["ok"]) == ("cancelled", True), incident
    assert_adds_up(incident)


def test_a_backup_takes_the_place_of_a_pod_on_a_sub_healthy_node(tmp_path: Path) -> None:
    """By the label alone, without a strategy: the document asks for nothing else."""
    with running(tmp_path, "", labels=LABEL) as chain:
        before = begin(chain)
        chain.pace.hold_joining()
        node = sicken(chain)
        backup = trains_beside_its_backup(chain)
        assert chain.uids() == before
        chain.pace.let_join()
        chain.until(lambda: halting(chain) == 4, "the order to halt after this step")
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = pods(chain)
        (incident,) = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    for rank, repair in enumerate(["RT_SEND", "RT_SEND", "RT_RECV_REPAIR", "RT_RECV_REPAIR"]):
        names = [name for name, _ in result.events[rank]]
        assert names == ["stream_sync", "rebuild_group", repair, "rollback"], f"rank {rank}: halted once, {names}"
    assert now.keys() == {MASTER, backup}
    assert now[MASTER]["metadata"]["uid"] == before[0]
    assert now[backup]["spec"]["nodeName"] not in (node, now[MASTER]["spec"]["nodeName"])
    assert_told(incident, "hotSwitch", {2, 3}, all_phases=False)
    phases = [phase["phase"] for phase in incident["phases"]]
    assert phases == ["detect", "backup", "get ready", "delete pod", "migrate"], "training halts in the last two"


@pytest.mark.matrix
def test_the_node_is_well_again_before_the_switch(tmp_path: Path) -> None:
    with running(tmp_path, "recover", labels=LABEL) as chain:
        before = begin(chain)
        chain.pace.hold_joining()
        node = sicken(chain)
        backup = trains_beside_its_backup(chain)
        chain.up.evertrain("inject", "sub-health", "--node", node, "--clear")
        chain.until(lambda: backup not in pods(chain), "the end of the backup, while training goes on")
        assert_undisturbed(chain, before)
        (incident,) = chain.incidents()
    assert_called_off(incident)
    assert "well again" in incident["end"]


@pytest.mark.matrix
def test_without_a_spare_node_sub_health_is_ignored(tmp_path: Path) -> None:
    with running(tmp_path, "recover", "--nodes", "2", labels=LABEL) as chain:
        before = begin(chain)
        sicken(chain)
        chain.to(MEANWHILE)
        chain.until(lambda: "RecoveryCancelled" in events(chain), "the end of the search for a spare node")
        assert_undisturbed(chain, before)
        text = events(chain)["RecoveryCancelled"]
        (incident,) = chain.incidents()
    assert_called_off(incident)
    assert "no spare node" in text and text.endswith("sub-health is ignored")


@pytest.mark.matrix
def test_the_sub_health_of_the_first_pod_is_told_and_ignored(tmp_path: Path) -> None:
    with running(tmp_path, "recover", labels=LABEL) as chain:
        before = begin(chain)
        node = sicken(chain, 0)
        chain.until(lambda: "RecoveryCancelled" in events(chain), "word of a node that is not switched")
        chain.to(MEANWHILE)
        assert_undisturbed(chain, before)
        text = events(chain)["RecoveryCancelled"]
        (incident,) = chain.incidents()
    assert (incident["outcome"], incident["ok"]) == ("cancelled", True), incident
    assert "never switched" in text and text.endswith("sub-health is ignored")
    assert {(fault["rank"], fault["node"]) for fault in incident["faults"]} == {(0, node), (1, node)}


def events(chain: Chain) -> dict[str, str]:
    """Of the AscendJob: reason to message."""
    found = chain.up.get("events", "--field-selector", "involvedObject.kind=AscendJob")["items"]
    return {each["reason"]: each["message"] for each in found}


@pytest.mark.matrix
def test_training_ends_before_the_backup_is_ready(tmp_path: Path) -> None:
    with running(tmp_path, "recover", labels=LABEL) as chain:
        before = begin(chain)
        chain.pace.hold_joining()
        sicken(chain)
        trains_beside_its_backup(chain)
        chain.to(STEPS)
        chain.pace.let_join()
        assert_undisturbed(chain, before)
        (incident,) = chain.incidents()
    assert_called_off(incident)
