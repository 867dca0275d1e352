"""A training in pods of real nodes, and what befalls it: each test ends with the weights of a run without faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clusterd.chain import NAME, PODS, Chain
from tests.clusterd.closing import assert_kept_processes, assert_told
from tests.clusterd.e2e.test_chain import BROKEN_CHIP, FAULT_STEP, begin
from tests.clusterd.e2e.test_killed import STATES
from tests.kubernetes_cluster.cluster import order
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = [pytest.mark.own_cluster]

ALL = (0, 1, 2, 3)


def test_undisturbed(chain: Chain) -> None:
    chain.job.strategies = "recover"
    begin(chain)
    chain.pace.allow(STEPS)
    assert_same_end(chain.ends())


def test_a_killed_process_is_replaced_in_its_pod(chain: Chain) -> None:
    chain.job.strategies = "recover-in-place"
    pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
    chain.pace.allow(STEPS)
    result = chain.ends()
    assert chain.uids() == pods
    (incident,) = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1, 2)
    assert_told(incident, "recover-in-place", {3})


@pytest.mark.parametrize("pod", [pytest.param(1, id="a-pod"), pytest.param(0, id="the-first-pod")])
def test_a_broken_chip_moves_its_pod_to_the_spare_node(chain: Chain, pod: int) -> None:
    chain.job.strategies = "recover-in-place,recover"
    chain.job.environment["TTP_RETRY_TIMES"] = "60"
    pods = begin(chain)
    node = chain.node(pod)
    chain.up.evertrain("inject", "chip", BROKEN_CHIP, "--node", node, "--chip", "1")
    try:
        chain.until_replaced(pod, pods[pod])
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[1 - pod] == pods[1 - pod] and now[pod] != pods[pod]
        assert chain.node(pod) not in (node, chain.node(1 - pod))
        incidents = chain.incidents()
    finally:
        chain.up.evertrain("inject", "clear")
    assert_same_end(result)
    survivors, ranks = ((0, 1), {2, 3}) if pod else ((2, 3), {0, 1})
    assert_kept_processes(result, *survivors)
    assert_told(incidents[-1], "recover", ranks)


def test_a_node_is_lost(chain: Chain) -> None:
    """Its kubelet and its pods are gone, and its cable is dead. The survivors are the same processes all along."""
    chain.job.strategies = "recover"
    pods = begin(chain)
    node = chain.node(1)
    order("kill", node=node)
    chain.until_replaced(1, pods[1])
    chain.pace.allow(STEPS)
    result = chain.ends()
    now = chain.uids()
    assert now[0] == pods[0] and now[1] != pods[1]
    assert chain.node(1) not in (node, chain.node(0))
    incidents = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    assert_told(incidents[-1], "recover", {2, 3})


def test_hot_switching(chain: Chain) -> None:
    chain.job.labels = '    subHealthyStrategy: "hotSwitch"'
    pods = begin(chain)
    node = chain.node(1)
    chain.pace.hold_joining()
    chain.up.evertrain("inject", "sub-health", "--node", node)
    try:
        chain.until(lambda: chain.pace.joining(2) and chain.pace.joining(3), "the processes of the backup")
        chain.to(FAULT_STEP + 3)
        assert chain.uids() == pods
        chain.pace.let_join()
        chain.until(lambda: chain.told_to_halt() > FAULT_STEP + 3 or _pauses(chain) == len(ALL), "the order to halt")
        chain.pace.allow(STEPS)
        result = chain.ends()
        (incident,) = chain.incidents()
        found = chain.up.get("pods", "-l", f"job-name={NAME}")["items"]
    finally:
        chain.up.evertrain("inject", "clear")
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    assert_told(incident, "hotSwitch", {2, 3}, all_phases=False)
    (backup,) = [each for each in found if each["metadata"]["name"] not in PODS]
    assert backup["spec"]["nodeName"] not in (node, chain.node(0))


def _pauses(chain: Chain) -> int:
    return sum(file.read_text().count(": Pause\n") for file in chain.job.folder.glob("ttp-log/*"))


@pytest.mark.parametrize("part", ["ascend-operator", "clusterd"])
def test_a_part_is_killed_in_the_middle_of_a_recovery(chain: Chain, part: str) -> None:
    """All of its pods, while a pod of the training is being replaced."""
    chain.job.strategies = "recover"
    select = ("-n", "mindx-dl", "-l", f"app.kubernetes.io/name={part}")

    def kill() -> None:
        chain.until_recovery(STATES)
        chain.up.kubectl("delete", "pods", *select, "--force", "--grace-period=0", "--wait=false")

    disturbed(chain, kill)


def test_the_api_server_restarts_in_the_middle_of_a_recovery(chain: Chain) -> None:
    chain.job.strategies = "recover"

    def restart() -> None:
        chain.until_recovery(STATES)
        order("restart-api", seconds=5)

    disturbed(chain, restart)


def disturbed(chain: Chain, disturb: Callable[[], None]) -> None:
    """A process dies, and meanwhile this happens."""
    with ThreadPoolExecutor(1) as background:
        disturbing = background.submit(disturb)
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        chain.pace.allow(STEPS - 1)
        disturbing.result()
    chain.pace.allow(STEPS)
    result = chain.ends()
    now = chain.uids()
    assert now[0] == pods[0] and now[1] != pods[1]
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)


def test_a_cable_is_cut_for_20_s(chain: Chain) -> None:
    """Whatever is decided about it, the training comes to the same end, and the first pod lives."""
    chain.job.strategies = "retry,recover-in-place,recover"
    pods = begin(chain)
    node = chain.node(1)
    order("cut", node=node)
    chain.pace.allow(STEPS)
    threading.Event().wait(20)
    order("mend", node=node)
    result = chain.ends()
    assert chain.uids()[0] == pods[0]
    assert_same_end(result)
