"""Unruly pods on nodes that come and go: every pod comes to an end, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.kube.port import POD, NotFound
from tests.embedded.nodes import pod, small_cluster
from tests.leftovers import TEST_ID

FORK = "if os.fork(): os._exit(0)\n"
UNRULY = {
    "floods": ["yes"],
    "stops": ["python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"],
    "deaf": ["sh", "-c", "trap '' TERM INT HUP; while true; do sleep 100; done"],
    "hides": ["python", "-c", f"import os, time\n{FORK}os.setsid()\n{FORK}time.sleep(1000)"],
    "spawns": ["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (sleep 1000 &) ; done; sleep 1000"],
    "closes": ["sh", "-c", "exec >&- 2>&-; sleep 1000"],
    "fails": ["sh", "-c", "exit 1"],
    "crashes": ["python", "-c", "import os; os.abort()"],
    "ends": ["true"],
}


def alive() -> list[str]:
    """Processes of pods of this test: they have its mark in their environment."""
    marker = f"{TEST_ID}={os.environ[TEST_ID]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command and "runtime.main" not in command:
                    found.append(f"{entry.name}: {command}")
        except OSError:
            continue
    return found


async def misbehave(folder: Path, seed: int, rounds: int, isolate: bool) -> None:
    chance = random.Random(seed)
    async with small_cluster(folder, nodes=2, isolate=isolate) as cluster:
        names: list[str] = []
        off: set[int] = set()
        for number in range(rounds):
            kind = chance.choice(list(UNRULY))
            item = pod(f"{kind}-{number}", *UNRULY[kind], terminationGracePeriodSeconds=1)
            item["spec"]["restartPolicy"] = chance.choice(["Never", "OnFailure", "Always"])
            await cluster.create(item)
            names.append(f"{kind}-{number}")
            await asyncio.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.5:
                name = names.pop(chance.randrange(len(names)))
                await cluster.kube.delete(POD, name, "default", grace=chance.choice([None, 0, 1]))
            if chance.random() < 0.15:
                index = chance.randrange(2)
                if index in off:
                    cluster.start(index, isolate=isolate)
                    off.discard(index)
                else:
                    await cluster.drop_dead(f"node-{index}")
                    off.add(index)
        for index in off:
            cluster.start(index, isolate=isolate)
        for name in names:
            try:
                await cluster.kube.delete(POD, name, "default", grace=1)
            except NotFound:
                continue
        gone = await cluster.machine.pods.until(lambda: not len(cluster.machine.pods), 30)
        assert gone, [(item["metadata"]["name"], item.get("status")) for item in cluster.machine.pods]
        async with aio.timeout(10):
            while left := alive():
                await asyncio.sleep(0.05)
            folders = [folder / "nodes" / f"node-{index}" / "pods" for index in range(2)]
            while any(path.is_dir() and os.listdir(path) for path in folders):
                await asyncio.sleep(0.05)
        assert not left


@pytest.mark.parametrize("isolate", [True, False])
def test_unruly_pods(tmp_path: Path, isolate: bool) -> None:
    aio.run(misbehave(tmp_path, seed=1, rounds=20, isolate=isolate))


@pytest.mark.matrix
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 8))])
def test_many_unruly_pods(tmp_path: Path, seed: int, isolate: bool) -> None:
    aio.run(misbehave(tmp_path, seed=seed, rounds=80, isolate=isolate))
