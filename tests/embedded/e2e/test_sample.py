"""The documented sample from `kubectl apply` to Succeeded, with a real torch job, and every documented command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.embedded.up import EXAMPLE, Up, example_job, kubectl_versions, needs_kubectl, small_job
from tests.ports import free_port

pytestmark = needs_kubectl
JOB = "default-test-pytorch"
CONDITION_FIELDS = {"type", "status", "lastTransitionTime", "lastUpdateTime", "message", "reason"}


def test_the_sample_trains_on_two_pods(up: Up, tmp_path: Path) -> None:
    port = free_port()
    file = example_job(tmp_path, port)
    assert up.kubectl("apply", "-f", file).stdout == f"ascendjob.mindxdl.gitee.com/{JOB} created\n"
    up.kubectl("wait", "--for=condition=Running", f"acjob/{JOB}", "--timeout=200s")
    pods = up.get("pods", "-l", f"job-name={JOB}")["items"]
    assert [pod["metadata"]["name"] for pod in pods] == [f"{JOB}-master-0", f"{JOB}-worker-0"]
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2  # the sample's anti-affinity
    up.kubectl("wait", "--for=condition=Succeeded", f"acjob/{JOB}", "--timeout=200s")

    master = up.kubectl("logs", f"{JOB}-master-0").stdout
    worker = up.kubectl("logs", f"{JOB}-worker-0").stdout
    address = up.get("service", f"{JOB}-master-0")["spec"]["clusterIP"]
    assert f"pod 0: 2 of 4 processes, devices Ascend910-0,Ascend910-1, first pod at {address}:{port}" in master
    assert "pod 1: 2 of 4 processes" in worker and "epoch 3/3" in master
    weights = set(re.findall(r"done, weights (\w+)", master + worker))
    assert len(weights) == 1 and len(re.findall("done, weights", master + worker)) == 4
    assert (tmp_path / "output" / "weights.pt").stat().st_size > 0

    _documented_commands(up)

    assert up.kubectl("apply", "-f", file).stdout == f"ascendjob.mindxdl.gitee.com/{JOB} unchanged\n"
    assert f'"{JOB}" deleted' in up.kubectl("delete", "acjob", JOB).stdout
    up.kubectl("wait", "--for=delete", "pod", "-l", f"job-name={JOB}", "--timeout=200s")
    for kind in ("pods", "services", "podgroups"):
        assert up.get(kind, "-l", f"job-name={JOB}")["items"] == []


def _documented_commands(up: Up) -> None:
    header, row = up.kubectl("get", "acjob").stdout.splitlines()
    assert header.split() == ["NAME", "STATE", "AGE"]
    assert row.split()[:2] == [JOB, "Succeeded"]
    assert up.kubectl("get", "acjob", "-A").stdout.split()[:4] == ["NAMESPACE", "NAME", "STATE", "AGE"]

    whole = yaml.safe_load(up.kubectl("get", "acjob", "-n", "default", JOB, "-o", "yaml").stdout)
    conditions = whole["status"]["conditions"]
    assert [condition["type"] for condition in conditions] == ["Created", "Running", "Succeeded"]
    for condition in conditions:
        assert set(condition) == CONDITION_FIELDS
        for field in ("lastTransitionTime", "lastUpdateTime"):
            assert datetime.strptime(condition[field], "%Y-%m-%dT%H:%M:%SZ")
    assert whole["status"]["replicaStatuses"] == {"Master": {"succeeded": 1}, "Worker": {"succeeded": 1}}

    summary = up.kubectl("get", "acjob", "-n", "default", JOB, "-o", "jsonpath={.status.conditions}").stdout
    assert json.loads(summary) == conditions
    latest = up.kubectl("get", "acjob", "-n", "default", JOB, "-o", "jsonpath={.status.conditions[-1]}").stdout
    assert json.loads(latest) == conditions[-1]

    described = up.kubectl("describe", "acjob", JOB).stdout
    assert "SuccessfulCreatePod" in described and f"Created pod: {JOB}-worker-0" in described
    assert "replicaSpecs" in up.kubectl("explain", "acjob.spec").stdout


def _versions() -> list[Any]:
    """The oldest and the newest always; those between them differ little."""
    found = kubectl_versions()
    return [
        pytest.param(path, id=Path(path).name, marks=[] if path in (found[0], found[-1]) else pytest.mark.exhaustive)
        for path in found
    ]


@pytest.mark.parametrize("binary", _versions())
def test_each_kubectl_runs_a_job(up: Up, binary: str) -> None:
    def kubectl(*arguments: str, stdin: str | None = None) -> str:
        return up.kubectl(*arguments, stdin=stdin, binary=binary).stdout

    job = small_job("short", "echo hello from $RANK")
    assert kubectl("apply", "-f", "-", stdin=job) == "ascendjob.mindxdl.gitee.com/short created\n"
    assert "condition met" in kubectl("wait", "--for=condition=Succeeded", "acjob/short", "--timeout=200s")
    assert kubectl("get", "acjob", "--no-headers").split()[:2] == ["short", "Succeeded"]
    assert kubectl("logs", "-f", "short-worker-0") == "hello from 1\n"
    assert "Completed" in kubectl("get", "pods", "-o", "wide")
    assert "Created pod: short-master-0" in kubectl("describe", "acjob", "short")
    changed = job.replace("spec:\n  runPolicy", "  annotations: {changed: yes}\nspec:\n  runPolicy", 1).replace(
        "yes", '"1"'
    )
    serverside = kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=changed)
    assert "serverside-applied" in serverside
    assert kubectl("delete", "acjob", "short") == 'ascendjob.mindxdl.gitee.com "short" deleted\n'
    kubectl("wait", "--for=delete", "pod/short-master-0", "pod/short-worker-0", "--timeout=200s")


def test_the_example_ends_when_one_of_its_processes_dies(tmp_path: Path) -> None:
    """Also while all of them wait for a pod that doesn't come, which they do for two minutes."""
    command = [sys.executable, str(EXAMPLE / "train.py"), f"--output={tmp_path}"]
    job = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | job | {"MASTER_PORT": str(free_port())}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as pod:
        try:
            while len(found := _ranks(pod.pid)) < 2:
                time.sleep(0.02)
            found[1].kill()
            assert pod.wait(100) == 1
            assert (
                pod.stderr is not None and "has failed with -9; the others of this pod are ended" in pod.stderr.read()
            )
        finally:
            pod.kill()


def test_a_pod_that_waits_for_one_that_has_failed_ends_with_the_job(up: Up, tmp_path: Path) -> None:
    """By itself it would wait for two minutes, and keep its chips even longer."""
    text = example_job(tmp_path, free_port()).read_text()
    dying = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 3; python3"
    up.kubectl("apply", "-f", "-", stdin=text.replace("cd /job/code; python3", dying, 1))
    up.kubectl("wait", "--for=condition=Running", "acjob/default-test-pytorch", "--timeout=200s")
    (tmp_path / "go").touch()
    up.kubectl("wait", "--for=condition=Failed", "acjob/default-test-pytorch", "--timeout=200s")
    up.kubectl("wait", "--for=delete", "pod/default-test-pytorch-worker-0", "--timeout=200s")
    assert up.get("pod", "default-test-pytorch-master-0")["status"]["phase"] == "Failed", "its log can be read"
    up.kubectl("delete", "acjob", "default-test-pytorch")


def _ranks(pod: int) -> list[psutil.Process]:
    found = psutil.Process(pod).children()
    return [each for each in found if any("spawn_main" in word for word in each.cmdline())]
