"""The cluster itself: how it begins, ends, crashes and comes back, and what then happens to its jobs and pods."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain.embedded import instance
from tests.embedded.up import Up, environment, evertrain, needs_kubectl, small_job

pytestmark = needs_kubectl


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_ctrl_c_leaves_nothing_and_objects_stay(tmp_path: Path) -> None:
    up = Up(tmp_path)
    try:
        up.kubectl("apply", "-f", "-", stdin=small_job("long", "sleep 300 & trap '' TERM; wait; sleep 300"))
        up.kubectl("wait", "--for=condition=Running", "acjob/long", "--timeout=200s")
        processes = up.pod_processes()
        assert len(processes) >= 4  # two shells and what they started
    finally:
        code = up.end()
    assert code == 0, up.lines
    assert gone(processes)
    up = Up(tmp_path)
    try:
        assert not any("did not end in order" in line for line in up.lines)
        # Its pods were lost, and its policy is not to run them again.
        up.kubectl("wait", "--for=condition=Failed", "acjob/long", "--timeout=200s")
        assert up.get("pod", "long-worker-0")["status"]["reason"] == "NodeLost"
        up.kubectl("delete", "acjob", "long")
    finally:
        assert up.end() == 0


def test_a_job_goes_on_after_the_cluster_was_killed_in_the_middle(tmp_path: Path) -> None:
    """Its pods end with the cluster; the restart policy of the job decides what comes then, and nothing runs twice."""
    record = tmp_path / "record"
    # Each run takes a lock for its rank as long as it lives: a second one at the same time would say so.
    command = (
        f"exec 9>{record}.$RANK.lock; flock -n 9 || echo twice >> {record}; "
        f"echo run $RANK >> {record}; read x < {record}.fifo"
    )
    os.mkfifo(f"{record}.fifo")
    up = Up(tmp_path)
    try:
        job = small_job("lasting", command, labels='    fault-retry-times: "3"', restart="Never")
        up.kubectl("apply", "-f", "-", stdin=job)
        up.kubectl("wait", "--for=condition=Running", "acjob/lasting", "--timeout=200s")
        uid = up.get("acjob", "lasting")["metadata"]["uid"]
        processes = up.pod_processes()
        assert processes
    finally:
        up.kill()
    assert gone(processes)
    assert sorted(record.read_text().split("\n")) == ["", "run 0", "run 1"]
    up = Up(tmp_path)
    try:
        assert any("did not end in order" in line for line in up.lines)
        up.kubectl("wait", "--for=condition=Restarting", "acjob/lasting", "--timeout=30s", check=False)
        up.kubectl("wait", "--for=jsonpath={.status.replicaStatuses.Worker.active}=1", "acjob/lasting", "--timeout=90s")
        writer = os.open(f"{record}.fifo", os.O_RDWR)
        try:
            os.write(writer, b"go\n" * 8)
            up.kubectl("wait", "--for=condition=Succeeded", "acjob/lasting", "--timeout=200s")
        finally:
            os.close(writer)
        assert up.get("acjob", "lasting")["metadata"]["uid"] == uid
        assert sorted(record.read_text().split("\n")) == ["", "run 0", "run 0", "run 1", "run 1"]
    finally:
        assert up.end() == 0


def test_a_second_cluster_on_the_same_data_is_refused(up: Up) -> None:
    second = up.evertrain("up", check=False)
    assert second.returncode == 1
    assert f"already runs on {up.data} (process {up.process.pid})" in second.stderr
    assert "evertrain down" in second.stderr
    second = up.evertrain("up", "--detach", check=False)
    assert second.returncode == 1 and f"(process {up.process.pid})" in second.stderr
    assert up.get("nodes")["items"][0]["metadata"]["name"] == "node-0"


def test_detached_and_ended_with_down(tmp_path: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            evertrain(*arguments), env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False
        )

    started = command("up", "--detach", "--nodes", "3", "--npus", "4", "--node-label", "a=b")
    try:
        assert started.returncode == 0, started.stderr
        assert "A cluster of 3 nodes with 4 NPUs each runs" in started.stdout
        assert "export KUBECONFIG=" in started.stdout
        running = instance.find(tmp_path / "data")
        assert running is not None and (tmp_path / "data" / "kubeconfig").stat().st_mode & 0o077 == 0
        rows = command("node", "list").stdout.splitlines()
        assert [row.split() for row in rows[1:]] == [[f"node-{n}", "on", "joined", "Ready", "4", "0"] for n in range(3)]
        assert "a=b" in command("describe", "node", "node-2").stdout
    finally:
        ended = command("down")
    assert ended.returncode == 0 and "has ended" in ended.stdout
    # Its parent has gone before it: it may take a moment until the system has taken note of its end.
    assert not psutil.pid_exists(running.pid) or psutil.Process(running.pid).status() == psutil.STATUS_ZOMBIE
    assert instance.find(tmp_path / "data") is None
    assert "no cluster runs" in command("down").stderr


def test_run_waits_for_a_cluster_that_is_only_starting(up: Up, tmp_path: Path) -> None:
    """`evertrain up & evertrain run job.yaml`: not a second cluster, and no refusal."""
    (tmp_path / "job.yaml").write_text(small_job("early", "echo here"))
    with instance.Claim(tmp_path / "data") as claim:
        process = subprocess.Popen(
            evertrain("run", tmp_path / "job.yaml"),
            env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            assert "is starting; waiting for it" in process.stderr.readline()
            claim.announce(instance.Running(os.getpid(), up.environment["KUBECONFIG"], "there"))
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0 and "here" in out, err
        finally:
            process.kill()
            process.communicate()
    up.kubectl("delete", "acjob", "early")


@pytest.mark.matrix
def test_a_node_loses_its_power(tmp_path: Path) -> None:
    up = Up(tmp_path, "--nodes", "3")
    try:
        up.kubectl("apply", "-f", "-", stdin=small_job("job", "exec sleep 300", npus=8))
        up.kubectl("wait", "--for=condition=Running", "acjob/job", "--timeout=200s")
        node = up.get("pod", "job-worker-0")["spec"]["nodeName"]
        before = up.pod_processes()
        assert up.evertrain("node", "stop", node).stdout == f"{node} stopped\n"
        _, alive = psutil.wait_procs(before, timeout=2)
        assert 0 < len(alive) < len(before)  # the other node's pod goes on
        rows = {row.split()[0]: row.split()[1] for row in up.evertrain("node", "list").stdout.splitlines()[1:]}
        assert rows[node] == "off" and sorted(rows.values()) == ["off", "on", "on"]
        assert up.evertrain("node", "start", node).stdout == f"{node} started\n"
        up.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=200s")
        unknown = up.evertrain("node", "stop", "node-9", check=False)
        assert unknown.returncode == 2 and "there is no node node-9" in unknown.stderr
        up.kubectl("delete", "acjob", "job")
    finally:
        assert up.end() == 0


@pytest.mark.matrix
def test_the_job_of_a_lost_node_is_run_elsewhere(tmp_path: Path) -> None:
    """As on Kubernetes: the heartbeat stops, the node is NotReady, its pod is evicted but can't confirm its end; with
    the node deleted it is gone, and the job is restarted by its policy."""
    up = Up(tmp_path, "--nodes", "3", "--node-grace", "10")
    try:
        tolerations = "".join(
            f"            - {{key: {key}, operator: Exists, effect: NoExecute, tolerationSeconds: 0}}\n"
            for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
        )
        job = small_job("job", "exec sleep 300", npus=8, labels='    fault-retry-times: "3"')
        job = job.replace("          containers:", f"          tolerations:\n{tolerations}          containers:")
        up.kubectl("apply", "-f", "-", stdin=job)
        up.kubectl("wait", "--for=condition=Running", "acjob/job", "--timeout=200s")
        pod = up.get("pod", "job-worker-0")
        node = pod["spec"]["nodeName"]
        up.evertrain("node", "stop", node)
        up.kubectl("wait", "--for=condition=Ready=Unknown", f"node/{node}", "--timeout=200s")
        up.kubectl("wait", "--for=jsonpath={.metadata.deletionTimestamp}", "pod/job-worker-0", "--timeout=200s")
        up.kubectl("delete", "node", node)

        def runs_again(item: Any) -> bool:
            return item["metadata"]["uid"] != pod["metadata"]["uid"] and item["status"].get("phase") == "Running"

        assert up.until(runs_again, "pod", "job-worker-0")["spec"]["nodeName"] != node
        assert up.get("pod", "job-master-0")["metadata"]["creationTimestamp"] <= pod["metadata"]["creationTimestamp"]
        up.kubectl("delete", "acjob", "job")
    finally:
        assert up.end() == 0


@pytest.mark.matrix
@pytest.mark.parametrize("scheduling", ["force", "grace"])
def test_the_pods_of_a_lost_node_start_elsewhere_and_nothing_is_run_twice(tmp_path: Path, scheduling: str) -> None:
    """Its object stays: nobody has to delete it. When the node is back, it finds its old pods gone."""
    up = Up(tmp_path, "--nodes", "3", "--node-grace", "10")
    try:
        started = tmp_path / "started"
        labels = f'    fault-scheduling: "{scheduling}"'
        command = f"echo $HOSTNAME >> {started}; exec sleep 600"
        up.kubectl("apply", "-f", "-", stdin=small_job("job", command, npus=8, labels=labels))
        up.kubectl("wait", "--for=condition=Running", "acjob/job", "--timeout=200s")
        first = {each["metadata"]["uid"] for each in up.get("pods")["items"]}
        node = up.get("pod", "job-worker-0")["spec"]["nodeName"]
        up.evertrain("node", "stop", node)

        def runs_anew(item: Any) -> bool:
            return item["metadata"]["uid"] not in first and item["status"].get("phase") == "Running"

        for pod in ("job-master-0", "job-worker-0"):  # nothing says that one of them could start alone
            assert up.until(runs_anew, "pod", pod)["spec"]["nodeName"] != node
        before = {each["metadata"]["uid"] for each in up.get("pods")["items"]}
        up.evertrain("node", "start", node)
        up.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=200s")
        pods = up.get("pods")["items"]
        assert {each["metadata"]["uid"] for each in pods} == before
        assert all(each["spec"]["nodeName"] != node for each in pods)
        assert sorted(started.read_text().split()) == ["job-master-0"] * 2 + ["job-worker-0"] * 2
        up.kubectl("delete", "acjob", "job")
    finally:
        assert up.end() == 0


@pytest.mark.matrix
def test_the_operator_alone_is_killed_and_another_one_goes_on(tmp_path: Path) -> None:
    up = Up(tmp_path, "--no-operator")
    operators: list[subprocess.Popen[bytes]] = []

    def start_operator() -> subprocess.Popen[bytes]:
        command = evertrain("operator", "--kubeconfig", up.environment["KUBECONFIG"], "--ranktable-dir", tmp_path / "r")
        operators.append(subprocess.Popen(command, env=up.environment, stderr=subprocess.DEVNULL))
        return operators[-1]

    try:
        up.kubectl("apply", "-f", "-", stdin=small_job("job", "sleep 2"))
        first = start_operator()
        up.kubectl("wait", "--for=condition=Running", "acjob/job", "--timeout=200s")
        first.kill()
        first.wait()
        up.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/job-worker-0", "--timeout=200s")
        assert up.kubectl("get", "acjob", "job", "--no-headers").stdout.split()[1] == "Running"
        start_operator()
        up.kubectl("wait", "--for=condition=Succeeded", "acjob/job", "--timeout=200s")
        up.kubectl("delete", "acjob", "job")
    finally:
        for operator in operators:
            operator.terminate()
            operator.wait(10)
        assert up.end() == 0
