"""What a container's programs get, what is run beside them, and when a container counts as ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.embedded.network import plan
from evertrain.embedded.network.fabric import Fabric
from evertrain.kube.port import POD
from tests.embedded.networks import needs_networks
from tests.embedded.nodes import conditions, pod, processes, ready, run, small_cluster, soon

ISOLATED = [True, False]
DESCRIPTORS = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"


@pytest.mark.parametrize("isolate", ISOLATED)
def test_a_program_gets_its_three_streams_and_no_line_to_the_cluster(tmp_path: Path, isolate: bool) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, isolate=isolate) as cluster:
            await cluster.create(pod("a", "python", "-c", DESCRIPTORS))
            await cluster.phase("a", "Succeeded")
            assert await cluster.log("a") == "[0, 1, 2, 3]\n"  # 3 is the directory itself

    run(main())


@needs_networks
def test_nor_one_to_its_network(tmp_path: Path) -> None:
    async def main() -> None:
        fabric = await Fabric.start()
        try:
            async with small_cluster(tmp_path, fabric=fabric) as cluster:
                await cluster.create(pod("a", "python", "-c", DESCRIPTORS))
                await cluster.phase("a", "Succeeded")
                assert await cluster.log("a") == "[0, 1, 2, 3]\n"
        finally:
            fabric.close()

    run(main())


@pytest.mark.parametrize("isolate", ISOLATED)
def test_who_was_not_asked_to_end_is_not_waited_for(tmp_path: Path, isolate: bool) -> None:
    """A daemon has left the group and hears nothing of the end; those of the group get their time."""
    member = "trap 'sleep 0.5; echo saved; exit' TERM; echo ready; while true; do sleep 0.05; done"
    script = f'setsid sleep 222.5 & sh -c "{member}" & exec sleep 222.5'

    async def main() -> None:
        async with small_cluster(tmp_path, isolate=isolate) as cluster:
            await cluster.create(pod("a", "sh", "-c", script, terminationGracePeriodSeconds=900))
            await cluster.phase("a", "Running")
            await ready(cluster, "a")
            log = asyncio.create_task(cluster.log("a", follow=True))
            await cluster.kube.delete(POD, "a", "default")
            await cluster.gone("a")
            assert "saved" in await log
            await soon(lambda: not processes("222.5"))

    run(main())


def test_a_probe_that_hangs_is_ended_before_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            seen = tmp_path / "seen"
            command = ["sh", "-c", f"echo x >> {seen}; exec sleep 233.5"]
            probe = {"exec": {"command": command}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 100}
            await cluster.create(pod("a", "sleep", "600", container={"readinessProbe": probe}))
            await cluster.phase("a", "Running")
            await soon(lambda: seen.exists() and seen.read_text().count("x") == 3, 20)
            assert len(processes("233.5")) <= 1
            assert conditions(cluster.pod("a"))["Ready"] == "False"

    run(main())


def test_a_hook_has_the_whole_grace_period_and_no_more(tmp_path: Path) -> None:
    def item(name: str, hook: str, grace: int) -> dict[str, object]:
        lifecycle = {"preStop": {"exec": {"command": ["sh", "-c", hook]}}}
        script = "trap 'echo asked; exit' TERM; echo ready; while true; do sleep 0.05; done"
        return pod(name, "sh", "-c", script, container={"lifecycle": lifecycle}, terminationGracePeriodSeconds=grace)

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.create(item("good", f"sleep 0.3; echo x > {tmp_path}/hook", 30))
            await cluster.create(item("hangs", "exec sleep 244.5", 1))
            logs = {}
            for name in ("good", "hangs"):
                await cluster.phase(name, "Running")
                await ready(cluster, name)
                logs[name] = asyncio.create_task(cluster.log(name, follow=True))
                await asyncio.sleep(0)
                await cluster.kube.delete(POD, name, "default")
            for name in ("good", "hangs"):
                await cluster.gone(name)
            assert (tmp_path / "hook").exists()
            assert "asked" in await logs["good"]
            assert "asked" not in await logs["hangs"]
            await soon(lambda: not processes("244.5"))

    run(main())


def test_mount_paths_are_ordered_by_what_they_mean(tmp_path: Path) -> None:
    """The path above is mounted first, however it is written."""
    for name in ("outer", "inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            mounts = [
                {"name": "inner", "mountPath": "/evertrain-data/x"},
                {"name": "outer", "mountPath": "//evertrain-data//"},
            ]
            volumes = [{"name": name, "hostPath": {"path": str(tmp_path / name)}} for name in ("inner", "outer")]
            script = "ls /evertrain-data /evertrain-data/x"
            await cluster.create(pod("a", "sh", "-c", script, container={"volumeMounts": mounts}, volumes=volumes))
            await cluster.phase("a", "Succeeded", "Failed")
            assert (await cluster.log("a")).split() == ["/evertrain-data:", "outer", "x", "/evertrain-data/x:", "inner"]

    run(main())


def test_the_first_pod_of_a_node_without_privileges_starts_without_a_complaint(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, isolate=False) as cluster:
            await cluster.create(pod("a", "true"))
            await cluster.phase("a", "Succeeded")
            assert not [event for event in await cluster.events("a") if event.startswith("Failed:")]

    run(main())


def test_a_pod_for_which_no_address_is_left_waits_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FIRST_CHIP", plan.FIRST_POD + 1)

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.create(pod("a", "sleep", "600"))
            await cluster.phase("a", "Running")
            await cluster.create(pod("b", "true"))
            told = "FailedCreatePodSandBox: all 1 addresses of the node are in use"
            async with aio.timeout(20):
                while told not in await cluster.events("b"):
                    await asyncio.sleep(0.05)
            await cluster.kube.delete(POD, "a", "default", grace=0)
            await cluster.phase("b", "Succeeded")

    run(main())


def test_a_status_that_somebody_else_has_written_is_put_right(tmp_path: Path) -> None:
    """As the node controller does, when the node was silent for a while and is back."""

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.create(pod("a", "sleep", "600"))
            running = await cluster.until("a", lambda p: conditions(p).get("Ready") == "True")
            changed = [
                {**condition, "status": "False"} if condition["type"] == "Ready" else condition
                for condition in running["status"]["conditions"]
            ]
            wrong = await cluster.kube.patch(POD, "a", "default", {"status": {"conditions": changed}}, status=True)
            assert conditions(wrong)["Ready"] == "False"
            since = int(wrong["metadata"]["resourceVersion"])
            await cluster.until(
                "a", lambda p: conditions(p)["Ready"] == "True" and int(p["metadata"]["resourceVersion"]) > since
            )

    run(main())
