"""An AscendJob from apply to delete, with the operator of deploy/ in its pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.embedded.up import small_job
from tests.kubernetes.real import RUN_WITH, Real

Apply = Callable[..., str]


@pytest.fixture
def apply(parts: Real) -> Iterator[Apply]:
    made = []

    def applied(name: str, command: str, **options: Any) -> str:
        made.append(name)
        text = small_job(name, command, npus=1, **options).replace("image: none", f"image: {RUN_WITH}")
        return parts.kubectl("apply", "-f", "-", stdin=text).stdout

    yield applied
    for name in made:
        parts.kubectl("delete", "acjob", name, "--ignore-not-found", "--timeout=120s")


def conditions(parts: Real, name: str) -> list[tuple[str, str]]:
    return [(each["type"], each["status"]) for each in parts.get("acjob", name)["status"]["conditions"]]


def test_created_running_succeeded(parts: Real, apply: Apply) -> None:
    assert apply("well", "sleep 5; echo $RANK of $WORLD_SIZE") == "ascendjob.mindxdl.gitee.com/well created\n"
    parts.kubectl("wait", "--for=condition=Running", "acjob/well", "--timeout=200s")
    assert parts.kubectl("get", "acjob", "well", "--no-headers").stdout.split()[:2] == ["well", "Running"]
    parts.kubectl("wait", "--for=condition=Succeeded", "acjob/well", "--timeout=200s")
    assert conditions(parts, "well") == [("Created", "True"), ("Running", "False"), ("Succeeded", "True")]
    names = parts.kubectl("get", "pods", "-l", "job-name=well", "-o", "name").stdout.split()
    assert names == ["pod/well-master-0", "pod/well-worker-0"]
    assert parts.kubectl("logs", "well-worker-0").stdout.startswith("1 of ")
    events = {each["reason"] for each in parts.get("events", "--field-selector", "involvedObject.name=well")["items"]}
    assert "JobSucceeded" in events, events


def test_failed(parts: Real, apply: Apply) -> None:
    apply("badly", "exit $((3 * (1 - RANK)))")
    parts.kubectl("wait", "--for=condition=Failed", "acjob/badly", "--timeout=200s")
    assert parts.get("pod", "badly-master-0")["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert "Failed" in parts.kubectl("get", "acjob", "badly", "--no-headers").stdout


def test_what_is_deleted_takes_its_pods_and_service_with_it(parts: Real, apply: Apply) -> None:
    apply("short", "exec sleep 600")
    parts.kubectl("wait", "--for=condition=Running", "acjob/short", "--timeout=200s")
    assert parts.get("services", "-l", "job-name=short")["items"] or parts.get("service", "short")
    parts.kubectl("delete", "acjob", "short", "--timeout=120s")
    parts.kubectl("wait", "--for=delete", "pods", "-l", "job-name=short", "--timeout=120s")


def test_an_invalid_job_is_told_so(parts: Real, apply: Apply) -> None:
    refused = parts.kubectl(
        "apply", "-f", "-", stdin=small_job("wrong", "true").replace("replicas: 1", "replicas: many"), check=False
    )
    assert refused.returncode == 1 and "replicas" in refused.stderr, refused


def test_the_operator_dies_and_another_one_goes_on(parts: Real, apply: Apply) -> None:
    """Both of its pods, so that whoever leads is among them."""
    apply("lasting", "sleep 15")
    parts.kubectl("wait", "--for=condition=Running", "acjob/lasting", "--timeout=200s")
    uids = [each["metadata"]["uid"] for each in parts.get("pods", "-l", "job-name=lasting")["items"]]
    select = ("-n", "mindx-dl", "-l", "app.kubernetes.io/name=ascend-operator")
    parts.kubectl("delete", "pods", *select, "--force", "--grace-period=0")
    parts.kubectl("wait", "--for=condition=Succeeded", "acjob/lasting", "--timeout=200s")
    now = [each["metadata"]["uid"] for each in parts.get("pods", "-l", "job-name=lasting")["items"]]
    assert now == uids
