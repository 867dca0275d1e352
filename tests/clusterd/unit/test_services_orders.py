"""Orders of a platform: every check, in the reference's order and words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evertrain.clusterd.model import Job
from evertrain.clusterd.services import orders
from tests.clusterd.services import a_job

SUPER_PODS = {"node-0": 0, "node-1": 1}
NIC = {"node-0": (["0"], [True])}


def nics(job: Job | None, registered: bool, nodes: dict[str, tuple[list[str], list[bool]]]) -> str:
    try:
        orders.switch_nics("j", job, registered, nodes, {**SUPER_PODS, "node-2": -1}.get)
    except orders.Refused as refused:
        return str(refused)
    return ""


def test_link_failover_is_checked_in_order() -> None:
    job = a_job("j", nodes=4)
    assert nics(None, False, {}) == "job:j not exist"
    assert nics(replace(job, status="pending"), False, {}) == "job:j is not registered"
    assert nics(replace(job, status="pending"), True, {}) == "job:j is not running"
    assert nics(job, True, {"node-9": ([], [])}) == "node:node-9 not exist in job:j"
    assert nics(job, True, {"node-3": (["0"], [True])}) == "node:node-3 not exist in job:j", "it has no device-info"
    assert nics(job, True, {"node-0": (["9"], [])}) == "dev and op length is not equal"
    assert nics(job, True, {"node-0": ([], [])}) == "dev or op is empty"
    assert nics(job, True, {}) == "dev or op is empty"
    assert nics(job, True, {"node-2": (["9"], [True])}) == "device:9 not exist in node:node-2"
    assert nics(job, True, {"node-2": (["0"], [True])}) == "node:node-2 should operate in superPodID"
    assert nics(job, True, NIC) == ""


def test_link_failover_goes_to_the_ranks_of_the_devices() -> None:
    wanted = {"node-1": (["1", "0"], [True, False]), "node-0": (["1"], [True])}
    order = orders.switch_nics("j", a_job("j"), True, wanted, SUPER_PODS.get)
    assert order.ops == {1: True, 2: False, 3: True}


def stress(job: Job | None, registered: bool, nodes: dict[str, list[int]], everywhere: list[int] | None = None) -> str:
    try:
        orders.stress_test("j", job, registered, nodes, everywhere or [])
    except orders.Refused as refused:
        return str(refused)
    return ""


def test_stress_test_is_checked_in_order() -> None:
    job = a_job("j", status="pending")  # that it runs is not asked
    assert stress(None, False, {}) == "job:j not exist"
    assert stress(job, False, {"node-0": [7]}) == "job:j is not registered"
    assert stress(job, True, {"node-9": [7]}) == "op:7 not exist in support operation:[0 1]"
    assert stress(job, True, {}, [-1]) == "op:-1 not exist in support operation:[0 1]"
    assert stress(job, True, {"node-9": [1, 1]}) == "node:node-9 stress test ops should not repeat"
    assert stress(job, True, {}, [0, 0]) == "node:AllNodes stress test ops should not repeat"
    assert stress(job, True, {}) == "stress test node is nil"
    assert stress(job, True, {"node-0": []}) == "node:node-0 stress test ops is 0"
    assert stress(job, True, {"node-9": [0]}) == "node:node-9 not exist in job:j"
    assert stress(job, True, {"node-1": [1, 0]}) == ""


def test_stress_test_goes_to_the_ranks_of_the_nodes() -> None:
    job = a_job("j")
    assert orders.stress_test("j", job, True, {"node-1": [1, 0]}, []).ops == {2: (1, 0), 3: (1, 0)}
    everywhere = orders.stress_test("j", job, True, {"node-1": [1]}, [0])
    assert everywhere.ops == {rank: (0,) for rank in range(4)}, "it takes the place of single nodes"


@pytest.mark.parametrize("lost", ["node", "devices"])
def test_a_pod_without_a_place_has_no_ranks_to_be_ordered(lost: str) -> None:
    job = a_job("j")
    pod = replace(job.pods[1], node="") if lost == "node" else replace(job.pods[1], devices=())
    assert set(orders.ranks_of_nodes(replace(job, pods={0: job.pods[0], 1: pod}))) == {"node-0"}
