"""What the commands of the cluster print, and what they refuse, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.cli import main as cli
from evertrain.cli import printing
from evertrain.embedded import volcano
from evertrain.kube.port import ASCEND_JOB, Kind, Listing

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
TABLE = {
    "columnDefinitions": [{"name": "Name"}, {"name": "State"}, {"name": "Node", "priority": 1}],
    "rows": [
        {"cells": ["job", "Running", "node-0"], "object": {"metadata": {"namespace": "default"}}},
        {"cells": ["a-longer-name", None, "node-1"], "object": {"metadata": {"namespace": "other"}}},
    ],
}


def test_tables_are_those_of_kubectl() -> None:
    assert printing.table(TABLE) == "NAME            STATE\njob             Running\na-longer-name   <none>"
    wide = printing.table(TABLE, wide=True, namespaces=True).splitlines()
    assert wide[1].split() == ["default", "job", "Running", "node-0"]
    assert wide[0] == "NAMESPACE   NAME            STATE     NODE"
    assert len(printing.table(TABLE, header=False).splitlines()) == 2


@pytest.mark.parametrize(
    ("timestamp", "age"),
    [
        ("2026-01-02T03:04:05Z", "0s"),
        ("2026-01-02T03:02:06Z", "119s"),
        ("2026-01-02T03:01:00Z", "3m5s"),
        ("2026-01-02T02:04:05Z", "60m"),
        ("2026-01-01T23:00:05Z", "4h4m"),
        ("2025-12-30T03:04:05Z", "3d"),
        ("2025-01-02T03:04:05Z", "365d"),
        ("2027-01-02T03:04:05Z", "0s"),
        ("", "<unknown>"),
        ("2026-01-02", "<unknown>"),
    ],
)
def test_ages(timestamp: str, age: str) -> None:
    assert printing.age(timestamp, NOW) == age


def test_a_description_has_everything_but_what_only_programs_read() -> None:
    item = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "n",
            "labels": {"b": "2", "a": "1"},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "hccl/rankIndex": "0"},
            "managedFields": [{"manager": "secretary"}],
            "ownerReferences": [{"kind": "AscendJob", "name": "job"}],
        },
        "spec": {"nodeName": "node-0"},
        "status": {"phase": "Running"},
    }
    event = {
        "type": "Normal",
        "reason": "Started",
        "message": "two\nlines",
        "count": 3,
        "source": {"component": "kubelet"},
    }
    text = printing.describe(item, [event | {"lastTimestamp": "2026-01-02T03:04:00Z"}], NOW)
    assert "Labels:        a=1\n               b=2\n" in text
    assert "Controlled by: AscendJob/job\n" in text
    assert "Spec:\n  nodeName: node-0\n" in text
    assert "  Normal   Started   5s (x3)   kubelet   two lines\n" in text
    assert "last-applied" not in text and "secretary" not in text
    assert "secretary" not in printing.as_yaml(item) + printing.as_json({"kind": "List", "items": [item]})


def test_every_command_is_in_the_help_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in text, name
    for name in ("up", "down", "run", "get", "describe", "logs", "delete", "node"):
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 120


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "0"],
        ["--nodes", "5000"],
        ["--nodes", "x"],
        ["--npus", "-1"],
        ["--node-label", "novalue"],
        ["--node-label", "-a=b"],
        ["--port", "99999"],
    ],
)
def test_bad_options_of_up_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["up", *arguments])
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_without_the_packages_of_the_cluster_the_way_to_them_is_told() -> None:
    without = "import sys; sys.modules['lightkube'] = None; "
    code = without + "from evertrain.cli import main; sys.exit(main.main(['get', 'acjob']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("(lightkube): pip install 'evertrain[cluster]'")


def test_the_definitions_of_volcano_are_structural() -> None:
    """Every node of a schema says what it is, as apiextensions.k8s.io/v1 demands."""

    def check(schema: dict, path: str) -> None:
        assert schema.get("type") or schema.get("x-kubernetes-int-or-string"), path
        for name, child in (schema.get("properties") or {}).items():
            check(child, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if key in schema:
                check(schema[key], f"{path}.{key}")

    for definition in volcano.definitions():
        for version in definition["spec"]["versions"]:
            check(version["schema"]["openAPIV3Schema"], definition["metadata"]["name"])


def test_a_pod_is_described_in_one_line() -> None:
    from evertrain.cli.pods import describe_pod

    def pod(**status: object) -> dict:
        return {"metadata": {"name": "p"}, "spec": {"nodeName": "node-1"}, "status": status}

    assert describe_pod({"metadata": {}, "spec": {}}) == "Pending"
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no NPU"}
    assert describe_pod(pod(phase="Pending", conditions=[unschedulable])) == "Pending on node-1 (Unschedulable: no NPU)"
    failed = {"restartCount": 2, "state": {"terminated": {"exitCode": 137, "reason": "Error", "signal": 9}}}
    text = "Failed on node-1 (Error, exit code 137, signal 9) restarted 2x"
    assert describe_pod(pod(phase="Failed", containerStatuses=[failed])) == text
    done = {"restartCount": 0, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    assert describe_pod(pod(phase="Succeeded", containerStatuses=[done])) == "Succeeded on node-1"


@pytest.mark.parametrize("before", [True, False])
def test_which_cluster_may_stand_before_and_behind_an_order(
    before: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    which = ["--kubeconfig", str(tmp_path / "none")]
    assert cli.main(["node", *which, "list"] if before else ["node", "list", *which]) == 2
    assert capsys.readouterr().err == f"evertrain node: there is no kubeconfig {tmp_path / 'none'}\n"


class Pods:
    """The log of one pod is there, the other one has none yet."""

    namespace = "default"

    async def find_kind(self, name: str) -> Kind:
        return ASCEND_JOB

    async def list(self, *_: object, **__: object) -> Listing:
        spec = {"containers": [{"name": "side"}, {"name": "ascend"}]}
        return Listing([{"metadata": {"name": name}, "spec": spec} for name in ("waits", "runs")], "1")

    @contextlib.asynccontextmanager
    async def follow(self, path: str, parameters: dict[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        from evertrain.cli.connection import Refused

        assert parameters["container"] == "ascend"
        if "waits" in path:
            raise Refused(400, {"reason": "BadRequest", "message": "waiting to start"})

        async def pieces() -> AsyncIterator[bytes]:
            yield b"here\n"

        yield pieces()

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_a_pod_without_a_log_does_not_hide_the_others(
    follow: list[str], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from evertrain.cli import connection

    monkeypatch.setattr(connection, "choose_kubeconfig", lambda *_: "")
    monkeypatch.setattr(connection, "connect", lambda _: Pods())
    assert cli.main(["logs", *follow, "acjob/job"]) == 1
    out, err = capfdbinary.readouterr()
    assert out == b"[runs] here\n" and err == b"evertrain logs: pod waits: waiting to start\n"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "job.yaml", "--timeout"], ["down", "--timeout"], ["up", "--node-grace"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, text])
        assert ended.value.code == 2 and "is not a number of seconds above 0" in capsys.readouterr().err


def test_an_ignored_signal_stays_ignored() -> None:
    """As `nohup` wants it."""
    from evertrain.cli import running

    async def handled(number: signal.Signals) -> bool:
        came = asyncio.Event()
        running.on_signals(came.set, number)
        os.kill(os.getpid(), number)
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(5 if number is signal.SIGUSR2 else 0.1):
                await came.wait()
        return came.is_set()

    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert not aio.run(handled(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert aio.run(handled(signal.SIGUSR2))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConnectionError("refused"), 1, "the cluster can't be reached: refused"),
        (PermissionError(13, "Permission denied", "/a/folder"), 1, "/a/folder: Permission denied"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_called_what_they_are(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from evertrain.cli import running

    async def fail() -> int:
        raise error

    assert running.run("get", fail) == code
    assert capsys.readouterr().err == (f"evertrain get: {said}\n" if said else "")


def test_the_end_of_a_job_is_the_last_condition_that_is_one() -> None:
    from evertrain.cli.following import outcome

    def job(*conditions: tuple[str, str]) -> dict:
        return {"status": {"conditions": [{"type": kind, "status": status} for kind, status in conditions]}}

    assert outcome({}) is None
    assert outcome(job(("Created", "True"), ("Running", "True"))) is None
    assert outcome(job(("Running", "False"), ("Failed", "True"))) == {"type": "Failed", "status": "True"}
    assert outcome(job(("Succeeded", "False"), ("Restarting", "True"))) is None
