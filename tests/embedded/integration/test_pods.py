"""Pods as real processes: what they see, how they end, what is said about it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from evertrain import aio
from evertrain.kube.port import CONFIG_MAP, LEASE, NODE, POD, SECRET, SERVICE, Object
from tests.embedded.nodes import (
    conditions,
    pod,
    processes,
    ready,
    run,
    small_cluster,
    soon,
    state,
    terminated,
)

ISOLATED = [True, False]


def test_a_pod_runs_with_its_environment_volumes_and_chips(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    script = (
        "import os, socket, pathlib\n"
        "print(os.environ['GREETING'], os.environ['CHIPS'], os.environ['LIMIT'], os.environ['FROM_MAP'])\n"
        "print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), os.environ['POD_IP'])\n"
        "job = pathlib.Path('/job')\n"
        "print(os.getcwd(), (job / 'config/key').read_text(), (job / 'pass/word').read_text())\n"
        "print('SECRET_OF_THE_CLUSTER' in os.environ, (job / 'memory').is_mount(), os.listdir('/usr/local/Ascend'))\n"
        "(job / 'out/result').write_text('42')\n"
        "try:\n    (job / 'config/new').write_text('')\nexcept OSError as error:\n    print(error.strerror)\n"
    )

    def field(path: str) -> Object:
        return {"fieldRef": {"fieldPath": path}}

    container = {
        "args": [script, "$(GREETING)"],
        "workingDir": "/job/out",
        "env": [
            {"name": "WHO", "value": "world"},
            {"name": "GREETING", "value": "hello $(WHO) $$(WHO) $(NOBODY)"},
            {"name": "CHIPS", "valueFrom": field("metadata.annotations['huawei.com/Ascend910']")},
            {"name": "POD_IP", "valueFrom": field("status.podIP")},
            {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
            {"name": "FROM_MAP", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "key"}}},
        ],
        "resources": {"limits": {"huawei.com/Ascend910": 2, "memory": "64Mi"}},
        "volumeMounts": [
            {"name": "out", "mountPath": "/job/out"},
            {"name": "config", "mountPath": "/job/config", "readOnly": True},
            {"name": "pass", "mountPath": "/job/pass"},
            {"name": "memory", "mountPath": "/job/memory"},
            {"name": "driver", "mountPath": "/usr/local/Ascend/driver"},
        ],
    }
    volumes = [
        {"name": "out", "nfs": {"server": "127.0.0.1", "path": str(shared)}},
        {"name": "config", "configMap": {"name": "settings"}},
        {"name": "pass", "secret": {"secretName": "pass"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "driver", "hostPath": {"path": "/usr/local/Ascend/driver/which/is/not/there"}},
    ]

    async def main() -> None:
        os.environ["SECRET_OF_THE_CLUSTER"] = "x"
        async with small_cluster(tmp_path) as cluster:
            metadata = {"name": "settings", "namespace": "default"}
            await cluster.kube.create(
                CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"key": "value"}}
            )
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "pass", "namespace": "default"}}
            await cluster.kube.create(SECRET, {**secret, "stringData": {"word": "sesame"}})
            await cluster.create(pod("a", "python", "-c", container=container, volumes=volumes))
            done = await cluster.phase("a", "Succeeded", "Failed")
            address = done["status"]["podIP"]
            assert (await cluster.log("a")).splitlines() == [
                "hello world $(WHO) $(NOBODY) Ascend910-0,Ascend910-1 64 value",
                f"a {address} {address}",
                "/job/out value sesame",
                "False True ['driver']",
                "Read-only file system",
            ]
            assert done["status"]["phase"] == "Succeeded"
            assert terminated(done)["exitCode"] == 0
            assert terminated(done)["reason"] == "Completed"
            assert conditions(done) == {
                "PodScheduled": "True",
                "Initialized": "True",
                "ContainersReady": "False",
                "Ready": "False",
            }
            assert done["status"]["hostIP"] == "127.64.0.1"
            events = await cluster.events("a")
            assert "Scheduled: Successfully assigned default/a to node-0" in events
            assert "Started: Started container main" in events
            assert any("does not exist on this machine" in event for event in events)
            assert [event.partition(":")[0] for event in await cluster.events("node-0")] == ["ImagesIgnored"]
            await cluster.kube.delete(POD, "a", "default")
            await cluster.gone("a")
        assert (shared / "result").read_text() == "42"

    before = set(os.listdir("/"))
    try:
        run(main())
    finally:
        os.environ.pop("SECRET_OF_THE_CLUSTER", None)
    assert set(os.listdir("/")) == before
    assert not Path("/usr/local/Ascend").exists()


ENDS: dict[str, tuple[list[str], Object]] = {
    "code": (["sh", "-c", "exit 3"], {"exitCode": 3, "reason": "Error"}),
    "signal": (
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
        {"exitCode": 137, "signal": 9, "reason": "Error"},
    ),
    "missing": (["no-such-program"], {"exitCode": 128, "reason": "StartError"}),
    "forbidden": (["/etc/passwd"], {"exitCode": 128, "message": 'exec: "/etc/passwd": permission denied'}),
}


@pytest.mark.parametrize("isolate", ISOLATED)
def test_how_a_container_ended(tmp_path: Path, isolate: bool) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, isolate=isolate) as cluster:
            for name, (command, _) in ENDS.items():
                await cluster.create(pod(name, *command))
            for name, (_, expected) in ENDS.items():
                found = terminated(await cluster.phase(name, "Failed"))
                assert expected.items() <= found.items(), found

    run(main())


def test_restarts_with_backoff_until_it_works(tmp_path: Path) -> None:
    script = "echo x >> /tries/n; test $(wc -l < /tries/n) = 3".replace("$(wc -l < /tries/n)", "`wc -l < /tries/n`")

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            container = {"volumeMounts": [{"name": "tries", "mountPath": "/tries"}]}
            again = pod("a", "sh", "-c", script, container=container, volumes=[{"name": "tries", "emptyDir": {}}])
            again["spec"]["restartPolicy"] = "OnFailure"
            await cluster.create(again)
            done = await cluster.phase("a", "Succeeded")
            status = done["status"]["containerStatuses"][0]
            assert status["restartCount"] == 2
            assert status["lastState"]["terminated"]["exitCode"] == 1
            forever = pod("b", "sh", "-c", "echo again; exit 1")
            forever["spec"]["restartPolicy"] = "Always"
            await cluster.create(forever)
            waiting = await cluster.until(
                "b", lambda p: p["status"]["phase"] == "Running" and "waiting" in state(p) and state(p)["waiting"]
            )
            assert state(waiting)["waiting"]["reason"] == "CrashLoopBackOff"
            assert "back-off" in state(waiting)["waiting"]["message"]
            assert await cluster.log("b") == "again\n"

    run(main())


@pytest.mark.parametrize("isolate", ISOLATED)
def test_deletion_asks_and_then_kills(tmp_path: Path, isolate: bool) -> None:
    polite = "trap 'echo bye; exit 0' TERM; echo ready; while true; do sleep 0.05; done"
    rude = "trap '' TERM; echo ready; while true; do sleep 60; done"

    async def main() -> None:
        async with small_cluster(tmp_path, isolate=isolate) as cluster:
            for name, script, grace in (("polite", polite, 900), ("rude", rude, 1)):
                await cluster.create(pod(name, "sh", "-c", script, terminationGracePeriodSeconds=grace))
            for name in ("polite", "rude"):
                await cluster.phase(name, "Running")
                await ready(cluster, name)
            followed = asyncio.create_task(cluster.log("polite", follow=True))
            await cluster.kube.delete(POD, "polite", "default")
            await cluster.gone("polite")
            assert "bye\n" in await followed
            began = time.monotonic()
            await cluster.kube.delete(POD, "rude", "default")
            await cluster.gone("rude")
            assert time.monotonic() - began > 0.9
            await soon(lambda: not list((tmp_path / "nodes" / "node-0" / "pods").iterdir()))

    run(main())


@pytest.mark.parametrize("isolate", ISOLATED)
def test_nothing_outlives_its_container(tmp_path: Path, isolate: bool) -> None:
    """A daemon has left group and session, and has lost its parent."""
    fork = "if os.fork(): os._exit(0)\n"
    daemon = f"import os, time\n{fork}os.setsid()\n{fork}time.sleep(333.25)"
    script = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {daemon!r}])\n"
        "print('ready', flush=True)\n"
    )

    async def main() -> None:
        async with small_cluster(tmp_path, isolate=isolate) as cluster:
            await cluster.create(pod("ends", "python", "-c", script))
            await cluster.phase("ends", "Succeeded")
            assert not processes("333.25")
            await cluster.create(pod("stays", "python", "-c", script + "time.sleep(333.25)"))
            await cluster.phase("stays", "Running")
            await ready(cluster, "stays")
            await soon(lambda: len(processes("333.25")) >= 2)
            await cluster.kube.delete(POD, "stays", "default", grace=0)
            await cluster.gone("stays")
            await soon(lambda: not processes("333.25"))

    run(main())


def test_what_is_missing_is_waited_for(tmp_path: Path) -> None:
    def item(data: dict[str, str]) -> Object:
        metadata = {"name": "late", "namespace": "default"}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            wanting = {"env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "late", "key": "x"}}}]}
            await cluster.create(pod("env", "sh", "-c", "echo $X", container=wanting))
            mounting = {"volumeMounts": [{"name": "v", "mountPath": "/config"}]}
            follow = "until grep -q second /config/x; do sleep 0.02; done; echo `cat /config/x`"
            volumes = [{"name": "v", "configMap": {"name": "late"}}]
            await cluster.create(pod("volume", "sh", "-c", follow, container=mounting, volumes=volumes))
            waiting = await cluster.until("env", lambda p: "waiting" in state(p) and state(p)["waiting"].get("message"))
            assert state(waiting)["waiting"] == {
                "reason": "CreateContainerConfigError",
                "message": 'configmap "late" not found',
            }
            assert waiting["status"]["phase"] == "Pending"
            await cluster.until("volume", lambda p: (p.get("status") or {}).get("containerStatuses"))
            assert (await cluster.events("volume"))[-1] == (
                'FailedMount: MountVolume.SetUp failed for volume "v" : configmap "late" not found'
            )
            await cluster.kube.create(CONFIG_MAP, item({"x": "first"}))
            await cluster.phase("env", "Succeeded")
            assert await cluster.log("env") == "first\n"
            await cluster.phase("volume", "Running")
            await cluster.kube.patch(CONFIG_MAP, "late", "default", {"data": {"x": "second"}})
            await cluster.phase("volume", "Succeeded")

    run(main())


def test_two_pods_listen_on_the_same_port_and_a_service_leads_to_its_pod(tmp_path: Path) -> None:
    script = (
        "import os, socket, time\ns = socket.create_server((os.environ['IP'], 23456))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    container = {"env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}

    async def main() -> None:
        async with small_cluster(tmp_path, nodes=2) as cluster:
            service = await cluster.kube.create(
                SERVICE,
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": {"name": "leader", "namespace": "default"},
                    "spec": {"selector": {"role": "leader"}, "ports": [{"name": "p", "port": 23456}]},
                },
            )
            await cluster.machine.services.until(
                lambda: cluster.machine.services.get("leader", "default") is not None, 5
            )
            leader = pod("a", "python", "-c", script, container=container, metadata={"labels": {"role": "leader"}})
            await cluster.create(leader)
            await cluster.create(pod("b", "python", "-c", script, container=container))
            addresses = [(await cluster.phase(name, "Running"))["status"]["podIP"] for name in "ab"]
            for name in "ab":
                await ready(cluster, name)
            assert addresses[0] == service["spec"]["clusterIP"]
            assert addresses[0] != addresses[1]
            for address in addresses:
                socket.create_connection((address, 23456), 5).close()
            stuck = pod("c", "cat", "/etc/hosts")
            await cluster.create(stuck)
            await cluster.phase("c", "Succeeded")
            assert f"{addresses[0]}\tleader.default.svc.cluster.local" in await cluster.log("c")

    run(main())


def test_init_containers_run_first_and_one_after_the_other(tmp_path: Path) -> None:
    mounts = [{"name": "v", "mountPath": "/shared"}]

    def init(name: str, script: str) -> Object:
        return {"name": name, "image": "any", "command": ["sh", "-c", script], "volumeMounts": mounts}

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            steps = [init("one", "sleep 0.1; echo 1 >> /shared/n"), init("two", "echo 2 >> /shared/n")]
            volumes = [{"name": "v", "emptyDir": {}}]
            both = pod(
                "a", "cat", "/shared/n", container={"volumeMounts": mounts}, initContainers=steps, volumes=volumes
            )
            both["spec"]["containers"].append({**both["spec"]["containers"][0], "name": "other"})
            await cluster.create(both)
            done = await cluster.phase("a", "Succeeded")
            assert await cluster.log("a") == await cluster.log("a", "other") == "1\n2\n"
            assert [s["ready"] for s in done["status"]["initContainerStatuses"]] == [True, True]
            failing = pod("b", "true", initContainers=[init("bad", "exit 7")], volumes=volumes)
            await cluster.create(failing)
            failed = await cluster.phase("b", "Failed")
            assert "waiting" in state(failed)
            assert conditions(failed)["Initialized"] == "False"

    run(main())


def test_logs(tmp_path: Path) -> None:
    async def main() -> None:
        limits = {"max_bytes": 2000, "max_files": 5}
        async with small_cluster(tmp_path, log_limits=limits) as cluster:
            await cluster.create(pod("a", "sh", "-c", "for i in `seq 1 9`; do echo line $i; done; printf 'no newline'"))
            await cluster.phase("a", "Succeeded")
            assert (await cluster.log("a")).splitlines() == [*(f"line {i}" for i in range(1, 10)), "no newline"]
            assert await cluster.log("a", tail=2) == "line 9\nno newline\n"
            assert await cluster.log("a", follow=True, tail=1) == "no newline\n"
            assert await cluster.log("a", limit=8) == "line 1\nl"
            stamped = (await cluster.log("a", timestamps=True)).split()[0]
            assert stamped.startswith("20") and stamped.endswith("Z")
            assert "not found" in await cluster.log("a", previous=True)
            await cluster.create(pod("long", "python", "-c", "print('x' * 40000)\nfor i in range(400): print(i)"))
            await cluster.phase("long", "Succeeded")
            kept = (await cluster.log("long")).splitlines()
            assert kept[-1] == "399"
            slow = "for i in range(300):\n    print('line', i, flush=True)\n    time.sleep(0.003)"
            await cluster.create(pod("slow", "python", "-c", f"import time\n{slow}"))
            await cluster.phase("slow", "Running")
            followers = [cluster.log("slow", follow=True) for _ in range(3)]
            for text in await asyncio.gather(*followers):
                numbers = [int(line.split()[1]) for line in text.splitlines()]
                assert numbers == list(range(numbers[0], 300))
            uid = cluster.pod("slow")["metadata"]["uid"]
            assert len(list((tmp_path / "nodes/node-0/pods" / uid / "logs/main").glob("0.log*"))) == 5

    run(main())


def test_a_node_that_loses_its_power(tmp_path: Path) -> None:
    script = "echo ready; exec sleep 444.5"

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            always = pod("always", "sh", "-c", script)
            always["spec"]["restartPolicy"] = "Always"
            await cluster.create(always)
            await cluster.create(pod("never", "sh", "-c", script))
            for name in ("always", "never"):
                await cluster.phase(name, "Running")
                await ready(cluster, name)
            await cluster.drop_dead("node-0")
            await soon(lambda: not processes("444.5"))
            assert cluster.pod("never")["status"]["phase"] == "Running"  # nobody has said otherwise
            cluster.start(0)
            failed = await cluster.phase("never", "Failed")
            assert failed["status"]["reason"] == "NodeLost"
            assert terminated(failed)["exitCode"] == 137
            back = await cluster.until("always", lambda p: p["status"]["containerStatuses"][0]["restartCount"] == 1)
            assert "running" in state(await cluster.until("always", lambda p: "running" in state(p)))
            assert back["status"]["phase"] == "Running"
            assert len(processes("444.5")) == 1

    run(main())


def test_a_killed_runtime_takes_its_pods_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.create(pod("a", "sh", "-c", "echo ready; exec sleep 555.5"))
            await cluster.phase("a", "Running")
            await ready(cluster, "a")
            (runtime,) = [p for p in psutil.Process().children() if "runtime.main" in " ".join(p.cmdline())]
            runtime.kill()
            assert terminated(await cluster.phase("a", "Failed"))["exitCode"] == 137
            await soon(lambda: not processes("555.5"))
            await cluster.create(pod("b", "true"))
            await cluster.phase("b", "Succeeded")

    run(main())


def test_a_killed_init_process_leaves_no_orphans(tmp_path: Path) -> None:
    """Without a namespace it is the runtime that has to find them."""
    fork = "if os.fork(): os._exit(0)\n"
    daemon = f"import os, time\n{fork}os.setsid()\n{fork}os.fork()\ntime.sleep(666.25)"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {daemon!r}])\nprint('ready', flush=True)\n"

    async def main() -> None:
        async with small_cluster(tmp_path, isolate=False) as cluster:
            await cluster.create(pod("a", "python", "-c", script + "import time; time.sleep(666.25)"))
            await cluster.phase("a", "Running")
            await ready(cluster, "a")
            await soon(lambda: len(processes("666.25")) >= 3)
            (runtime,) = [p for p in psutil.Process().children() if "runtime.main" in " ".join(p.cmdline())]
            for init in runtime.children():
                init.kill()
            assert terminated(await cluster.phase("a", "Failed"))["exitCode"] == 137
            await soon(lambda: not processes("666.25"))
            await cluster.create(pod("b", "true"))
            await cluster.phase("b", "Succeeded")

    run(main())


def test_shared_memory_ends_with_the_container(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            name = f"/dev/shm/evertrain-{os.getpid()}"
            await cluster.create(pod("a", "sh", "-c", f"ls /dev/shm; echo x > {name}; ls /dev/shm"))
            await cluster.phase("a", "Succeeded")
            assert await cluster.log("a") == f"{os.path.basename(name)}\n"
            assert not os.path.exists(name)
            await cluster.create(pod("b", "sh", "-c", f"echo x > {name}", hostIPC=True))
            await cluster.phase("b", "Succeeded")
            os.unlink(name)

    run(main())


def test_a_deadline_ends_the_pod(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            await cluster.create(pod("a", "sleep", "600", activeDeadlineSeconds=1, terminationGracePeriodSeconds=5))
            failed = await cluster.phase("a", "Failed")
            assert failed["status"]["reason"] == "DeadlineExceeded"
            volumes = [{"name": "v", "configMap": {"name": "never-there"}}]
            await cluster.create(pod("b", "true", activeDeadlineSeconds=1, volumes=volumes))
            failed = await cluster.phase("b", "Failed")
            assert failed["status"]["reason"] == "DeadlineExceeded"

    run(main())


def test_without_namespaces_the_need_is_explained(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, isolate=False) as cluster:
            there = [{"name": "v", "hostPath": {"path": str(tmp_path)}}]
            same = {"volumeMounts": [{"name": "v", "mountPath": str(tmp_path)}]}
            await cluster.create(pod("same", "true", container=same, volumes=there))
            await cluster.phase("same", "Succeeded")
            other = {"volumeMounts": [{"name": "v", "mountPath": "/job"}]}
            await cluster.create(pod("other", "true", container=other, volumes=there))
            stuck = await cluster.until("other", lambda p: (p.get("status") or {}).get("containerStatuses"))
            waiting = state(stuck)["waiting"]
            assert waiting["reason"] == "CreateContainerError"
            assert "a private mount namespace is needed" in waiting["message"]

    run(main())


def test_probes(tmp_path: Path) -> None:
    script = "touch /flags/live; echo ready; sleep 0.3; touch /flags/ready; exec sleep 600"

    def probe(file: str) -> Object:
        return {"exec": {"command": ["test", "-e", f"/flags/{file}"]}, "periodSeconds": 1, "failureThreshold": 1}

    async def main() -> None:
        async with small_cluster(tmp_path) as cluster:
            mounts = [{"name": "flags", "mountPath": "/flags"}]
            container = {"volumeMounts": mounts, "readinessProbe": probe("ready"), "livenessProbe": probe("live")}
            container["livenessProbe"] = {**container["livenessProbe"], "initialDelaySeconds": 1}  # type: ignore[dict-item]
            volumes = [{"name": "flags", "emptyDir": {}}]
            probed = pod("a", "sh", "-c", script, container=container, volumes=volumes, terminationGracePeriodSeconds=1)
            probed["spec"]["restartPolicy"] = "Always"
            await cluster.create(probed)
            started = await cluster.phase("a", "Running")
            assert conditions(started)["Ready"] == "False"
            await cluster.until("a", lambda p: conditions(p)["Ready"] == "True")
            uid = cluster.pod("a")["metadata"]["uid"]
            (tmp_path / "nodes/node-0/pods" / uid / "volumes/flags/live").unlink()
            await cluster.until("a", lambda p: p["status"]["containerStatuses"][0]["restartCount"] == 1)
            assert any("Liveness probe failed" in event for event in await cluster.events("a"))

    run(main())


def test_a_node_renews_its_lease(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, lease_seconds=0.2) as cluster:
            times = set()
            async with aio.timeout(20):
                while len(times) < 3:
                    for lease in (await cluster.kube.list(LEASE)).items:
                        assert lease["spec"]["holderIdentity"] == "node-0"
                        times.add(lease["spec"]["renewTime"])
                    await asyncio.sleep(0.02)

    run(main())


def test_the_node_object(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_cluster(tmp_path, labels={"example-key": "example-value"}) as cluster:
            nodes = cluster.machine.nodes
            assert await nodes.until(lambda: "conditions" in ((nodes.get("node-0") or {}).get("status") or {}), 10)
            node = await cluster.kube.get(NODE, "node-0")
            assert node["metadata"]["labels"]["accelerator"] == "huawei-Ascend910"
            assert node["metadata"]["labels"]["example-key"] == "example-value"
            assert node["status"]["allocatable"]["huawei.com/Ascend910"] == "8"
            assert {c["type"]: c["status"] for c in node["status"]["conditions"]}["Ready"] == "True"
            unknown = [{"type": "Ready", "status": "Unknown"}]
            await cluster.kube.patch(NODE, "node-0", None, {"status": {"conditions": unknown}}, status=True)
            assert await nodes.until(
                lambda: any(
                    c["type"] == "Ready" and c["status"] == "True"
                    for c in (nodes.get("node-0") or {})["status"]["conditions"]
                ),
                10,
            )

    run(main())
