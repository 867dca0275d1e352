"""The six examples of the document about link failover, from the command to what a job's manager is told to do.

The nodes are of a super pod with 16 chips each, as it has them. Nobody trains: with real links and a training it is
`tests/features/e2e/test_links.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from evertrain.cli import switch_nic, switching
from evertrain.cli.demo.features import SUPER_POD
from evertrain.cli.running import CommandError
from evertrain.kube.port import ASCEND_JOB, POD
from tests.clusterd import obeying
from tests.clusterd.integration.test_hub_embedded import running
from tests.operator.acjobs import ascend_job, replica
from tests.operator.cluster import until

LEAF = "[device0, device8, device2, device10, device4, device12, device6, device14]"
EIGHT = [0, 2, 4, 6, 8, 10, 12, 14]
EXAMPLES = (
    ("[device0, device8]", "[true, true]", {0: True, 8: True}),
    ("[device0, device8]", "[false, false]", {0: False, 8: False}),
    ("[device0]", "[true]", {0: True}),
    ("[device0]", "[false]", {0: False}),
    (LEAF, "[true, true, true, true, true, true, true, true]", dict.fromkeys(EIGHT, True)),
    (LEAF, "[false, false, false, false, false, false, false, false]", dict.fromkeys(EIGHT, False)),
)
"""Of two nodes the second: dev, op, and which of its devices go where."""
NPUS = 16


def told(file: Path) -> list[dict[int, bool]]:
    """What the manager was to switch: where each rank goes."""
    lines = file.read_text().splitlines()[1:]
    return [dict(zip(map(int, ranks), ops, strict=True)) for ranks, ops in map(json.loads, lines)]


async def test_each_reaches_the_ranks_of_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "told"
    master, worker = (replica(1, chips=NPUS) for _ in range(2))
    for pod, command in (
        (master, [sys.executable, "-m", obeying.__name__, str(file)]),
        (worker, ["sleep", "infinity"]),
    ):
        (container,) = pod["template"]["spec"]["containers"]
        container |= {"command": command, "workingDir": str(Path(__file__).parents[3])}
    job = ascend_job(
        "train",
        annotations={"recover-strategy": "recover", "sp-block": str(2 * NPUS)},
        specs={"Master": master, "Worker": worker},
    )
    async with running(tmp_path / "cluster", npus=NPUS, labels=SUPER_POD) as (here, kube):
        await kube.create(ASCEND_JOB, job)

        async def ready() -> bool:
            return file.exists()

        await until(ready)
        node = (await kube.get(POD, "train-worker-0", "default"))["spec"]["nodeName"]
        for number, (dev, op, wanted) in enumerate(EXAMPLES, 1):
            command = ["train", "--node", node, "--dev", dev, "--op", op, "--kubeconfig", str(here.kubeconfig)]
            arguments = switch_nic.make_parser().parse_args(command)
            while True:
                try:
                    assert await switching.carry_out(arguments) == 0
                    break
                except CommandError as error:
                    assert "is not running" in str(error), "ClusterD has yet to see that it does"
            assert "switch nic finish" in capsys.readouterr().out
            ranks = {NPUS + device: backup for device, backup in wanted.items()}
            assert told(file)[number - 1 :] == [ranks], (dev, op)
