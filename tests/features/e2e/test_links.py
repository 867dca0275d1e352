"""Link failover through all parts, over real interfaces: the two NICs of each node, and what goes through them."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusterd.chain import NAME, PODS, Chain, running
from tests.clusterd.closing import assert_told, assert_whole
from tests.clusterd.e2e.test_chain import BROKEN_CHIP
from tests.embedded.networks import needs_networks
from tests.embedded.up import evertrain, needs_kubectl
from tests.features.e2e.test_online import NETWORK
from tests.launch.harness import ROOT
from tests.taskd.documents import START
from tests.taskd.e2e.test_chain import STEPS
from tests.taskd.paced import LIMIT

pytestmark = [needs_kubectl, needs_networks]

TWO_NODES = ("--own-network", "--nodes", "2", "--node-label", "accelerator-type=module-a3-16-super-pod")
CLIENT = ROOT / "examples" / "resumable" / "link-failover" / "switch_nic.py"
NODES = ("node-0", "node-1")
PRIMARY, BACKUP = "nic0", "nic1"
BOTH = tuple(f"--node={node}" for node in NODES)
CHIPS = "huawei.com/Ascend910"
LINKS = 'export TASKD_NICS="eth0,eth1"\n'
STEP_BYTES = 4 * 5313
"""Of the gradients of a step. What MindIO and TaskD say to each other, always by the primary link, is far less."""


def switch(chain: Chain, *options: str) -> tuple[int, str]:
    return chain.halts_for(*evertrain("switch-nic", NAME, *options))


def switch_by_grpc(chain: Chain, node: str, devices: list[str], ops: list[bool]) -> tuple[int, str]:
    """As a platform does it, with the job's token."""
    job = chain.up.get("acjob", NAME)["metadata"]["uid"]
    secret = chain.up.get("secret", f"{NAME}-clusterd-token-{job}")["data"]["token"]
    chain.up.environment["EVERTRAIN_TOKEN"] = base64.b64decode(secret).decode()
    address = next(line.split()[-1].rstrip(".") for line in chain.up.lines if line.startswith("ClusterD leads"))
    return chain.halts_for(sys.executable, CLIENT, address, job, node, json.dumps(devices), json.dumps(ops))


def counted(chain: Chain) -> dict[tuple[str, str], int]:
    """Bytes that went through the NICs of both nodes so far."""
    told = json.loads(chain.up.evertrain("node", "nics", "-o", "json").stdout)
    return {(each["node"], each["nic"]): each["received"] + each["sent"] for each in told}


def carried(chain: Chain) -> dict[tuple[str, str], int]:
    """Bytes that go through them in the next two steps."""
    before = counted(chain)
    chain.to(chain.pace.step(0) + 2)
    return {nic: bytes - before[nic] for nic, bytes in counted(chain).items()}


def used(chain: Chain) -> set[str]:
    """The NICs over which the next two steps are trained. What leaves one node by a NIC comes to the other by its."""
    found = {nic for nic, bytes in carried(chain).items() if bytes > STEP_BYTES}
    first, second = ({nic for node, nic in found if node == each} for each in NODES)
    assert first == second, found
    return first


MOVED = ["detect", "pause", "switch links", "continue"]


@contextlib.contextmanager
def training(
    folder: Path, strategies: str = "recover", *options: str, without: str = "", **environment: str
) -> Iterator[Chain]:
    """By the first NIC of each node, until the test moves it; on nodes `without` these chips."""
    with running(folder, strategies, *TWO_NODES, *options, start=LINKS + START, **environment) as chain:
        if without:
            chain.up.evertrain("inject", "chip", BROKEN_CHIP, *BOTH, "--chip", without)
        chain.start(f"--steps={STEPS}", "--taskd")
        chain.to(2)
        assert used(chain) == {PRIMARY}
        yield chain


def ends_well(chain: Chain, count: int) -> list[list[str]]:
    """In the processes in which it began. The phases of so many switches."""
    chain.pace.allow(STEPS)
    result = chain.ends()
    incidents = chain.incidents(count)
    assert_whole(result, incidents)
    assert all(each["outcome"] == "recovered" and each["ok"] for each in incidents), incidents
    return [[phase["phase"] for phase in each["phases"]] for each in incidents]


def test_traffic_moves_to_the_other_nic_and_back(tmp_path: Path) -> None:
    with training(tmp_path) as chain:
        code, said = switch(chain, "--op", "true")
        assert code == 0 and "switch nic finish" in said, said
        assert used(chain) == {BACKUP}
        code, said = switch(chain, "--op", "false")
        assert code == 0 and "switch nic finish" in said, said
        assert used(chain) == {PRIMARY}
        assert ends_well(chain, 2) == [MOVED] * 2


@pytest.mark.matrix
def test_traffic_of_the_chips_that_the_document_names_moves(tmp_path: Path) -> None:
    """Its first two pairs of examples, with nodes of 16 chips, of which those pods have that are named."""
    with training(tmp_path, "recover", "--npus", "16", without="1-7,9-15") as chain:
        for name in PODS:
            assert chain.up.get("pod", name)["metadata"]["annotations"][CHIPS] == "Ascend910-0,Ascend910-8"
        for dev, op, nics in (
            ("[device0, device8]", "[true, true]", {BACKUP}),
            ("[device0, device8]", "[false, false]", {PRIMARY}),
            ("[device0]", "[true]", {PRIMARY, BACKUP}),
            ("[device0]", "[false]", {PRIMARY}),
        ):
            code, said = switch(chain, *BOTH, "--dev", dev, "--op", op)
            assert code == 0 and "switch nic finish" in said, said
            assert used(chain) == nics, (dev, op)
        assert ends_well(chain, 4) == [MOVED] * 4


@pytest.mark.matrix
def test_the_first_device_of_each_node_moves_and_the_others_stay(tmp_path: Path) -> None:
    """The document's second pair of examples."""
    with training(tmp_path) as chain:
        code, said = switch(chain, *BOTH, "--dev", "device0", "--op", "true")
        assert code == 0 and said.count("device 0 to the backup link") == 2, said
        assert used(chain) == {PRIMARY, BACKUP}
        code, said = switch(chain, *BOTH, "--dev", "device0", "--op", "false")
        assert code == 0 and said.count("device 0 to the primary link") == 2, said
        assert used(chain) == {PRIMARY}
        assert ends_well(chain, 2) == [MOVED] * 2


@pytest.mark.matrix
def test_a_nic_without_a_cable_takes_no_traffic(tmp_path: Path) -> None:
    with training(tmp_path) as chain:
        chain.up.evertrain("node", "cut", "node-0", "--nic", BACKUP)
        code, said = switch(chain, "--op", "true")
        assert code == 1 and "switch nic failed" in said, said
        assert used(chain) == {PRIMARY}, "and training goes on"

        chain.up.evertrain("node", "join", "node-0")
        code, said = switch(chain, *BOTH, "--dev", "[device0,device1]", "--op", "true")
        assert code == 0 and "switch nic finish" in said, said
        assert used(chain) == {BACKUP}

        assert switch_by_grpc(chain, "node-0", ["0", "1"], [False, False])[0] == 0
        assert PRIMARY in used(chain), "those of node-1 have not been moved; they connect to it by its link"
        assert switch_by_grpc(chain, "node-1", ["0", "1"], [False, False])[0] == 0
        assert used(chain) == {PRIMARY}
        failed, *others = ends_well(chain, 4)
        assert others == [MOVED] * 3
        assert failed[:3] == MOVED[:3] and "stop" in failed, failed


def break_the_link_in_use(chain: Chain) -> int:
    """The training, on its other links, hangs in the step after this one."""
    assert switch(chain, "--op", "true")[0] == 0
    assert used(chain) == {BACKUP}
    step = chain.pace.step(0)
    chain.up.evertrain("node", "cut", "node-0", "--nic", BACKUP)
    chain.pace.allow(STEPS)
    return step


@pytest.mark.matrix
def test_the_link_in_use_is_without_its_cable_for_a_while(tmp_path: Path) -> None:
    """All else goes by the other one, so nobody but the training notices, and that waits."""
    with training(tmp_path) as chain:
        step = break_the_link_in_use(chain)
        told = json.loads(chain.up.evertrain("timeline", NAME, "-o", "json").stdout)
        assert [each["closed"] is not None for each in told] == [True], "no more than the order"
        assert [chain.pace.step(rank) for rank in range(4)] == [step] * 4
        chain.pace.allow(step + 1)
        chain.up.evertrain("node", "join", "node-0")
        chain.to(step + 1)
        assert used(chain) == {BACKUP}
        assert switch(chain, "--op", "false")[0] == 0
        assert used(chain) == {PRIMARY}
        assert ends_well(chain, 2) == [MOVED] * 2


@pytest.mark.matrix
def test_the_link_in_use_breaks_for_good(tmp_path: Path) -> None:
    """Who stays where it is can't run the step again over a broken link; who starts again uses the first one."""
    with training(tmp_path, "retry,dump", **{LIMIT: "60"}) as chain:
        step = break_the_link_in_use(chain)
        result = chain.ends()
        _, incident = chain.incidents(2)
    assert_whole(result, [incident], kept=[], again_from=step + 1)
    assert_told(incident, "dump", set(), "fell back")
    assert [each["from"] for each in incident["fallbacks"]] == ["retry"], incident
    assert {str(fault["type"]) for fault in incident["faults"]} == {NETWORK}, incident


@pytest.mark.matrix
def test_the_first_link_breaks(tmp_path: Path) -> None:
    """MindIO and TaskD go by it: the pod is lost, and starts again on a node that its own has been left for."""
    with training(tmp_path, "recover", "--nodes", "3") as chain:
        node, pods = chain.node(1), chain.uids()
        chain.up.evertrain("node", "cut", node, "--nic", PRIMARY)
        chain.up.kubectl("cordon", node)
        chain.pace.allow(STEPS)
        result = chain.ends()
        (incident,) = chain.incidents()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1] and chain.node(1) != node
    assert_whole(result, [incident], kept=[0, 1])
    assert_told(incident, "recover", {2, 3})
