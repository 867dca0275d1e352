"""`evertrain run`: its exit codes, and what it says on the way; the other commands for people without kubectl."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedded.up import Up, environment, evertrain, small_job


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
    last = end.splitlines()[-1]
    assert last.startswith(f"evertrain run: acjob failing Failed (JobFailed): {why} (pod failing-worker-0: Failed on ")
    assert last.endswith("(Error, exit code 3))")
    up.evertrain("delete", "acjob", "failing")


def test_what_a_job_waits_for_is_said_at_once_and_at_the_end(up: Up, tmp_path: Path) -> None:
    selector = "          nodeSelector: {no: such}\n          containers:"
    job = small_job("waiting", "true").replace("          containers:", selector)
    done = run_on(up, tmp_path, job, "--timeout", "2")
    assert done.returncode == 124, done.stderr
    why = "Unschedulable: 0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    assert f"pod waiting-master-0: Pending ({why})\n" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == f"evertrain run: not finished after 2 s: pods waiting-master-0, waiting-worker-0: {why}"
    up.evertrain("delete", "acjob", "waiting")


@pytest.mark.matrix
def test_a_job_that_can_never_start_ends_the_cluster_made_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, small_job("waiting", "true", npus=64))
    assert done.returncode == 1, done.stderr
    why = "Unschedulable: resource in cluster is overused: Insufficient huawei.com/Ascend910"
    assert done.stderr.splitlines()[-1] == f"evertrain run: acjob waiting can't go on: {why}"


def test_the_exit_code_is_that_of_the_job_even_if_nobody_reads(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job("unread", "seq 100; exit 3"))
    process = subprocess.Popen(
        evertrain("run", file), env=up.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert "Traceback" not in process.stderr.read()
    assert process.wait(20) == 1
    up.evertrain("delete", "acjob", "unread")


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


def test_an_interrupt_is_no_crash_at_any_moment(tmp_path: Path) -> None:
    """Most of the first half second goes by with loading modules."""
    (tmp_path / "job.yaml").write_text(small_job("long", "exec sleep 300"))
    code = (
        "import os, signal, sys, evertrain.cli.main as cli\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.exit(cli.main(sys.argv[2:]))\n"
    )
    for module in ("evertrain.cli.manifest", "evertrain.cli.running", "lightkube.config", "evertrain.embedded.cluster"):
        done = subprocess.run(
            [sys.executable, "-c", code, module, "run", str(tmp_path / "job.yaml")],
            env=environment(tmp_path), capture_output=True, text=True, timeout=40, check=False,
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (130, False), f"{module}: {done.stderr}"


def test_events_and_logs_are_those_of_the_object_that_is_meant(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job("again", "echo first $RANK"))
    up.evertrain("run", file)
    side = "            - {name: side, image: none, command: [echo, aside]}\n            - name: ascend"
    file.write_text(small_job("again", "echo second $RANK").replace("            - name: ascend", side))
    up.evertrain("run", file)
    described = up.evertrain("describe", "acjob", "again").stdout
    assert described.count("Created pod: again-worker-0") == 1
    assert up.evertrain("logs", "again-worker-0").stdout == "second 1\n"
    assert up.evertrain("logs", "again-worker-0", "-c", "side").stdout == "aside\n"
    everything = up.evertrain("get", "pod/again-worker-0", "-A", check=False)
    assert everything.returncode == 2 and "together with -A" in everything.stderr
    up.evertrain("delete", "-f", file)


def test_after_delete_the_pods_are_gone_too(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job("tough", "trap '' TERM; echo here; sleep 60 & wait; sleep 60"))
    up.evertrain("run", "--timeout", "3", file, check=False)
    assert len(up.evertrain("get", "pods", "--no-headers").stdout.splitlines()) == 2
    up.evertrain("delete", "acjob", "tough")
    assert up.evertrain("get", "pods", "--no-headers").stdout == ""


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
    typo = tmp_path / "typo.yaml"
    typo.write_text(file.read_text().replace("replicas:", "replica:"))
    assert up.evertrain("run", typo, check=False).returncode == 2
    assert up.evertrain("get", "acjob", "hello").returncode == 0, "a job that is over stays where a file is refused"
    again = up.evertrain("run", file)
    assert "acjob hello of an earlier run is deleted first" in again.stderr
    assert up.evertrain("delete", "-f", file).stdout == "ascendjob hello deleted\n"
    missing = up.evertrain("get", "acjob", "hello", check=False)
    assert missing.returncode == 1 and "NotFound" in missing.stderr
    unknown = up.evertrain("get", "things", check=False)
    assert unknown.returncode == 2 and "doesn't have a resource type 'things'" in unknown.stderr
    assert "No resources found" in up.evertrain("get", "pods").stderr
