"""`evertrain run`: its exit codes, and what it says on the way; the other commands for people without kubectl."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.embedded import Up, environment, evertrain, small_job


def run(folder: Path, job: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(job)
    return subprocess.run(
        evertrain("run", *options, folder / "job.yaml"),
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run_on(up: Up, folder: Path, job: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(job)
    return up.evertrain("run", *options, folder / "job.yaml", check=False)


def test_a_job_that_succeeds(tmp_path: Path) -> None:
    done = run(tmp_path, small_job("good", "echo I am $RANK of $WORLD_SIZE", npus=2))
    assert done.returncode == 0, done.stderr
    assert "no cluster runs; starting one with 2 nodes" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[good-master-0] I am 0 of 4", "[good-worker-0] I am 1 of 4"]
    assert re.search(r"Created \(JobCreated\)", done.stderr) and re.search(r"Succeeded \(", done.stderr)


def test_a_job_that_fails(up: Up, tmp_path: Path) -> None:
    command = "if [ $RANK = 1 ]; then echo the cause; exit 3; else exec sleep 60; fi"
    done = run_on(up, tmp_path, small_job("failing", command))
    assert done.returncode == 1, done.stderr
    end = done.stderr[done.stderr.index("evertrain run: pod failing-worker-0") :]
    assert "exit code 3" in end and "    the cause" in end
    why = "Job default/failing has failed because has pod failed."
    assert end.splitlines()[-1] == f"evertrain run: acjob failing Failed (JobFailed): {why}"
    up.evertrain("delete", "acjob", "failing")


def test_a_job_that_takes_too_long(up: Up, tmp_path: Path) -> None:
    done = run_on(up, tmp_path, small_job("slow", "exec sleep 60"), "--timeout", "1.5")
    assert done.returncode == 124, done.stderr
    assert "not finished after 1.5 s" in done.stderr and "the job goes on" in done.stderr
    again = run_on(up, tmp_path, small_job("slow", "exec sleep 60"))
    assert again.returncode == 1 and "acjob slow already runs in namespace default" in again.stderr
    up.evertrain("delete", "acjob", "slow")


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        ("replicas: 1", "replicas: two", "      replicas: two", "spec.replicaSpecs.Master.replicas"),
        ("  runPolicy:", "  runPolitics: {}\n  runPolicy:", "  runPolitics: {}", "spec.runPolitics"),
        ("framework: pytorch", "framework: jax", "    framework: jax", "metadata.labels.framework: InvalidFramework"),
        (
            "restartPolicy: Never",
            "restartPolicy: Nevr",
            "      restartPolicy: Nevr",
            'spec.replicaSpecs.Master.restartPolicy: Unsupported value: "Nevr"',
        ),
    ],
    ids=["type", "unknown", "framework", "policy"],
)
def test_an_invalid_job_is_shown_where_it_is_wrong(
    up: Up, tmp_path: Path, before: str, after: str, line: str, said: str
) -> None:
    job = small_job("bad", "true").replace(before, after, 1)
    done = run_on(up, tmp_path, job)
    up.evertrain("delete", "acjob", "bad", "--ignore-not-found")
    assert done.returncode == 2, done.stderr
    number = job.splitlines().index(line) + 1
    assert f"job.yaml, line {number}: {said}" in done.stderr


def test_a_file_that_is_no_job(tmp_path: Path) -> None:
    done = run(tmp_path, "a: [1\n")
    assert done.returncode == 2 and "job.yaml, line 2: not YAML" in done.stderr
    done = run(tmp_path, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n")
    assert done.returncode == 2 and "job.yaml, line 2: kind: there is no AscendJob in it, but ConfigMap" in done.stderr


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(small_job("long", "echo started; exec sleep 300"))
    process = subprocess.Popen(
        evertrain("run", tmp_path / "job.yaml"), env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert "started" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_commands_without_kubectl(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job("hello", "echo hello $RANK"))
    assert "starting one" not in up.evertrain("run", file).stderr  # on the cluster that runs
    table = up.evertrain("get", "acjob").stdout.splitlines()
    assert table[0].split() == ["NAME", "STATE", "AGE"] and table[1].split()[:2] == ["hello", "Succeeded"]
    assert (
        json.loads(up.evertrain("get", "pod", "hello-worker-0", "-o", "json").stdout)["status"]["phase"] == "Succeeded"
    )
    assert up.evertrain("get", "po", "-l", "job-name=hello", "-o", "name").stdout.split() == [
        "pod/hello-master-0",
        "pod/hello-worker-0",
    ]
    assert "node-0" in up.evertrain("get", "pods", "-A", "-o", "wide").stdout
    assert "Created pod: hello-worker-0" in up.evertrain("describe", "acjob/hello").stdout
    assert up.evertrain("logs", "hello-worker-0").stdout == "hello 1\n"
    assert up.evertrain("logs", "-f", "acjob/hello").stdout.split("\n")[-2] in (
        "[hello-master-0] hello 0",
        "[hello-worker-0] hello 1",
    )
    again = up.evertrain("run", file)
    assert "acjob hello of an earlier run is deleted first" in again.stderr
    assert up.evertrain("delete", "-f", file).stdout == "ascendjob hello deleted\n"
    missing = up.evertrain("get", "acjob", "hello", check=False)
    assert missing.returncode == 1 and "NotFound" in missing.stderr
    unknown = up.evertrain("get", "things", check=False)
    assert unknown.returncode == 2 and "doesn't have a resource type 'things'" in unknown.stderr
    assert "No resources found" in up.evertrain("get", "pods").stderr
