"""One fault of each level, injected by hand: what becomes of a job on that chip or node, and that others may use it
again when the fault is over.

The pods only sleep. A second job (the witness) proves that nothing happens: if its pod has been replaced for a fault
that came later, ClusterD and its rescheduler are through with the earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.clusterd.e2e.levels import Cluster
from tests.embedded.up import Up, needs_kubectl, small_job

pytestmark = [needs_kubectl, pytest.mark.matrix]

FORCE = '    fault-scheduling: "force"'
ALONE = FORCE + '\n    pod-rescheduling: "on"'

CHIP = {
    "NotHandleFault": "80E21007",
    "SubHealthFault": "81AD8605",
    "RestartRequest": "80C98002",
    "RestartBusiness": "8C204E00",
    "FreeRestartNPU": "8C0E4E00",
    "RestartNPU": "8C03A000",
    "PreSeparateNPU": "8118043C",
    "SeparateNPU": "80E18402",
}
NODE = {"NotHandleFault": "0100000D", "PreSeparateFault": "0000001D", "SeparateFault": "2C000031"}
SWITCH = {
    "NotHandle": "[0x00f103b6,155909,na,na]",
    "SubHealthFault": "[0x00f103b6,155908,na,na]",
    "RestartRequest": "[0x00f1fef5,155914,npu,na]",
    "Separate": "[0x08520003,na,npu,na]",
}
PUBLIC = {
    "NotHandleFault": "100001011",
    "SubHealthFault": "010001001",
    "PreSeparateNPU": "110001022",
    "SeparateNPU": "220001001",
}
OFTEN = "80E18005"
"""Three times in a day, and the chip is kept away by hand."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--nodes", "3", "--npus", "4", "--clusterd-addr", "127.0.0.1:0", "-v")
    up = Up(tmp_path_factory.mktemp("faults"), *options)
    try:
        found = Cluster(up)
        # What lasts as long as the nodes do is started by their first pods, and no test is blamed for it.
        found.start("first", 3, 4)
        found.delete("first")
        yield found
    finally:
        assert up.end() == 0, up.lines


@pytest.fixture(autouse=True)
def _clean(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.up.evertrain("inject", "clear")
    cluster.up.kubectl("delete", "acjob", "--all")


def begin(cluster: Cluster, labels: str) -> tuple[dict[str, str], str, str]:
    """A job of two pods: their uids, the node and a chip of the worker."""
    cluster.start("job", 2, 2, labels=labels)
    chip = str(min(cluster.chips("job-worker-0")))
    return cluster.uids("job"), cluster.node("job-worker-0"), chip


def leaves(cluster: Cluster, labels: str, *fault: str) -> None:
    """The worker's chip, or its node, gets the fault. CHIP stands for the chip's number."""
    before, node, chip = begin(cluster, labels)
    cluster.inject(node, *fault, chip=chip)
    alone = "pod-rescheduling" in labels
    cluster.until_others("job", before, 1 if alone else 2)
    assert (cluster.uids("job")["job-master-0"] == before["job-master-0"]) == alone
    assert cluster.node("job-worker-0") != node or int(chip) not in cluster.chips("job-worker-0")


def stays(cluster: Cluster, labels: str, *faults: tuple[str, ...]) -> None:
    before, node, chip = begin(cluster, labels)
    for fault in faults:
        cluster.inject(node, *fault, chip=chip)
        cluster.until_said(fault[1])
    cluster.witness()
    assert cluster.uids("job") == before


def kept_away(cluster: Cluster, labels: str = "") -> None:
    """Nobody, or nobody with these labels, gets what has the fault, until it is over."""
    cluster.delete("job")
    cluster.apply("filler", 3, 4, labels=labels)
    cluster.until_unschedulable("filler")
    cluster.up.evertrain("inject", "clear")
    cluster.until_running("filler")


def given_out(cluster: Cluster) -> None:
    """Whoever comes gets it, fault or not."""
    cluster.delete("job")
    cluster.start("filler", 3, 4)


def test_harmless_faults_do_nothing(cluster: Cluster) -> None:
    """All of them at once. Sub-health, too, unless the job says otherwise."""
    stays(
        cluster,
        FORCE,
        ("chip", CHIP["NotHandleFault"], "--chip", "CHIP"),
        ("chip", CHIP["SubHealthFault"], "--chip", "CHIP"),
        ("node", NODE["NotHandleFault"]),
        ("switch", SWITCH["NotHandle"]),
        ("switch", SWITCH["SubHealthFault"]),
        ("public", PUBLIC["NotHandleFault"], "--chip", "CHIP"),
        ("public", PUBLIC["SubHealthFault"], "--chip", "CHIP"),
    )
    given_out(cluster)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("chip", CHIP["PreSeparateNPU"], "--chip", "CHIP"), id="chip"),
        pytest.param(("node", NODE["PreSeparateFault"]), id="node"),
        pytest.param(("switch", SWITCH["Separate"], "--level", "PreSeparate"), id="switch"),
        pytest.param(("public", PUBLIC["PreSeparateNPU"], "--chip", "CHIP"), id="public"),
    ],
)
def test_what_is_only_to_be_left_alone(cluster: Cluster, fault: tuple[str, ...]) -> None:
    """Who has it keeps it, and nobody gets it after that."""
    stays(cluster, FORCE, fault)
    kept_away(cluster)


@pytest.mark.parametrize(
    ("level", "alone"),
    [
        ("RestartRequest", False),
        ("RestartBusiness", True),
        ("FreeRestartNPU", False),
        ("RestartNPU", True),
        ("SeparateNPU", False),
        ("SeparateNPU", True),
    ],
)
def test_a_chip_that_its_pod_has_to_leave(cluster: Cluster, level: str, alone: bool) -> None:
    leaves(cluster, ALONE if alone else FORCE, "chip", CHIP[level], "--chip", "CHIP")
    kept_away(cluster)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("node", NODE["SeparateFault"]), id="node"),
        pytest.param(("switch", SWITCH["RestartRequest"]), id="switch-restart"),
        pytest.param(("switch", SWITCH["Separate"]), id="switch"),
        pytest.param(("public", PUBLIC["SeparateNPU"], "--chip", "CHIP"), id="public"),
    ],
)
def test_a_node_or_more_that_its_pods_have_to_leave(cluster: Cluster, fault: tuple[str, ...]) -> None:
    leaves(cluster, FORCE, *fault)
    kept_away(cluster)


@pytest.mark.parametrize("strategy", ["graceExit", "forceExit"])
def test_a_job_that_wants_no_chip_in_bad_health(cluster: Cluster, strategy: str) -> None:
    labels = f"{FORCE}\n    subHealthyStrategy: {strategy}"
    leaves(cluster, labels, "sub-health", "--chip", "CHIP")
    kept_away(cluster, labels)


def test_a_link_that_stays_down(cluster: Cluster) -> None:
    """At first it is nothing; after 20 s nobody else gets its chip, until it has been up for a while."""
    before, node, chip = begin(cluster, FORCE)
    cluster.inject(node, "link-down", "--chip", chip)
    cluster.until_said("PreSeparateNPU")
    cluster.witness()
    assert cluster.uids("job") == before
    kept_away(cluster)


def test_without_the_label_nobody_is_sent_away(cluster: Cluster) -> None:
    stays(cluster, "", ("chip", CHIP["SeparateNPU"], "--chip", "CHIP"))
    kept_away(cluster)


def test_a_fault_that_comes_often_keeps_its_chip_away_until_somebody_says_otherwise(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.inject("node-1", "chip", OFTEN, "--chip", "2")
        cluster.inject("node-1", "chip", OFTEN, "--chip", "2", "--clear")
    cluster.until_said("ManuallySeparateNPU")
    cluster.apply("filler", 3, 4)
    cluster.until_unschedulable("filler")
    cluster.up.evertrain("inject", "clear")
    cluster.until_running("filler")


def test_a_chip_that_clusterd_isolates_for_its_history(cluster: Cluster) -> None:
    """By the administrator's policy; half a minute after the fault, if no other chip of the job has the same."""
    policy = (
        "enabled: true\nseparate:\n  fault_window_hours: 24\n  fault_threshold: 1\nrelease:\n  fault_free_hours: -1\n"
    )
    cluster.put_config("clusterd-config-cm", "cluster-system", {"manually_separate_policy.conf": policy})
    try:
        before, node, chip = begin(cluster, FORCE)
        code = CHIP["RestartBusiness"]
        cluster.inject(node, "chip", code, "--chip", chip)
        cluster.until_others("job", before, 2)

        def isolated() -> bool:
            listed = cluster.config("clusterd-manual-info-cm", "cluster-system").get(node) or "{}"
            return f"Ascend910-{chip}" in json.loads(listed).get("Total", [])

        cluster.until(isolated, "the chip in the list of isolated ones")
        cluster.up.evertrain("inject", "chip", code, "--node", node, "--chip", chip, "--clear")
        cluster.delete("job")
        cluster.apply("filler", 3, 4)
        cluster.until_unschedulable("filler")
        cluster.up.kubectl("delete", "configmap", "clusterd-manual-info-cm", "-n", "cluster-system")
        cluster.until_running("filler")
    finally:
        cluster.up.kubectl("delete", "configmap", "clusterd-config-cm", "-n", "cluster-system")


def test_a_job_of_one_pod_is_told_in_the_timeline(cluster: Cluster) -> None:
    cluster.up.kubectl("apply", "-f", "-", stdin=small_job("job", "exec sleep 600", workers=0, labels=FORCE))
    cluster.until_running("job", 1)
    before = cluster.uids("job")
    chip = str(min(cluster.chips("job-master-0")))
    cluster.up.evertrain("inject", "chip", CHIP["SeparateNPU"], "--node", cluster.node("job-master-0"), "--chip", chip)
    cluster.until_others("job", before, 1)
    (incident,) = cluster.incidents("job")
    assert (incident["decision"], incident["outcome"], incident["ok"]) == ("job-rescheduling", "rescheduled", True)
    assert "CardUnhealthy of pod job-master-0" in incident["reason"]
