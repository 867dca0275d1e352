"""Link failover over real interfaces: groups of two pods, the two NICs of their nodes, and what goes through each."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from evertrain import aio
from evertrain.embedded.network.fabric import Fabric
from evertrain.embedded.power import JOINED, NICS, Cables
from tests.embedded.networks import needs_networks
from tests.embedded.nodes import pod, run, small_cluster

pytestmark = needs_networks

NUMBERS, TIMES = 500_000, 3
EXCHANGED = 4 * NUMBERS * TIMES
"""Bytes that each of two sends to the other, at least."""
WORDS = 100_000
"""Neighbours ask for each other's address, and a group says how it is reached."""

MEMBER = """
import os, sys, time
import torch, torch.distributed as dist
from evertrain.torch import failover, nics
from evertrain.torch.tft_collectives import Collectives

rank, folder, links = int(sys.argv[1]), sys.argv[2], ["eth0", "eth1"]
os.environ["TASKD_NICS"] = ",".join(links)
group = Collectives(rank, dist.FileStore(f"{folder}/store", -1), timeout=100.0).join("world", [0, 1])
number = 0
while True:
    while not os.path.exists(f"{folder}/order.{number}"):
        time.sleep(0.01)
    order, reason = open(f"{folder}/order.{number}").read(), "well"
    if order != "stay":
        while order == "backup again" and nics.why_down(links[1]):
            time.sleep(0.01)
        try:
            failover.move(rank, f"move {number}", [0, 1], [order.startswith("backup")] * 2, ended=lambda: False)
        except failover.LinkError as error:
            reason = str(error)
    total = torch.ones(%d) * (rank + 1)
    for _ in range(%d):
        group.allreduce([total]).wait()
    print(number, total[0].item(), reason, flush=True)
    number += 1
""" % (NUMBERS, TIMES)  # noqa: UP031 - it has braces


def test_bytes_go_through_the_nic_that_was_ordered(tmp_path: Path) -> None:
    async def main() -> None:
        fabric = await Fabric.start()
        try:
            async with small_cluster(tmp_path, 2, fabric=fabric) as cluster:
                environment = {
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "OMP_NUM_THREADS": "1",
                    "PATH": os.environ["PATH"],
                }
                variables = [{"name": name, "value": value} for name, value in environment.items()]
                for rank in range(2):
                    member = pod(
                        f"rank-{rank}", sys.executable, "-c", MEMBER, str(rank), str(tmp_path), nodeName=f"node-{rank}",
                        container={"env": variables},
                    )  # fmt: skip
                    await cluster.create(member)
                    await cluster.phase(f"rank-{rank}", "Running")
                done = 0

                async def exchange(order: str) -> tuple[list[str], list[str]]:
                    """What became of the order in each pod, and through which NICs the exchange after it went."""
                    nonlocal done
                    before = await fabric.traffic(0)
                    written = tmp_path / "order.new"
                    written.write_text(order)
                    written.rename(tmp_path / f"order.{done}")
                    said = [await line(rank) for rank in range(2)]
                    done += 1
                    after = await fabric.traffic(0)
                    sent = {nic: after[nic].sent - before[nic].sent for nic in NICS}
                    busy = [nic for nic in NICS if sent[nic] >= EXCHANGED]
                    assert all(sent[nic] < WORDS for nic in NICS if nic not in busy), sent
                    assert {words.split()[1] for words in said} == {str(3.0 * 2 ** (TIMES - 1))}, said
                    return [words.split(maxsplit=2)[2] for words in said], busy

                async def line(rank: int) -> str:
                    async with aio.timeout(60):
                        while True:
                            log = await cluster.log(f"rank-{rank}")
                            found = [each for each in log.splitlines() if each.startswith(f"{done} ")]
                            if found:
                                return found[0]
                            assert "Traceback" not in log, log
                            await asyncio.sleep(0.02)

                well = ["well", "well"]
                assert await exchange("stay") == (well, ["nic0"])
                assert await exchange("backup") == (well, ["nic1"])
                assert await exchange("primary") == (well, ["nic0"])
                await cluster.nodes["node-0"].plug(str(Cables().without("nic1")))
                reasons, busy = await exchange("backup")
                assert "eth1 is down" in reasons[0] and reasons[1] != "well" and busy == ["nic0"], reasons
                await cluster.nodes["node-0"].plug(JOINED)
                assert await exchange("backup again") == (well, ["nic1"])
        finally:
            fabric.close()

    run(main())
