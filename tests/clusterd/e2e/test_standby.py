"""A pod that stands by takes the place of one that is replaced, through all parts: `standby-pods` of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusterd.chain import Chain, running
from tests.clusterd.e2e.test_chain import BROKEN_CHIP, FAULT_STEP, assert_kept_processes, assert_told, begin
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = [needs_kubectl, pytest.mark.matrix, pytest.mark.timeout(400)]

MEANWHILE = FAULT_STEP + 3


def pods(chain: Chain) -> dict[str, dict[str, Any]]:
    found = chain.up.get("pods", "-l", "job-name=train")["items"]
    return {each["metadata"]["name"]: each for each in found}


def standby_output(chain: Chain) -> Path:
    """Of all that have stood by: until they have a place, their rank is the one after those of the job."""
    return chain.job.folder / "pod2.out"


def until_one_stands_by(chain: Chain, name: str) -> None:
    chain.until(lambda: name in pods(chain), f"the pod {name}")
    output, count = standby_output(chain), int(name.rpartition("-")[2]) + 1
    ready = "this pod is ready to take a place"
    chain.until(lambda: output.exists() and output.read_text().count(ready) == count, f"{name} to be ready")


def test_it_takes_the_place_and_another_one_stands_by(tmp_path: Path) -> None:
    with running(tmp_path, 'recover"\n    standby-pods: "1') as chain:
        before = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        nodes = {chain.node(0), chain.node(1)}
        until_one_stands_by(chain, "train-standby-0")
        chain.to(MEANWHILE)
        now = pods(chain)
        assert now["train-master-0"]["metadata"]["uid"] == before[0]
        node = now["train-standby-0"]["spec"]["nodeName"]
        assert node not in nodes
        until_one_stands_by(chain, "train-standby-1")
        chain.up.evertrain("inject", "chip", BROKEN_CHIP, "--node", node, "--chip", "1")
        chain.until(lambda: "podType" not in pods(chain)["train-standby-1"]["metadata"]["annotations"], "its turn")
        chain.pace.allow(STEPS)
        chain.comes_to("Succeeded")
        with open(chain.job.folder / "pod1.out", "a") as output:
            output.write(standby_output(chain).read_text())  # what it has said since it has the place, too
        result = chain.result([0, 0])
        chain.until(lambda: pods(chain).keys() == {"train-master-0", "train-standby-1"}, "the end of those too many")
        first, second = chain.incidents(2)
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    assert_told(first, "recover", {3})
    assert_told(second, "recover", {2, 3})
