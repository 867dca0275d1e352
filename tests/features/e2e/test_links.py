"""Link failover through all parts, over real interfaces: two cables between two nodes, and what goes through each."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from tests.clusterd.chain import NAME, Chain, running
from tests.clusterd.closing import assert_whole
from tests.embedded.up import evertrain, needs_kubectl
from tests.features.e2e import cables
from tests.features.e2e.cables import BACKUP, PRIMARY, Cables
from tests.launch.harness import ROOT
from tests.taskd.documents import START
from tests.taskd.e2e.test_chain import STEPS

pytestmark = [needs_kubectl, cables.needs_cables, pytest.mark.matrix, pytest.mark.timeout(500)]

TWO_NODES = ("--nodes", "2", "--node-label", "accelerator-type=module-a3-16-super-pod", "--shared-network")
CLIENT = ROOT / "examples" / "resumable" / "link-failover" / "switch_nic.py"
STEP_BYTES = 4 * 5313
"""Of the gradients of a step."""
WORDS = 2000
"""Bytes; neighbours ask now and then for each other's address."""


def switch(chain: Chain, *options: str) -> tuple[int, str]:
    return chain.halts_for(*evertrain("switch-nic", NAME, *options))


def switch_by_grpc(chain: Chain, node: str, devices: list[str], ops: list[bool]) -> tuple[int, str]:
    """As a platform does it, with the job's token."""
    job = chain.up.get("acjob", NAME)["metadata"]["uid"]
    secret = chain.up.get("secret", f"{NAME}-clusterd-token-{job}")["data"]["token"]
    chain.up.environment["EVERTRAIN_TOKEN"] = base64.b64decode(secret).decode()
    service = chain.up.get("service", "clusterd-grpc-svc", "-n", "mindx-dl")["spec"]
    address = f"{service['clusterIP']}:{service['ports'][0]['port']}"
    return chain.halts_for(sys.executable, CLIENT, address, job, node, json.dumps(devices), json.dumps(ops))


def used(chain: Chain, links: Cables) -> set[str]:
    """The cables over which the next step is trained. Nothing may trickle through the other one."""
    before = {name: links.carried(name) for name in (PRIMARY, BACKUP)}
    chain.to(chain.pace.step(0) + 1)
    carried = {name: links.carried(name) - bytes for name, bytes in before.items()}
    busy = {name for name, bytes in carried.items() if bytes > STEP_BYTES}
    assert all(carried[name] < WORDS for name in carried.keys() - busy), carried
    return busy


def test_traffic_moves_to_the_other_cable_and_back(tmp_path: Path) -> None:
    with (
        cables.laid() as links,
        running(tmp_path, "recover", *TWO_NODES, start=cables.START + START) as chain,
    ):
        chain.start(f"--steps={STEPS}", "--taskd")
        chain.to(2)
        pods = chain.uids()
        assert used(chain, links) == {PRIMARY}

        code, said = switch(chain, "--op", "true")
        assert code == 0 and "switch nic finish" in said, said
        assert used(chain, links) == {BACKUP}

        links.pull_out(PRIMARY)
        code, said = switch(chain, "--node", "node-0", "--dev", "[device0,device1]", "--op", "[false,false]")
        assert code == 1 and "switch nic failed" in said, said
        assert used(chain, links) == {BACKUP}, "and training goes on"

        links.plug_in(PRIMARY)
        assert switch_by_grpc(chain, "node-0", ["0", "1"], [False, False])[0] == 0
        assert used(chain, links) == {PRIMARY, BACKUP}, "those of node-1 have not been moved"
        assert switch_by_grpc(chain, "node-1", ["0", "1"], [False, False])[0] == 0
        assert used(chain, links) == {PRIMARY}

        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        incidents = chain.incidents(4)
    assert_whole(result, incidents)
    moved = ["detect", "pause", "switch links", "continue"]
    for number, incident in enumerate(incidents):
        phases = [phase["phase"] for phase in incident["phases"]]
        assert incident["outcome"] == "recovered" and incident["ok"], incident
        assert phases == moved if number != 1 else phases[:3] == moved[:3] and "stop" in phases, incident
