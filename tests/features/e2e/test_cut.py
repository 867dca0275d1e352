"""A node is cut off from the network while its pod trains: connections hang, and nobody is told."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain.clusterd.timeline.incident import milliseconds, wall_time
from tests.clusterd.chain import NAME, Chain, running
from tests.clusterd.closing import assert_adds_up, assert_kept_processes, assert_told
from tests.clusterd.e2e.test_chain import FAULT_STEP, begin
from tests.embedded.networks import AS_ORDINARY_USER, needs_networks
from tests.embedded.up import evertrain, needs_kubectl
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = [needs_kubectl, needs_networks, pytest.mark.matrix, pytest.mark.timeout(500)]

SEEN = 60.0
"""Seconds; a rank counts as lost after 10 without a word. How long it takes is measured by `make bench-chain`."""
EVERYBODY = ()


def cut(chain: Chain, pod: int = 1) -> str:
    """The node of that pod, in the middle of the training."""
    node = chain.node(pod)
    assert chain.up.evertrain("node", "cut", node).stdout == f"{node} cut off\n"
    chain.pace.allow(STEPS)
    return node


def incidents(chain: Chain) -> list[dict[str, Any]]:
    """Those that are not over, too."""
    told = chain.up.evertrain("timeline", NAME, "-o", "json", check=False)
    return list(json.loads(told.stdout)) if told.returncode == 0 else []


@pytest.mark.parametrize(
    "program", [EVERYBODY, (sys.executable, "-c", AS_ORDINARY_USER, *evertrain())], ids=["here", "ordinary-user"]
)
def test_a_node_is_cut_off_and_joined_again(tmp_path: Path, program: tuple[str, ...]) -> None:
    """The training itself sees it, long before the cluster would. What becomes of it depends on who hears of what in
    time: the processes start again where they are, or in another pod."""
    strategies = "retry,recover-in-place,recover"
    with running(tmp_path, strategies, "--own-network", "--node-grace", "300", program=program) as chain:
        pods = begin(chain)
        there = chain.training(1)
        began = wall_time(milliseconds(time.time()))
        node = cut(chain)
        first, *_ = chain.until(lambda: incidents(chain), "somebody to see it", limit=SEEN)
        print(f"{node} was ordered to be cut off at {began}, and that was seen at {first['opened']}")
        assert [chain.pace.step(rank) for rank in range(4)] == [FAULT_STEP] * 4, "they hang in this step"
        assert chain.training(1) == there, "of which those on the node have heard nothing"
        (row,) = [row.split() for row in chain.up.evertrain("node", "list").stdout.splitlines() if row.startswith(node)]
        assert row[1:4] == ["on", "cut", "Ready"]
        assert chain.up.evertrain("node", "join", node).stdout == f"{node} joined\n"
        result = chain.ends()
        assert chain.uids()[0] == pods[0]
        found = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    for incident in found:
        assert_adds_up(incident)
    assert {fault["rank"] for fault in found[0]["faults"]} == {2, 3}
    assert found[-1]["outcome"] == "recovered" and found[-1]["decision"] in strategies, found[-1]


@pytest.mark.parametrize("pod", [1, 0], ids=["a-pod", "the-first-pod"])
def test_a_node_that_stays_cut_off_is_left(tmp_path: Path, pod: int) -> None:
    """Its pod starts again elsewhere, the first one where the others look for it: at the address of its Service. When
    the node is back, it ends what it still has."""
    options = ("--own-network", "--node-grace", "15")
    with running(tmp_path, "recover", *options, TTP_RETRY_TIMES="60") as chain:
        pods = begin(chain)
        left = [psutil.Process(pid) for pid in chain.training(pod)]
        node = cut(chain, pod)
        result = chain.ends()
        now = chain.uids()
        assert now[1 - pod] == pods[1 - pod] and now[pod] != pods[pod]
        assert chain.node(pod) not in (node, chain.node(1 - pod))
        assert all(process.is_running() for process in left), "nobody could tell them"
        found = chain.incidents()
        chain.up.evertrain("node", "join", node)
        chain.until(lambda: not any(process.is_running() for process in left), "the end of what was left there")
    assert_same_end(result)
    survivors, ranks = ((0, 1), {2, 3}) if pod else ((2, 3), {0, 1})
    assert_kept_processes(result, *survivors)
    assert_told(found[-1], "recover", ranks)
