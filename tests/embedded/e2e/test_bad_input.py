"""Input that is wrong: it is refused or the job says why, and the cluster goes on serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.up import Up, needs_kubectl, small_job

pytestmark = needs_kubectl


@pytest.fixture(autouse=True)
def still_serves(up: Up) -> Iterator[None]:
    yield
    assert up.process.poll() is None
    assert up.kubectl("get", "--raw", "/readyz").stdout == "ok"
    up.kubectl("delete", "acjob", "--all")


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def with_field(text: str) -> str:
    return small_job("bad", "true").replace("spec:\n  runPolicy", f"spec:\n  {text}\n  runPolicy", 1)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("apiVersion: v1\n  kind: [", "error converting YAML to JSON"),
        (small_job("bad", "true").replace("replicas: 1", "replicas: two", 1), "replicas"),
        (small_job("bad", "true").replace('command: ["/bin/sh"', 'command: [["/bin/sh"]'), "command"),
        (with_field("replicaSpec: {}"), 'unknown field "spec.replicaSpec"'),
        (small_job("bad", "true", restart="Nevr"), 'restartPolicy: Unsupported value: "Nevr"'),
        (small_job("bad", "true", spec="    cleanPodPolicy: Al"), 'cleanPodPolicy: Unsupported value: "Al"'),
        (small_job("Bad_Name", "true"), "Bad_Name"),
        (small_job("bad", "true").replace("mindxdl.gitee.com/v1", "mindxdl.gitee.com/v9"), "v9"),
        ("apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\nmetadata: {name: bad}\nspec: {}", "spec.replicaSpecs"),
    ],
    ids=[
        "malformed",
        "word-for-number",
        "list-for-string",
        "unknown-field",
        "restart",
        "clean",
        "name",
        "version",
        "no-replicas",
    ],
)
def test_a_wrong_object_is_refused(up: Up, job: str, said: str) -> None:
    refused = up.kubectl("apply", "-f", "-", stdin=job, check=False)
    assert refused.returncode != 0
    assert said in refused.stderr
    assert "goroutine" not in refused.stderr and "Internal" not in refused.stderr


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (
            small_job("bad", "true").replace("framework: pytorch", "framework: jax"),
            "InvalidFramework: framework label<jax>",
        ),
        (
            "apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\nmetadata: {name: bad}",
            "InvalidSpecs: replicaSpecs is not set, please modify your job",
        ),
        (
            small_job("bad", "true").replace("replicas: 1", "replicas: 2", 1),
            "InvalidReplicaSpec: Master replicaSpec is not valid, the replicas must be only 1",
        ),
        (
            small_job("bad", "true").replace("name: ascend", "name: other"),
            "replicaSpec is not valid: There is no container named ascend",
        ),
        (
            small_job("bad", "true", workers=20_001),
            "Worker replicaSpec is not valid: replicas can not be larger than 20000, but got 20001",
        ),
        (
            small_job("bad", "true").replace("queue: default", "queue: nowhere"),
            "InvalidQueue: check queue<nowhere> failed",
        ),
    ],
    ids=["framework", "no-spec", "two-masters", "no-ascend", "20001", "queue"],
)
def test_a_wrong_job_says_why_it_failed(up: Up, job: str, reason: str) -> None:
    up.kubectl("apply", "-f", "-", stdin=job)
    up.kubectl("wait", "--for=condition=Failed", "acjob/bad", "--timeout=200s")
    condition = json.loads(up.kubectl("get", "acjob", "bad", "-o", "jsonpath={.status.conditions[-1]}").stdout)
    assert condition["reason"] == "JobValidFailed"
    assert reason in condition["message"]
    assert up.get("pods")["items"] == []
    assert "JobValidFailed" in up.kubectl("describe", "acjob", "bad").stdout


def test_an_object_that_is_nested_too_deeply_is_refused(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    job = {"apiVersion": "mindxdl.gitee.com/v1", "kind": "AscendJob", "metadata": {"name": "bad"}}
    text = json.dumps(job | {"spec": {"replicaSpecs": {"Master": {"template": {"metadata": "DEEP"}}}}})
    file.write_text(text.replace('"DEEP"', nested(500)))
    refused = up.kubectl("create", "-f", file, "--validate=false", check=False)
    assert refused.returncode != 0 and "Error from server" in refused.stderr, refused.stderr
    assert "Internal" not in refused.stderr


def test_an_object_of_four_megabytes_is_refused(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    job = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "large"}, "data": {"a": "x" * (4 << 20)}}
    file.write_text(json.dumps(job))
    refused = up.kubectl("create", "-f", file, check=False)
    assert refused.returncode != 0 and "Internal" not in refused.stderr
    assert "too large" in refused.stderr.lower() or "RequestEntityTooLarge" in refused.stderr
