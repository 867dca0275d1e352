"""Real training over TLS, with strangers at the door: the same bits as without both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from evertrain.mindio.processor import Processor, Refused
from tests.certificates import Authority
from tests.launch import harness
from tests.launch.launching import wait_for
from tests.mindio.strangers import strangers

ARGS = (f"--steps={harness.STEPS}",)


def controller_of(pid: int) -> tuple[str, int]:
    """Where the controller of this rank listens. The token is not taken."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    address = next(item for item in variables if item.startswith(b"EVERTRAIN_CONTROLLER="))
    host, _, port = address.partition(b"=")[2].decode().rpartition(":")
    return host, int(port)


@pytest.mark.matrix
def test_training_over_tls_is_not_disturbed_by_strangers(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    node = authority.issue()
    file = tmp_path / "events.jsonl"
    # The strangers come while a lost rank is being replaced, when the controller is busiest.
    flags = (*node.flags, f"--ft-events={file}", "--ft-warm=0", "--ft-fault=kill@step=8,rank=1")
    process = subprocess.Popen(
        harness.command(*ARGS, ft=flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=harness.environment(),
    )

    def events(kind: str) -> list[dict]:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    try:
        wait_for(lambda: events("fault"), "the fault", 60)
        rank0 = next(event for event in events("started") if event["rank"] == 0)
        address = controller_of(rank0["pid"])
        known = list(strangers(authority, node, tmp_path))
        for stranger in known:
            processor = Processor(address, stranger.token, rank=1, incarnation=1, tls=stranger.context)
            with pytest.raises(Refused) as refused:
                processor.connect()
            processor.close()
            assert stranger.hears in str(refused.value), stranger.name
        assert process.poll() is None
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    result = harness.parse(process.returncode, out, err, events("incident"))
    harness.assert_same_end(result, *ARGS)
    (incident,) = result.incidents
    assert incident["steps_lost"] == 0 and incident["restarted"] == [1], result.explain()
    for stranger in known:
        assert stranger.logged in err, stranger.name
