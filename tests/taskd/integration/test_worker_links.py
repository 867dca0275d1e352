"""Process groups that change their network link between two steps: torch's own, with DDP on them, and guarded ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evertrain.torch import nics
from tests.ports import free_ports

TRAINING = """
import hashlib, json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from evertrain.torch import failover, sockets
from evertrain.torch.tft_collectives import Collectives

moves = json.loads(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
links = os.environ["TASKD_NICS"]
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
pair = dist.new_group([0, 1])
world = Collectives(rank, dist.FileStore(sys.argv[2], -1)).join("world", list(range(size)))

def networks(most):
    # Those of both ends of the connections of this process. gloo closes old ones in a thread of its own.
    until = time.monotonic() + 10
    while len(found := {address.rsplit(".", 1)[0] for address in ends()} - {"127.0.0"}) > most:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return sorted(found)

def ends():
    found = set()
    for known in sockets.opened():
        with sockets._duplicate(known) as sock:
            try:
                found |= {each.getpeername()[0] for each in [sock]} | {each.getsockname()[0] for each in [sock]}
            except (OSError, AttributeError, IndexError):
                pass
    return {address.removeprefix("::ffff:") for address in found if "." in address}

def train(moves):
    torch.manual_seed(7)
    said = []
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(12):
        generator = torch.Generator().manual_seed(step * size + rank)
        optimizer.zero_grad()
        model(torch.randn(5, 8, generator=generator)).square().sum().backward()
        total = torch.tensor([float(rank + step)])
        world.allreduce([total]).wait()
        dist.all_reduce(total)
        if rank < 2:
            other = torch.tensor([float(step)])
            dist.broadcast(other, 0, group=pair)
            if rank == 0:
                dist.send(total, 1, group=pair)
            else:
                dist.recv(other, 0, group=pair)
        optimizer.step()
        dist.barrier()
        if str(step) in moves:
            ranks, ops, down = moves[str(step)]
            os.environ["TASKD_NICS"] = "240.0.0.1,240.0.0.2" if rank == down else links  # which no machine has
            try:
                failover.move(rank, f"move-{step}", ranks, ops, ended=lambda: False)
                said.append([step, "", networks(1 if len(ranks) == size else 2)])
            except failover.LinkError as error:
                said.append([step, str(error), networks(1)])
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return [hashlib.sha256(weights).hexdigest(), total.item()], said

stayed, _ = train({})
moved, said = train(moves)
print(json.dumps([rank, stayed, moved, said]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
ALL = [0, 1, 2]


def train(folder: Path, moves: dict[int, tuple[list[int], list[bool], int | None]]) -> list[Any]:
    """By rank: what it ended with without moves and with them, and what it said of each move."""
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    processes = []
    for rank in ALL:
        environment = {
            **os.environ, **place, "RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
            nics.VARIABLE: f"127.0.1.{rank + 2},127.0.2.{rank + 2}",
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", TRAINING, json.dumps(moves), str(folder / "store")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        )
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), ended
    return sorted(json.loads(out.splitlines()[-1]) for out, _ in ended)


@pytest.mark.matrix
def test_groups_move_there_and_back_and_the_weights_are_those_of_a_run_that_stayed(tmp_path: Path) -> None:
    there, back = [True] * 3, [False] * 3
    moves = {
        2: (ALL, there, None),
        4: (ALL, back, None),
        6: (ALL, there, 1),
        8: (ALL, there, None),
        9: ([1], [False], None),
    }
    for rank, stayed, moved, said in train(tmp_path, moves):
        assert moved == stayed
        assert [(step, reason.startswith("rank 1: 240.0.0.2")) for step, reason, _ in said if reason] == [(6, True)]
        found = {step: networks for step, _, networks in said}
        assert (found[2], found[4], found[6], found[8]) == (["127.0.2"], ["127.0.1"], ["127.0.1"], ["127.0.2"]), rank
        assert "127.0.1" in found[9] if rank == 1 else "127.0.2" in found[9], "only rank 1 was told to go back"


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(nics, "_on_backup", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is as before afterwards, whatever a test does to it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return monkeypatch


def test_links_are_named_once_for_all_processes_of_a_pod_or_for_each(links: pytest.MonkeyPatch) -> None:
    assert nics.pair() is None and nics.current() is None
    links.setenv(nics.VARIABLE, " eth0, eth1 ")
    links.setenv("LOCAL_RANK", "1")
    assert nics.pair() == ("eth0", "eth1")
    links.setenv(nics.VARIABLE, "eth0,eth1;eth2,eth3")
    assert nics.pair() == ("eth2", "eth3")
    for nonsense in ("eth0", "eth0,eth1,eth2", "eth0,", "eth0,eth1;x"):
        links.setenv(nics.VARIABLE, nonsense)
        with pytest.raises(ValueError, match="eth0"):
            nics.pair()


def test_a_process_that_starts_while_its_primary_link_is_down_uses_the_backup(links: pytest.MonkeyPatch) -> None:
    links.setenv(nics.VARIABLE, "no-such-nic,lo")
    assert nics.current() == "lo"
    nics.use(False)
    assert nics.current() == "no-such-nic" and os.environ["GLOO_SOCKET_IFNAME"] == "no-such-nic"
    assert nics.why_down("lo") == nics.why_down("127.0.0.1") == nics.why_down("127.3.2.1") == ""
    assert "240.0.0.1" in nics.why_down("240.0.0.1") and "no-such-nic" in nics.why_down("no-such-nic")
