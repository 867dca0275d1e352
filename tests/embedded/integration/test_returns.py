"""A node that goes down and comes back: what ran is not run twice, and what it had is still there."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

from evertrain.kube.port import CONFIG_MAP, POD, Kind, Object
from tests.embedded.nodes import SmallCluster, pod, ready, run, small_cluster, soon, state, terminated


class Mute:
    """An API to which the status of no pod gets through any more."""

    def __init__(self, kube: Any) -> None:
        self._kube = kube

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    async def patch(self, kind: Kind, *arguments: Any, **more: Any) -> Object:
        if kind == POD:
            await asyncio.Event().wait()
        found: Object = await self._kube.patch(kind, *arguments, **more)
        return found


def ended(folder: Path, cluster: SmallCluster, name: str) -> bool:
    """Its record is there, whoever has been told."""
    uid = cluster.pod(name)["metadata"]["uid"]
    try:
        return "code" in json.loads((folder / "nodes/node-0/pods" / uid / "logs/main/0.run").read_text())
    except OSError:
        return False


def test_nothing_is_run_twice_and_no_end_is_lost_when_the_node_dies_before_it_could_say_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            cluster.nodes["node-0"].kube = Mute(cluster.kube)  # type: ignore[assignment]
            for name, policy, rest in (
                ("begun", "Never", "exec sleep 600"),
                ("done", "Never", "exit 0"),
                ("through", "OnFailure", "exit 0"),
                ("failed", "Never", "exit 3"),
            ):
                item = pod(name, "sh", "-c", f"echo x >> {tmp_path}/{name}; {rest}")
                item["spec"]["restartPolicy"] = policy
                await cluster.create(item)
            await soon(lambda: (tmp_path / "begun").exists(), 20)
            for name in ("done", "through", "failed"):
                await soon(partial(ended, tmp_path, cluster, name), 20)
                assert cluster.pod(name)["status"]["phase"] == "Pending"
            await cluster.drop_dead("node-0")
            cluster.start(0)
            lost = await cluster.phase("begun", "Failed")
            assert lost["status"]["reason"] == "NodeLost"
            await cluster.phase("done", "Succeeded")
            await cluster.phase("through", "Succeeded")
            assert terminated(await cluster.phase("failed", "Failed"))["exitCode"] == 3
            for name in ("begun", "done", "through", "failed"):
                assert (tmp_path / name).read_text() == "x\n"

    run(main())


def test_a_program_that_was_asked_to_end_is_not_done(tmp_path: Path) -> None:
    """The node ends in order, and so does the pod: with 0, but not because it had finished its work."""
    polite = f"trap 'echo x > {tmp_path}/asked; exit 0' TERM; echo ready; while true; do sleep 0.05; done"

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.create(pod("polite", "sh", "-c", polite))
            await cluster.phase("polite", "Running")
            await ready(cluster, "polite")
            await cluster.nodes["node-0"].stop()
            await asyncio.wait([cluster.tasks["node-0"]])
            assert (tmp_path / "asked").exists()
            cluster.start(0)
            assert (await cluster.phase("polite", "Failed", "Succeeded"))["status"]["reason"] == "NodeLost"

    run(main())


def test_a_pod_that_is_over_does_not_wait_for_its_volumes(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            metadata = {"name": "soon-gone", "namespace": "default"}
            await cluster.kube.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
            volumes = [{"name": "v", "configMap": {"name": "soon-gone"}}]
            await cluster.create(pod("a", "sleep", "600", volumes=volumes))
            await cluster.phase("a", "Running")
            await cluster.drop_dead("node-0")
            await cluster.kube.delete(CONFIG_MAP, "soon-gone", "default")
            node = cluster.start(0)
            await cluster.phase("a", "Failed")
            await soon(lambda: not node.workers())

    run(main())


def running_since(restarts: int, item: Object) -> bool:
    return "running" in state(item) and item["status"]["containerStatuses"][0]["restartCount"] == restarts


def test_a_pod_finds_its_volumes_again_after_its_node_was_down(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            container = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
            script = "echo x >> /v/runs; cat /v/runs; echo ready; exec sleep 600"
            item = pod("a", "sh", "-c", script, container=container, volumes=[{"name": "v", "emptyDir": {}}])
            item["spec"]["restartPolicy"] = "Always"
            await cluster.create(item)
            for restarts, down in enumerate(("power", "order", "")):
                await cluster.until("a", partial(running_since, restarts))
                await ready(cluster, "a")
                assert (await cluster.log("a")).count("x\n") == restarts + 1
                if down == "power":
                    await cluster.drop_dead("node-0")
                elif down == "order":
                    await cluster.nodes["node-0"].stop()
                    await asyncio.wait([cluster.tasks["node-0"]])
                if down:
                    cluster.start(0)
            uid = cluster.pod("a")["metadata"]["uid"]
            await cluster.kube.delete(POD, "a", "default", grace=0)
            await soon(lambda: not (tmp_path / "nodes/node-0/pods" / uid).exists())

    run(main())
