"""A cluster on which faults are injected, jobs whose pods only sleep, and what the tests wait for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.embedded.up import Up, small_job

LIMIT = 300.0
WITNESS = "witness"
BROKEN = "80E18402"
FORCE = '    fault-scheduling: "force"'


class Cluster:
    def __init__(self, up: Up) -> None:
        self.up = up

    # Jobs.

    def apply(self, name: str, pods: int, npus: int, *, labels: str = "") -> None:
        job = small_job(name, "exec sleep 600", workers=pods - 1, npus=npus, labels=labels)
        self.up.kubectl("apply", "-f", "-", stdin=job)

    def start(self, name: str, pods: int, npus: int, *, labels: str = "") -> None:
        self.apply(name, pods, npus, labels=labels)
        self.until_running(name, pods)

    def delete(self, name: str) -> None:
        """And wait until its chips are free."""
        self.up.kubectl("delete", "acjob", name)
        self.until(lambda: not self.pods(name), f"the end of {name}")

    def pods(self, job: str) -> dict[str, Any]:
        found = self.up.get("pods", "-l", f"job-name={job}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def uids(self, job: str) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods(job).items()}

    def node(self, pod: str) -> str:
        return str(self.up.get("pod", pod)["spec"]["nodeName"])

    def chips(self, pod: str) -> set[int]:
        given = self.up.get("pod", pod)["metadata"]["annotations"]["huawei.com/Ascend910"]
        return {int(name.rpartition("-")[2]) for name in given.split(",")}

    def inject(self, node: str, *words: str, chip: str = "") -> None:
        self.up.evertrain("inject", *(chip if word == "CHIP" else word for word in words), "--node", node)

    # What is waited for.

    def until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, f"waited too long for {what}\n{self.explain()}"
            time.sleep(0.2)

    def until_running(self, job: str, count: int = 3) -> None:
        def running() -> bool:
            pods = self.pods(job).values()
            return sum(pod["status"].get("phase") == "Running" for pod in pods) == count == len(pods)

        self.until(running, f"{count} pods of {job}")

    def until_others(self, job: str, before: dict[str, str], count: int) -> None:
        """All pods run, and so many of them are new."""

        def replaced() -> bool:
            pods = self.pods(job)
            running = pods.keys() == before.keys() and all(
                pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
                for pod in pods.values()
            )
            return running and sum(pod["metadata"]["uid"] != before[name] for name, pod in pods.items()) == count

        self.until(replaced, f"{count} new pods of {job}")

    def until_unschedulable(self, job: str) -> None:
        """The scheduler has looked, and there is no place."""

        def told() -> bool:
            groups = self.up.get("podgroups")["items"]
            return any(
                group["metadata"]["name"].startswith(f"{job}-") and condition["type"] == "Unschedulable"
                for group in groups
                for condition in (group.get("status") or {}).get("conditions") or ()
            )

        self.until(told, f"no place for {job}")
        assert not any(pod["status"].get("phase") == "Running" for pod in self.pods(job).values())

    def until_said(self, text: str) -> None:
        """ClusterD tells schedulers of it."""

        def said() -> bool:
            items = self.up.get("configmaps", "-n", "mindx-dl", "-l", "mx-consumer-volcano=true")["items"]
            return any(text in value for item in items for value in (item.get("data") or {}).values())

        self.until(said, f"{text} in cluster-info")

    def witness(self) -> None:
        """A fault of now has led to all that it leads to; so has what came before it."""
        self.start(WITNESS, 1, 1, labels=FORCE)
        before, pod = self.uids(WITNESS), f"{WITNESS}-master-0"
        node, chip = self.node(pod), str(min(self.chips(pod)))
        self.up.evertrain("inject", "chip", BROKEN, "--node", node, "--chip", chip)
        self.until_others(WITNESS, before, 1)
        self.up.evertrain("inject", "chip", BROKEN, "--node", node, "--chip", chip, "--clear")
        self.delete(WITNESS)

    # The rest.

    def put_config(self, name: str, namespace: str, data: dict[str, str]) -> None:
        item = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace},
            "data": data,
        }
        self.up.kubectl("create", "namespace", namespace, check=False)
        self.up.kubectl("apply", "-f", "-", stdin=json.dumps(item))

    def config(self, name: str, namespace: str) -> dict[str, str]:
        """What is in a ConfigMap; nothing if it is not there."""
        found = self.up.kubectl("get", "configmap", name, "-n", namespace, "-o", "json", check=False)
        return (json.loads(found.stdout).get("data") or {}) if found.returncode == 0 else {}

    def incidents(self, job: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def closed() -> bool:
            found[:] = json.loads(self.up.evertrain("timeline", job, "-o", "json").stdout)
            return bool(found) and all(each["closed"] for each in found)

        self.until(closed, f"incidents of {job} that are over")
        return found

    def explain(self) -> str:
        seen = self.up.kubectl("get", "acjob,pods,podgroup,nodes", "-o", "wide", check=False).stdout
        told = self.up.kubectl("get", "configmaps", "-n", "mindx-dl", "-o", "yaml", check=False).stdout
        return "\n".join([*self.up.lines[-80:], seen, told[-6000:]])
