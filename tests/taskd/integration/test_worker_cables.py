"""Link failover over real interfaces: two network namespaces with two cables between them, and what goes through each.

It needs a kernel that lets this user make network namespaces (root always may), and `ip`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]

MEMBER = """
import json, os, socket, subprocess, sys, time
import torch, torch.distributed as dist
from evertrain.torch import failover, nics
from evertrain.torch.tft_collectives import Collectives

rank, store, links = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3].split(",")
os.environ["TASKD_NICS"] = sys.argv[3]
said = []

def meet(name):
    store.add(name, 1)
    while store.add(name, 0) < 2:
        time.sleep(0.01)

def ip(*words):
    subprocess.run(["ip", *words], check=True)

def wait_up(link):
    while nics.why_down(link):
        time.sleep(0.01)

def carried(link):
    line = next(line for line in open("/proc/net/dev") if line.strip().startswith(link + ":"))
    numbers = line.split(":")[1].split()
    return int(numbers[0]) + int(numbers[8])

def exchange():
    before = [carried(link) for link in links]
    total = torch.ones(500_000) * (rank + 1)
    for _ in range(3):
        group.allreduce([total]).wait()
    meet(f"exchanged {len(said)}")
    return [total[0].item(), *(carried(link) - bytes for link, bytes in zip(links, before))]

def move(backup):
    try:
        failover.move(rank, f"move {len(said)}", [0, 1], [backup] * 2, ended=lambda: False)
        reason = ""
    except failover.LinkError as error:
        reason = str(error)
    said.append([reason, exchange()])

print("here", flush=True)
for number, link in enumerate(links):
    while link not in dict(map(reversed, socket.if_nameindex())):
        time.sleep(0.01)
    ip("addr", "add", f"10.81.{number}.{rank + 1}/24", "dev", link)
    ip("link", "set", link, "up")
for link in links:
    wait_up(link)
meet("cables")
group = Collectives(rank, dist.FileStore(sys.argv[2] + ".groups", -1), timeout=100.0).join("world", [0, 1])
said.append(["", exchange()])
move(True)
if rank == 0:
    ip("link", "set", links[0], "down")
meet("the first cable is out")
move(False)
if rank == 0:
    ip("link", "set", links[0], "up")
wait_up(links[0])
meet("and in again")
move(False)
print(json.dumps(said), flush=True)
"""

DRIVER = """
import subprocess, sys
member = [sys.executable, "-c", sys.argv[1]]
store = sys.argv[2]
other = subprocess.Popen(["unshare", "--net", *member, "1", store, "b0,b1"], stdout=subprocess.PIPE, text=True)
assert other.stdout.readline() == "here\\n"
for number in range(2):
    cable = ["ip", "link", "add", f"a{number}", "type", "veth", "peer", "name", f"b{number}", "netns", str(other.pid)]
    subprocess.run(cable, check=True)
one = subprocess.Popen([*member, "0", store, "a0,a1"], stdout=subprocess.PIPE, text=True)
print(one.communicate()[0].splitlines()[-1])
print(other.communicate()[0].splitlines()[-1])
"""


def possible() -> bool:
    script = "ip link add a0 type veth peer name b0"
    found = shutil.which("unshare") and shutil.which("ip")
    return bool(found) and subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True).returncode == 0


@pytest.mark.matrix
@pytest.mark.parametrize("namespace", [NAMESPACE] if possible() else [])
def test_bytes_go_through_the_cable_that_was_ordered(tmp_path: Path, namespace: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*namespace, sys.executable, "-c", DRIVER, MEMBER, str(tmp_path / "store")],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for side, line in zip("ab", ended.stdout.splitlines(), strict=True):
        reasons, exchanges = zip(*json.loads(line), strict=True)
        assert [bool(reason) for reason in reasons] == [False, False, True, False]
        assert "is down" in reasons[2]
        assert all(total == 3 * 2 * 2 for total, *_ in exchanges)
        busy = [[carried > 4_000_000 for carried in both] for _, *both in exchanges]
        assert busy == [[True, False], [False, True], [False, True], [True, False]], (side, exchanges)
        assert all(min(both) < 100_000 for _, *both in exchanges), "nothing but some words of neighbours"
